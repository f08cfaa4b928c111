"""Linear layers in V parts, and what else sums over the sequence.

Between a column- and a row-parallel layer hidden states are a tuple of parts, one for each that this rank computes.

Legend: b batch, s sequence, h hidden, i input and o output features, t tokens, p model-parallel size, V parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.gpt2.extensions.exact.sums import Parts, sum_of_products, sum_over_sequence
from mpu import kernels
from mpu.layers import ColumnParallelLinear, PositionEmbedding, RowParallelLinear, WeightGradientSink
from mpu.mappings import communicate
from mpu.transformer import LayerNorm


def _columns(weight: Tensor, count: int) -> list[Tensor]:
    """The parts of a weight [o, i] by its columns. Each is contiguous, as on a rank that has no other."""
    return [part.contiguous() for part in weight.chunk(count, dim=1)]


def _tokens(x: Tensor) -> Tensor:
    return x.reshape(-1, x.size(-1))  # [..., i] -> [t, i]


class _ColumnParallelLinear(torch.autograd.Function):
    """Y = XAᵀ + b in parts of the output features, with f of the paper before it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        parts: Parts,
        sequence_parallel: bool,
        sink: WeightGradientSink,
    ) -> tuple[Tensor, ...]:
        ctx.parts, ctx.sequence_parallel, ctx.sink = parts, sequence_parallel and parts.group is not None, sink
        ctx.save_for_backward(x, weight)
        if ctx.sequence_parallel:
            x = parts.gathered(x)
        biases = [None] * parts.own if bias is None else bias.chunk(parts.own)
        return tuple(F.linear(x, w, b) for w, b in zip(weight.chunk(parts.own), biases, strict=True))

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), parts = ctx.saved_tensors, ctx.parts
        if ctx.sequence_parallel:
            x = parts.gathered(x)
        rows = [_tokens(dy) for dy in dys]
        dx = d_weight = d_bias = None
        if ctx.needs_input_grad[0]:
            total = sum_of_products(rows, weight.chunk(parts.own), parts.sum_dtype(x.dtype)).view(x.shape)
            dx = parts.complete(total, x.dtype, ctx.sequence_parallel)
        if ctx.needs_input_grad[1]:
            d_weight = ctx.sink(rows, _tokens(x))
        if ctx.needs_input_grad[2]:
            d_bias = torch.cat([dy.sum(dim=0) for dy in rows])
        return dx, d_weight, d_bias, None, None, None


class ExactColumnParallelLinear(ColumnParallelLinear):
    """Y = XAᵀ + b, A and b split by output features. [s, b, i] -> a tuple of [s, b, o/V], or [s/p, b, i] -> the same
    with sequence_parallel. Forward: nothing (an all-gather of X); backward: the sum of dX in its one order."""

    def __init__(self, *args: Any, parts: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parts = Parts(parts, self.group)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        """[s, b, i] -> a tuple of [s, b, o/V]."""
        return _ColumnParallelLinear.apply(  # type: ignore[no-any-return]
            x,
            self.weight,
            self.bias,
            self.parts,
            self.sequence_parallel,
            self.weight_gradient_sink or self.weight_gradient,
        )

    def weight_gradient(self, dy: Sequence[Tensor], x: Tensor) -> Tensor:
        """dYᵀX [o/p, i] of each part's dY [t, o/V]."""
        out = torch.empty_like(self.weight, dtype=x.dtype)
        for rows, part in zip(out.chunk(self.parts.own), dy, strict=True):
            rows.copy_(kernels.weight_gradient(part, x))
        return out


class _RowParallelLinear(torch.autograd.Function):
    """XAᵀ summed over this rank's parts of the input features."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, parts: Parts, sink: WeightGradientSink, *xs: Tensor) -> Tensor:
        ctx.sink = sink
        ctx.save_for_backward(weight, *xs)
        weights = [part.t() for part in _columns(weight, parts.own)]
        y = sum_of_products([_tokens(x) for x in xs], weights, parts.sum_dtype(weight.dtype))
        return y.view(*xs[0].shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, *xs = ctx.saved_tensors
        rows = _tokens(dy.to(weight.dtype))  # autograd has given it the dtype of the sum; no bit is lost
        dxs = [(rows @ part).view(x.shape) for part, x in zip(_columns(weight, len(xs)), xs, strict=True)]
        d_weight = ctx.sink(rows, [_tokens(x) for x in xs]) if ctx.needs_input_grad[0] else None
        return d_weight, None, None, *dxs


class _Add(torch.autograd.Function):
    """x + term(parameter) of a replicated parameter. gradient: the parameter's, from dY [s, b, h] of some positions and
    which they are."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        parameter: Tensor,
        parts: Parts,
        term: Callable[[Tensor], Tensor],
        gradient: Callable[[Tensor, slice], Tensor],
    ) -> Tensor:
        ctx.parts, ctx.gradient, ctx.dtype = parts, gradient, parameter.dtype
        return x + term(parameter)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        total = sum_over_sequence(ctx.parts, lambda part: ctx.gradient(dy[part], part), dy.size(0))
        return dy, total.to(ctx.dtype), None, None, None


class ExactRowParallelLinear(RowParallelLinear):
    """Y = XAᵀ + b, A split by input features, b replicated. A tuple of [s, b, i/V] -> [s, b, o], or [s/p, b, o] with
    sequence_parallel. Forward: the sum of Y in its one order; backward: nothing (an all-gather of dY)."""

    def __init__(self, *args: Any, parts: int, sequence_parallel: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)  # without sequence_parallel: the bias gets a whole gradient
        self.sequence_parallel = sequence_parallel
        self.parts = Parts(parts, self.group)
        self.parts_of_sequence = Parts(parts, self.group if sequence_parallel else None)

    def forward(self, x: Sequence[Tensor]) -> Tensor:  # type: ignore[override]
        """A tuple of [s, b, i/V] -> [s, b, o]."""
        y = _RowParallelLinear.apply(self.weight, self.parts, self.weight_gradient_sink or self.weight_gradient, *x)
        y = communicate(  # keeps nothing, so that a checkpointed layer does not repeat it
            y,
            self.group,
            forward=lambda own, _: self.parts.complete(own, x[0].dtype, self.sequence_parallel),
            backward=lambda dy, _: self.parts.gathered(dy) if self.sequence_parallel else dy.view_as(dy),
        )
        if self.bias is None:
            return y
        return _Add.apply(  # type: ignore[no-any-return]
            y, self.bias, self.parts_of_sequence, lambda bias: bias, lambda dy, _: _tokens(dy).sum(dim=0)
        )

    def weight_gradient(self, dy: Tensor, x: Sequence[Tensor]) -> Tensor:
        """dYᵀX [o, i/p] of each part's X [t, i/V]."""
        out = torch.empty_like(self.weight, dtype=dy.dtype)
        for columns, part in zip(out.chunk(self.parts.own, dim=1), x, strict=True):
            columns.copy_(kernels.weight_gradient(dy, part))
        return out


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, parts: Parts) -> Tensor:
        ctx.parts = parts
        y, mean, inverse_std = torch.native_layer_norm(x, weight.shape, weight, bias, eps)
        ctx.save_for_backward(x, mean, inverse_std, weight, bias)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, inverse_std, weight, bias = ctx.saved_tensors
        dx = torch.empty_like(x)

        def of_part(part: slice) -> Tensor:
            dx[part], *of_parameters = torch.ops.aten.native_layer_norm_backward(
                dy[part].contiguous(), x[part], weight.shape, mean[part], inverse_std[part], weight, bias, [True] * 3
            )
            return torch.stack(of_parameters)

        d_weight, d_bias = sum_over_sequence(ctx.parts, of_part, x.size(0)).to(weight.dtype).unbind()
        return dx, d_weight, d_bias, None, None


class ExactLayerNorm(LayerNorm):
    """The same as `LayerNorm`, whose parameters get whole gradients with sequence_parallel too."""

    def __init__(self, *args: Any, parts: Parts, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parts = parts

    def forward(self, x: Tensor) -> Tensor:
        """[..., h] -> [..., h]."""
        return _LayerNorm.apply(x, self.weight, self.bias, self.eps, self.parts)  # type: ignore[no-any-return]


class ExactPositionEmbedding(PositionEmbedding):
    """The same as `PositionEmbedding`, whose weight gets a whole gradient with sequence_parallel too."""

    def __init__(self, *args: Any, parts: int, sequence_parallel: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sequence_parallel = sequence_parallel
        self.parts = Parts(parts, self.group if sequence_parallel else None)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """[s, b, h] -> [s, b, h]. positions: [b, s] int64, where they are not 0 to s - 1."""
        own = self.own_part(x)
        rows = (
            torch.arange(own.start, own.stop, device=x.device).unsqueeze(1).expand(x.shape[:2])
            if positions is None
            else positions.t()[own]
        )

        def gradient(dy: Tensor, part: slice) -> Tensor:
            total = torch.zeros(self.weight.shape, device=dy.device)
            return total.index_add_(0, rows[part].flatten(), _tokens(dy).float())

        return _Add.apply(  # type: ignore[no-any-return]
            x, self.weight, self.parts, lambda table: F.embedding(rows, table), gradient
        )
