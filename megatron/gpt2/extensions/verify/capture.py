"""Hooks that take the tensors of a training step out of a run, as parts of global tensors. Nothing is sent: each rank
says where its part lies.

Legend: b samples of a micro-batch, s sequence, w width, p model-parallel size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from data_utils.samplers import first_samples
from megatron.gpt2.checkpoint.state import state_pieces
from megatron.gpt2.extensions.verify.parts import Key, Part
from megatron.gpt2.model.gpt2 import TIED
from megatron.gpt2.model.parameters import parameter_specs
from megatron.gpt2.optimizer.flat_state import FlatState
from megatron.gpt2.optimizer.optimizer import MOMENTS
from megatron.gpt2.train.collectives import LOSS_STEP, exact_sum, sum_over_replicas
from megatron.gpt2.train.run import Run
from megatron.gpt2.train.train_step import train_step
from mpu.partition import Box

# Of a layer, its modules whose output is captured. True: of each rank's own part of the width, over all of the
# sequence.
OUTPUTS = {
    "input_layernorm": False,
    "attention.query_key_value": True,
    "attention.dense": False,
    "post_attention_layernorm": False,
    "mlp.dense_h_to_4h": True,
    "mlp.dense_4h_to_h": False,
}
# What these modules are given: the output of a function between two modules, split by the width.
INPUTS = {"attention.dense": "attention.core", "mlp.dense_4h_to_h": "mlp.gelu"}
PER_LAYER = len(OUTPUTS) + len(INPUTS) + 1  # with its own output
# Whose gradient is complete on each rank.
WITH_GRADIENT = ("input_layernorm", "post_attention_layernorm")


class Capture:
    """Takes the parts of each step of `run` and gives them to `take`, while the step runs.

    A layer that is compiled is one operation: only its output is taken. What backward computes again is not taken
    twice.
    """

    def __init__(self, run: Run, take: Callable[[Part], None]) -> None:
        self._run, self._take = run, take
        self._parallel, self._model = run.parallel, run.engine.model
        self._specs = parameter_specs(run.config.model, run.parallel.tensor_model_parallel_size)
        self._size = run.config.train.micro_batch_size
        self._step = self._micro_batch = self._place = self._first_layer = 0
        self._begun: Counter[int] = Counter()  # micro-batches of this step, by the first layer of their chunk
        self._is_forward = False
        self._losses: list[Tensor] = []
        self._scale = 1.0
        self._updates = run.engine.optimizer.step
        run.engine.optimizer.step = self._optimizer_step  # type: ignore[method-assign]
        self._handles: list[Any] = []
        self._watch()
        self._parameters()  # of step 0

    def close(self) -> None:
        """Take nothing any more."""
        for handle in self._handles:
            handle.remove()
        del self._run.engine.optimizer.step  # the instance's; the class has its own

    def step(self) -> None:
        """A training step, all of whose tensors are taken."""
        run = self._run
        self._step += 1
        self._begun.clear()
        self._losses = []
        self._scale = float(run.engine.optimizer.scaler.scale)
        run.progress.loss_sum.zero_()
        train_step(run)
        run.progress.step(run.samples_of_step)
        run.engine.gatherer.wait()
        dtype, states = run.prepared.dtype, list(run.engine.optimizer.tensors())
        for moment in MOMENTS:
            self._states("moment", f"{moment} of ", (state for state in states if state.kind == moment))
        if dtype != torch.float32:  # else they are the parameters
            self._states("master", "master of ", (state for state in states if state.kind == "master"))
        self._parameters()

    def _parameters(self) -> None:
        """Take the weights that the model computes with."""
        self._run.engine.gatherer.wait()
        self._states(
            "parameter",
            "",
            (
                FlatState("model", name, parameter.detach().view(-1))
                for name, parameter in self._model.named_parameters()
            ),
            replicated=True,
        )

    def _watch(self) -> None:
        model = self._model
        self._handles += [
            model.register_forward_pre_hook(self._begin, with_kwargs=True),
            model.register_forward_hook(self._end),
        ]
        self._on_input(model.transformer, "embeddings", gradient=True)
        for number, layer in enumerate(model.transformer.layers):
            if layer is None:
                continue
            name = f"transformer.layers.{number}"
            if model.is_compiled:
                layer._compiled_call_impl = self._after(layer._compiled_call_impl, name)
                continue
            for part, split in OUTPUTS.items():
                module = layer.get_submodule(part)
                if part in INPUTS:
                    self._on_input(module, f"{name}.{INPUTS[part]}", split=True)
                self._on_output(module, f"{name}.{part}", split=split, gradient=part in WITH_GRADIENT)
            self._on_output(layer, name, gradient=True)
        if model.has_head:
            self._on_output(model.transformer.final_layernorm, "transformer.final_layernorm", gradient=True)

    def _on_input(self, module: nn.Module, name: str, *, split: bool = False, gradient: bool = False) -> None:
        self._handles.append(
            module.register_forward_pre_hook(
                lambda module, args: self._activation(name, args[0], split=split, gradient=gradient)
            )
        )

    def _on_output(self, module: nn.Module, name: str, *, split: bool = False, gradient: bool = False) -> None:
        self._handles.append(
            module.register_forward_hook(
                lambda module, args, out: self._activation(name, out, split=split, gradient=gradient)
            )
        )

    def _after(self, compiled: Any, name: str) -> Callable[..., Tensor]:
        def call(*args: Any, **kwargs: Any) -> Tensor:
            out: Tensor = compiled(*args, **kwargs)
            self._activation(name, out, gradient=True)
            return out

        return call

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        chunk = kwargs.get("chunk")
        self._first_layer = 0 if chunk is None else chunk.start
        self._micro_batch = self._begun[self._first_layer]  # each chunk has them in their order
        self._begun[self._first_layer] += 1
        self._place, self._is_forward = self._first_layer * (1 if self._model.is_compiled else PER_LAYER), True
        if self._first_layer > 0:
            self._place += 1  # the embeddings'
            return
        for place, name in enumerate(("samples", "tokens", "labels")):
            if kwargs.get(name) is not None:
                self._samples("input", name, kwargs[name], self._first_sample(), place=place)

    def _end(self, module: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
        self._is_forward = False
        if out.dim() == 0:  # not the hidden states of a stage
            self._losses.append(out.detach())

    def _first_sample(self) -> int:
        """The place of this micro-batch's first sample in the global batch."""
        run, parallel = self._run, self._parallel
        places = first_samples(
            run.prepared.batch_schedule.size(run.progress.consumed_samples),
            self._size,
            parallel.data_parallel_rank,
            parallel.data_parallel_size,
            contiguous=bool(run.config.parallel.exact_layouts),
        )
        return int(places[self._micro_batch])

    def _activation(
        self, name: str, x: Tensor | Sequence[Tensor], *, split: bool = False, gradient: bool = False
    ) -> None:
        """Take x, [s, b, w] or a part of it; with `gradient` also its gradient, once backward has it."""
        if not self._is_forward or (name == "embeddings" and self._first_layer > 0):
            return
        if not isinstance(x, Tensor):  # the parts of an exact layer
            x = torch.cat(list(x), dim=-1)
        self._place += 1
        first, place, scale = self._first_sample(), self._place, self._scale
        self._hidden("activation", name, x.detach(), first, place, split)
        if gradient and x.requires_grad:

            def hook(grad: Tensor) -> None:
                unscaled = grad if scale == 1 else grad.float() / scale
                self._hidden("activation gradient", f"gradient of {name}", unscaled, first, -place, split)

            x.register_hook(hook)

    def _hidden(self, kind: str, name: str, x: Tensor, first: int, place: int, split: bool) -> None:
        parallel = self._parallel
        p, rank = parallel.tensor_model_parallel_size, parallel.tensor_model_parallel_rank
        of_sequence = self._model.sequence_parallel and not split
        x = x.transpose(0, 1)  # [s, b, w] -> [b, s, w]
        s, w = x.shape[1:]
        self._samples(
            kind,
            name,
            x,
            first,
            (rank * s * of_sequence, rank * w * split),
            place=place,
            whole=(s * (p if of_sequence else 1), w * (p if split else 1)),
            is_part=of_sequence or split,
        )

    def _samples(
        self,
        kind: str,
        name: str,
        x: Tensor,
        first: int,
        offset: tuple[int, ...] = (),
        *,
        place: int,
        whole: tuple[int, ...] = (),
        is_part: bool = False,
    ) -> None:
        """Take x, [b, ...], of the samples from `first` on. offset, whole: of its other dimensions, where it begins and
        how large it is over all ranks; without them it has all of them."""
        parallel = self._parallel
        whole, offset = whole or tuple(x.shape[1:]), offset or (0,) * (x.dim() - 1)
        self._take(
            Part(
                Key(self._step, kind, place, name),
                x,
                Box((first, *offset), tuple(x.shape)),
                (self._run.samples_of_step, *whole),
                writes=is_part or parallel.tensor_model_parallel_rank == 0,
                share=parallel.data_parallel_size * (parallel.tensor_model_parallel_size if is_part else 1),
            )
        )

    def _scalar(self, kind: str, name: str, value: Tensor | float, place: int = 0) -> None:
        number = torch.as_tensor(value, dtype=torch.float32).detach().clone().view(1)
        self._take(
            Part(
                Key(self._step, kind, place, name),
                number,
                Box((0,), (1,)),
                (1,),
                writes=self._parallel.rank == 0,
                share=1,
            )
        )

    def _optimizer_step(self) -> None:
        """In the place of the optimizer's: gradients before it, norm and rate after it."""
        engine = self._run.engine
        flat, optimizer = engine.flat, engine.optimizer
        losses = torch.stack(self._losses or [torch.zeros((), device=self._run.device)]) / self._scale
        self._scalar("loss", "loss", sum_over_replicas([exact_sum(losses, LOSS_STEP)], self._parallel).sum())
        owned, states = flat.owned_grads(), []
        for name in flat.ranges:
            index, part, start = flat.owned_part_of(name)
            values = owned[index][part]
            states.append(FlatState("gradient", name, values if self._scale == 1 else values / self._scale, start))
        self._states("gradient", "gradient of ", states)
        del owned, states
        rate = optimizer.learning_rate.clone()
        self._updates()
        numbers: dict[str, Tensor | float] = {
            "gradient norm": optimizer.grad_norm,
            "skipped": optimizer.found_inf,
            "learning rate": rate,
            "steps of the optimizer": float(optimizer.state_dict()["adam_steps"]),
        }
        for place, (name, value) in enumerate(numbers.items()):
            self._scalar("scalar", name, value, place)

    def _states(self, kind: str, prefix: str, states: Iterable[FlatState], *, replicated: bool = False) -> None:
        """Take what this rank has of parameters or their state. replicated: each data-parallel rank has all of it."""
        parallel, flat = self._parallel, self._run.engine.flat
        places = {name: place for place, name in enumerate(self._specs)}
        alone = parallel.data_parallel_rank == 0 or (flat.is_sharded and not replicated)
        for state in states:
            spec = self._specs[state.name]
            rank = parallel.tensor_model_parallel_rank if spec.dim is not None else 0
            is_copy = state.name == TIED and not self._model.has_embeddings
            # Gradients are made from the last parameter to the first.
            place = places[state.name] * (-1 if kind == "gradient" else 1)
            pieces = state_pieces([state], self._specs, mp_rank=rank, mp_size=parallel.tensor_model_parallel_size)
            for piece in pieces.values():
                if piece.tensor.numel():
                    self._take(
                        Part(
                            Key(self._step, kind, place, prefix + state.name),
                            piece.tensor,
                            Box(piece.offset, tuple(piece.tensor.shape)),
                            piece.global_shape,
                            writes=alone
                            and not is_copy
                            and (spec.dim is not None or parallel.tensor_model_parallel_rank == 0),
                        )
                    )
