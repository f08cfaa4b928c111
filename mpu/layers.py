"""Embeddings and linear layers whose weights are split over a model-parallel group.

Legend: b batch, s sequence, h hidden, p model-parallel size, v padded vocabulary.

With sequence_parallel (arXiv:2205.05198) what a column-parallel layer takes, and what a row-parallel layer or an
embedding gives, is this rank's part of the first dimension, [s/p, ...] in place of [s, ...]; each all-reduce becomes an
all-gather and a reduce-scatter, which move as many bytes.

A layer draws the whole weight on the CPU with its `init_method` and keeps its slice: a layer built after
`torch.manual_seed(s)` holds the same numbers whatever the group, and those of the plain `torch.nn` layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mpu.grads import mark_sequence_parallel
from mpu.initialize import get_model_parallel_group, group_rank_and_size
from mpu.mappings import (
    all_gather_first_dim,
    gather_from_model_parallel_region,
    reduce_from_model_parallel_region,
    reduce_scatter_first_dim,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_model_parallel_region,
)
from mpu.partition import PartitionSpec, vocab_range
from mpu.processor import HAS_AMX, HAS_BF16_PRODUCTS

InitMethod = Callable[[Tensor], object]


def zeros(weight: Tensor) -> None:
    """The init_method of biases."""
    nn.init.zeros_(weight)


class _ParallelLayer(nn.Module):
    """What the layers share: the group, resolved once, and parameters made from specs."""

    def __init__(self, group: ProcessGroup | None, stride: int = 1) -> None:
        super().__init__()
        if stride != 1:  # 2019 cut a fused weight into `stride` blocks and gave each rank a part of every block
            raise ValueError(f"stride={stride}: a rank's part of a weight is contiguous here, so stride must be 1; "
                             "order a fused query-key-value weight [heads, 3, head size] as ParallelSelfAttention does")
        self.group = group if group is not None else get_model_parallel_group()
        self.rank, self.world_size = group_rank_and_size(self.group)
        self._specs: dict[str, PartitionSpec] = {}

    def own_partition_specs(self) -> dict[str, PartitionSpec]:
        return self._specs

    def make_parameter(self, name: str, spec: PartitionSpec, init_method: InitMethod,
                       device: torch.device | str | None) -> Tensor:
        """Register `name` as this rank's slice of a float32 weight; returns the whole weight, on the CPU. On the meta
        device nothing is drawn."""
        if device is not None and torch.device(device).type == "meta":
            full = torch.empty(spec.global_shape, device=device)
        else:
            full = torch.empty(spec.global_shape)
            with torch.no_grad():
                init_method(full)
        parameter = nn.Parameter(spec.split(full, self.rank, self.world_size).to(device))
        if spec.dim is not None:
            parameter.model_parallel = True  # type: ignore[attr-defined]  # clip_grad_norm and DeepSpeed read it
        self._specs[name] = spec
        self.register_parameter(name, parameter)
        return full


class _Linear(torch.autograd.Function):
    """Y = XAᵀ + b. With a group, of a column-parallel layer: in backward the sum of dX over the ranks is under way
    while dA is computed; with sequence_parallel X is gathered a second time instead of being kept whole."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: ProcessGroup | None,
                sequence_parallel: bool) -> Tensor:
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        ctx.save_for_backward(x, weight)
        return F.linear(all_gather_first_dim(x, group)[0] if group and sequence_parallel else x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        # A compiler would have to see what happens between a collective's beginning and its end.
        overlap = not torch.compiler.is_compiling()
        work = dx = d_weight = d_bias = None
        if ctx.group and ctx.sequence_parallel:
            x, work = all_gather_first_dim(x, ctx.group, async_op=overlap)
        if ctx.needs_input_grad[0]:
            dx = dy @ weight
        if work is not None:
            work.wait()
        if ctx.group and dx is not None:
            if ctx.sequence_parallel:
                dx, work = reduce_scatter_first_dim(dx, ctx.group, async_op=overlap)
            else:
                work = dist.all_reduce(dx, group=ctx.group, async_op=overlap)
        dy = dy.reshape(-1, dy.size(-1))
        if ctx.needs_input_grad[1]:
            d_weight = _weight_gradient(dy, x.reshape(-1, x.size(-1)))
        if ctx.needs_input_grad[2]:
            d_bias = dy.sum(dim=0)
        if work is not None:
            work.wait()
        return dx, d_weight, d_bias, None, None


def _weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """dyᵀx: [t, o], [t, i] -> [o, i].

    In bf16 oneDNN with AMX is slow where the left matrix is transposed and long (2 cores, 2,048 tokens: 1.3 TFLOP/s
    where the other products reach 2.5; in 4 parts 1.9). Without AMX parts take longer.
    """
    return _in_parts(dy, x) if HAS_AMX and dy.device.type == "cpu" and dy.dtype == torch.bfloat16 else dy.t() @ x


def _in_parts(dy: Tensor, x: Tensor) -> Tensor:
    """dyᵀx as a sum over at most 4 parts of the tokens, each of which rounds the sum once more."""
    tokens = max(512, -(-dy.size(0) // 4))
    total = dy[:tokens].t() @ x[:tokens]
    for start in range(tokens, dy.size(0), tokens):
        part = slice(start, start + tokens)
        total.addmm_(dy[part].t(), x[part])
    return total


def linear_without_gradient(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear, [..., i] -> [..., o], fast for the few rows of x that generation has.

    Of a CPU's products the fastest (AMX, 2 cores, the weights of 124M, ms a token, F.linear first): one row in bf16
    15 and 7 by a matrix-vector product; 8 rows 15 and 10 as (A xᵀ)ᵀ, in fp32 41 and 33, and 23 where A is stored by
    column. In bf16 without AMX F.linear is the fastest, by up to twice for 8 rows, where the processor has bf16
    products; where it has none (AVX-512 or AVX2 alone) 4 rows take 52 to 61 and 43 by blocks in float32, 16 rows 124 to
    200 and 95. float32 is the same on all.
    """
    rows = x.numel() // x.size(-1)
    if rows >= 4 and x.device.type == "cpu" and x.dtype == torch.bfloat16 and not HAS_BF16_PRODUCTS:
        return _in_float32(x, weight, bias)
    few = rows == 1 or (rows <= 16 and weight.stride(0) != 1 and (x.dtype != torch.float32 or rows > 4))
    if not few or x.device.type != "cpu" or (x.dtype == torch.bfloat16 and not HAS_AMX):
        return F.linear(x, weight, bias)
    shape = (*x.shape[:-1], weight.size(0))
    if rows == 1:
        one = x.reshape(-1)
        return (torch.mv(weight, one) if bias is None else torch.addmv(bias, weight, one)).view(shape)
    y = torch.mm(weight, x.reshape(rows, -1).t()).t()
    by_row = torch.empty_like(y, memory_format=torch.contiguous_format)  # by column, attention would take a slow way
    return (by_row.copy_(y) if bias is None else torch.add(y, bias, out=by_row)).view(shape)


def _in_float32(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear of 16 bits in float32, rounded once at the end; of the weight, 2 MB at a time exist in float32."""
    rows = x.reshape(-1, x.size(-1)).float()
    y = x.new_empty(rows.size(0), weight.size(0))
    for start in range(0, weight.size(0), size := max((1 << 19) // weight.size(1), 1)):
        part = slice(start, start + size)
        product = torch.mm(rows, weight[part].float().t())
        y[:, part] = product if bias is None else product.add_(bias[part])
    return y.view(*x.shape[:-1], weight.size(0))


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, group: ProcessGroup | None = None,
            sequence_parallel: bool = False) -> Tensor:
    """F.linear, by our own backward where that is faster."""
    if not (torch.is_grad_enabled() or torch.compiler.is_compiling() or (group and sequence_parallel)):
        return linear_without_gradient(x, weight, bias)
    if group is None and not (x.device.type == "cpu" and x.dtype == torch.bfloat16):
        return F.linear(x, weight, bias)
    y: Tensor = _Linear.apply(x, weight, bias, group, sequence_parallel)  # type: ignore[no-untyped-call]
    return y


class ColumnParallelLinear(_ParallelLayer):
    """Y = XAᵀ + b, A and b split by output features. Forward: none (an all-gather with gather_output);
    backward: all-reduce of dX. With sequence_parallel: all-gather of X; backward: the same, and reduce-scatter of dX.

    [..., input_size] -> [..., output_size/p], or [..., output_size] with gather_output.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self, input_size: int, output_size: int, bias: bool = True, gather_output: bool = True,
                 init_method: InitMethod = nn.init.xavier_normal_, stride: int = 1,
                 keep_master_weight_for_test: bool = False, *, sequence_parallel: bool = False,
                 group: ProcessGroup | None = None, device: torch.device | str | None = None) -> None:
        super().__init__(group, stride)
        self.gather_output, self.sequence_parallel = gather_output, sequence_parallel
        full = self.make_parameter("weight", PartitionSpec((output_size, input_size), 0), init_method, device)
        self.master_weight = full if keep_master_weight_for_test else None
        if bias:
            self.make_parameter("bias", PartitionSpec((output_size,), 0), zeros, device)
        else:
            self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        group = self.group if self.world_size > 1 else None
        y = _linear(x, self.weight, self.bias, group, self.sequence_parallel)
        return gather_from_model_parallel_region(y, self.group) if self.gather_output else y


class RowParallelLinear(_ParallelLayer):
    """Y = XAᵀ + b, A split by input features, b replicated and added once, after the sum. Forward: all-reduce
    of Y; backward: none. With sequence_parallel: reduce-scatter of Y; backward: all-gather of dY.

    [..., input_size/p] (or [..., input_size] unless input_is_parallel) -> [..., output_size].
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self, input_size: int, output_size: int, bias: bool = True, input_is_parallel: bool = False,
                 init_method: InitMethod = nn.init.xavier_normal_, stride: int = 1,
                 keep_master_weight_for_test: bool = False, *, sequence_parallel: bool = False,
                 group: ProcessGroup | None = None, device: torch.device | str | None = None) -> None:
        super().__init__(group, stride)
        self.input_is_parallel = input_is_parallel
        self.reduce = reduce_scatter_to_sequence_parallel_region if sequence_parallel else \
            reduce_from_model_parallel_region
        full = self.make_parameter("weight", PartitionSpec((output_size, input_size), 1), init_method, device)
        self.master_weight = full if keep_master_weight_for_test else None
        if bias:
            self.make_parameter("bias", PartitionSpec((output_size,)), zeros, device)
            if sequence_parallel:
                mark_sequence_parallel([self.get_parameter("bias")])
        else:
            self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        if not self.input_is_parallel:
            x = scatter_to_model_parallel_region(x, self.group)
        if self.world_size == 1:
            return _linear(x, self.weight, self.bias)
        y = self.reduce(_linear(x, self.weight, None), self.group)
        return y if self.bias is None else y + self.bias


class _Rows(torch.autograd.Function):
    """weight[ids], whose gradient goes to `collect`."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, collect: Callable[[Tensor, Tensor], object]) -> Tensor:
        ctx.collect = collect
        ctx.save_for_backward(ids)
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        (ids,) = ctx.saved_tensors
        ctx.collect(ids.reshape(-1), grad.reshape(-1, grad.size(-1)))
        return None, None, None


class VocabParallelEmbedding(_ParallelLayer):
    """Rows split by token id. Forward: all-reduce (a rank gives zero for ids it does not hold); backward: none. With
    sequence_parallel: reduce-scatter; backward: all-gather.

    [...] int64 -> [..., h]. `padded_size` rows are held over all ranks (default: num_embeddings); the rows past
    num_embeddings are zero.
    """

    weight: Tensor

    def __init__(self, num_embeddings: int, embedding_dim: int, init_method: InitMethod = nn.init.xavier_normal_, *,
                 padded_size: int | None = None, sequence_parallel: bool = False, group: ProcessGroup | None = None,
                 device: torch.device | str | None = None) -> None:
        super().__init__(group)
        self.reduce = reduce_scatter_to_sequence_parallel_region if sequence_parallel else \
            reduce_from_model_parallel_region
        padded_size = padded_size or num_embeddings
        self.num_embeddings = num_embeddings
        self.vocab_start_index, self.vocab_end_index = vocab_range(padded_size, self.rank, self.world_size)
        self.make_parameter("weight", PartitionSpec((num_embeddings, embedding_dim), 0, padded_size), init_method,
                            device)

    def forward(self, ids: Tensor, collect: Callable[[Tensor, Tensor], object] | None = None) -> Tensor:
        """collect: takes the rows' gradients during backward, this rank's row numbers [t] and [t, h], in the place of
        autograd, which would sum them in a matrix of the weight's size."""

        def rows_of(ids: Tensor) -> Tensor:
            if collect is None:
                return F.embedding(ids, self.weight)
            rows: Tensor = _Rows.apply(ids, self.weight, collect)  # type: ignore[no-untyped-call]
            return rows

        if self.world_size == 1:
            return rows_of(ids)
        elsewhere = (ids < self.vocab_start_index) | (ids >= self.vocab_end_index)
        rows = rows_of((ids - self.vocab_start_index).masked_fill(elsewhere, 0))
        return self.reduce(rows.masked_fill(elsewhere.unsqueeze(-1), 0.0), self.group)


class ParallelEmbedding(_ParallelLayer):
    """Columns split by embedding dimension. Forward: all-gather; backward: none.

    [...] int64 -> [..., h].
    """

    weight: Tensor

    def __init__(self, num_embeddings: int, embedding_dim: int, init_method: InitMethod = nn.init.xavier_normal_,
                 keep_master_weight_for_test: bool = False, *, group: ProcessGroup | None = None,
                 device: torch.device | str | None = None) -> None:
        super().__init__(group)
        full = self.make_parameter("weight", PartitionSpec((num_embeddings, embedding_dim), 1), init_method, device)
        self.master_weight = full if keep_master_weight_for_test else None

    def forward(self, ids: Tensor) -> Tensor:
        return gather_from_model_parallel_region(F.embedding(ids, self.weight), self.group)
