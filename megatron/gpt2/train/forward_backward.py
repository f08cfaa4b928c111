"""The forward and backward passes of a step, in the order of a schedule. One interpreter serves every schedule, also
that of a run without a pipeline: forward and backward of one micro-batch after the other.

`megatron/gpt2/pipeline/schedule.py` makes the tables that are run here.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import mpu
from megatron.gpt2.monitor.timers import Timers
from megatron.gpt2.optimizer.gradient_reducer import GradientReducer
from megatron.gpt2.pipeline.program import Message, Step, program
from megatron.gpt2.pipeline.schedule import Action, Schedule
from megatron.gpt2.train.engine import Engine

MicroBatch = Mapping[str, Any]  # the arguments of the model
Place = tuple[int, int]  # chunk and micro-batch
Content = tuple[str, int, int]  # activation or gradient, stage and micro-batch


class ForwardBackward:
    """Runs, on this rank of a pipeline, the schedule of so many micro-batches as a step has: `schedules` makes it.
    Every rank has one and calls its methods at the same steps. micro_batches: of the last step."""

    def __init__(
        self, schedules: Callable[[int], Schedule], engine: Engine, parallel: mpu.ParallelState, timers: Timers
    ) -> None:
        self._engine, self._timers, self._group = engine, timers, parallel.pipeline_model_parallel_group
        self._rank, self._size = parallel.pipeline_model_parallel_rank, parallel.pipeline_model_parallel_size
        schedule = schedules(1)
        self._last_stage = self._size * schedule.chunks - 1
        self._steps_of = functools.cache(lambda micro_batches: program(schedules(micro_batches))[self._rank])
        self._later = WeightGradientsLater(engine) if schedule.splits_backward else None
        self._kept: dict[Place, tuple[Tensor | None, Tensor, list[Tensor]]] = {}  # input, root, gradient of the output
        self._arriving: dict[Content, mpu.Transfer] = {}
        self._leaving: dict[Content, Tensor] = {}
        self._sent: list[mpu.Transfer] = []
        if self._group is not None:  # NCCL: a batch of transfers must not be the first call in a group
            dist.all_reduce(torch.zeros((), device=engine.flat.params.device), group=self._group)

    def __call__(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """Forward and backward of all: their gradients go to the engine's reducer. Returns the loss of each, float32
        on the device; one 0 where another stage has the loss."""
        self.micro_batches = micro_batches
        self._losses: list[Tensor] = []
        self._engine.reducer.begin(len(micro_batches))
        run = {"F": self._forward, "B": self._backward, "W": self._weights}
        for step in self._steps_of(len(micro_batches)):
            self._exchange(step)
            if step.action is not None:
                run[step.action.kind](step.action)
        self._await_sent()
        return torch.stack(self._losses or [torch.zeros((), device=self._engine.flat.params.device)])

    @torch.no_grad()
    def evaluate(self, micro_batch: MicroBatch) -> Tensor:
        """The loss of a micro-batch without gradients, 0 where another stage has it. Successive ones follow each other
        through the stages, since each stage goes on when the next one has taken what it sends."""
        model = self._engine.model
        for chunk in model.chunks:
            hidden = None
            if chunk.start > 0:
                hidden = mpu.receive_from_previous_stage(model.empty_hidden(*micro_batch["tokens"].shape), self._group)
            out = model(**micro_batch, chunk=chunk, hidden=hidden)
            if chunk.stop < model.config.num_layers:
                mpu.send_to_next_stage(out, self._group)
        return out if model.has_head else torch.zeros((), device=out.device)

    def _exchange(self, step: Step) -> None:
        """Begin the transfers of a step. What was sent before is freed: its receivers have taken it at about that time,
        since a step takes no longer if every rank waits for what it sends (`tests/megatron/gpt2/pipeline/test_analysis.py`)."""
        if not step.sends and not step.receives:
            return
        assert self._group is not None
        self._await_sent()
        shape = self.micro_batches[0]["tokens"].shape
        sends = [(self._leaving.pop(_content(message)), message.destination) for message in step.sends]
        receives = [(self._engine.model.empty_hidden(*shape), message.source) for message in step.receives]
        self._sent, received = mpu.exchange(sends, receives, self._group)
        self._arriving.update(zip(map(_content, step.receives), received, strict=True))

    def _await_sent(self) -> None:
        for transfer in self._sent:
            transfer.wait()
        self._sent = []

    def _forward(self, action: Action) -> None:
        stage, number = action.chunk * self._size + self._rank, action.micro_batch
        arguments = dict(self.micro_batches[number])
        hidden = None
        if self._last_stage > 0:
            if stage > 0:
                hidden = self._arriving.pop(("activation", stage, number)).wait().requires_grad_()
            arguments |= {"chunk": self._engine.model.chunks[action.chunk], "hidden": hidden}
        with self._timers("forward"), self._engine.reducer.forward(number):
            root = self._engine.forward(**arguments)
        gradient: list[Tensor] = []
        if stage == self._last_stage:
            self._losses.append(root.detach())
        else:
            self._leaving["activation", stage + 1, number] = root.detach().contiguous()
            root = _Departure.apply(root, gradient)
        self._kept[action.chunk, number] = hidden, root, gradient

    def _backward(self, action: Action) -> None:
        stage, number = action.chunk * self._size + self._rank, action.micro_batch
        hidden, root, gradient = self._kept.pop((action.chunk, number))
        if stage < self._last_stage:
            gradient.append(self._arriving.pop(("gradient", stage, number)).wait())
        with self._timers("backward"):
            root.backward()
        if hidden is not None:
            assert hidden.grad is not None
            self._leaving["gradient", stage - 1, number] = hidden.grad
        if self._later is not None:
            self._later.keep((action.chunk, number))

    def _weights(self, action: Action) -> None:
        assert self._later is not None
        with self._timers("backward"):
            self._later.compute((action.chunk, action.micro_batch))


def _content(message: Message) -> Content:
    return message.kind, message.stage, message.micro_batch


class _Departure(torch.autograd.Function):
    """Hidden states leave for the next stage. A scalar stands for them, so that what was sent can be freed. Backward
    begins with the gradient that has come back: the one in `gradient`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gradient: list[Tensor]) -> Tensor:
        ctx.gradient = gradient
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient.pop(), None


class WeightGradientsLater:
    """Takes the place of the weight gradient in every linear layer of the model: backward hands over its factors, and
    `compute` makes the product when the schedule has time for it (zero bubble, arXiv:2401.10241)."""

    def __init__(self, engine: Engine) -> None:
        assert isinstance(engine.reducer, GradientReducer), "Config refuses torch's DDP"
        self._reducer = engine.reducer
        self._new: list[tuple[str, Callable[[], Tensor]]] = []
        self._kept: dict[Place, list[tuple[str, Callable[[], Tensor]]]] = {}

        def sink_of(name: str, module: mpu.ColumnParallelLinear | mpu.RowParallelLinear) -> Callable[..., None]:
            return lambda dy, x: self._new.append((name, functools.partial(module.weight_gradient, dy, x)))

        for name, module in engine.model.named_modules():
            if isinstance(module, mpu.ColumnParallelLinear | mpu.RowParallelLinear):
                module.weight_gradient_sink = sink_of(f"{name}.weight", module)

    def keep(self, place: Place) -> None:
        """What backward has handed over since the last call belongs to `place`."""
        self._kept[place], self._new = self._new, []

    @torch.no_grad()  # as inside of backward
    def compute(self, place: Place) -> None:
        """The weight gradients of `place`, into the reducer."""
        for name, product in self._kept.pop(place):
            self._reducer.add(name, product())
            self._reducer.complete(name)
