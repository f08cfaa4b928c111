"""A run that goes on from a checkpoint says in one line how: bit-identical, within rounding, or as another training; and
in a line each what changes with its flags."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.gpt2.dist.ranks import Ranks
from megatron.gpt2.train import run as run_module
from megatron.gpt2.train.checkpointing import load_run
from megatron.gpt2.train.continuation import COURSE, LAYOUT, LINES, ROUNDING, differences, how_it_goes_on
from tests.megatron.gpt2.train.training_runs import finish, prepared, start, steps, write_text

BEFORE = "--hidden-dropout 0.1 --attention-dropout 0.1 --seed 7 --global-batch-size 8".split()
ALIKE = [*BEFORE, "--precision", "fp32"]
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1 --global-batch-size 4".split()


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
        "the same training within rounding (--precision bf16, was fp32; --ddp-bucket-size 1000, was 25000000)"
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
    def facts(value: Any, parts: int | None = None, decay: int | None = 9, iterations: int = 10) -> dict[str, Any]:
        made: dict[str, Any] = {"config": {}, "train_iters": iterations}
        for place in (*COURSE, *LAYOUT, *ROUNDING):
            *path, name = place.split(".")
            section = made
            for each in path:
                section = section.setdefault(each, {})
            section[name] = value
        made["config"]["parallel"]["exact_layouts"] = parts
        made["config"]["optimizer"] |= {"lr_decay_iters": decay, "lr_decay_samples": None, "lr_decay_style": "cosine"}
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
    # A longer run has another schedule, unless its decay is given.
    assert how_it_goes_on(facts(1), facts(1, iterations=20)) == "bit-identical to the run that wrote it"
    assert how_it_goes_on(facts(1, decay=None), facts(1, decay=None, iterations=20)) == (
        "another training from here on (--train-iters 20, was 10)"
    )
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


def told(folder: Path, flags: list[str]) -> list[str]:
    """The lines at the start of a run with these flags that are about its checkpoint."""
    lines: list[str] = []
    prepared(folder, flags, Ranks(), lines.append)
    return [line for line in lines if "checkpoint" in line]


def test_each_difference_has_its_line(tmp_path: Path) -> None:
    write_text(tmp_path)
    run = start(0, 1, str(tmp_path), BEFORE)
    steps(run, 1)
    assert run.save() is not None
    finish(run)

    assert told(tmp_path, ALIKE) == []
    assert told(tmp_path, ["--load", f"{tmp_path}/save", "--finetune", "--save", f"{tmp_path}/tuned"]) == []
    assert told(
        tmp_path,
        [
            *BEFORE,
            *"--seed 1 --hidden-dropout 0 --attention-dropout 0.2 --micro-batch-size 2 --precision bf16".split(),
        ],
    ) == [
        "WARNING: --seed 1 here, 7 in the checkpoint: samples come in another order from here on, so that this epoch "
        "reads some of them twice and leaves others out",
        "WARNING: --hidden-dropout 0.0 here, 0.1 in the checkpoint: the training loss jumps, and is not comparable "
        "with the one before",
        "WARNING: --attention-dropout 0.2 here, 0.1 in the checkpoint: the training loss jumps, and is not comparable "
        "with the one before",
        "--precision bf16 here, fp32 in the checkpoint: masters and moments go on in fp32; what is computed is rounded "
        "in another way",
        "--micro-batch-size 2 here, 4 in the checkpoint: speed, memory and rounding change",
    ]
    assert [
        line.partition(":")[0] for line in told(tmp_path, [*ALIKE, *"--global-batch-size 4 --split 80,20".split()])
    ] == ["WARNING"] * 2
    assert told(tmp_path, [*ALIKE, *"--rampup-batch-size 4 4 24".split()]) == [
        "WARNING: the batch grows in another way than in the checkpoint: --rampup-batch-size 4 4 24 here, not at all "
        "there"
    ]


def test_what_a_checkpoint_does_not_say_is_no_difference() -> None:
    here = {"config": {"train": {"seed": 1, "micro_batch_size": 4}, "model": {"hidden_dropout": 0.1}}}
    facts: list[dict[str, Any]] = [{}, {"config": {}}, {"config": {"train": 1}}]
    for then in facts:
        assert list(differences(then, here)) == []
    assert len(list(differences({"config": {"train": {"seed": 2}}}, here))) == 1
    assert len(LINES) == 8
