"""After too many skipped steps, the error names the first tensor that is not finite and its rank, also between log
lines. Each rank writes the norms of its tensors to a file."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from megatron.gpt2.monitor.incidents import read_incidents
from megatron.gpt2.train.loop import READ_DELAY, train
from tests.distributed import run_ranks
from tests.faults.injector import Fault, break_weight, nan, plant
from tests.megatron.gpt2.train.training_runs import finish, start, write_text

FLAGS = (
    "--num-layers 2 --hidden-size 32 --micro-batch-size 1 --global-batch-size 4 --max-skipped-steps 2 "
    "--log-interval 2 --train-iters 20"
)
DOWN, UP = (f"transformer.layers.1.mlp.dense_{name}.weight" for name in ("4h_to_h", "h_to_4h"))


def error_of_run(rank: int, world: int, folder: Path, flags: str, save: str, fault: Fault) -> str:
    plant(fault)
    trainer = start(rank, world, folder, f"{FLAGS} --save {folder}/{save} {flags}")
    try:
        train(trainer)
    except FloatingPointError as error:
        return str(error)
    finally:
        finish(trainer)
    return ""


def errors_of_three_runs(rank: int, world: int, folder: Path) -> list[str]:
    of_gradient, of_weight = partial(nan, name=UP), partial(break_weight, name=DOWN)
    return [
        error_of_run(rank, world, folder, "--use-distributed-optimizer", "data", Fault(of_gradient, 1, 2)),
        error_of_run(rank, world, folder, "--pipeline-model-parallel-size 2", "stages", Fault(of_gradient, 1, 2)),
        error_of_run(rank, world, folder, "--model-parallel-size 2", "weight", Fault(of_weight, 0, 2)),
    ]


def test_the_line_names_rank_and_tensor(tmp_path: Path) -> None:
    write_text(tmp_path, 1000)
    first, second = run_ranks(errors_of_three_runs, 2, tmp_path)
    assert first == second  # All ranks raise the same error.
    for line, save in zip(first, ("data", "stages"), strict=False):
        assert line.startswith("2 steps in a row had a gradient that is not finite (loss scale 1, learning rate "), line
        assert f"the first such tensor is the gradient of {UP} on rank 1 (the state is in {tmp_path}/{save}/" in line
    assert f"the first such tensor is the weight of {DOWN} on rank 0" in first[2]
    for save, rank, samples in (("data", 1, 2), ("weight", 0, 4)):
        path = tmp_path / save / "incidents" / f"not_finite_0000004_rank_{rank:05d}.json"
        state = json.loads(path.read_text(), parse_constant=pytest.fail)  # JSON has no NaN.
        assert state["loss_scale"] == 1 and state["learning_rate"] > 0 and len(sum(state["samples"], [])) == samples
        assert state["norms"][UP]["weight"] > 0
    assert state["norms"][DOWN]["weight"] == "inf"
    (record, _) = (r for r in read_incidents(tmp_path / "data") if r["kind"] == "not finite")
    assert record["iteration"] == 4 and UP in record["text"]


def test_too_many_skipped_steps_end_the_run_between_log_lines(tmp_path: Path) -> None:
    write_text(tmp_path)
    flags = "--precision fp16 --loss-scale 2e9 --max-skipped-steps 3 --log-interval 1000 --train-iters 40"
    trainer = start(0, 1, tmp_path, flags)
    with pytest.raises(FloatingPointError, match="^3 steps in a row had a gradient that is not finite"):
        train(trainer)
    assert trainer.progress.iteration == 3 + READ_DELAY
    finish(trainer)
