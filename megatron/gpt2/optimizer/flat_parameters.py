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

import itertools
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mpu.grads import is_sequence_parallel

# Every parameter and every owned part starts at a multiple of this, so that a matrix in 16 bits is aligned to 128
# bytes and a vectorised kernel has no rest that it would compute in another way.
_ALIGNMENT = 64


class Segment(NamedTuple):
    """An owned range of the buffer, in one bucket, whose parameters are treated alike."""

    range: slice
    bucket: int
    is_split: bool
    is_partial: bool  # each tensor-parallel rank's gradient is a part of the sum
    decays: bool  # biases and layer norms do not
    is_copy: bool  # another stage of the pipeline holds the same and counts it in the norm


class Bucket(NamedTuple):
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
        self._shard, self._shards = ranks if sharded else (0, 1)
        self.is_sharded, self.offloaded = self._shards > 1, offloaded

        def treatment(name: str) -> tuple[bool, bool, bool, bool]:
            """The last four fields of a segment."""
            parameter = self.parameters[name]
            is_split = getattr(parameter, "model_parallel", False)
            return is_split, is_sequence_parallel(parameter), parameter.dim() >= 2, name == shared and is_copy

        def place(name: str) -> tuple[bool, ...]:
            # False sorts first: what is split before what is replicated, which has its decayed parameters last.
            is_split, is_partial, decays, _ = treatment(name)
            return not is_split, is_split != decays, is_partial, name == shared

        self.parameters = dict(module.named_parameters())
        names = sorted(reversed(self.parameters), key=place)
        self.parameters = {name: self.parameters[name] for name in names}
        self.shared = shared if shared in self.parameters else None
        self.ranges: dict[str, slice] = {}
        self.buckets: list[Bucket] = []
        start = end = 0
        together: list[str] = []
        for name, following in itertools.zip_longest(names, names[1:]):
            stop = end + self.parameters[name].numel()
            self.ranges[name] = slice(end, stop)
            end = _round_up(stop, _ALIGNMENT)
            together.append(name)
            is_full = following and end + self.parameters[following].numel() - start > bucket_size
            if not following or is_full or shared in (name, following):
                end = _round_up(end, _ALIGNMENT * ranks[1])
                self.buckets.append(Bucket(slice(start, end), tuple(together)))
                start, together = end, []
        self.bucket_of = {name: index for index, bucket in enumerate(self.buckets) for name in bucket.names}

        self.owned: list[Segment] = []
        self._index_in_owned: dict[str, int] = {}
        for index, bucket in enumerate(self.buckets):
            alike = [(how, list(members)) for how, members in itertools.groupby(bucket.names, treatment)]
            starts = [self.ranges[members[0]].start for _, members in alike]
            for (how, members), start, stop in zip(alike, starts, [*starts[1:], bucket.range.stop], strict=True):
                if common := _overlap(self.owned_part(bucket), slice(start, stop)):
                    self._index_in_owned |= dict.fromkeys(members, len(self.owned))
                    self.owned.append(Segment(common, index, *how))

        device = self.parameters[names[0]].device
        self.params = torch.zeros(end, dtype=dtype, device=device)
        self.free_grads()
        in_params = [self.params[segment.range] for segment in self.owned]
        whole = dtype == torch.float32
        if offloaded:
            self.masters = self.room(pinned=True)
            self._rounded = self.masters if whole else self.room(dtype, pinned=True)
        else:
            self.masters = in_params if whole else self.room()
            self._rounded = in_params
        for name, parameter in self.parameters.items():
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
            whole, names = self.buckets[index]
            grads = torch.empty(whole.stop - whole.start, dtype=torch.float32, device=self.params.device)
            stops = [self.ranges[name].start for name in names[1:]] + [whole.stop]
            for name, stop in zip(names, stops, strict=True):
                if self.ranges[name].stop < stop:
                    grads[within(slice(self.ranges[name].stop, stop), whole)].zero_()
            self._grads[index] = grads
        return grads

    def grad(self, name: str) -> Tensor:
        """The gradient of the parameter `name`, in its shape, float32; not initialised before the first use."""
        index = self.bucket_of[name]
        part = within(self.ranges[name], self.buckets[index].range)
        return self.bucket_grads(index)[part].view(self.parameters[name].shape)

    def owned_grads(self) -> list[Tensor]:
        """The gradients of each range in `owned`."""
        return [
            self.owned_bucket_grads(segment.bucket)[
                within(segment.range, self.owned_part(self.buckets[segment.bucket]))
            ]
            for segment in self.owned
        ]

    def owned_bucket_grads(self, index: int) -> Tensor:
        """What this rank owns of the gradients of bucket `index`, [length of the owned part] float32."""
        if (kept := self._owned_grads[index]) is not None:
            return kept
        bucket = self.buckets[index]
        return self.bucket_grads(index)[within(self.owned_part(bucket), bucket.range)]

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
        self._grads: list[Tensor | None] = [None] * len(self.buckets)
        self._owned_grads: list[Tensor | None] = [None] * len(self.buckets)  # of what `keep_owned` left

    def owned_part(self, bucket: Bucket) -> slice:
        """What this rank's optimizer owns of a bucket: its share, or all of it where it is not sharded."""
        length = (bucket.range.stop - bucket.range.start) // self._shards
        start = bucket.range.start + self._shard * length
        return slice(start, start + length)

    def owned_part_of(self, name: str) -> tuple[int, slice, int]:
        """What this rank's optimizer owns of a parameter, at most one range since it lies in one bucket: the index in
        `owned`, the range inside of that, and where it starts in the parameter. An empty range where it owns none."""
        index = self._index_in_owned.get(name, 0)
        whole, segment = self.ranges[name], self.owned[index].range
        if name in self._index_in_owned and (common := _overlap(whole, segment)):
            return index, within(common, segment), common.start - whole.start
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


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _overlap(a: slice, b: slice) -> slice | None:
    start, stop = max(a.start, b.start), min(a.stop, b.stop)
    return slice(start, stop) if start < stop else None


def within(part: slice, whole: slice) -> slice:
    """`part` of a buffer, counted from where `whole` begins."""
    return slice(part.start - whole.start, part.stop - whole.start)
