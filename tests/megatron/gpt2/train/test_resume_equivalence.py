"""A resumed run prints one line: bit-identical, equal within rounding, or a different training. It also prints a line
for each changed setting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.gpt2.dist.ranks import RankInfo
from megatron.gpt2.train import trainer as trainer_module
from megatron.gpt2.train.checkpointing import load_checkpoint
from megatron.gpt2.train.resume_equivalence import changed_settings, resume_equivalence
from tests.megatron.gpt2.train.training_runs import finish, make_context, start, steps, write_text

BEFORE = "--hidden-dropout 0.1 --attention-dropout 0.1 --seed 7 --global-batch-size 8".split()
BEFORE += "--lr-decay-style cosine --min-lr 1e-5".split()
ALIKE = [*BEFORE, "--precision", "fp32"]
DECAY = ["--lr-decay-iters", "1"]
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1 --global-batch-size 4".split()


def test_the_line_names_each_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text(tmp_path)
    trainer = start(0, 1, str(tmp_path), DROPOUT)
    steps(trainer, 1)
    saved = trainer.checkpoints.save()
    finish(trainer)
    lines: list[str] = []
    monkeypatch.setattr(
        trainer_module,
        "load_checkpoint",
        lambda context, parallel, state, log: load_checkpoint(context, parallel, state, lines.append),
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
    assert said("--seed", "7", "--ddp-bucket-size", "1000") == "a different training from here on (--seed 7, was 1234)"
    assert said("--no-load-rng") == "bit-identical to the run that wrote it"  # Masks depend on the sample indices.
    assert said("--micro-batch-size", "2") == "the same training within rounding (--micro-batch-size 2, was 4)"
    assert said("--dropout-rng", "torch") == "a different training from here on (dropout draws other masks)"
    assert said("--no-load-optim", "--hidden-dropout", "0", "--attention-dropout", "0") == (
        "a different training from here on (the optimizer's moments start at zero; --hidden-dropout 0.0, was 0.1; "
        "--attention-dropout 0.0, was 0.1)"
    )
    trainer = start(0, 1, str(tmp_path), ["--dropout-rng", "torch", *DROPOUT, "--save", f"{tmp_path}/torch"])
    steps(trainer, 1)
    saved = trainer.checkpoints.save()
    finish(trainer)
    drawn = ["--dropout-rng", "torch", "--save", f"{tmp_path}/torch"]
    assert said(*drawn) == "bit-identical to the run that wrote it"
    for flags in (["--no-load-rng"], ["--micro-batch-size", "2"]):
        assert said(*drawn, *flags) == "a different training from here on (dropout draws other masks)"


def test_length_layout_and_unknown_settings() -> None:
    def metadata(
        parts: int | None = None, decay: int | None = 9, iterations: int = 10, tensor: int = 1
    ) -> dict[str, Any]:
        optimizer = {"lr_decay_iters": decay, "lr_decay_samples": None, "lr_decay_style": "cosine"}
        config = {"parallel": {"exact_layouts": parts, "sequence_parallel": False}, "optimizer": optimizer}
        layout, computed_by = {"tensor_model_parallel_size": tensor}, {"torch": "2"}
        return {"config": config, "train_iters": iterations, "computed_by": computed_by, "layout": layout}

    same, rounding = "bit-identical to the run that wrote it", "the same training within rounding"
    assert resume_equivalence(metadata(), metadata()) == same
    assert resume_equivalence(metadata(tensor=2), metadata()).startswith(rounding)
    assert resume_equivalence(metadata(4, tensor=2), metadata(4)) == same
    # A longer run has a different learning rate schedule, unless the decay is given.
    assert resume_equivalence(metadata(), metadata(iterations=20)) == same
    assert resume_equivalence(metadata(decay=None), metadata(decay=None, iterations=20)) == (
        "a different training from here on (--train-iters 20, was 10)"
    )
    before = metadata()
    del before["config"]["parallel"]["exact_layouts"]  # The checkpoint is older than the flag.
    for then, here, said in (
        (metadata(8), metadata(4), "4, was 8"),
        (before, metadata(4), "4, was not given"),
        (metadata(4), metadata(), "not given, was 4"),
    ):
        assert resume_equivalence(then, here) == f"{rounding} (--exact-layouts {said})"
    assert resume_equivalence(before, metadata()) == same
    crafted: list[dict[str, Any]] = [{}, {"config": {}}, {"layout": 3, "computed_by": None}]
    for empty in crafted:
        assert resume_equivalence(empty, metadata()) == (
            "the same training; the checkpoint does not say which software and hardware computed it"
        )
        assert list(changed_settings(empty, metadata())) == []


def checkpoint_lines(folder: Path, flags: list[str]) -> list[str]:
    """Return the lines about the checkpoint that a run with these flags prints at its start."""
    lines: list[str] = []
    make_context(folder, flags, RankInfo(), lines.append)
    return [line for line in lines if "checkpoint" in line]


def test_each_changed_setting_has_a_line(tmp_path: Path) -> None:
    write_text(tmp_path)
    trainer = start(0, 1, str(tmp_path), [*BEFORE, *DECAY])
    steps(trainer, 1)
    assert trainer.checkpoints.save() is not None
    finish(trainer)

    assert checkpoint_lines(tmp_path, [*ALIKE, *DECAY]) == []
    assert checkpoint_lines(tmp_path, ALIKE)[1:] == [
        "WARNING: the learning rate stays at --min-lr 1e-05: the checkpoint's schedule ends at iteration 1; "
        "--override-opt-param-scheduler with --lr and --lr-decay-iters gives a new one"
    ]
    assert checkpoint_lines(tmp_path, ["--load", f"{tmp_path}/save", "--finetune", "--save", f"{tmp_path}/tuned"]) == []
    assert checkpoint_lines(
        tmp_path,
        [
            *BEFORE,
            *DECAY,
            *"--seed 1 --hidden-dropout 0 --attention-dropout 0.2 --micro-batch-size 2 --precision bf16".split(),
        ],
    ) == [
        "WARNING: --seed 1 here, 7 in the checkpoint: samples have a different order from here on, so this epoch "
        "reads some of them twice and leaves others out",
        "WARNING: --hidden-dropout 0.0 here, 0.1 in the checkpoint: the training loss jumps and is not comparable "
        "with the earlier one",
        "WARNING: --attention-dropout 0.2 here, 0.1 in the checkpoint: the training loss jumps and is not comparable "
        "with the earlier one",
        "--precision bf16 here, fp32 in the checkpoint: masters and moments stay in fp32; the computation is rounded "
        "differently",
        "--micro-batch-size 2 here, 4 in the checkpoint: speed, memory and rounding change",
    ]
    assert [
        line.partition(":")[0]
        for line in checkpoint_lines(tmp_path, [*ALIKE, *DECAY, *"--global-batch-size 4 --split 80,20".split()])
    ] == ["WARNING"] * 2
    assert checkpoint_lines(tmp_path, [*ALIKE, *DECAY, *"--rampup-batch-size 4 4 24".split()]) == [
        "WARNING: the batch grows differently than in the checkpoint: --rampup-batch-size 4 4 24 here, not at all there"
    ]
    # A file of another program without a seed does not have the default seed.
    converted = {"converted_from": "torch_dist", "config": {"train": {"micro_batch_size": 4}}}
    assert not [*changed_settings(converted, {"config": {"train": {"seed": 1, "micro_batch_size": 4}}})]
