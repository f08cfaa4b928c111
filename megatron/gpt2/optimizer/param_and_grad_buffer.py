"""Contiguous buffers: one for the parameters of this rank, and one per bucket for their gradients.

Parameters with the same treatment (split or replicated, decayed or not) are neighbours:

    split, decayed | split, not decayed | replicated, not decayed | replicated, decayed

Layer norms, row-parallel biases and position embeddings are replicated. In each of the four groups the last layers are
first, because backward computes their gradients first. Under sequence parallelism, parameters whose gradients are
partial sums are at the end of their group. A bucket is a range of neighbouring parameters, which is sent as a whole.

With a sharded optimizer (ZeRO stage 1, arXiv:1910.02054), the optimizer of data-parallel rank r updates the r-th shard
of every bucket. Buckets have the same padding with and without sharding, so gradients are summed in the same order, and
the sums are bit-identical.
"""

import itertools
from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mpu.grads import is_sequence_parallel

# Every parameter and every shard starts at a multiple of this number of elements. So matrices in 16 bits are aligned to
# 128 bytes, and vectorised kernels need no separate code for a remainder, which could round differently.
_ALIGNMENT = 64


class ParamGroupKey(NamedTuple):
    """The treatment that all parameters of a `BufferShard` have in common."""

    is_tensor_parallel: bool
    is_sequence_parallel: bool  # The gradient of each tensor-parallel rank is a partial sum.
    decays: bool  # Weight decay applies to matrices, not to biases and layer norms.
    is_matrix: bool  # Muon updates it.
    lr_multiplier: float  # of AdamW's rate and epsilon
    is_duplicate: bool  # Another pipeline stage has the same parameter and counts it in the norm.


class BufferShard(NamedTuple):
    """A range of the buffer that this rank's optimizer updates. It lies in one bucket, and its parameters have the same
    `group_key`."""

    range: slice
    bucket: int
    group_key: ParamGroupKey


class Bucket(NamedTuple):
    """Neighbouring parameters, padded to a multiple of the data-parallel size."""

    range: slice
    names: tuple[str, ...]


class ParamShard(NamedTuple):
    """This rank's part of the parameter `name`, or of one of its moments.

    kind: "master" or the name of a moment.
    values: 1-D, the elements of the flattened parameter from `start` on.
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
        owned range   | shard of rank 0 | shard of rank 1  | shard of rank 0 | shard of rank 1  |

    bucket_size: approximate number of elements of a bucket. A larger parameter has a separate bucket.
    data_parallel_rank, data_parallel_size: this rank's number in the data-parallel group, and that group's size.
    sharded: whether the optimizer of this rank updates only its shard of every bucket.
    offloaded: whether the state of the optimizer is in host memory.
    tied_param: a parameter of which another pipeline stage has a copy. It has a separate bucket, so that both stages
        shard it alike.
    is_duplicate: whether the other stage counts the tied parameter in the norm.
    matrices: the parameters that Muon updates.
    lr_multipliers: factors of AdamW's rate and epsilon by the names of parameters (default: 1).

    Further attributes:

    params: [numel] of dtype. The module's parameters are views of this buffer.
    shard_rank: this rank's number among those that share the optimizer's work.
    local_shards: the ranges that this rank's optimizer updates.
    masters: for each local shard, the float32 weights before they are rounded to `dtype`. In fp32 they are views of
        `params`, unless the optimizer is offloaded.
    rounded: for each local shard, the weights rounded to `dtype`: views of `params`, or copies in host memory if
        the optimizer is offloaded. In fp32 it is `masters`.

    The gradients of a bucket are allocated when backward computes the first of them, and freed by `free_grads`.
    Backward has then already freed activations, which lowers the peak. `keep_shard` keeps only the local shard of a
    bucket (ZeRO stage 2).
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
        is_duplicate: bool = False,
        matrices: Collection[str] = (),
        lr_multipliers: Mapping[str, float] | None = None,
    ) -> None:
        self.shard_rank, self._num_shards = (data_parallel_rank, data_parallel_size) if sharded else (0, 1)
        self.is_sharded, self.offloaded = self._num_shards > 1, offloaded

        parameters = dict(module.named_parameters())
        self.tied_param = tied_param if tied_param in parameters else None
        self._tied_is_duplicate, self.matrices, self._lr_multipliers = is_duplicate, matrices, lr_multipliers or {}
        # `sorted` keeps the order of equal elements, so the last layers are first.
        self.parameters = dict(sorted(reversed(parameters.items()), key=lambda item: self._sort_key(*item)))
        self._build_buckets(bucket_size, data_parallel_size)
        self.bucket_of = {name: index for index, bucket in enumerate(self.buckets) for name in bucket.names}
        self._build_local_shards()

        device = next(iter(self.parameters.values())).device
        self.params = torch.zeros(self.buckets[-1].range.stop, dtype=dtype, device=device)
        self.free_grads()
        in_params = [self.params[shard.range] for shard in self.local_shards]
        is_float32 = dtype == torch.float32
        if offloaded:
            self.masters = self.zeros_like_shards(pinned=True)
            self.rounded = self.masters if is_float32 else self.zeros_like_shards(dtype, pinned=True)
        else:
            self.masters = in_params if is_float32 else self.zeros_like_shards()
            self.rounded = in_params
        for name, parameter in self.parameters.items():
            values = parameter.detach().reshape(-1)
            self.params[self.ranges[name]].copy_(values)
            index, part, start = self.local_shard_of(name)
            self.masters[index][part].copy_(values[start : start + part.stop - part.start])
            parameter.data = self.view(self.params, name)

    def _group_key(self, name: str, parameter: nn.Parameter) -> ParamGroupKey:
        """Return the treatment of the parameter `name`."""
        return ParamGroupKey(
            is_tensor_parallel=getattr(parameter, "model_parallel", False),
            is_sequence_parallel=is_sequence_parallel(parameter),
            decays=parameter.dim() >= 2,
            is_matrix=name in self.matrices,
            lr_multiplier=self._lr_multipliers.get(name, 1.0),
            is_duplicate=name == self.tied_param and self._tied_is_duplicate,
        )

    def _sort_key(self, name: str, parameter: nn.Parameter) -> tuple[bool, ...]:
        # Decayed parameters are first in the split part, and last in the replicated part. False sorts before True.
        key = self._group_key(name, parameter)
        return (
            not key.is_tensor_parallel,
            key.is_tensor_parallel != key.decays,
            key.is_sequence_parallel,
            name == self.tied_param,
        )

    def _build_buckets(self, bucket_size: int, data_parallel_size: int) -> None:
        """Set `ranges` and `buckets`: the position of each parameter, and the ranges that are sent as a whole."""
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

    def _build_local_shards(self) -> None:
        """Set `local_shards`: for each bucket, this rank's shard, cut where the `ParamGroupKey` changes."""
        self.local_shards: list[BufferShard] = []
        self._shard_index_of: dict[str, int] = {}
        for index, bucket in enumerate(self.buckets):
            by_key = itertools.groupby(bucket.names, lambda name: self._group_key(name, self.parameters[name]))
            groups = [(key, list(members)) for key, members in by_key]
            starts = [self.ranges[members[0]].start for _, members in groups]
            for (key, members), start, stop in zip(groups, starts, [*starts[1:], bucket.range.stop], strict=True):
                if common := _overlap(self.bucket_shard(bucket), slice(start, stop)):
                    self._shard_index_of |= dict.fromkeys(members, len(self.local_shards))
                    self.local_shards.append(BufferShard(common, index, key))

    def view(self, buffer: Tensor, name: str) -> Tensor:
        """Return the view of `buffer` that belongs to the parameter `name`, in its shape."""
        return buffer[self.ranges[name]].view(self.parameters[name].shape)

    def bucket_grads(self, index: int) -> Tensor:
        """Return the gradients of bucket `index`, float32 [length of its range]. Only the padding is initialised."""
        grads = self._grads[index]
        if grads is None:
            whole, names = self.buckets[index]
            grads = torch.empty(whole.stop - whole.start, dtype=torch.float32, device=self.params.device)
            stops = [self.ranges[name].start for name in names[1:]] + [whole.stop]
            for name, stop in zip(names, stops, strict=True):
                if self.ranges[name].stop < stop:
                    grads[slice_within(slice(self.ranges[name].stop, stop), whole)].zero_()
            self._grads[index] = grads
        return grads

    def grad(self, name: str) -> Tensor:
        """Return the gradient of the parameter `name`, in its shape, float32. The tensor is not initialised."""
        index = self.bucket_of[name]
        part = slice_within(self.ranges[name], self.buckets[index].range)
        return self.bucket_grads(index)[part].view(self.parameters[name].shape)

    def shard_grads(self) -> list[Tensor]:
        """Return the gradients of each range in `local_shards`."""
        return [
            self.bucket_shard_grads(shard.bucket)[
                slice_within(shard.range, self.bucket_shard(self.buckets[shard.bucket]))
            ]
            for shard in self.local_shards
        ]

    def bucket_shard_grads(self, index: int) -> Tensor:
        """Return this rank's shard of the gradients of bucket `index`, [length of the shard] float32."""
        if (kept := self._shard_grads[index]) is not None:
            return kept
        bucket = self.buckets[index]
        return self.bucket_grads(index)[slice_within(self.bucket_shard(bucket), bucket.range)]

    def keep_shard(self, index: int, reduced: Tensor) -> None:
        """Free the gradients of bucket `index`. Add `reduced`, this rank's shard of their sum over the ranks in any
        dtype, to the shard that this rank keeps."""
        kept = self._shard_grads[index]
        self._shard_grads[index] = reduced.to(torch.float32, copy=True) if kept is None else kept.add_(reduced)
        self._grads[index] = None

    def shard_grad(self, name: str) -> Tensor:
        """Return the part of the gradient of the parameter `name` that is in this rank's shard, [elements]."""
        index, part, _ = self.local_shard_of(name)
        return self.shard_grads()[index][part]

    def free_grads(self) -> None:
        """Free all gradients, after the optimizer has used them."""
        self._grads: list[Tensor | None] = [None] * len(self.buckets)
        self._shard_grads: list[Tensor | None] = [None] * len(self.buckets)  # `keep_shard` fills it.

    def bucket_shard(self, bucket: Bucket) -> slice:
        """Return the range of a bucket that this rank's optimizer updates. Without sharding the range is the whole
        bucket."""
        length = (bucket.range.stop - bucket.range.start) // self._num_shards
        start = bucket.range.start + self.shard_rank * length
        return slice(start, start + length)

    def local_shard_of(self, name: str) -> tuple[int, slice, int]:
        """Return the part of a parameter that this rank's optimizer updates: the index in `local_shards`, the range in
        this shard, and the start in the flattened parameter. The range is empty if the rank has no part of it."""
        index = self._shard_index_of.get(name, 0)
        whole, shard = self.ranges[name], self.local_shards[index].range
        if name in self._shard_index_of and (common := _overlap(whole, shard)):
            return index, slice_within(common, shard), common.start - whole.start
        return 0, slice(0, 0), 0

    def shard_sizes(self, name: str) -> list[int]:
        """Return how many elements of a parameter the optimizer of each data-parallel rank updates. Without sharding
        there is one number. The parts are in the order of the ranks."""
        whole, bucket = self.ranges[name], self.buckets[self.bucket_of[name]].range
        length = (bucket.stop - bucket.start) // self._num_shards
        starts = range(bucket.start, bucket.stop, length)
        return [max(min(whole.stop, start + length) - max(whole.start, start), 0) for start in starts]

    def zeros_like_shards(
        self, dtype: torch.dtype = torch.float32, *, pinned: bool = False, matrices: bool = True
    ) -> list[Tensor]:
        """Return a tensor of zeros for each range in `local_shards`, on the device of the optimizer's state.

        pinned: pin the memory if it is on the host.
        matrices: if false, the tensors of matrices are empty.
        """
        sizes = [
            shard.range.stop - shard.range.start if matrices or not shard.group_key.is_matrix else 0
            for shard in self.local_shards
        ]
        device = self.params.device
        on_host = {"device": "cpu", "pin_memory": pinned and device.type == "cuda"}
        together = torch.zeros(sum(sizes), dtype=dtype, **(on_host if self.offloaded else {"device": device}))
        return list(together.split(sizes))

    def copy_masters_to_params(self) -> None:
        """Round the masters to `dtype`, and write them into this rank's shards of `params`."""
        for index in range(len(self.masters)):
            self.round_master(index)
        self.copy_rounded_to_params()

    def round_master(self, index: int) -> None:
        """Round the master of one local shard."""
        if self.rounded[index] is not self.masters[index]:
            self.rounded[index].copy_(self.masters[index])

    def copy_rounded_to_params(self) -> None:
        """Copy rounded masters that are in host memory into this rank's shards of `params`."""
        if self.offloaded:
            for shard, rounded in zip(self.local_shards, self.rounded, strict=True):
                self.params[shard.range].copy_(rounded, non_blocking=True)

    def copy_params_to_masters(self) -> None:
        """Set the masters to the parameters, for weights that were loaded in the model's precision."""
        for shard, master in zip(self.local_shards, self.masters, strict=True):
            master.copy_(self.params[shard.range])


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _overlap(a: slice, b: slice) -> slice | None:
    start, stop = max(a.start, b.start), min(a.stop, b.stop)
    return slice(start, stop) if start < stop else None


def slice_within(part: slice, whole: slice) -> slice:
    """Return `part` relative to the start of `whole`."""
    return slice(part.start - whole.start, part.stop - whole.start)
