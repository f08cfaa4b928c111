"""Test that only one run owns a --save folder, also on a file system without locks and after its network was cut."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from data_utils.files import fsync_path
from megatron.gpt2.checkpoint import lease, writer
from megatron.gpt2.checkpoint.lease import Lease, LeaseLostError
from megatron.gpt2.checkpoint.save_folder import TRACKER, FolderInUse, find_checkpoint, list_iterations
from megatron.gpt2.checkpoint.saver import Saver
from megatron.gpt2.checkpoint.writer import ShardedTensor
from tests.megatron.gpt2.dist.started_ranks import StartedRank
from tests.megatron.gpt2.train.training_runs import write_text


def no_locks(*args: Any) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


def hurry() -> None:
    """Disable file locks, and shorten the times of a lease."""
    mock.patch.multiple(lease, try_lock=no_locks, RENEWAL_INTERVAL=0.1, LIFETIME=1.0).start()


@pytest.fixture
def without_locks() -> Iterator[None]:
    hurry()
    yield
    mock.patch.stopall()


def save(owner: Lease, iteration: int) -> list[str]:
    """Save a checkpoint, and return the warnings."""
    lines: list[str] = []
    made = Saver(folder=owner._folder, start_id=f"{id(owner)}", log=lines.append, check_owner=owner.check)
    files = {"mp_rank_00/model.safetensors": {"w": ShardedTensor(torch.zeros(2), (2,), (0,))}}
    made.save(iteration, files, {"vocab_size": 2, "owner": id(owner)})
    made.close()
    return [line for line in lines if "saved" not in line]


@pytest.mark.usefixtures("without_locks")
def test_one_owner(tmp_path: Path) -> None:
    first = Lease(tmp_path)
    with pytest.raises(FolderInUse, match=rf"--save {tmp_path} is in use by process {os.getpid()} on "):
        Lease(tmp_path)
    assert not save(first, 1)
    first._released.set()  # The first owner stops renewing, as if its machine had stopped.
    second = Lease(tmp_path)
    assert not save(second, 2)
    (warning,) = save(first, 3)
    assert f"--save {tmp_path} now belongs to process {os.getpid()} on " in warning
    assert [number for number, _ in list_iterations(tmp_path)] == [2, 1]
    assert first.is_lost and not first.is_held() and second.is_held()
    second.release()
    began = time.monotonic()
    Lease(tmp_path).release()
    assert time.monotonic() - began < 0.9, "it waited for a lease that was released"
    assert [path.name for path in tmp_path.glob("lease_*")] == ["lease_0000000003"]
    with pytest.raises(LeaseLostError):
        first.check()


@pytest.mark.usefixtures("without_locks")
@pytest.mark.parametrize("iteration", [2, 3])
@pytest.mark.parametrize("stops_after", ["the check", "the first rename"])
def test_an_owner_that_stops_inside_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stops_after: str, iteration: int
) -> None:
    """The later owner takes the files away, so the commit of iteration 2 fails, and the tracker file does not go
    back."""
    first = Lease(tmp_path)
    assert not save(first, 1)
    first._released.set()  # The owner stops, so its thread does not renew the lease.
    first._renewal.join()
    owners, check = [first], first.check

    def stop() -> None:
        monkeypatch.undo()
        owners.append(Lease(tmp_path))
        assert not [line for line in save(owners[1], iteration) if "exists already" not in line]

    def check_and_stop() -> None:
        check()
        stop()

    if stops_after == "the check":
        monkeypatch.setattr(first, "check", check_and_stop)
    else:
        fsync = fsync_path
        monkeypatch.setattr(writer, "fsync_path", lambda path: stop() if path == tmp_path else fsync(path))
    (warning,) = save(first, 2)
    assert f"now belongs to process {os.getpid()} on " in warning, warning
    found = find_checkpoint(tmp_path, log=pytest.fail)
    assert found is not None and found.metadata["owner"] == id(owners[1]) and found.iteration == iteration
    assert (tmp_path / TRACKER).read_text() == f"{iteration}\n" and not list(tmp_path.glob(f"{TRACKER}.tmp*"))
    owners[1].release()


def wait_until(condition: Callable[[], object], rank: StartedRank) -> None:
    end = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < end and rank.process.is_alive(), rank.output.read_text()
        time.sleep(0.02)


def test_the_other_half_of_a_partition_ends(tmp_path: Path) -> None:
    """The first run stops and later goes on, like machines that lost the network for a time. The first run must not
    save or write records any more."""
    write_text(tmp_path)
    save_folder = tmp_path / "save"

    def start(words: str) -> StartedRank:
        flags = f"--save {save_folder} --save-interval 2 --exit-interval 100000 {words}"
        return StartedRank(tmp_path, flags.split(), {}, before=hurry)

    def records() -> list[dict[str, Any]]:
        return [json.loads(line) for line in (save_folder / "metrics.jsonl").read_text().splitlines()]

    first = start("--train-iters 100000")
    wait_until(lambda: (save_folder / "iter_0000002").exists(), first)
    assert first.process.pid is not None
    code, output = start("--train-iters 8").end()
    assert code == 2 and output.splitlines()[-1].startswith(f"error: --save {save_folder} is in use by process "), (
        output
    )
    os.kill(first.process.pid, signal.SIGSTOP)
    code, output = start("--train-iters 100000 --exit-interval 30").end()
    assert code == 0, output
    before = sorted(path.name for path in save_folder.glob("iter_*")), (save_folder / TRACKER).read_text(), records()
    os.kill(first.process.pid, signal.SIGCONT)
    code, output = first.end()
    assert code == 1, output
    assert output.splitlines()[-1].startswith(f"stopped: --save {save_folder} now belongs to "), output
    after = sorted(path.name for path in save_folder.glob("iter_*")), (save_folder / TRACKER).read_text(), records()
    assert after == before
    iterations = [record["iteration"] for record in records() if "split" not in record]
    assert iterations == list(range(1, len(iterations) + 1))
