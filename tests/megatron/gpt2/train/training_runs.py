"""Small training runs for tests: a text, flags, and steps that return what every rank saw."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import mpu
from megatron.gpt2 import device as devices
from megatron.gpt2.config import ModelConfig
from megatron.gpt2.config.arguments import parse
from megatron.gpt2.dist.gathering import sum_over_replicas
from megatron.gpt2.dist.ranks import Ranks
from megatron.gpt2.train.run import Run, build_run
from megatron.gpt2.train.setup import Log, PreparedRun, prepare_run
from megatron.gpt2.train.train_step import train_step

SMALL = (
    "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --max-position-embeddings 32 "
    "--seq-length 32 --tokenizer-type bytes --split 90,10 --device cpu --precision fp32 --train-iters "
    "1000 --eval-iters 0 --lr 1.5e-4 --lr-decay-style constant --warmup 0 --attention-dropout 0 "
    "--hidden-dropout 0 --make-vocab-size-divisible-by 8"
).split()

# A model of that size without a run around it.
SHAPE = ModelConfig(
    num_layers=2,
    hidden_size=128,
    num_attention_heads=4,
    max_position_embeddings=32,
    vocab_size=97,
    attention_dropout=0.0,
    hidden_dropout=0.0,
    make_vocab_size_divisible_by=8,
)


def write_text(folder: Path, words: int = 6000) -> Path:
    """A text with something to learn: words of a small vocabulary, some of which follow each other."""
    draw = random.Random(0)
    vocabulary = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 8))) for _ in range(60)]
    text, word = [], 0
    for _ in range(words):
        word = draw.randrange(60) if draw.random() < 0.3 else (7 * word + 3) % 60
        text.append(vocabulary[word])
    path = folder / "text.txt"
    path.write_text(" ".join(text))
    return path


def prepared(folder: str | Path, flags: str | Sequence[str], ranks: Ranks, log: Log = lambda line: None) -> PreparedRun:
    """What a rank decides by itself of a run in `folder` (text.txt lies there), as the command line would make it."""
    words = flags.split() if isinstance(flags, str) else flags
    where = ["--train-data", f"{folder}/text.txt", "--data-cache-path", f"{folder}/cache", "--save", f"{folder}/save"]
    return prepare_run(parse([*SMALL, *where, *words]), ranks, log)


def start(rank: int, world_size: int, folder: str | Path, flags: str | Sequence[str]) -> Run:
    """A run in `folder`, as the command line would make it."""
    with mock.patch.object(devices, "_measured_gemm", return_value=1e12):  # which takes 0.3 s
        run = build_run(prepared(folder, flags, Ranks(rank, world_size, rank, world_size)), lambda line: None)
    run.engine.model.train()
    return run


def steps(run: Run, count: int) -> dict[str, Any]:
    """`count` steps: loss, gradient norm, loss scale and skips of each."""
    seen: dict[str, Any] = {"loss": [], "norm": [], "scale": [], "skipped": [], "rate": []}
    for _ in range(count):
        run.progress.loss_sum.zero_()
        seen["scale"].append(run.engine.optimizer.scaler.scale.item())
        seen["rate"].append(run.engine.optimizer.learning_rate.item())
        train_step(run)
        run.progress.step(run.samples_of_step)
        seen["loss"].append(sum_over_replicas([run.progress.loss_sum], run.parallel).item())
        seen["norm"].append(run.engine.optimizer.grad_norm.item())
        seen["skipped"].append(bool(run.engine.optimizer.found_inf))
    return seen


def finish(run: Run) -> None:
    run.engine.gatherer.wait()
    run.close()


def state(run: Run) -> dict[str, Tensor]:
    """This rank's weights and what it owns of the optimizer's state, copied."""
    run.engine.gatherer.wait()
    tensors = {name: p.detach().clone() for name, p in run.engine.model.named_parameters()}
    return tensors | {f"{s.kind}.{s.name}": s.values.clone() for s in run.engine.optimizer.tensors()}


def whole_weights(run: Run) -> dict[str, Tensor]:
    """The true weights of the model, or of this rank's stage of it, merged over its tensor-parallel group."""
    run.engine.gatherer.wait()
    specs, parallel, whole = mpu.partition_specs(run.engine.model), run.parallel, {}
    for name, parameter in run.engine.model.named_parameters():
        tensor = parameter.detach().contiguous()
        shards = [torch.empty_like(tensor) for _ in range(parallel.tensor_model_parallel_size)]
        if len(shards) > 1:
            torch.distributed.all_gather(shards, tensor, group=parallel.tensor_model_parallel_group)
        else:
            shards = [tensor.clone()]
        whole[name] = specs[name].merge(shards)
    return whole
