"""The one slicing rule: which part of a parameter a model-parallel rank owns.

Initialisation, checkpoints, merging and conversion all ask here, with ranks and sizes as plain integers, so that
no process group is needed to reason about a layout. A parameter is either replicated or split evenly along one
dimension. A vocabulary is padded first, so that it splits evenly; padding rows exist in memory alone and are
never part of a box.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn


def divide(numerator: int, denominator: int) -> int:
    """`numerator / denominator`, which must be whole."""
    if numerator % denominator:
        raise ValueError(f"{numerator} is not divisible by {denominator}")
    return numerator // denominator


def padded_vocab_size(vocab_size: int, divisible_by: int, model_parallel_size: int) -> int:
    """The least multiple of both numbers that holds the vocabulary.

    The least common multiple, not the product that Megatron takes, so that 50,304 stays 50,304 for every
    power of two up to 128 and the shapes do not depend on the layout.
    """
    multiple = math.lcm(divisible_by, model_parallel_size)
    return -(-vocab_size // multiple) * multiple


def vocab_range(padded_size: int, rank: int, world_size: int) -> tuple[int, int]:
    """First id and one past the last id that `rank` holds."""
    part = divide(padded_size, world_size)
    return rank * part, (rank + 1) * part


@dataclass(frozen=True)
class Box:
    """A rectangular part of a global tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.shape, strict=True))


@dataclass(frozen=True)
class PartitionSpec:
    """How a parameter of `global_shape` (true, without padding) lies on the ranks.

    dim: the dimension that is split, or None where every rank holds the whole.
    padded_size: the size of `dim` in memory, over all ranks (default: its true size).
    """

    global_shape: tuple[int, ...]
    dim: int | None = None
    padded_size: int | None = None

    def local_shape(self, world_size: int) -> tuple[int, ...]:
        """The shape in a rank's memory, padding included."""
        shape = list(self.global_shape)
        if self.dim is not None:
            shape[self.dim] = divide(self.padded_size or shape[self.dim], world_size)
        return tuple(shape)

    def box(self, rank: int, world_size: int) -> Box:
        """The true entries that `rank` holds; empty where it holds padding alone."""
        offset, shape = [0] * len(self.global_shape), list(self.global_shape)
        if self.dim is not None:
            whole = shape[self.dim]
            part = self.local_shape(world_size)[self.dim]
            start = min(rank * part, whole)
            offset[self.dim], shape[self.dim] = start, min(start + part, whole) - start
        return Box(tuple(offset), tuple(shape))

    def true_part(self, local: Tensor, rank: int, world_size: int) -> Tensor:
        """The view of a rank's tensor that leaves out its padding."""
        if self.dim is None:
            return local
        return local.narrow(self.dim, 0, self.box(rank, world_size).shape[self.dim])

    def split(self, full: Tensor, rank: int, world_size: int) -> Tensor:
        """`rank`'s tensor out of the true global one; padding is zero. A new tensor."""
        assert tuple(full.shape) == self.global_shape, (full.shape, self.global_shape)
        local = full.new_zeros(self.local_shape(world_size))
        self.true_part(local, rank, world_size).copy_(full[self.box(rank, world_size).slices()])
        return local

    def merge(self, shards: list[Tensor]) -> Tensor:
        """The true global tensor out of every rank's, padding dropped. The inverse of `split`."""
        if self.dim is None:
            return shards[0].clone()
        size = len(shards)
        return torch.cat([self.true_part(s, r, size) for r, s in enumerate(shards)], dim=self.dim)


def partition_specs(module: nn.Module) -> dict[str, PartitionSpec]:
    """The spec of every parameter of `module`, by name.

    A layer that splits its parameters says so in `own_partition_specs()`; every other parameter is replicated.
    """
    specs: dict[str, PartitionSpec] = {}
    for prefix, child in module.named_modules():
        own = child.own_partition_specs() if hasattr(child, "own_partition_specs") else {}
        for name, parameter in child.named_parameters(recurse=False):
            full_name = f"{prefix}.{name}" if prefix else name
            specs[full_name] = own.get(name, PartitionSpec(tuple(parameter.shape)))
    return specs
