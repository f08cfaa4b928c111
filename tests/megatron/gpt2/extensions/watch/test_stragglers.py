"""The warning names a slow rank and the slow part of its step, and not the ranks that wait for it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import mpu
from megatron.gpt2.extensions.watch.stragglers import StragglerDetector
from megatron.gpt2.monitor.incidents import read_incidents
from megatron.gpt2.monitor.timers import TIMER_ORDER
from megatron.gpt2.train.loop import train
from tests.distributed import run_ranks
from tests.faults.injector import Fault, plant, slow
from tests.megatron.gpt2.train.training_runs import finish, start, write_text


def test_a_warning_is_logged_once_after_two_lines() -> None:
    times = {"forward": [100, 100, 160, 101], "data loader": [0, 0, 0, 2], "batch generator": [1, 1, 1, 3]}
    parallel = mpu.ParallelState(data_parallel_size=2, tensor_model_parallel_size=2)
    slow = StragglerDetector(parallel, {rank: "ab"[rank // 2] for rank in range(4)})

    def lines(slow: StragglerDetector = slow) -> list[str]:
        return slow.warnings([[times.get(name, [0] * 4)[rank] for name in TIMER_ORDER] for rank in range(4)], 200.0)

    assert lines() == []
    assert lines() == [
        'WARNING: rank 2 (b) takes 60 ms longer in "forward" than the other ranks of its stage, 160 ms per step '
        "instead of 100, for 2 log lines: check its machine"
    ]
    assert lines() == []
    times["forward"][2], times["data loader"][3], times["batch generator"][3] = 110, 80, 81
    assert lines() == []
    (line,) = lines()
    assert 'rank 3 (b) takes 80 ms longer in "data loader"' in line
    stages = StragglerDetector(mpu.ParallelState(pipeline_model_parallel_size=4), {})
    assert lines(stages) == lines(stages) == [], "each stage has different work"


def slow_optimizer(rank: int, world: int, folder: str) -> list[str]:
    plant(Fault(partial(slow, part="optimizer", seconds=0.2), rank=1, step=0))
    trainer = start(
        rank,
        world,
        folder,
        (
            "--num-layers 1 --hidden-size 32 --micro-batch-size 1 --global-batch-size 3 --log-straggler "
            "--log-interval 2 --train-iters 6"
        ).split(),
    )
    train(trainer)
    finish(trainer)
    return [record["text"] for record in read_incidents(f"{folder}/save") if record["kind"] == "slow"]


def test_the_slow_rank_is_named(tmp_path: Path) -> None:
    write_text(tmp_path, 1000)
    texts = run_ranks(slow_optimizer, 3, str(tmp_path))[0]
    of_one = [text for text in texts if "rank 1 takes" in text and 'longer in "optimizer"' in text]
    assert of_one and 190 < int(of_one[0].split(" takes ")[1].split(" ms")[0]) < 2000, texts
    assert "WARNING: rank 1 takes" in (tmp_path / "save" / "history.jsonl").read_text()
