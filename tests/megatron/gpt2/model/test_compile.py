"""Test that compiled layers have the losses and gradients of eager layers, and that all layers share one graph, also
with dropout."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import mpu
from megatron.gpt2.config.arguments import parse
from megatron.gpt2.model.gpt2 import GPT2Model, build_block_config
from tests.conftest import error_line
from tests.distributed import run_ranks
from tests.megatron.gpt2.train.training_runs import SHAPE, TOKENS, loss_and_gradients

SAMPLES = torch.arange(4)


def forget() -> None:
    """Remove the graphs and counters of earlier tests in this process."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def differences(rank: int, world_size: int) -> list[float]:
    """Return for each layout the greatest difference between a compiled and an eager model, relative to the loss and to
    each gradient's greatest entry."""
    mpu.initialize_model_parallel(world_size)
    forget()
    greatest, shape = [], replace(SHAPE, attention_dropout=0.1, hidden_dropout=0.1)
    for sequence_parallel in [False, True][:world_size]:
        config = build_block_config(shape, sequence_parallel=sequence_parallel)
        eager, compiled = (GPT2Model(shape, config, dropout_seed=5).train() for _ in range(2))
        # Inductor is slow. Without sequence parallelism two ranks differ from one rank only in collectives.
        compiled.compile_layers(backend="aot_eager" if world_size > 1 and not sequence_parallel else "inductor")
        (loss, grads), (loss_c, grads_c) = (loss_and_gradients(x, sample_ids=SAMPLES) for x in (eager, compiled))
        assert grads.keys() == grads_c.keys()
        greatest += [((loss_c - loss).abs() / loss.abs()).item()]
        greatest += [((grads_c[k] - g).abs().max() / g.abs().max()).item() for k, g in grads.items()]
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == world_size and not counters["graph_break"], "layers share one graph"
    return greatest


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.wide)])
def test_compiled_equals_eager(world_size: int):
    for result in run_ranks(differences, world_size, timeout=300):
        assert max(result) < 1e-5


@pytest.mark.parametrize(
    "dtype, amx, eods",
    [
        (torch.float32, False, (11, 50, 96)),  # Attention within documents is outside of the graphs.
        (torch.bfloat16, True, (None,)),  # In bf16, the kernels depend on the processor.
        (torch.bfloat16, False, (None,)),
    ],
)
def test_a_compiled_layer_uses_the_same_kernels(
    dtype: torch.dtype, amx: bool, eods: tuple[int | None, ...], monkeypatch: pytest.MonkeyPatch
):
    """Documents with different lengths do not make torch.compile compile the layer again."""
    monkeypatch.setattr("mpu.kernels.cpu_features.HAS_AMX", amx)
    mpu.initialize_model_parallel(1)
    forget()
    eager, compiled = (GPT2Model(replace(SHAPE, num_layers=1)).to(dtype).train() for _ in range(2))
    compiled.compile_layers(backend="eager", by_document=eods[0] is not None)
    tolerance, graphs = 1e-5 if dtype == torch.float32 else 1e-2, set()
    for eod in eods:
        documents = None if eod is None else mpu.PackedSeqParams.from_tokens(TOKENS, eod, "cpu")
        (loss, grads), (loss_c, grads_c) = (
            loss_and_gradients(model, packed_seq_params=documents) for model in (eager, compiled)
        )
        assert (loss_c - loss).abs() <= tolerance / 10 * loss  # The compiled GELU rounds differently.
        assert all((grads_c[k] - grad).float().norm() <= tolerance * grad.float().norm() for k, grad in grads.items())
        graphs.add(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert len(graphs) == 1 and (eods[0] is not None or graphs == {1})


def test_masks_of_random_streams_are_refused() -> None:
    line = "--hidden-dropout 0.1 --compile --dropout-rng torch"
    assert "a compiled layer cannot change the random stream" in error_line(lambda: parse(line.split()).config)
    parse(f"{line} --hidden-dropout 0 --attention-dropout 0".split()).config  # noqa: B018
