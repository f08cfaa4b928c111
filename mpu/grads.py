"""Gradients over a model-parallel group: sums of partial gradients, the global norm, and clipping.

A split parameter has a different gradient on each rank. A replicated parameter has the same gradient on all ranks and
counts once in the norm. With sequence parallelism, the gradient of a replicated parameter covers only this rank's part
of the sequence: the gradient is a partial sum and must be summed over the ranks. `mark_sequence_parallel` marks the
parameters with partial gradients, as megatron.core does.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mpu import kernels
from mpu.initialize import get_parallel_state, get_tensor_model_parallel_group


def mark_sequence_parallel(parameters: Iterable[nn.Parameter]) -> None:
    """Set `parameter.sequence_parallel = True` on replicated parameters whose gradients are partial sums."""
    for parameter in parameters:
        parameter.sequence_parallel = True  # type: ignore[attr-defined]  # trainers of megatron.core models read it


def is_sequence_parallel(parameter: Tensor) -> bool:
    """Return True if the gradient of `parameter` is a partial sum."""
    return getattr(parameter, "sequence_parallel", False)


def all_reduce_sequence_parallel_grads(parameters: Iterable[Tensor], group: ProcessGroup | None = None) -> None:
    """Replace the `.grad` of each marked parameter by its sum over the group (default: the tensor-parallel group), in
    place, with one all-reduce in float32.

    Call this function once per step, after the last backward and before clipping, on every rank of the group with the
    same parameters. If `mark_sequence_parallel` has marked no parameter, nothing is sent.
    """
    all_reduce_coalesced([p.grad for p in parameters if is_sequence_parallel(p) and p.grad is not None], group)


def all_reduce_coalesced(tensors: Sequence[Tensor], group: ProcessGroup | None = None) -> None:
    """Replace each tensor by its sum over the group (default: the tensor-parallel group), in place, with one all-reduce
    in float32. Shapes and dtypes may differ."""
    group = group or get_tensor_model_parallel_group()
    if group is None or group.size() == 1 or not tensors:
        return
    packed = torch.cat([tensor.reshape(-1).float() for tensor in tensors])  # tensors of any shapes -> one 1-D tensor
    dist.all_reduce(packed, group=group)
    for tensor, total in zip(tensors, packed.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(total.view(tensor.shape))


def all_reduced_squared_norm(
    split: Iterable[Tensor], replicated: Iterable[Tensor], device: torch.device, *, sharded: bool = False
) -> Tensor:
    """Return Σ g² over the model-parallel group, as a float32 scalar on `device`. The host does not wait for the
    device.

    split: gradients of parameters that are split over the tensor-parallel group.
    replicated: gradients of the other parameters. If two pipeline stages hold the same parameter, only one of the
        stages may pass the gradient.
    sharded: data-parallel ranks hold different parts of the gradients, so the sum is over all ranks.
    """
    state = get_parallel_state()
    counted = list(split) + (list(replicated) if state.tensor_model_parallel_rank == 0 else [])
    total = kernels.sum_of_squares(counted) if counted else torch.zeros((), dtype=torch.float32, device=device)
    if sharded and state.world_size > 1:
        dist.all_reduce(total)
    elif state.model_parallel_size > 1:
        dist.all_reduce(total, group=state.model_parallel_group)
    return total


def clip_grad_norm(parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2) -> float:
    """Scale the gradients of `parameters` in place so that their global norm is at most `max_norm`. Return the norm
    before clipping.

    parameters: parameters whose attribute `model_parallel` is True are split over the default tensor-parallel group.
        mpu's layers set this attribute. Layers with a different `group` are not supported. A parameter that two
        pipeline stages hold counts twice in the norm.
    norm_type: 2 or infinity; other values raise ValueError.
    """
    state = get_parallel_state()
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    grads = [(p.grad, getattr(p, "model_parallel", False)) for p in parameters if p.grad is not None]
    # A rank without gradients also needs a zero on this device.
    device = parameters[0].device if parameters else torch.device("cpu")
    if norm_type == 2:
        split, replicated = ([grad for grad, is_split in grads if is_split == wanted] for wanted in (True, False))
        total = all_reduced_squared_norm(split, replicated, device).sqrt()
    elif norm_type == torch.inf:
        total = nn.utils.get_total_norm([grad for grad, _ in grads], torch.inf).float().to(device)
        if state.model_parallel_size > 1:
            dist.all_reduce(total, op=dist.ReduceOp.MAX, group=state.model_parallel_group)
    else:
        raise ValueError(f"clip_grad_norm supports the norms 2 and inf, not {norm_type}")
    nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
    return total.item()
