"""Collectives: one call by every rank of a group, instead of many messages."""

import torch
import torch.distributed as dist
from ranks import run, say


def main(rank: int, world_size: int) -> None:
    x = torch.arange(4.0) + 10 * rank
    say(f"begins with {x.tolist()}")

    y = x.clone()
    dist.broadcast(y, src=0)
    say(f"broadcast       {y.tolist()}  what rank 0 has")

    y = x.clone()
    dist.all_reduce(y)
    say(f"all-reduce      {y.tolist()}  the sum, on every rank")

    for operation, result in (
        (dist.ReduceOp.PRODUCT, "the product"),
        (dist.ReduceOp.MIN, "the minimum"),
        (dist.ReduceOp.MAX, "the maximum"),
    ):
        y = x.clone()
        dist.all_reduce(y, op=operation)
        say(f"all-reduce      {y.tolist()}  {result}, on every rank")

    y = x.clone()
    dist.reduce(y, dst=0)
    say(f"reduce          {y.tolist()}  the sum, on rank 0" if rank == 0 else "reduce          (no result)")

    parts = [torch.empty(4) for _ in range(world_size)]
    dist.gather(x, parts if rank == 0 else None, dst=0)
    say(f"gather          {torch.cat(parts).tolist()}  what all have" if rank == 0 else "gather          (no result)")

    part = torch.empty(4 // world_size)
    dist.scatter(part, list(x.chunk(world_size)) if rank == 0 else None, src=0)
    say(f"scatter         {part.tolist()}  a part of what rank 0 has")

    parts = [torch.empty(4) for _ in range(world_size)]
    dist.all_gather(parts, x)
    say(f"all-gather      {torch.cat(parts).tolist()}  what all have, side by side")

    dist.reduce_scatter(part, list(x.chunk(world_size)))
    say(f"reduce-scatter  {part.tolist()}  a part of the sum for each rank")

    # An all-reduce is a reduce-scatter and an all-gather, one after the other.
    parts = [torch.empty_like(part) for _ in range(world_size)]
    dist.all_gather(parts, part)
    dist.all_reduce(x)
    assert torch.equal(torch.cat(parts), x)


if __name__ == "__main__":
    run(main)
