"""Point-to-point communication between pipeline stages: hidden states to the next stage, gradients to the previous one.

Training schedules use `batched_p2p_ops`, which starts several transfers at once. The other functions serve a single
forward pass through the whole pipeline, as in generation. Peers are ranks in the pipeline group (default: the default
pipeline group). Without a group, or with one rank, nothing is sent.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mpu.initialize import get_pipeline_model_parallel_group, group_rank_and_size


@dataclass
class Transfer:
    """A tensor that is being sent or received. Call `wait` before you read a received tensor or overwrite a sent
    tensor. A `Transfer` keeps its tensor in memory."""

    tensor: Tensor
    works: list[dist.Work] = field(default_factory=list)

    def wait(self) -> Tensor:
        """Wait for the transfer and return the tensor. On a GPU the current stream waits, not the host."""
        while self.works:
            self.works.pop().wait()
        return self.tensor


def batched_p2p_ops(
    sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], group: ProcessGroup
) -> tuple[list[Transfer], list[Transfer]]:
    """Start to send and receive contiguous tensors, each with its peer. Return the transfers of the sends and of the
    receives, in order.

    NCCL runs all of these transfers as one operation. Transfers between two ranks are matched by their order.
    """
    operations = [
        dist.P2POp(operator, tensor, group=group, group_peer=peer)
        for operator, pairs in ((dist.isend, sends), (dist.irecv, receives))
        for tensor, peer in pairs
    ]
    if not operations:
        return [], []
    works = dist.batch_isend_irecv(operations)
    if len(works) < len(operations):  # gloo returns one work for each operation; NCCL returns one work for all of them.
        works *= len(operations)
    transfers = [Transfer(tensor, [work]) for (tensor, _), work in zip((*sends, *receives), works, strict=True)]
    return transfers[: len(sends)], transfers[len(sends) :]


def _pipeline(group: ProcessGroup | None) -> tuple[ProcessGroup | None, int, int]:
    """Return the pipeline group (None for one rank), this rank's number in the group, and the size of the group."""
    group = group or get_pipeline_model_parallel_group()
    rank, size = group_rank_and_size(group)
    return group if size > 1 else None, rank, size


def send_forward(x: Tensor, group: ProcessGroup | None = None, *, ring: bool = False) -> None:
    """Send x, of any shape, to the next rank of the pipeline, and return when x is sent. The last rank sends nothing.

    ring: the last rank sends to the first rank, which computes the next model chunk.
    """
    group, rank, size = _pipeline(group)
    if group is not None and (ring or rank < size - 1):
        dist.send(x.contiguous(), group=group, group_dst=(rank + 1) % size)


def recv_forward(into: Tensor, group: ProcessGroup | None = None, *, ring: bool = False) -> Tensor:
    """Receive from the previous rank of the pipeline into `into`, a contiguous tensor, and return `into`. The first
    rank returns `into` unchanged. Megatron's function takes a shape instead, and its first rank returns None.

    ring: the first rank receives from the last rank.
    """
    group, rank, size = _pipeline(group)
    if group is not None and (ring or rank > 0):
        dist.recv(into, group=group, group_src=(rank - 1) % size)
    return into


def broadcast_from_last_stage(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Overwrite x on every rank of the pipeline with the last rank's x, and return it. x is contiguous, and has the
    same shape and dtype on all ranks."""
    group, _, size = _pipeline(group)
    if group is not None:
        dist.broadcast(x, group=group, group_src=size - 1)
    return x
