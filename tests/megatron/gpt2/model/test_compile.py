"""torch.compile of the layers: equal losses and gradients, one graph for all layers also with dropout, and the known
graph breaks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import mpu
from megatron.gpt2.model.gpt2 import GPT2Model, build_block_config
from tests.distributed import run_ranks
from tests.megatron.gpt2.train.training_runs import SHAPE

TOKENS = torch.arange(4 * 32).view(4, 32) % 97


def loss_and_gradients(model: GPT2Model) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = model(TOKENS, TOKENS, torch.full((4, 32), 1 / 128), sample_ids=torch.arange(4))
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def forget() -> None:
    """Remove the graphs and counters of earlier tests in this process."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def differences(rank: int, world_size: int) -> dict[str, float]:
    """The greatest difference between compiled and eager, relative to the loss and to each gradient's greatest
    entry."""
    mpu.initialize_model_parallel(world_size)
    forget()
    greatest, shape = {}, replace(SHAPE, attention_dropout=0.1, hidden_dropout=0.1)
    for name, how in {"plain": {}, "sequence_parallel": {"sequence_parallel": True}}.items():
        if name == "plain" or world_size > 1:
            eager, compiled = (
                GPT2Model(shape, build_block_config(shape, **how), dropout_seed=5).train() for _ in range(2)
            )
            # Inductor compiles one graph for each world size, which is slow. This one differs only in its collectives.
            compiled.compile_layers(backend="aot_eager" if name == "plain" and world_size > 1 else "inductor")
            (loss, grads), (loss_c, grads_c) = loss_and_gradients(eager), loss_and_gradients(compiled)
            assert grads.keys() == grads_c.keys()
            greatest[name] = max(
                ((loss_c - loss).abs() / loss.abs()).item(),
                *(((grads_c[k] - g).abs().max() / g.abs().max()).item() for k, g in grads.items()),
            )
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == len(greatest), "every layer shares one graph"
    return greatest


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.wide)])
def test_compiled_equals_eager(world_size: int):
    for result in run_ranks(differences, world_size, timeout=300):
        assert len(result) == world_size
        assert all(difference < 1e-5 for difference in result.values()), result


def graphs(
    rank: int, world_size: int, dropout: float, sequence_parallel: bool, dropout_seed: int | None
) -> tuple[int, dict[str, int]]:
    """Return the number of graphs of one layer, and its graph breaks by dynamo's reason."""
    mpu.initialize_model_parallel(world_size)
    mpu.model_parallel_cuda_manual_seed(1)
    shape = replace(SHAPE, attention_dropout=dropout, hidden_dropout=dropout, num_layers=1)
    layer = build_block_config(shape, sequence_parallel=sequence_parallel)
    model = GPT2Model(shape, layer, dropout_seed=dropout_seed).train()
    forget()
    model.compile_layers(backend="eager")
    loss_and_gradients(model)
    counters = torch._dynamo.utils.counters
    return counters["stats"]["unique_graphs"], dict(counters["graph_break"])


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.wide)])
def test_a_layer_is_one_graph(world_size: int, dropout: float):
    for result in run_ranks(graphs, world_size, dropout, world_size > 1, 1):
        assert result == (1, {})


@pytest.mark.wide
def test_masks_of_random_streams_break_the_graph():
    for count, reasons in run_ranks(graphs, 2, 0.1, True, None):
        assert count > 1 and all("random stream" in reason for reason in reasons), reasons


@pytest.mark.parametrize("amx", [True, False])
def test_a_compiled_layer_uses_the_kernels_of_its_processor(amx: bool, monkeypatch: pytest.MonkeyPatch):
    """In bf16, the kernels depend on the processor."""
    monkeypatch.setattr("mpu.kernels.cpu_features.HAS_AMX", amx)
    mpu.initialize_model_parallel(1)
    eager, compiled = (
        GPT2Model(replace(SHAPE, attention_dropout=0.0, hidden_dropout=0.0, num_layers=1)).bfloat16().train()
        for _ in range(2)
    )
    forget()
    compiled.compile_layers(backend="eager")
    (loss, grads), (loss_c, grads_c) = loss_and_gradients(eager), loss_and_gradients(compiled)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert (loss_c - loss).abs() <= 1e-3 * loss  # The compiled GELU rounds differently.
    assert all((grads_c[name] - grad).float().norm() <= 1e-2 * grad.float().norm() for name, grad in grads.items())
