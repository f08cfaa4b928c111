"""How `mpu.checkpoint` keeps the arguments of a function until backward computes it again."""

import contextlib
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mpu.host_memory import HostMemory, Parked, unpack
from mpu.mappings import all_gather_first_dim


def keeping_arguments(group: ProcessGroup | None, host_memory: HostMemory | None) -> AbstractContextManager[object]:
    """Inside, autograd keeps of each tensor this rank's part alone, and that, or the tensor, in the host's memory.

    group: over which tensors are split, which must be the same on all its ranks; None: they are kept whole. Backward
    gathers them in the same order on all ranks. host_memory: None where they stay on the device.
    Parameters, which exist in any case, are left alone.
    """
    group = group if group is not None and group.size() > 1 else None
    if group is None and host_memory is None:
        return contextlib.nullcontext()
    part = host_memory.part() if host_memory is not None else None

    def pack(x: Tensor) -> Tensor | tuple[torch.Size, Tensor | Parked]:
        if isinstance(x, nn.Parameter):
            return x
        kept = x if group is None else own_part(x, group)
        return x.shape, kept if part is None else part.park(kept)

    def unpack_and_gather(kept: Tensor | tuple[torch.Size, Tensor | Parked]) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        shape, own = kept[0], unpack(kept[1])
        return own if group is None else gather_parts(own, shape, group)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack_and_gather)


def own_part(x: Tensor, group: ProcessGroup) -> Tensor:
    """This rank's part of the elements of `x` in their order, copied: [⌈numel/p⌉], the last ones padded. Any shape and
    dtype."""
    length = -(-x.numel() // group.size())
    part = x.new_zeros(length)
    own = x.detach().reshape(-1)[group.rank() * length : (group.rank() + 1) * length]
    part[: own.numel()] = own
    return part


def gather_parts(part: Tensor, shape: torch.Size, group: ProcessGroup) -> Tensor:
    """The inverse of `own_part`: a contiguous tensor of `shape`, on every rank."""
    return all_gather_first_dim(part, group)[0][: shape.numel()].view(shape)
