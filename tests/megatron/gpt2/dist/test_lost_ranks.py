"""A rank hangs or stops: the other ranks name it after the timeout, print where all ranks are, and finish the
checkpoint that is being written."""

from __future__ import annotations

import os
import re
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from megatron.gpt2.checkpoint import writer
from megatron.gpt2.checkpoint.writer import write_safetensors
from megatron.gpt2.dist import ranks
from megatron.gpt2.dist.hang import RankLocation, describe_hang, set_flight_recorder
from megatron.gpt2.monitor.incidents import read_incidents
from megatron.gpt2.train.trainer import Trainer
from tests.faults.injector import Fault, hang, plant, stop
from tests.megatron.gpt2.dist.started_ranks import StartedRank, free_port, wait_until
from tests.megatron.gpt2.train.training_runs import write_text

HOST = os.uname().nodename
REDUCES = RankLocation(True, "all_reduce (mpu/mappings.py:61, called at mpu/layers.py:210)")
RECEIVES = RankLocation(True, "wait (mpu/p2p_communication.py:35, called at schedule_runner.py:9)")


def test_the_line_of_a_hang() -> None:
    line = describe_hang({1: RECEIVES, 0: REDUCES}, {}, dict(enumerate("aa")), 1, 6.0)
    assert line == (
        "a collective took longer than 6 s (--distributed-timeout-minutes), and every rank waits in one, rank 1 (a) in "
        f"{RECEIVES.text} and rank 0 (a) in {REDUCES.text}: the network is slow, or the ranks run different programs"
    )


def test_a_hanging_rank_reports_its_location(tmp_path: Path) -> None:
    write_text(tmp_path, 1000)
    words = (
        f"--save {tmp_path}/save --world-size 3 --init-method tcp://localhost:{free_port()} --global-batch-size 3 "
        "--distributed-timeout-minutes 0.1 --log-interval 100 --rank"
    ).split()
    before = partial(plant, Fault(hang, rank=2, step=2))
    ranks = [StartedRank(tmp_path, [*words, str(rank)], {}, before=before) for rank in range(3)]
    ended = [rank.end(240) for rank in ranks]  # Without a launcher, the hanging rank must end by itself.
    assert [code for code, _ in ended] == [1, 1, 1], ended
    lines = [line for _, output in ended for line in output.splitlines() if line.startswith("error (")]
    assert len(lines) == 1 and "Traceback" not in "".join(output for _, output in ended), ended
    assert re.fullmatch(
        r"error \((\S+)\): rank 2 \(\1\) did not reach \w+ \(\S+:\d+, called at megatron/gpt2/\S+:\d+\) "
        r"within 6 s, where ranks 0-1 \(\1\) wait: rank 2 is at megatron/gpt2/train/loop\.py:\d+ \(train\): "
        r"the run ends here; the same command continues from the last checkpoint",
        lines[0],
    ), lines[0]
    hangs = [record for record in read_incidents(tmp_path / "save") if record["kind"] == "hang"]
    assert any("(hang)" in record["stack"][-1] for record in hangs if record["who"] == "rank_00002" and record["stack"])
    assert {record["iteration"] for record in hangs} == {2}
    (line,) = [record for record in hangs if record["ranks"]]
    seconds = line["time"] - min(record["time"] for record in hangs)
    assert line["ranks"] == [2] and seconds < 3, f"named {seconds:.1f} s after the timeout"


def stop_after_a_save(folder: Path) -> None:
    """Rank 1 stops in its third step, after it has written its part of a checkpoint. Rank 0 writes its part when the
    file `go` exists."""

    def stop_later(trainer: Trainer) -> None:
        wait_until(lambda: any(folder.glob("save/*.tmp-*/tables/rank_00001.jsonl")))
        stop(trainer)

    def write_late(path: Path, file: str, *rest: Any) -> Any:
        if dist.get_rank() == 0:
            wait_until((folder / "go").exists)
        return write_safetensors(path, file, *rest)

    # The test fails if rank 0 waits LEAVE_TIMEOUT seconds for the lost rank.
    mock.patch.object(ranks, "LEAVE_TIMEOUT", 60.0).start()
    mock.patch.object(writer, "write_safetensors", write_late).start()
    plant(Fault(stop_later, rank=1, step=2))


def test_the_others_finish_the_checkpoint(tmp_path: Path) -> None:
    write_text(tmp_path, 1000)
    words = (  # --log-interval 100 leaves nothing to plot, which saves time.
        f"--save {tmp_path}/save --world-size 2 --init-method tcp://localhost:{free_port()} --async-save "
        "--distributed-timeout-minutes 0.1 --save-interval 2 --log-interval 100 --rank"
    ).split()
    before = partial(stop_after_a_save, tmp_path)
    first, second = (StartedRank(tmp_path, [*words, str(rank)], {}, before=before) for rank in range(2))
    wait_until(lambda: not first.process.is_alive() or "error (" in first.output.read_text())
    assert not (tmp_path / "save" / "iter_0000002").exists()
    (tmp_path / "go").touch()
    named = time.monotonic()
    code, output = first.end(240)
    seconds = time.monotonic() - named
    second.end(0)
    assert code == 1 and "Traceback" not in output, output
    line = next(line for line in output.splitlines() if line.startswith("error ("))
    assert line.startswith(f"error ({HOST}): rank 1 ({HOST}) sent no heartbeat for ")
    assert " s and did not reach " in line and f"within 6 s, where rank 0 ({HOST}) waits: " in line, line
    assert f"saved {tmp_path}/save/iter_0000002" in output and (tmp_path / "save" / "iter_0000002").is_dir()
    assert seconds < 30, f"{seconds:.1f} s after its line"


def test_the_flight_recorder_writes_next_to_the_incidents(tmp_path: Path) -> None:
    set_flight_recorder(tmp_path, environ := {"TORCH_FR_BUFFER_SIZE": "7"})
    assert environ == {
        "TORCH_FR_BUFFER_SIZE": "7",  # the user's value
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/incidents/nccl_trace_rank_",
    }
    assert (tmp_path / "incidents").is_dir()
