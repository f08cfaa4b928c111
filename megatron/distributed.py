"""Data parallelism: all parameters and all gradients of a rank in one buffer each, gradients reduced in buckets
while backward still runs.

The buffer's order is chosen so that everything later is a few contiguous ranges: segments of equal treatment
(split or replicated, decayed or not) for the norm and for AdamW, and inside a segment the last layers first,
because their gradients are ready first.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

# Every parameter starts at a multiple of this, so that a matrix in 16 bits is aligned to 128 bytes.
_ALIGNMENT = 64


@dataclass(frozen=True)
class Segment:
    """A range of the buffer whose parameters are treated alike."""

    range: slice
    is_split: bool
    decays: bool


class FlatParameters:
    """The parameters of `module` moved into one buffer of `dtype`, and room for their gradients in float32.

    params: [numel] of dtype; the module's parameters become views of it. grads: [numel] float32.
    masters: [numel] float32, the weights before they were rounded to `dtype`; the same tensor as params in fp32.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        def treatment(item: tuple[str, nn.Parameter]) -> tuple[bool, bool]:
            # Weights before biases and layer norms, which do not decay: their gradients fill the first buckets.
            return item[1].dim() < 2, not getattr(item[1], "model_parallel", False)

        named = sorted(reversed(list(module.named_parameters())), key=treatment)
        self.parameters = dict(named)
        self.ranges: dict[str, slice] = {}
        self.segments: list[Segment] = []
        end = 0
        for (no_decay, replicated), members in itertools.groupby(named, key=treatment):
            start = end
            for name, parameter in members:
                self.ranges[name] = slice(end, end + parameter.numel())
                end += -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT
            self.segments.append(Segment(slice(start, end), not replicated, not no_decay))

        device = named[0][1].device
        self.masters = torch.zeros(end, dtype=torch.float32, device=device)
        self.params = self.masters if dtype == torch.float32 else torch.zeros(end, dtype=dtype, device=device)
        self.grads = torch.zeros(end, dtype=torch.float32, device=device)
        for name, parameter in named:
            self.view(self.masters, name).copy_(parameter.detach())
            parameter.data = self.view(self.params, name)
        self.write_back()

    def view(self, buffer: Tensor, name: str) -> Tensor:
        """The part of `buffer` that belongs to the parameter `name`, in its shape."""
        return buffer[self.ranges[name]].view(self.parameters[name].shape)

    def write_back(self) -> None:
        """Round the masters into the parameters that the model computes with."""
        if self.params is not self.masters:
            self.params.copy_(self.masters)

    def buckets(self, size: int) -> list[tuple[slice, list[str]]]:
        """Neighbouring parameters of about `size` elements, in the order of the buffer, gaps included."""
        buckets: list[tuple[slice, list[str]]] = []
        names: list[str] = []
        start = 0
        for name, part in self.ranges.items():
            if names and part.stop - start > size:
                buckets.append((slice(start, part.start), names))
                start, names = part.start, []
            names.append(name)
        buckets.append((slice(start, self.grads.numel()), names))
        return buckets


class GradientReducer:
    """Sums the gradients of a step into `flat.grads` over micro-batches and data-parallel ranks.

    A gradient is added in float32 as soon as autograd has made it, and freed. In the last micro-batch of a step a
    bucket is reduced, asynchronously, once all its parameters have theirs. Buckets are always reduced in the
    same order, so that ranks whose autograd runs in another order still meet in the same collective.
    """

    def __init__(self, flat: FlatParameters, group: ProcessGroup | None, bucket_size: int) -> None:
        self._flat = flat
        self._group = group if group is not None and group.size() > 1 else None
        self._buckets = flat.buckets(bucket_size)
        self._bucket_of = {name: i for i, (_, names) in enumerate(self._buckets) for name in names}
        self._missing: list[set[str]] = []
        self._works: list[dist.Work] = []
        self._launched = 0
        self._first = self._last = True
        for name, parameter in flat.parameters.items():
            parameter.register_post_accumulate_grad_hook(self._hook(name))

    @contextlib.contextmanager
    def micro_batch(self, index: int, count: int) -> Iterator[None]:
        """Around the backward of micro-batch `index` of the `count` of this step."""
        self._first, self._last = index == 0, index == count - 1
        self._missing = [set(names) for _, names in self._buckets]
        self._launched = 0
        yield
        forgotten = [name for names in self._missing for name in names]
        assert not forgotten, f"parameters without a gradient: {forgotten}"

    def finish(self) -> None:
        """Wait until every bucket of the step is reduced."""
        for work in self._works:
            work.wait()
        self._works.clear()

    def _hook(self, name: str):  # type: ignore[no-untyped-def]
        target = self._flat.view(self._flat.grads, name)

        def collect(parameter: Tensor) -> None:
            assert parameter.grad is not None
            if self._first:
                target.copy_(parameter.grad)
            else:
                target.add_(parameter.grad)
            parameter.grad = None
            self._missing[self._bucket_of[name]].discard(name)
            if self._last and self._group is not None:
                self._launch_ready()

        return collect

    def _launch_ready(self) -> None:
        while self._launched < len(self._buckets) and not self._missing[self._launched]:
            part, _ = self._buckets[self._launched]
            work = dist.all_reduce(self._flat.grads[part], group=self._group, async_op=True)
            assert work is not None
            self._works.append(work)
            self._launched += 1


class TorchDDPReducer:
    """The same through `torch.nn.parallel.DistributedDataParallel`, which reduces in the parameters' dtype."""

    def __init__(self, flat: FlatParameters, module: nn.Module, group: ProcessGroup, bucket_size: int) -> None:
        self._flat = flat
        self._size = group.size()
        element = flat.params.element_size()
        self.module = nn.parallel.DistributedDataParallel(
            module, process_group=group, broadcast_buffers=False, bucket_cap_mb=max(bucket_size * element >> 20, 1))

    @contextlib.contextmanager
    def micro_batch(self, index: int, count: int) -> Iterator[None]:
        with contextlib.nullcontext() if index == count - 1 else self.module.no_sync():
            yield

    def finish(self) -> None:
        for name, parameter in self._flat.parameters.items():
            assert parameter.grad is not None, name
            # DDP divides by the ranks; our token weights did so already.
            self._flat.view(self._flat.grads, name).copy_(parameter.grad).mul_(self._size)
            parameter.grad = None


def reducer_for(kind: str, flat: FlatParameters, module: nn.Module, group: ProcessGroup | None,
                bucket_size: int) -> tuple[GradientReducer | TorchDDPReducer, nn.Module]:
    """The reducer that --DDP-impl names, and the module to call forward on."""
    if kind == "torch" and group is not None and group.size() > 1:
        ddp = TorchDDPReducer(flat, module, group, bucket_size)
        return ddp, ddp.module
    return GradientReducer(flat, group, bucket_size), module


def global_sum(values: Iterable[Tensor], group: ProcessGroup | None) -> Tensor:
    """The scalars `values`, stacked as float64 and summed over the ranks of `group`."""
    stacked = torch.stack([value.double() for value in values])
    if group is not None and group.size() > 1:
        dist.all_reduce(stacked, group=group)
    return stacked
