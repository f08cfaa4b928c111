"""A step of a run by transformers' GPT-2 with the same weights and samples: forward activations, the loss and the
gradients, as parts of a trace.

Legend: b samples, s sequence, w width, n heads, d head size, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import mpu
from megatron.gpt2.config import require
from megatron.gpt2.extensions.verify.capture import Point, first_place, watch, watch_layer
from megatron.gpt2.extensions.verify.trace import Key, Part, rows_part
from megatron.gpt2.formats.foreign import by_part, head_major
from megatron.gpt2.formats.openai_names import LAYER_MODULES, is_linear, openai_name
from megatron.gpt2.train.run import Run
from megatron.gpt2.train.train_step import tokens_in_global_batch


def huggingface_model(run: Run) -> Any:
    """transformers' model with the weights of `run`. ValueError where transformers is not there, or where the run does
    what its GPT-2 does not."""
    config, model = run.config, run.config.model
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError as error:
        raise ValueError("--against huggingface needs transformers: pip install transformers") from error
    require(
        model.hidden_dropout == model.attention_dropout == 0,
        "--against huggingface: transformers draws other masks: give --hidden-dropout 0 --attention-dropout 0",
    )
    for flag, given in (
        ("--reset-attention-mask", config.data.reset_attention_mask),
        ("--reset-position-ids", config.data.reset_position_ids),
    ):
        require(not given, f"--against huggingface: transformers' GPT-2 has no {flag}: leave it out")
    theirs = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=run.engine.model.vocab_size,
            n_positions=model.max_position_embeddings,
            n_embd=model.hidden_size,
            n_layer=model.num_layers,
            n_head=model.num_attention_heads,
            n_inner=model.ffn_hidden_size,
            activation_function={"tanh": "gelu_new", "erf": "gelu"}[model.gelu],
            layer_norm_epsilon=model.layernorm_epsilon,
        )
    )
    specs, weights = mpu.partition_specs(run.engine.model), dict(theirs.transformer.named_parameters())
    with torch.no_grad():
        for name, parameter in run.engine.model.named_parameters():
            x = specs[name].true_part(parameter, 0, 1)
            x = by_part(model.num_attention_heads)(x) if ".query_key_value." in name else x
            weights[openai_name(name)].copy_(x.t() if is_linear(name) else x)
    return theirs.to(run.device, run.prepared.dtype).eval()


class HuggingFaceStep:
    """The first step of `run`, which has one rank, by transformers, sample by sample; its tensors go to `take`."""

    def __init__(self, run: Run, take: Callable[[Part], None]) -> None:
        self._run, self._take, self._model = run, take, huggingface_model(run)
        self._heads = run.config.model.num_attention_heads
        body: Any = self._model.transformer
        watch(self._see, body.drop, "embeddings", 0)
        for number, layer in enumerate(body.h):
            watch_layer(self._see, layer, number, LAYER_MODULES)
        watch(self._see, body.ln_f, "transformer.final_layernorm", first_place(len(body.h)))

    def record(self) -> None:
        """Run forward and backward of each sample, and take everything."""
        run, weights = self._run, dict(self._model.transformer.named_parameters())
        batch = run.data.to_device(*next(run.data.loader))
        weight = batch.mask / tokens_in_global_batch(run, batch)
        total, squares = torch.zeros(2, dtype=torch.float64)
        for self._first in range(len(batch.tokens)):
            tokens, labels = (ids[self._first : self._first + 1] for ids in (batch.tokens, batch.labels))
            self._put("input", "tokens", 0, tokens)
            self._put("input", "labels", 1, labels)
            logits = self._model(tokens).logits[0].float()  # [1, s, v] -> [s, v]
            loss = (F.cross_entropy(logits, labels[0], reduction="none") * weight[self._first]).sum()
            loss.backward()
            total += loss.detach().double().cpu()
        for place, (name, _) in enumerate(run.engine.model.named_parameters()):
            grad = weights[openai_name(name)].grad.float()
            squares += torch.linalg.vector_norm(grad, dtype=torch.float64).cpu() ** 2
            grad = grad.t() if is_linear(name) else grad
            grad = head_major(self._heads)(grad) if ".query_key_value." in name else grad
            self._take(rows_part(Key(1, "gradient", -place, f"gradient of {name}"), grad))
        self._take(rows_part(Key(1, "loss", 0, "loss"), total.float().view(1)))
        self._take(rows_part(Key(1, "scalar", 0, "gradient norm"), squares.sqrt().float().view(1)))

    def _see(self, name: str, place: int, x: Any, point: Point) -> None:
        x = x[0] if isinstance(x, tuple) else x  # a layer of older versions returns a tuple
        if name.endswith(".query_key_value"):  # [b, s, 3 n d] -> [b, s, n 3 d]
            x = x.unflatten(-1, (3, self._heads, -1)).transpose(-3, -2).flatten(-3)
        self._put("activation", name, place, x.detach())
        if point.gradient:
            x.register_hook(lambda grad: self._put("activation gradient", f"gradient of {name}", -place, grad))

    def _put(self, kind: str, name: str, place: int, x: Tensor) -> None:
        """Take x, [1, s, ...], of the present sample."""
        samples = self._run.prepared.global_batch_size
        self._take(rows_part(Key(1, kind, place, name), x, first=self._first, rows=samples))
