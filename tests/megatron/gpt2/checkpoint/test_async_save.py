"""Test that --async-save saves the state at the start of the save, and that a run waits for the save however it
ends."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from data_utils.files import machine_memory
from megatron.gpt2.checkpoint import saver
from megatron.gpt2.checkpoint import writer as checkpointing
from megatron.gpt2.checkpoint.reader import FileInfo, NativeCheckpoint
from megatron.gpt2.checkpoint.save_folder import find_checkpoint
from megatron.gpt2.checkpoint.saver import Saver
from megatron.gpt2.checkpoint.writer import write_safetensors
from megatron.gpt2.commands import pretrain_gpt2
from megatron.gpt2.hooks import StopRun
from megatron.gpt2.train import loop
from megatron.gpt2.train.train_step import train_step
from megatron.gpt2.train.trainer import Trainer
from tests.conftest import ROOT
from tests.fork_server import WarmPython
from tests.megatron.gpt2.checkpoint.saved_states import assert_holds, full_state, rank_files
from tests.megatron.gpt2.train.training_runs import SMALL, write_text


def saving(folder: Path, logged: list[str], **options: Any) -> Saver:
    """Make a saver, by default of the only rank."""
    return Saver(folder=folder, start_id="a", asynchronous=True, log=logged.append, **options)


def test_what_changes_after_the_save_began_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    go = threading.Event()

    def slow(*arguments: Any) -> FileInfo:
        assert go.wait(240)  # The thread waits until `save` has returned.
        return write_safetensors(*arguments)

    monkeypatch.setattr(checkpointing, "write_safetensors", slow)
    s, held = saving(tmp_path, []), full_state(1)
    for iteration in (1, 2):
        for (kind, name), tensor in full_state(iteration).items():
            held[kind, name].copy_(tensor)
        assert s.save(iteration, rank_files(held, 0, 1), {"consumed_samples": iteration}) is None
        if iteration == 1:
            assert s._host_buffer is not None
            room = s._host_buffer.data_ptr()
        for tensor in held.values():
            tensor.fill_(7)
        go.set()
    assert s.finish() is not None
    assert s._host_buffer.data_ptr() == room, "made once"
    s.close()
    for iteration in (1, 2):
        assert_holds(NativeCheckpoint(tmp_path / f"iter_000000{iteration}"), iteration)


def test_too_little_memory_is_said_and_the_save_made_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(saver, "machine_memory", lambda entry: 1000)
    logged: list[str] = []
    s = saving(tmp_path, logged)
    for iteration in (1, 2):
        assert s.save(iteration, rank_files(full_state(1), 0, 1), {}) == tmp_path / f"iter_000000{iteration}"
    assert s.saved_iteration == 2
    warnings = [line for line in logged if "WARNING" in line]
    assert len(warnings) == 1 and "--async-save is off" in warnings[0] and "bytes of host memory" in warnings[0]
    s.close()
    monkeypatch.undo()
    assert 0 < machine_memory("MemAvailable") < 1 << 50


# ----------------------------------------------------------------------------------- the ways in which a run ends


def test_a_rank_that_is_gone_is_not_waited_for_on_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(saver, "GRACE_SECONDS", 0.2)
    logged: list[str] = []
    s = saving(tmp_path, logged, world_size=2)
    s.save(1, rank_files(full_state(1), 0, 2), {})
    start = time.monotonic()
    s.close()
    assert time.monotonic() - start < 30, "as long as it waits for one that may still come"
    assert "no files from rank 1" in logged[-1] and not list(tmp_path.glob("iter_*"))


def test_storage_that_does_not_answer_ends_the_run_on_every_rank(tmp_path: Path):
    s = saving(tmp_path, [])
    s.save(1, rank_files(full_state(1), 0, 1), {})
    s.gather = lambda text: [text, "too slow"]  # The other rank answers "too slow".
    said = (
        f"the storage of --save {tmp_path} took longer than [0-9.]+ s .--save-timeout-minutes. for the files of rank 1"
    )
    with pytest.raises(StopRun, match=said):
        s.finish()
    s.close()


STUCK = """
import time
from megatron.gpt2.checkpoint import writer
from megatron.gpt2.commands import pretrain_gpt2
writer.write_safetensors = lambda *arguments: time.sleep(600)
"""


@pytest.mark.parametrize("more", [pytest.param("", marks=pytest.mark.wide), "--async-save"])
def test_the_process_ends_though_its_storage_does_not_answer(flags: list[str], python: WarmPython, more: str):
    words = [*flags, *f"--save-timeout-minutes 0.01 {more}".split()]
    program = f"{STUCK}raise SystemExit(pretrain_gpt2.main({words!r}))"
    done = subprocess.run([python.python, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1, done.stderr
    assert "stopped: the storage of --save " in done.stdout


@pytest.fixture
def flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the flags of a run that needs some time to write its files."""

    def slow(*arguments: Any) -> FileInfo:
        time.sleep(0.2)
        return write_safetensors(*arguments)

    monkeypatch.setattr(checkpointing, "write_safetensors", slow)
    write_text(tmp_path)
    places = f"--train-data {tmp_path}/text.txt --data-cache-path {tmp_path}/cache --save {tmp_path}/save"
    return [*SMALL, *places.split(), *"--async-save --save-interval 2 --train-iters 3 --keep-last 2".split()]


def stopped(trainer: Trainer) -> None:
    train_step(trainer)
    os.kill(os.getpid(), signal.SIGTERM)


def without_gradient(trainer: Trainer) -> None:
    if trainer.progress.iteration == 2:
        raise FloatingPointError("no gradient")
    train_step(trainer)


def without_peer(trainer: Trainer) -> None:
    if trainer.progress.iteration == 2:
        raise RuntimeError("a peer is gone")
    train_step(trainer)


@pytest.mark.parametrize(
    "more, step, code, committed",
    [
        ("", train_step, 0, [2, 3]),
        ("--exit-interval 1", train_step, 0, [1]),
        ("--exit-interval 2", train_step, 0, [2]),
        ("", stopped, 0, [1]),
        ("", without_gradient, 1, [2]),
        ("", without_peer, None, [2]),
    ],
)
def test_every_end_of_a_run_waits(
    flags: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    more: str,
    step: Any,
    code: int | None,
    committed: list[int],
):
    monkeypatch.setattr(loop, "train_step", step)
    if code is None:
        with pytest.raises(RuntimeError, match="a peer is gone"):
            pretrain_gpt2.main(flags)
    else:
        assert pretrain_gpt2.main([*flags, *more.split()]) == code
    assert sorted(path.name for path in (tmp_path / "save").glob("iter_*")) == [f"iter_000000{i}" for i in committed]
    checkpoint = find_checkpoint(tmp_path / "save", log=pytest.fail)
    assert checkpoint is not None and checkpoint.iteration == committed[-1]
