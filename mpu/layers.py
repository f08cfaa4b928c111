"""Embeddings and linear layers whose weights are split over a model-parallel group (arXiv:1909.08053, section 3).

Legend: b batch, s sequence, h hidden, p model-parallel size, v padded vocabulary, t tokens.

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
from mpu.partition import PartitionSpec, check_ids, local_ids, vocab_range

InitMethod = Callable[[Tensor], object]


def initial_weight(shape: tuple[int, ...], init_method: InitMethod, device: torch.device | str | None) -> Tensor:
    """A whole float32 weight, drawn on the CPU whatever the device. Where the device is "meta" nothing is drawn, and
    the weight is on the meta device."""
    if device is not None and torch.device(device).type == "meta":
        return torch.empty(shape, device=device)
    weight = torch.empty(shape)
    with torch.no_grad():
        init_method(weight)
    return weight


class ParallelLayer(nn.Module):
    """What the layers have in common: the group, which is resolved once, and parameters that are made from specs."""

    def __init__(self, group: ProcessGroup | None) -> None:
        super().__init__()
        self.group = group if group is not None else get_tensor_model_parallel_group()
        self.rank, self.world_size = group_rank_and_size(self.group)
        self._specs: dict[str, PartitionSpec] = {}

    def partition_specs(self) -> dict[str, PartitionSpec]:
        """The spec of each parameter of this layer, by name."""
        return self._specs

    def make_parameter(
        self, name: str, spec: PartitionSpec, init_method: InitMethod, device: torch.device | str | None
    ) -> Tensor:
        """Register this rank's slice of a float32 weight as the parameter `name`, and return the whole weight."""
        full = initial_weight(spec.global_shape, init_method, device)
        parameter = nn.Parameter(spec.split(full, self.rank, self.world_size).to(device))
        if spec.dim is not None:
            parameter.model_parallel = True  # type: ignore[attr-defined]  # clip_grad_norm and DeepSpeed read it
        self._specs[name] = spec
        self.register_parameter(name, parameter)
        return full


class _ParallelLinear(ParallelLayer):
    """The parameters of a linear layer: A [output_size, input_size], split by its dimension `dim`, and b, split as the
    outputs are."""

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        input_size: int,
        output_size: int,
        dim: int,
        bias: bool,
        init_method: InitMethod,
        stride: int,
        keep_master_weight_for_test: bool,
        group: ProcessGroup | None,
        device: torch.device | str | None,
    ) -> None:
        super().__init__(group)
        if stride != 1:  # 2019 cut a fused weight into `stride` blocks and gave each rank a part of every block
            raise ValueError(
                f"stride={stride}: a rank's part of a weight is contiguous here, so stride must be 1; "
                "order a fused query-key-value weight [heads, 3, head size] as ParallelSelfAttention does"
            )
        full = self.make_parameter("weight", PartitionSpec((output_size, input_size), dim), init_method, device)
        self.master_weight = full if keep_master_weight_for_test else None
        # Takes the factors of the weight gradient. A schedule that computes it later puts a function here.
        self.weight_gradient_sink: kernels.WeightGradientSink | None = None
        self.register_parameter("bias", None)
        if bias:
            self.make_parameter("bias", PartitionSpec((output_size,), 0 if dim == 0 else None), nn.init.zeros_, device)

    def weight_gradient(self, dy: Any, x: Any) -> Tensor:
        """dYᵀX of what the sink was given: [t, output_size], [t, input_size], of this rank."""
        return kernels.weight_gradient(dy, x)


class _ColumnParallelLinear(torch.autograd.Function):
    """Y = XAᵀ + b, A and b split by output features, with f of the paper before it.

    In backward the sum of dX over the ranks is under way while dA is computed. With sequence parallelism X is gathered
    a second time in backward instead of being kept whole.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group: ProcessGroup,
        sequence_parallel: bool,
        sink: kernels.WeightGradientSink,
    ) -> Tensor:
        ctx.group, ctx.sequence_parallel, ctx.sink = group, sequence_parallel, sink
        ctx.save_for_backward(x, weight)
        return F.linear(all_gather_first_dim(x, group)[0] if sequence_parallel else x, weight, bias)

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
        if dx is not None:
            if ctx.sequence_parallel:
                dx, work = reduce_scatter_first_dim(dx, ctx.group, async_op=overlap)
            else:
                work = dist.all_reduce(dx, group=ctx.group, async_op=overlap)
        dy = dy.reshape(-1, dy.size(-1))  # [..., output_size/p] -> [t, output_size/p]
        if ctx.needs_input_grad[1]:
            d_weight = ctx.sink(dy, x.reshape(-1, x.size(-1)))  # dYᵀX; X [..., h] -> [t, h]
        if ctx.needs_input_grad[2]:
            d_bias = dy.sum(dim=0)
        if work is not None:
            work.wait()
        return dx, d_weight, d_bias, None, None, None


class ColumnParallelLinear(_ParallelLinear):
    """Y = XAᵀ + b, A and b split by output features. Forward: nothing (an all-gather of Y with gather_output);
    backward: all-reduce of dX. With sequence_parallel: all-gather of X; backward: all-gather of X, reduce-scatter of
    dX.

    [s, ..., input_size], or [s/p, ..., input_size] with sequence_parallel -> [s, ..., output_size/p], or [s, ...,
    output_size] with gather_output. Arguments by position are those of Megatron in 2019. Raises ValueError where
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
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(
            input_size, output_size, 0, bias, init_method, stride, keep_master_weight_for_test, group, device
        )
        self.gather_output, self.sequence_parallel = gather_output, sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """[..., input_size] -> [..., output_size/p], or [..., output_size] with gather_output."""
        gradient = torch.is_grad_enabled() or torch.compiler.is_compiling()
        if self.group is None or self.world_size == 1 or not (gradient or self.sequence_parallel):
            y = kernels.linear(x, self.weight, self.bias, self.weight_gradient_sink)  # XAᵀ + b
        else:
            operands = kernels.cast_for_autocast(x, self.weight, self.bias)
            y = _ColumnParallelLinear.apply(
                *operands, self.group, self.sequence_parallel, self.weight_gradient_sink or self.weight_gradient
            )
        return gather_from_model_parallel_region(y, self.group) if self.gather_output else y


class RowParallelLinear(_ParallelLinear):
    """Y = XAᵀ + b, A split by input features, b replicated and added once, after the sum. Forward: all-reduce of Y;
    backward: nothing. With sequence_parallel: reduce-scatter of Y; backward: all-gather of dY.

    [s, ..., input_size/p] (or [s, ..., input_size] unless input_is_parallel) -> [s, ..., output_size], or [s/p, ...,
    output_size] with sequence_parallel. Arguments by position are those of Megatron in 2019. Raises ValueError where
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
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(
            input_size, output_size, 1, bias, init_method, stride, keep_master_weight_for_test, group, device
        )
        self.input_is_parallel = input_is_parallel
        self.reduce = (
            reduce_scatter_to_sequence_parallel_region if sequence_parallel else reduce_from_model_parallel_region
        )
        if bias and sequence_parallel:
            mark_sequence_parallel([self.get_parameter("bias")])

    def forward(self, x: Tensor) -> Tensor:
        """[..., input_size/p], or [..., input_size] unless input_is_parallel -> [..., output_size]."""
        if not self.input_is_parallel:
            x = scatter_to_model_parallel_region(x, self.group)
        if self.world_size == 1:
            return kernels.linear(x, self.weight, self.bias, self.weight_gradient_sink)  # XAᵀ + b
        y = self.reduce(kernels.linear(x, self.weight, None, self.weight_gradient_sink), self.group)
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
    (default: num_embeddings); the rows past num_embeddings are zero. Raises ValueError where padded_size is not
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
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(group)
        self.reduce = (
            reduce_scatter_to_sequence_parallel_region if sequence_parallel else reduce_from_model_parallel_region
        )
        padded_size = padded_size or num_embeddings
        self.num_embeddings = num_embeddings
        self.vocab_start_index, self.vocab_end_index = vocab_range(padded_size, self.rank, self.world_size)
        self.make_parameter(
            "weight", PartitionSpec((num_embeddings, embedding_dim), 0, padded_size), init_method, device
        )

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
        return self.reduce(rows.masked_fill(~is_here.unsqueeze(-1), 0.0), self.group)  # mask [...] -> [..., 1]


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
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(group)
        self.sequence_parallel = sequence_parallel
        self.make_parameter("weight", PartitionSpec((num_embeddings, embedding_dim)), init_method, device)
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
