"""The operations that are measured: their buffers, their call, and the values that they must give.

Legend: `n` ranks, `r` a rank, `i` an element's index. `bytes` are those that nccl-tests counts: the whole buffer of one
rank, and all n blocks where an operation has n blocks.

The values to check are exact in every dtype, and periodic, so that the expected ones of 256 MB cost nothing:

    moved    (i + 7 r) mod 125
    reduced  2^e  with e = ±(((i + r²) mod 3) - 1), + for even ranks: sums and products of many ranks stay in range
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

import mpu
from megatron.gpt2.commands.collectives.ring import ring_all_reduce

PERIOD = 375  # elements; the least that holds both 3 and 125
REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {  # of [members, n], by their names in `dist.ReduceOp`
    "SUM": lambda x: x.sum(0),
    "PRODUCT": lambda x: x.prod(0),
    "MIN": lambda x: x.amin(0),
    "MAX": lambda x: x.amax(0),
}
TILES = 2048  # periods that are compared or written at once
TOLERANCE = {torch.float32: 1e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # relative; for the order of summation

# torch 2.13 gave these two new names and warns of the old ones; 2.11 has the old ones alone.
all_gather_single: Callable[..., object] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Callable[..., object] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


@dataclass(frozen=True)
class World:
    """This rank among all, with the device and dtype to measure with.

    half: the group of this rank's half of the world. across: the group of this rank and its counterpart in the other
    half. Both are None where the world has no such groups.
    """

    rank: int
    size: int
    device: torch.device
    dtype: torch.dtype
    half: ProcessGroup | None = None
    across: ProcessGroup | None = None


@dataclass(frozen=True)
class Trial:
    """An operation with its buffers.

    run: does it once. correct: whether the first run gave the right values. in_place: the buffers to set to zero after
    that, since a hundred sums in place would leave any range. messages: those that follow each other in one run, by
    which its time is divided.
    """

    bytes: int
    run: Callable[[], object]
    correct: Callable[[], bool]
    in_place: tuple[Tensor, ...] = ()
    messages: int = 1  # one after the other in a run; a run's time is divided by them


Prepare = Callable[[World, int], Trial]  # (world, bytes) -> Trial; called by every rank


@dataclass(frozen=True)
class Operation:
    """How to prepare an operation, and what it is made of.

    bus_factor: of the number of ranks that take part; times the algorithm bandwidth it is the bus bandwidth.
    """

    prepare: Prepare
    bus_factor: Callable[[int], float] = lambda n: 1.0
    subgroups: bool = False  # for worlds of an even number of ranks, 4 at least
    point_to_point: bool = False  # made of send and recv
    sizes: bool = True  # else it has no message, and is measured once


def make_world(device: torch.device, dtype: torch.dtype) -> World:
    """The world with its subgroups; every rank calls it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if size < 4 or size % 2:
        return World(rank, size, device, dtype)
    state = mpu.initialize_model_parallel(size // 2)
    return World(rank, size, device, dtype, state.model_parallel_group, state.data_parallel_group)


def moved(rank: int) -> Tensor:
    """[PERIOD] values by which the block of a rank is recognised."""
    return ((torch.arange(PERIOD) + 7 * rank) % 125).double()


def reduced(rank: int) -> Tensor:
    """[PERIOD] values of a rank to reduce."""
    exponent = (torch.arange(PERIOD) + rank * rank) % 3 - 1
    return torch.pow(2.0, (exponent if rank % 2 == 0 else -exponent).double())


def combined(kind: str, members: range) -> Tensor:
    """[PERIOD] values that reducing over these ranks gives."""
    return REDUCTIONS[kind](torch.stack([reduced(member) for member in members]))  # [members, PERIOD] -> [PERIOD]


def tile(values: Tensor, like: Tensor) -> Tensor:
    """[PERIOD] -> [up to TILES x PERIOD], as many as `like` needs."""
    return values.to(like.device, like.dtype).repeat(min(TILES, -(-like.numel() // PERIOD)))


def fill(buffer: Tensor, values: Tensor) -> Tensor:
    """Write the periodic `values` into `buffer`, which is returned."""
    tiled = tile(values, buffer)
    for part in buffer.split(TILES * PERIOD):
        part.copy_(tiled[: part.numel()])
    return buffer


def filled(world: World, size: int, values: Tensor) -> Tensor:
    """A new buffer of `size` bytes with the periodic `values`."""
    return fill(torch.empty(elements(world, size), device=world.device, dtype=world.dtype), values)


def holds(buffer: Tensor, values: Tensor) -> bool:
    """Whether the buffer is the periodic values, within the dtype's rounding."""
    tiled = tile(values, buffer)
    return all(close(part, tiled[: part.numel()]) for part in buffer.split(TILES * PERIOD))


def close(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors of one dtype are equal within TOLERANCE."""
    return torch.allclose(left.double(), right.double(), rtol=TOLERANCE[left.dtype], atol=0)


def elements(world: World, size: int) -> int:
    """How many elements of the world's dtype `size` bytes are, at least 1."""
    return max(1, size // world.dtype.itemsize)


def empty_blocks(world: World, size: int) -> Tensor:
    """[n, block] of `size` bytes in all, or as near below as n equal blocks come; NaN until something is received."""
    block = max(1, elements(world, size) // world.size)
    return torch.full((world.size, block), torch.nan, device=world.device, dtype=world.dtype)


def broadcast(world: World, size: int) -> Trial:
    """One buffer, from rank 0 to all."""
    buffer = filled(world, size, moved(1 + world.rank))
    return Trial(buffer.nbytes, lambda: dist.broadcast(buffer, 0), lambda: holds(buffer, moved(1)))


def all_reduce(kind: str, subgroup: str = "") -> Prepare:
    """One buffer, combined over all ranks or over a `subgroup` ("half", "across"); kind: of `dist.ReduceOp`."""

    def prepare(world: World, size: int) -> Trial:
        n, half = world.size, world.size // 2
        members, group = range(n), None
        if subgroup == "half":
            members, group = range(world.rank // half * half, (world.rank // half + 1) * half), world.half
        elif subgroup == "across":
            members, group = range(world.rank % half, n, half), world.across
        buffer = filled(world, size, reduced(world.rank))
        return Trial(
            buffer.nbytes,
            lambda: dist.all_reduce(buffer, getattr(dist.ReduceOp, kind), group=group),
            lambda: holds(buffer, combined(kind, members)),
            in_place=(buffer,),
        )

    return prepare


def reduce(world: World, size: int) -> Trial:
    """One buffer, summed over all ranks on rank 0."""
    buffer = filled(world, size, reduced(world.rank))
    return Trial(
        buffer.nbytes,
        lambda: dist.reduce(buffer, 0),
        lambda: world.rank != 0 or holds(buffer, combined("SUM", range(world.size))),
        in_place=(buffer,),
    )


def ring(world: World, size: int) -> Trial:
    """As all_reduce with SUM, by the ring of ring.py; the backend's own result is what is right."""
    buffer = filled(world, size, reduced(world.rank))
    reference = buffer.clone()
    dist.all_reduce(reference)
    return Trial(
        buffer.nbytes,
        lambda: ring_all_reduce(buffer),
        lambda: all(
            close(ours, theirs)
            for ours, theirs in zip(buffer.split(TILES * PERIOD), reference.split(TILES * PERIOD), strict=True)
        ),
        in_place=(buffer,),
    )


def all_gather(world: World, size: int) -> Trial:
    """A block of each rank, all of them on every rank."""
    received = empty_blocks(world, size)
    sent = fill(torch.empty_like(received[0]), moved(world.rank))
    return Trial(
        received.nbytes,
        lambda: all_gather_single(received.view(-1), sent),
        lambda: all(holds(block, moved(r)) for r, block in enumerate(received)),
    )


def gather(world: World, size: int) -> Trial:
    """A block of each rank, all of them on rank 0."""
    received = empty_blocks(world, size)
    sent = fill(torch.empty_like(received[0]), moved(world.rank))
    blocks = list(received) if world.rank == 0 else None
    return Trial(
        received.nbytes,
        lambda: dist.gather(sent, blocks, 0),
        lambda: world.rank != 0 or all(holds(block, moved(r)) for r, block in enumerate(received)),
    )


def scatter(world: World, size: int) -> Trial:
    """A block for each rank, from rank 0."""
    sent = empty_blocks(world, size)
    received = torch.full_like(sent[0], torch.nan)
    blocks = [fill(block, moved(r)) for r, block in enumerate(sent)] if world.rank == 0 else None
    return Trial(sent.nbytes, lambda: dist.scatter(received, blocks, 0), lambda: holds(received, moved(world.rank)))


def reduce_scatter(world: World, size: int) -> Trial:
    """n blocks on each rank; rank r gets the sum of all blocks r."""
    sent = empty_blocks(world, size)
    fill(sent.view(-1), reduced(world.rank))
    received = torch.full_like(sent[0], torch.nan)
    expected = combined("SUM", range(world.size)).roll(-world.rank * received.numel() % PERIOD)  # this rank's block
    return Trial(sent.nbytes, lambda: reduce_scatter_single(received, sent.view(-1)), lambda: holds(received, expected))


def all_to_all(world: World, size: int) -> Trial:
    """n blocks on each rank; block t goes to rank t."""
    sent, received, n = empty_blocks(world, size), empty_blocks(world, size), world.size
    for target, block in enumerate(sent):
        fill(block, moved(world.rank * n + target))
    return Trial(
        sent.nbytes,
        lambda: dist.all_to_all_single(received.view(-1), sent.view(-1)),
        lambda: all(holds(block, moved(source * n + world.rank)) for source, block in enumerate(received)),
    )


def barrier(world: World, size: int) -> Trial:
    """No message: the ranks wait for each other."""
    return Trial(0, dist.barrier, lambda: True)


def partner(world: World) -> int | None:
    """The rank at the same place in the other half; of an odd number of ranks the last one has none."""
    half = world.size // 2
    return (world.rank + half) % (2 * half) if world.rank < 2 * half else None


def between_partners(at_once: bool) -> Prepare:
    """There and back between partners, one message after the other, or both `at_once`."""

    def prepare(world: World, size: int) -> Trial:
        peer = partner(world)
        sent = filled(world, size, moved(world.rank))
        received = torch.full_like(sent, torch.nan)

        def run() -> None:
            if peer is None:
                return
            if at_once:
                both = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]
                for work in dist.batch_isend_irecv(both):
                    work.wait()
            elif world.rank < peer:
                dist.send(sent, peer)
                dist.recv(received, peer)
            else:
                dist.recv(received, peer)
                dist.send(sent, peer)

        return Trial(
            sent.nbytes, run, lambda: peer is None or holds(received, moved(peer)), messages=1 if at_once else 2
        )

    return prepare


def there_and_on(n: int) -> float:
    """2 (n-1)/n: every element is summed over n ranks and brought back to them, over each link."""
    return 2 * (n - 1) / n


def all_but_own(n: int) -> float:
    """(n-1)/n: of n blocks a rank keeps its own, and the others pass its link."""
    return (n - 1) / n


# In the order of the table. The factors are nccl-tests' (doc/PERFORMANCE.md there).
OPERATIONS = {
    "broadcast": Operation(broadcast),
    **{f"all_reduce_{kind.lower()}": Operation(all_reduce(kind), there_and_on) for kind in REDUCTIONS},
    "ring_all_reduce": Operation(ring, there_and_on, point_to_point=True),
    "all_reduce_halves": Operation(all_reduce("SUM", "half"), lambda n: there_and_on(n // 2), subgroups=True),
    "all_reduce_across": Operation(all_reduce("SUM", "across"), lambda n: there_and_on(2), subgroups=True),
    "reduce": Operation(reduce),
    "all_gather": Operation(all_gather, all_but_own),
    "reduce_scatter": Operation(reduce_scatter, all_but_own),
    "gather": Operation(gather, all_but_own),
    "scatter": Operation(scatter, all_but_own),
    "all_to_all": Operation(all_to_all, all_but_own),
    "send_recv": Operation(between_partners(at_once=False), point_to_point=True),
    "isend_irecv": Operation(between_partners(at_once=True), point_to_point=True),
    "barrier": Operation(barrier, sizes=False),
}
