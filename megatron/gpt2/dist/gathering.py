"""What every rank sees of all others, and sums over ranks. Every rank calls each of these at the same place; alone nothing is sent."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

import mpu


def gather_rows(row: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """row [n] of any dtype, on the device of the rank -> [ranks, n] on the host. It waits for the device. group: None
    for the world."""
    if not dist.is_initialized():
        return row[None].cpu()
    own = row if dist.get_backend(group) == "nccl" else row.cpu()
    rows = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, own, group=group)
    return torch.stack(rows).cpu()


def gather_bytes(data: bytes, device: torch.device, group: ProcessGroup | None = None) -> list[bytes]:
    """The data of each rank, by rank. device: this rank's."""
    own = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    lengths = gather_rows(torch.tensor([len(own)], device=device), group).view(-1).tolist()
    padded = torch.zeros(max(*lengths, 1), dtype=torch.uint8, device=device)
    padded[: len(own)] = own
    return [row[:length].numpy().tobytes() for row, length in zip(gather_rows(padded, group), lengths, strict=True)]


def gather_texts(text: str, device: torch.device, group: ProcessGroup | None = None) -> list[str]:
    """The text of each rank, by rank."""
    return [data.decode() for data in gather_bytes(text.encode(), device, group)]


def gather_over_ranks(number: int, device: torch.device) -> list[int]:
    """The numbers of all ranks, by rank, each below 2^63. device: this rank's."""
    return [int(theirs) for theirs in gather_rows(torch.tensor([number], device=device)).view(-1)]


def max_over_ranks(number: int, device: torch.device) -> int:
    """The largest of all ranks' numbers, each below 2^63. device: this rank's, on which NCCL needs the number."""
    if not dist.is_initialized():
        return number
    shared = torch.tensor(number, dtype=torch.int64, device=device if dist.get_backend() == "nccl" else "cpu")
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    return int(shared)


def global_sum(values: Iterable[Tensor], group: ProcessGroup | None) -> Tensor:
    """The scalars `values`, stacked as float64 and summed over the ranks of `group`: [n], on their device."""
    stacked = torch.stack([value.double() for value in values])
    if group is not None and group.size() > 1:
        dist.all_reduce(stacked, group=group)
    return stacked


def sum_over_replicas(values: Iterable[Tensor], parallel: mpu.ParallelState) -> Tensor:
    """`global_sum` over the data-parallel ranks and the stages of the pipeline, of which only one has other values
    than 0. Every rank gets the sum."""
    total = global_sum(values, parallel.data_parallel_group)
    return global_sum(total, parallel.pipeline_model_parallel_group)


def sum_losses(losses: Tensor, step: float = 2.0**-32) -> Tensor:
    """Σ losses, each rounded to a multiple of `step`, a power of two, as a float64 scalar. Below 2^53 · step no sum of
    such numbers is rounded, so that the order of micro-batches and ranks decides no digit. The default is for nats per
    token."""
    return (losses.double() / step).round().sum() * step
