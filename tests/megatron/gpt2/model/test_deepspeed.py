"""Test that gradients stay bit-identical, also with dropout, if DeepSpeed's activation checkpointing replaces mpu's.

`FakeDeepSpeedCheckpointing` handles random states and arguments like deepspeed.checkpointing (DeepSpeed 0.19,
runtime/activation_checkpointing/checkpointing.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import mpu
from megatron.gpt2.model.gpt2 import GPT2Model, build_block_config
from mpu.random import RNGStatesTracker
from tests.distributed import run_ranks
from tests.megatron.gpt2.train.training_runs import SHAPE as WITHOUT_DROPOUT
from tests.megatron.gpt2.train.training_runs import loss_and_gradients

SHAPE = replace(WITHOUT_DROPOUT, attention_dropout=0.1, hidden_dropout=0.1)


class FakeDeepSpeedCheckpointing:
    """A reentrant checkpoint. Forward runs without gradients. Backward runs forward again with gradients, from the same
    states of the default generator and of `tracker`.

    partition: each model-parallel rank saves only its shard of the argument, in place, and backward gathers the shards.
    A tensor with a true attribute `no_checkpointing` is saved whole.
    """

    def __init__(self, partition: bool) -> None:
        self.partition = partition
        self.tracker = RNGStatesTracker()

    def checkpoint(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        out: Tensor = _Reentrant.apply(self, function, x)
        return out

    def get_states(self) -> tuple[Tensor, dict[str, Tensor]]:
        return torch.get_rng_state(), self.tracker.get_states()

    def set_states(self, default: Tensor, tracker: dict[str, Tensor]) -> None:
        torch.set_rng_state(default)
        self.tracker.set_states(tracker)


class _Reentrant(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, owner: FakeDeepSpeedCheckpointing, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        ctx.owner, ctx.function, ctx.states, ctx.saved, ctx.shape = owner, function, owner.get_states(), x, x.shape
        ctx.is_shard = owner.partition and not getattr(x, "no_checkpointing", False)
        with torch.no_grad():
            out = function(x.clone())
        if ctx.is_shard:
            shards = x.detach().flatten().chunk(mpu.get_model_parallel_world_size())
            x.data = shards[mpu.get_model_parallel_rank()].clone()
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x = ctx.saved.detach()
        if ctx.is_shard:
            shards = [torch.empty_like(x) for _ in range(mpu.get_model_parallel_world_size())]
            dist.all_gather(shards, x, group=mpu.get_model_parallel_group())
            x = torch.cat(shards).view(ctx.shape)
        x.requires_grad_()
        now = ctx.owner.get_states()
        ctx.owner.set_states(*ctx.states)
        with torch.enable_grad():
            out = ctx.function(x)
        ctx.owner.set_states(*now)
        torch.autograd.backward(out, grad)
        return None, None, x.grad


def gradients(dtype: torch.dtype, recompute: str, sequence_parallel: bool) -> dict[str, Tensor]:
    mpu.model_parallel_cuda_manual_seed(5)
    config = build_block_config(SHAPE, recompute_granularity=recompute, sequence_parallel=sequence_parallel)
    model = GPT2Model(SHAPE, config).to(dtype).train()
    loss_and_gradients(model)
    loss, grads = loss_and_gradients(model)  # This forward pass starts from later random states than the first.
    return {"loss": loss, **grads}


def largest_differences(rank: int, world_size: int) -> dict[str, float]:
    """Return for each configuration the greatest difference between a gradient with and without checkpointing, relative
    to the greatest entry of its tensor."""
    mpu.initialize_model_parallel(world_size)
    found = {}
    # In bf16 a CPU uses different attention kernels.
    for dtype, sequence_parallel in itertools.product((torch.float32, torch.bfloat16), (False, True)):
        expected = gradients(dtype, "none", sequence_parallel)
        for partition in (False, True):
            fake = FakeDeepSpeedCheckpointing(partition)
            with mock.patch.multiple(mpu, checkpoint=fake.checkpoint, get_cuda_rng_tracker=lambda: fake.tracker):  # noqa: B023
                got = gradients(dtype, "full", sequence_parallel)
            found[f"{dtype}, {sequence_parallel}, partition {partition}"] = max(
                ((got[name] - expected[name]).abs().max() / expected[name].abs().max()).item() for name in expected
            )
    return found


def test_deepspeeds_checkpointing_repeats_all_dropout_masks():
    for found in run_ranks(largest_differences, 2):
        assert len(found) == 8
        assert max(found.values()) == 0, found
