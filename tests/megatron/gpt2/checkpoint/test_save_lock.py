"""Two runs in one --save folder: the second leaves, on all its ranks, and a dead run is in nobody's way."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.gpt2.checkpoint.folder import lock_folder
from megatron.gpt2.commands import pretrain_gpt2
from megatron.gpt2.dist import errors
from tests.distributed import run_ranks
from tests.megatron.gpt2.train.training_runs import SMALL, write_text

ROOT = Path(__file__).resolve().parents[4]
HOLDER = """
import sys, time
from pathlib import Path
from megatron.gpt2.checkpoint import folder
held = folder.lock_folder(Path(sys.argv[1]), print)
print("held", flush=True)
time.sleep(600)
"""


@contextlib.contextmanager
def holder(folder: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], cwd=ROOT, text=True, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def second_run(rank: int, world_size: int, folder: str) -> tuple[int, str]:
    os.environ.update(
        {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    )
    errors.LAUNCHER_GRACE = errors.SILENT_GRACE = 0.0
    with contextlib.redirect_stderr(io.StringIO()) as said:
        return train(folder, "--init-method", f"file://{folder}/the ranks meet"), said.getvalue()


def train(folder: str, *words: str) -> int:
    return pretrain_gpt2.main(
        [
            *SMALL,
            "--train-data",
            f"{folder}/text.txt",
            "--data-cache-path",
            f"{folder}/cache",
            "--save",
            f"{folder}/save",
            "--train-iters",
            "1",
            *words,
        ]
    )


def test_the_second_run_is_refused_on_all_its_ranks(tmp_path: Path):
    write_text(tmp_path)
    with holder(tmp_path / "save") as process:
        (code, said), second = run_ranks(second_run, 2, str(tmp_path))
        assert [path.name for path in (tmp_path / "save").iterdir()] == ["lock"], "it wrote something"
    assert (code, second) == (2, (2, ""))
    assert said == (
        f"error: --save {tmp_path}/save is in use by process {process.pid} on {socket.gethostname()}: wait "
        "for that run, end it, or give this one another --save\n"
    )
    assert train(str(tmp_path)) == 0, "the holder is dead"


def test_a_lock_ends_with_its_holder(tmp_path: Path):
    with holder(tmp_path), pytest.raises(ValueError, match="in use by process"):
        lock_folder(tmp_path, pytest.fail)
    first = lock_folder(tmp_path, pytest.fail)  # killed without a word
    with pytest.raises(ValueError, match=re.escape(f"--save {tmp_path} is in use by process {os.getpid()} on ")):
        lock_folder(tmp_path, pytest.fail)
    first.close()
    lock_folder(tmp_path, pytest.fail).close()


def test_a_filesystem_without_locks_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def unsupported(file: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    said: list[str] = []
    lock_folder(tmp_path, said.append).close()
    assert len(said) == 1 and "lock cannot be locked (No locks available)" in said[0]


def test_a_folder_that_cannot_be_made(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="--save .*file: cannot be written: .*"):
        lock_folder(tmp_path / "file", pytest.fail)
