"""Collectives for small values. All ranks of a group must call each function of this module."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

import mpu


def gather_rows(row: Tensor) -> Tensor:
    """Gather `row` from every rank, and return [world_size, n] on the host. The function waits for the device.

    row: [n] on this rank's device.
    """
    if not dist.is_initialized():
        return row[None].cpu()
    sent = row if dist.get_backend() == "nccl" else row.cpu()
    rows = [torch.empty_like(sent) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, sent)
    return torch.stack(rows).cpu()


def gather_strings(text: str, group: ProcessGroup | None = None) -> list[str]:
    """Gather a string from each rank of `group` (default: all ranks). NCCL needs the rank's own GPU as the current CUDA
    device."""
    if not dist.is_initialized():
        return [text]
    texts = [""] * dist.get_world_size(group)
    dist.all_gather_object(texts, text, group=group)
    return texts


def gather_ints(number: int, device: torch.device) -> list[int]:
    """Gather an integer below 2^63 from each rank.

    device: this rank's device.
    """
    return gather_rows(torch.tensor([number], device=device)).view(-1).tolist()


def all_reduce_scalars(values: Iterable[Tensor], group: ProcessGroup | None) -> Tensor:
    """Sum each of the n scalars `values` over the ranks of `group`. Return [n] float64."""
    stacked = torch.stack([value.double() for value in values])
    if group is not None and group.size() > 1:
        dist.all_reduce(stacked, group=group)
    return stacked


def all_reduce_over_data_and_pipeline(values: Iterable[Tensor], parallel: mpu.ParallelState) -> Tensor:
    """Sum each of the n scalars `values` over data-parallel ranks and pipeline stages. Return [n] float64. The stages
    that do not compute a value pass 0."""
    total = all_reduce_scalars(values, parallel.data_parallel_group)
    return all_reduce_scalars(total, parallel.pipeline_model_parallel_group)


def sum_losses(losses: Tensor, step: float = 2.0**-32) -> Tensor:
    """Round each loss to a multiple of `step` and return their sum, a float64 scalar.

    float64 represents all multiples of a power of two `step` below 2^53 · step. Sums are therefore exact and do not
    depend on the order of micro-batches and ranks. The default `step` is for losses in nats per token.
    """
    return (losses.double() / step).round().sum() * step
