"""How often the ranks of a model-parallel group talk in one micro-batch, counted at torch's dispatcher."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import mpu
from megatron.gpt2.model.gpt2 import GPT2Model, layer_config
from tests.distributed import run_ranks
from tests.megatron.gpt2.train.training_runs import SHAPE

LAYERS = SHAPE.num_layers


class CollectiveCounter(TorchDispatchMode):
    """Counts the calls of torch.distributed's operators, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.calls[func.name().removeprefix("c10d::").partition(".")[0].strip("_")] += 1
        return func(*args, **(kwargs or {}))


def count(rank: int, world_size: int, dropout: float, **how: Any) -> dict[str, int]:
    mpu.initialize_model_parallel(world_size)
    mpu.model_parallel_cuda_manual_seed(1)
    shape = replace(SHAPE, attention_dropout=dropout, hidden_dropout=dropout)
    model = GPT2Model(shape, layer_config(shape, **how)).train()
    tokens = torch.arange(4 * 32).view(4, 32) % 97
    counter = CollectiveCounter()
    with counter:
        model(tokens, tokens, torch.full((4, 32), 1 / 128)).backward()
    return dict(counter.calls)


@pytest.mark.parametrize("world_size", [2, 4])
def test_all_reduces_of_a_micro_batch(world_size: int):
    """Two a layer forward and two backward, one for the embedding, one for the head's input gradient; one all-gather
    for the one chunk of the loss."""
    for result in run_ranks(count, world_size, 0.0):
        assert result == {"allreduce": 4 * LAYERS + 2, "allgather": 1}


def test_a_loss_of_more_chunks_gathers_once_for_each():
    assert run_ranks(count_chunks, 2) == [{"allgather": 4, "allreduce": 1}] * 2


def count_chunks(rank: int, world_size: int) -> dict[str, int]:
    mpu.initialize_model_parallel(world_size)
    hidden = torch.randn(100, 16, requires_grad=True)
    weight = torch.randn(20, 16, requires_grad=True)
    counter = CollectiveCounter()
    with counter:
        mpu.vocab_parallel_linear_cross_entropy(
            hidden, weight, torch.arange(100) % 40, torch.ones(100), vocab_size=40, chunk_size=25
        ).backward()
    return dict(counter.calls)


def test_sequence_parallel_twins():
    """Each all-reduce becomes a reduce-scatter and an all-gather; backward gathers a column-parallel layer's input
    again, two a layer. The loss's own all-gather is of another kind (a list)."""
    for result in run_ranks(count_sequence_parallel, 2):
        assert result == {
            "reduce_scatter_base": 4 * LAYERS + 2,
            "allgather_base": 4 * LAYERS + 2 + 2 * LAYERS,
            "allgather": 1,
        }


def count_sequence_parallel(rank: int, world_size: int) -> dict[str, int]:
    return count(rank, world_size, 0.0, sequence_parallel=True)


@pytest.mark.parametrize(("dropout", "per_layer"), [(0.0, 5), (0.1, 6)])
def test_full_recompute(dropout: float, per_layer: int):
    """Recomputation stops at the last tensor that backward needs: before the layer's closing all-reduce, unless
    dropout comes after it."""
    for result in run_ranks(count_full, 2, dropout):
        assert result == {"allreduce": per_layer * LAYERS + 2, "allgather": 1}


def count_full(rank: int, world_size: int, dropout: float) -> dict[str, int]:
    return count(rank, world_size, dropout, recompute_granularity="full")


def test_selective_recompute_talks_no_more():
    assert run_ranks(count_selective, 2) == [{"allreduce": 4 * LAYERS + 2, "allgather": 1}] * 2


def count_selective(rank: int, world_size: int) -> dict[str, int]:
    return count(rank, world_size, 0.0, recompute_granularity="selective")
