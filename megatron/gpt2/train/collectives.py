"""Numbers that ranks share. Every rank calls each of these at the same place; in a world of one nothing is sent."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

import mpu
from megatron.gpt2.dist.gathering import gather_rows

# To what losses are rounded before they are added up: a loss in nats per token, and the nats of a micro-batch.
LOSS_STEP, NATS_STEP = 2.0**-32, 2.0**-20


def exact_sum(values: Tensor, step: float) -> Tensor:
    """Σ values, each rounded to a multiple of `step`, a power of two, as a float64 scalar. Below 2^53 · step no sum of
    such numbers is rounded, so that their order decides nothing."""
    return (values.double() / step).round().sum() * step


def max_over_ranks(number: int, device: torch.device) -> int:
    """The largest of all ranks' numbers, each below 2^63. device: this rank's, on which NCCL needs the number."""
    if not dist.is_initialized():
        return number
    shared = torch.tensor(number, dtype=torch.int64, device=device if dist.get_backend() == "nccl" else "cpu")
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    return int(shared)


def gather_over_ranks(number: int, device: torch.device) -> list[int]:
    """The numbers of all ranks, by rank, each below 2^63. device: as for `max_over_ranks`."""
    return [int(theirs) for theirs in gather_rows(torch.tensor([number], device=device)).view(-1)]


def global_sum(values: Iterable[Tensor], group: ProcessGroup | None) -> Tensor:
    """The scalars `values`, stacked as float64 and summed over the ranks of `group`: [n], on their device."""
    stacked = torch.stack([value.double() for value in values])
    if group is not None and group.size() > 1:
        dist.all_reduce(stacked, group=group)
    return stacked


def sum_over_replicas(values: Iterable[Tensor], parallel: mpu.ParallelState) -> Tensor:
    """`global_sum` over the data-parallel ranks and the stages of the pipeline, of which one alone has other values
    than 0. Every rank gets the sum."""
    total = global_sum(values, parallel.data_parallel_group)
    return global_sum(total, parallel.pipeline_model_parallel_group)
