"""Activations that wait in the host's memory come back as they left."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.megatron.gpt2.train.training_runs import finish, start, steps, write_text

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
LARGE = [
    "--device",
    "cuda",
    "--num-layers",
    "4",
    "--hidden-size",
    "1024",
    "--num-attention-heads",
    "16",
    "--seq-length",
    "1024",
    "--max-position-embeddings",
    "1024",
    "--micro-batch-size",
    "2",
    "--precision",
    "bf16",
]
INPUT = 2 * 1024 * 1024 * 2  # bytes of a layer's


@pytest.mark.parametrize(
    "flags, on_host",
    [(["--recompute-granularity", "full"], ["--checkpoint-in-cpu"]), ([], ["--cpu-offloading-num-layers", "3"])],
)
def test_losses_are_the_same_with_less_on_the_gpu(tmp_path: Path, flags: list[str], on_host: list[str]):
    write_text(tmp_path, 60_000)
    seen, kept = [], []
    for more in ([], on_host):
        run = start(0, 1, str(tmp_path), [*LARGE, *flags, *more, "--save", f"{tmp_path}/{len(more)}"])
        seen.append(steps(run, 5))
        transformer = run.engine.model.transformer
        transformer.register_forward_hook(lambda *_: kept.append(torch.cuda.memory_allocated()))
        seen.append(steps(run, 1))
        finish(run)
        del run, transformer
    whole, parked = seen[:2], seen[2:]
    assert [s["loss"] for s in whole] == [pytest.approx(s["loss"], rel=1e-6) for s in parked]
    assert kept[1] <= kept[0] - 3 * INPUT  # the caller still holds the first one
