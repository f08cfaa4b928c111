"""A rank of an arm of `benchmarks/blocks.py`, in a process of its own: GPT-2 blocks, ours or of plain torch.nn.

    python benchmarks/block_arms.py KIND SIZE RANK SHAPE FOLDER     # started by benchmarks/blocks.py

Legend: b batch, s sequence, h hidden, n heads, d head size, p model-parallel size.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works in a clone that is not installed

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import mpu
from megatron.gpt2.device import DTYPES, set_allocator
from megatron.gpt2.model.gpt2 import seeded_normal

TIMEOUT = 300.0  # seconds that one order to a worker, or one collective, may take


@dataclass(frozen=True)
class Shape:
    layers: int = 4
    hidden: int = 768
    heads: int = 12
    seq_length: int = 1024
    batch: int = 2


class PlainBlock(nn.Module):
    """The block as one writes it in torch.nn; fused QKV is head-major, so that it can be split. [b, s, h] -> same."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        h = shape.hidden
        self.head_size = h // shape.heads
        self.input_layernorm, self.post_attention_layernorm = nn.LayerNorm(h), nn.LayerNorm(h)
        self.query_key_value, self.dense = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.dense_h_to_4h, self.dense_4h_to_h = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        qkv = self.query_key_value(self.input_layernorm(x)).view(b, s, -1, 3, self.head_size)  # [b, s, n/p, 3, d]
        q, k, v = qkv.permute(3, 0, 2, 1, 4).unbind(0)  # 3 views [b, n/p, s, d]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dense(y.transpose(1, 2).reshape(b, s, -1))  # [b, n/p, s, d] -> [b, s, h/p]
        inside = F.gelu(self.dense_h_to_4h(self.post_attention_layernorm(x)), approximate="tanh")
        out: Tensor = x + self.dense_4h_to_h(inside)
        return out


def weight(layer: int, name: str) -> Callable[[Tensor], object]:
    """Fills the whole weight of that name, alike in every arm."""
    return seeded_normal(7, f"{layer}.{name.split('.')[-2]}", 0.02)


def our_blocks(shape: Shape, size: int) -> nn.Module:
    mpu.initialize_model_parallel(size)

    def block(layer: int) -> nn.Module:
        return mpu.ParallelTransformerLayer(
            mpu.TransformerConfig(shape.hidden, shape.heads, 4 * shape.hidden),
            init_method_for=lambda name: weight(layer, name),
        )

    return nn.Sequential(*map(block, range(shape.layers)))


def plain_blocks(shape: Shape, size: int) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    blocks = nn.Sequential(*(PlainBlock(shape) for _ in range(shape.layers)))
    with torch.no_grad():
        for name, parameter in blocks.named_parameters():
            layer, rest = name.split(".", 1)
            if parameter.dim() == 2:
                weight(int(layer), rest)(parameter)
            elif "layernorm" not in name:
                parameter.zero_()
    if size > 1:
        mesh = init_device_mesh("cpu", (size,))
        for block in blocks:
            parallelize_module(
                block,
                mesh,
                {
                    "query_key_value": ColwiseParallel(),
                    "dense": RowwiseParallel(),
                    "dense_h_to_4h": ColwiseParallel(),
                    "dense_4h_to_h": RowwiseParallel(),
                },
            )
    return blocks


def work(kind: str, size: int, rank: int, shape: Shape, folder: str) -> None:
    """A rank of an arm: obeys lines "gate DTYPE" and "time DTYPE ITERATIONS" from stdin, answers each with a JSON line,
    and sleeps in between. Ends with its stdin."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not mix with the answers
    set_allocator(torch.device("cpu"))
    torch.set_num_threads(max(1, 2 // size))
    if size > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/{kind}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=TIMEOUT),
        )
    time_first = kind == "ours"  # [s, b, h] here, [b, s, h] there
    draw = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(shape.batch, shape.seq_length, shape.hidden, generator=draw) for _ in range(2))
    if time_first:
        x, dy = x.transpose(0, 1).contiguous(), dy.transpose(0, 1).contiguous()
    make = our_blocks if kind == "ours" else plain_blocks
    models = {
        name: (
            make(shape, size).to(DTYPES[name]).train(),
            x.to(DTYPES[name], copy=True).requires_grad_(),
            dy.to(DTYPES[name]),
        )
        for name in ("fp32", "bf16")
    }

    def iteration(dtype: str) -> Tensor:
        model, x, dy = models[dtype]
        model.zero_grad(set_to_none=True)
        x.grad = None
        y: Tensor = model(x)
        y.backward(dy)  # type: ignore[no-untyped-call]
        return y

    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        order, dtype, *rest = line.split()
        if order == "gate":
            y, grad = iteration(dtype).detach(), models[dtype][1].grad
            assert grad is not None
            for name, value in (("output", y), ("input_gradient", grad)):
                value = value.transpose(0, 1) if time_first else value
                np.save(f"{folder}/{kind}{size}_{rank}_{dtype}_{name}.npy", value.float().contiguous().numpy())
            print(json.dumps({"done": True}), file=answers)
            continue
        if size > 1:
            dist.barrier()
        start = time.perf_counter()
        for _ in range(int(rest[0])):
            iteration(dtype)
        print(json.dumps({"seconds": (time.perf_counter() - start) / int(rest[0])}), file=answers)
    if size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    work(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Shape(**json.loads(sys.argv[4])), sys.argv[5])
