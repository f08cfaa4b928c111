"""Values of all ranks, and sums over ranks. Every rank calls each of these at the same place; a single rank sends
nothing."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

import mpu


def gather_rows(row: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Gather `row` [n], on the device of the rank, from every rank: [ranks, n] on the host. Waits for the device.

    group: None for the world.
    """
    if not dist.is_initialized():
        return row[None].cpu()
    own = row if dist.get_backend(group) == "nccl" else row.cpu()
    rows = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, own, group=group)
    return torch.stack(rows).cpu()


def gather_texts(text: str, group: ProcessGroup | None = None) -> list[str]:
    """Return the text of each rank, by rank. With NCCL, the current CUDA device has to be this rank's."""
    if not dist.is_initialized():
        return [text]
    texts = [""] * dist.get_world_size(group)
    dist.all_gather_object(texts, text, group=group)
    return texts


def gather_over_ranks(number: int, device: torch.device) -> list[int]:
    """Return the number of each rank, by rank, each below 2^63. device: of this rank."""
    return gather_rows(torch.tensor([number], device=device)).view(-1).tolist()


def global_sum(values: Iterable[Tensor], group: ProcessGroup | None) -> Tensor:
    """Stack the scalars `values` as float64 and sum them over the ranks of `group`: [n], on their device."""
    stacked = torch.stack([value.double() for value in values])
    if group is not None and group.size() > 1:
        dist.all_reduce(stacked, group=group)
    return stacked


def sum_over_replicas(values: Iterable[Tensor], parallel: mpu.ParallelState) -> Tensor:
    """Apply `global_sum` over the data-parallel ranks and the pipeline's stages, all but one of which have zeros. Every
    rank gets the sum."""
    total = global_sum(values, parallel.data_parallel_group)
    return global_sum(total, parallel.pipeline_model_parallel_group)


def sum_losses(losses: Tensor, step: float = 2.0**-32) -> Tensor:
    """Sum `losses`, each rounded to a multiple of `step` (a power of two), as a float64 scalar.

    No sum of such numbers below 2^53 · step is rounded, so the order of micro-batches and ranks decides no digit. The
    default is for nats per token.
    """
    return (losses.double() / step).round().sum() * step
