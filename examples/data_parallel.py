"""Data parallelism by hand: every rank has the whole model and a part of the batch, and the gradients are averaged."""

import torch
import torch.distributed as dist
from ranks import run, say
from torch import nn

BATCH, STEPS = 8, 5


def train(x: torch.Tensor, y: torch.Tensor, average: bool) -> tuple[list[float], nn.Module]:
    """Train a model on these samples. Return the loss of each step, and the model."""
    torch.manual_seed(1)  # every rank starts with the same weights
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
            loss = loss.detach()
            dist.all_reduce(loss)  # Only the log needs the mean loss of all ranks.
            loss /= dist.get_world_size()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


def main(rank: int, world_size: int) -> None:
    x = torch.randn(BATCH, 4)
    y = x.sum(1, keepdim=True)
    alone, _ = train(x, y, average=False)  # One process would train on the whole batch.
    part = slice(rank * BATCH // world_size, (rank + 1) * BATCH // world_size)
    shared, model = train(x[part], y[part], average=True)
    say("alone    " + " ".join(f"{loss:.4f}" for loss in alone))
    say("together " + " ".join(f"{loss:.4f}" for loss in shared))
    # The mean of the means of equal parts is the mean of the whole batch: only rounding differs.
    assert torch.allclose(torch.tensor(shared), torch.tensor(alone), atol=1e-6)
    for parameter in model.parameters():  # the ranks' models are still equal
        of_rank_0 = parameter.detach().clone()
        dist.broadcast(of_rank_0, src=0)
        assert torch.equal(parameter, of_rank_0)


if __name__ == "__main__":
    run(main)
