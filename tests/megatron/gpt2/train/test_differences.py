"""A run that goes on with other flags says what changes, in one line each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.gpt2.config.arguments import parse
from megatron.gpt2.dist.ranks import Ranks
from megatron.gpt2.train.continuation import LINES, differences
from megatron.gpt2.train.setup import prepare_run
from tests.megatron.gpt2.train.training_runs import SMALL, finish, start, steps, write_text

BEFORE = ["--hidden-dropout", "0.1", "--attention-dropout", "0.1", "--seed", "7", "--global-batch-size", "8"]
ALIKE = [*BEFORE, "--precision", "fp32"]


def said(folder: Path, flags: list[str]) -> list[str]:
    """The lines at the start of a run with these flags that are about its checkpoint."""
    lines: list[str] = []
    prepare_run(
        parse(
            [
                *SMALL,
                "--train-data",
                f"{folder}/text.txt",
                "--data-cache-path",
                f"{folder}/cache",
                "--save",
                f"{folder}/save",
                *flags,
            ]
        ),
        Ranks(),
        lines.append,
    )
    return [line for line in lines if "checkpoint" in line]


def test_each_difference_has_its_line(tmp_path: Path) -> None:
    write_text(tmp_path)
    run = start(0, 1, str(tmp_path), BEFORE)
    steps(run, 1)
    assert run.save() is not None
    finish(run)

    assert said(tmp_path, ALIKE) == []
    assert said(tmp_path, ["--load", f"{tmp_path}/save", "--finetune", "--save", f"{tmp_path}/tuned"]) == []
    assert said(
        tmp_path,
        [
            *BEFORE,
            "--seed",
            "1",
            "--hidden-dropout",
            "0",
            "--attention-dropout",
            "0.2",
            "--micro-batch-size",
            "2",
            "--precision",
            "bf16",
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
        line.partition(":")[0] for line in said(tmp_path, [*ALIKE, "--global-batch-size", "4", "--split", "80,20"])
    ] == ["WARNING"] * 2
    assert said(tmp_path, [*ALIKE, "--rampup-batch-size", "4", "4", "24"]) == [
        "WARNING: the batch grows in another way than in the checkpoint: --rampup-batch-size 4 4 24 here, not at all "
        "there"
    ]


def test_what_a_checkpoint_does_not_say_is_no_difference() -> None:
    here = {"config": {"train": {"seed": 1, "micro_batch_size": 4}, "model": {"hidden_dropout": 0.1}}}
    facts: list[dict[str, Any]] = [{}, {"config": {}}, {"config": {"train": 1}}, {"config": {"train": {"seed": None}}}]
    for then in facts:
        assert list(differences(then, here)) == []
    assert len(list(differences({"config": {"train": {"seed": 2}}}, here))) == 1
    assert len(LINES) == 8
