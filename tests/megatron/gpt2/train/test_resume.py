"""Test that a repeated command and a run that stops and continues give bit-identical results, that a run continues in
another layout while its batch grows, and that a resumed run prints how its training differs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mpu
from megatron.gpt2.config import Config
from megatron.gpt2.dist.ranks import RankInfo
from megatron.gpt2.train import trainer as trainer_module
from megatron.gpt2.train.checkpointing import load_checkpoint
from megatron.gpt2.train.resume_equivalence import resume_equivalence
from tests.distributed import run_ranks
from tests.megatron.gpt2.train.training_runs import finish, make_context, snapshot, start, steps, write_text

SHARDED = "--use-distributed-optimizer"
DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"


def straight_twice_and_resumed(rank: int, world_size: int, folder: Path, flags: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name in ("straight", "again"):
        trainer = start(rank, world_size, folder, f"--save {folder}/{name} {flags}")
        assert torch.are_deterministic_algorithms_enabled() == ("--deterministic" in flags)
        results[name] = steps(trainer, 8), snapshot(trainer)
        finish(trainer)

    trainer = start(rank, world_size, folder, f"--save {folder}/resumed {flags}")
    first = steps(trainer, 4)
    trainer.checkpoints.save()
    steps(trainer, 1)  # Train while --async-save writes: a step must not change the checkpoint.
    trainer.checkpoints.finish()
    assert trainer.checkpoints.saved_iteration == 4
    finish(trainer)
    torch.manual_seed(99)  # The resumed run must not use this state of the generators.
    trainer = start(rank, world_size, folder, f"--save {folder}/resumed --load {folder}/resumed {flags}")
    assert trainer.progress.iteration == 4
    second = steps(trainer, 4)
    results["resumed"] = {key: first[key] + second[key] for key in first}, snapshot(trainer)
    finish(trainer)
    return results


LAYOUTS = [
    (2, 2, f"{SHARDED} --deterministic --dropout-rng torch"),
    (1, 2, f"{SHARDED} --cpu-offload-optimizer --precision bf16 --hidden-size 48 --ddp-bucket-size 10000"),
    (1, 1, "--async-save --precision bf16"),
    (1, 2, "--precision fp16 --initial-loss-scale 1e6 --loss-scale-window 4"),
]
MORE = [
    (2, 2, f"{SHARDED} --async-save --precision bf16"),
    (2, 2, ""),
    (1, 1, ""),
    (2, 1, "--precision bf16"),
]


@pytest.mark.parametrize(
    "model_parallel, data_parallel, flags",
    [*LAYOUTS, *(pytest.param(*layout, marks=pytest.mark.wide) for layout in MORE)],
)
def test_resume_is_bit_identical(tmp_path: Path, model_parallel: int, data_parallel: int, flags: str):
    write_text(tmp_path)
    flags = (
        f"{DROPOUT} --model-parallel-size {model_parallel} --global-batch-size 8 --micro-batch-size 2 "
        f"--lr-decay-style cosine --warmup 0.005 {flags}"
    )
    for results in run_ranks(straight_twice_and_resumed, model_parallel * data_parallel, tmp_path, flags):
        seen, tensors = results["straight"]
        clean = [loss for loss, skipped in zip(seen["loss"], seen["skipped"], strict=True) if not skipped]
        assert len(seen["loss"]) == 8 and clean[-1] < clean[0]
        for other in ("again", "resumed"):
            other_seen, other_tensors = results[other]
            # The loss of a skipped step may be NaN, and NaN is not equal to NaN, but the text "nan" is equal.
            assert repr(other_seen) == repr(seen), other
            assert other_tensors.keys() == tensors.keys()
            for name, tensor in tensors.items():
                assert torch.equal(other_tensors[name], tensor), (other, name)


def random_streams(rank: int, world_size: int, folder: Path) -> tuple[bytes, bytes]:
    """Return the states of torch's generator and of the tensor-parallel stream, after a step with dropout."""
    flags = f"{DROPOUT} --dropout-rng torch --save {folder}/streams --model-parallel-size {world_size // 2}"
    trainer = start(rank, world_size, folder, flags)
    steps(trainer, 1)
    finish(trainer)
    states = torch.get_rng_state(), mpu.get_cuda_rng_tracker().get_states()["model-parallel-rng"]
    return states[0].numpy().tobytes(), states[1].numpy().tobytes()


def test_torchs_generators_are_equal_only_on_ranks_that_share_activations(tmp_path: Path):
    write_text(tmp_path)
    default, tracked = zip(*run_ranks(random_streams, 4, tmp_path), strict=True)
    assert default[0] == default[1] != default[2] == default[3] and len(set(tracked)) == 4


def test_a_fresh_optimizer_resumes_bit_identically(tmp_path: Path):
    """After --no-load-optim, the optimizer has done fewer steps than the run, and a checkpoint saves both numbers. The
    run loads its weights from the saved fp32 masters."""
    write_text(tmp_path)

    def run(save: str, count: int, more: str = "") -> tuple[list[float], Tensor, Tensor]:
        """Return the losses, and the masters before and after `count` steps. Save the run."""
        trainer = start(0, 1, tmp_path, f"--precision bf16 --save {tmp_path}/{save} {more}")
        masters = torch.cat(trainer.state.buffer.masters)
        losses = steps(trainer, count)["loss"]
        trainer.checkpoints.save()
        finish(trainer)
        return losses, masters, torch.cat(trainer.state.buffer.masters)

    fresh = f"--load {tmp_path}/first --no-load-optim"
    saved = run("first", 5)[2]
    expected, loaded, end = run("straight", 6, fresh)
    assert torch.equal(loaded, saved)
    losses = run("stopped", 3, fresh)[0]
    more_losses, _, resumed_end = run("stopped", 3)
    assert losses + more_losses == expected and torch.equal(resumed_end, end)


PEAK = 1e-3
COMMON = (
    "--hidden-size 32 --hidden-dropout 0.1 --attention-dropout 0.1 --micro-batch-size 2 "
    "--lr-decay-style linear --override-opt-param-scheduler"
)
# The run has 5 steps of 4 samples, 2 steps of 8, and then steps of 12. The size changes at 18 and 36 samples. The
# learning rate falls linearly over 11 batches of 12 samples.
GROWING = f"{COMMON} --rampup-batch-size 4 4 36 --global-batch-size 12 --lr {PEAK} --lr-decay-iters 11"
# (number of steps, batch size, --lr and --lr-decay-iters that give the same learning rates with a constant batch size)
SEGMENTS = [(5, 4, PEAK, 33), (2, 8, PEAK * 38 / 33, 19), (3, 12, PEAK * 15 / 11, 15)]
TENSOR, STAGES = "--model-parallel-size 2", "--pipeline-model-parallel-size 2"
MOVED = {
    2: [SHARDED, TENSOR, f"{STAGES} --micro-batch-size 1"],
    4: [f"{TENSOR} {SHARDED}", "--model-parallel-size 4", f"{STAGES} {SHARDED}", f"{TENSOR} {STAGES}"],
}


def losses_after_resume(rank: int, world_size: int, folder: Path, layouts: Sequence[str]) -> list[list[float]]:
    """Return the losses after a checkpoint from the ramp-up, for each layout of `world_size` ranks."""
    losses = []
    for number, layout in enumerate(layouts):
        where = f"--load {folder}/growing --save {folder}/moved_{world_size}_{number}"
        trainer = start(rank, world_size, folder, f"{GROWING} {where} {layout}")
        progress = trainer.progress
        assert (progress.iteration, progress.consumed_samples, trainer.current_global_batch_size) == (6, 28, 8)
        losses.append(steps(trainer, 4)["loss"])
        finish(trainer)
    return losses


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.wide)])
def test_a_growing_batch_equals_constant_runs_and_resumes_in_other_layouts(tmp_path: Path, world_size: int):
    write_text(tmp_path)
    trainer = start(0, 1, tmp_path, f"{GROWING} --save {tmp_path}/growing")
    assert (trainer.context.global_batch_size, trainer.context.num_microbatches) == (12, 6)
    seen = steps(trainer, 6)
    assert trainer.checkpoints.save() is not None
    seen = {key: seen[key] + after for key, after in steps(trainer, 4).items()}
    assert trainer.progress.consumed_samples == 5 * 4 + 2 * 8 + 3 * 12
    finish(trainer)
    before = [0, 4, 8, 12, 16, 20, 28, 36, 48, 60]
    assert seen["rate"] == pytest.approx([PEAK * (1 - consumed / 12 / 11) for consumed in before], rel=1e-6)

    by_hand = []
    for number, (count, size, lr, end) in enumerate(SEGMENTS):
        flags = f"{COMMON} --global-batch-size {size} --lr {lr} --lr-decay-iters {end} --save {tmp_path}/{number}"
        trainer = start(0, 1, tmp_path, flags + (f" --load {tmp_path}/{number - 1}" if number else ""))
        by_hand += steps(trainer, count)["loss"]
        assert trainer.checkpoints.save() is not None
        finish(trainer)
    assert seen["loss"] == pytest.approx(by_hand, rel=0, abs=1e-6)

    again, without_moments = losses_after_resume(0, 1, tmp_path, ["", "--no-load-optim"])
    assert again == seen["loss"][6:] and again[1:] != pytest.approx(without_moments[1:], rel=0, abs=1e-3)
    for losses in run_ranks(losses_after_resume, world_size, tmp_path, MOVED[world_size]):
        for after in losses:
            assert after == pytest.approx(again, rel=0, abs=1e-5)


BEFORE = "--global-batch-size 8 --lr-decay-style cosine --min-lr 1e-5"
WITH_DROPOUT = f"{DROPOUT} --global-batch-size 4"


def test_the_line_names_each_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text(tmp_path)
    trainer = start(0, 1, tmp_path, WITH_DROPOUT)
    steps(trainer, 1)
    saved = trainer.checkpoints.save()
    finish(trainer)
    lines: list[str] = []
    monkeypatch.setattr(
        trainer_module,
        "load_checkpoint",
        lambda context, parallel, state, log: load_checkpoint(context, parallel, state, lines.append),
    )

    def said(flags: str = "") -> str:
        lines.clear()
        finish(start(0, 1, tmp_path, f"{WITH_DROPOUT} {flags}"))
        assert lines[-1].startswith(f"continuing {saved}: ")
        return lines[-1].removeprefix(f"continuing {saved}: ")

    assert said() == "bit-identical to the run that wrote it"
    assert said("--precision bf16 --ddp-bucket-size 1000") == (
        "the same training within rounding (--precision bf16, was fp32; --ddp-bucket-size 1000, was 25000000)"
    )
    assert said("--seed 7 --ddp-bucket-size 1000") == "a different training from here on (--seed 7, was 1234)"
    assert (
        said("--no-load-rng") == "bit-identical to the run that wrote it"
    )  # The masks depend on sample ids, not on random streams.
    assert said("--micro-batch-size 2") == "the same training within rounding (--micro-batch-size 2, was 4)"
    assert said("--dropout-rng torch") == "a different training from here on (dropout draws other masks)"
    assert said("--no-load-optim --hidden-dropout 0") == (
        "a different training from here on (the optimizer's moments start at zero; --hidden-dropout 0.0, was 0.1)"
    )
    drawn = f"--dropout-rng torch --save {tmp_path}/torch"
    trainer = start(0, 1, tmp_path, f"{WITH_DROPOUT} {drawn}")
    steps(trainer, 1)
    saved = trainer.checkpoints.save()
    finish(trainer)
    assert said(drawn) == "bit-identical to the run that wrote it"
    for flags in ("--no-load-rng", "--micro-batch-size 2"):
        assert said(f"{drawn} {flags}") == "a different training from here on (dropout draws other masks)"


def test_layout_length_and_unknown_settings() -> None:
    same, rounding = "bit-identical to the run that wrote it", "the same training within rounding"
    optimizer = {"lr_decay_iters": None, "lr_decay_samples": None, "lr_decay_style": "cosine"}
    layout, other_layout = ({"layout": {"tensor_model_parallel_size": size}} for size in (1, 2))
    settings = {"train_iters": 10, "computed_by": {"torch": "2", "threads": 1}, **layout}
    old, run, exact = (
        {**settings, "config": {"optimizer": optimizer, "parallel": parallel}}
        for parallel in ({"sequence_parallel": False}, {"exact_layouts": None}, {"exact_layouts": 4})
    )
    assert resume_equivalence({**run, **other_layout}, run).startswith(rounding)
    assert resume_equivalence({**exact, **other_layout}, exact) == same
    assert resume_equivalence(run, {**run, "train_iters": 20}).endswith("(--train-iters 20, was 10)")
    # The version that wrote the checkpoint `old` did not have the flag --exact-layouts.
    assert resume_equivalence(old, exact) == f"{rounding} (--exact-layouts 4, was not given)"
    assert resume_equivalence(old, run) == same
    # A checkpoint of another program may lack a flag, whose value is then unknown.
    for unknown in ({}, {"layout": 3, "computed_by": None}, {**old, "converted_from": "dcp", "computed_by": None}):
        assert resume_equivalence(unknown, exact) == (
            "the same training; the checkpoint does not say which software and hardware computed it"
        )


def test_a_schedule_that_has_ended_gives_a_warning(tmp_path: Path) -> None:
    write_text(tmp_path)
    ended = f"{BEFORE} --lr-decay-iters 1"
    trainer = start(0, 1, tmp_path, ended)
    steps(trainer, 1)
    assert trainer.checkpoints.save() is not None
    finish(trainer)
    for flags, warnings in ((BEFORE, 1), (ended, 0), (f"--load {tmp_path}/save --finetune --save {tmp_path}/tuned", 0)):
        lines: list[str] = []
        make_context(tmp_path, flags, RankInfo(), lines.append)
        assert "\n".join(lines).count("WARNING: the learning rate stays at --min-lr 1e-05: ") == warnings


@pytest.mark.parametrize(
    "precision, threads, section, change, expected",
    [
        ("float16", 1, "optimizer", {"hysteresis": 1}, "different training from here on (--hysteresis 1, was 2)"),
        ("bfloat16", 1, "optimizer", {"hysteresis": 1}, "bit-identical"),
        ("float32", 1, "parallel", {"shard_gradients": True}, "rounding (--shard-gradients True, was False)"),
        (
            "float32",
            None,
            "train",
            {"recompute_granularity": "selective"},
            "rounding (--recompute-granularity selective",
        ),
        ("float32", 1, "train", {"recompute_granularity": "selective"}, "bit-identical"),
        ("float32", None, "train", {}, "rounding (a GPU without --deterministic)"),
    ],
)
def test_flags_that_matter_in_one_precision_or_on_one_device(
    precision: str, threads: int | None, section: str, change: dict[str, Any], expected: str
) -> None:
    """Only runs on a CPU store their number of threads."""
    config = Config().as_dict()
    saved = {"train_iters": 10, "precision": precision, "computed_by": {"threads": threads}, "config": config}
    changed = {**saved, "config": {**config, section: {**config[section], **change}}}
    assert expected in resume_equivalence(saved, changed)
    fixed = {**saved, "config": {**config, "train": {**config["train"], "deterministic": True}}}
    assert resume_equivalence(fixed, fixed) == "bit-identical to the run that wrote it"
