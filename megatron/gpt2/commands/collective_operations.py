"""Collectives, point-to-point messages and a ring all-reduce, each with test values and their right results.

Legend: n ranks, r a rank, i the index of an element. Bytes are counted as in nccl-tests: the whole buffer of one rank,
which is n blocks for an all-gather. The test values are exact in every dtype and repeat after PERIOD elements.
"""

import functools
import itertools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mpu.mappings import all_gather_single, reduce_scatter_single

SEGMENT_BYTES, MAX_SEGMENTS = 1 << 19, 8  # of the ring: in smaller segments, messages cost more than overlap gains
PERIOD = 375  # elements; the least common multiple of 3 and 125
TOLERANCE = {torch.float32: 1e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # relative; for the order of summation


class BenchGroup(NamedTuple):
    """A process group, and the device and dtype of its buffers."""

    group: ProcessGroup
    device: torch.device
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.group.size()

    @property
    def rank(self) -> int:
        """The rank within the group."""
        return self.group.rank()

    @property
    def partner(self) -> int:
        """The counterpart of this rank in the other half of the group. The last rank of an odd number has itself."""
        half = self.size // 2
        return self.rank if self.rank == 2 * half else (self.rank + half) % (2 * half)


def block_pattern(rank: int, block: int) -> Tensor:
    """[PERIOD] values that identify a block of a rank: (i + 7 r + 11 block) mod 125."""
    return ((torch.arange(PERIOD) + 7 * rank + 11 * block) % 125).double()


def reduce_pattern(rank: int, block: int) -> Tensor:
    """[PERIOD] values for reductions: 2^e with e = ±(((i + r² + block) mod 3) - 1), + for even ranks. Sums and products
    over many ranks stay in range."""
    return torch.pow(2.0, ((torch.arange(PERIOD) + rank * rank + block) % 3 - 1) * (-1) ** rank).double()


def ring_all_reduce(tensor: Tensor, *, segments: int | None = None) -> None:
    """Sum `tensor` over all ranks, in place. Every rank gets the same bits.

    The N elements are cut into n chunks. In step t = 0 … 2(n-1)-1, rank r

        sends     chunk (r - t)     mod n  to rank r + 1,
        receives  chunk (r - t - 1) mod n  from rank r - 1.

    In the first n-1 steps the received chunk is added to the local one; then rank r holds the complete sum of chunk
    r + 1. In the other n-1 steps it replaces the local one. Each rank sends 2(n-1)/n · N elements.

    A step sends the chunk that the step before has received. Chunks travel in segments: a segment is sent on as soon as
    its own sum is complete, so that sending and adding overlap.

    tensor: contiguous, with the same shape and dtype on all ranks, of which there are at least two. segments: of each
    chunk, the same on all ranks (default: one for each 512 KB, at most 8).
    """
    n, rank = dist.get_world_size(), dist.get_rank()
    segments = segments or max(1, min(MAX_SEGMENTS, tensor.nbytes // n // SEGMENT_BYTES))
    # chunks[c][j] is segment j of chunk c, a view of [about N / (n · segments)]
    chunks = [chunk.tensor_split(segments) for chunk in tensor.view(-1).tensor_split(n)]
    inbox = [torch.empty_like(segment) for segment in chunks[0]]  # no later chunk is longer than the first

    def receive_buffer(step: int, j: int) -> Tensor:
        segment = chunks[(rank - step - 1) % n][j]
        return inbox[j][: segment.numel()] if step < n - 1 else segment

    def exchange(step: int, j: int) -> list[dist.Work]:
        """Start to send and to receive segment j of a step."""
        send = dist.isend, chunks[(rank - step) % n][j], (rank + 1) % n
        receive = dist.irecv, receive_buffer(step, j), (rank - 1) % n
        # Use a batch, because NCCL runs single calls in order, and two ranks that both send first would deadlock. The tag
        # separates the segments of a slower neighbour.
        batch = [dist.P2POp(run, segment, peer, tag=j) for run, segment, peer in (send, receive) if segment.numel()]
        return dist.batch_isend_irecv(batch) if batch else []

    pending = [exchange(0, j) for j in range(segments)]
    for step, j in itertools.product(range(2 * (n - 1)), range(segments)):
        for work in pending[j]:
            work.wait()
        if step < n - 1:
            chunks[(rank - step - 1) % n][j].add_(receive_buffer(step, j))
        if step < 2 * (n - 1) - 1:
            pending[j] = exchange(step + 1, j)


def send_recv(g: BenchGroup, x: Tensor, y: Tensor) -> None:
    """Exchange messages between partners, one after the other."""
    for sends in (g.rank < g.partner, g.rank > g.partner):
        if g.rank != g.partner:
            dist.send(x, g.partner) if sends else dist.recv(y, g.partner)


def isend_irecv(g: BenchGroup, x: Tensor, y: Tensor) -> None:
    """Exchange messages between partners, both at once."""
    both = [dist.P2POp(dist.isend, x, g.partner), dist.P2POp(dist.irecv, y, g.partner)]
    for work in dist.batch_isend_irecv(both) if g.rank != g.partner else []:
        work.wait()


def allreduce_busbw_factor(n: int) -> float:
    """2 (n-1)/n: each element is summed over n ranks and sent back to them."""
    return 2 * (n - 1) / n


def allgather_busbw_factor(n: int) -> float:
    """(n-1)/n: a rank keeps its own block of n, and its link carries the other blocks."""
    return (n - 1) / n


class Operation(NamedTuple):
    """An operation on x [blocks, count], which holds `values(r, block)`, with the result y [blocks, count].

    expected(x, group): the first blocks of y, [.., PERIOD], from the x of all ranks, [n, blocks, PERIOD]; None if this
    rank gets no result. busbw_factor(n): bus bandwidth / algorithm bandwidth, as in nccl-tests' doc/PERFORMANCE.md;
    None for a barrier. x and y have n blocks, and y is NaN at first, if it is `allgather_busbw_factor`; otherwise there
    is one block, and y begins as a copy of x. over: name of the subgroup. messages: number of consecutive messages in a
    run of send and recv.
    """

    run: Callable[[BenchGroup, Tensor, Tensor], object]
    expected: Callable[[Tensor, BenchGroup], Tensor | None]
    busbw_factor: Callable[[int], float] | None = lambda n: 1.0
    values: Callable[[int, int], Tensor] = block_pattern
    over: str = ""
    messages: int = 0

    def blocks(self, g: BenchGroup) -> int:
        """Return the number of blocks of x and y."""
        return g.size if self.busbw_factor is allgather_busbw_factor else 1


def all_reduce(kind: str, combine: Callable[[Tensor], Tensor] = lambda x: x.sum(0), over: str = "") -> Operation:
    """Make an all-reduce. combine(x): its result over the first dimension of x."""
    operation = getattr(dist.ReduceOp, kind)
    return Operation(
        lambda g, x, y: dist.all_reduce(y, operation, group=g.group),
        lambda x, g: combine(x),
        allreduce_busbw_factor,
        reduce_pattern,
        over,
    )


def block_operation(run: Any, expected: Any, values: Callable[[int, int], Tensor] = block_pattern) -> Operation:
    """An operation on one block of each rank."""
    return Operation(run, expected, allgather_busbw_factor, values)


# In the order of the table.
OPERATIONS = {
    "broadcast": Operation(lambda g, x, y: dist.broadcast(y, group=g.group, group_src=0), lambda x, g: x[0]),
    "all_reduce_sum": all_reduce("SUM"),
    "all_reduce_product": all_reduce("PRODUCT", lambda x: x.prod(0)),
    "all_reduce_min": all_reduce("MIN", lambda x: x.amin(0)),
    "all_reduce_max": all_reduce("MAX", lambda x: x.amax(0)),
    "ring_all_reduce": all_reduce("SUM")._replace(run=lambda g, x, y: ring_all_reduce(y), messages=1),
    "all_reduce_halves": all_reduce("SUM", over="halves"),
    "all_reduce_across": all_reduce("SUM", over="across"),
    "reduce": Operation(
        lambda g, x, y: dist.reduce(y, group=g.group, group_dst=0),
        lambda x, g: x.sum(0) if g.rank == 0 else None,
        values=reduce_pattern,
    ),
    "all_gather": block_operation(
        lambda g, x, y: all_gather_single(y.view(-1), x[0], group=g.group), lambda x, g: x[:, 0]
    ),
    "reduce_scatter": block_operation(
        lambda g, x, y: reduce_scatter_single(y[0], x.view(-1), group=g.group),
        lambda x, g: x.sum(0)[g.rank :][:1],
        reduce_pattern,
    ),
    "gather": block_operation(
        lambda g, x, y: dist.gather(x[0], list(y) if g.rank == 0 else None, group=g.group, group_dst=0),
        lambda x, g: x[:, 0] if g.rank == 0 else None,
    ),
    "scatter": block_operation(
        lambda g, x, y: dist.scatter(y[0], list(x) if g.rank == 0 else None, group=g.group, group_src=0),
        lambda x, g: x[0, g.rank :][:1],
    ),
    "all_to_all": block_operation(
        lambda g, x, y: dist.all_to_all_single(y, x, group=g.group), lambda x, g: x[:, g.rank]
    ),
    "send_recv": Operation(send_recv, lambda x, g: x[g.partner], messages=2),
    "isend_irecv": Operation(isend_irecv, lambda x, g: x[g.partner], messages=1),
    "barrier": Operation(lambda g, x, y: dist.barrier(g.group), lambda x, g: None, None),
}


def input_pattern(operation: Operation, g: BenchGroup, rank: int) -> Tensor:
    """[blocks, PERIOD] values of x on the global rank `rank`."""
    return torch.stack([operation.values(rank, block) for block in range(operation.blocks(g))])


def repeat_pattern(values: Tensor, g: BenchGroup, count: int) -> Tensor:
    """[blocks, PERIOD] -> [blocks, count], on the device and in the dtype of the group."""
    return values.to(g.device, g.dtype).repeat(1, -(-count // PERIOD))[:, :count].contiguous()


def make_buffers(operation: Operation, g: BenchGroup, size: int) -> tuple[Tensor, Tensor]:
    """Make x and y of an operation: at most `size` bytes each, in equal blocks of at least one element."""
    blocks = operation.blocks(g)
    count = max(1, size // g.dtype.itemsize // blocks)
    x = repeat_pattern(input_pattern(operation, g, dist.get_global_rank(g.group, g.rank)), g, count)
    return x, torch.full_like(x, torch.nan) if blocks > 1 else x.clone()


def is_correct(operation: Operation, g: BenchGroup, y: Tensor) -> bool:
    """Return True if y is the result of the operation on this rank, within the rounding of the dtype."""
    ranks = dist.get_process_group_ranks(g.group)
    expected = operation.expected(torch.stack([input_pattern(operation, g, rank) for rank in ranks]), g)
    if expected is None:
        return True
    return torch.allclose(y[: len(expected)], repeat_pattern(expected, g, y.size(1)), rtol=TOLERANCE[g.dtype], atol=0)


def time_run(run: Callable[[], object], device: torch.device, group: ProcessGroup | None = None) -> float:
    """Return the seconds of one run on this rank, after a barrier and until the device has the result."""
    wait = functools.partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    dist.barrier(group)
    wait()
    start = time.perf_counter()
    run()
    wait()
    return time.perf_counter() - start
