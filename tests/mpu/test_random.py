"""Test random streams, and activation checkpoints that repeat the streams. Saved activations that are sharded over
ranks or offloaded to host memory need less device memory and give equal results."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import mpu
from megatron.gpt2.model.gpt2 import GPT2Model, build_block_config
from mpu.random import MODEL_PARALLEL_RNG
from tests.distributed import run_ranks
from tests.megatron.gpt2.train.training_runs import SHAPE
from tests.mpu.test_cross_entropy import MemoryCounter


def draws(rank: int, world_size: int, model_parallel_size: int) -> tuple[list[float], list[float]]:
    """Return the rank's random numbers from the default generator and from the tracker."""
    mpu.initialize_model_parallel(model_parallel_size)
    mpu.model_parallel_cuda_manual_seed(1234)
    shared = torch.rand(4).tolist()
    with mpu.get_cuda_rng_tracker().fork():
        own = torch.rand(4).tolist()
    return shared, own


def test_which_random_numbers_ranks_share():
    # Ranks 0 and 1 share layers; ranks 0 and 2 share data.
    results = run_ranks(draws, 4, 2)
    (d0, t0), (d1, t1), (d2, t2), (d3, t3) = results
    assert d0 == d1 and d2 == d3, "hidden dropout is equal inside a model-parallel group"
    assert t0 != t1 and t2 != t3, "the tracker differs inside a model-parallel group"
    assert (d0, t0, t1) == (d2, t2, t3), "data-parallel ranks with the same seed draw the same numbers, as in 2019"


def test_a_cpu_model_uses_the_cpu_generator_if_the_process_has_used_a_gpu(monkeypatch: pytest.MonkeyPatch):
    mpu.initialize_model_parallel(1)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "get_rng_state", lambda: pytest.fail("the GPU's generator was asked"))
        mpu.model_parallel_cuda_manual_seed(1, "cpu")
    mpu.model_parallel_cuda_manual_seed(1)


def test_fork_continues_its_stream_and_restores_the_default_one():
    tracker = mpu.get_cuda_rng_tracker()
    tracker.reset()
    tracker.add("a", 1)
    with pytest.raises(ValueError, match="'a' exists"):
        tracker.add("a", 3)
    with pytest.raises(KeyError, match="'c'"), tracker.fork("c"):
        pass
    torch.manual_seed(5)
    default, stream = (torch.rand(4, generator=torch.Generator().manual_seed(seed)) for seed in (5, 1))
    for part in (slice(2), slice(2, 4)):
        with pytest.raises(ZeroDivisionError), tracker.fork("a"):
            assert torch.equal(torch.rand(2), stream[part])
            raise ZeroDivisionError
        assert torch.equal(torch.rand(2), default[part])


def test_checkpoint_repeats_both_random_streams():
    mpu.initialize_model_parallel(1)
    weight = torch.randn(16, 16)

    def block(x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(F.gelu(x @ weight), 0.5)
        with mpu.get_cuda_rng_tracker().fork():
            x = F.dropout(x, 0.5)
        return F.gelu(x) * 2

    def run(wrap) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        mpu.model_parallel_cuda_manual_seed(3)
        x = torch.linspace(-1, 1, 8 * 16).view(8, 16).requires_grad_()
        y = wrap(wrap(x))
        y.sum().backward()
        after = mpu.get_cuda_rng_tracker().get_states()[MODEL_PARALLEL_RNG]
        return y.detach(), x.grad, torch.get_rng_state(), after

    plain, again = run(block), run(lambda x: mpu.checkpoint(block, x))
    in_core = run(lambda x: mpu.checkpoint(block, False, x))  # the arguments of megatron.core
    for a, b, c in zip(plain, again, in_core, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


ELEMENTS = 10_007  # No number of ranks divides this prime.


def block(x: Tensor, mask: Tensor) -> Tensor:
    return F.gelu(F.dropout(F.gelu(x) * mask, 0.5)) * 2


def results(checkpoint: Callable[..., Any]) -> tuple[list[Tensor], int]:
    """Return the outputs and the gradient of three blocks, and the bytes that the last two blocks save for backward."""
    mpu.model_parallel_cuda_manual_seed(1)
    x = torch.linspace(-3, 3, ELEMENTS).requires_grad_()
    mask = torch.arange(ELEMENTS) % 7 > 0
    y = checkpoint(block, x, mask)
    with MemoryCounter() as counter:
        z = checkpoint(block, checkpoint(block, y, mask), mask)
        kept = counter.now - z.nbytes
        z.sum().backward()
    assert x.grad is not None
    return [y.detach(), z.detach(), x.grad], kept


def saved_bytes(rank: int, world_size: int) -> tuple[int, ...]:
    """Assert that each way of saving gives the results of a plain checkpoint. Return the bytes that are saved: whole,
    sharded, sharded by the default of the process, and sharded in host memory."""
    mpu.initialize_model_parallel(world_size)
    host = mpu.ActivationOffload("cpu")
    sharded = functools.partial(mpu.checkpoint, distribute_saved_activations=True)
    plain, whole = results(mpu.checkpoint)
    by_flag, one_shard = results(sharded)
    on_host, _ = results(functools.partial(sharded, activation_offload=host))
    mpu.partition_activations_in_checkpoint(True)
    by_default, default_shard = results(mpu.checkpoint)
    mpu.partition_activations_in_checkpoint(False)
    for tensors in (by_flag, on_host, by_default):
        assert all(map(torch.equal, tensors, plain))
    return whole, one_shard, default_shard, host.allocated_bytes


@pytest.mark.parametrize("ranks", [2, 3])
def test_each_rank_saves_only_its_shard(ranks: int):
    part = -(-ELEMENTS // ranks)
    for whole, one_shard, default_shard, on_host in run_ranks(saved_bytes, ranks):
        # A plain checkpoint saves generator states and one input of float32. The other arguments of the checkpoint
        # exist anyway.
        states = whole - 4 * ELEMENTS
        assert 0 <= states < 30_000
        # Two blocks save shards of an input of float32 and of a mask of bool.
        assert one_shard - states == default_shard - states == 2 * (4 + 1) * part
        assert on_host == 3 * (4 + 1) * part


@pytest.mark.parametrize("recompute", ["full", "none"])
def test_offloading_does_not_change_a_step(recompute: str, monkeypatch: pytest.MonkeyPatch):
    """From the second step on, no host memory is allocated. Without a GPU, the copies stay on the CPU."""
    mpu.initialize_model_parallel(1)
    tokens = torch.randint(0, 97, (2, 32), generator=torch.Generator().manual_seed(0))
    shape = replace(SHAPE, num_layers=4, hidden_dropout=0.1, attention_dropout=0.1)

    def two_passes(host: mpu.ActivationOffload | None) -> list[Tensor]:
        """Return the losses and gradients of two micro-batches. As in a pipeline, both forward passes are first."""
        offloaded_layers = 3 if recompute == "none" else 0
        layer = build_block_config(shape, recompute_granularity=recompute, cpu_offloading_num_layers=offloaded_layers)
        model = GPT2Model(shape, layer, dropout_seed=1)
        model.transformer.activation_offload = host
        losses = [
            model(tokens, tokens, torch.full((2, 32), 1 / 64), sample_ids=torch.tensor([2 * n, 2 * n + 1]))
            for n in range(2)
        ]
        for loss in losses:
            loss.backward()
        return [*(loss.detach() for loss in losses), *(p.grad for p in model.parameters() if p.grad is not None)]

    host = mpu.ActivationOffload("cpu")
    monkeypatch.setattr("mpu.activation_offload.MIN_BYTES", 1)
    plain, offloaded = two_passes(None), two_passes(host)
    allocated = host.allocated_bytes
    assert allocated >= 2 * 4 * 4 * 2 * 32 * 128 and len(plain) == len(offloaded) > 50
    assert all(map(torch.equal, plain, offloaded))
    assert all(map(torch.equal, plain, two_passes(host))) and host.allocated_bytes == allocated
