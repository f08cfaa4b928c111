"""A rank that hangs: the others name it after the limit and end, with the checkpoint that was being written."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from megatron.gpt2.checkpoint import writer as checkpointing
from megatron.gpt2.checkpoint.writer import write_tensors
from megatron.gpt2.dist import ranks
from megatron.gpt2.train import loop
from megatron.gpt2.train.run import Run
from megatron.gpt2.train.train_step import train_step
from tests.megatron.gpt2.dist.started_ranks import Rank, free_port
from tests.megatron.gpt2.train.training_runs import write_text


def stop_after_a_save(folder: str) -> None:
    """Rank 1 stops for good in its third step, when it has written its part of a checkpoint; rank 0 goes on to write
    its own part when the file `go` is there."""
    save, go = Path(folder, "save"), Path(folder, "go")

    def wait_for(what: Path, pattern: str) -> None:
        end = time.monotonic() + 240
        while not any(what.glob(pattern)) and time.monotonic() < end:
            time.sleep(0.02)

    def step_or_stop(run: Run) -> None:
        if run.progress.iteration == 2 and run.parallel.rank == 1:
            wait_for(save, "*.tmp-*/boxes/rank_00001.jsonl")
            os.kill(os.getpid(), signal.SIGSTOP)
        train_step(run)

    def write_late(path: Path, file: str, *rest: Any) -> Any:
        if dist.get_rank() == 0:
            wait_for(go.parent, go.name)
        return write_tensors(path, file, *rest)

    mock.patch.object(ranks, "FAREWELL", 60.0).start()  # who waited for the lost one would be late
    mock.patch.object(loop, "train_step", step_or_stop).start()
    mock.patch.object(checkpointing, "write_tensors", write_late).start()


def test_a_rank_that_hangs_is_named_and_the_other_ends(tmp_path: Path) -> None:
    write_text(tmp_path, 1000)
    words = (  # without a curve, for which matplotlib would be imported
        f"--save {tmp_path}/save --world-size 2 --init-method tcp://localhost:{free_port()} --async-save "
        "--distributed-timeout-minutes 0.1 --save-interval 2 --log-interval 100"
    ).split()
    first, second = (
        Rank(tmp_path, [*words, "--rank", str(rank)], {}, before=partial(stop_after_a_save, str(tmp_path)))
        for rank in range(2)
    )
    host = os.uname().nodename
    end = time.monotonic() + 240
    while "error (" not in first.output.read_text() if first.output.exists() else True:
        assert first.process.is_alive() and time.monotonic() < end, first.end(0)[1]
        time.sleep(0.02)
    assert not (tmp_path / "save" / "iter_0000002").exists()
    (tmp_path / "go").touch()
    named = time.monotonic()
    code, output = first.end(240)
    seconds = time.monotonic() - named
    second.end(0)
    assert code == 1 and "Traceback" not in output, output
    line = next(line for line in output.splitlines() if line.startswith("error ("))
    assert line.startswith(f"error ({host}): rank 1 ({host}) gave no sign of life for ")
    assert " s and did not come to " in line and f"within 6 s, where rank 0 ({host}) waits: " in line, line
    assert f"saved {tmp_path}/save/iter_0000002" in output and (tmp_path / "save" / "iter_0000002").is_dir()
    assert seconds < 30, f"{seconds:.1f} s after its line"
