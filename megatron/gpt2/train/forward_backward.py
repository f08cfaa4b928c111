"""The forward and backward passes of a step, in the order of a pipeline schedule.

`megatron/gpt2/pipeline/schedule.py` builds the schedule as a table of actions: forward (F), backward (B), or weight
gradients (W) of one micro-batch. Without a pipeline, the schedule is F and B of one micro-batch after the other.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import mpu
from megatron.gpt2.monitor.timers import Timers
from megatron.gpt2.pipeline.p2p_schedule import CommStep, P2PMessage, build_p2p_schedule
from megatron.gpt2.pipeline.schedule import Action, PipelineSchedule
from megatron.gpt2.train.train_state import TrainState
from mpu.layers import ParallelLinear


class SavedForBackward(NamedTuple):
    """The tensors that a model chunk stores between forward and backward of a micro-batch.

    hidden: the input from the previous chunk; None for the first chunk.
    backward_start: the scalar from which backward starts: the loss, or the result of `_DeallocateOutput`.
    received_gradient: the gradient of the output, after the next chunk has sent it.
    """

    hidden: Tensor | None
    backward_start: Tensor
    received_gradient: list[Tensor]


MicroBatch = Mapping[str, Any]  # The keyword arguments of the model's `forward`.
PassKey = tuple[int, int]  # (model chunk, micro-batch)
MessageKey = tuple[str, int, int]  # ("activation" or "gradient", virtual stage, micro-batch)


class ForwardBackward:
    """Runs the forward and backward passes of this pipeline rank. All ranks must call its methods at the same steps.

    pipeline_schedule: a function that returns the schedule for a number of micro-batches.
    micro_batches: the micro-batches of the last step.
    """

    def __init__(
        self,
        pipeline_schedule: Callable[[int], PipelineSchedule],
        state: TrainState,
        parallel: mpu.ParallelState,
        timers: Timers,
    ) -> None:
        self._state, self._timers, self._group = state, timers, parallel.pipeline_model_parallel_group
        self._rank, self._size = parallel.pipeline_model_parallel_rank, parallel.pipeline_model_parallel_size
        schedule = pipeline_schedule(1)
        self._last_virtual_stage = schedule.num_virtual_stages - 1
        self._comm_steps = functools.cache(
            lambda num_microbatches: build_p2p_schedule(pipeline_schedule(num_microbatches))[self._rank]
        )
        self._weight_grads = WeightGradStore(state) if schedule.splits_backward else None
        self._saved_for_backward: dict[PassKey, SavedForBackward] = {}
        self.micro_batches: Sequence[MicroBatch] = ()
        self._losses: list[Tensor] = []
        self._received: dict[MessageKey, mpu.Transfer] = {}
        self._to_send: dict[MessageKey, Tensor] = {}
        self._sent: list[mpu.Transfer] = []
        if self._group is not None:  # With NCCL, batched sends and receives must not be the first call in a group.
            dist.all_reduce(torch.zeros((), device=state.buffer.params.device), group=self._group)

    def __call__(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """Run forward and backward of all micro-batches. The gradients are added to the reducer. Return the loss of
        each micro-batch, float32 on the device, or a single 0 if another pipeline stage computes the loss."""
        self.micro_batches = micro_batches
        self._losses = []
        self._state.reducer.begin(len(micro_batches))
        run_action = {"F": self._forward, "B": self._backward, "W": self._weight_gradients}
        for step in self._comm_steps(len(micro_batches)):
            self._communicate(step)
            if step.action is not None:
                run_action[step.action.kind](step.action)
        self._wait_for_sends()
        return torch.stack(self._losses or [torch.zeros((), device=self._state.buffer.params.device)])

    @torch.no_grad()
    def evaluate(self, micro_batch: MicroBatch) -> Tensor:
        """Return the loss of a micro-batch without gradients, or 0 if another pipeline stage computes the loss. A stage
        returns as soon as the next stage has received its output, so consecutive calls overlap."""
        model = self._state.model
        for layer_range in model.layer_ranges:
            hidden = None
            if layer_range.start > 0:
                hidden = mpu.recv_forward(model.empty_hidden(*micro_batch["tokens"].shape), self._group, ring=True)
            out = model(**micro_batch, layer_range=layer_range, hidden=hidden)
            if layer_range.stop < model.config.num_layers:
                mpu.send_forward(out, self._group, ring=True)
        return out if model.has_head else torch.zeros((), device=out.device)

    def _communicate(self, step: CommStep) -> None:
        """Start the sends and receives of one entry of the schedule. First wait for the previous sends and free their
        tensors. Both ranks of a message post it at the same time of the simulated schedule, so this wait is short."""
        if not step.sends and not step.receives:
            return
        assert self._group is not None
        self._wait_for_sends()
        shape = self.micro_batches[0]["tokens"].shape
        sends = [(self._to_send.pop(_tensor_key(message)), message.destination) for message in step.sends]
        receives = [(self._state.model.empty_hidden(*shape), message.source) for message in step.receives]
        self._sent, received = mpu.batched_p2p_ops(sends, receives, self._group)
        self._received.update(zip(map(_tensor_key, step.receives), received, strict=True))

    def _wait_for_sends(self) -> None:
        for transfer in self._sent:
            transfer.wait()
        self._sent = []

    def _forward(self, action: Action) -> None:
        """Run the forward pass of a micro-batch. Store the tensors of its backward pass, and the output for the next
        stage."""
        virtual_stage, micro_batch = action.model_chunk * self._size + self._rank, action.micro_batch
        arguments = dict(self.micro_batches[micro_batch])
        hidden = None
        if self._last_virtual_stage > 0:
            if virtual_stage > 0:
                hidden = self._received.pop(("activation", virtual_stage, micro_batch)).wait().requires_grad_()
            arguments |= {"layer_range": self._state.model.layer_ranges[action.model_chunk], "hidden": hidden}
        with self._timers("forward"):
            output = self._state.model(**arguments)
        received_gradient: list[Tensor] = []
        if virtual_stage == self._last_virtual_stage:
            self._losses.append(output.detach())
        else:
            self._to_send["activation", virtual_stage + 1, micro_batch] = output.detach().contiguous()
            output = _DeallocateOutput.apply(output, received_gradient)
        saved = SavedForBackward(hidden, output, received_gradient)
        self._saved_for_backward[action.model_chunk, micro_batch] = saved

    def _backward(self, action: Action) -> None:
        """Run the backward pass of a micro-batch, from the loss or from the gradient that the next stage has sent.
        Store the gradient of the input for the previous stage."""
        virtual_stage, micro_batch = action.model_chunk * self._size + self._rank, action.micro_batch
        saved = self._saved_for_backward.pop((action.model_chunk, micro_batch))
        if virtual_stage < self._last_virtual_stage:
            saved.received_gradient.append(self._received.pop(("gradient", virtual_stage, micro_batch)).wait())
        with self._timers("backward"):
            saved.backward_start.backward()
        if saved.hidden is not None:
            assert saved.hidden.grad is not None
            self._to_send["gradient", virtual_stage - 1, micro_batch] = saved.hidden.grad
        if self._weight_grads is not None:
            self._weight_grads.flush((action.model_chunk, micro_batch))

    def _weight_gradients(self, action: Action) -> None:
        assert self._weight_grads is not None
        with self._timers("backward"):
            self._weight_grads.pop((action.model_chunk, action.micro_batch))


def _tensor_key(message: P2PMessage) -> MessageKey:
    return message.kind, message.virtual_stage, message.micro_batch


class _DeallocateOutput(torch.autograd.Function):
    """Replaces the output for the next stage by a scalar, so that the output can be freed after it is sent. Backward
    starts from the gradient of the output, which the caller puts into `received_gradient`. Megatron's function for this
    purpose is `deallocate_output_tensor`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, received_gradient: list[Tensor]) -> Tensor:
        ctx.received_gradient = received_gradient
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.received_gradient.pop(), None


class WeightGradStore:
    """Delays the weight gradients of all linear layers (zero bubble, arXiv:2401.10241). Backward stores the two factors
    of each weight gradient, and the action W of the schedule calls `pop`, which multiplies them."""

    def __init__(self, state: TrainState) -> None:
        self._reducer = state.reducer
        self._pending: list[tuple[str, Callable[[], Tensor]]] = []
        self._stored: dict[PassKey, list[tuple[str, Callable[[], Tensor]]]] = {}

        for name, module in state.model.named_modules():
            if isinstance(module, ParallelLinear):
                module.weight_grad_fn = functools.partial(self._store, f"{name}.weight", module)

    def _store(self, name: str, module: ParallelLinear, dy: Tensor, x: Tensor) -> None:
        self._pending.append((name, functools.partial(module.weight_gradient, dy, x)))

    def flush(self, key: PassKey) -> None:
        """Store the factors of the last backward pass under `key`."""
        self._stored[key], self._pending = self._pending, []

    @torch.no_grad()  # as inside backward
    def pop(self, key: PassKey) -> None:
        """Compute the weight gradients of `key` and add them to the reducer."""
        for name, product in self._stored.pop(key):
            self._reducer.add(name, product())
            self._reducer.register_grad_ready(name)
