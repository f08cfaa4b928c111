"""Contiguous buffers: one for the parameters of this rank, and one per bucket for their gradients.

The parameters are in four groups of neighbours:

    split, with decay | split, without decay | replicated, without decay | replicated, with decay

Layer norms, row-parallel biases and position embeddings are replicated. A group starts with the last layers, because
backward computes the gradients of the last layers first. Under sequence parallelism, parameters whose gradients are
partial sums are at the end of a group. A bucket is a range of neighbouring parameters, which one collective reduces.

With a sharded optimizer (ZeRO stage 1, arXiv:1910.02054), the optimizer of data-parallel rank r updates the r-th shard
of every bucket. Buckets have the same padding with and without sharding. Gradients are therefore summed in the same
order, and the sums are bit-identical.
"""

import itertools
from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mpu.grads import is_sequence_parallel

# Every parameter and every shard starts at a multiple of this number of elements. Matrices in 16 bits are therefore
# aligned to 128 bytes, and vectorised kernels need no separate code for a remainder, which could round differently.
_ALIGNMENT = 64
# the groups of neighbours in the buffer: (is_tensor_parallel, decays). The groups without decay are neighbours, so that
# one bucket can contain all small parameters.
GROUP_ORDER = [(True, True), (True, False), (False, False), (False, True)]


class ParamGroupKey(NamedTuple):
    """The properties that decide how the gradient of a parameter is summed and counted in the norm, and how the
    optimizer updates the parameter. All parameters of an `OwnedRange` have equal properties."""

    is_tensor_parallel: bool
    is_sequence_parallel: bool  # The gradient of each tensor-parallel rank is a partial sum.
    decays: bool  # Weight decay applies to matrices, not to biases and layer norms.
    uses_muon: bool
    lr_multiplier: float  # factor of AdamW's rate and epsilon
    is_duplicate: bool  # Another pipeline stage has the same parameter and counts it in the norm.


class OwnedRange(NamedTuple):
    """A range of the buffer that this rank's optimizer updates: a part of the rank's shard of a bucket, in which all
    parameters have the same `group_key`."""

    range: slice
    bucket: int  # index in `ParamAndGradBuffer.buckets`
    group_key: ParamGroupKey


class Bucket(NamedTuple):
    """Neighbouring parameters, padded to a multiple of the data-parallel size."""

    range: slice
    names: tuple[str, ...]


class ParamShard(NamedTuple):
    """This rank's part of the parameter `name`, of its master, or of a moment of the optimizer.

    kind: "model", "master" or the name of a moment.
    values: 1-D, successive elements of the flattened tensor.
    start: the index of the first element in the flattened tensor.
    """

    kind: str
    name: str
    values: Tensor
    start: int = 0


class ParamAndGradBuffer:
    """Moves the parameters of `module` into one buffer of `dtype`, and keeps their gradients in float32.

    With two data-parallel ranks and a sharded optimizer:

        bucket        |              bucket 0              |              bucket 1              |
        parameters    | weight A | weight B      | padding | weight C        | bias D | padding |
        shards        | shard of rank 0 | shard of rank 1  | shard of rank 0 | shard of rank 1  |

    bucket_size: approximate number of elements of a bucket. A larger parameter has a separate bucket.
    data_parallel_rank, data_parallel_size: this rank's number in the data-parallel group, and that group's size.
    sharded: whether the optimizer of this rank updates only its shard of every bucket.
    offloaded: whether the state of the optimizer is in host memory.
    tied_param: a parameter of which another pipeline stage has a copy. The parameter has a separate bucket, so that
        both stages shard it in the same way.
    tied_param_is_duplicate: whether the other stage counts the tied parameter in the norm.
    muon_params: the parameters that Muon updates.
    lr_multipliers: factors of AdamW's rate and epsilon by the names of parameters (default: 1).

    Further attributes:

    params: [numel] of dtype. The module's parameters are views of this buffer.
    shard_rank: the number of the shard that this rank's optimizer updates; 0 without sharding.
    owned_ranges: the ranges that this rank's optimizer updates.
    masters: for each owned range, the float32 weights, which are not rounded to `dtype`. In fp32 the masters are views
        of `params`, unless the optimizer is offloaded.
    model_weights: for each owned range, the weights rounded to `dtype`: views of `params`, or copies in host memory
        if the optimizer is offloaded. In fp32 `model_weights` is `masters`.

    The gradients of a bucket are allocated when backward computes the first gradient of the bucket. Backward has then
    already freed activations, which lowers the peak of memory. `free_grads` frees the gradients. `accumulate_shard`
    keeps only this rank's shard of a bucket (ZeRO stage 2).
    """

    def __init__(
        self,
        module: nn.Module,
        dtype: torch.dtype,
        *,
        bucket_size: int,
        data_parallel_rank: int = 0,
        data_parallel_size: int = 1,
        sharded: bool = False,
        offloaded: bool = False,
        tied_param: str | None = None,
        tied_param_is_duplicate: bool = False,
        muon_params: Collection[str] = (),
        lr_multipliers: Mapping[str, float] | None = None,
    ) -> None:
        self.shard_rank, self._num_shards = (data_parallel_rank, data_parallel_size) if sharded else (0, 1)
        self.is_sharded, self.is_offloaded = self._num_shards > 1, offloaded

        parameters = dict(module.named_parameters())
        self.tied_param = tied_param if tied_param in parameters else None
        self._tied_param_is_duplicate = tied_param_is_duplicate
        self.muon_params, self._lr_multipliers = muon_params, lr_multipliers or {}
        # `sorted` keeps the order of equal elements, so the last layers are first.
        self.parameters = dict(sorted(reversed(parameters.items()), key=lambda item: self._sort_key(*item)))
        self._build_buckets(bucket_size, data_parallel_size)
        self.bucket_of = {name: index for index, bucket in enumerate(self.buckets) for name in bucket.names}
        self._build_owned_ranges()

        device = next(iter(self.parameters.values())).device
        self.params = torch.zeros(self.buckets[-1].range.stop, dtype=dtype, device=device)
        self.free_grads()
        views = [self.params[owned.range] for owned in self.owned_ranges]
        is_float32 = dtype == torch.float32
        if offloaded:
            self.masters = self.zeros_like_owned_ranges(pinned=True)
            self.model_weights = self.masters if is_float32 else self.zeros_like_owned_ranges(dtype, pinned=True)
        else:
            self.masters = views if is_float32 else self.zeros_like_owned_ranges()
            self.model_weights = views
        for name, parameter in self.parameters.items():
            values = parameter.detach().reshape(-1)
            self.params[self.ranges[name]].copy_(values)
            index, part, start = self.owned_part(name)
            self.masters[index][part].copy_(values[start : start + part.stop - part.start])
            parameter.data = self.view(self.params, name)

    def _group_key(self, name: str, parameter: nn.Parameter) -> ParamGroupKey:
        return ParamGroupKey(
            is_tensor_parallel=getattr(parameter, "model_parallel", False),
            is_sequence_parallel=is_sequence_parallel(parameter),
            decays=parameter.dim() >= 2,
            uses_muon=name in self.muon_params,
            lr_multiplier=self._lr_multipliers.get(name, 1.0),
            is_duplicate=name == self.tied_param and self._tied_param_is_duplicate,
        )

    def _sort_key(self, name: str, parameter: nn.Parameter) -> tuple[int, bool, bool]:
        key = self._group_key(name, parameter)
        group = GROUP_ORDER.index((key.is_tensor_parallel, key.decays))
        return group, key.is_sequence_parallel, name == self.tied_param

    def _build_buckets(self, bucket_size: int, data_parallel_size: int) -> None:
        """Set `ranges`, the position of each parameter, and `buckets`."""
        self.ranges: dict[str, slice] = {}
        self.buckets: list[Bucket] = []
        names = list(self.parameters)
        start = end = 0
        in_bucket: list[str] = []
        for name, following in itertools.zip_longest(names, names[1:]):
            stop = end + self.parameters[name].numel()
            self.ranges[name] = slice(end, stop)
            end = _round_up(stop, _ALIGNMENT)
            in_bucket.append(name)
            is_full = following and end + self.parameters[following].numel() - start > bucket_size
            if not following or is_full or (self.tied_param and self.tied_param in (name, following)):
                end = _round_up(end, _ALIGNMENT * data_parallel_size)
                self.buckets.append(Bucket(slice(start, end), tuple(in_bucket)))
                start, in_bucket = end, []

    def _build_owned_ranges(self) -> None:
        """Set `owned_ranges`: for each bucket, this rank's shard, cut where the `ParamGroupKey` changes."""
        self.owned_ranges: list[OwnedRange] = []
        self._range_index_of: dict[str, int] = {}
        for index, bucket in enumerate(self.buckets):
            by_key = itertools.groupby(bucket.names, lambda name: self._group_key(name, self.parameters[name]))
            groups = [(key, list(members)) for key, members in by_key]
            starts = [self.ranges[members[0]].start for _, members in groups]
            for (key, members), start, stop in zip(groups, starts, [*starts[1:], bucket.range.stop], strict=True):
                if common := _overlap(self.shard_range(bucket), slice(start, stop)):
                    self._range_index_of |= dict.fromkeys(members, len(self.owned_ranges))
                    self.owned_ranges.append(OwnedRange(common, index, key))

    def view(self, buffer: Tensor, name: str) -> Tensor:
        """Return the view of `buffer` that belongs to the parameter `name`, in its shape."""
        return buffer[self.ranges[name]].view(self.parameters[name].shape)

    def bucket_grads(self, index: int) -> Tensor:
        """Return the gradients of bucket `index`, float32 [length of its range]. Only the padding is initialised."""
        grads = self._grads[index]
        if grads is None:
            bucket, names = self.buckets[index]
            grads = torch.empty(bucket.stop - bucket.start, dtype=torch.float32, device=self.params.device)
            stops = [self.ranges[name].start for name in names[1:]] + [bucket.stop]
            for name, stop in zip(names, stops, strict=True):
                if self.ranges[name].stop < stop:
                    grads[slice_within(slice(self.ranges[name].stop, stop), bucket)].zero_()
            self._grads[index] = grads
        return grads

    def grad(self, name: str) -> Tensor:
        """Return the gradient of the parameter `name`, in its shape, float32. The tensor is not initialised."""
        index = self.bucket_of[name]
        part = slice_within(self.ranges[name], self.buckets[index].range)
        return self.bucket_grads(index)[part].view(self.parameters[name].shape)

    def owned_grads(self) -> list[Tensor]:
        """Return the gradients of each range in `owned_ranges`."""
        return [self._grads_of_range(owned) for owned in self.owned_ranges]

    def _grads_of_range(self, owned: OwnedRange) -> Tensor:
        return self.shard_grads(owned.bucket)[slice_within(owned.range, self.shard_range(self.buckets[owned.bucket]))]

    def shard_grads(self, index: int) -> Tensor:
        """Return this rank's shard of the gradients of bucket `index`, [length of the shard] float32."""
        if (accumulated := self._accumulated_shards[index]) is not None:
            return accumulated
        bucket = self.buckets[index]
        return self.bucket_grads(index)[slice_within(self.shard_range(bucket), bucket.range)]

    def accumulate_shard(self, index: int, reduced: Tensor) -> None:
        """Free the gradients of bucket `index`, and add `reduced` to the shard that this rank keeps.

        reduced: this rank's shard of the sum of the bucket over the ranks, in any dtype.
        """
        accumulated = self._accumulated_shards[index]
        self._accumulated_shards[index] = (
            reduced.to(torch.float32, copy=True) if accumulated is None else accumulated.add_(reduced)
        )
        self._grads[index] = None

    def owned_grad(self, name: str) -> Tensor:
        """Return the part of the gradient of the parameter `name` that this rank's optimizer uses, [elements]."""
        index, part, _ = self.owned_part(name)
        return self._grads_of_range(self.owned_ranges[index])[part]

    def free_grads(self) -> None:
        """Free all gradients, after the optimizer has used them."""
        self._grads: list[Tensor | None] = [None] * len(self.buckets)
        self._accumulated_shards: list[Tensor | None] = [None] * len(self.buckets)  # `accumulate_shard` fills it.

    def shard_range(self, bucket: Bucket) -> slice:
        """Return the range of this rank's shard of a bucket: the whole bucket without sharding."""
        length = (bucket.range.stop - bucket.range.start) // self._num_shards
        start = bucket.range.start + self.shard_rank * length
        return slice(start, start + length)

    def owned_part(self, name: str) -> tuple[int, slice, int]:
        """Return where this rank's optimizer stores its part of a parameter: the index in `owned_ranges`, the slice of
        this range, and the start of the part in the flattened parameter. The slice is empty if the optimizer does not
        update the parameter."""
        index = self._range_index_of.get(name, 0)
        parameter, owned = self.ranges[name], self.owned_ranges[index].range
        if name in self._range_index_of and (common := _overlap(parameter, owned)):
            return index, slice_within(common, owned), common.start - parameter.start
        return 0, slice(0, 0), 0

    def elements_by_rank(self, name: str) -> list[int]:
        """Return how many elements of a parameter the optimizer of each data-parallel rank updates, by rank. Without
        sharding the list has one number."""
        parameter, bucket = self.ranges[name], self.buckets[self.bucket_of[name]].range
        length = (bucket.stop - bucket.start) // self._num_shards
        starts = range(bucket.start, bucket.stop, length)
        return [max(min(parameter.stop, start + length) - max(parameter.start, start), 0) for start in starts]

    def zeros_like_owned_ranges(
        self, dtype: torch.dtype = torch.float32, *, pinned: bool = False, for_muon_params: bool = True
    ) -> list[Tensor]:
        """Return a tensor of zeros for each range in `owned_ranges`, on the device of the optimizer's state.

        pinned: pin the memory if it is on the host.
        for_muon_params: if false, the tensors for the parameters that Muon updates are empty.
        """
        sizes = [
            owned.range.stop - owned.range.start if for_muon_params or not owned.group_key.uses_muon else 0
            for owned in self.owned_ranges
        ]
        device = self.params.device
        on_host = {"device": "cpu", "pin_memory": pinned and device.type == "cuda"}
        zeros = torch.zeros(sum(sizes), dtype=dtype, **(on_host if self.is_offloaded else {"device": device}))
        return list(zeros.split(sizes))

    def copy_masters_to_params(self) -> None:
        """Round the masters to `dtype`, and write the result into this rank's shards of `params`."""
        for index in range(len(self.masters)):
            self.round_master(index)
        self.copy_model_weights_to_params()

    def round_master(self, index: int) -> None:
        """Round the masters of one owned range."""
        if self.model_weights[index] is not self.masters[index]:
            self.model_weights[index].copy_(self.masters[index])

    def copy_model_weights_to_params(self) -> None:
        """If the optimizer is offloaded, copy `model_weights` from host memory into this rank's shards of `params`."""
        if self.is_offloaded:
            for owned, weights in zip(self.owned_ranges, self.model_weights, strict=True):
                self.params[owned.range].copy_(weights, non_blocking=True)

    def copy_params_to_masters(self) -> None:
        """Copy the parameters to the masters, after weights were loaded in the model's precision."""
        for owned, master in zip(self.owned_ranges, self.masters, strict=True):
            master.copy_(self.params[owned.range])


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _overlap(a: slice, b: slice) -> slice | None:
    start, stop = max(a.start, b.start), min(a.stop, b.stop)
    return slice(start, stop) if start < stop else None


def slice_within(part: slice, outer: slice) -> slice:
    """Return `part` relative to the start of `outer`."""
    return slice(part.start - outer.start, part.stop - outer.start)
