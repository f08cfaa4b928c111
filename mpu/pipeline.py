"""What the stages of a pipeline send each other: hidden states onward, their gradients back.

`exchange` posts several transfers at once, which is how a training schedule uses it. The other functions serve a single
forward pass through the whole pipeline, as in generation. Peers are numbers in the pipeline group (default: the default
pipeline group). Without a group, or in one of one rank, nothing is sent.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mpu.initialize import get_pipeline_model_parallel_group, group_rank_and_size


@dataclass
class Transfer:
    """A tensor on its way from or to another stage. The tensor lives as long as this; `wait` before it is read, or, if
    it is sent, before it is written."""

    tensor: Tensor
    works: list[dist.Work] = field(default_factory=list)

    def wait(self) -> Tensor:
        """The tensor, complete. On a GPU the current stream waits, not the host."""
        while self.works:
            self.works.pop().wait()
        return self.tensor


def exchange(
    sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], group: ProcessGroup
) -> tuple[list[Transfer], list[Transfer]]:
    """Begin to send and receive contiguous tensors, each with its peer: the transfers of both, in their order.

    NCCL runs them as one: all of them proceed at once, and they match those of a peer by their order.
    """
    operations = [
        dist.P2POp(what, tensor, group=group, group_peer=peer)
        for what, pairs in ((dist.isend, sends), (dist.irecv, receives))
        for tensor, peer in pairs
    ]
    if not operations:
        return [], []
    works = dist.batch_isend_irecv(operations)
    one_each = len(works) == len(operations)  # gloo; NCCL gives one for all together
    transfers = [
        Transfer(tensor, [works[number]] if one_each else list(works))
        for number, (tensor, _) in enumerate((*sends, *receives))
    ]
    return transfers[: len(sends)], transfers[len(sends) :]


def _pipeline(group: ProcessGroup | None) -> tuple[ProcessGroup | None, int, int]:
    """The group, None if it has one rank; this rank in it, and its size."""
    group = group if group is not None else get_pipeline_model_parallel_group()
    rank, size = group_rank_and_size(group)
    return group if size > 1 else None, rank, size


def send_to_next_stage(x: Tensor, group: ProcessGroup | None = None) -> None:
    """Send x to the next rank of the pipeline; the last one sends to the first. Any shape. Returns when it is sent."""
    group, rank, size = _pipeline(group)
    if group is not None:
        dist.send(x.contiguous(), group=group, group_dst=(rank + 1) % size)


def receive_from_previous_stage(into: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Fill `into`, contiguous, with what the previous rank of the pipeline sends, and return it."""
    group, rank, size = _pipeline(group)
    if group is not None:
        dist.recv(into, group=group, group_src=(rank - 1) % size)
    return into


def broadcast_from_last_stage(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """x of the pipeline's last rank, on all of them, in the place of theirs: contiguous, of one shape and dtype."""
    group, _, size = _pipeline(group)
    if group is not None:
        dist.broadcast(x, group=group, group_src=size - 1)
    return x
