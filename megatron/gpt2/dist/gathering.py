"""Gather small values from all ranks, and sum over ranks. All ranks of the group must call each function."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

import mpu


def gather_rows(row: Tensor) -> Tensor:
    """Gather `row` [n] from every rank: [world_size, n] on the host. The function waits for the device.

    row: a tensor on the rank's device.
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
    """Stack the n scalars `values` as float64 and sum them over the ranks of `group`: [n]."""
    stacked = torch.stack([value.double() for value in values])
    if group is not None and group.size() > 1:
        dist.all_reduce(stacked, group=group)
    return stacked


def all_reduce_over_data_and_pipeline(values: Iterable[Tensor], parallel: mpu.ParallelState) -> Tensor:
    """Apply `all_reduce_scalars` over data-parallel ranks and pipeline stages. All stages except one pass zeros."""
    total = all_reduce_scalars(values, parallel.data_parallel_group)
    return all_reduce_scalars(total, parallel.pipeline_model_parallel_group)


def sum_losses(losses: Tensor, step: float = 2.0**-32) -> Tensor:
    """Round each loss to a multiple of `step` (a power of two) and sum them as a float64 scalar.

    Sums of such numbers below 2^53 · step are exact, so the result does not depend on the order of micro-batches and
    ranks. The default is for nats per token.
    """
    return (losses.double() / step).round().sum() * step
