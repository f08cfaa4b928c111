"""Data parallelism: gradients are reduced in buckets while backward still runs, and with a sharded optimizer the
parameters that it updated are gathered in buckets while the next forward runs.

`megatron/gpt2/optimizer/flat_parameters.py` has the buffers and says what each rank owns of them.
"""

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.gpt2.config import ParallelConfig
from megatron.gpt2.model.gpt2 import GPT2Model
from megatron.gpt2.optimizer.flat_parameters import FlatParameters
from mpu.grads import sum_over_group
from mpu.mappings import all_gather_single, reduce_scatter_single


class GradientReducer:
    """Sums the gradients of a step over micro-batches and data-parallel ranks into `flat.owned_grads()`, those of
    the ranges that this rank's optimizer owns.

    A gradient is added in float32 as soon as autograd has made it, and freed. In the last micro-batch of a step a
    bucket is sent, asynchronously, once all its parameters have theirs: an all-reduce, or where the optimizer is
    sharded a reduce-scatter. Buckets are always sent in the same order, so that ranks whose autograd runs in another
    order still meet in the same collective.

    in_bf16: what is sent is rounded to bf16, and so is the sum; it takes 2 bytes an element until `finish`.
    Under sequence parallelism the gradients of replicated parameters are summed over the model-parallel group as well.
    """

    def __init__(self, flat: FlatParameters, group: ProcessGroup | None, *, in_bf16: bool = False) -> None:
        self._flat = flat
        self._group = group if group is not None and group.size() > 1 else None
        self._in_bf16 = in_bf16
        self._bucket_of = {name: i for i, bucket in enumerate(flat.buckets) for name in bucket.names}
        self._missing: list[set[str]] = []
        self._sent: list[tuple[dist.Work, Tensor, Tensor]] = []  # the owned gradients, and what comes for them
        self._first = self._last = True
        for name, parameter in flat.parameters.items():
            parameter.register_post_accumulate_grad_hook(self._hook(name))

    @contextlib.contextmanager
    def micro_batch(self, index: int, count: int) -> Iterator[None]:
        """Around the backward of micro-batch `index` of the `count` of this step."""
        self._first, self._last = index == 0, index == count - 1
        self._missing = [set(bucket.names) for bucket in self._flat.buckets]
        yield
        forgotten = [name for names in self._missing for name in names]
        assert not forgotten, f"parameters without a gradient: {forgotten}"

    def finish(self) -> None:
        """Wait until every bucket of the step is reduced."""
        for work, own, received in self._sent:
            work.wait()
            if self._in_bf16:
                own.copy_(received)
        self._sent.clear()
        sum_partial(self._flat)

    def add(self, name: str, gradient: Tensor) -> None:
        """Add the gradient of a micro-batch for the parameter `name`: a tensor of its shape, in any dtype."""
        if self._first:
            self._flat.grad(name).copy_(gradient)
        else:
            self._flat.grad(name).add_(gradient)

    def add_rows(self, name: str, rows: Tensor, gradients: Tensor) -> None:
        """Add more of the same gradient, after `add`: gradients [t, h] for the rows [t] int64, in the same order in
        each run."""
        self._flat.grad(name).index_put_((rows,), gradients.float(), accumulate=True)

    def complete(self, name: str) -> None:
        """Say that this micro-batch has no more gradients for the parameter `name`. In the last one, buckets that are
        complete are sent."""
        self._missing[self._bucket_of[name]].remove(name)
        if self._last and self._group is not None:
            self._send_ready()

    def _hook(self, name: str):  # type: ignore[no-untyped-def]
        def collect(parameter: Tensor) -> None:
            if parameter.grad is None:
                return  # it came by `add`
            self.add(name, parameter.grad)
            parameter.grad = None
            self.complete(name)

        return collect

    def _send_ready(self) -> None:
        while len(self._sent) < len(self._missing) and not self._missing[len(self._sent)]:
            index = len(self._sent)
            grads, bucket = self._flat.bucket_grads(index), self._flat.buckets[index]
            part, start = self._flat.owned_part(bucket), bucket.range.start
            inside = slice(part.start - start, part.stop - start)
            sent = grads.bfloat16() if self._in_bf16 else grads
            if self._flat.is_sharded:
                work = reduce_scatter_single(sent[inside], sent, group=self._group, async_op=True)
            else:
                work = dist.all_reduce(sent, group=self._group, async_op=True)
            assert work is not None
            self._sent.append((work, grads[inside], sent[inside]))


class _TiedGradient:
    """Of the parameter `name`, into the reducer without autograd."""

    def __init__(self, reducer: GradientReducer, name: str) -> None:
        self._reducer, self._name = reducer, name
        self._of_head: Tensor | None = None

    def add(self, gradient: Tensor) -> None:
        self._of_head = gradient  # not into float32 yet: now, at the start of backward, memory is fullest

    def add_rows(self, rows: Tensor, gradients: Tensor) -> None:
        assert self._of_head is not None, "the head comes first in backward"
        self._reducer.add(self._name, self._of_head)
        self._of_head = None
        self._reducer.add_rows(self._name, rows, gradients)
        self._reducer.complete(self._name)


class TorchDDPReducer:
    """Does what `GradientReducer` does by `torch.nn.parallel.DistributedDataParallel`, which reduces in the parameters'
    dtype. bucket_size: elements of a bucket; DDP counts in MB of 2^20 bytes. `module` is what forward is called on."""

    def __init__(self, flat: FlatParameters, module: nn.Module, group: ProcessGroup, *, bucket_size: int) -> None:
        self._flat = flat
        self._size = group.size()
        element = flat.params.element_size()
        self.module = nn.parallel.DistributedDataParallel(
            module, process_group=group, broadcast_buffers=False, bucket_cap_mb=max(bucket_size * element >> 20, 1))

    @contextlib.contextmanager
    def micro_batch(self, index: int, count: int) -> Iterator[None]:
        """As `GradientReducer.micro_batch`."""
        with contextlib.nullcontext() if index == count - 1 else self.module.no_sync():
            yield

    def finish(self) -> None:
        """Copy the reduced gradients into `flat`, in float32."""
        for name, parameter in self._flat.parameters.items():
            assert parameter.grad is not None, name
            # DDP divides by the ranks; our token weights did so already.
            self._flat.grad(name).copy_(parameter.grad).mul_(self._size)
            parameter.grad = None
        sum_partial(self._flat)


def sum_partial(flat: FlatParameters) -> None:
    """Sum the gradients that sequence parallelism leaves partial, over the model-parallel group. Each rank sums what it
    owns; the ranks of the group own the same ranges."""
    if any(segment.is_partial for segment in flat.owned):
        sum_over_group([grad for grad, segment in zip(flat.owned_grads(), flat.owned, strict=True)
                        if segment.is_partial])


def reducer_for(config: ParallelConfig, flat: FlatParameters, model: GPT2Model,
                group: ProcessGroup | None) -> tuple[GradientReducer | TorchDDPReducer, nn.Module]:
    """The reducer that --DDP-impl names, and the module to call forward on. group: the data-parallel one."""
    if config.DDP_impl == "torch" and group is not None and group.size() > 1:
        ddp = TorchDDPReducer(flat, model, group, bucket_size=config.ddp_bucket_size)
        return ddp, ddp.module
    reducer = GradientReducer(flat, group, in_bf16=config.grad_reduce_in_bf16)
    model.tied_gradient = _TiedGradient(reducer, "word_embeddings.weight")
    return reducer, model


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
                    self._flat.params[bucket.range], self._flat.params[self._flat.owned_part(bucket)],
                    group=self._group, async_op=True)
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

