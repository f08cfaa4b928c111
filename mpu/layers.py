"""Embeddings and linear layers whose weights are split over a tensor-parallel group (arXiv:1909.08053, section 3).

Legend: b batch, s sequence, h hidden, i input and o output features of this rank, tp tensor-parallel size, t tokens.

With sequence_parallel (arXiv:2205.05198), activations outside the split layers are sharded by their first dimension:
[s/tp, ...] instead of [s, ...]. These activations are the inputs of column-parallel layers, and the outputs of
row-parallel layers and embeddings. Each all-reduce becomes an all-gather and a reduce-scatter, which together send as
many bytes. Backward of a column-parallel layer needs one more all-gather, because the layer gathers its input again.

A layer draws the whole weight on the CPU with its `init_method` and keeps its slice. After `torch.manual_seed(s)`, the
layer therefore gets the same weights for every group size.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

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
# Computes dYᵀX [o, i] from dY [t, o] and X [t, i]. Returns None if the gradient is written to a buffer or computed
# later.
WeightGradFn = Callable[[Tensor, Tensor], Tensor | None]


class GeluOutput(NamedTuple):
    """The output of a linear layer with GELU, for a `RowParallelLinear`. In backward, this second layer computes the
    gradients of z and of the first layer's bias. No gradient flows through y.

    z, y: xAᵀ + a and gelu(z), [..., f].
    bias: a [f].
    approximate: see F.gelu.
    """

    z: Tensor
    y: Tensor
    bias: Tensor
    approximate: str


class ParallelLayer(nn.Module):
    """Base class of the linear and embedding layers, which creates parameters from partition specs."""

    def __init__(self, group: ProcessGroup | None, device: Device, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.group = group or get_tensor_model_parallel_group()
        self.tp_rank, self.tp_size = group_rank_and_size(self.group)
        self.sequence_parallel = sequence_parallel
        self._device = device
        self._specs: dict[str, PartitionSpec] = {}

    def partition_specs(self) -> dict[str, PartitionSpec]:
        """Return the spec of each of this layer's parameters, by name."""
        return self._specs

    def make_parameter(self, name: str, spec: PartitionSpec, init_method: InitMethod) -> Tensor:
        """Register this rank's slice of a float32 weight as parameter `name`, and return the whole weight. The whole
        weight is drawn on the CPU for every device. For the meta device nothing is drawn."""
        if self._device is not None and torch.device(self._device).type == "meta":
            full = torch.empty(spec.global_shape, device=self._device)
        else:
            full = torch.empty(spec.global_shape)
            with torch.no_grad():
                init_method(full)
        parameter = nn.Parameter(spec.split(full, self.tp_rank, self.tp_size).to(self._device))
        if spec.dim is not None:
            parameter.model_parallel = True  # type: ignore[attr-defined]  # clip_grad_norm and DeepSpeed read it
        self._specs[name] = spec
        self.register_parameter(name, parameter)
        return full

    def first_position(self, x: Tensor) -> int:
        """Return the position of x[0] in the sequence, for hidden states outside the split layers: [s, ...] or
        [s/tp, ...]."""
        return self.tp_rank * x.size(0) if self.sequence_parallel else 0

    def reduce(self, x: Tensor) -> Tensor:
        """Return the sum of x [s, ...] over the ranks; with sequence_parallel, this rank's [s/tp, ...] of the sum."""
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(x, self.group)
        return reduce_from_model_parallel_region(x, self.group)


class _Linear(torch.autograd.Function):
    """Y = XAᵀ + b. With a group, A and b are split by output features, and every rank multiplies the whole X, so
    backward sums dX over the ranks (*f* in arXiv:1909.08053). With sequence parallelism each rank has a part of X:
    forward gathers the whole X, and backward gathers it again instead of saving it.

    If `gelu` is given, which is the argument `approximate` of F.gelu, forward returns Y and gelu(Y). Only Y has a
    gradient.

    In backward, the all-gather of X overlaps the computation of dX, and the reduction of dX overlaps the computation of
    dA.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        weight_grad_fn: WeightGradFn | None,
        group: ProcessGroup | None,
        sequence_parallel: bool,
        gelu: str | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        ctx.weight_grad_fn = weight_grad_fn or kernels.weight_gradient
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        ctx.save_for_backward(x, weight)
        if group is not None and sequence_parallel:
            x, _ = all_gather_first_dim(x, group)
        if gelu is None:
            return F.linear(x, weight, bias)
        assert bias is not None
        z, y = kernels.linear_gelu(x, weight, bias, gelu)
        ctx.mark_non_differentiable(y)
        ctx.set_materialize_grads(False)  # Otherwise backward gets zeros as the gradient of y.
        return z, y

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        # torch.compile cannot trace an asynchronous collective.
        overlap = not torch.compiler.is_compiling()
        gather_of_x = reduction_of_dx = dx = d_weight = d_bias = None
        if ctx.sequence_parallel:
            x, gather_of_x = all_gather_first_dim(x, ctx.group, async_op=overlap)
        if ctx.needs_input_grad[0]:
            dx = dy @ weight
        if gather_of_x is not None:
            gather_of_x.wait()
        if dx is not None and ctx.group is not None:
            if ctx.sequence_parallel:
                dx, reduction_of_dx = reduce_scatter_first_dim(dx, ctx.group, async_op=overlap)
            else:
                reduction_of_dx = dist.all_reduce(dx, group=ctx.group, async_op=overlap)
        dy = dy.reshape(-1, dy.size(-1))  # [..., o] -> [t, o]
        if ctx.needs_input_grad[1]:
            d_weight = ctx.weight_grad_fn(dy, x.reshape(-1, x.size(-1)))  # dYᵀX; X [..., i] -> [t, i]
        if ctx.needs_input_grad[2]:
            d_bias = dy.sum(dim=0)
        if reduction_of_dx is not None:
            reduction_of_dx.wait()
        return dx, d_weight, d_bias, None, None, None, None


class _LinearOfGelu(torch.autograd.Function):
    """Returns memory for yAᵀ, where y = gelu(z); `RowParallelLinear.of_gelu` computes the product. Backward returns the
    gradients of z and of the bias in z. It returns none for y, because the gradient of z includes it.

    The product is computed after this function has saved its tensors. If nothing later in an activation checkpoint is
    saved, which is so for its last layer without hidden dropout, the recomputation ends before the product.
    """

    @staticmethod
    def forward(
        ctx: Any,
        z: Tensor,
        y: Tensor,
        bias: Tensor,
        approximate: str,
        weight: Tensor,
        weight_grad_fn: WeightGradFn | None,
    ) -> Tensor:
        ctx.approximate, ctx.weight_grad_fn = approximate, weight_grad_fn or kernels.weight_gradient
        ctx.save_for_backward(z, y, weight)
        return y.new_empty(*y.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        z, y, weight = ctx.saved_tensors
        dz = d_bias = d_weight = None
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[2]:
            dz, d_bias = kernels.linear_gelu_backward(grad, weight, z, ctx.approximate)
        if ctx.needs_input_grad[4]:
            # [..., o] -> [t, o], and [..., f] -> [t, f]
            d_weight = ctx.weight_grad_fn(grad.reshape(-1, grad.size(-1)), y.reshape(-1, y.size(-1)))
        return dz, None, d_bias, None, d_weight, None


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    weight_grad_fn: WeightGradFn | None = None,
    group: ProcessGroup | None = None,
    sequence_parallel: bool = False,
) -> Tensor:
    """XAᵀ + b: [..., i], [o, i], [o] -> [..., o].

    weight_grad_fn: computes the weight gradient in backward (default: the fastest matrix product).
    group: backward sums dX over this group (default: no communication).
    sequence_parallel: whether x is this rank's [s/tp, ...] of the group's input.
    """
    needs_grad = torch.is_grad_enabled() or torch.compiler.is_compiling()
    if not needs_grad and not sequence_parallel:
        return kernels.linear_without_gradient(x, weight, bias)  # This product for generation is faster on a CPU.
    x, weight, bias = kernels.cast_for_autocast(x, weight, bias)
    if weight_grad_fn is None and group is None and not kernels.uses_amx(x):
        return F.linear(x, weight, bias)  # torch's backward
    return _Linear.apply(x, weight, bias, weight_grad_fn, group, sequence_parallel)  # type: ignore[no-any-return]


class ParallelLinear(ParallelLayer):
    """A linear layer with weight A [output_size, input_size] and bias b. A is split along dimension `dim`; b is split
    if the output features are split. The positional arguments of the subclasses are those of Megatron's first release
    (2019).

    stride: must be 1; other values raise ValueError.
    keep_master_weight_for_test: store the whole weight, before it is split, as `master_weight`. Only this name of 2019
        calls the whole weight a master. Elsewhere a master is the float32 copy of a weight.
    """

    weight: Tensor
    bias: Tensor | None

    def _make_weights(
        self,
        shape: tuple[int, int],
        dim: int,
        bias: bool,
        init_method: InitMethod,
        stride: int,
        keep_master_weight: bool,
    ) -> None:
        if stride != 1:  # Megatron's first release gave each rank a part of each of `stride` blocks of the weight.
            raise ValueError(
                f"stride={stride}: each rank holds a contiguous part of a weight, so stride must be 1; "
                "order a fused query-key-value weight [heads, 3, head size] as ParallelSelfAttention does"
            )
        full_weight = self.make_parameter("weight", PartitionSpec(shape, dim), init_method)
        self.master_weight = full_weight if keep_master_weight else None
        # The zero-bubble schedule sets this function, to compute the weight gradient later.
        self.weight_grad_fn: WeightGradFn | None = None
        self.register_parameter("bias", None)
        if bias:
            self.make_parameter("bias", PartitionSpec(shape[:1], 0 if dim == 0 else None), nn.init.zeros_)

    def weight_gradient(self, dy: Tensor, x: Tensor) -> Tensor:
        """Return dYᵀX, the gradient of this rank's part of the weight: [t, o], [t, i] -> [o, i]."""
        return kernels.weight_gradient(dy, x)


class ColumnParallelLinear(ParallelLinear):
    """Y = XAᵀ + b; A and b are split by output features. Forward: no communication (an all-gather of Y with
    gather_output); backward: all-reduce of dX. With sequence_parallel, forward: all-gather of X; backward: all-gather
    of X, reduce-scatter of dX.

    Shapes: [s, ..., input_size] -> [s, ..., output_size/tp], or [s, ..., output_size] with gather_output. With
    sequence_parallel the input is [s/tp, ..., input_size]. Raises ValueError if output_size is not divisible by tp.
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

    def forward(self, x: Tensor, *, bias_gradient: bool = True) -> Tensor:
        """[..., input_size] -> [..., output_size/tp], or [..., output_size] with gather_output.

        bias_gradient: False if a function that uses the output computes the gradient of b.
        """
        bias = self.bias if bias_gradient or self.bias is None else self.bias.detach()
        y = linear(x, self.weight, bias, self.weight_grad_fn, *self._group_of_input)
        return gather_from_model_parallel_region(y, self.group) if self.gather_output else y

    def with_gelu(self, x: Tensor, approximate: str) -> GeluOutput:
        """[..., input_size] -> z = XAᵀ + b and gelu(z) of this rank, for a GPU; see `kernels.has_fused_layer`.

        approximate: see F.gelu.
        """
        assert self.bias is not None
        linear_args = x, self.weight, self.bias.detach(), self.weight_grad_fn, *self._group_of_input
        z, y = _Linear.apply(*linear_args, approximate)  # type: ignore[no-untyped-call]
        return GeluOutput(z, y, self.bias, approximate)

    @property
    def _group_of_input(self) -> tuple[ProcessGroup | None, bool]:
        """The arguments `group` and `sequence_parallel` of `linear`."""
        return (self.group, self.sequence_parallel) if self.tp_size > 1 else (None, False)


class RowParallelLinear(ParallelLinear):
    """Y = XAᵀ + b; A is split by input features, b is replicated and added once, after the sum. Forward: all-reduce of
    Y; backward: no communication. With sequence_parallel, forward: reduce-scatter of Y; backward: all-gather of dY.
    Without input_is_parallel, backward also all-gathers dX.

    Shapes: [s, ..., input_size/tp] -> [s, ..., output_size]. Without input_is_parallel the input is
    [s, ..., input_size]. With sequence_parallel the output is [s/tp, ..., output_size]. Raises ValueError if input_size
    is not divisible by tp.
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

    def forward(self, x: Tensor, *, skip_bias_add: bool = False) -> Tensor:
        """[..., input_size/tp], or [..., input_size] unless input_is_parallel -> [..., output_size].

        skip_bias_add: return XAᵀ; the caller adds b. In Megatron, skip_bias_add is an argument of the constructor, and
            forward returns (output, bias).
        """
        if not self.input_is_parallel:
            x = scatter_to_model_parallel_region(x, self.group)
        bias = None if skip_bias_add else self.bias
        if self.tp_size == 1:
            return linear(x, self.weight, bias, self.weight_grad_fn)  # XAᵀ + b
        y = self.reduce(linear(x, self.weight, None, self.weight_grad_fn))
        return y if bias is None else y + bias.to(y.dtype)  # Under torch.autocast the bias has a higher precision.

    def of_gelu(self, x: GeluOutput) -> Tensor:
        """gelu(z)Aᵀ: [..., input_size/tp] -> [..., output_size]. The caller adds b."""
        out: Tensor = _LinearOfGelu.apply(*x, self.weight, self.weight_grad_fn)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            torch.mm(x.y.flatten(0, -2), self.weight.t(), out=out.detach().flatten(0, -2))
        return self.reduce(out)


class _EmbeddingWithGradSink(torch.autograd.Function):
    """weight[ids]. Backward passes the gradients of the rows to `grad_sink`, and no gradient to autograd."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, grad_sink: Callable[[Tensor, Tensor], object]) -> Tensor:
        ctx.grad_sink = grad_sink
        ctx.save_for_backward(ids)
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        (ids,) = ctx.saved_tensors
        ctx.grad_sink(ids.reshape(-1), grad.reshape(-1, grad.size(-1)))  # [...] -> [t]; [..., h] -> [t, h]
        return None, None, None


class VocabParallelEmbedding(ParallelLayer):
    """An embedding whose rows are split by token id. Forward: all-reduce, in which each rank has zeros for the ids of
    other ranks; backward: no communication. With sequence_parallel, forward: reduce-scatter; backward: all-gather.

    [s, ...] int64 -> [s, ..., h], or [s/tp, ..., h] with sequence_parallel. Raises ValueError if padded_size is not
    divisible by tp. Ids must be less than num_embeddings, see `check_ids`.

    padded_size: number of rows over all ranks (default: num_embeddings); rows after num_embeddings are zero.
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
        part = spec.local_shape(self.tp_size)[0]
        self.vocab_start_index, self.vocab_end_index = self.tp_rank * part, (self.tp_rank + 1) * part
        self.make_parameter("weight", spec, init_method)

    def forward(self, ids: Tensor, grad_sink: Callable[[Tensor, Tensor], object] | None = None) -> Tensor:
        """[...] int64 -> [..., h].

        grad_sink: backward calls it with this rank's row numbers [t] int64 and their gradients [t, h]. Autograd then
        gets no gradient, and does not allocate a matrix of the weight's size.
        """
        check_ids(ids, self.num_embeddings, "token id")
        is_local = None
        if self.tp_size > 1:
            ids, is_local = local_ids(ids, self.vocab_start_index, self.vocab_end_index)
        rows: Tensor = (
            F.embedding(ids, self.weight)
            if grad_sink is None
            else _EmbeddingWithGradSink.apply(ids, self.weight, grad_sink)
        )
        if is_local is None:
            return rows
        return self.reduce(rows.masked_fill(~is_local.unsqueeze(-1), 0.0))  # mask [...] -> [..., 1]


class PositionEmbedding(ParallelLayer):
    """Adds to each token the embedding of its position. The weight is replicated. With sequence_parallel the weight's
    gradient is a partial sum.

    [s, b, h] -> [s, b, h], or [s/tp, b, h] -> [s/tp, b, h] with sequence_parallel.
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

    def local_positions(self, x: Tensor) -> slice:
        """Return the positions of the hidden states x: [s, ...], or [s/tp, ...] with sequence_parallel."""
        first = self.first_position(x)
        return slice(first, first + x.size(0))

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """[s, b, h] -> [s, b, h].

        positions: [b, s] int64 (default: 0 to s - 1).
        """
        local = self.local_positions(x)
        # [s, h] -> [s, 1, h], or [b, s] -> [s, b] -> [s, b, h]; s/tp with sequence_parallel
        return x + (
            self.weight[local].unsqueeze(1) if positions is None else F.embedding(positions.t()[local], self.weight)
        )
