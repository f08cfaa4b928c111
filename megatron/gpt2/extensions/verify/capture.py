"""Hooks that take the tensors of a training step out of a run, as parts of global tensors. Nothing is sent: each rank
says where its part lies.

Legend: b samples of a micro-batch, s sequence, w width, p model-parallel size.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from data_utils.samplers import first_samples
from megatron.gpt2.checkpoint.state import state_pieces
from megatron.gpt2.dist.gathering import sum_losses, sum_over_replicas
from megatron.gpt2.extensions.verify.trace import Key, Part, rows_part
from megatron.gpt2.hooks import Hook
from megatron.gpt2.model.gpt2 import TIED, parameter_specs
from megatron.gpt2.optimizer.flat_parameters import FlatState
from megatron.gpt2.optimizer.optimizer import MOMENTS
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


class Capture(Hook):
    """Takes the parts of each step of `run` and gives them to `take`, while the step runs.

    A layer that is compiled is one operation: only its output is taken. What backward computes again is not taken
    twice.
    """

    def __init__(self, run: Run, take: Callable[[Part], None]) -> None:
        self._run, self._take, self._model = run, take, run.engine.model
        self._p, self._rank = run.parallel.tensor_model_parallel_size, run.parallel.tensor_model_parallel_rank
        self._specs = parameter_specs(run.config.model, self._p)
        self._step = self._first_sample = 0
        self._begun: Counter[int] = Counter()  # micro-batches of this step, by the first layer of their chunk
        self._is_forward = False

    def steps(self, count: int) -> None:
        """`count` training steps, all of whose tensors are taken; before them the weights."""
        run, optimizer = dataclasses.replace(self._run, hooks=[self]), self._run.engine.optimizer
        handles = self._watch()
        self._parameters()
        for self._step in range(1, count + 1):
            self._begun.clear()
            self._losses: list[Tensor] = []
            self._scale, self._rate = float(optimizer.scaler.scale), float(optimizer.learning_rate)
            run.progress.loss_sum.zero_()
            train_step(run)
            run.progress.step(run.samples_of_step)
            self._after_update()
        for handle in handles:
            handle.remove()

    def _watch(self) -> list[Any]:
        model, body = self._model, self._model.transformer
        handles = [
            model.register_forward_pre_hook(self._begin, with_kwargs=True),
            model.register_forward_hook(self._end),
            watch(self._see, body, "embeddings", 0, its_input=True),
        ]
        for number, layer in enumerate(body.layers):
            if layer is not None and model.is_compiled:  # its own hooks would be compiled as well
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
        run, chunk = self._run, kwargs.get("chunk")
        self._first_layer = 0 if chunk is None else chunk.start
        places = first_samples(
            run.samples_of_step,
            run.config.train.micro_batch_size,
            run.parallel.data_parallel_rank,
            run.parallel.data_parallel_size,
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
            take = functools.partial(self._samples, "activation gradient", f"gradient of {name}", -place)
            x.register_hook(lambda grad: take(self._unscaled(grad).transpose(0, 1), first, cut))

    def _unscaled(self, grad: Tensor) -> Tensor:
        return grad if self._scale == 1 else grad.float() / self._scale

    def _samples(self, kind: str, name: str, place: int, x: Tensor, first: int, cut: int | None = None) -> None:
        """Take x, [b, s, w] or [b, ...], of the samples from `first` on. cut: the dimension of which each
        tensor-parallel rank has its own part."""
        offset, whole = [first] + [0] * (x.dim() - 1), [self._run.samples_of_step, *x.shape[1:]]
        if cut is not None:
            offset[cut], whole[cut] = self._rank * x.shape[cut], self._p * x.shape[cut]
        key, writes = Key(self._step, kind, place, name), cut is not None or self._rank == 0
        self._take(Part(key, x, Box(tuple(offset), tuple(x.shape)), tuple(whole), writes))

    def _number(self, kind: str, name: str, place: int, value: Tensor | float) -> None:
        number = torch.as_tensor(value, dtype=torch.float32).detach().clone().view(1)
        self._take(rows_part(Key(self._step, kind, place, name), number, writes=self._run.parallel.rank == 0))

    def before_update(self, run: Run) -> None:
        """Take the loss and the gradients, which are summed and not yet clipped."""
        losses = torch.stack(self._losses or [torch.zeros((), device=self._run.device)]) / self._scale
        loss = sum_over_replicas([sum_losses(losses)], self._run.parallel)
        self._number("loss", "loss", 0, loss)
        flat = self._run.engine.flat
        owned = flat.owned_grads()
        for name in flat.ranges:
            index, part, start = flat.owned_part_of(name)
            self._state(FlatState("gradient", name, self._unscaled(owned[index][part]), start))

    def _after_update(self) -> None:
        optimizer = self._run.engine.optimizer
        self._number("scalar", "gradient norm", 0, optimizer.grad_norm)
        self._number("scalar", "skipped", 1, optimizer.found_inf)
        self._number("scalar", "learning rate", 2, self._rate)
        self._number("scalar", "steps of the optimizer", 3, optimizer.state_dict()["adam_steps"])
        self._parameters()
        for state in optimizer.tensors():
            if state.kind != "master" or self._run.prepared.dtype != torch.float32:  # else it is the parameter
                self._state(state)

    def _parameters(self) -> None:
        """Take the weights that the model computes with."""
        self._run.engine.gatherer.wait()
        for name, parameter in self._model.named_parameters():
            self._state(FlatState("parameter", name, parameter.detach().view(-1)))

    def _state(self, state: FlatState) -> None:
        """Take what this rank has of a parameter, its gradient, master or moment."""
        kind, name, place = state.kind, state.name, list(self._specs).index(state.name)
        key = Key(self._step, "moment" if kind in MOMENTS else kind, place, f"{kind} of {name}")
        if kind == "parameter":
            key = key._replace(name=name)
        if kind == "gradient":
            key = key._replace(place=-place)  # backward makes the last one first
        is_shard = self._run.engine.flat.is_sharded and kind != "parameter"
        is_copy = name == TIED and not self._model.has_embeddings
        rank = self._rank if self._specs[name].dim is not None else 0  # replicated: each rank has what rank 0 has
        writes = rank == self._rank and not is_copy and (is_shard or self._run.parallel.data_parallel_rank == 0)
        for piece in state_pieces([state], self._specs, mp_rank=rank, mp_size=self._p).values():
            if piece.tensor.numel():
                box = Box(piece.offset, tuple(piece.tensor.shape))
                self._take(Part(key, piece.tensor, box, piece.global_shape, writes))
