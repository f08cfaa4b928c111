"""A ring all-reduce in the open: `isend` and `irecv` to the neighbours, and an addition.

Legend: `n` ranks, `N` elements, `c` a chunk (one of n), `j` a segment of a chunk, `t` a step.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work

# A segment below this size costs more in messages than its overlap gains; beyond eight nothing is left to overlap.
SEGMENT_BYTES = 1 << 19
MOST_SEGMENTS = 8


def ring_all_reduce(tensor: Tensor, *, segments: int | None = None) -> None:
    """tensor <- sum over all ranks of tensor, in place; every rank gets the same bits.

    The N elements are cut into n chunks. In step t = 0 … 2(n-1)-1 rank r

        sends     chunk (r - t)     mod n  to rank r + 1,
        receives  chunk (r - t - 1) mod n  from rank r - 1.

    In the first n-1 steps what arrives is added to the chunk here, so that after them rank r holds the whole sum of
    chunk r + 1; in the other n-1 it replaces the chunk here. Each rank sends 2(n-1)/n · N elements, whatever n: that
    is the factor of the bus bandwidth.

    A chunk of step t + 1 is the one that step t has received. So each chunk travels in segments, and a segment sets
    out as soon as its own sum is there, while those behind it still arrive: sending and adding overlap.

    tensor: contiguous, of the same shape and dtype on every rank, any number of elements; what N leaves over beyond
    a multiple of n · segments makes some segments longer by one, and an empty one is not sent.
    segments: for each chunk, the same on every rank; by default one for each 512 KB, at most 8.
    """
    n, rank = dist.get_world_size(), dist.get_rank()
    if n == 1:
        return
    ahead, behind = (rank + 1) % n, (rank - 1) % n
    steps = 2 * (n - 1)
    if segments is None:
        chunk_bytes = tensor.numel() * tensor.element_size() // n
        segments = max(1, min(MOST_SEGMENTS, chunk_bytes // SEGMENT_BYTES))
    # pieces[c][j] is segment j of chunk c, a view of [about N / (n · segments)]
    pieces = [chunk.tensor_split(segments) for chunk in tensor.view(-1).tensor_split(n)]
    inbox = [torch.empty_like(piece) for piece in pieces[0]]  # no later chunk is longer than the first

    def arriving(step: int, j: int) -> Tensor:
        """Where segment j of step `step` is received: beside its chunk while sums are made, else in its place."""
        piece = pieces[(rank - step - 1) % n][j]
        return inbox[j][: piece.numel()] if step < n - 1 else piece

    def exchange(step: int, j: int) -> list[Work]:
        """Start sending and receiving segment j of a step."""
        parcels = ((dist.isend, pieces[(rank - step) % n][j], ahead), (dist.irecv, arriving(step, j), behind))
        # As a batch: NCCL runs what it is given one by one in that order, and two sends that face each other would
        # wait for ever. The tag keeps the segments of a slower neighbour apart.
        batch = [dist.P2POp(operation, piece, peer, tag=j) for operation, piece, peer in parcels if piece.numel()]
        return dist.batch_isend_irecv(batch) if batch else []

    travelling = [exchange(0, j) for j in range(segments)]
    for step in range(steps):
        for j in range(segments):
            for work in travelling[j]:
                work.wait()
            if step < n - 1:
                pieces[(rank - step - 1) % n][j].add_(arriving(step, j))
            if step + 1 < steps:
                travelling[j] = exchange(step + 1, j)
