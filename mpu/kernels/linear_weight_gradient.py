"""A linear layer whose weight gradient is given to a function, and the gradient as a sum over parts of the tokens. The
sum is for a CPU with AMX in bf16.

oneDNN with AMX is slow where the left matrix of a product is transposed and long. 2 cores, 2,048 tokens: the whole
product runs at 1.3 TFLOP/s where a layer's other products reach 2.5; in 4 parts it runs at 1.9. One thread, 3,072 x
768: 103 ms whole, 71 in parts. Without AMX the parts take longer than the whole (603 ms, 559). Source:
docs/explanation/performance.md.

Legend: t tokens, i input features, o output features.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Is given dY [t, o] and X [t, i], either of which may be in parts, and gives dYᵀX [o, i] to autograd, or None where the
# gradient goes another way: into a buffer, or later.
WeightGradientSink = Callable[[Any, Any], Tensor | None]
PARTS = 4
LEAST_TOKENS = 512  # of a part


def weight_gradient_in_parts(dy: Tensor, x: Tensor) -> Tensor:
    """dyᵀx: [t, o], [t, i] -> [o, i], in the dtype of both. Each part after the first rounds the sum once more."""
    tokens = max(LEAST_TOKENS, -(-dy.size(0) // PARTS))
    total = dy[:tokens].t() @ x[:tokens]
    for start in range(tokens, dy.size(0), tokens):
        part = slice(start, start + tokens)
        total.addmm_(dy[part].t(), x[part])
    return total


class LinearWithWeightGradient(torch.autograd.Function):
    """Y = XAᵀ + b, [..., i] -> [..., o]; backward is autograd's but for the weight gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, sink: WeightGradientSink) -> Tensor:
        """x [..., i], weight [o, i], bias [o] -> [..., o]."""
        ctx.sink = sink
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """dY [..., o] -> dX, dA, db."""
        x, weight = ctx.saved_tensors
        dx = dy @ weight if ctx.needs_input_grad[0] else None
        dy = dy.reshape(-1, dy.size(-1))  # [..., o] -> [t, o]
        x = x.reshape(-1, x.size(-1))  # [..., i] -> [t, i]
        d_weight = ctx.sink(dy, x) if ctx.needs_input_grad[1] else None
        return dx, d_weight, dy.sum(dim=0) if ctx.needs_input_grad[2] else None, None
