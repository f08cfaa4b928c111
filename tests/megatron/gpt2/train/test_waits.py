"""Between log lines, training reads only values from the device that are a few steps old."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.gpt2.optimizer.optimizer import READ_DELAY, AsyncScalar
from megatron.gpt2.train.loop import train
from megatron.gpt2.train.train_step import train_step
from tests.megatron.gpt2.train.training_runs import finish, start, write_text

READS = {"_local_scalar_dense", "is_nonzero", "item", "equal"}  # operations that return a number to the host


class ReadCounter(TorchDispatchMode):
    """Counts reads of numbers, by the function of this project that reads."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.overloadpacket.__name__ in READS:
            ours = [frame for frame in traceback.extract_stack()[:-1] if "site-packages" not in frame.filename]
            self.seen[f"{Path(ours[-1].filename).name}:{ours[-1].name}"] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "flags",
    [
        "--lr-decay-style cosine --warmup 0.01",
        "--precision fp16 --hidden-dropout 0.1 --attention-dropout 0.1 --recompute-granularity full",
        "--eod-mask-loss --reset-position-ids --clip-grad 0",
    ],
)
def test_a_step_reads_no_number(tmp_path: Path, flags: str) -> None:
    write_text(tmp_path)
    trainer = start(0, 1, tmp_path, f"--global-batch-size 8 {flags}")
    with ReadCounter() as reads:
        for _ in range(2):
            train_step(trainer)
    finish(trainer)
    # On a CPU these check whether ids are in the vocabulary and whether a gradient is 1. On a GPU they read nothing.
    assert set(reads.seen) <= {"partition.py:check_ids", "cross_entropy.py:backward"}, reads.seen


def test_async_scalar() -> None:
    late, value = AsyncScalar(torch.device("cpu")), torch.zeros((), dtype=torch.int64)
    read = []
    for step in range(1, 3 * READ_DELAY):
        value.fill_(10 * step)
        read.append(late(value))
    assert read == [0] * READ_DELAY + [10 * step for step in range(1, 2 * READ_DELAY)]


def test_too_many_skipped_steps_end_the_run_between_log_lines(tmp_path: Path) -> None:
    write_text(tmp_path)
    flags = "--precision fp16 --loss-scale 2e9 --max-skipped-steps 3 --log-interval 1000 --train-iters 40"
    trainer = start(0, 1, tmp_path, flags)
    with pytest.raises(FloatingPointError, match="^3 steps in a row had a gradient that is not finite"):
        train(trainer)
    assert trainer.progress.iteration == 3 + READ_DELAY
    finish(trainer)
