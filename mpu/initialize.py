"""The groups of ranks: those that share the layers, and those that share the data.

With 8 ranks and model-parallel size 2, the model-parallel groups are (0,1) (2,3) (4,5) (6,7): the ranks of each hold
different shards of the same layers. They communicate most, so they are neighbours. The data-parallel groups are
(0,2,4,6) and (1,3,5,7): the ranks of each hold the same shard and read different samples.
"""

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class ParallelState:
    """The groups of one rank, its rank in each, and their sizes. Both groups are None without torch.distributed."""

    model_parallel_group: ProcessGroup | None = None
    data_parallel_group: ProcessGroup | None = None
    model_parallel_rank: int = 0
    model_parallel_size: int = 1
    data_parallel_rank: int = 0
    data_parallel_size: int = 1

    @property
    def world_size(self) -> int:
        """The number of ranks in all."""
        return self.model_parallel_size * self.data_parallel_size

    @property
    def rank(self) -> int:
        """The global rank."""
        return self.data_parallel_rank * self.model_parallel_size + self.model_parallel_rank

    @property
    def model_parallel_src_rank(self) -> int:
        """The global rank of the first member of this rank's model-parallel group."""
        return self.data_parallel_rank * self.model_parallel_size


_default: ParallelState | None = None


def initialize_model_parallel(model_parallel_size: int, *, timeout: timedelta | None = None) -> ParallelState:
    """Make the groups, install the state as the default and return it.

    Every rank of the world calls it. Without torch.distributed only size 1 is possible, and no group is made.
    timeout: of the collectives of the groups (default: that of torch.distributed).
    Raises ValueError where the number of ranks is not divisible by the size. Megatron of 2019 then took the smaller of
    the two numbers in silence.
    """
    global _default
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    if model_parallel_size < 1 or world_size % model_parallel_size:
        raise ValueError(f"a world of {world_size} ranks is not divisible by the model-parallel size "
                         f"{model_parallel_size}")
    size = model_parallel_size
    model_group = data_group = None
    if dist.is_initialized():
        # Every rank takes part in making every group, in the same order, and gets the one that it is in.
        model_group, _ = dist.new_subgroups_by_enumeration(
            [list(range(first, first + size)) for first in range(0, world_size, size)], timeout=timeout)
        data_group, _ = dist.new_subgroups_by_enumeration(
            [list(range(offset, world_size, size)) for offset in range(size)], timeout=timeout)
    _default = ParallelState(model_group, data_group, rank % size, size, rank // size, world_size // size)
    return _default


def model_parallel_is_initialized() -> bool:
    """Whether there is a default state."""
    return _default is not None


def destroy_model_parallel() -> None:
    """Remove the default state. The process groups themselves end with torch.distributed."""
    global _default
    _default = None


def get_parallel_state() -> ParallelState:
    """The default state. `initialize_model_parallel` must have been called."""
    assert _default is not None, "call mpu.initialize_model_parallel first"
    return _default


def get_model_parallel_group() -> ProcessGroup | None:
    """The ranks that hold the other shards of this rank's layers. None without torch.distributed."""
    return get_parallel_state().model_parallel_group


def get_data_parallel_group() -> ProcessGroup | None:
    """The ranks that hold the same shard as this rank. None without torch.distributed."""
    return get_parallel_state().data_parallel_group


def get_model_parallel_rank() -> int:
    """This rank's number in its model-parallel group."""
    return get_parallel_state().model_parallel_rank


def get_data_parallel_rank() -> int:
    """This rank's number in its data-parallel group."""
    return get_parallel_state().data_parallel_rank


def get_model_parallel_world_size() -> int:
    """The number of ranks over which each layer is split."""
    return get_parallel_state().model_parallel_size


def get_data_parallel_world_size() -> int:
    """The number of ranks that hold the same shard."""
    return get_parallel_state().data_parallel_size


def get_model_parallel_src_rank() -> int:
    """The global rank of the first member of this rank's model-parallel group."""
    return get_parallel_state().model_parallel_src_rank


def group_rank_and_size(group: ProcessGroup | None) -> tuple[int, int]:
    """This process's rank in `group` and the size of the group. (0, 1) without a group."""
    return (group.rank(), group.size()) if group is not None else (0, 1)
