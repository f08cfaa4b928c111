"""Linear layers that are computed in V shards, and layer norms and position embeddings, whose gradients are sums over
the sequence.

Between a column- and a row-parallel layer, hidden states are a tuple with one tensor for each virtual rank that this
rank emulates.

Legend: b batch, s sequence, h hidden, i input and o output features, t tokens, tp tensor-parallel size, V virtual
ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.gpt2.extensions.exact.sums import VirtualRanks, sum_over_sequence
from mpu import kernels
from mpu.layers import ColumnParallelLinear, PositionEmbedding, RowParallelLinear
from mpu.mappings import apply_collective
from mpu.transformer import LayerNorm


def _columns(weight: Tensor, count: int) -> list[Tensor]:
    """Split a weight [o, i] by columns. Each shard is contiguous, as on a rank that emulates one virtual rank."""
    return [part.contiguous() for part in weight.chunk(count, dim=1)]


def _tokens(x: Tensor) -> Tensor:
    return x.reshape(-1, x.size(-1))  # [..., i] -> [t, i]


class _ColumnParallelLinear(torch.autograd.Function):
    """Y = XAᵀ + b in shards of the output features. Backward sums dX over the shards (*f* in arXiv:1909.08053)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        virtual: VirtualRanks,
        sequence_parallel: bool,
        weight_grad_fn: Callable[..., Tensor | None],
    ) -> tuple[Tensor, ...]:
        ctx.virtual, ctx.weight_grad_fn = virtual, weight_grad_fn
        ctx.sequence_parallel = sequence_parallel and virtual.group is not None
        ctx.save_for_backward(x, weight)
        if ctx.sequence_parallel:
            x = virtual.all_gather(x)
        biases = [None] * virtual.per_rank if bias is None else bias.chunk(virtual.per_rank)
        return tuple(F.linear(x, w, b) for w, b in zip(weight.chunk(virtual.per_rank), biases, strict=True))

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), virtual = ctx.saved_tensors, ctx.virtual
        if ctx.sequence_parallel:
            x = virtual.all_gather(x)
        rows = [_tokens(dy) for dy in dys]
        dx = d_weight = d_bias = None
        if ctx.needs_input_grad[0]:
            total = virtual.sum_of_products(rows, weight.chunk(virtual.per_rank), x.dtype)
            dx = virtual.reduce(total.view(-1, *x.shape), x.dtype, ctx.sequence_parallel)
        if ctx.needs_input_grad[1]:
            d_weight = ctx.weight_grad_fn(rows, _tokens(x))
        if ctx.needs_input_grad[2]:
            d_bias = torch.cat([dy.sum(dim=0) for dy in rows])
        return dx, d_weight, d_bias, None, None, None


class ExactColumnParallelLinear(ColumnParallelLinear):
    """Y = XAᵀ + b, A and b split by output features. [s, b, i], or [s/tp, b, i] with sequence_parallel -> tuple of
    [s, b, o/V]. Forward: no communication (with sequence_parallel an all-gather of X); backward: tree sum of dX."""

    def __init__(self, *args: Any, virtual_ranks: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.virtual = VirtualRanks(virtual_ranks, self.group)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        """Compute the outputs: [s, b, i] -> tuple of [s, b, o/V]."""
        return _ColumnParallelLinear.apply(  # type: ignore[no-any-return]
            x,
            self.weight,
            self.bias,
            self.virtual,
            self.sequence_parallel,
            self.weight_grad_fn or self.weight_gradient,
        )

    def weight_gradient(self, dy: Sequence[Tensor], x: Tensor) -> Tensor:  # type: ignore[override]
        """Return dYᵀX [o/tp, i].

        dy: [t, o/V] of each virtual rank.
        """
        out = torch.empty_like(self.weight, dtype=x.dtype)
        for rows, part in zip(out.chunk(self.virtual.per_rank), dy, strict=True):
            rows.copy_(kernels.weight_gradient(part, x))
        return out


class _RowParallelLinear(torch.autograd.Function):
    """XAᵀ, summed over this rank's virtual ranks as far as the tree allows: [k, s, b, o], see
    `VirtualRanks.partial_sums`."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, virtual: VirtualRanks, weight_grad_fn: Callable[..., Tensor | None], *xs: Tensor
    ) -> Tensor:
        ctx.weight_grad_fn = weight_grad_fn
        ctx.save_for_backward(weight, *xs)
        weights = [part.t() for part in _columns(weight, virtual.per_rank)]
        y = virtual.sum_of_products([_tokens(x) for x in xs], weights, weight.dtype)
        return y.view(len(y), *xs[0].shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, *xs = ctx.saved_tensors
        rows = _tokens(dy[0].to(weight.dtype))  # dy is float32, but `weight.dtype` can represent its values.
        dxs = [(rows @ part).view(x.shape) for part, x in zip(_columns(weight, len(xs)), xs, strict=True)]
        d_weight = ctx.weight_grad_fn(rows, [_tokens(x) for x in xs]) if ctx.needs_input_grad[0] else None
        return d_weight, None, None, *dxs


class _AddParameter(torch.autograd.Function):
    """x + term(parameter) for a replicated parameter.

    gradient: (dY of a slice of the sequence, the slice) -> the gradient of the parameter over this slice.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        parameter: Tensor,
        virtual: VirtualRanks,
        term: Callable[[Tensor], Tensor],
        gradient: Callable[[Tensor, slice], Tensor],
    ) -> Tensor:
        ctx.virtual, ctx.gradient, ctx.dtype = virtual, gradient, parameter.dtype
        return x + term(parameter)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        total = sum_over_sequence(ctx.virtual, lambda part: ctx.gradient(dy[part], part), dy.size(0))
        return dy, total.to(ctx.dtype), None, None, None


class ExactRowParallelLinear(RowParallelLinear):
    """Y = XAᵀ + b, A split by input features, b replicated. Tuple of [s, b, i/V] -> [s, b, o], or [s/tp, b, o] with
    sequence_parallel. Forward: tree sum of Y; backward: no communication (with sequence_parallel an all-gather of
    dY)."""

    def __init__(self, *args: Any, virtual_ranks: int, sequence_parallel: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)  # Without sequence_parallel, because the bias gets a complete gradient.
        self.sequence_parallel = sequence_parallel
        self.virtual = VirtualRanks(virtual_ranks, self.group)
        self.sequence_ranks = VirtualRanks(virtual_ranks, self.group if sequence_parallel else None)

    def forward(self, x: Sequence[Tensor]) -> Tensor:  # type: ignore[override]
        """Compute the output: tuple of [s, b, i/V] -> [s, b, o]."""
        sums = _RowParallelLinear.apply(self.weight, self.virtual, self.weight_grad_fn or self.weight_gradient, *x)
        if self.virtual.group is None:
            y: Tensor = sums.squeeze(0)
        else:
            k = len(sums)
            y = apply_collective(  # Because no tensor is saved, a recomputation does not repeat the collective.
                sums,
                self.group,
                forward=lambda own, _: self.virtual.reduce(own, x[0].dtype, self.sequence_parallel),
                # Each partial sum has the gradient of the total.
                backward=lambda dy, _: (self.virtual.all_gather(dy) if self.sequence_parallel else dy).expand(
                    k, -1, -1, -1
                ),
            )
        if self.bias is None:
            return y
        return _AddParameter.apply(  # type: ignore[no-any-return]
            y, self.bias, self.sequence_ranks, lambda bias: bias, lambda dy, _: _tokens(dy).sum(dim=0)
        )

    def weight_gradient(self, dy: Tensor, x: Sequence[Tensor]) -> Tensor:  # type: ignore[override]
        """Return dYᵀX [o, i/tp].

        x: [t, i/V] of each virtual rank.
        """
        out = torch.empty_like(self.weight, dtype=dy.dtype)
        for columns, part in zip(out.chunk(self.virtual.per_rank, dim=1), x, strict=True):
            columns.copy_(kernels.weight_gradient(dy, part))
        return out


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, virtual: VirtualRanks) -> Tensor:
        ctx.virtual = virtual
        y, mean, inverse_std = torch.native_layer_norm(x, weight.shape, weight, bias, eps)
        ctx.save_for_backward(x, mean, inverse_std, weight, bias)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, inverse_std, weight, bias = ctx.saved_tensors
        dx = torch.empty_like(x)

        def sum_of_slice(part: slice) -> Tensor:
            dx[part], *d_parameters = torch.ops.aten.native_layer_norm_backward(
                dy[part].contiguous(), x[part], weight.shape, mean[part], inverse_std[part], weight, bias, [True] * 3
            )
            return torch.stack(d_parameters)

        d_weight, d_bias = sum_over_sequence(ctx.virtual, sum_of_slice, x.size(0)).to(weight.dtype).unbind()
        return dx, d_weight, d_bias, None, None


class ExactLayerNorm(LayerNorm):
    """A `LayerNorm` whose parameters get complete gradients, even with sequence parallelism."""

    def __init__(self, *args: Any, virtual: VirtualRanks, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.virtual = virtual

    def forward(self, x: Tensor) -> Tensor:
        """See `LayerNorm.forward`."""
        return _LayerNorm.apply(x, self.weight, self.bias, self.eps, self.virtual)  # type: ignore[no-any-return]


class ExactPositionEmbedding(PositionEmbedding):
    """A `PositionEmbedding` whose weight gets a complete gradient, even with sequence parallelism."""

    def __init__(self, *args: Any, virtual_ranks: int, sequence_parallel: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sequence_parallel = sequence_parallel
        self.virtual = VirtualRanks(virtual_ranks, self.group if sequence_parallel else None)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Add the position embeddings: [s, b, h] -> [s, b, h].

        positions: [b, s] int64 (default: 0 to s - 1).
        """
        local = self.local_positions(x)
        rows = (
            torch.arange(local.start, local.stop, device=x.device).unsqueeze(1).expand(x.shape[:2])
            if positions is None
            else positions.t()[local]
        )

        def gradient(dy: Tensor, part: slice) -> Tensor:
            total = torch.zeros(self.weight.shape, device=dy.device)
            return total.index_add_(0, rows[part].flatten(), _tokens(dy).float())

        return _AddParameter.apply(  # type: ignore[no-any-return]
            x, self.weight, self.virtual, lambda table: F.embedding(rows, table), gradient
        )
