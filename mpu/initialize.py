"""The groups of ranks: who shares layers, who shares data.

With 8 ranks and model-parallel size 2, ranks (0,1) (2,3) (4,5) (6,7) share each layer, neighbours because they
talk most, and (0,2,4,6) (1,3,5,7) hold the same shard and share data.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class ParallelState:
    """Groups, ranks and sizes of one rank. A group is None where it has one member and torch.distributed is off."""

    model_parallel_group: ProcessGroup | None = None
    data_parallel_group: ProcessGroup | None = None
    model_parallel_rank: int = 0
    model_parallel_size: int = 1
    data_parallel_rank: int = 0
    data_parallel_size: int = 1

    @property
    def world_size(self) -> int:
        return self.model_parallel_size * self.data_parallel_size

    @property
    def rank(self) -> int:
        return self.data_parallel_rank * self.model_parallel_size + self.model_parallel_rank

    @property
    def model_parallel_src_rank(self) -> int:
        """Global rank of the first member of this rank's model-parallel group."""
        return self.data_parallel_rank * self.model_parallel_size


_default: ParallelState | None = None


def initialize_model_parallel(model_parallel_size: int, *, timeout: timedelta | None = None) -> ParallelState:
    """Make the groups, install the state as the default and return it.

    Every rank of the world calls it. Without torch.distributed only size 1 is possible, and no group is made.
    Raises ValueError where the world is not divisible by the size (2019's Megatron took the minimum in silence).
    """
    global _default
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    if model_parallel_size < 1 or world_size % model_parallel_size:
        raise ValueError(f"a world of {world_size} ranks is not divisible by --model-parallel-size "
                         f"{model_parallel_size}")
    size = model_parallel_size
    model_group = data_group = None
    if dist.is_initialized():
        # Every rank takes part in making every group, in the same order.
        for first in range(0, world_size, size):
            members = list(range(first, first + size))
            group = dist.new_group(members, timeout=timeout)
            model_group = group if rank in members else model_group
        for offset in range(size):
            members = list(range(offset, world_size, size))
            group = dist.new_group(members, timeout=timeout)
            data_group = group if rank in members else data_group
    _default = ParallelState(model_group, data_group, rank % size, size, rank // size, world_size // size)
    return _default


def model_parallel_is_initialized() -> bool:
    return _default is not None


def destroy_model_parallel() -> None:
    """Forget the default state. The process groups themselves end with torch.distributed."""
    global _default
    _default = None


def get_parallel_state() -> ParallelState:
    assert _default is not None, "call mpu.initialize_model_parallel first"
    return _default


def get_model_parallel_group() -> ProcessGroup | None:
    return get_parallel_state().model_parallel_group


def get_data_parallel_group() -> ProcessGroup | None:
    return get_parallel_state().data_parallel_group


def get_model_parallel_rank() -> int:
    return get_parallel_state().model_parallel_rank


def get_data_parallel_rank() -> int:
    return get_parallel_state().data_parallel_rank


def get_model_parallel_world_size() -> int:
    return get_parallel_state().model_parallel_size


def get_data_parallel_world_size() -> int:
    return get_parallel_state().data_parallel_size


def get_model_parallel_src_rank() -> int:
    return get_parallel_state().model_parallel_src_rank


def group_rank_and_size(group: ProcessGroup | None) -> tuple[int, int]:
    """This process's rank in `group` and the group's size; (0, 1) without one."""
    return (group.rank(), group.size()) if group is not None else (0, 1)
