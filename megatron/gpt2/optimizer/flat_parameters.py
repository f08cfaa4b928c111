"""The parameters of this rank in one buffer, their gradients in one buffer for each bucket, and which part of both its
optimizer owns.

The order is chosen so that everything later is a few contiguous ranges:

    split, decayed | split, not decayed | replicated, not decayed | replicated, decayed

Layer norms, row-parallel biases and position embeddings are replicated. Inside of each part the last layers come first,
because their gradients are ready first. Under sequence parallelism the parameters whose gradients are partial sums come
after the others of their part. Buckets, the units of communication, are neighbouring parameters.

With a sharded optimizer (ZeRO stage 1, arXiv:1910.02054) data-parallel rank r owns the r-th part of every bucket.
Buckets are padded alike without it, so that a gradient's sum, whose order follows from its place in the bucket, is
the same to the last bit.
"""

import bisect
import itertools
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mpu.grads import is_sequence_parallel

# Every parameter and every owned part starts at a multiple of this, so that a matrix in 16 bits is aligned to 128
# bytes and a vectorised kernel has no rest that it would compute in another way.
_ALIGNMENT = 64


@dataclass(frozen=True)
class Segment:
    """A range of the buffer whose parameters are treated alike."""

    range: slice
    is_split: bool
    is_partial: bool  # each tensor-parallel rank's gradient is a part of the sum
    decays: bool
    is_copy: bool  # another stage of the pipeline holds the same and counts it in the norm


@dataclass(frozen=True)
class Bucket:
    """Neighbouring parameters, padded to a length that the data-parallel ranks can share evenly."""

    range: slice
    names: tuple[str, ...]


class FlatState(NamedTuple):
    """A part of the parameter `name`, or of one of its moments, as this rank holds it.

    kind: "master" or the name of a moment. values: 1-D, the elements from `start` on of the flattened parameter.
    """

    kind: str
    name: str
    values: Tensor
    start: int = 0


class FlatParameters:
    """The parameters of `module` moved into one buffer of `dtype`, and room for their gradients in float32.

    bucket_size: elements of a bucket, about; a larger parameter is one of its own. ranks: this rank's place among
    the data-parallel ranks and their number. sharded: whether its optimizer owns its part of every bucket alone.
    offloaded: whether the optimizer's state lives in host memory.
    shared: the parameter that another stage of the pipeline holds too. It has a bucket of its own, so that both stages
    divide it alike over their data-parallel ranks. is_copy: whether the other stage counts it in the norm.

    params: [numel] of dtype; the module's parameters are views of it.
    owned: the ranges that this rank's optimizer updates. Each lies in one bucket and in one segment.
    masters: of each owned range the weights before they were rounded to `dtype`, float32. In fp32 they are views of
    params, unless the optimizer is offloaded.

    Gradients, float32, exist from the first of a bucket that backward makes until `free_grads`: the activations that
    backward has used by then make room for them. `keep_owned` leaves of a bucket only what is owned: ZeRO stage 2.
    """

    def __init__(
        self,
        module: nn.Module,
        dtype: torch.dtype,
        *,
        bucket_size: int,
        ranks: tuple[int, int] = (0, 1),
        sharded: bool = False,
        offloaded: bool = False,
        shared: str | None = None,
        is_copy: bool = False,
    ) -> None:
        size = ranks[1]
        self._shard, self._shards = ranks if sharded else (0, 1)
        self.is_sharded, self.offloaded = self._shards > 1, offloaded

        def treatment(item: tuple[str, nn.Parameter]) -> tuple[bool, bool, bool, bool]:
            # False sorts first: what is split before what is replicated, which has its decayed parameters last.
            return (
                not _is_split(item[1]),
                _is_split(item[1]) != _decays(item[1]),
                is_sequence_parallel(item[1]),
                item[0] == shared,
            )

        named = sorted(reversed(list(module.named_parameters())), key=treatment)
        self.parameters, self.shared = dict(named), shared if shared in dict(named) else None
        self.ranges: dict[str, slice] = {}
        self.buckets: list[Bucket] = []
        start = end = 0
        names: list[str] = []
        for name, parameter in named:
            if names and (end + parameter.numel() - start > bucket_size or shared in (name, names[-1])):
                end = _round_up(end, _ALIGNMENT * size)
                self.buckets.append(Bucket(slice(start, end), tuple(names)))
                start, names = end, []
            self.ranges[name] = slice(end, end + parameter.numel())
            names.append(name)
            end = _round_up(end + parameter.numel(), _ALIGNMENT)
        end = _round_up(end, _ALIGNMENT * size)
        self.buckets.append(Bucket(slice(start, end), tuple(names)))

        firsts = [next(members) for _, members in itertools.groupby(named, treatment)]
        stops = [self.ranges[name].start for name, _ in firsts[1:]] + [end]
        segments = [
            Segment(
                slice(self.ranges[name].start, stop),
                _is_split(parameter),
                is_sequence_parallel(parameter),
                _decays(parameter),
                name == shared and is_copy,
            )
            for (name, parameter), stop in zip(firsts, stops, strict=True)
        ]
        found = [
            (index, replace(s, range=common))
            for index, bucket in enumerate(self.buckets)
            for s in segments
            if (common := _overlap(self.owned_part(bucket), s.range))
        ]
        self.owned = [segment for _, segment in found]
        self._bucket_of_owned = [index for index, _ in found]
        self._owned_stops = [segment.range.stop for segment in self.owned]  # ascending

        device = named[0][1].device
        self.params = torch.zeros(end, dtype=dtype, device=device)
        self._grads: list[Tensor | None] = [None] * len(self.buckets)
        self._owned_grads: list[Tensor | None] = [None] * len(self.buckets)  # of what `keep_owned` left
        self.bucket_of = {name: index for index, bucket in enumerate(self.buckets) for name in bucket.names}
        in_params = [self.params[segment.range] for segment in self.owned]
        whole = dtype == torch.float32
        if offloaded:
            self.masters = self.room(pinned=True)
            self._rounded = self.masters if whole else self.room(dtype, pinned=True)
        else:
            self.masters = in_params if whole else self.room()
            self._rounded = in_params
        for name, parameter in named:
            values = parameter.detach().reshape(-1)
            self.params[self.ranges[name]].copy_(values)
            index, part, start = self.owned_part_of(name)
            self.masters[index][part].copy_(values[start : start + part.stop - part.start])
            parameter.data = self.view(self.params, name)

    def view(self, buffer: Tensor, name: str) -> Tensor:
        """The part of `buffer` that belongs to the parameter `name`, in its shape."""
        return buffer[self.ranges[name]].view(self.parameters[name].shape)

    def bucket_grads(self, index: int) -> Tensor:
        """The gradients of bucket `index`, [length of its range] float32; not initialised but for the padding."""
        grads = self._grads[index]
        if grads is None:
            whole, names = self.buckets[index].range, self.buckets[index].names
            grads = torch.empty(whole.stop - whole.start, dtype=torch.float32, device=self.params.device)
            for name, following in itertools.zip_longest(names, names[1:]):
                stop = self.ranges[following].start if following else whole.stop
                if self.ranges[name].stop < stop:
                    grads[self.ranges[name].stop - whole.start : stop - whole.start].zero_()
            self._grads[index] = grads
        return grads

    def grad(self, name: str) -> Tensor:
        """The gradient of the parameter `name`, in its shape, float32; not initialised before the first use."""
        index = self.bucket_of[name]
        start, part = self.buckets[index].range.start, self.ranges[name]
        return self.bucket_grads(index)[part.start - start : part.stop - start].view(self.parameters[name].shape)

    def owned_grads(self) -> list[Tensor]:
        """The gradients of each range in `owned`."""
        parts = []
        for index, segment in zip(self._bucket_of_owned, self.owned, strict=True):
            start = self.owned_part(self.buckets[index]).start
            parts.append(self.owned_bucket_grads(index)[segment.range.start - start : segment.range.stop - start])
        return parts

    def owned_bucket_grads(self, index: int) -> Tensor:
        """What this rank owns of the gradients of bucket `index`, [length of the owned part] float32."""
        if (kept := self._owned_grads[index]) is not None:
            return kept
        part, start = self.owned_part(self.buckets[index]), self.buckets[index].range.start
        return self.bucket_grads(index)[part.start - start : part.stop - start]

    def keep_owned(self, index: int, reduced: Tensor) -> None:
        """Free the gradients of bucket `index`, and add `reduced`, their sum over the ranks in any dtype, to what this
        rank keeps of the bucket, which is what it owns."""
        kept = self._owned_grads[index]
        self._owned_grads[index] = reduced.to(torch.float32, copy=True) if kept is None else kept.add_(reduced)
        self._grads[index] = None

    def owned_grad(self, name: str) -> Tensor:
        """What this rank's optimizer owns of the gradient of the parameter `name`, [elements]."""
        index, part, _ = self.owned_part_of(name)
        return self.owned_grads()[index][part]

    def free_grads(self) -> None:
        """After the optimizer has used them."""
        self._grads = [None] * len(self.buckets)
        self._owned_grads = [None] * len(self.buckets)

    def owned_part(self, bucket: Bucket) -> slice:
        """What this rank's optimizer owns of a bucket: its share, or all of it where it is not sharded."""
        length = (bucket.range.stop - bucket.range.start) // self._shards
        start = bucket.range.start + self._shard * length
        return slice(start, start + length)

    def owned_part_of(self, name: str) -> tuple[int, slice, int]:
        """What this rank's optimizer owns of a parameter, at most one range since it lies in one bucket: the index in
        `owned`, the range inside of that, and where it starts in the parameter. An empty range where it owns none."""
        whole = self.ranges[name]
        index = bisect.bisect_right(self._owned_stops, whole.start)  # the first that does not end before it
        if index < len(self.owned) and (common := _overlap(whole, self.owned[index].range)):
            offset = self.owned[index].range.start
            return index, slice(common.start - offset, common.stop - offset), common.start - whole.start
        return 0, slice(0, 0), 0

    def room(self, dtype: torch.dtype = torch.float32, *, pinned: bool = False) -> list[Tensor]:
        """A tensor of zeros for each range in `owned`, where the optimizer's state lives. pinned: the GPU reads or
        writes it, should it be on the host."""
        sizes = [segment.range.stop - segment.range.start for segment in self.owned]
        device = self.params.device
        on_host = {"device": "cpu", "pin_memory": pinned and device.type == "cuda"}
        together = torch.zeros(sum(sizes), dtype=dtype, **(on_host if self.offloaded else {"device": device}))
        return list(together.split(sizes))

    def write_back(self) -> None:
        """Round the masters into what this rank owns of the parameters that the model computes with."""
        for segment, master, rounded in zip(self.owned, self.masters, self._rounded, strict=True):
            if rounded is not master:
                rounded.copy_(master)
            if self.offloaded:
                self.params[segment.range].copy_(rounded, non_blocking=True)

    def read_back(self) -> None:
        """The inverse, for weights that exist in the model's precision alone."""
        for segment, master in zip(self.owned, self.masters, strict=True):
            master.copy_(self.params[segment.range])


def _is_split(parameter: nn.Parameter) -> bool:
    return getattr(parameter, "model_parallel", False)


def _decays(parameter: nn.Parameter) -> bool:
    """Biases and layer norms do not."""
    return parameter.dim() >= 2


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _overlap(a: slice, b: slice) -> slice | None:
    start, stop = max(a.start, b.start), min(a.stop, b.stop)
    return slice(start, stop) if start < stop else None
