"""Operations of a transformer layer for a GPU. Memory bandwidth limits all of them except matrix products.

    add_norm:               out = x + dropout(branch + bias) and y = norm(out)
    split_qkv:              queries, keys and values; backward copies their gradients once
    linear_gelu:            z = xAᵀ + a and y = gelu(z)
    linear_gelu_backward:   the gradient of z from the gradient of yBᵀ

The functions that use the output of a linear layer take the bias of the layer as an argument. The backward of these
functions has the gradient of the output in registers, and adds it up, which gives the gradient of the bias.

The last two operators contain a matrix product. Their Triton kernels compute GELU while the product's result is in
registers, so z is not read again in forward, and the gradient of y is never written. The first call on a GPU times the
Triton kernel, and torch's product followed by a kernel for GELU. Later calls use the faster one.

A pass reads or writes as many elements as the layer's input has. In addition to its products, a layer without dropout
takes 30 passes if GELU is computed with the products, and else 42; torch's operators take 63 and torch.compile takes
56. With dropout these numbers are 32, 44, 71 and 65. `tests/fake_cuda/test_kernels.py` counts the passes.
`in_triton.py` has the times on an H200.

Legend: b batch, s sequence, t = s · b tokens, h hidden, n heads, d head size.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mpu.kernels.dropout import DROPOUT, drop_threshold
from mpu.kernels.triton_kernel import Examples, TritonKernel, example_tensor

WIDEST = 4096  # The sums of a row with this number of elements fit into a GPU's registers.


class ResidualTerms(NamedTuple):
    """The terms of the hidden states x + dropout(branch + bias), [s, b, h], which are not added yet. The kernel that
    adds the terms also computes the next layer norm, and so need not read the sum again.

    branch, bias: [s, b, h] and [h], or None if the hidden states are x.
    dropout_seeds: int64 [b, 3], or None without dropout.
    dropout_p, location, first_position: see `seeded_dropout`.
    """

    x: Tensor
    branch: Tensor | None = None
    bias: Tensor | None = None
    dropout_seeds: Tensor | None = None
    dropout_p: float = 0.0
    location: int = 0
    first_position: int = 0


def has_fused_layer(x: Tensor) -> bool:
    """Return True if the functions below support hidden states x [..., h]."""
    is_supported = x.dtype in (torch.float32, torch.bfloat16, torch.float16) and x.size(-1) <= WIDEST
    return x.is_cuda and is_supported and not torch.is_autocast_enabled("cuda")


def split_qkv(qkv: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """[s, b, n, 3, d] -> three views [b, n, s, d].

    bias: the bias [3·n·d] that was already added to qkv. Backward returns the gradient of the bias.
    """
    out: tuple[Tensor, Tensor, Tensor] = _SplitQKV.apply(qkv, bias)  # type: ignore[no-untyped-call]
    return out


def add_norm(terms: ResidualTerms, norm: torch.nn.LayerNorm | None) -> tuple[Tensor, Tensor]:
    """Return out = x + dropout(branch + bias) and y = norm(out), [s, b, h]. Without a norm y is empty."""
    x, branch, bias, seeds, p, *mask_args = terms
    affine = (None, None, 0.0) if norm is None else (norm.weight, norm.bias, norm.eps)
    out: tuple[Tensor, Tensor] = _AddNorm.apply(  # type: ignore[no-untyped-call]
        x, branch, bias, *affine, seeds, drop_threshold(p), *mask_args
    )
    return out


def sum_terms(x: Tensor | ResidualTerms) -> Tensor:
    """Return the hidden states [s, b, h]: x, or the sum of its terms if x is `ResidualTerms`."""
    return x if isinstance(x, Tensor) else add_norm(x, None)[0]


class _SplitQKV(torch.autograd.Function):
    """See `split_qkv`. Forward ignores the bias; backward returns its gradient."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
        ctx.has_bias = bias is not None
        return qkv.permute(3, 1, 2, 0, 4).unbind(0)  # [s, b, n, 3, d] -> [3, b, n, s, d] -> three of [b, n, s, d]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        stacked, total = STACK_QKV(*(grad.permute(2, 0, 1, 3) for grad in grads))  # [b, n, s, d] -> [s, b, n, d]
        return stacked, total if ctx.has_bias else None


class _AddNorm(torch.autograd.Function):
    """See `add_norm`: x, branch [s, b, h] and vectors [h] -> out, y [s, b, h]. Forward saves `out` and the statistics
    of its tokens. It does not save a dropout mask: backward computes the mask again from the seeds."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        branch: Tensor | None,
        bias: Tensor | None,
        weight: Tensor | None,
        norm_bias: Tensor | None,
        eps: float,
        seeds: Tensor | None,
        *mask_args: Any,
    ) -> tuple[Tensor, Tensor]:
        out, y, mean, rstd = ADD_NORM(x, branch, bias, weight, norm_bias, eps, seeds, *mask_args)
        out = x.view_as(x) if branch is None else out
        ctx.save_for_backward(*((None,) * 3 if weight is None else (out, mean, rstd)), weight, seeds)
        ctx.mask_args, ctx.has_branch = mask_args, branch is not None
        return out, y

    @staticmethod
    def backward(ctx: Any, grad: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, rstd, weight, seeds = ctx.saved_tensors
        dy_of_norm = None if weight is None else dy
        dx, d_branch, of_vectors = ADD_NORM_BACKWARD(grad, dy_of_norm, x, mean, rstd, weight, seeds, *ctx.mask_args)
        dx = grad if weight is None else dx
        d_branch = dx if seeds is None else d_branch
        of_branch = (d_branch, of_vectors[0]) if ctx.has_branch else (None, None)
        return dx, *of_branch, *((None, None) if weight is None else of_vectors[1:].unbind()), *[None] * 5


# --- the operators: the reference in PyTorch, the Triton kernel, examples, and shapes without values ------------------


def _gelu(x: Tensor, approximate: str) -> Tensor:
    return F.gelu(x, approximate=approximate)


def _gelu_examples(dtype: torch.dtype) -> Examples:
    for approximate in ("tanh", "none"):
        yield example_tensor(dtype, 5, 3, 300), approximate


def _gelu_backward_(grad: Tensor, total: Tensor, x: Tensor, approximate: str) -> None:
    """Replace grad [..., f], the gradient of gelu(x), by the gradient of x [..., f], and total [f] by its sum."""
    grad.copy_(torch.ops.aten.gelu_backward(grad, x, approximate=approximate))
    total.copy_(grad.flatten(0, -2).sum(dim=0))


def _gelu_backward_examples(dtype: torch.dtype) -> Examples:
    for x, approximate in _gelu_examples(dtype):
        yield x.flip(0), x[0, 0].clone(), x, approximate


def _linear_gelu(x: Tensor, weight: Tensor, bias: Tensor, approximate: str) -> tuple[Tensor, Tensor]:
    """[..., h], [f, h], [f] -> z = xAᵀ + a and gelu(z), [..., f].

    approximate: see F.gelu.
    """
    z = F.linear(x, weight, bias)
    return z, GELU(z, approximate)


def _linear_gelu_examples(dtype: torch.dtype) -> Examples:
    if dtype != torch.float32:  # The kernels multiply only 16-bit numbers.
        for approximate in ("tanh", "none"):
            x, weight, bias = (example_tensor(dtype, *shape) for shape in ((5, 30, 72), (264, 72), (264,)))
            yield x, weight / 9, bias, approximate


def _linear_gelu_backward(dy: Tensor, weight: Tensor, z: Tensor, approximate: str) -> tuple[Tensor, Tensor]:
    """[..., h], [h, f], [..., f] -> the gradient of z from the gradient dy of gelu(z)Bᵀ, and its sum [f]."""
    dz, d_bias = dy @ weight, z.new_empty(z.size(-1))
    GELU_BACKWARD(dz, d_bias, z, approximate)
    return dz, d_bias


def _linear_gelu_backward_examples(dtype: torch.dtype) -> Examples:
    for x, weight, _, approximate in _linear_gelu_examples(dtype):
        yield x, weight.t().contiguous(), example_tensor(dtype, 5, 30, 264), approximate


def _stack_qkv(dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
    """Three of [s, b, n, d] -> [s, b, n, 3, d], contiguous, and its sum [n·3·d]."""
    stacked = torch.stack((dq, dk, dv), dim=3)
    return stacked, stacked.flatten(2).sum(dim=(0, 1))


def _qkv_examples(dtype: torch.dtype) -> Examples:
    stacked = example_tensor(dtype, 5, 3, 2, 3, 40)  # [s, b, n, 3, d]
    yield stacked.unbind(3)
    yield stacked.permute(3, 1, 2, 0, 4).contiguous().permute(0, 3, 1, 2, 4).unbind()  # of three [b, n, s, d]


def _bias_dropout_add_norm(
    x: Tensor,
    branch: Tensor | None,
    bias: Tensor | None,
    weight: Tensor | None,
    norm_bias: Tensor | None,
    eps: float,
    seeds: Tensor | None,
    dropped: int,
    location: int,
    first_position: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return out and y [s, b, h], and the mean and the inverse standard deviation of each token of out, [t] float32.
    Without a branch, out is x, and the first result is empty. Without a weight there is no norm, and the last three
    results are empty.

    seeds, dropped, location, first_position: as in `_seeded_dropout`; without seeds nothing is dropped.
    """
    out, y, mean, rstd = (x.new_empty(0, dtype=dtype) for dtype in (x.dtype, x.dtype, torch.float32, torch.float32))
    if branch is not None and bias is not None:
        added = branch.float() + bias.float()
        if seeds is not None:
            added = DROPOUT.reference(added, dropped, seeds, location, first_position)
        out = x = (x.float() + added).to(x.dtype)
    if weight is not None and norm_bias is not None:
        wide = torch.native_layer_norm(x.float(), weight.shape, weight.float(), norm_bias.float(), eps)
        y, mean, rstd = wide[0].to(x.dtype), wide[1].flatten(), wide[2].flatten()
    return out, y, mean, rstd


NOTHING_DROPPED = (None, 0, 0, 0)


def _example_dropouts() -> tuple[tuple[Tensor | None, int, int, int], ...]:
    return (torch.tensor([[7, 1, 0], [2**31 - 5, 2**40, 3], [7, 2, 0]]), 32768, 2, 7), NOTHING_DROPPED


def _add_norm_examples(dtype: torch.dtype) -> Examples:
    # The numbers are multiples of 1/8, so their sums are exact in 16 bits: a rounded sum would change the mean.
    x, branch = example_tensor(dtype, 2, 5, 3, 100).mul(8).round().div(8)
    vectors = example_tensor(dtype, 3, 100).mul(8).round().div(8).unbind()
    for dropout in _example_dropouts():
        yield x, branch, *vectors, 1e-5, *dropout
        yield x, branch, vectors[0], None, None, 0.0, *dropout
    yield x, None, None, *vectors[1:], 1e-5, *NOTHING_DROPPED


def _bias_dropout_add_norm_backward(
    grad: Tensor,
    dy: Tensor | None,
    x: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor | None,
    weight: Tensor | None,
    seeds: Tensor | None,
    dropped: int,
    location: int,
    first_position: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x and branch [s, b, h], and those of bias, norm's weight and norm's bias [3, h].
    Without a norm the gradient of x is `grad`, the first result is empty, and the third is [1, h]. Without dropout the
    gradient of branch is the gradient of x, and the second result is empty.

    grad, dy: the gradients of out and y.
    x, mean, rstd: out and its statistics.
    """
    total, of_norm = grad.float(), []
    dx, d_branch = grad.new_empty(0), grad.new_empty(0)  # Results of an operator may not share memory.
    if weight is not None:
        assert dy is not None and x is not None and mean is not None and rstd is not None
        inverse = rstd.view(*x.shape[:-1], 1)
        normed = (x.float() - mean.view_as(inverse)) * inverse
        of_normed = dy.float() * weight.float()
        along = (of_normed * normed).mean(dim=-1, keepdim=True)
        dx = (total + inverse * (of_normed - of_normed.mean(dim=-1, keepdim=True) - normed * along)).to(grad.dtype)
        total, of_norm = dx.float(), [dy.float() * normed, dy.float()]
    if seeds is not None:
        total = DROPOUT.reference(total, dropped, seeds, location, first_position)
        d_branch = total.to(grad.dtype)
    return dx, d_branch, torch.stack([total, *of_norm]).sum(dim=(1, 2)).to(grad.dtype)


def _add_norm_backward_examples(dtype: torch.dtype) -> Examples:
    grad, dy, x = example_tensor(dtype, 3, 5, 3, 100)
    weight, mean = example_tensor(dtype, 100), x.float().mean(dim=-1).flatten()
    for dropout in _example_dropouts():
        yield grad, dy, x, mean, torch.ones_like(mean), weight, *dropout
        yield grad, None, None, None, None, None, *dropout


def _add_norm_fake(
    x: Tensor, branch: Tensor | None, bias: Tensor | None, weight: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out, y = (x.new_empty(0 if given is None else x.shape) for given in (branch, weight))
    mean, rstd = (x.new_empty(y.numel() // x.size(-1), dtype=torch.float32) for _ in range(2))
    return out, y, mean, rstd


def _add_norm_backward_fake(grad: Tensor, *rest: Any) -> Any:
    *_, weight, seeds, _, _, _ = rest
    sizes = (0 if given is None else grad.shape for given in (weight, seeds))
    return *(grad.new_empty(size) for size in sizes), grad.new_empty(1 if weight is None else 3, grad.size(-1))


GELU = TritonKernel(_gelu, _gelu_examples)
GELU_BACKWARD = TritonKernel(_gelu_backward_, _gelu_backward_examples, mutates_args=("grad", "total"))
linear_gelu = TritonKernel(_linear_gelu, _linear_gelu_examples, is_measured=True)
linear_gelu_backward = TritonKernel(_linear_gelu_backward, _linear_gelu_backward_examples, is_measured=True)
STACK_QKV = TritonKernel(_stack_qkv, _qkv_examples)
ADD_NORM = TritonKernel(_bias_dropout_add_norm, _add_norm_examples, fake=_add_norm_fake)
ADD_NORM_BACKWARD = TritonKernel(
    _bias_dropout_add_norm_backward, _add_norm_backward_examples, fake=_add_norm_backward_fake
)
