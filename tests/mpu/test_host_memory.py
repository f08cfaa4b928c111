"""What backward needs, split over ranks or in the host's memory: less is kept, and nothing else changes."""

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
from megatron.gpt2.model.gpt2 import GPT2Model, layer_config
from tests.distributed import run_ranks
from tests.megatron.gpt2.train.training_runs import SHAPE
from tests.mpu.test_cross_entropy import MemoryCounter

ELEMENTS = 10_007  # which no number of ranks divides


def block(x: Tensor, mask: Tensor) -> Tensor:
    return F.gelu(F.dropout(F.gelu(x) * mask, 0.5)) * 2


def results(checkpoint: Callable[..., Any]) -> tuple[list[Tensor], int]:
    """Output and gradient of three blocks, and the bytes that are kept for backward of the last two."""
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


def split_arguments(rank: int, world_size: int) -> list[tuple[bool, int]]:
    """Of each way: whether nothing changes, and what is kept."""
    mpu.initialize_model_parallel(world_size)
    plain, whole = results(mpu.checkpoint)
    found = [(True, whole)]
    host = mpu.HostMemory("cpu")
    distributed = functools.partial(mpu.checkpoint, distribute_saved_activations=True)
    for checkpoint in (distributed, functools.partial(distributed, host_memory=host)):
        tensors, kept = results(checkpoint)
        found.append((all(map(torch.equal, tensors, plain)), kept))
    mpu.partition_activations_in_checkpoint(True)
    tensors, kept = results(mpu.checkpoint)
    mpu.partition_activations_in_checkpoint(False)
    return [*found, (all(map(torch.equal, tensors, plain)), kept), (True, host.taken)]


@pytest.mark.parametrize("ranks", [2, 3])
def test_each_rank_keeps_its_part(ranks: int):
    part = -(-ELEMENTS // ranks)
    for whole, split, parked, by_default, on_host in run_ranks(split_arguments, ranks):
        assert all(same for same, _ in (split, parked, by_default))
        # Two inputs, of which the first exists outside as well, two masks of a byte an element, which do, and states
        # of generators.
        states = whole[1] - 4 * ELEMENTS
        assert 0 <= states < 30_000
        assert split[1] - states == by_default[1] - states == 2 * (4 + 1) * part
        assert on_host[1] == 3 * (4 + 1) * part
        assert parked[1] - states >= 2 * (4 + 1) * part  # here that is the same memory


Model = Callable[..., GPT2Model]


@pytest.mark.parametrize("recompute", ["full", "none"])
def test_a_step_is_the_same_with_what_it_keeps_on_the_host(recompute: str):
    """And from the second step on no memory of the host is taken. Here the copies are made on the CPU."""
    mpu.initialize_model_parallel(1)
    tokens = torch.randint(0, 97, (2, 32), generator=torch.Generator().manual_seed(0))
    shape = replace(SHAPE, num_layers=4, hidden_dropout=0.1, attention_dropout=0.1)

    def two_passes(host: mpu.HostMemory | None) -> list[Tensor]:
        """Losses and gradients of two forward passes, whose backward comes after both, as in a pipeline."""
        offloaded = 3 if recompute == "none" else 0
        layer = layer_config(shape, recompute_granularity=recompute, cpu_offloading_num_layers=offloaded)
        model = GPT2Model(shape, layer, dropout_seed=1)
        model.transformer.host_memory = host
        losses = [
            model(tokens, tokens, torch.full((2, 32), 1 / 64), samples=torch.tensor([2 * n, 2 * n + 1]))
            for n in range(2)
        ]
        for loss in losses:
            loss.backward()
        return [*(loss.detach() for loss in losses), *(p.grad for p in model.parameters() if p.grad is not None)]

    host = mpu.HostMemory("cpu")
    host.of_layer = functools.partial(host.of_layer, at_least=1)  # type: ignore[method-assign]
    plain, parked = two_passes(None), two_passes(host)
    taken = host.taken
    assert taken >= 2 * 4 * 4 * 2 * 32 * 128 and len(plain) == len(parked) > 50
    assert all(map(torch.equal, plain, parked))
    assert all(map(torch.equal, plain, two_passes(host))) and host.taken == taken
