"""Which checkpoint is loaded: the tracker's, or the newest valid one, the same on every rank."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.gpt2.checkpoint.folder import TRACKER, Gather, find_checkpoint
from megatron.gpt2.checkpoint.manifest import MANIFEST
from megatron.gpt2.checkpoint.reader import Checkpoint
from tests.megatron.gpt2.checkpoint.saved_states import (
    assert_holds,
    find,
    save,
)


def test_nothing_there(tmp_path: Path) -> None:
    assert find(tmp_path / "missing") == (None, "")
    (tmp_path / "iter_0000100.tmp-1f").mkdir()
    (tmp_path / "metrics.jsonl").touch()
    assert find(tmp_path) == (None, "")


def test_the_tracker_decides_and_a_newer_one_is_reported(tmp_path: Path) -> None:
    save(tmp_path, 100)
    save(tmp_path, 200)
    assert find(tmp_path) == (200, "")
    (tmp_path / TRACKER).write_text("100")
    iteration, said = find(tmp_path)
    assert iteration == 100
    assert "iter_0000200 is newer" in said
    assert "the existing one is now" in "".join(save(tmp_path, 200, seed=5))
    assert_holds(Checkpoint(tmp_path / "iter_0000200"), 5)
    assert_holds(Checkpoint(tmp_path / "iter_0000200.old-1"), 200)


def test_falls_back_to_the_newest_valid_one(tmp_path: Path) -> None:
    for iteration in (100, 200, 300):
        save(tmp_path, iteration)
    victim = tmp_path / "iter_0000300" / "mp_rank_01" / "model.safetensors"
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    iteration, said = find(tmp_path)
    assert iteration == 200
    assert f"{victim}: damaged" in said
    (tmp_path / "iter_0000200" / MANIFEST).unlink()
    assert find(tmp_path)[0] == 100
    # One that was renamed aside is the last resort: a crash between the two renames of a commit loses nothing.
    (tmp_path / "iter_0000100").rename(tmp_path / "iter_0000100.old-1")
    assert find(tmp_path)[0] == 100
    shutil.rmtree(tmp_path / "iter_0000100.old-1")
    with pytest.raises(ValueError, match="holds no valid checkpoint: .*iter_0000300.*damaged.*--load"):
        find(tmp_path)


def test_tracker_that_names_a_missing_iteration(tmp_path: Path) -> None:
    (tmp_path / TRACKER).write_text("700")
    with pytest.raises(ValueError, match=f"iter_0000700: missing, though {TRACKER} names it"):
        find(tmp_path)
    save(tmp_path, 100)
    (tmp_path / TRACKER).write_text("700")
    iteration, said = find(tmp_path)
    assert iteration == 100
    assert "iter_0000700: missing" in said


GARBAGE = [
    b"",
    b"\n",
    b" ",
    b"abc",
    b"-100",
    b"+100",
    b"1e2",
    b"100.0",
    b"0x64",
    b"release",
    b"100\n200",
    b"\0\0\0\0",
    b"\xff\xfe",
    "١٠٠".encode(),
    b"9" * 70,
    b"9" * 5000,
    b"../iter_0000100",
    b"iter_0000100",
    b"None",
    b"{}",
]


@pytest.mark.parametrize("text", GARBAGE + [None, "folder"], ids=lambda text: repr(text)[:20])
def test_garbage_tracker(text: bytes | str | None, tmp_path: Path) -> None:
    save(tmp_path, 100, 1)
    tracker = tmp_path / TRACKER
    tracker.unlink()
    if text == "folder":
        tracker.mkdir()
    elif isinstance(text, bytes):
        tracker.write_bytes(text)
    iteration, said = find(tmp_path)
    assert iteration == 100
    assert TRACKER in said
    assert "iter_0000100 is loaded" in said
    shutil.rmtree(tmp_path / "iter_0000100")
    if tracker.exists():
        with pytest.raises(ValueError, match=TRACKER):
            find(tmp_path)
    else:
        assert find(tmp_path) == (None, "")


class ThreadRanks:
    """`gather` for ranks that are threads."""

    def __init__(self, size: int) -> None:
        self.values, self.barrier = [""] * size, threading.Barrier(size, timeout=240)

    def run(self, work: Callable[[int, Gather], Any]) -> list[Any]:
        results: list[Any] = [None] * len(self.values)

        def rank(i: int) -> None:
            try:
                results[i] = work(i, lambda text: self.gather(i, text))
            except Exception as error:
                results[i] = error

        threads = [threading.Thread(target=rank, args=(i,)) for i in range(len(results))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    def gather(self, i: int, text: str) -> list[str]:
        self.values[i] = text
        self.barrier.wait()
        result = list(self.values)
        self.barrier.wait()
        return result


def test_all_ranks_come_to_the_same_answer(tmp_path: Path) -> None:
    save(tmp_path, 100)
    save(tmp_path, 200)
    (tmp_path / TRACKER).write_text("garbage")

    def load(rank: int, gather: Gather, folder: Path = tmp_path) -> Any:
        return find(folder, rank=rank, gather=gather)

    assert [found[0] for found in ThreadRanks(3).run(load)] == [200] * 3
    # Damage that one rank's share of the files holds, whichever: all hear of it, by name.
    tables = [f"boxes/rank_0000{rank}.jsonl" for rank in (0, 1)]
    for file in [*sorted(Checkpoint(tmp_path / "iter_0000200").files), *tables]:
        victim = tmp_path / "iter_0000200" / file
        data = victim.read_bytes()
        victim.write_bytes(data[:-1] + bytes([data[-1] ^ 4]))
        found = ThreadRanks(3).run(load)
        assert [iteration for iteration, _ in found] == [100] * 3
        assert all(f"{file}: damaged" in said for _, said in found)
        victim.write_bytes(data)
    # A folder that not all nodes share: an error everywhere, and nobody waits for the others.
    (tmp_path / TRACKER).write_text("200")
    elsewhere = tmp_path / "elsewhere"
    found = ThreadRanks(3).run(lambda rank, gather: load(rank, gather, elsewhere if rank == 2 else tmp_path))
    assert all(isinstance(error, ValueError) for error in found)
    assert "rank 2 does not see the same" in "".join(map(str, found[:2]))
    save(elsewhere, 200, seed=1)
    shutil.rmtree(tmp_path / "iter_0000100")
    found = ThreadRanks(3).run(lambda rank, gather: load(rank, gather, elsewhere if rank == 2 else tmp_path))
    assert all(isinstance(error, ValueError) for error in found)


def test_without_hashing_the_structure_is_checked_all_the_same(tmp_path: Path) -> None:
    save(tmp_path, 100)
    victim = tmp_path / "iter_0000100" / "mp_rank_01" / "model.safetensors"
    data = victim.read_bytes()
    victim.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    checkpoint = find_checkpoint(tmp_path, log=pytest.fail, verify=False)
    assert checkpoint is not None
    for damaged, problem in ((data[:-1], "bytes instead of"), (b"\0" + data[1:], "header is not the one")):
        victim.write_bytes(damaged)
        with pytest.raises(ValueError, match=problem):
            found = find_checkpoint(tmp_path, log=lambda line: None, verify=False)
            assert found is not None
            found.read("model.row")
