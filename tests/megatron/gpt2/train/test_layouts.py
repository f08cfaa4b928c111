"""The layout is only a layout: with dropout the same losses from 1 to 4 ranks, split in every way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import run_ranks
from tests.megatron.gpt2.train.training_runs import finish, start, steps, whole_weights, write_text

STEPS = 30


def train_layout(rank: int, world_size: int, folder: str, model_parallel: int, flags: list[str]) -> dict[str, Any]:
    run = start(
        rank,
        world_size,
        folder,
        [
            "--model-parallel-size",
            str(model_parallel),
            "--global-batch-size",
            "8",
            "--attention-dropout",
            "0.1",
            "--hidden-dropout",
            "0.1",
            "--save",
            f"{folder}/mp{model_parallel}_{world_size}",
            *flags,
        ],
    )
    initial = whole_weights(run)
    seen = steps(run, STEPS)
    finish(run)
    return {"initial": initial, **seen}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layouts")
    write_text(folder)
    return folder


@pytest.fixture(scope="module")
def reference(folder: Path) -> dict[str, Any]:
    (result,) = run_ranks(train_layout, 1, str(folder), 1, ["--micro-batch-size", "8"])
    assert result["loss"][0] - result["loss"][-1] >= 0.5, "the run must learn something, or equality shows nothing"
    return result


# (model-parallel, data-parallel, micro-batch, flags): accumulation is 8 / (data-parallel × micro-batch)
SEQUENCE, SHARDED = ["--sequence-parallel"], ["--use-distributed-optimizer"]
FULL, SELECTIVE = (["--recompute-granularity", how] for how in ("full", "selective"))
LAYOUTS: list[tuple[int, int, int, list[str]]] = [
    (1, 1, 4, FULL),
    (1, 2, 4, SHARDED),
    (2, 2, 4, [*SEQUENCE, *SHARDED, *SELECTIVE]),
    (4, 1, 8, []),
]
MORE: list[tuple[int, int, int, list[str]]] = [
    (1, 1, 2, []),
    (2, 1, 8, SELECTIVE),
    (2, 1, 2, []),
    (2, 1, 4, SEQUENCE),
    (1, 2, 1, FULL),
    (2, 2, 1, []),
    (4, 1, 4, [*SEQUENCE, *FULL]),
    (1, 2, 2, ["--zero-stage", "2"]),
    (2, 2, 1, ["--zero-stage", "2", *FULL, "--partition-activations"]),
]


@pytest.mark.parametrize(
    ("model_parallel", "data_parallel", "micro", "flags"),
    [*LAYOUTS, *(pytest.param(*layout, marks=pytest.mark.wide) for layout in MORE)],
    ids=str,
)
def test_losses_do_not_depend_on_the_layout(
    folder: Path, reference: dict[str, Any], model_parallel: int, data_parallel: int, micro: int, flags: list[str]
):
    results = run_ranks(
        train_layout,
        model_parallel * data_parallel,
        str(folder),
        model_parallel,
        ["--micro-batch-size", str(micro), *flags],
    )
    for result in results:
        assert result["initial"].keys() == reference["initial"].keys()
        for name, weight in result["initial"].items():
            assert torch.equal(weight, reference["initial"][name]), f"initial {name}"
        assert result["loss"] == pytest.approx(reference["loss"], rel=1e-5)
        assert result["norm"] == pytest.approx(reference["norm"], rel=1e-4)


@pytest.mark.parametrize("micro", [2, pytest.param(4, marks=pytest.mark.wide), pytest.param(1, marks=pytest.mark.wide)])
def test_torch_ddp_is_the_same(folder: Path, reference: dict[str, Any], micro: int):
    results = run_ranks(train_layout, 2, str(folder), 1, ["--micro-batch-size", str(micro), "--DDP-impl", "torch"])
    for result in results:
        assert result["loss"] == pytest.approx(reference["loss"], rel=1e-5)
        assert result["norm"] == pytest.approx(reference["norm"], rel=1e-4)


@pytest.mark.parametrize(
    ("precision", "loss", "norm"),
    [
        # One unit roundoff (bf16 rounds at 2^-9 relatively, fp16 at 2^-12) on a loss that averages over thousands of
        # roundings, and four on the norm, which no average helps. Measured: 6.5e-4 and 2.6e-3 in bf16, 3.1e-5 and 1.8e-4
        # in fp16, over 30 steps whose updates are rounded too.
        ("bf16", 2**-9, 4 * 2**-9),
        ("fp16", 2**-12, 4 * 2**-12),
    ],
)
def test_sixteen_bits_stay_near(folder: Path, reference: dict[str, Any], precision: str, loss: float, norm: float):
    for ranks, model_parallel in ((1, 1), (2, 2)):
        flags = ["--precision", precision, "--micro-batch-size", "8", "--initial-loss-scale", "1024"]
        for result in run_ranks(train_layout, ranks, str(folder), model_parallel, flags):
            assert not any(result["skipped"])
            assert result["loss"] == pytest.approx(reference["loss"], rel=loss)
            assert result["norm"] == pytest.approx(reference["norm"], rel=norm)
            assert result["loss"] != reference["loss"], "nothing was computed in 16 bits"
