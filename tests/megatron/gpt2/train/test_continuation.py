"""A run that goes on from a checkpoint says in one line how: bit-identical, within rounding, or as another training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.gpt2.train import run as run_module
from megatron.gpt2.train.checkpointing import load_run
from megatron.gpt2.train.continuation import COURSE, LAYOUT, ROUNDING, computed_by, how_it_goes_on
from tests.megatron.gpt2.train.training_runs import finish, start, steps, write_text

DROPOUT = ["--hidden-dropout", "0.1", "--attention-dropout", "0.1", "--global-batch-size", "4"]


def test_the_line_says_what_makes_it_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text(tmp_path)
    run = start(0, 1, str(tmp_path), DROPOUT)
    steps(run, 1)
    saved = run.save()
    finish(run)
    lines: list[str] = []
    monkeypatch.setattr(
        run_module,
        "load_run",
        lambda prepared, parallel, engine, log: load_run(prepared, parallel, engine, lines.append),
    )

    def said(*flags: str) -> str:
        lines.clear()
        finish(start(0, 1, str(tmp_path), [*DROPOUT, *flags]))
        assert lines[-1].startswith(f"continuing {saved}: ")
        return lines[-1].removeprefix(f"continuing {saved}: ")

    assert said() == "bit-identical to the run that wrote it"
    assert said("--precision", "bf16", "--ddp-bucket-size", "1000") == (
        "the same training within rounding (--precision bfloat16, was float32; --ddp-bucket-size 1000, was 25000000)"
    )
    assert said("--seed", "7", "--ddp-bucket-size", "1000") == "another training from here on (--seed 7, was 1234)"
    assert said("--no-load-rng") == "bit-identical to the run that wrote it"  # masks follow from the samples' numbers
    assert said("--micro-batch-size", "2") == "the same training within rounding (--micro-batch-size 2, was 4)"
    assert said("--dropout-rng", "torch") == "another training from here on (dropout draws other masks)"
    assert said("--no-load-optim", "--hidden-dropout", "0", "--attention-dropout", "0") == (
        "another training from here on (AdamW's moments start at zero; --hidden-dropout 0.0, was 0.1; "
        "--attention-dropout 0.0, was 0.1)"
    )
    run = start(0, 1, str(tmp_path), ["--dropout-rng", "torch", *DROPOUT, "--save", f"{tmp_path}/torch"])
    steps(run, 1)
    saved = run.save()
    finish(run)
    drawn = ["--dropout-rng", "torch", "--save", f"{tmp_path}/torch"]
    assert said(*drawn) == "bit-identical to the run that wrote it"
    for flags in (["--no-load-rng"], ["--micro-batch-size", "2"]):
        assert said(*drawn, *flags) == "another training from here on (dropout draws other masks)"


def test_each_fact_that_differs_is_named_and_one_that_is_missing_is_not() -> None:
    def facts(value: Any, parts: int | None = None) -> dict[str, Any]:
        made: dict[str, Any] = {
            "config": {"optimizer": {"lr_decay_iters": 9, "lr_decay_style": "cosine"}},
            "train_iters": 10,
        }
        for place in (*COURSE, *LAYOUT, *ROUNDING):
            *path, name = place.split(".")
            section = made
            for each in path:
                section = section.setdefault(each, {})
            section[name] = value
        made["config"]["parallel"]["exact_layouts"] = parts
        return made

    def with_other(place: str, parts: int | None = None) -> dict[str, Any]:
        changed = facts(1, parts)
        *path, name = place.split(".")
        section = changed
        for each in path:
            section = section[each]
        section[name] = 2
        return changed

    assert how_it_goes_on(facts(1), facts(1)) == "bit-identical to the run that wrote it"
    for parts in (None, 4):
        for place in (*COURSE, *LAYOUT, *ROUNDING):
            said = how_it_goes_on(with_other(place, parts), facts(1, parts))
            assert said.startswith(
                "another training from here on ("
                if place in COURSE
                else "bit-identical to the run"
                if place in LAYOUT and parts
                else "the same training within rounding ("
            ), place
    before = facts(1)
    del before["config"]["parallel"]["exact_layouts"]  # a checkpoint from before there was the flag
    for then, here, said in (
        (facts(1, 8), facts(1, 4), "4, was 8"),
        (facts(1), facts(1, 4), "4, was not given"),
        (before, facts(1, 4), "4, was not given"),
        (facts(1, 4), facts(1), "not given, was 4"),
    ):
        assert how_it_goes_on(then, here) == f"the same training within rounding (--exact-layouts {said})"
    assert how_it_goes_on(before, facts(1)) == "bit-identical to the run that wrote it"
    crafted: list[dict[str, Any]] = [{}, {"config": {}}, {"layout": 3, "computed_by": None}]
    for empty in crafted:
        assert how_it_goes_on(empty, facts(1)) == (
            "the same training; the checkpoint does not say by what it was computed"
        )


def test_a_longer_run_has_another_schedule_unless_its_decay_is_given() -> None:
    def facts(iterations: int, decay: int | None) -> dict[str, Any]:
        config: dict[str, dict[str, Any]] = {
            section: {
                place.split(".")[2]: 1
                for place in (*COURSE, *LAYOUT, *ROUNDING)
                if place.startswith(f"config.{section}.")
            }
            for section in ("train", "model", "data", "optimizer", "parallel")
        }
        config["parallel"]["exact_layouts"] = None
        config["optimizer"] |= {"lr_decay_iters": decay, "lr_decay_samples": None, "lr_decay_style": "cosine"}
        return {
            "config": config,
            "train_iters": iterations,
            "data_fingerprint": "",
            "global_batch_size": 1,
            "precision": "float32",
            "computed_by": computed_by(torch.device("cpu")),
            "layout": {"model_parallel_size": 1, "data_parallel_size": 1, "optimizer_is_sharded": False},
        }

    assert how_it_goes_on(facts(10, 10), facts(20, 10)) == "bit-identical to the run that wrote it"
    assert how_it_goes_on(facts(10, None), facts(20, None)) == (
        "another training from here on (--train-iters 20, was 10)"
    )
