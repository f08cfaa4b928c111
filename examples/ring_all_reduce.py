"""Implement an all-reduce with sends and receives. Each rank sends only to its right neighbour, so all ranks have the
same work."""

import torch
import torch.distributed as dist
from ranks import run, say
from torch import Tensor


def shift(part: Tensor, rank: int, world_size: int) -> Tensor:
    """Send `part` to the right neighbour, and return the part from the left neighbour."""
    received = torch.empty_like(part)
    work = dist.isend(part, dst=(rank + 1) % world_size)
    dist.recv(received, src=(rank - 1) % world_size)
    assert work is not None
    work.wait()
    return received


def ring_all_reduce(x: Tensor, rank: int, world_size: int) -> int:
    """Replace x by its sum over all ranks. Return how many numbers this rank has sent. world_size must divide x's
    size."""
    parts = list(x.chunk(world_size))  # views of x
    sent = 0
    # Reduce-scatter: a part travels around the ring, and each rank adds its numbers. After world_size - 1 steps rank r
    # holds the whole sum of part r + 1 (the last rank: of part 0).
    for step in range(world_size - 1):
        give, take = (rank - step) % world_size, (rank - step - 1) % world_size
        parts[take] += shift(parts[give], rank, world_size)
        sent += parts[give].numel()
    # All-gather: the finished parts travel around once more.
    for step in range(world_size - 1):
        give, take = (rank + 1 - step) % world_size, (rank - step) % world_size
        parts[take].copy_(shift(parts[give], rank, world_size))
        sent += parts[give].numel()
    return sent


def main(rank: int, world_size: int) -> None:
    x = torch.randn(12) + rank
    expected = x.clone()
    dist.all_reduce(expected)
    sent = ring_all_reduce(x, rank, world_size)
    say(f"sent {sent} numbers for a tensor of {x.numel()}: 2 (n - 1) / n times its size")
    assert torch.allclose(x, expected)


if __name__ == "__main__":
    run(main, world_size=3)
