"""Hooks that take the tensors of a training step out of a run, as parts of global tensors. Nothing is sent: each rank
says where its part lies.

Legend: b samples of a micro-batch, s sequence, w width, p model-parallel size.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from data_utils.samplers import first_samples
from megatron.gpt2.checkpoint.state import state_pieces
from megatron.gpt2.extensions.verify.trace import Key, Part
from megatron.gpt2.model.gpt2 import TIED
from megatron.gpt2.model.parameters import parameter_specs
from megatron.gpt2.optimizer.flat_state import FlatState
from megatron.gpt2.train.collectives import LOSS_STEP, exact_sum, sum_over_replicas
from megatron.gpt2.train.run import Run
from megatron.gpt2.train.train_step import train_step
from mpu.partition import Box


class Point(NamedTuple):
    """Where a tensor of the forward pass is taken: the output of `module` of a layer, or its input under the name of
    the function that made it. split: of each rank's own part of the width, over all of the sequence. gradient: whether
    backward makes its gradient complete on each rank."""

    module: str = ""
    made_by: str = ""
    split: bool = False
    gradient: bool = False


WHOLE = Point(gradient=True)  # the layer itself, the embeddings, the final norm
# In the order of a layer.
POINTS = (
    Point("input_layernorm", gradient=True),
    Point("attention.query_key_value", split=True),
    Point("attention.dense", made_by="attention.core", split=True),
    Point("attention.dense"),
    Point("post_attention_layernorm", gradient=True),
    Point("mlp.dense_h_to_4h", split=True),
    Point("mlp.dense_4h_to_h", made_by="mlp.gelu", split=True),
    Point("mlp.dense_4h_to_h"),
    WHOLE,
)
See = Callable[[str, int, Any, Point], None]  # is given a name, a place, a tensor and its point


def watch(see: See, module: nn.Module, name: str, place: int, point: Point = WHOLE, *, its_input: bool = False) -> Any:
    """A hook that shows `see` the output or the input of a module whenever it computes."""
    if its_input:
        return module.register_forward_pre_hook(lambda module, args: see(name, place, args[0], point))
    return module.register_forward_hook(lambda module, args, out: see(name, place, out, point))


def watch_layer(see: See, layer: nn.Module, number: int, names: Mapping[str, str] | None = None) -> list[Any]:
    """Hooks at all points of a layer. names: of its modules, if they are not ours."""
    handles = []
    for place, point in enumerate(POINTS, first_place(number)):
        module = layer.get_submodule(names[point.module] if names and point.module else point.module)
        part = point.made_by or point.module
        name = f"transformer.layers.{number}" + (f".{part}" if part else "")
        handles.append(watch(see, module, name, place, point, its_input=bool(point.made_by)))
    return handles


def first_place(number: int) -> int:
    """The place of a layer's first tensor among those of a forward pass, of which the embeddings are 0."""
    return 1 + number * len(POINTS)


class Capture:
    """Takes the parts of each step of `run` and gives them to `take`, while the step runs.

    A layer that is compiled is one operation: only its output is taken. What backward computes again is not taken
    twice.
    """

    def __init__(self, run: Run, take: Callable[[Part], None]) -> None:
        self._run, self._take = run, take
        self._parallel, self._model = run.parallel, run.engine.model
        self._specs = parameter_specs(run.config.model, run.parallel.tensor_model_parallel_size)
        self._step = self._first_sample = 0
        self._begun: Counter[int] = Counter()  # micro-batches of this step, by the first layer of their chunk
        self._is_forward = False
        self._losses: list[Tensor] = []
        self._handles = self._watch()

    def close(self) -> None:
        """Take nothing any more."""
        for handle in self._handles:
            handle.remove()

    def steps(self, count: int) -> None:
        """`count` training steps, all of whose tensors are taken; before them the weights."""
        run = dataclasses.replace(self._run, watch=self)  # type: ignore[arg-type]
        self._parameters()
        for _ in range(count):
            self._step += 1
            self._begun.clear()
            self._losses = []
            self._scale, self._rate = (
                float(x) for x in (run.engine.optimizer.scaler.scale, run.engine.optimizer.learning_rate)
            )
            run.progress.loss_sum.zero_()
            train_step(run)
            run.progress.step(run.samples_of_step)
            self._after_update()

    def _watch(self) -> list[Any]:
        model, body = self._model, self._model.transformer
        handles = [
            model.register_forward_pre_hook(self._begin, with_kwargs=True),
            model.register_forward_hook(self._end),
            watch(self._see, body, "embeddings", 0, its_input=True),
        ]
        for number, layer in enumerate(body.layers):
            if layer is not None and model.is_compiled:
                layer._compiled_call_impl = self._after(layer._compiled_call_impl, number)
            elif layer is not None:
                handles += watch_layer(self._see, layer, number)
        if model.has_head:
            norm = "transformer.final_layernorm"
            handles.append(watch(self._see, body.final_layernorm, norm, first_place(len(body.layers))))
        return handles

    def _after(self, compiled: Any, number: int) -> Callable[..., Tensor]:
        def call(*args: Any, **kwargs: Any) -> Tensor:
            out: Tensor = compiled(*args, **kwargs)
            self._see(f"transformer.layers.{number}", first_place(number + 1) - 1, out, WHOLE)
            return out

        return call

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the forward pass of a micro-batch through a chunk; each chunk has them in their order."""
        run, parallel, chunk = self._run, self._parallel, kwargs.get("chunk")
        self._first_layer = 0 if chunk is None else chunk.start
        places = first_samples(
            run.prepared.batch_schedule.size(run.progress.consumed_samples),
            run.config.train.micro_batch_size,
            parallel.data_parallel_rank,
            parallel.data_parallel_size,
            contiguous=bool(run.config.parallel.exact_layouts),
        )
        self._first_sample = int(places[self._begun[self._first_layer]])
        self._begun[self._first_layer] += 1
        self._is_forward = True
        for place, name in enumerate(("samples", "tokens", "labels")):
            if self._first_layer == 0 and kwargs.get(name) is not None:
                self._samples("input", name, place, kwargs[name], self._first_sample)

    def _end(self, module: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
        self._is_forward = False
        if out.dim() == 0:  # not the hidden states of a stage
            self._losses.append(out.detach())

    def _see(self, name: str, place: int, x: Tensor | Sequence[Tensor], point: Point) -> None:
        """Take x, [s, b, w] or a part of it; where it is complete also its gradient, once backward has it."""
        if not self._is_forward or (name == "embeddings" and self._first_layer > 0):
            return
        x = x if isinstance(x, Tensor) else torch.cat(list(x), dim=-1)  # the parts of an exact layer
        first, cut = self._first_sample, 2 if point.split else 1 if self._model.sequence_parallel else None
        self._samples("activation", name, place, x.detach().transpose(0, 1), first, cut)
        if point.gradient and x.requires_grad:
            scale = self._scale

            def hook(grad: Tensor) -> None:
                unscaled = (grad if scale == 1 else grad.float() / scale).transpose(0, 1)
                self._samples("activation gradient", f"gradient of {name}", -place, unscaled, first, cut)

            x.register_hook(hook)

    def _samples(self, kind: str, name: str, place: int, x: Tensor, first: int, cut: int | None = None) -> None:
        """Take x, [b, s, w] or [b, ...], of the samples from `first` on. cut: the dimension of which each
        tensor-parallel rank has its own part."""
        p, rank = self._parallel.tensor_model_parallel_size, self._parallel.tensor_model_parallel_rank
        offset, whole = [first] + [0] * (x.dim() - 1), [self._run.samples_of_step, *x.shape[1:]]
        if cut is not None:
            offset[cut], whole[cut] = rank * x.shape[cut], p * x.shape[cut]
        box = Box(tuple(offset), tuple(x.shape))
        self._take(Part(Key(self._step, kind, place, name), x, box, tuple(whole), cut is not None or rank == 0))

    def _numbers(self, kind: str, numbers: Mapping[str, Tensor | float]) -> None:
        for place, (name, value) in enumerate(numbers.items()):
            number = torch.as_tensor(value, dtype=torch.float32).detach().clone().view(1)
            key = Key(self._step, kind, place, name)
            self._take(Part(key, number, Box((0,), (1,)), (1,), self._parallel.rank == 0))

    def before_update(self) -> None:
        """Take the loss and the gradients, which are summed and not yet clipped."""
        losses = torch.stack(self._losses or [torch.zeros((), device=self._run.device)]) / self._scale
        loss = sum_over_replicas([exact_sum(losses, LOSS_STEP)], self._parallel).sum()
        self._numbers("loss", {"loss": loss})
        flat = self._run.engine.flat
        owned, states = flat.owned_grads(), []
        for name in flat.ranges:
            index, part, start = flat.owned_part_of(name)
            values = owned[index][part]
            states.append(FlatState("gradient", name, values if self._scale == 1 else values / self._scale, start))
        self._states(states)

    def _after_update(self) -> None:
        optimizer = self._run.engine.optimizer
        numbers = {
            "gradient norm": optimizer.grad_norm,
            "skipped": optimizer.found_inf,
            "learning rate": self._rate,
            "steps of the optimizer": optimizer.state_dict()["adam_steps"],
        }
        self._numbers("scalar", numbers)
        self._parameters()
        self._states(optimizer.tensors())

    def _parameters(self) -> None:
        """Take the weights that the model computes with."""
        self._run.engine.gatherer.wait()
        named = self._model.named_parameters()
        self._states(FlatState("model", name, parameter.detach().view(-1)) for name, parameter in named)

    def _states(self, states: Iterable[FlatState]) -> None:
        """Take what this rank has of parameters, their gradients and the optimizer's state."""
        p, of_rank = self._parallel.tensor_model_parallel_size, self._parallel.tensor_model_parallel_rank
        places = {name: place for place, name in enumerate(self._specs)}
        for state in states:
            if state.kind == "master" and self._run.prepared.dtype == torch.float32:
                continue  # it is the parameter
            place, is_split = places[state.name], self._specs[state.name].dim is not None
            key = {
                "model": Key(self._step, "parameter", place, state.name),
                "gradient": Key(
                    self._step, "gradient", -place, f"gradient of {state.name}"
                ),  # the last one comes first
                "master": Key(self._step, "master", place, f"master of {state.name}"),
            }.get(state.kind, Key(self._step, "moment", place, f"{state.kind} of {state.name}"))
            is_shard = self._run.engine.flat.is_sharded and state.kind != "model"
            is_copy = state.name == TIED and not self._model.has_embeddings
            writes = not is_copy and (is_shard or self._parallel.data_parallel_rank == 0) and (is_split or of_rank == 0)
            pieces = state_pieces([state], self._specs, mp_rank=of_rank if is_split else 0, mp_size=p)
            for piece in pieces.values():
                if piece.tensor.numel():
                    box = Box(piece.offset, tuple(piece.tensor.shape))
                    self._take(Part(key, piece.tensor, box, piece.global_shape, writes))
