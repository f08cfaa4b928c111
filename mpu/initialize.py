"""Process groups of tensor, pipeline and data parallelism.

Ranks are numbered by tensor, then data, then pipeline, as in Megatron, so that the ranks that communicate most are
neighbours. Example: 16 ranks with tensor size 2 and pipeline size 4:

    tensor      (0,1) (2,3) (4,5) …         hold different shards of the same layers
    data        (0,2) (1,3) (4,6) …         hold the same shards and read different samples
    pipeline    (0,4,8,12) (1,5,9,13) …     hold different layers
    embedding   (0,12) (1,13) …             first and last stage of a pipeline: both hold the tied word embeddings
    model       (0,1,4,5,8,9,12,13) …       tensor x pipeline: together hold one whole model

Without a pipeline, the model-parallel group is the tensor group, as in Megatron's first release (2019).
"""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


@dataclass(frozen=True, kw_only=True)
class ParallelState:
    """The groups of this rank, its rank in each group, and the sizes of the groups.

    Without torch.distributed all groups are None. Without a pipeline, the pipeline and embedding groups are None and
    the model-parallel group is the tensor group. On middle stages of a pipeline the embedding group is None.
    """

    tensor_model_parallel_group: ProcessGroup | None = None
    pipeline_model_parallel_group: ProcessGroup | None = None
    data_parallel_group: ProcessGroup | None = None
    model_parallel_group: ProcessGroup | None = None
    embedding_group: ProcessGroup | None = None
    tensor_model_parallel_rank: int = 0
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_rank: int = 0
    pipeline_model_parallel_size: int = 1
    data_parallel_rank: int = 0
    data_parallel_size: int = 1

    @property
    def world_size(self) -> int:
        """The number of all ranks."""
        return self.model_parallel_size * self.data_parallel_size

    @property
    def rank(self) -> int:
        """The global rank."""
        tensor_group_index = self.pipeline_model_parallel_rank * self.data_parallel_size + self.data_parallel_rank
        return tensor_group_index * self.tensor_model_parallel_size + self.tensor_model_parallel_rank

    @property
    def model_parallel_rank(self) -> int:
        """This rank's number in its model-parallel group, ordered by tensor, then pipeline."""
        return self.pipeline_model_parallel_rank * self.tensor_model_parallel_size + self.tensor_model_parallel_rank

    @property
    def model_parallel_size(self) -> int:
        """The number of ranks that together hold one whole model."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size

    @property
    def model_parallel_src_rank(self) -> int:
        """The global rank of the first member of this rank's model-parallel group."""
        return self.data_parallel_rank * self.tensor_model_parallel_size

    @property
    def tensor_model_parallel_src_rank(self) -> int:
        """The global rank of the first member of this rank's tensor-parallel group."""
        return self.rank - self.tensor_model_parallel_rank

    @property
    def is_pipeline_first_stage(self) -> bool:
        """Whether this rank embeds the tokens."""
        return self.pipeline_model_parallel_rank == 0

    @property
    def is_pipeline_last_stage(self) -> bool:
        """Whether this rank computes the loss."""
        return self.pipeline_model_parallel_rank == self.pipeline_model_parallel_size - 1


_default: ParallelState | None = None


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1, pipeline_model_parallel_size: int = 1, *, timeout: timedelta | None = None
) -> ParallelState:
    """Create the groups, make the new state the default, and return it. Every rank of the world must call this
    function.

    Without torch.distributed only size 1 is possible, and no group is created. Raises ValueError if the number of ranks
    is not divisible by the sizes. (Megatron's first release lowered a size above the number of
    ranks, without a message.)

    timeout: the time limit of collectives of these groups (default: torch.distributed's).
    """
    global _default
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    tp, pp = tensor_model_parallel_size, pipeline_model_parallel_size
    if tp < 1 or pp < 1 or world_size % (tp * pp):
        raise ValueError(
            f"the world size {world_size} is not divisible by the tensor-parallel size {tp}"
            + (f" x {pp} pipeline stages" if pp != 1 else "")
        )
    dp = world_size // (tp * pp)
    ranks = torch.arange(world_size).view(pp, dp, tp)  # [pipeline, data, tensor]
    pipelines = ranks.permute(1, 2, 0).reshape(-1, pp)
    tensor = model = _new_group(ranks.view(-1, tp), timeout)
    data = _new_group(ranks.transpose(1, 2).reshape(-1, dp), timeout)
    pipeline = embedding = None
    if pp > 1:
        model = _new_group(ranks.transpose(0, 1).reshape(dp, -1), timeout)
        pipeline = _new_group(pipelines, timeout)
        embedding = _new_group(pipelines[:, [0, -1]], timeout)
    _default = ParallelState(
        tensor_model_parallel_group=tensor,
        pipeline_model_parallel_group=pipeline,
        data_parallel_group=data,
        model_parallel_group=model,
        embedding_group=embedding,
        tensor_model_parallel_rank=rank % tp,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_rank=rank // (tp * dp),
        pipeline_model_parallel_size=pp,
        data_parallel_rank=rank // tp % dp,
        data_parallel_size=dp,
    )
    return _default


def _new_group(groups: Tensor, timeout: timedelta | None) -> ProcessGroup | None:
    """Create a process group for each row of `groups`, and return the group of this rank. All ranks must create all
    groups in the same order."""
    if not dist.is_initialized():
        return None
    return dist.new_subgroups_by_enumeration(groups.tolist(), timeout=timeout)[0]  # type: ignore[no-any-return]


def new_tensor_and_data_parallel_group(timeout: timedelta | None = None) -> ProcessGroup | None:
    """Create a group of all ranks of each pipeline stage (tensor x data), and return the group of this rank. Every rank
    of the world must call this function."""
    state = get_parallel_state()
    if state.tensor_model_parallel_size == 1:
        return state.data_parallel_group
    return _new_group(torch.arange(state.world_size).view(state.pipeline_model_parallel_size, -1), timeout)


def model_parallel_is_initialized() -> bool:
    """Return True if `initialize_model_parallel` has set the default state."""
    return _default is not None


def destroy_model_parallel() -> None:
    """Remove the default state. The process groups exist until torch.distributed is shut down."""
    global _default
    _default = None


def get_parallel_state() -> ParallelState:
    """Return the default state. Call `initialize_model_parallel` first."""
    assert _default is not None, "call mpu.initialize_model_parallel first"
    return _default


# Functions that read the default state, with the names of Megatron


def get_model_parallel_group() -> ProcessGroup | None:
    """The ranks that hold one copy of the model: tensor-parallel × pipeline-parallel."""
    return get_parallel_state().model_parallel_group


def get_model_parallel_rank() -> int:
    """The number of this rank in the model-parallel group."""
    return get_parallel_state().model_parallel_rank


def get_model_parallel_world_size() -> int:
    """The number of ranks that together hold one copy of the model."""
    return get_parallel_state().model_parallel_size


def get_model_parallel_src_rank() -> int:
    """The global rank of the first rank of the model-parallel group."""
    return get_parallel_state().model_parallel_src_rank


def get_tensor_model_parallel_group() -> ProcessGroup | None:
    """The ranks over which the layers of this stage are split."""
    return get_parallel_state().tensor_model_parallel_group


def get_tensor_model_parallel_rank() -> int:
    """The number of this rank in the tensor-parallel group."""
    return get_parallel_state().tensor_model_parallel_rank


def get_tensor_model_parallel_world_size() -> int:
    """The number of ranks over which a layer is split."""
    return get_parallel_state().tensor_model_parallel_size


def get_tensor_model_parallel_src_rank() -> int:
    """The global rank of the first rank of the tensor-parallel group."""
    return get_parallel_state().tensor_model_parallel_src_rank


def get_pipeline_model_parallel_group() -> ProcessGroup | None:
    """The ranks of this rank's pipeline, one per stage, or None without a pipeline."""
    return get_parallel_state().pipeline_model_parallel_group


def get_pipeline_model_parallel_rank() -> int:
    """The number of this rank's pipeline stage, starting from 0."""
    return get_parallel_state().pipeline_model_parallel_rank


def get_pipeline_model_parallel_world_size() -> int:
    """The number of pipeline stages."""
    return get_parallel_state().pipeline_model_parallel_size


def is_pipeline_first_stage() -> bool:
    """Return True if this rank embeds the tokens."""
    return get_parallel_state().is_pipeline_first_stage


def is_pipeline_last_stage() -> bool:
    """Return True if this rank computes the loss."""
    return get_parallel_state().is_pipeline_last_stage


def get_embedding_group() -> ProcessGroup | None:
    """The ranks of the first and the last stage, which both have the tied matrix, or None on other stages."""
    return get_parallel_state().embedding_group


def get_data_parallel_group() -> ProcessGroup | None:
    """The ranks that hold the same part of the model and read different samples."""
    return get_parallel_state().data_parallel_group


def get_data_parallel_rank() -> int:
    """The number of this rank in the data-parallel group."""
    return get_parallel_state().data_parallel_rank


def get_data_parallel_world_size() -> int:
    """The number of copies of the model."""
    return get_parallel_state().data_parallel_size


def group_rank_and_size(group: ProcessGroup | None) -> tuple[int, int]:
    """Return this process's rank in `group` and the size of the group, or (0, 1) if group is None."""
    return (group.rank(), group.size()) if group is not None else (0, 1)
