"""A rank that takes longer than the others is named with the part of the step; who waits for it is not."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import mpu
from megatron.gpt2.extensions.watch.slow_ranks import SlowRanks
from megatron.gpt2.monitor.incidents import read_incidents
from megatron.gpt2.monitor.timers import NAMES
from megatron.gpt2.train.loop import train
from tests.distributed import run_ranks
from tests.faults.injector import Fault, plant, slow
from tests.megatron.gpt2.train.training_runs import finish, start, write_text


def test_a_warning_comes_after_two_lines_and_once() -> None:
    times = {"forward": [100, 100, 160, 101], "data loader": [0, 0, 0, 2], "batch generator": [1, 1, 1, 3]}
    parallel = mpu.ParallelState(data_parallel_size=2, tensor_model_parallel_size=2)
    slow = SlowRanks(parallel, {rank: "ab"[rank // 2] for rank in range(4)})

    def lines(slow: SlowRanks = slow) -> list[str]:
        return slow.lines([[times.get(name, [0] * 4)[rank] for name in NAMES] for rank in range(4)], 200.0)

    assert lines() == []
    assert lines() == [
        'WARNING: rank 2 (b) takes 60 ms longer in "forward" than the other ranks of its stage, 160 ms a step for 100, '
        "since 2 log lines: look at its machine"
    ]
    assert lines() == []
    times["forward"][2], times["data loader"][3], times["batch generator"][3] = 110, 80, 81
    assert lines() == []
    (line,) = lines()
    assert 'rank 3 (b) takes 80 ms longer in "data loader"' in line
    stages = SlowRanks(mpu.ParallelState(pipeline_model_parallel_size=4), {})
    assert lines(stages) == lines(stages) == [], "each rank has work of its own"


def slow_optimizer(rank: int, world: int, folder: str) -> list[str]:
    plant(Fault(partial(slow, part="optimizer", seconds=0.2), rank=1, step=0))
    run = start(
        rank,
        world,
        folder,
        (
            "--num-layers 1 --hidden-size 32 --micro-batch-size 1 --global-batch-size 3 --log-straggler "
            "--log-interval 2 --train-iters 6"
        ).split(),
    )
    train(run)
    finish(run)
    return [record["text"] for record in read_incidents(f"{folder}/save") if record["kind"] == "slow"]


def test_the_slow_rank_is_named_though_all_take_equally_long(tmp_path: Path) -> None:
    write_text(tmp_path, 1000)
    texts = run_ranks(slow_optimizer, 3, str(tmp_path))[0]
    of_one = [text for text in texts if "rank 1 takes" in text and 'longer in "optimizer"' in text]
    assert of_one and 190 < int(of_one[0].split(" takes ")[1].split(" ms")[0]) < 2000, texts
    assert "WARNING: rank 1 takes" in (tmp_path / "save" / "history.jsonl").read_text()
