"""The number of collectives in one micro-batch, and the partial gradients of sequence parallelism.
`train/test_layouts.py` compares the losses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import mpu
from megatron.gpt2.model.gpt2 import GPT2Model, layer_config
from tests.distributed import run_ranks
from tests.megatron.gpt2.train.training_runs import SHAPE
from tests.mpu.test_cross_entropy import MemoryCounter


def partial_and_complete(rank: int, world_size: int) -> dict[str, list[bool]]:
    """For each replicated parameter, is its gradient complete (that of whole sequences)? After a plain backward, after
    mpu's sum in fp32 and in bf16, and with a hook on the parameter."""
    mpu.initialize_model_parallel(world_size)
    tokens = torch.arange(4 * 32).view(4, 32) % 97

    def model_after_backward(dtype: torch.dtype = torch.float32, hook: bool = False, **how: Any) -> GPT2Model:
        model = GPT2Model(SHAPE, layer_config(SHAPE, **how)).to(dtype)
        for parameter in model.parameters():
            if hook and getattr(parameter, "sequence_parallel", False):
                parameter.register_hook(mpu.reduce_from_model_parallel_region)
        model(tokens, tokens, torch.full((4, 32), 1 / 128)).backward()
        return model

    whole = model_after_backward()
    assert not any(hasattr(p, "sequence_parallel") for p in whole.parameters()), (
        "gradients are partial only with sequence parallelism"
    )
    expected = {name: p.grad for name, p in whole.named_parameters() if not hasattr(p, "model_parallel")}

    def is_complete(model: GPT2Model, tolerance: float) -> list[bool]:
        marked = {name: p for name, p in model.named_parameters() if getattr(p, "sequence_parallel", False)}
        assert marked.keys() == expected.keys()
        return [
            bool((p.grad.float() - expected[name]).norm() < tolerance * expected[name].norm())
            for name, p in marked.items()
        ]

    plain = model_after_backward(sequence_parallel=True)
    seen = {"autograd": is_complete(plain, 1e-2)}
    mpu.all_reduce_sequence_parallel_grads(plain.parameters())
    seen["summed"] = is_complete(plain, 1e-5)
    in_bf16 = model_after_backward(torch.bfloat16, sequence_parallel=True)
    mpu.all_reduce_sequence_parallel_grads(in_bf16.parameters())
    seen["bf16"] = is_complete(in_bf16, 3e-2)
    seen["hook"] = is_complete(model_after_backward(hook=True, sequence_parallel=True), 1e-5)
    return seen


def test_other_trainers_can_complete_the_gradients():
    for seen in run_ranks(partial_and_complete, 2):
        assert not any(seen["autograd"]) and len(seen["autograd"]) == 3 + 6 * SHAPE.num_layers
        assert all(seen["summed"]) and all(seen["bf16"]) and all(seen["hook"])


LAYERS = SHAPE.num_layers


def collectives(counter: MemoryCounter) -> dict[str, int]:
    """Return the number of calls of each of torch.distributed's operators."""
    ours = ("allreduce", "allgather", "reduce_scatter")
    return {name.strip("_"): calls for name, calls in counter.calls.items() if name.strip("_").startswith(ours)}


def count(rank: int, world_size: int, dropout: float, how: dict[str, Any]) -> dict[str, int]:
    mpu.initialize_model_parallel(world_size)
    mpu.model_parallel_cuda_manual_seed(1)
    shape = replace(SHAPE, attention_dropout=dropout, hidden_dropout=dropout)
    model = GPT2Model(shape, layer_config(shape, **how)).train()
    tokens = torch.arange(4 * 32).view(4, 32) % 97
    with MemoryCounter() as counter:
        model(tokens, tokens, torch.full((4, 32), 1 / 128)).backward()
    return collectives(counter)


ALL_REDUCES = 4 * LAYERS + 2
FULL = {"recompute_granularity": "full"}


@pytest.mark.parametrize(
    "world_size, dropout, how, expected",
    [
        # Each layer has two in forward and two in backward. The embedding has one, the head's input gradient has one,
        # and the single chunk of the loss has one all-gather.
        (2, 0.0, {}, {"allreduce": ALL_REDUCES, "allgather": 1}),
        (4, 0.0, {}, {"allreduce": ALL_REDUCES, "allgather": 1}),
        (2, 0.0, {"recompute_granularity": "selective"}, {"allreduce": ALL_REDUCES, "allgather": 1}),
        # Recomputation stops at the last tensor that backward needs: before the layer's last all-reduce, unless dropout
        # follows it.
        (2, 0.0, FULL, {"allreduce": ALL_REDUCES + LAYERS, "allgather": 1}),
        (2, 0.1, FULL, {"allreduce": ALL_REDUCES + 2 * LAYERS, "allgather": 1}),
        # Each all-reduce becomes a reduce-scatter and an all-gather; backward gathers the input of both column-parallel
        # layers again. The loss uses a different all-gather (of a list).
        (
            2,
            0.0,
            {"sequence_parallel": True},
            {"reduce_scatter_base": ALL_REDUCES, "allgather_base": ALL_REDUCES + 2 * LAYERS, "allgather": 1},
        ),
    ],
)
def test_the_collectives_of_a_micro_batch(world_size: int, dropout: float, how: dict[str, Any], expected: Any):
    assert run_ranks(count, world_size, dropout, how) == [expected] * world_size


def count_chunks(rank: int, world_size: int) -> dict[str, int]:
    mpu.initialize_model_parallel(world_size)
    hidden = torch.randn(100, 16, requires_grad=True)
    weight = torch.randn(20, 16, requires_grad=True)
    with MemoryCounter() as counter:
        mpu.vocab_parallel_linear_cross_entropy(
            hidden, weight, torch.arange(100) % 40, torch.ones(100), vocab_size=40, chunk_size=25
        ).backward()
    return collectives(counter)


def test_the_loss_gathers_once_for_each_chunk():
    assert run_ranks(count_chunks, 2) == [{"allgather": 4, "allreduce": 1}] * 2
