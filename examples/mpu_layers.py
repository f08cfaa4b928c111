"""The MLP of f_and_g.py with the layers of `mpu`, which contain f and g, and a transformer layer of `mpu`."""

import math

import torch
from ranks import run, say
from torch.nn.functional import gelu

import mpu


def main(rank: int, world_size: int) -> None:
    mpu.initialize_model_parallel(world_size)  # all ranks share one model
    h, width = 6, 8
    # `up` has operation f and this rank's columns, `down` this rank's rows and operation g.
    up = mpu.ColumnParallelLinear(h, width, gather_output=False)
    down = mpu.RowParallelLinear(width, h, input_is_parallel=True)
    x = torch.randn(3, h, requires_grad=True)
    y = down(gelu(up(x)))
    y.sum().backward()
    say(f"up {list(up.weight.shape)}, down {list(down.weight.shape)}, output {list(y.shape)}")

    # Attention is split in the same way, by heads: QKV by columns, the output matrix by rows.
    config = mpu.TransformerConfig(hidden_size=32, num_attention_heads=4, ffn_hidden_size=128)
    layer = mpu.ParallelTransformerLayer(config, init_method_for=lambda name: torch.nn.init.xavier_normal_)
    y = layer(torch.randn(5, 2, 32))  # [sequence, batch, hidden]
    held = sum(p.numel() for p in layer.parameters())
    whole = sum(math.prod(spec.global_shape) for spec in mpu.partition_specs(layer).values())
    say(f"{held:,} of the layer's {whole:,} weights, output {list(y.shape)} with the sum {y.sum().item():.3f}")
    mpu.destroy_model_parallel()


if __name__ == "__main__":
    run(main)
