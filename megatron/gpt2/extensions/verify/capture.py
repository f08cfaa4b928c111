"""Hooks that take the tensors of a training step out of a run, as parts of global tensors. Nothing is sent: each rank
says where its part lies.

Legend: b samples of a micro-batch, s sequence, w width, n heads, d head size, v vocabulary, p model-parallel size.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data_utils.samplers import first_samples
from megatron.gpt2.checkpoint.state import state_pieces
from megatron.gpt2.config import require
from megatron.gpt2.dist.gathering import sum_losses, sum_over_replicas
from megatron.gpt2.extensions.verify.trace import Key, Part
from megatron.gpt2.formats.openai import openai_name, to_openai
from megatron.gpt2.hooks import Hook
from megatron.gpt2.model.gpt2 import TIED, parameter_specs
from megatron.gpt2.optimizer.flat_parameters import FlatState
from megatron.gpt2.optimizer.optimizer import MOMENTS
from megatron.gpt2.train.run import Run
from megatron.gpt2.train.train_step import train_step


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


def first_place(layer: int) -> int:
    """The place of a layer's first tensor among those of a forward pass; the embeddings are 0."""
    return 1 + layer * len(POINTS)


class Capture(Hook):
    """Takes the parts of each step of `run` and gives them to `take`, while the step runs.

    A layer that is compiled is one operation: only its output is taken. What backward computes again is not taken
    twice.
    """

    def __init__(self, run: Run, take: Callable[[Part], None]) -> None:
        self._run, self._take, self._model = run, take, run.engine.model
        self._p, self._rank = run.parallel.tensor_model_parallel_size, run.parallel.tensor_model_parallel_rank
        self._specs = parameter_specs(run.config.model, self._p)
        self._step = self._first_layer = self._first_sample = 0
        self._scale = 1.0
        self._begun: Counter[int] = Counter()  # micro-batches of this step, by the first layer of their chunk
        self._losses: list[Tensor] = []
        self._is_forward = False

    def steps(self, count: int) -> None:
        """Take the weights, and then `count` training steps."""
        run, optimizer = dataclasses.replace(self._run, hooks=[self]), self._run.engine.optimizer
        self._model.register_forward_pre_hook(self._begin, with_kwargs=True)
        self._model.register_forward_hook(self._end)
        self._watch_model()
        self._parameters()
        for self._step in range(1, count + 1):
            self._begun.clear()
            self._losses.clear()
            self._scale, rate = float(optimizer.scaler.scale), float(optimizer.learning_rate)
            run.progress.loss_sum.zero_()
            train_step(run)
            run.progress.step(run.samples_of_step)
            self._number("scalar", "gradient norm", 0, optimizer.grad_norm)
            self._number("scalar", "skipped", 1, optimizer.found_inf)
            self._number("scalar", "learning rate", 2, rate)
            self._number("scalar", "steps of the optimizer", 3, optimizer.state_dict()["adam_steps"])
            self._parameters()
            for state in optimizer.tensors():
                if state.kind != "master" or run.prepared.dtype != torch.float32:  # otherwise it is the parameter
                    self._state(state)

    def _watch_model(self) -> None:
        model, body = self._model, self._model.transformer
        body.register_forward_pre_hook(lambda module, args: self._see("embeddings", 0, args[0]))
        for number, layer in enumerate(body.layers):
            if layer is not None and model.is_compiled:  # its own hooks would be compiled as well
                layer._compiled_call_impl = self._seen(layer._compiled_call_impl, number)
            elif layer is not None:
                self._watch_layer(layer, number)
        if model.has_head:
            self._watch("transformer.final_layernorm", first_place(len(body.layers)), body.final_layernorm)

    def _watch(self, name: str, place: int, module: nn.Module, point: Point = WHOLE) -> None:
        if point.made_by:
            module.register_forward_pre_hook(lambda module, args: self._see(name, place, args[0], point))
        else:
            module.register_forward_hook(lambda module, args, out: self._see(name, place, out, point))

    def _watch_layer(self, layer: nn.Module, number: int, name_of: Callable[[str], str] = str) -> None:
        for place, point in enumerate(POINTS, first_place(number)):
            part = point.made_by or point.module
            name = f"transformer.layers.{number}" + (f".{part}" if part else "")
            module = layer.get_submodule(name_of(point.module))
            self._watch(name, place, module, point)

    def _seen(self, compiled: Any, number: int) -> Callable[..., Tensor]:
        def call(*args: Any, **kwargs: Any) -> Tensor:
            out: Tensor = compiled(*args, **kwargs)
            self._see(f"transformer.layers.{number}", first_place(number + 1) - 1, out)
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

    def _see(self, name: str, place: int, x: Tensor | Sequence[Tensor], point: Point = WHOLE) -> None:
        """Take x, [s, b, w] or a part of it; if it is complete also its gradient, once backward has it."""
        if not self._is_forward or (name == "embeddings" and self._first_layer > 0):
            return
        x = x if isinstance(x, Tensor) else torch.cat(list(x), dim=-1)  # the parts of an exact layer
        cut = 2 if point.split else 1 if self._model.sequence_parallel else None
        self._samples("activation", name, place, x.detach().transpose(0, 1), self._first_sample, cut)
        if point.gradient and x.requires_grad:
            take = functools.partial(self._samples, "activation gradient", f"gradient of {name}", -place)
            first = self._first_sample
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
        self._take(Part(key, x, tuple(offset), tuple(whole), writes))

    def _number(self, kind: str, name: str, place: int, value: Tensor | float) -> None:
        number = torch.as_tensor(value, dtype=torch.float32).detach().view(1)
        self._take(Part(Key(self._step, kind, place, name), number, (0,), (1,), self._run.parallel.rank == 0))

    def before_update(self, run: Run) -> None:
        """Take the loss and the gradients, which are summed and not yet clipped."""
        losses = torch.stack(self._losses or [torch.zeros((), device=self._run.device)]) / self._scale
        self._number("loss", "loss", 0, sum_over_replicas([sum_losses(losses)], self._run.parallel))
        flat = self._run.engine.flat
        for name in flat.ranges:
            start = flat.owned_part_of(name)[2]
            self._state(FlatState("gradient", name, self._unscaled(flat.owned_grad(name)), start))

    def _parameters(self) -> None:
        """Take the weights that the model computes with."""
        self._run.engine.gatherer.wait()
        for name, parameter in self._model.named_parameters():
            self._state(FlatState("parameter", name, parameter.detach().view(-1)))

    def _state(self, state: FlatState) -> None:
        """Take what this rank has of a parameter, its gradient, master or moment."""
        kind, name, place = state.kind, state.name, list(self._specs).index(state.name)
        key = Key(
            self._step,
            "moment" if kind in MOMENTS else kind,
            -place if kind == "gradient" else place,  # backward makes the last one first
            name if kind == "parameter" else f"{kind} of {name}",
        )
        is_shard = self._run.engine.flat.is_sharded and kind != "parameter"
        is_copy = name == TIED and not self._model.has_embeddings
        rank = self._rank if self._specs[name].dim is not None else 0  # replicated: each rank has what rank 0 has
        writes = rank == self._rank and not is_copy and (is_shard or self._run.parallel.data_parallel_rank == 0)
        for piece in state_pieces([state], self._specs, mp_rank=rank, mp_size=self._p).values():
            if piece.tensor.numel():
                self._take(Part(key, piece.tensor, piece.offset, piece.global_shape, writes))


class TransformersCapture(Capture):
    """Takes the steps of `run`, which has one rank, with the forward pass and the gradients of transformers' GPT-2."""

    def _watch_model(self) -> None:
        """Let the model compute by transformers. ValueError if transformers is not installed, or if the run does what
        its GPT-2 does not do."""
        run, model, config = self._run, self._model, self._run.config.model
        try:
            from transformers import GPT2Config, GPT2LMHeadModel
        except ImportError as error:
            raise ValueError("--against huggingface needs transformers: pip install transformers") from error
        require(
            not config.has_dropout,
            "--against huggingface: transformers draws other masks: give --hidden-dropout 0 --attention-dropout 0",
        )
        for flag, given in (
            ("--reset-attention-mask", run.config.data.reset_attention_mask),
            ("--reset-position-ids", run.config.data.reset_position_ids),
        ):
            require(not given, f"--against huggingface: transformers' GPT-2 has no {flag}: leave it out")
        theirs = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=model.vocab_size,
                n_positions=config.max_position_embeddings,
                n_embd=config.hidden_size,
                n_layer=config.num_layers,
                n_head=config.num_attention_heads,
                n_inner=config.ffn_hidden_size,
                activation_function={"tanh": "gelu_new", "erf": "gelu"}[config.gelu],
                layer_norm_epsilon=config.layernorm_epsilon,
                bos_token_id=None,
                eos_token_id=None,
            )
        ).to(run.device, run.prepared.dtype)
        theirs.eval()

        def weight(name: str, parameter: Tensor) -> Tensor:
            return to_openai(self._specs[name].true_part(parameter, 0, 1), name, config.num_attention_heads)

        def forward(tokens: Tensor, labels: Tensor, token_weight: Tensor, **others: Any) -> Tensor:
            """As `GPT2Model.forward`. The gradients come to the model's own parameters."""
            weights = {f"transformer.{openai_name(name)}": weight(name, p) for name, p in model.named_parameters()}
            logits = torch.func.functional_call(theirs, weights, (tokens,)).logits.float()  # [b, s, v]
            losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
            return (losses * token_weight.flatten()).sum()

        model.forward = forward  # type: ignore[method-assign, assignment]
        body = theirs.transformer
        self._watch("embeddings", 0, body.drop)
        for number, layer in enumerate(body.h):
            self._watch_layer(layer, number, openai_name)
        self._watch("transformer.final_layernorm", first_place(len(body.h)), body.ln_f)

    def _see(self, name: str, place: int, x: Any, point: Point = WHOLE) -> None:
        x = x[0] if isinstance(x, tuple) else x  # a layer of older versions returns a tuple
        if name.endswith(".query_key_value"):  # [b, s, 3 n d] -> [b, s, n 3 d]
            x = x.unflatten(-1, (3, self._run.config.model.num_attention_heads, -1)).transpose(-3, -2).flatten(-3)
        super()._see(name, place, x.transpose(0, 1), point)
