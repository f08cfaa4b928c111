"""A --save folder: which checkpoint is loaded, the same on every rank; which are removed; the best one; one run at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.gpt2.checkpoint.folder import TRACKER, Gather, best_loss, find_checkpoint, lock_folder
from megatron.gpt2.checkpoint.reader import MANIFEST, Checkpoint
from megatron.gpt2.commands import pretrain_gpt2
from megatron.gpt2.dist import run_program
from tests.distributed import run_ranks
from tests.megatron.gpt2.checkpoint.saved_states import (
    assert_holds,
    find,
    save,
)
from tests.megatron.gpt2.train.training_runs import SMALL, finish, start, steps, write_text
from tests.test_command_line import FLAGS, work  # noqa: F401


def test_the_tracker_decides_and_a_newer_one_is_reported(tmp_path: Path) -> None:
    (tmp_path / "iter_0000100.tmp-1f").mkdir()
    (tmp_path / "metrics.jsonl").touch()
    assert find(tmp_path / "missing") == find(tmp_path) == (None, "")
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


class ThreadRanks:
    """`gather` for ranks that are threads."""

    def __init__(self, size: int) -> None:
        self.values, self.barrier = [""] * size, threading.Barrier(size, timeout=240)

    def run(self, of_rank: Callable[[int, Gather], Any]) -> list[Any]:
        results: list[Any] = [None] * len(self.values)

        def rank(i: int) -> None:
            try:
                results[i] = of_rank(i, lambda text: self.gather(i, text))
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


def iterations(folder: Path) -> list[str]:
    return sorted(path.name.removeprefix("iter_").lstrip("0") for path in folder.glob("iter_*"))


def test_keep_last(tmp_path: Path) -> None:
    for iteration in (100, 200, 300):
        save(tmp_path, iteration, keep_last=5)
    assert iterations(tmp_path) == ["100", "200", "300"]
    save(tmp_path, 400, keep_last=2)
    assert iterations(tmp_path) == ["300", "400"]
    # Back to 300: what is newer, or was renamed aside, is another course of the run and not touched.
    (tmp_path / TRACKER).write_text("300")
    shutil.rmtree(tmp_path / "iter_0000300" / "mp_rank_01")
    assert "now" in "".join(save(tmp_path, 300, keep_last=1, seed=5))
    assert iterations(tmp_path) == ["300", "300.old-1", "400"]
    assert (tmp_path / TRACKER).read_text() == "300\n"
    save(tmp_path, 350, keep_last=1)
    assert iterations(tmp_path) == ["300.old-1", "350", "400"]
    iteration, said = find(tmp_path)
    assert iteration == 350
    assert "iter_0000400 is newer" in said


def test_a_crash_or_an_error_while_older_ones_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for iteration in (100, 200, 300):
        save(tmp_path, iteration)

    def crash(path: Path, **options: Any) -> None:
        (path / MANIFEST).unlink()
        raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr(shutil, "rmtree", crash)
    said = save(tmp_path, 400, keep_last=1)
    assert [line for line in said if "WARNING: --keep-last 1: " in line and "iter_0000100" in line]
    monkeypatch.undo()
    assert iterations(tmp_path) == ["100.tmp-removed", "200", "300", "400"]
    assert find(tmp_path) == (400, "")
    save(tmp_path, 500, keep_last=1)
    assert iterations(tmp_path) == ["500"]


def best(folder: str) -> tuple[int, float, list[str]]:
    """The iteration in best/, its loss, and every checkpoint there."""
    found = find_checkpoint(f"{folder}/save/best", log=print)
    assert found is not None and found.verify() == ""
    return found.iteration, found.facts["valid_loss"], sorted(path.name for path in found.path.parent.glob("i*"))


def losses(rank: int, world_size: int, folder: str, flags: list[str]) -> list[tuple[int, float, list[str]]]:
    """Steps with these validation losses, of which the ranks may see different last bits; a restart in between."""
    seen = []
    run = start(rank, world_size, folder, ["--keep-best", *flags])
    for loss in (math.nan, 3.0, 3.5, 2.5):
        steps(run, 1)
        run.checkpoints.save_if_best(run.progress, loss if rank == 0 else math.inf)
        run.checkpoints.saver.finish()
        if not math.isnan(loss):
            seen.append(best(folder))
    assert run.checkpoints.saver.saved_iteration is None  # the run itself has saved nothing
    run.save()
    run.checkpoints.saver.finish()
    finish(run)
    run = start(rank, world_size, folder, ["--keep-best", *flags])
    assert run.progress.iteration == 4
    for loss in (2.6, 2.4):
        steps(run, 1)
        run.checkpoints.save_if_best(run.progress, loss)
        run.checkpoints.saver.finish()
        seen.append(best(folder))
    finish(run)
    return seen


def test_the_lowest_loss_is_kept_over_a_restart(tmp_path: Path) -> None:
    write_text(tmp_path)
    for seen in run_ranks(losses, 2, str(tmp_path), ["--model-parallel-size", "2", "--async-save"]):
        assert seen == [
            (2, 3.0, ["iter_0000002"]),
            (2, 3.0, ["iter_0000002"]),
            (4, 2.5, ["iter_0000004"]),
            (4, 2.5, ["iter_0000004"]),
            (6, 2.4, ["iter_0000006"]),
        ]


def test_a_loss_on_other_data_is_no_measure(tmp_path: Path) -> None:
    write_text(tmp_path)
    run = start(0, 1, str(tmp_path), ["--keep-best"])
    run.checkpoints.save_if_best(run.progress, 2.0)
    folder, said = tmp_path / "save" / "best", list[str]()
    assert best_loss(folder, run.data.splits.fingerprint, said.append) == 2.0
    assert best_loss(folder, "another", said.append) == math.inf
    assert best_loss(tmp_path / "nowhere", "another", said.append) == math.inf and not said
    (folder / "iter_0000000" / "manifest.json").write_text("{}")
    assert best_loss(folder, run.data.splits.fingerprint, said.append) == math.inf and "WARNING" in said[-1]
    finish(run)


def test_a_run_with_its_best_checkpoint_to_the_end(work: Path, capfd: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    words = "--train-data text.txt --save run --eval-interval 2 --eval-iters 1 --keep-best --keep-last 1"
    flags = [*FLAGS, *words.split()]
    assert pretrain_gpt2.main([*flags, "--train-iters", "5"]) == 0
    assert "saved run/best/iter_0000002" in capfd.readouterr().out
    # Like any other folder: to load and to go on from, but not to go on in.
    assert pretrain_gpt2.main(["--load", "run/best", "--train-iters", "9"]) == 2
    assert "--save run/best is where the run in run keeps its best checkpoint" in capfd.readouterr().err
    assert pretrain_gpt2.main(["--load", "run/best", "--train-iters", "7", "--save", "on"]) == 0
    assert "continuing run/best/iter_0000005" in capfd.readouterr().out
    # Another run in the folder is another run.
    (work / "run" / "latest_checkpointed_iteration.txt").unlink()
    (work / "run" / "iter_0000005").rename(work / "away")
    assert pretrain_gpt2.main([*flags, "--train-iters", "1"]) == 0
    assert "WARNING: run/best is of an earlier run: it is now run/best.old-1" in capfd.readouterr().out
    assert (work / "run/best.old-1/iter_0000005").is_dir() and (work / "run/best/iter_0000001").is_dir()


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
    of_rank, of_world = dict.fromkeys(("RANK", "LOCAL_RANK"), f"{rank}"), ("WORLD_SIZE", "LOCAL_WORLD_SIZE")
    os.environ.update(of_rank | dict.fromkeys(of_world, f"{world_size}"))
    run_program.LAUNCHER_GRACE = run_program.SILENT_GRACE = 0.0
    with contextlib.redirect_stderr(io.StringIO()) as said:
        return train(folder, "--init-method", f"file://{folder}/the ranks meet"), said.getvalue()


def train(folder: str, *words: str) -> int:
    places = f"--train-data {folder}/text.txt --data-cache-path {folder}/cache --save {folder}/save --train-iters 1"
    return pretrain_gpt2.main([*SMALL, *places.split(), *words])


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


def test_a_folder_without_locks_and_one_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def unsupported(file: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    said: list[str] = []
    lock_folder(tmp_path, said.append).close()
    assert len(said) == 1 and "lock cannot be locked (No locks available)" in said[0]
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="--save .*file: cannot be written: .*"):
        lock_folder(tmp_path / "file", pytest.fail)
