"""Embeddings and linear layers whose weights are split over a model-parallel group (arXiv:1909.08053, section 3).

Legend: b batch, s sequence, h hidden, i input and o output features of this rank, p model-parallel size, t tokens.

With sequence_parallel (arXiv:2205.05198) the input of a column-parallel layer, and the output of a row-parallel layer
or an embedding, is this rank's part of the first dimension: [s/p, ...] in place of [s, ...]. Each all-reduce becomes an
all-gather and a reduce-scatter, which together move as many bytes.

A layer draws the whole weight on the CPU with its `init_method` and keeps its slice. A layer that is built after
`torch.manual_seed(s)` therefore holds the same numbers at every size of the group, and those of the plain `torch.nn`
layer.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mpu import kernels
from mpu.grads import mark_sequence_parallel
from mpu.initialize import get_tensor_model_parallel_group, group_rank_and_size
from mpu.mappings import (
    all_gather_first_dim,
    gather_from_model_parallel_region,
    reduce_from_model_parallel_region,
    reduce_scatter_first_dim,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_model_parallel_region,
)
from mpu.partition import PartitionSpec, check_ids, local_ids

InitMethod = Callable[[Tensor], object]
Device = torch.device | str | None
# Takes dY [t, o] and X [t, i], either of which may be in parts, and gives dYᵀX [o, i] to autograd, or None if the
# gradient goes another way: into a buffer, or later.
WeightGradientSink = Callable[[Any, Any], Tensor | None]


class ParallelLayer(nn.Module):
    """The base of all layers: the group, which is resolved once, and parameters that are made from specs."""

    def __init__(self, group: ProcessGroup | None, device: Device, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.group = group if group is not None else get_tensor_model_parallel_group()
        self.rank, self.world_size = group_rank_and_size(self.group)
        self.sequence_parallel = sequence_parallel
        self._device = device
        self._specs: dict[str, PartitionSpec] = {}

    def partition_specs(self) -> dict[str, PartitionSpec]:
        """The spec of each parameter of this layer, by name."""
        return self._specs

    def make_parameter(self, name: str, spec: PartitionSpec, init_method: InitMethod) -> Tensor:
        """Register this rank's slice of a float32 weight as the parameter `name`, and return the whole weight, which is
        drawn on the CPU whatever the device. Nothing is drawn for the meta device."""
        if self._device is not None and torch.device(self._device).type == "meta":
            full = torch.empty(spec.global_shape, device=self._device)
        else:
            full = torch.empty(spec.global_shape)
            with torch.no_grad():
                init_method(full)
        parameter = nn.Parameter(spec.split(full, self.rank, self.world_size).to(self._device))
        if spec.dim is not None:
            parameter.model_parallel = True  # type: ignore[attr-defined]  # clip_grad_norm and DeepSpeed read it
        self._specs[name] = spec
        self.register_parameter(name, parameter)
        return full

    def reduce(self, x: Tensor) -> Tensor:
        """The sum of x [s, ...] over the ranks, or this rank's [s/p, ...] of it with sequence_parallel."""
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(x, self.group)
        return reduce_from_model_parallel_region(x, self.group)


class _Linear(torch.autograd.Function):
    """Y = XAᵀ + b, with f of the paper before it if there is a group: then A and b are split by output features.

    In backward the sum of dX over the ranks is under way while dA is computed. With sequence parallelism X is gathered
    a second time in backward instead of being kept whole.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        sink: WeightGradientSink,
        group: ProcessGroup | None,
        sequence_parallel: bool,
    ) -> Tensor:
        ctx.sink, ctx.group, ctx.sequence_parallel = sink, group, sequence_parallel
        ctx.save_for_backward(x, weight)
        if group is not None and sequence_parallel:
            x, _ = all_gather_first_dim(x, group)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        # torch.compile cannot trace a collective that begins here and is waited for later.
        overlap = not torch.compiler.is_compiling()
        work = dx = d_weight = d_bias = None
        if ctx.sequence_parallel:
            x, work = all_gather_first_dim(x, ctx.group, async_op=overlap)
        if ctx.needs_input_grad[0]:
            dx = dy @ weight
        if work is not None:
            work.wait()
        if dx is not None and ctx.group is not None:
            if ctx.sequence_parallel:
                dx, work = reduce_scatter_first_dim(dx, ctx.group, async_op=overlap)
            else:
                work = dist.all_reduce(dx, group=ctx.group, async_op=overlap)
        dy = dy.reshape(-1, dy.size(-1))  # [..., o] -> [t, o]
        if ctx.needs_input_grad[1]:
            d_weight = ctx.sink(dy, x.reshape(-1, x.size(-1)))  # dYᵀX; X [..., i] -> [t, i]
        if ctx.needs_input_grad[2]:
            d_bias = dy.sum(dim=0)
        if work is not None:
            work.wait()
        return dx, d_weight, d_bias, None, None, None


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    sink: WeightGradientSink | None = None,
    group: ProcessGroup | None = None,
    sequence_parallel: bool = False,
) -> Tensor:
    """XAᵀ + b: [..., i], [o, i], [o] -> [..., o]. sink: makes the weight gradient in backward (default: the fastest
    product). group: backward sums dX over it. sequence_parallel: x is this rank's [s/p, ...] of the group's input."""
    gradient = torch.is_grad_enabled() or torch.compiler.is_compiling()
    if not gradient and not sequence_parallel:
        return kernels.linear_without_gradient(x, weight, bias)
    x, weight, bias = kernels.cast_for_autocast(x, weight, bias)
    sink = sink or kernels.weight_gradient_kernel(x)
    if sink is None and group is None:
        return F.linear(x, weight, bias)
    sink = sink or kernels.weight_gradient
    return _Linear.apply(x, weight, bias, sink, group, sequence_parallel)  # type: ignore[no-any-return]


class _ParallelLinear(ParallelLayer):
    """A linear layer: A [output_size, input_size], split by its dimension `dim`, and b, split as the outputs are."""

    weight: Tensor
    bias: Tensor | None

    def _make_weights(
        self, shape: tuple[int, int], dim: int, bias: bool, init_method: InitMethod, stride: int, keep_master: bool
    ) -> None:
        if stride != 1:  # 2019 cut a fused weight into `stride` blocks and gave each rank a part of every block
            raise ValueError(
                f"stride={stride}: a rank's part of a weight is contiguous here, so stride must be 1; "
                "order a fused query-key-value weight [heads, 3, head size] as ParallelSelfAttention does"
            )
        full = self.make_parameter("weight", PartitionSpec(shape, dim), init_method)
        self.master_weight = full if keep_master else None
        # A schedule that computes weight gradients later puts a function here.
        self.weight_gradient_sink: WeightGradientSink | None = None
        self.register_parameter("bias", None)
        if bias:
            self.make_parameter("bias", PartitionSpec(shape[:1], 0 if dim == 0 else None), nn.init.zeros_)

    def weight_gradient(self, dy: Any, x: Any) -> Tensor:
        """dYᵀX of the two tensors that the sink was given: [t, output_size], [t, input_size], of this rank."""
        return kernels.weight_gradient(dy, x)


class ColumnParallelLinear(_ParallelLinear):
    """Y = XAᵀ + b, A and b split by output features. Forward: nothing (an all-gather of Y with gather_output);
    backward: all-reduce of dX. With sequence_parallel: all-gather of X; backward: all-gather of X, reduce-scatter of
    dX.

    [s, ..., input_size], or [s/p, ..., input_size] with sequence_parallel -> [s, ..., output_size/p], or [s, ...,
    output_size] with gather_output. Arguments by position are those of Megatron in 2019. Raises ValueError if
    output_size is not divisible by p, or stride is not 1.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        gather_output: bool = True,
        init_method: InitMethod = nn.init.xavier_normal_,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        *,
        sequence_parallel: bool = False,
        group: ProcessGroup | None = None,
        device: Device = None,
    ) -> None:
        super().__init__(group, device, sequence_parallel)
        self.gather_output = gather_output
        self._make_weights((output_size, input_size), 0, bias, init_method, stride, keep_master_weight_for_test)

    def forward(self, x: Tensor) -> Tensor:
        """[..., input_size] -> [..., output_size/p], or [..., output_size] with gather_output."""
        group = self.group if self.world_size > 1 else None
        is_part = self.sequence_parallel and group is not None
        y = linear(x, self.weight, self.bias, self.weight_gradient_sink, group, is_part)
        return gather_from_model_parallel_region(y, self.group) if self.gather_output else y


class RowParallelLinear(_ParallelLinear):
    """Y = XAᵀ + b, A split by input features, b replicated and added once, after the sum. Forward: all-reduce of Y;
    backward: nothing. With sequence_parallel: reduce-scatter of Y; backward: all-gather of dY.

    [s, ..., input_size/p] (or [s, ..., input_size] unless input_is_parallel) -> [s, ..., output_size], or [s/p, ...,
    output_size] with sequence_parallel. Arguments by position are those of Megatron in 2019. Raises ValueError if
    input_size is not divisible by p, or stride is not 1.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        input_is_parallel: bool = False,
        init_method: InitMethod = nn.init.xavier_normal_,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        *,
        sequence_parallel: bool = False,
        group: ProcessGroup | None = None,
        device: Device = None,
    ) -> None:
        super().__init__(group, device, sequence_parallel)
        self.input_is_parallel = input_is_parallel
        self._make_weights((output_size, input_size), 1, bias, init_method, stride, keep_master_weight_for_test)
        if bias and sequence_parallel:
            mark_sequence_parallel([self.get_parameter("bias")])

    def forward(self, x: Tensor) -> Tensor:
        """[..., input_size/p], or [..., input_size] unless input_is_parallel -> [..., output_size]."""
        if not self.input_is_parallel:
            x = scatter_to_model_parallel_region(x, self.group)
        if self.world_size == 1:
            return linear(x, self.weight, self.bias, self.weight_gradient_sink)  # XAᵀ + b
        y = self.reduce(linear(x, self.weight, None, self.weight_gradient_sink))
        return y if self.bias is None else y + self.bias.to(y.dtype)  # another one under torch.autocast


class _EmbeddingWithGradHook(torch.autograd.Function):
    """weight[ids], whose gradient goes to a hook."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, grad_hook: Callable[[Tensor, Tensor], object]) -> Tensor:
        ctx.grad_hook = grad_hook
        ctx.save_for_backward(ids)
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        (ids,) = ctx.saved_tensors
        ctx.grad_hook(ids.reshape(-1), grad.reshape(-1, grad.size(-1)))  # [...] -> [t]; [..., h] -> [t, h]
        return None, None, None


class VocabParallelEmbedding(ParallelLayer):
    """The weight's rows are split by token id. Forward: all-reduce, where each rank gives zeros for the ids that others
    hold; backward: nothing. With sequence_parallel: reduce-scatter; backward: all-gather.

    [s, ...] int64 -> [s, ..., h], or [s/p, ..., h] with sequence_parallel. `padded_size` rows are held over all ranks
    (default: num_embeddings); the rows past num_embeddings are zero. Raises ValueError if padded_size is not
    divisible by p. For an id that is not below num_embeddings see `check_ids`.
    """

    weight: Tensor

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        init_method: InitMethod = nn.init.xavier_normal_,
        *,
        padded_size: int | None = None,
        sequence_parallel: bool = False,
        group: ProcessGroup | None = None,
        device: Device = None,
    ) -> None:
        super().__init__(group, device, sequence_parallel)
        self.num_embeddings = num_embeddings
        spec = PartitionSpec((num_embeddings, embedding_dim), 0, padded_size)
        part = spec.local_shape(self.world_size)[0]
        self.vocab_start_index, self.vocab_end_index = self.rank * part, (self.rank + 1) * part
        self.make_parameter("weight", spec, init_method)

    def forward(self, ids: Tensor, grad_hook: Callable[[Tensor, Tensor], object] | None = None) -> Tensor:
        """[...] int64 -> [..., h].

        grad_hook: is given the gradients of the rows during backward, in the place of autograd, which would add them up
        in a matrix of the weight's size. Its arguments are row numbers of this rank [t] int64 and gradients [t, h].
        """
        check_ids(ids, self.num_embeddings, "token id")
        is_here = None
        if self.world_size > 1:
            ids, is_here = local_ids(ids, self.vocab_start_index, self.vocab_end_index)
        rows: Tensor = (
            F.embedding(ids, self.weight)
            if grad_hook is None
            else _EmbeddingWithGradHook.apply(ids, self.weight, grad_hook)
        )
        if is_here is None:
            return rows
        return self.reduce(rows.masked_fill(~is_here.unsqueeze(-1), 0.0))  # mask [...] -> [..., 1]


class PositionEmbedding(ParallelLayer):
    """Adds to each token the row of its position; replicated. With sequence_parallel the weight's gradient is a partial
    sum.

    [s, b, h] -> [s, b, h], or [s/p, b, h] -> [s/p, b, h] with sequence_parallel.
    """

    weight: Tensor

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        init_method: InitMethod = nn.init.xavier_normal_,
        *,
        sequence_parallel: bool = False,
        group: ProcessGroup | None = None,
        device: Device = None,
    ) -> None:
        super().__init__(group, device, sequence_parallel)
        self.make_parameter("weight", PartitionSpec((num_embeddings, embedding_dim)), init_method)
        if sequence_parallel:
            mark_sequence_parallel(self.parameters())

    def own_part(self, x: Tensor) -> slice:
        """Which positions the hidden states x [s, ...], or [s/p, ...] with sequence_parallel, are of."""
        first = self.rank * x.size(0) if self.sequence_parallel else 0
        return slice(first, first + x.size(0))

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """[s, b, h] -> [s, b, h]. positions: [b, s] int64, where they are not 0 to s - 1."""
        own = self.own_part(x)
        # [s, h] -> [s, 1, h], or [b, s] -> [s, b] -> [s, b, h]; s/p with sequence_parallel
        return x + (
            self.weight[own].unsqueeze(1) if positions is None else F.embedding(positions.t()[own], self.weight)
        )
