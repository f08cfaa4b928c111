"""Tensor parallelism by hand: an MLP whose two matrices are split over the ranks, and the two operations f and g."""

import torch
import torch.distributed as dist
from ranks import run, say
from torch import Tensor
from torch.nn.functional import gelu


class F(torch.autograd.Function):
    """The operation f before the column-split matrix. Forward: nothing. Backward: the gradients of the ranks are
    summed, because each rank has computed only the part of its columns."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        return x.view_as(x)  # autograd requires that `forward` returns a new tensor

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Tensor:  # type: ignore[override]
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient


class G(torch.autograd.Function):
    """The operation g after the row-split matrix. Forward: the ranks' partial sums are summed. Backward: nothing,
    because the gradient of a sum is the same for each term."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, y: Tensor) -> Tensor:
        y = y.clone()
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


def main(rank: int, world_size: int) -> None:
    h, width = 6, 8
    x, up, down = torch.randn(3, h), torch.randn(width, h), torch.randn(h, width)
    # `up` is stored [out, in], like the weight of nn.Linear. The matrix A of the tutorial is up.T, and the columns of A
    # are the rows of `up`.
    whole = x.clone().requires_grad_()
    expected = gelu(whole @ up.T) @ down.T
    expected.sum().backward()

    mine = slice(rank * width // world_size, (rank + 1) * width // world_size)
    split = x.clone().requires_grad_()
    y = G.apply(gelu(F.apply(split) @ up[mine].T) @ down[:, mine].T)  # GELU needs no other rank
    y.sum().backward()
    assert split.grad is not None and whole.grad is not None
    assert torch.allclose(y, expected, atol=1e-4), "the output differs"
    assert torch.allclose(split.grad, whole.grad, atol=1e-4), "the gradient of x differs"
    say(f"{2 * up[mine].numel()} of {2 * up.numel()} weights, the same output and gradient")


if __name__ == "__main__":
    run(main)
