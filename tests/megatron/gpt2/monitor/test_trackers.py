"""Test TensorBoard and Weights & Biases (offline), and errors if they are not installed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron.gpt2.config import CheckpointConfig, Config, TrainConfig
from megatron.gpt2.monitor.log_lines import EvaluationRecord
from megatron.gpt2.monitor.run_log import RunLog, open_metric_writers
from tests.megatron.gpt2.monitor.test_log_lines import record


def config(folder: Path, **train: Any) -> Config:
    return Config(train=TrainConfig(**train), checkpoint=CheckpointConfig(save=str(folder / "gpt2")))


def log_two(config: Config, folder: Path, iteration: int = 0) -> None:
    metric_writers = open_metric_writers(config, start_iteration=iteration, active=True)
    log = RunLog(folder / "gpt2", train_iters=20, start_iteration=iteration, metric_writers=metric_writers)
    log.record(record(iteration + 10))
    log.record(EvaluationRecord(iteration + 10, "valid", 2.0))
    log.close()


def test_tensorboard(tmp_path: Path) -> None:
    log_two(config(tmp_path, tensorboard_dir=str(tmp_path / "events")), tmp_path)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    assert events.Scalars("lm_loss")[0].value == pytest.approx(8.969456)
    assert events.Scalars("valid/lm_loss")[0].step == 10


@mock.patch.dict(os.environ)  # wandb sets a variable.
def test_weights_and_biases_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A continued run keeps its id in Weights & Biases."""
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    log_two(config(tmp_path, wandb_project="gpt2"), tmp_path)
    name = (tmp_path / "gpt2" / "wandb_run_id.txt").read_text().strip()
    again = config(tmp_path, wandb_project="gpt2", wandb_exp_name="my-name", wandb_save_dir=str(tmp_path / "other"))
    log_two(again, tmp_path, iteration=10)
    for folder, word in (("gpt2", b"valid/lm_loss"), ("other", b"my-name")):
        (path,) = (tmp_path / folder).glob(f"wandb/offline-run-*-{name}/run-{name}.wandb")
        assert word in path.read_bytes()


def test_an_error_of_wandb_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")

    def refuse(**settings: Any) -> None:
        raise wandb.errors.UsageError("No API key configured")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(ValueError, match="--wandb-project gpt2: No API key configured .WANDB_MODE=offline"):
        open_metric_writers(config(tmp_path, wandb_project="gpt2"), start_iteration=0, active=True)


def test_a_missing_library_is_an_error_on_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for flag, line in (
        ("tensorboard_dir", "--tensorboard-dir needs tensorboard: pip"),
        ("wandb_project", "needs wandb"),
    ):
        with pytest.raises(ValueError, match=line):
            open_metric_writers(config(tmp_path, **{flag: "x"}), start_iteration=0, active=False)
