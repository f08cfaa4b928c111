"""A step of a run by transformers' GPT-2 with the same weights and samples, recorded as a trace: forward activations,
the loss and the gradients.

Legend: b samples, s sequence, w width, n heads, d head size, v vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mpu
from megatron.gpt2.config import require
from megatron.gpt2.dist.ranks import Ranks
from megatron.gpt2.extensions.verify.capture import INPUTS, WITH_GRADIENT
from megatron.gpt2.extensions.verify.parts import Key, Part
from megatron.gpt2.extensions.verify.runs import FACTS, Task, built, facts
from megatron.gpt2.extensions.verify.trace import TraceWriter
from megatron.gpt2.formats.foreign import ForeignSource, LazyTensor, head_major
from megatron.gpt2.formats.openai_names import LAYER_MODULES, is_linear, openai_name
from megatron.gpt2.formats.write_huggingface import write_huggingface
from megatron.gpt2.train.prepare import Log
from megatron.gpt2.train.run import Run
from megatron.gpt2.train.train_step import tokens_in_global_batch
from mpu.partition import Box


def record_huggingface(task: Task, argv: Sequence[str], ranks: Ranks, log: Log) -> int:
    """Record the first step of the command line `argv` of one rank, by transformers, as the trace of `task`. Returns
    the exit code. ValueError for a run that transformers cannot compute."""
    run = built(argv, ranks, task, log)
    try:
        model = huggingface_model(run, Path(task.out))
        writer = TraceWriter(Path(task.trace), 0)
        _Step(run, model, writer).record()
        writer.finish()
        Path(task.out, FACTS).write_text(json.dumps(facts(run, 1)), encoding="utf-8")
    finally:
        run.close()
    return 0


def huggingface_model(run: Run, folder: Path) -> nn.Module:
    """transformers' model with the weights of `run`, which lie in `folder` meanwhile. ValueError where transformers is
    not there, or where the run does what its GPT-2 does not."""
    config = run.config
    try:
        from transformers import GPT2LMHeadModel
        from transformers.utils import logging
    except ImportError as error:
        raise ValueError("--against huggingface needs transformers: pip install transformers") from error
    require(
        config.model.hidden_dropout == config.model.attention_dropout == 0,
        "--against huggingface: transformers draws other masks: give --hidden-dropout 0 --attention-dropout 0",
    )
    for flag, given in (
        ("--reset-attention-mask", config.data.reset_attention_mask),
        ("--reset-position-ids", config.data.reset_position_ids),
    ):
        require(not given, f"--against huggingface: transformers' GPT-2 has no {flag}: leave it out")
    logging.disable_progress_bar()  # type: ignore[no-untyped-call, unused-ignore]
    specs = mpu.partition_specs(run.engine.model)
    lazy = {
        f"model.{name}": LazyTensor.of(specs[name].true_part(parameter.detach().cpu(), 0, 1))
        for name, parameter in run.engine.model.named_parameters()
    }
    source = ForeignSource(folder, "run", 0, config.model, {"config": json.loads(json.dumps(config.as_dict()))}, lazy)
    write_huggingface(source, folder / "huggingface", log=lambda line: None)
    model: nn.Module = GPT2LMHeadModel.from_pretrained(folder / "huggingface", dtype=run.prepared.dtype)
    return model.to(run.device).eval()


class _Step:
    """The first step of `run` by `model`, sample by sample; its tensors go to `take` as parts."""

    def __init__(self, run: Run, model: Any, take: Callable[[Part], None]) -> None:
        self._run, self._model, self._take = run, model, take
        self._heads = run.config.model.num_attention_heads
        self._first = self._place = 0
        body = model.transformer
        self._on_output(body.drop, "embeddings", gradient=True)
        for number, layer in enumerate(body.h):
            name = f"transformer.layers.{number}"
            for ours, theirs in LAYER_MODULES.items():
                module = layer.get_submodule(theirs)
                if ours in INPUTS:
                    module.register_forward_pre_hook(
                        lambda module, args, name=f"{name}.{INPUTS[ours]}": self._activation(name, args[0])
                    )
                self._on_output(module, f"{name}.{ours}", gradient=ours in WITH_GRADIENT)
            self._on_output(layer, name, gradient=True)
        self._on_output(body.ln_f, "transformer.final_layernorm", gradient=True)

    def record(self) -> None:
        """Run forward and backward of each sample, and take everything."""
        run = self._run
        batch = run.data.to_device(*next(run.data.loader))
        weight = batch.mask / tokens_in_global_batch(run, batch)
        total = torch.zeros((), dtype=torch.float64)
        for number in range(len(batch.tokens)):
            self._first, self._place = number, 0
            for place, (name, ids) in enumerate((("tokens", batch.tokens), ("labels", batch.labels))):
                self._put("input", name, place, ids[number : number + 1])
            logits = self._model(batch.tokens[number : number + 1]).logits[0].float()  # [1, s, v] -> [s, v]
            loss = (F.cross_entropy(logits, batch.labels[number], reduction="none") * weight[number]).sum()
            loss.backward()
            total += loss.detach().double().cpu()
        self._whole("loss", "loss", 0, total.float().view(1))
        squares = torch.zeros((), dtype=torch.float64)
        for place, (name, grad) in enumerate(self._gradients()):
            squares += torch.linalg.vector_norm(grad, dtype=torch.float64).cpu() ** 2
            self._whole("gradient", f"gradient of {name}", -place, grad)
        self._whole("scalar", "gradient norm", 0, squares.sqrt().float().view(1))

    def _gradients(self) -> list[tuple[str, Tensor]]:
        """By our names and in our order of rows, float32."""
        theirs = dict(self._model.transformer.named_parameters())
        found = []
        for name, _ in self._run.engine.model.named_parameters():
            grad = theirs[openai_name(name)].grad.float()
            grad = grad.t() if is_linear(name) else grad
            found.append((name, head_major(self._heads)(grad) if ".query_key_value." in name else grad))
        return found

    def _on_output(self, module: nn.Module, name: str, *, gradient: bool) -> None:
        # A layer of older versions returns a tuple.
        module.register_forward_hook(
            lambda module, args, out: self._activation(
                name, out[0] if isinstance(out, tuple) else out, gradient=gradient
            )
        )

    def _activation(self, name: str, x: Tensor, *, gradient: bool = False) -> None:
        self._place += 1
        place = self._place
        if name.endswith(".query_key_value"):  # [b, s, 3 n d] -> [b, s, n 3 d]
            x = x.unflatten(-1, (3, self._heads, -1)).transpose(-3, -2).flatten(-3)
        self._put("activation", name, place, x.detach())
        if gradient:
            x.register_hook(lambda grad: self._put("activation gradient", f"gradient of {name}", -place, grad))

    def _put(self, kind: str, name: str, place: int, x: Tensor) -> None:
        """Take x, [1, s, ...], of the present sample."""
        self._take(
            Part(
                Key(1, kind, place, name),
                x,
                Box((self._first, *(0,) * (x.dim() - 1)), tuple(x.shape)),
                (self._run.prepared.global_batch_size, *x.shape[1:]),
            )
        )

    def _whole(self, kind: str, name: str, place: int, x: Tensor) -> None:
        self._take(Part(Key(1, kind, place, name), x, Box((0,) * x.dim(), tuple(x.shape)), tuple(x.shape)))
