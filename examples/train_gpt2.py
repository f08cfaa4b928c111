"""A small character-level GPT-2, trained with `mpu` on a text file, with tensor parallelism or data parallelism:

    python examples/train_gpt2.py LICENSE --tensor 2     # two ranks hold one model together
    python examples/train_gpt2.py LICENSE --data 2       # two ranks hold a model each, and share the batch
    python examples/train_gpt2.py LICENSE                # one rank

The losses are equal.
"""

import argparse
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from ranks import run
from torch import Tensor, nn

import mpu

LENGTH, BATCH, HIDDEN, LAYERS = 64, 8, 64, 2


class GPT2(nn.Module):
    """tokens [s, b] -> logits [s, b, v/tp], this rank's columns of the vocabulary."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        init = partial(nn.init.normal_, std=0.02)
        config = mpu.TransformerConfig(hidden_size=HIDDEN, num_attention_heads=4, ffn_hidden_size=4 * HIDDEN)
        padded = mpu.padded_vocab_size(vocab_size, 2, mpu.get_tensor_model_parallel_world_size())
        self.words = mpu.VocabParallelEmbedding(vocab_size, HIDDEN, init, padded_size=padded)
        self.positions = mpu.PositionEmbedding(LENGTH, HIDDEN, init)
        self.layers = nn.ModuleList(
            mpu.ParallelTransformerLayer(config, init_method_for=lambda name: init) for _ in range(LAYERS)
        )
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.positions(self.words(tokens))
        for layer in self.layers:
            x = layer(x)
        x = mpu.copy_to_model_parallel_region(self.norm(x))  # f: the head is split by columns
        return nn.functional.linear(x, self.words.weight)  # the head shares the embeddings' weight


def batch_of(ids: Tensor, step: int) -> Tensor:
    """Return random samples of the text, [s + 1, b], which are equal on every rank."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(ids) - LENGTH, (BATCH,), generator=generator)
    return torch.stack([ids[start : start + LENGTH + 1] for start in starts.tolist()], dim=1)


def average_gradients(model: nn.Module) -> None:
    """Average the gradients over the data-parallel ranks."""
    group, size = mpu.get_data_parallel_group(), mpu.get_data_parallel_world_size()
    for parameter in model.parameters():
        if size > 1 and parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= size


def train(rank: int, world_size: int, *, file: str, tensor: int, steps: int) -> None:
    mpu.initialize_model_parallel(tensor)
    text = Path(file).read_text(encoding="utf-8")
    characters = sorted(set(text))
    ids = torch.tensor([characters.index(c) for c in text])
    model = GPT2(len(characters))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    own = slice(mpu.get_data_parallel_rank(), None, mpu.get_data_parallel_world_size())  # this rank's part of a batch
    for step in range(steps):
        part = batch_of(ids, step)[:, own]
        logits = model(part[:-1])
        loss = mpu.vocab_parallel_cross_entropy(logits, part[1:].contiguous(), vocab_size=len(characters)).mean()
        optimizer.zero_grad()
        loss.backward()
        average_gradients(model)
        mpu.clip_grad_norm(list(model.parameters()), max_norm=1.0)
        optimizer.step()
        if step % 50 == 0 or step == steps - 1:
            mean = loss.detach().clone()
            dist.all_reduce(mean)  # ranks that share one model have equal losses
            if rank == 0:
                print(f"step {step:4}  loss {mean.item() / world_size:.3f}", flush=True)
    mpu.destroy_model_parallel()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--tensor", type=int, default=1, help="tensor-parallel ranks: they hold one model together")
    parser.add_argument("--data", type=int, default=1, help="data-parallel models: they share each batch")
    parser.add_argument("--steps", type=int, default=101)
    args = parser.parse_args()
    run(partial(train, file=args.file, tensor=args.tensor, steps=args.steps), world_size=args.tensor * args.data)
