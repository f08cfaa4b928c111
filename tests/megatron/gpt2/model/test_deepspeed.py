"""DeepSpeed's activation checkpointing instead of mpu's, installed as DeepSpeedExamples does: exact, also with dropout.

`FakeDeepSpeedCheckpointing` handles random states and arguments like deepspeed.checkpointing (DeepSpeed 0.19,
runtime/activation_checkpointing/checkpointing.py).
"""

from __future__ import annotations

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
from tests.megatron.gpt2.train.training_runs import SHAPE

SHAPE_WITH_DROPOUT = replace(SHAPE, attention_dropout=0.1, hidden_dropout=0.1)


class FakeDeepSpeedCheckpointing:
    """A reentrant checkpoint: forward without gradients, then again with gradients in backward, from the same states of
    the default generator and of this object's tracker.

    partition: each model-parallel rank saves only its shard of each tensor argument, in place, and the tensor's size
    after it. Backward gathers the shards. Tensors with a true attribute `no_checkpointing` are saved whole.
    """

    def __init__(self, partition: bool) -> None:
        self.partition = partition
        self.tracker = RNGStatesTracker()

    def checkpoint(self, function: Callable[..., Tensor], *args: Any) -> Tensor:
        out: Tensor = _Reentrant.apply(self, function, *args)
        return out

    def split(self, args: tuple[Any, ...]) -> list[Any]:
        kept = []
        for x in args:
            size = x.size() if isinstance(x, Tensor) else None
            if is_shared(x):
                part = x.numel() // mpu.get_model_parallel_world_size()
                start = part * mpu.get_model_parallel_rank()
                x.data = x.detach().flatten()[start : start + part].clone()
            kept += [x, size]
        return kept

    def gathered(self, kept: list[Any]) -> list[Any]:
        """The arguments. A size follows each tensor; anything else after an argument is an argument, as in
        DeepSpeed."""
        args = []
        for x, size in zip(kept[::2], kept[1::2], strict=True):
            if is_shared(x):
                parts = [torch.empty_like(x) for _ in range(mpu.get_model_parallel_world_size())]
                dist.all_gather(parts, x.detach(), group=mpu.get_model_parallel_group())
                args.append(torch.cat(parts).view(size).requires_grad_(x.requires_grad))
            else:
                args += [x] if isinstance(x, Tensor) else [x, size]
        return args


def is_shared(x: Any) -> bool:
    return isinstance(x, Tensor) and not getattr(x, "no_checkpointing", False)


class _Reentrant(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, owner: FakeDeepSpeedCheckpointing, function: Callable[..., Tensor], *args: Any) -> Tensor:
        ctx.owner, ctx.function = owner, function
        ctx.states = torch.get_rng_state(), owner.tracker.get_states()
        with torch.no_grad():
            out = function(*(x.clone() if isinstance(x, Tensor) else x for x in args))
        ctx.kept = owner.split(args) if owner.partition else args
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        owner = ctx.owner
        args = [
            x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x
            for x in (owner.gathered(ctx.kept) if owner.partition else ctx.kept)
        ]
        now = torch.get_rng_state(), owner.tracker.get_states()
        for state, states in (ctx.states, now):
            torch.set_rng_state(state)
            owner.tracker.set_states(states)
            if states is ctx.states[1]:
                with torch.enable_grad():
                    out = ctx.function(*args)
        torch.autograd.backward(out, grad)
        return None, None, *(x.grad if isinstance(x, Tensor) else None for x in args)


def fake_deepspeed(partition: bool) -> dict[str, Any]:
    replacement = FakeDeepSpeedCheckpointing(partition)
    return {"checkpoint": replacement.checkpoint, "get_cuda_rng_tracker": lambda: replacement.tracker}


def gradients(dtype: torch.dtype, recompute: str, of_documents: bool, sequence_parallel: bool) -> dict[str, Tensor]:
    mpu.model_parallel_cuda_manual_seed(5)
    model = (
        GPT2Model(
            SHAPE_WITH_DROPOUT,
            build_block_config(
                SHAPE_WITH_DROPOUT, recompute_granularity=recompute, sequence_parallel=sequence_parallel
            ),
        )
        .to(dtype)
        .train()
    )
    tokens = torch.arange(4 * 32).view(4, 32) % 97
    documents = mpu.PackedSeqParams.from_tokens(tokens, 11, "cpu") if of_documents else None
    for _ in range(2):  # The second pass starts from later random states.
        loss = model(tokens, tokens, torch.full((4, 32), 1 / 128), packed_seq_params=documents)
        loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}


def largest_differences(rank: int, world_size: int) -> dict[str, float]:
    """For each configuration, the greatest difference between a gradient with and without checkpointing, relative to
    the greatest entry of its tensor."""
    mpu.initialize_model_parallel(world_size)
    found = {}
    for dtype in (torch.float32, torch.bfloat16):  # In bf16 a CPU uses different attention kernels.
        for of_documents in (False, True):
            for sequence_parallel in (False, True):
                how = dtype, of_documents, sequence_parallel
                expected = gradients(dtype, "none", of_documents, sequence_parallel)
                for partition in (False, True):
                    with mock.patch.multiple(mpu, **fake_deepspeed(partition)):
                        got = gradients(dtype, "full", of_documents, sequence_parallel)
                    found[f"{how}, partition {partition}"] = max(
                        ((got[name] - expected[name]).abs().max() / expected[name].abs().max()).item()
                        for name in expected
                    )
    return found


def test_deepspeeds_checkpointing_repeats_all_dropout_masks():
    for found in run_ranks(largest_differences, 2):
        assert len(found) == 16
        assert max(found.values()) == 0, found
