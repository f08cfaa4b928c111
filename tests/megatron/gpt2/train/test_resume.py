"""Test that the same command gives bit-identical results again, and so does a run that stops after 4 of 8 steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import mpu
from megatron.gpt2.train.train_step import train_step
from megatron.gpt2.train.trainer import Trainer
from tests.distributed import run_ranks
from tests.megatron.gpt2.train.training_runs import finish, snapshot, start, steps, write_text

SHARDED = "--use-distributed-optimizer"
DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"


def straight_twice_and_resumed(rank: int, world_size: int, folder: str, flags: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name in ("straight", "again"):
        trainer = start(rank, world_size, folder, f"--save {folder}/{name} {flags}")
        assert torch.are_deterministic_algorithms_enabled() == ("--deterministic" in flags)
        results[name] = steps(trainer, 8), snapshot(trainer)
        finish(trainer)

    trainer = start(rank, world_size, folder, f"--save {folder}/resumed {flags}")
    first = steps(trainer, 4)
    trainer.checkpoints.save()
    steps(trainer, 1)  # --async-save is still writing; this step must not change what it saves.
    trainer.checkpoints.finish()
    assert trainer.checkpoints.saved_iteration == 4
    finish(trainer)
    torch.manual_seed(99)  # Changes of the generators before the resume must not matter.
    trainer = start(rank, world_size, folder, f"--save {folder}/resumed --load {folder}/resumed {flags}")
    assert trainer.progress.iteration == 4
    second = steps(trainer, 4)
    results["resumed"] = {key: first[key] + second[key] for key in first}, snapshot(trainer)
    finish(trainer)
    return results


LAYOUTS = [
    (2, 2, f"{SHARDED} --deterministic"),
    (1, 2, f"{SHARDED} --cpu-offload-optimizer --precision bf16 --hidden-size 48 --ddp-bucket-size 10000"),
    (1, 1, "--async-save --precision bf16"),
    (1, 2, "--precision fp16 --initial-loss-scale 1e6 --loss-scale-window 4"),
]
MORE = [
    (2, 2, f"{SHARDED} --async-save --precision bf16"),
    (2, 2, ""),
    (1, 2, f"{SHARDED} --precision bf16"),
    (1, 1, ""),
    (2, 1, ""),
    (1, 2, ""),
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
    for results in run_ranks(straight_twice_and_resumed, model_parallel * data_parallel, str(tmp_path), flags):
        seen, tensors = results["straight"]
        clean = [loss for loss, skipped in zip(seen["loss"], seen["skipped"], strict=True) if not skipped]
        assert len(seen["loss"]) == 8 and clean[-1] < clean[0]
        for other in ("again", "resumed"):
            other_seen, other_tensors = results[other]
            # The test compares repr, because the NaN of a skipped step is not equal to itself.
            assert repr(other_seen) == repr(seen), other
            assert other_tensors.keys() == tensors.keys()
            for name, tensor in tensors.items():
                assert torch.equal(other_tensors[name], tensor), (other, name)


def masks(rank: int, world_size: int, folder: str) -> tuple[list[bool], list[bool]]:
    """Return the elements that the first two dropouts of a step drop: of the embedding, and of a layer's attention."""
    flags = f"{DROPOUT} --dropout-rng torch --save {folder}/masks --model-parallel-size {world_size // 2}"
    trainer = start(rank, world_size, folder, flags)
    own_seed = 1234 + (trainer.parallel.data_parallel_rank << 16)
    assert torch.initial_seed() == own_seed
    tracked = torch.Generator().manual_seed(own_seed + 2718 + trainer.parallel.tensor_model_parallel_rank).get_state()
    assert torch.equal(mpu.get_cuda_rng_tracker().get_states()["model-parallel-rng"], tracked)
    drawn: list[torch.Tensor] = []
    dropout = F.dropout

    def spy(x: torch.Tensor, p: float) -> torch.Tensor:
        y = dropout(x, p)
        drawn.append((y == 0) & (x != 0))
        return y

    F.dropout = spy  # type: ignore[assignment]
    try:
        train_step(trainer)
    finally:
        F.dropout = dropout
    finish(trainer)
    return drawn[0].flatten().tolist()[:400], drawn[1].flatten().tolist()[:400]


def test_masks_of_torchs_generators_differ_only_between_data_parallel_ranks(tmp_path: Path):
    write_text(tmp_path)
    four = run_ranks(masks, 4, str(tmp_path))
    assert all(any(mask) for masks_of_rank in four for mask in masks_of_rank)
    assert four[0] == four[1] and four[2] == four[3], "ranks that share layers hold the same activations"
    assert four[0][0] != four[2][0] and four[0][1] != four[2][1]


def test_a_fresh_optimizer_resumes_bit_identically(tmp_path: Path):
    """After --no-load-optim the moments have seen fewer steps than the learning rate schedule. Both counts are saved.
    The weights are loaded from the masters."""
    write_text(tmp_path)
    trainer = start(0, 1, tmp_path, f"--precision bf16 --save {tmp_path}/first")
    steps(trainer, 5)
    masters = torch.cat(trainer.state.buffer.masters)
    trainer.checkpoints.save()
    finish(trainer)

    def second(save: str, more: str = "") -> Trainer:
        return start(0, 1, tmp_path, f"--precision bf16 --save {tmp_path}/{save} {more}")

    fresh = f"--load {tmp_path}/first --no-load-optim"
    straight = second("straight", fresh)
    assert torch.equal(torch.cat(straight.state.buffer.masters), masters)
    expected = steps(straight, 6)["loss"]
    finish(straight)
    stopped = second("stopped", fresh)
    seen = steps(stopped, 3)["loss"]
    stopped.checkpoints.save()
    finish(stopped)
    resumed = second("stopped")
    assert resumed.progress.iteration == 8
    assert seen + steps(resumed, 3)["loss"] == expected
    assert torch.equal(torch.cat(resumed.state.buffer.masters), torch.cat(straight.state.buffer.masters))
    finish(resumed)
