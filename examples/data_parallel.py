"""Data parallelism by hand: every rank has the whole model and a part of the batch, and the gradients are averaged."""

import torch
import torch.distributed as dist
from ranks import run, say
from torch import nn

BATCH, STEPS = 8, 5


def train(x: torch.Tensor, y: torch.Tensor, average: bool) -> list[float]:
    """The losses of some steps on this rank's part of the batch."""
    torch.manual_seed(1)  # every rank begins with the same weights
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(STEPS):
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        if average:
            for parameter in model.parameters():
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
            dist.all_reduce(loss.detach())  # for the log alone: the mean over the whole batch
            loss = loss.detach() / dist.get_world_size()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main(rank: int, world_size: int) -> None:
    x = torch.randn(BATCH, 4)
    y = x.sum(1, keepdim=True)
    whole = train(x, y, average=False)  # as one process alone does it
    part = slice(rank * BATCH // world_size, (rank + 1) * BATCH // world_size)
    shared = train(x[part], y[part], average=True)
    say("losses " + " ".join(f"{loss:.4f}" for loss in shared))
    # The mean of the means of equal parts is the mean of the whole: nothing but rounding differs.
    assert torch.allclose(torch.tensor(shared), torch.tensor(whole), atol=1e-6)


if __name__ == "__main__":
    run(main)
