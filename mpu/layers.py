"""Embeddings and linear layers whose weights are split over a model-parallel group.

Legend: b batch, s sequence, h hidden, p model-parallel size, v padded vocabulary.

A layer draws the whole weight on the CPU with its `init_method` and keeps its slice: a layer built after
`torch.manual_seed(s)` holds the same numbers whatever the group, and those of the plain `torch.nn` layer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mpu.initialize import get_model_parallel_group, group_rank_and_size
from mpu.mappings import (
    copy_to_model_parallel_region,
    gather_from_model_parallel_region,
    reduce_from_model_parallel_region,
    scatter_to_model_parallel_region,
)
from mpu.partition import PartitionSpec, vocab_range

InitMethod = Callable[[Tensor], object]


def zeros(weight: Tensor) -> None:
    """The init_method of biases."""
    nn.init.zeros_(weight)


class _ParallelLayer(nn.Module):
    """What the layers share: the group, resolved once, and parameters made from specs."""

    def __init__(self, group: ProcessGroup | None) -> None:
        super().__init__()
        self.group = group if group is not None else get_model_parallel_group()
        self.rank, self.world_size = group_rank_and_size(self.group)
        self._specs: dict[str, PartitionSpec] = {}

    def own_partition_specs(self) -> dict[str, PartitionSpec]:
        return self._specs

    def make_parameter(self, name: str, spec: PartitionSpec, init_method: InitMethod,
                       device: torch.device | str | None) -> Tensor:
        """Register `name` as this rank's slice of a float32 weight; returns the whole weight, on the CPU."""
        full = torch.empty(spec.global_shape)
        with torch.no_grad():
            init_method(full)
        parameter = nn.Parameter(spec.split(full, self.rank, self.world_size).to(device))
        if spec.dim is not None:
            parameter.model_parallel = True  # type: ignore[attr-defined]  # clip_grad_norm and DeepSpeed read it
        self._specs[name] = spec
        self.register_parameter(name, parameter)
        return full


class ColumnParallelLinear(_ParallelLayer):
    """Y = XAᵀ + b, A and b split by output features. Forward: none (an all-gather with gather_output);
    backward: all-reduce of dX.

    [..., input_size] -> [..., output_size/p], or [..., output_size] with gather_output.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self, input_size: int, output_size: int, *, bias: bool = True, gather_output: bool = True,
                 init_method: InitMethod = nn.init.xavier_normal_, keep_master_weight_for_test: bool = False,
                 group: ProcessGroup | None = None, device: torch.device | str | None = None) -> None:
        super().__init__(group)
        self.gather_output = gather_output
        full = self.make_parameter("weight", PartitionSpec((output_size, input_size), 0), init_method, device)
        self.master_weight = full if keep_master_weight_for_test else None
        if bias:
            self.make_parameter("bias", PartitionSpec((output_size,), 0), zeros, device)
        else:
            self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(copy_to_model_parallel_region(x, self.group), self.weight, self.bias)
        return gather_from_model_parallel_region(y, self.group) if self.gather_output else y


class RowParallelLinear(_ParallelLayer):
    """Y = XAᵀ + b, A split by input features, b replicated and added once, after the sum. Forward: all-reduce
    of Y; backward: none.

    [..., input_size/p] (or [..., input_size] unless input_is_parallel) -> [..., output_size].
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self, input_size: int, output_size: int, *, bias: bool = True, input_is_parallel: bool = False,
                 init_method: InitMethod = nn.init.xavier_normal_, keep_master_weight_for_test: bool = False,
                 group: ProcessGroup | None = None, device: torch.device | str | None = None) -> None:
        super().__init__(group)
        self.input_is_parallel = input_is_parallel
        full = self.make_parameter("weight", PartitionSpec((output_size, input_size), 1), init_method, device)
        self.master_weight = full if keep_master_weight_for_test else None
        if bias:
            self.make_parameter("bias", PartitionSpec((output_size,)), zeros, device)
        else:
            self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        if not self.input_is_parallel:
            x = scatter_to_model_parallel_region(x, self.group)
        if self.world_size == 1:
            return F.linear(x, self.weight, self.bias)
        y = reduce_from_model_parallel_region(F.linear(x, self.weight), self.group)
        return y if self.bias is None else y + self.bias


class VocabParallelEmbedding(_ParallelLayer):
    """Rows split by token id. Forward: all-reduce (a rank gives zero for ids it does not hold); backward: none.

    [...] int64 -> [..., h]. `padded_size` rows are held over all ranks (default: num_embeddings); the rows past
    num_embeddings are zero.
    """

    weight: Tensor

    def __init__(self, num_embeddings: int, embedding_dim: int, *, init_method: InitMethod = nn.init.xavier_normal_,
                 padded_size: int | None = None, group: ProcessGroup | None = None,
                 device: torch.device | str | None = None) -> None:
        super().__init__(group)
        padded_size = padded_size or num_embeddings
        self.num_embeddings = num_embeddings
        self.vocab_start, self.vocab_end = vocab_range(padded_size, self.rank, self.world_size)
        self.make_parameter("weight", PartitionSpec((num_embeddings, embedding_dim), 0, padded_size), init_method,
                            device)

    def forward(self, ids: Tensor) -> Tensor:
        if self.world_size == 1:
            return F.embedding(ids, self.weight)
        elsewhere = (ids < self.vocab_start) | (ids >= self.vocab_end)
        rows = F.embedding((ids - self.vocab_start).masked_fill(elsewhere, 0), self.weight)
        return reduce_from_model_parallel_region(rows.masked_fill(elsewhere.unsqueeze(-1), 0.0), self.group)


class ParallelEmbedding(_ParallelLayer):
    """Columns split by embedding dimension. Forward: all-gather; backward: none.

    [...] int64 -> [..., h].
    """

    weight: Tensor

    def __init__(self, num_embeddings: int, embedding_dim: int, *, init_method: InitMethod = nn.init.xavier_normal_,
                 keep_master_weight_for_test: bool = False, group: ProcessGroup | None = None,
                 device: torch.device | str | None = None) -> None:
        super().__init__(group)
        full = self.make_parameter("weight", PartitionSpec((num_embeddings, embedding_dim), 1), init_method, device)
        self.master_weight = full if keep_master_weight_for_test else None

    def forward(self, ids: Tensor) -> Tensor:
        return gather_from_model_parallel_region(F.embedding(ids, self.weight), self.group)
