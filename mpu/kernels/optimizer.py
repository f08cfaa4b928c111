"""Operations on the lists of tensors of an optimizer: the sum of squares for the gradient norm, sums of gradients, and
AdamW. A GPU computes each operation in one pass and one launch (`in_triton.py`).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from mpu.kernels.triton_kernel import Examples, TritonKernel, example_tensor

EXAMPLE_SIZES = (64, 16384, 40_000)


def _sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Σ x² of all tensors, which are on one device: a float32 scalar."""
    total = torch.zeros((), dtype=torch.float32, device=tensors[0].device)
    for tensor in tensors:
        total += torch.linalg.vector_norm(tensor, dtype=torch.float32) ** 2
    return total


def _add_grads_(totals: Sequence[Tensor], grads: Sequence[Tensor], add: bool) -> None:
    """totals += grads, or totals = grads without `add`.

    totals: float32.
    grads: all of the same dtype.
    """
    for total, grad in zip(totals, grads, strict=True):
        if add:
            total.add_(grad)
        else:
            total.copy_(grad)


def _adamw_(
    masters: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    out_params: Sequence[Tensor],
    rate: Tensor,
    grad_scale: Tensor,
    found_inf: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """AdamW with the gradients grads / grad_scale, and out_params = masters, rounded. `grads` may be overwritten.

    masters, grads, exp_avgs, exp_avg_sqs: 1-D float32.
    steps: for each master, the number of its updates, a float32 scalar; all are equal.
    out_params: in 16 bits, or empty.
    rate, grad_scale, found_inf: float32 scalars. Nothing changes if found_inf is 1.
    """
    # The class torch.optim.AdamW would import the compiler, which takes 0.9 s.
    adamw(
        list(masters),
        list(grads),
        list(exp_avgs),
        list(exp_avg_sqs),
        [],
        list(steps),
        fused=True,
        grad_scale=grad_scale,
        found_inf=found_inf,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=rate,
        weight_decay=weight_decay,
        eps=eps,
        maximize=False,
    )
    for param, master in zip(out_params, masters, strict=bool(out_params)):
        param.copy_(master)


def _example_tensors(dtype: torch.dtype) -> list[Tensor]:
    return [example_tensor(dtype, size) for size in EXAMPLE_SIZES]


def _examples_of_squares(dtype: torch.dtype) -> Examples:
    yield (_example_tensors(dtype),)


def _examples_of_add(dtype: torch.dtype) -> Examples:
    for of_grads in (torch.float32, torch.bfloat16, torch.float16):
        for add in (False, True):
            yield _example_tensors(torch.float32), _example_tensors(of_grads), add


def _examples_of_adamw(dtype: torch.dtype) -> Examples:
    tensors = _example_tensors(torch.float32)
    rate, scale, zero, three = torch.tensor([0.1, 2.0, 0.0, 3.0]).unbind()
    for of_params in (None, torch.bfloat16, torch.float16):
        yield (
            tensors,
            [x.flip(0) for x in tensors],
            [x.roll(1) for x in tensors],
            [x.square() for x in tensors],
            [three] * len(tensors),
            [torch.zeros_like(x, dtype=of_params) for x in tensors] if of_params else [],
            *(rate, scale, zero, 0.9, 0.999, 1e-3, 0.1),
        )


def _nothing(*args: Any) -> None:
    """Replace an operation that only writes into its arguments, if the tensors have no values."""


sum_of_squares = TritonKernel(_sum_of_squares, _examples_of_squares)
add_grads_ = TritonKernel(_add_grads_, _examples_of_add, ("totals",), _nothing)
adamw_ = TritonKernel(
    _adamw_, _examples_of_adamw, ("masters", "exp_avgs", "exp_avg_sqs", "steps", "out_params"), _nothing
)
