"""What backward needs is in the host's memory meanwhile: copied on a side stream, in order, without a wait."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.gpt2.train.train_step import train_step
from tests.fake_cuda.fake_gpu import FakeGPU, Memory
from tests.fake_cuda.fake_streams import FakeStream
from tests.fake_cuda.program import check_step, running

FULL = ["--recompute-granularity", "full"]
LAYERS = 4
INPUT = 2 * 256 * 1024 * 2  # bytes of a layer's input: micro-batch, sequence, hidden, bf16
WAYS: dict[str, tuple[int, list[str], int]] = {  # ranks, flags, bytes that leave the device and come back
    "inputs": (1, [*FULL, "--checkpoint-in-cpu"], LAYERS * INPUT),
    "in pairs": (1, [*FULL, "--recompute-num-layers", "2", "--checkpoint-in-cpu"], LAYERS // 2 * INPUT),
    "accumulation": (1, [*FULL, "--checkpoint-in-cpu", "--global-batch-size", "4"], 2 * LAYERS * INPUT),
    "parts of inputs": (
        2,
        [*FULL, "--checkpoint-in-cpu", "--partition-activations", "--model-parallel-size", "2"],
        LAYERS * INPUT // 2,
    ),
    # Inputs of both layer norms, their outputs, queries, keys and values, attention's output; twice 4h of the MLP
    "of layers": (1, ["--cpu-offloading-num-layers", "3"], 3 * (8 + 8) * INPUT),
}


def between(gpu: FakeGPU, to: str) -> list[int]:
    """The sizes of copies on another stream than the main one."""
    return [copy.size for copy in gpu.copies if copy.to == to and copy.stream != FakeStream.current.number]


@pytest.mark.parametrize("way", WAYS)
def test_it_leaves_and_comes_back_on_a_side_stream(text: Path, tmp_path: Path, way: str):
    ranks, flags, size = WAYS[way]
    with running(text, tmp_path, ["--num-layers", str(LAYERS), *flags], world_size=ranks) as (run, gpu):
        check_step(run, gpu)
        assert sum(between(gpu, "cpu")) == sum(between(gpu, "cuda")) == size
        memory = run.engine.model.transformer.host_memory
        assert memory is not None
        taken = memory.taken
        train_step(run)
        assert memory.taken == taken <= size


def test_no_input_stays_on_the_device(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """When the loss begins."""
    now: list[int] = []
    for flags in (FULL, WAYS["inputs"][1]):
        with running(text, tmp_path, ["--num-layers", str(LAYERS), *flags]) as (run, gpu):
            train_step(run)
            loss = run.engine.model._cross_entropy

            def measured(*args: Any, memory: Memory = gpu.memory, loss: Any = loss, **kwargs: Any) -> Any:
                now.append(memory.now)
                return loss(*args, **kwargs)

            with monkeypatch.context() as patch:
                patch.setattr(run.engine.model, "_cross_entropy", measured)
                train_step(run)
    assert now[0] - now[1] == LAYERS * INPUT
