"""Small training runs for tests: a text, flags, and functions that start, train and finish a run."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import mpu
from data_utils.command_line import Log
from megatron.gpt2 import device as devices
from megatron.gpt2.config.arguments import parse
from megatron.gpt2.dist.gathering import all_reduce_over_data_and_pipeline
from megatron.gpt2.dist.ranks import RankInfo
from megatron.gpt2.model.gpt2 import GPT2Model
from megatron.gpt2.train.setup import RunContext, build_context
from megatron.gpt2.train.train_step import train_step
from megatron.gpt2.train.trainer import Trainer, build_trainer

SMALL = (
    "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --max-position-embeddings 32 "
    "--seq-length 32 --tokenizer-type bytes --split 90,10 --device cpu --precision fp32 --train-iters "
    "1000 --eval-iters 0 --lr 1.5e-4 --lr-decay-style constant --warmup 0 --attention-dropout 0 "
    "--hidden-dropout 0 --make-vocab-size-divisible-by 8"
).split()

# The model of the flags in SMALL, for tests without a training run
SHAPE = replace(parse(SMALL).config.model, vocab_size=97)
TOKENS = torch.arange(4 * 32).view(4, 32) % 97


def loss_and_gradients(model: GPT2Model, device: str = "cpu", **inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the mean loss of TOKENS and the gradients by name.

    inputs: more arguments of the model.
    """
    tokens = TOKENS.to(device)
    loss = model(tokens, tokens, torch.full((4, 32), 1 / 128, device=device), **inputs)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def write_text(folder: Path, words: int = 6000) -> Path:
    """Write a text that a model can learn from: words of a small vocabulary, in partly predictable order."""
    draw = random.Random(0)
    vocabulary = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 8))) for _ in range(60)]
    text, word = [], 0
    for _ in range(words):
        word = draw.randrange(60) if draw.random() < 0.3 else (7 * word + 3) % 60
        text.append(vocabulary[word])
    path = folder / "text.txt"
    path.write_text(" ".join(text))
    return path


def make_context(
    folder: str | Path, flags: str | Sequence[str], rank_info: RankInfo, log: Log = lambda line: None
) -> RunContext:
    """Return the context of a run with `flags` in `folder`, which contains text.txt."""
    words = flags.split() if isinstance(flags, str) else flags
    where = ["--train-data", f"{folder}/text.txt", "--data-cache-path", f"{folder}/cache", "--save", f"{folder}/save"]
    return build_context(parse([*SMALL, *where, *words]), rank_info, log)


def start(rank: int, world_size: int, folder: str | Path, flags: str | Sequence[str]) -> Trainer:
    """Build the trainer of a run with `flags` in `folder`."""
    with mock.patch.object(devices, "_measure_gemm_flops", return_value=1e12):  # The measurement would take 0.3 s.
        trainer = build_trainer(
            make_context(folder, flags, RankInfo(rank, world_size, rank, world_size)), lambda line: None
        )
    trainer.state.model.train()
    return trainer


def steps(trainer: Trainer, count: int) -> dict[str, Any]:
    """Train `count` steps. Return loss, gradient norm, loss scale and learning rate of each step, and whether the step
    was skipped."""
    seen: dict[str, Any] = {"loss": [], "norm": [], "scale": [], "skipped": [], "rate": []}
    for _ in range(count):
        trainer.progress.loss_sum.zero_()
        seen["scale"].append(trainer.state.optimizer.scaler.scale.item())
        seen["rate"].append(trainer.state.optimizer.learning_rate.item())
        train_step(trainer)
        trainer.progress.count_step(trainer.current_global_batch_size)
        seen["loss"].append(all_reduce_over_data_and_pipeline([trainer.progress.loss_sum], trainer.parallel).item())
        seen["norm"].append(trainer.state.optimizer.grad_norm.item())
        seen["skipped"].append(bool(trainer.state.optimizer.found_inf))
    return seen


def finish(trainer: Trainer) -> None:
    trainer.state.param_gather.finish_param_sync()
    trainer.close()


def snapshot(trainer: Trainer) -> dict[str, Tensor]:
    """Return copies of the rank's weights and of its shard of the optimizer's state."""
    trainer.state.param_gather.finish_param_sync()
    tensors = {name: p.detach().clone() for name, p in trainer.state.model.named_parameters()}
    return tensors | {f"{s.kind}.{s.name}": s.values.clone() for s in trainer.state.optimizer.state_shards()}


def whole_weights(trainer: Trainer) -> dict[str, Tensor]:
    """Return the weights of the model, or of a pipeline stage, merged over the tensor-parallel group."""
    trainer.state.param_gather.finish_param_sync()
    specs, parallel, whole = mpu.partition_specs(trainer.state.model), trainer.parallel, {}
    for name, parameter in trainer.state.model.named_parameters():
        tensor = parameter.detach().contiguous()
        shards = [torch.empty_like(tensor) for _ in range(parallel.tensor_model_parallel_size)]
        if len(shards) > 1:
            torch.distributed.all_gather(shards, tensor, group=parallel.tensor_model_parallel_group)
        else:
            shards = [tensor.clone()]
        whole[name] = specs[name].merge(shards)
    return whole
