"""Two ranks send each other a tensor. A message needs two calls: one rank sends, the other one receives."""

import torch
import torch.distributed as dist
from ranks import run, say


def main(rank: int, world_size: int) -> None:
    # Rank 0 sends, rank 1 receives. `recv` returns when the numbers have arrived.
    x = torch.full((3,), 7.0) if rank == 0 else torch.zeros(3)
    if rank == 0:
        dist.send(x, dst=1)
    else:
        dist.recv(x, src=0)
    say(f"after one message x is {x.tolist()}")

    # Both ranks send and receive. If both call `send` first and then `recv`, they could wait for each other forever.
    # `isend` and `irecv` only start a transfer; `wait` finishes it.
    mine, theirs = torch.tensor([float(rank)]), torch.empty(1)
    other = 1 - rank
    for work in (dist.isend(mine, dst=other), dist.irecv(theirs, src=other)):
        assert work is not None
        work.wait()
    say(f"I have {mine.item():g} and got {theirs.item():g}")


if __name__ == "__main__":
    run(main)
