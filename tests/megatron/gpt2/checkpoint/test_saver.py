"""--async-save saves the state as it was at the start of the save. However a run ends, it waits for its last save.
Earlier checkpoints still load after a crash, an error or a full disk at any moment of a save."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from data_utils.files import atomic_write_text
from megatron.gpt2.checkpoint import saver
from megatron.gpt2.checkpoint import writer as checkpointing
from megatron.gpt2.checkpoint.reader import MANIFEST, FileInfo, NativeCheckpoint
from megatron.gpt2.checkpoint.save_folder import LATEST_FILE, find_checkpoint
from megatron.gpt2.checkpoint.saver import Saver
from megatron.gpt2.checkpoint.writer import ShardedTensor, write_atomically, write_safetensors
from megatron.gpt2.commands import pretrain_gpt2
from megatron.gpt2.hooks import StopRun
from megatron.gpt2.train import loop
from megatron.gpt2.train.train_step import train_step
from megatron.gpt2.train.trainer import Trainer
from tests.conftest import ROOT
from tests.fork_server import WarmPython
from tests.megatron.gpt2.checkpoint.saved_states import (
    assert_holds,
    find,
    full_state,
    rank_files,
    save,
    write,
)
from tests.megatron.gpt2.train.training_runs import SMALL, write_text


def saving(folder: Path, logged: list[str], **options: Any) -> Saver:
    return Saver(folder=folder, start_id="a", asynchronous=True, log=logged.append, **options)


def test_what_changes_after_the_save_began_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    go = threading.Event()

    def slow(*arguments: Any) -> FileInfo:
        assert go.wait(240)  # until `save` has returned
        return write_safetensors(*arguments)

    monkeypatch.setattr(checkpointing, "write_safetensors", slow)
    s, held = saving(tmp_path, []), full_state(1)
    for iteration in (1, 2):
        for (kind, name), tensor in full_state(iteration).items():
            held[kind, name].copy_(tensor)
        assert s.save(iteration, rank_files(held, 0, 1), {"consumed_samples": iteration}) is None
        for tensor in held.values():
            tensor.fill_(7)
        go.set()
    assert s.finish() is not None
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
    s.gather = lambda text: [text, "too slow"]  # Rank 1 answers "too slow".
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


def test_the_process_ends_though_its_storage_does_not_answer(flags: list[str], python: WarmPython):
    words = [*flags, "--save-timeout-minutes", "0.01"]
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


def failing(error: Exception) -> Callable[[Trainer], None]:
    """Return a training step that raises `error` after iteration 2."""

    def step(trainer: Trainer) -> None:
        if trainer.progress.iteration == 2:
            raise error
        train_step(trainer)

    return step


@pytest.mark.parametrize(
    "step, code, committed",
    [
        (train_step, 0, [2, 3]),
        (stopped, 0, [1]),
        (failing(FloatingPointError("no gradient")), 1, [2]),
        (failing(RuntimeError("a peer is gone")), None, [2]),  # The error is raised.
    ],
)
def test_every_end_of_a_run_waits(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: Any, code: Any, committed: list[int]
):
    monkeypatch.setattr(loop, "train_step", step)
    if code is None:
        with pytest.raises(RuntimeError, match="a peer is gone"):
            pretrain_gpt2.main(flags)
    else:
        assert pretrain_gpt2.main(flags) == code
    assert sorted(path.name for path in (tmp_path / "save").glob("iter_*")) == [f"iter_000000{i}" for i in committed]
    checkpoint = find_checkpoint(tmp_path / "save", log=pytest.fail)
    assert checkpoint.iteration == committed[-1]


def test_rank_0_may_commit_as_soon_as_it_sees_the_last_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 may rename the temporary folder as soon as the last rank has written its table."""
    replace = Path.replace

    def replace_and_commit(path: Path, target: Path) -> Path:
        found = replace(path, target)
        target.parents[1].rename(tmp_path / "committed")
        return found

    monkeypatch.setattr(Path, "replace", replace_and_commit)
    write(tmp_path, 200, rank_files(full_state(200), 1, 2), rank=1, world_size=2)
    assert (tmp_path / "committed/tables/rank_00001.jsonl").is_file()


def test_a_disk_without_inodes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    disk = SimpleNamespace(f_bavail=2, f_frsize=512, f_files=9, f_favail=0)
    monkeypatch.setattr(os, "statvfs", lambda path: disk)
    said = r"No space left on device \(no inodes are free there: remove files, however small\)"
    with pytest.raises(OSError, match=f"file: cannot write its 3 bytes: {said}"):
        write_atomically(tmp_path / "file", b"300")
    with pytest.raises(OSError, match=f"{said}: '.*settings'"):
        atomic_write_text(tmp_path / "settings", "{}")


def test_files_of_a_crashed_start_take_no_part(tmp_path: Path) -> None:
    """Rank 1 had written its files before the crash. The next start must not use these files, and its error names the
    missing rank."""
    save(tmp_path, 100)
    write(tmp_path, 200, rank_files(full_state(666), 1, 2), rank=1, world_size=2, start_id="crashed")
    files = rank_files(full_state(200), 0, 2)
    for problem, expected in (("", r"rank 1 within [\d.]+ s"), ("rank 1 has no room", "rank 1 has no room")):
        with pytest.raises(OSError, match=expected):
            write(tmp_path, 200, files, world_size=2, start_id="second", timeout_s=0.1, problem=problem, keep_last=1)
        assert find(tmp_path) == (100, "")
    save(tmp_path, 200, start_id="third")
    assert find(tmp_path) == (200, "")
    assert not list(tmp_path.glob("*.tmp*"))


def save_until_it_fits(folder: str) -> None:
    """Save with 0, 1, 2, ... free pages on the filesystem of `folder`, so that the disk fills up at every point of a
    save. Print the files that did not fit."""
    disk, ballast = Path(folder), Path(folder) / "ballast"
    full = set[str]()

    def save(iteration: int) -> None:
        shard = ShardedTensor(torch.full((3000,), float(iteration)), (3000,), (0,))
        metadata = {"a manifest": "of three pages" * 600}
        write(disk / "save", iteration, {"mp_rank_00/model.safetensors": {"x": shard}}, metadata=metadata)

    def assert_loads(iteration: int) -> None:
        checkpoint = find_checkpoint(disk / "save", log=pytest.fail)
        assert torch.equal(checkpoint.read("x"), torch.full((3000,), float(iteration)))

    save(1)
    for pages in range(100):
        with open(ballast, "wb", buffering=0) as stream, contextlib.suppress(OSError):
            while True:
                stream.write(bytes(4096))
        os.truncate(ballast, ballast.stat().st_size // 4096 * 4096 - 4096 * pages)
        try:
            save(2)
            break
        except OSError as error:
            found = re.match(
                rf"{disk}/save/(\S+): cannot write its [\d,]+ bytes: No space left on device "
                r"\([\d,]+ bytes are free there\); earlier checkpoints are untouched",
                str(error),
            )
            assert found, error
        full.add(found[1].rpartition("/")[2])
        assert sorted(os.listdir(disk / "save")) == ["iter_0000001", LATEST_FILE], pages
        assert_loads(1)
        ballast.unlink()
    assert_loads(2)
    print(*full)


def test_a_full_disk(tmp_path: Path) -> None:
    mounted = f"mount -t tmpfs -o size=400k tmpfs {tmp_path} && "
    shell = "unshare --map-root-user --mount sh -c".split()
    if not shutil.which("unshare") or subprocess.run([*shell, mounted + "true"], capture_output=True).returncode:
        pytest.skip(
            "no small filesystem can be mounted here; tests/faults/test_faults.py limits the size of files instead"
        )
    program = f"from {__name__} import save_until_it_fits; save_until_it_fits({str(tmp_path)!r})"
    run = subprocess.run(
        [*shell, f'{mounted} exec "$0" -c "$1"', sys.executable, program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stderr
    files = {"model.safetensors", "rank_00000.jsonl", MANIFEST, LATEST_FILE}
    assert set(run.stdout.splitlines()[-1].split()) == files
