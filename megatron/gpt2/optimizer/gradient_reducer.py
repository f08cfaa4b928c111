"""Data parallelism: gradients are reduced in buckets while backward still runs, and the parameters that the sharded
optimizers of other ranks have updated come in buckets while the next forward runs.

`flat_parameters.py` has the buffers and says what each rank owns of them. `ShardedGradientReducer` serves ZeRO stage 2,
`TorchDDPReducer` leaves the work to torch.
"""

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.gpt2.model.gpt2 import GPT2Model
from megatron.gpt2.optimizer.flat_parameters import FlatParameters, within
from mpu.grads import sum_over_group
from mpu.mappings import all_gather_single, reduce_scatter_single


class GradientReducer:
    """Sums the gradients of a step over micro-batches and data-parallel ranks into `flat.owned_grads()`, those of
    the ranges that this rank's optimizer owns.

    A gradient is added in float32 as soon as autograd has made it, and freed. A bucket is sent, asynchronously, once
    all its parameters have the gradients of all micro-batches: an all-reduce, or where the optimizer is sharded a
    reduce-scatter. Buckets are always sent in the same order, so that ranks whose autograd runs in another order still
    meet in the same collective.

    in_bf16: what is sent is rounded to bf16, and so is the sum; it takes 2 bytes an element until `finish`.
    Under sequence parallelism the gradients of replicated parameters are summed over the tensor-parallel group as well.
    embedding_group: the ranks that hold the parameter `flat.shared`, over which its gradient is summed last, each rank
    the part that it owns.
    """

    def __init__(
        self,
        flat: FlatParameters,
        group: ProcessGroup | None,
        *,
        in_bf16: bool = False,
        embedding_group: ProcessGroup | None = None,
    ) -> None:
        self._flat = flat
        self._group = group if group is not None and group.size() > 1 else None
        self._in_bf16, self._embedding_group = in_bf16, embedding_group
        self._bucket_of = self._buckets_of_gradients()
        # By bucket, with what is owned of the sum; None of those that have come.
        self._sent: list[tuple[dist.Work, Tensor] | None] = []
        self.begin(0)
        for name, parameter in flat.parameters.items():
            parameter.register_post_accumulate_grad_hook(self._hook(name))

    def begin(self, micro_batches: int) -> None:
        """Before the first backward of a step, in which every parameter gets a gradient of each of `micro_batches`."""
        self._awaited = dict.fromkeys(self._bucket_of, micro_batches)
        self._incomplete = list(Counter(self._bucket_of.values()).values())
        self._begun: set[str] = set()  # the parameters that have a gradient of this step

    def forward(self, index: int) -> contextlib.AbstractContextManager[None]:
        """Around the forward of micro-batch `index`."""
        return contextlib.nullcontext()

    def finish(self) -> None:
        """Wait until every bucket of the step is reduced."""
        forgotten = [name for name, awaited in self._awaited.items() if awaited]
        assert not forgotten, f"parameters without a gradient: {forgotten}"
        for index in range(len(self._sent)):
            self._receive(index)
        self._sent.clear()
        sum_partial(self._flat)
        if self._embedding_group is not None and self._flat.shared is not None:
            dist.all_reduce(self._flat.owned_grad(self._flat.shared), group=self._embedding_group)

    def add(self, name: str, gradient: Tensor) -> None:
        """Add the gradient of a micro-batch for the parameter `name`: a tensor of its shape, in any dtype."""
        if self._is_first(name):
            self._grad(name).copy_(gradient)
        else:
            self._grad(name).add_(gradient)

    def add_rows(self, name: str, rows: Tensor, gradients: Tensor) -> None:
        """Add a gradient of which only some rows are not 0: gradients [t, h] for the rows [t] int64, in the same order
        in each run."""
        if self._is_first(name):
            self._grad(name).zero_()
        self._grad(name).index_put_((rows,), gradients.float(), accumulate=True)

    def complete(self, name: str) -> None:
        """Say that a micro-batch has no more gradients for the parameter `name`. Buckets that are complete are sent."""
        self._awaited[name] -= 1
        if self._awaited[name] == 0:
            self._incomplete[self._bucket_of[name]] -= 1
            if self._group is not None:
                self._send_ready()

    def _buckets_of_gradients(self) -> dict[str, int]:
        """The bucket in which each gradient is sent, by name, in the order of the buckets."""
        return self._flat.bucket_of

    def _grad(self, name: str) -> Tensor:
        """Where the gradient `name` is put together."""
        return self._flat.grad(name)

    def _is_first(self, name: str) -> bool:
        first = name not in self._begun
        self._begun.add(name)
        return first

    def _hook(self, name: str):  # type: ignore[no-untyped-def]
        def collect(parameter: Tensor) -> None:
            if parameter.grad is None:
                return  # it came by `add`
            self.add(name, parameter.grad)
            parameter.grad = None
            self.complete(name)

        return collect

    def _send_ready(self) -> None:
        while len(self._sent) < len(self._incomplete) and not self._incomplete[len(self._sent)]:
            self._sent.append(self._send(len(self._sent)))

    def _send(self, index: int) -> tuple[dist.Work, Tensor]:
        """Begin to reduce bucket `index`: the work, and what will be owned of the sum."""
        grads, bucket = self._flat.bucket_grads(index), self._flat.buckets[index]
        inside = within(self._flat.owned_part(bucket), bucket.range)
        sent = grads.bfloat16() if self._in_bf16 else grads
        if self._flat.is_sharded:
            work = reduce_scatter_single(sent[inside], sent, group=self._group, async_op=True)
        else:
            work = dist.all_reduce(sent, group=self._group, async_op=True)
        assert work is not None
        return work, sent[inside]

    def _receive(self, index: int) -> None:
        received = self._arrived(index)
        if self._in_bf16:
            self._flat.owned_bucket_grads(index).copy_(received)

    def _arrived(self, index: int) -> Tensor:
        """What is owned of the sum of bucket `index`, when it is there."""
        sent, self._sent[index] = self._sent[index], None  # which also holds what was sent
        assert sent is not None
        sent[0].wait()
        return sent[1]


class ShardedGradientReducer(GradientReducer):
    """--shard-gradients: the same, by ZeRO stage 2 (arXiv:1910.02054): each micro-batch sends its gradients, and between
    them a rank keeps only the sums of what it owns. At most two buckets are whole: the one that backward fills and the
    one before it, which is on its way. Backward of a micro-batch comes after that of the one before.
    """

    def begin(self, micro_batches: int) -> None:
        """As `GradientReducer.begin`."""
        self._rounds, self._received = micro_batches, 0
        super().begin(1 if micro_batches else 0)

    def _send_ready(self) -> None:
        super()._send_ready()
        is_last = len(self._sent) == len(self._flat.buckets)
        while self._received < len(self._sent) - (0 if is_last else 1):
            self._receive(self._received)
            self._received += 1
        if is_last:
            self._sent.clear()
            self.begin(self._rounds - 1)

    def _receive(self, index: int) -> None:
        self._flat.keep_owned(index, self._arrived(index))


class TorchDDPReducer:
    """--DDP-impl torch, to compare with: does what `GradientReducer` does by torch's DistributedDataParallel, which
    reduces in the parameters' dtype. bucket_size: elements of a bucket; DDP counts in MB of 2^20 bytes. `module`:
    forward is called on it."""

    def __init__(self, flat: FlatParameters, module: nn.Module, group: ProcessGroup, *, bucket_size: int) -> None:
        self._flat = flat
        self._size = group.size()
        element = flat.params.element_size()
        self.module = nn.parallel.DistributedDataParallel(
            module, process_group=group, broadcast_buffers=False, bucket_cap_mb=max(bucket_size * element >> 20, 1)
        )

    def begin(self, micro_batches: int) -> None:
        """As `GradientReducer.begin`."""
        self._micro_batches = micro_batches

    def forward(self, index: int) -> contextlib.AbstractContextManager[None]:
        """Around the forward of micro-batch `index`: of the last one alone backward sends gradients."""
        return contextlib.nullcontext() if index == self._micro_batches - 1 else self.module.no_sync()

    def finish(self) -> None:
        """Copy the reduced gradients into `flat`, in float32."""
        for name, parameter in self._flat.parameters.items():
            assert parameter.grad is not None, name
            # DDP divides by the ranks; our token weights did so already.
            self._flat.grad(name).copy_(parameter.grad).mul_(self._size)
            parameter.grad = None
        sum_partial(self._flat)


class TiedGradient:
    """The gradient of the tied matrix, which comes in two parts, into the reducer without autograd. name: of the head's
    gradient. of_embedding: of the embedding's, if it is reduced apart from the head's or is on another rank of the
    pipeline; None: it is added to the head's, which waits for it."""

    def __init__(self, reducer: GradientReducer, name: str, of_embedding: str | None = None) -> None:
        self._reducer, self._name, self._of_embedding = reducer, name, of_embedding
        self._of_head: Tensor | None = None

    def add(self, gradient: Tensor) -> None:
        """As `TiedGradient` of the model."""
        if self._of_embedding is None:
            self._of_head = gradient  # not into float32 yet: now, at the start of backward, memory is fullest
        else:
            self._reducer.add(self._name, gradient)
            self._reducer.complete(self._name)

    def add_rows(self, rows: Tensor, gradients: Tensor) -> None:
        """As `TiedGradient` of the model."""
        if self._of_embedding is None:
            assert self._of_head is not None, "the head comes first in backward"
            self._reducer.add(self._name, self._of_head)
            self._of_head = None
        name = self._of_embedding or self._name
        self._reducer.add_rows(name, rows, gradients)
        self._reducer.complete(name)


def sum_partial(flat: FlatParameters) -> None:
    """Sum the gradients that sequence parallelism leaves partial, over the tensor-parallel group. Each rank sums what
    it owns; the ranks of the group own the same ranges."""
    if any(segment.is_partial for segment in flat.owned):
        sum_over_group(
            [grad for grad, segment in zip(flat.owned_grads(), flat.owned, strict=True) if segment.is_partial]
        )


def bucket_size(asked: int, data_parallel_size: int) -> int:
    """Elements of a bucket. asked: --ddp-bucket-size. With one data-parallel rank nothing is sent, and buckets are
    small: they find room where backward has freed activations, which saves 0.4 GB of the 3.5 GB that 124M take on a
    CPU."""
    return asked if data_parallel_size > 1 else min(asked, 1_000_000)


class ParameterGatherer:
    """Fetches the parameters that other ranks' optimizers own, bucket by bucket, while the model already computes.

    `launch` starts all the all-gathers, in the order in which forward needs them: the buffer's from its end. The
    model waits before its embeddings for whatever lies outside of its layers, and before each layer for the buckets
    that hold a part of it. Whoever else reads parameters calls `wait` first. Nothing happens unless `flat` is sharded.
    """

    def __init__(self, flat: FlatParameters, model: GPT2Model, group: ProcessGroup | None) -> None:
        self._flat, self._group = flat, group
        self._works: dict[int, dist.Work] = {}  # by bucket, of those that nobody waited for yet
        if not flat.is_sharded:
            return
        needed: defaultdict[int | None, list[int]] = defaultdict(list)  # by layer, None: outside of them
        for index, bucket in reversed(list(enumerate(flat.buckets))):
            for layer in {_layer_of(name) for name in bucket.names}:
                needed[layer].append(index)
        model.register_forward_pre_hook(lambda module, args: self.wait(needed[None]))
        # No hook of the layer, which would become a part of what torch.compile makes of it.
        model.transformer.layer_pre_hook = lambda layer: self.wait(needed[layer])

    def launch(self) -> None:
        """Start all the all-gathers, after `flat.write_back`. On a GPU they follow it on the device, and the host waits
        for nothing."""
        self.wait()
        if self._flat.is_sharded:
            for index, bucket in reversed(list(enumerate(self._flat.buckets))):
                work = all_gather_single(
                    self._flat.params[bucket.range],
                    self._flat.params[self._flat.owned_part(bucket)],
                    group=self._group,
                    async_op=True,
                )
                assert work is not None
                self._works[index] = work

    def wait(self, buckets: Iterable[int] | None = None) -> None:
        """Wait until these buckets (default: all) are complete."""
        for index in list(self._works) if buckets is None else buckets:
            if (work := self._works.pop(index, None)) is not None:
                work.wait()


def _layer_of(name: str) -> int | None:
    """The number in "transformer.layers.<number>.<...>", None for any other parameter."""
    path = name.split(".")
    return int(path[2]) if path[:2] == ["transformer", "layers"] else None
