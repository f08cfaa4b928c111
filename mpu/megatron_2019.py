"""Functions and classes for programs that use the `mpu` of Megatron's first release (2019), with its arguments. The
GPT-2 model uses only `checkpoint`, which is `mpu.random.checkpoint` with a process-wide default.

Legend: h hidden, tp tensor-parallel size.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mpu import random
from mpu.initialize import get_parallel_state
from mpu.layers import Device, InitMethod, ParallelLayer
from mpu.mappings import gather_from_model_parallel_region
from mpu.partition import PartitionSpec

_partition_activations = False


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Set the default of `checkpoint`'s distribute_saved_activations for this process."""
    global _partition_activations
    _partition_activations = partition_activation


def checkpoint(
    function: Callable[..., Any], *args: Any, distribute_saved_activations: bool | None = None, **options: Any
) -> Any:
    """Call `mpu.random.checkpoint`. The arguments are those of Megatron's first release, or of megatron.core, which has
    the bool distribute_saved_activations between `function` and its arguments.

    distribute_saved_activations: see `mpu.random.checkpoint` (default: the value that
        `partition_activations_in_checkpoint` has set, or False).
    """
    if args and isinstance(args[0], bool):
        distribute_saved_activations, args = args[0], args[1:]
    if distribute_saved_activations is None:
        distribute_saved_activations = _partition_activations
    return random.checkpoint(function, *args, distribute_saved_activations=distribute_saved_activations, **options)


class ParallelEmbedding(ParallelLayer):
    """An embedding with a weight split along the embedding dimension. Forward: all-gather; backward: no communication.

    [...] int64 -> [..., h]. Raises ValueError if embedding_dim is not divisible by tp.
    """

    weight: Tensor

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        init_method: InitMethod = nn.init.xavier_normal_,
        keep_master_weight_for_test: bool = False,
        *,
        group: ProcessGroup | None = None,
        device: Device = None,
    ) -> None:
        super().__init__(group, device)
        whole = self.make_parameter("weight", PartitionSpec((num_embeddings, embedding_dim), 1), init_method)
        self.master_weight = whole if keep_master_weight_for_test else None

    def forward(self, ids: Tensor) -> Tensor:
        """[...] int64 -> [..., h]."""
        return gather_from_model_parallel_region(F.embedding(ids, self.weight), self.group)


def broadcast_data(
    keys: Sequence[str], data: Mapping[str, Tensor] | None, dtype: torch.dtype, device: Device = None
) -> dict[str, Tensor]:
    """Send the tensors `data[key]` from the first rank of the tensor-parallel group to all its ranks, and return them.

    keys: the same on every rank.
    data: read on the first rank only; may be None on other ranks.
    dtype: the dtype of all tensors.
    device: the device of the result (default: the current GPU if the process uses one, else the CPU).

    Raises ValueError on every rank of the group if a key is missing or a tensor has a different dtype.
    """
    state = get_parallel_state()
    if device is None:
        device = "cuda" if torch.cuda.is_available() and torch.cuda.is_initialized() else "cpu"
    sent: list[Any] = [None]
    if state.tensor_model_parallel_rank == 0:
        own = data or {}
        lacking = [key for key in keys if key not in own or own[key].dtype != dtype]
        # Send copies, because a message contains the whole storage of a tensor.
        sent = [lacking or {key: own[key].to("cpu", copy=True) for key in keys}]
    if state.tensor_model_parallel_size > 1:
        src, group = state.tensor_model_parallel_src_rank, state.tensor_model_parallel_group
        dist.broadcast_object_list(sent, src, group=group, device=torch.device(device))
    if not isinstance(sent[0], dict):
        raise ValueError(f"broadcast_data: the first rank has no tensor {sent[0][0]!r} of {dtype}")
    return {key: tensor.to(device, non_blocking=True) for key, tensor in sent[0].items()}
