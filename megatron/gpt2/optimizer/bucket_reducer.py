"""Data parallelism: buckets of gradients are reduced while backward runs. With a sharded optimizer, buckets of updated
parameters are gathered while the next forward runs.

`param_and_grad_buffer.py` has the buffers and the shards of each rank. `ShardedGradReducer` is for ZeRO stage 2.
"""

import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.gpt2.model.gpt2 import GPT2Model
from megatron.gpt2.optimizer.param_and_grad_buffer import ParamAndGradBuffer, slice_within
from mpu import kernels
from mpu.grads import all_reduce_coalesced
from mpu.mappings import all_gather_single, reduce_scatter_single

BYTES_AT_ONCE = 32 << 20  # A GPU adds gradients of this total size to their buckets in one launch.


class BucketReducer:
    """Sums the gradients of a step over micro-batches and data-parallel ranks. `buffer.owned_grads()` returns the sums.

    Each gradient is added to its bucket in float32 as soon as autograd has computed the gradient, which is then freed.
    A bucket with the gradients of all micro-batches is sent asynchronously: by all-reduce, or by reduce-scatter if the
    optimizer is sharded. All ranks send the buckets in the same order, even if autograd computes gradients in different
    orders. For example, two buckets of two parameters and two micro-batches give these states:

        after                    _awaited     _incomplete   _sent
        begin(2)                 2 2 | 2 2    2 | 2
        micro-batch 0            1 1 | 1 1    2 | 2
        half of micro-batch 1    0 0 | 1 1    0 | 2         bucket 0
        micro-batch 1            0 0 | 0 0    0 | 0         bucket 0, bucket 1
        finish_grad_sync         0 0 | 0 0    0 | 0         (has waited for both)

    Under sequence parallelism, gradients of replicated parameters are also summed over the tensor-parallel group.

    in_bf16: whether gradients are rounded to bf16 before they are sent, and summed in bf16.
    embedding_group: the ranks that have the parameter `buffer.tied_param`. At the end of a step, these ranks sum the
        gradient of the parameter.
    """

    def __init__(
        self,
        buffer: ParamAndGradBuffer,
        group: ProcessGroup | None,
        *,
        in_bf16: bool = False,
        embedding_group: ProcessGroup | None = None,
    ) -> None:
        self._buffer = buffer
        self._group = group if group is not None and group.size() > 1 else None
        self._in_bf16, self._embedding_group = in_bf16, embedding_group
        self._bucket_of = self._buckets_of_gradients()
        # For each sent bucket: the collective and this rank's shard of the sum, or None after the collective has ended.
        self._sent: list[tuple[dist.Work, Tensor] | None] = []
        # the gradients that `_add_collected` will add to their buckets
        self._collected: dict[str, Tensor] = {}
        self._collected_bytes = 0
        self.begin(0)
        for name, parameter in buffer.parameters.items():
            parameter.register_post_accumulate_grad_hook(self._hook(name))

    def begin(self, num_microbatches: int) -> None:
        """Start a step in which every parameter gets `num_microbatches` gradients."""
        self._awaited = dict.fromkeys(self._bucket_of, num_microbatches)
        self._incomplete = list(Counter(self._bucket_of.values()).values())
        self._begun: set[str] = set()  # the parameters that have a gradient in this step

    def finish_grad_sync(self) -> None:
        """Wait until every bucket of the step is reduced. Then sum partial gradients over the tensor-parallel group and
        the gradient of the tied matrix over the embedding group, as Megatron's `finalize_model_grads` does."""
        forgotten = [name for name, awaited in self._awaited.items() if awaited]
        assert not forgotten, f"parameters without a gradient: {forgotten}"
        for index in range(len(self._sent)):
            self._receive(index)
        self._sent.clear()
        all_reduce_partial_grads(self._buffer)
        if self._embedding_group is not None and self._buffer.tied_param is not None:
            dist.all_reduce(self._buffer.owned_grad(self._buffer.tied_param), group=self._embedding_group)

    def add(self, name: str, gradient: Tensor) -> None:
        """Add the gradient of a micro-batch for the parameter `name`: a tensor of its shape, in any dtype."""
        if self._mark_begun(name):
            self._grad(name).copy_(gradient)
        else:
            self._grad(name).add_(gradient)

    def add_rows(self, name: str, rows: Tensor, gradients: Tensor) -> None:
        """Add a gradient that is 0 outside of the given rows: gradients [t, h] for the rows [t] int64. Every run must
        pass the rows in the same order, which decides the order of the sums."""
        if self._mark_begun(name):
            self._grad(name).zero_()
        kernels.add_rows_(self._grad(name), rows, gradients)

    def register_grad_ready(self, name: str) -> None:
        """Count the gradient of one micro-batch for the parameter `name`. Send the buckets that are now complete."""
        self._awaited[name] -= 1
        if self._awaited[name] == 0:
            self._incomplete[self._bucket_of[name]] -= 1
            if self._group is not None:
                self._send_ready()

    def _buckets_of_gradients(self) -> dict[str, int]:
        """Return the bucket of each gradient by name, in the order of the buckets."""
        return self._buffer.bucket_of

    def _grad(self, name: str) -> Tensor:
        """Return the tensor in which the gradient `name` is accumulated."""
        return self._buffer.grad(name)

    def _mark_begun(self, name: str) -> bool:
        """Return True if this is the first gradient of the parameter `name` in this step."""
        is_first = name not in self._begun
        self._begun.add(name)
        return is_first

    def _hook(self, name: str):  # type: ignore[no-untyped-def]
        # The reference is weak, because Python's garbage collector does not find a cycle through a parameter's hook.
        reference = weakref.ref(self)

        def on_grad_accumulated(parameter: Tensor) -> None:
            reducer = reference()
            # The tied weight has no `grad`: `TiedGradAccumulator` passes its gradients to the reducer.
            if parameter.grad is not None and reducer is not None:
                gradient, parameter.grad = parameter.grad, None
                reducer.add_and_count(name, gradient)

        return on_grad_accumulated

    def add_and_count(self, name: str, gradient: Tensor) -> None:
        """Add and count a gradient that autograd has computed. On a GPU one launch adds several gradients, at the
        latest at the end of the backward pass."""
        if not gradient.is_cuda:
            self.add(name, gradient)
            self.register_grad_ready(name)
            return
        if not self._collected:
            torch.autograd.Variable._execution_engine.queue_callback(self._add_collected)
        self._collected[name] = gradient
        self._collected_bytes += gradient.nbytes
        if self._collected_bytes >= BYTES_AT_ONCE:
            self._add_collected()

    def _add_collected(self) -> None:
        gradients, self._collected, self._collected_bytes = self._collected, {}, 0
        new_names = [name for name in gradients if self._mark_begun(name)]
        begun_names = [name for name in gradients if name not in new_names]
        for names, add in ((new_names, False), (begun_names, True)):
            if names:
                kernels.add_grads_([self._grad(name) for name in names], [gradients[name] for name in names], add)
        for name in gradients:
            self.register_grad_ready(name)

    def _send_ready(self) -> None:
        """Start to reduce the buckets that are complete, in the order of the buckets."""
        while len(self._sent) < len(self._incomplete) and not self._incomplete[len(self._sent)]:
            self._sent.append(self._send(len(self._sent)))

    def _send(self, index: int) -> tuple[dist.Work, Tensor]:
        """Start to reduce bucket `index`. Return the collective, and the tensor for this rank's shard of the sum."""
        grads, bucket = self._buffer.bucket_grads(index), self._buffer.buckets[index]
        shard = slice_within(self._buffer.shard_range(bucket), bucket.range)
        sent = grads.bfloat16() if self._in_bf16 else grads
        if self._buffer.is_sharded:
            work = reduce_scatter_single(sent[shard], sent, group=self._group, async_op=True)
        else:
            work = dist.all_reduce(sent, group=self._group, async_op=True)
        assert work is not None
        return work, sent[shard]

    def _receive(self, index: int) -> None:
        """Wait for bucket `index`, and write this rank's shard of the sum to the buffer."""
        received = self._wait_for_bucket(index)
        if self._in_bf16:
            self._buffer.shard_grads(index).copy_(received)

    def _wait_for_bucket(self, index: int) -> Tensor:
        """Wait for bucket `index` and return this rank's shard of its sum."""
        sent, self._sent[index] = self._sent[index], None  # None frees the tensor that was sent.
        assert sent is not None
        sent[0].wait()
        return sent[1]


class ShardedGradReducer(BucketReducer):
    """--shard-gradients: ZeRO stage 2 (arXiv:1910.02054). The gradients of every micro-batch are sent, and each rank
    keeps only its shard of the sums. At most two whole buckets exist at a time: the bucket that backward fills, and the
    previous one, which is being sent. Micro-batches must run their backward passes in order.

    The base class treats each micro-batch as a step. For example, two buckets of two parameters and two micro-batches
    give these states:

        after                    _awaited     _sent                  _remaining_microbatches
        begin(2)                 1 1 | 1 1                           2
        half of micro-batch 0    0 0 | 1 1    bucket 0               2
        micro-batch 0            1 1 | 1 1    (has received both)    1    (has called begin(1))
        micro-batch 1            0 0 | 0 0    (has received both)    0    (has called begin(0))
    """

    def begin(self, num_microbatches: int) -> None:
        """Start a step. After each micro-batch, `_send_ready` calls `begin` with the number of remaining ones."""
        self._remaining_microbatches, self._num_received = num_microbatches, 0
        super().begin(1 if num_microbatches else 0)

    def _send_ready(self) -> None:
        """Also receive the sent buckets, except the newest one, whose reduction overlaps backward. If all buckets of
        the micro-batch are sent, receive all of them and start the next micro-batch."""
        super()._send_ready()
        is_last = len(self._sent) == len(self._buffer.buckets)
        while self._num_received < len(self._sent) - (0 if is_last else 1):
            self._receive(self._num_received)
            self._num_received += 1
        if is_last:
            self._sent.clear()
            self.begin(self._remaining_microbatches - 1)

    def _receive(self, index: int) -> None:
        """Wait for bucket `index`, add this rank's shard of the sum to its shard of earlier micro-batches, and free the
        bucket."""
        self._buffer.accumulate_shard(index, self._wait_for_bucket(index))


class TiedGradAccumulator:
    """Implements `TiedGradSink`: adds the gradient of the tied matrix to the reducer without autograd. The gradient of
    the tied matrix has two parts: the head's and the embedding's.

    name: the name under which the gradient of the head is reduced.
    embedding_name: the name under which the gradient of the embedding is reduced.
    joins_parts: whether this rank has both parts and reduces their sum. If false, each part is reduced separately.
    """

    def __init__(self, reducer: BucketReducer, name: str, embedding_name: str, *, joins_parts: bool = False) -> None:
        self._reducer, self._name, self._embedding_name = reducer, name, embedding_name
        self._joins_parts = joins_parts
        self._head_gradient: Tensor | None = None

    def add(self, gradient: Tensor) -> None:
        """Add the gradient of the head, [v/tp, h]. With joins_parts, `add` stores the gradient, and `add_rows` adds it
        to the reducer."""
        if self._joins_parts:
            # Keep the gradient in the model's precision, because memory is fullest at the start of backward.
            self._head_gradient = gradient
        else:
            self._reducer.add(self._name, gradient)
            self._reducer.register_grad_ready(self._name)

    def add_rows(self, rows: Tensor, gradients: Tensor) -> None:
        """Add the gradient of the embedding, which backward computes last: [t, h] for the rows [t] int64."""
        if self._joins_parts:
            assert self._head_gradient is not None, "backward of the head is first"
            self._reducer.add(self._name, self._head_gradient)
            self._head_gradient = None
        self._reducer.add_rows(self._embedding_name, rows, gradients)
        self._reducer.register_grad_ready(self._embedding_name)


def all_reduce_partial_grads(buffer: ParamAndGradBuffer) -> None:
    """Sum gradients that are partial under sequence parallelism over the tensor-parallel group. All ranks of a
    tensor-parallel group have the same owned ranges."""
    if any(owned.group_key.is_sequence_parallel for owned in buffer.owned_ranges):
        all_reduce_coalesced(
            [
                grad
                for grad, owned in zip(buffer.owned_grads(), buffer.owned_ranges, strict=True)
                if owned.group_key.is_sequence_parallel
            ]
        )


def choose_bucket_size(requested: int, data_parallel_size: int) -> int:
    """Return the number of elements of a bucket: `requested` (--ddp-bucket-size), or less with one data-parallel rank.

    One data-parallel rank sends nothing, so small buckets cost no time. Small buckets fit into the memory that freed
    activations leave: on a CPU, a run with 124M parameters takes 3.1 GB instead of 3.5.
    """
    return requested if data_parallel_size > 1 else min(requested, 1_000_000)


class ParamAllGather:
    """Gathers the parameters that other ranks' optimizers have updated, while the next forward runs.

    `start_param_sync` starts an all-gather for each bucket, the last bucket first: the buffer has the order of
    backward, and forward needs the parameters in the opposite order. The model waits for the parameters outside its
    layers before its forward pass, and for the buckets of a layer before this layer. Other code that reads parameters
    must call `finish_param_sync` first. Without a sharded optimizer, `ParamAllGather` does nothing.
    """

    def __init__(self, buffer: ParamAndGradBuffer, model: GPT2Model, group: ProcessGroup | None) -> None:
        self._buffer, self._group = buffer, group
        self._works: dict[int, dist.Work] = {}  # the all-gathers for which no call has waited, by bucket
        if not buffer.is_sharded:
            return
        # the buckets of each layer; None stands for parameters outside the layers
        needed: defaultdict[int | None, list[int]] = defaultdict(list)
        for index, bucket in reversed(list(enumerate(buffer.buckets))):
            for layer in {_layer_of(name) for name in bucket.names}:
                needed[layer].append(index)
        model.register_forward_pre_hook(lambda module, args: self.finish_param_sync(needed[None]))
        # The block calls this hook, because torch.compile would make a layer's own hook part of the layer's graph.
        model.transformer.layer_pre_hook = lambda layer: self.finish_param_sync(needed[layer])

    def start_param_sync(self) -> None:
        """Start all all-gathers, after this rank's parameters were written. On a GPU the host does not wait for the
        all-gathers."""
        self.finish_param_sync()
        if self._buffer.is_sharded:
            for index, bucket in reversed(list(enumerate(self._buffer.buckets))):
                work = all_gather_single(
                    self._buffer.params[bucket.range],
                    self._buffer.params[self._buffer.shard_range(bucket)],
                    group=self._group,
                    async_op=True,
                )
                assert work is not None
                self._works[index] = work

    def finish_param_sync(self, buckets: Iterable[int] | None = None) -> None:
        """Wait until the parameters of `buckets` (default: all buckets) are gathered."""
        for index in list(self._works) if buckets is None else buckets:
            if (work := self._works.pop(index, None)) is not None:
                work.wait()


def _layer_of(name: str) -> int | None:
    """Return the number in "transformer.layers.<number>.<...>", or None for other parameters."""
    path = name.split(".")
    return int(path[2]) if path[:2] == ["transformer", "layers"] else None
