"""How often the ranks of a model-parallel group talk in one micro-batch; sequence parallelism leaves partial gradients that
mpu completes, and keeps less. `train/test_layouts.py` has its losses."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import mpu
from megatron.gpt2.model.gpt2 import GPT2Model, layer_config
from tests.distributed import run_ranks
from tests.megatron.gpt2.train.training_runs import SHAPE


def partial_and_complete(rank: int, world_size: int) -> dict[str, list[bool]]:
    """With a plain backward: for each replicated parameter whether its gradient is that of whole sequences, as autograd
    leaves it, after mpu's sum in fp32 and in bf16, and by a hook on the parameter."""
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
    assert not any(hasattr(p, "sequence_parallel") for p in whole.parameters()), "nothing is partial without it"
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
    mpu.sum_sequence_parallel_grads(plain.parameters())
    seen["summed"] = is_complete(plain, 1e-5)
    in_bf16 = model_after_backward(torch.bfloat16, sequence_parallel=True)
    mpu.sum_sequence_parallel_grads(in_bf16.parameters())
    seen["bf16"] = is_complete(in_bf16, 3e-2)
    seen["hook"] = is_complete(model_after_backward(hook=True, sequence_parallel=True), 1e-5)
    return seen


def test_another_trainer_completes_the_gradients():
    for seen in run_ranks(partial_and_complete, 2):
        assert not any(seen["autograd"]) and len(seen["autograd"]) == 3 + 6 * SHAPE.num_layers
        assert all(seen["summed"]) and all(seen["bf16"]) and all(seen["hook"])


def saved_bytes(rank: int, world_size: int, sequence_parallel: bool) -> int:
    """Bytes that one forward keeps for its backward, weights left out, each storage once."""
    mpu.initialize_model_parallel(world_size)
    mpu.model_parallel_cuda_manual_seed(1)
    model = GPT2Model(SHAPE, layer_config(SHAPE, sequence_parallel=sequence_parallel)).train()
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    tokens = torch.arange(4 * 32).view(4, 32) % 97
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        hidden = mpu.hidden_dropout(model.word_embeddings(tokens.t()), 0.1, sequence_parallel)
        out = model.transformer(hidden)
    assert out.requires_grad
    return sum(kept.values())


def masks(rank: int, world_size: int, sequence_parallel: bool) -> Tensor:
    mpu.initialize_model_parallel(world_size)
    mpu.model_parallel_cuda_manual_seed(1)
    return mpu.hidden_dropout(torch.ones(64), 0.5, sequence_parallel)


def test_masks_differ_between_shards_alone():
    split, whole = (run_ranks(masks, 2, sequence_parallel) for sequence_parallel in (True, False))
    assert torch.equal(whole[0], whole[1]) and not torch.equal(split[0], split[1])


def test_activations_take_less_memory():
    """Layer norms' inputs and outputs, dropout's masks and the residual stream are halved at 2 ranks: of 34·s·b·h
    bytes a layer in 16 bits about 10 are replicated without it (arXiv:2205.05198, table 2)."""
    without, with_it = (run_ranks(saved_bytes, 2, sequence_parallel)[0] for sequence_parallel in (False, True))
    assert with_it < 0.85 * without, (with_it, without)
    print(f"kept by a rank of 2: {without:,} bytes, with sequence parallelism {with_it:,}")


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
