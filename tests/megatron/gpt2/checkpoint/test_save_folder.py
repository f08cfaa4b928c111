"""The --save folder: every rank finds the same checkpoint, old checkpoints are removed, and the best one is kept. Only
one run owns the folder, even on a file system without locks or if the owner's network was cut."""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import math
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from data_utils.files import fsync_path
from megatron.gpt2.checkpoint import lease, writer
from megatron.gpt2.checkpoint.lease import Lease
from megatron.gpt2.checkpoint.reader import NativeCheckpoint
from megatron.gpt2.checkpoint.save_folder import (
    LATEST_FILE,
    FolderInUse,
    Gather,
    find_checkpoint,
    saved_best_loss,
)
from megatron.gpt2.checkpoint.saver import Saver
from megatron.gpt2.checkpoint.writer import ShardedTensor
from megatron.gpt2.commands import pretrain_gpt2
from megatron.gpt2.dist import run_program
from megatron.gpt2.train import loop
from megatron.gpt2.train.train_step import train_step
from megatron.gpt2.train.trainer import Trainer
from tests.distributed import run_ranks
from tests.megatron.gpt2.checkpoint.saved_states import (
    assert_holds,
    find,
    save,
)
from tests.megatron.gpt2.train.training_runs import SMALL, finish, start, steps, write_text
from tests.test_command_line import FLAGS


def test_the_latest_file_decides_and_newer_ones_are_reported(tmp_path: Path) -> None:
    (tmp_path / "iter_0000100.tmp-1f").mkdir()
    (tmp_path / "metrics.jsonl").touch()
    assert find(tmp_path / "missing") == find(tmp_path) == (None, "")
    save(tmp_path, 100)
    save(tmp_path, 200)
    assert find(tmp_path) == (200, "")
    (tmp_path / LATEST_FILE).write_text("100")
    assert find(tmp_path)[0] == 100
    assert "the existing one is now" in "".join(save(tmp_path, 200, seed=5))
    assert_holds(NativeCheckpoint(tmp_path / "iter_0000200"), 5)
    assert_holds(NativeCheckpoint(tmp_path / "iter_0000200.old-1"), 200)


def on_three_ranks(of_rank: Callable[[int, Gather], Any]) -> list[Any]:
    """Call `of_rank` with a rank and its `gather` in three threads. Return the result or the error of each rank."""
    texts, barrier = [""] * 3, threading.Barrier(3, timeout=240)

    def gather(rank: int, text: str) -> list[str]:
        texts[rank] = text
        barrier.wait()
        result = list(texts)
        barrier.wait()
        return result

    def run(rank: int) -> Any:
        try:
            return of_rank(rank, functools.partial(gather, rank))
        except Exception as error:
            return error

    with ThreadPoolExecutor(3) as ranks:
        return list(ranks.map(run, range(3)))


def test_all_ranks_come_to_the_same_answer(tmp_path: Path) -> None:
    save(tmp_path, 100)
    save(tmp_path, 200)
    (tmp_path / LATEST_FILE).write_text("garbage")

    def load(rank: int, gather: Gather, folder: Path = tmp_path) -> Any:
        return find(folder, rank=rank, gather=gather)

    assert [found[0] for found in on_three_ranks(load)] == [200] * 3
    # Each rank checks a share of the files. If a file is damaged, all ranks report this file.
    tables = [f"tables/rank_0000{rank}.jsonl" for rank in (0, 1)]
    for file in [*sorted(NativeCheckpoint(tmp_path / "iter_0000200").files), *tables]:
        victim = tmp_path / "iter_0000200" / file
        data = victim.read_bytes()
        victim.write_bytes(data[:-1] + bytes([data[-1] ^ 4]))
        found = on_three_ranks(load)
        assert [iteration for iteration, _ in found] == [100] * 3
        assert all(f"{file}: damaged" in logged for _, logged in found)
        victim.write_bytes(data)
    # If nodes do not share the folder, every rank raises an error and no rank waits forever.
    (tmp_path / LATEST_FILE).write_text("200")
    shutil.rmtree(tmp_path / "iter_0000100")
    elsewhere = tmp_path / "elsewhere"
    for _ in range(2):  # Rank 2 first finds no checkpoint, then a different one.
        found = on_three_ranks(lambda rank, gather: load(rank, gather, elsewhere if rank == 2 else tmp_path))
        assert all(isinstance(error, ValueError) for error in found)
        assert "rank 2 sees different files" in "".join(map(str, found[:2]))
        save(elsewhere, 200, seed=1)


def list_iterations(folder: Path) -> list[str]:
    return sorted(path.name.removeprefix("iter_0000") for path in folder.glob("iter_*"))


def test_keep_last(tmp_path: Path) -> None:
    for iteration in (100, 200, 300):
        save(tmp_path, iteration, keep_last=5)
    save(tmp_path, 400, keep_last=2)
    assert list_iterations(tmp_path) == ["300", "400"]
    # Rewind the run to iteration 300. Later iterations and folders renamed to .old-N stay.
    (tmp_path / LATEST_FILE).write_text("300")
    shutil.rmtree(tmp_path / "iter_0000300" / "mp_rank_01")
    assert "now" in "".join(save(tmp_path, 300, keep_last=1, seed=5))
    assert list_iterations(tmp_path) == ["300", "300.old-1", "400"]
    assert (tmp_path / LATEST_FILE).read_text() == "300\n"
    save(tmp_path, 350, keep_last=1)
    assert list_iterations(tmp_path) == ["300.old-1", "350", "400"]
    iteration, logged = find(tmp_path)
    assert iteration == 350
    assert "iter_0000400 is newer" in logged


def test_an_error_while_older_ones_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 100)

    def fail(path: Path, **options: Any) -> None:
        raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr(shutil, "rmtree", fail)
    logged = save(tmp_path, 400, keep_last=1)
    assert [line for line in logged if "WARNING: --keep-last 1: " in line and "iter_0000100" in line]
    monkeypatch.undo()
    assert list_iterations(tmp_path) == ["100.tmp-removed", "400"] and find(tmp_path) == (400, "")
    save(tmp_path, 500, keep_last=1)
    assert list_iterations(tmp_path) == ["500"]


def best(folder: Path) -> tuple[int, float, list[str]]:
    """Return the iteration in best/, its validation loss, and the names of all iterations in best/."""
    found = find_checkpoint(f"{folder}/save/best", log=print)
    assert found.verify() == ""
    return found.iteration, found.metadata["valid_loss"], sorted(path.name for path in found.path.parent.glob("i*"))


def losses(rank: int, world_size: int, folder: Path) -> list[tuple[int, float, list[str]]]:
    """Train with one restart. Only rank 0 gets true validation losses. Return `best` after each loss."""
    seen: list[tuple[int, float, list[str]]] = []
    for of_start in ((math.nan, 3.0, 3.5, 2.5), (2.6, 2.4)):
        trainer = start(rank, world_size, folder, "--keep-best --model-parallel-size 2 --async-save")
        assert trainer.progress.iteration == len(seen)
        for loss in of_start:
            steps(trainer, 1)
            trainer.checkpoints.save_if_best(loss if rank == 0 else math.inf)
            trainer.checkpoints.finish()
            seen.append((0, 0.0, list[str]()) if math.isnan(loss) else best(folder))
        assert trainer.checkpoints.saved_iteration is None  # Only best/ was saved.
        trainer.checkpoints.save()
        trainer.checkpoints.finish()  # All ranks call `finish`.
        finish(trainer)
    splits = trainer.data.splits
    data = {"data_fingerprint": splits.fingerprint, "held_out_fingerprint": splits.held_out_fingerprint}
    assert saved_best_loss(folder / "save/best", data, pytest.fail) == 2.4
    for name in data:
        assert saved_best_loss(folder / "save/best", {**data, name: "other data"}, pytest.fail) == math.inf
    unknown = data | {"unknown to an older version": "x"}
    assert saved_best_loss(folder / "save/best", unknown, pytest.fail) == 2.4
    return seen


def test_the_lowest_loss_is_kept_over_a_restart(tmp_path: Path) -> None:
    write_text(tmp_path)
    expected = [(number, loss, [f"iter_000000{number}"]) for number, loss in ((2, 3.0), (2, 3.0), (4, 2.5), (4, 2.5))]
    for seen in run_ranks(losses, 2, tmp_path):
        assert seen[1:] == [*expected, (6, 2.4, ["iter_0000006"])]
    (tmp_path / "save/best/iter_0000006/manifest.json").write_text("{}")
    assert saved_best_loss(tmp_path / "save/best", {}, lambda line: None) == math.inf


def test_a_run_with_its_best_checkpoint_to_the_end(work: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = "--train-data text.txt --save run --eval-interval 2 --eval-iters 1 --keep-best --keep-last 1"
    flags = [*FLAGS, *words.split()]
    assert pretrain_gpt2.main([*flags, "--train-iters", "5"]) == 0
    assert "saved run/best/iter_0000002" in capfd.readouterr().out
    # A run cannot save into best/.
    assert pretrain_gpt2.main(["--load", "run/best", "--train-iters", "9"]) == 2
    assert "--save run/best is where the run in run keeps its best checkpoint" in capfd.readouterr().err
    # A new run in the same folder starts without a best loss.
    (work / "run" / "latest_checkpointed_iteration.txt").unlink()
    (work / "run" / "iter_0000005").rename(work / "away")
    assert pretrain_gpt2.main([*flags, "--train-iters", "1"]) == 0
    assert "WARNING: run/best is of an earlier run: it is now run/best.old-1" in capfd.readouterr().out
    assert (work / "run/best.old-1/iter_0000005").is_dir() and (work / "run/best/iter_0000001").is_dir()


def second_run(rank: int, world_size: int, folder: Path) -> tuple[int, str]:
    of_rank, of_world = dict.fromkeys(("RANK", "LOCAL_RANK"), f"{rank}"), ("WORLD_SIZE", "LOCAL_WORLD_SIZE")
    os.environ.update(of_rank | dict.fromkeys(of_world, f"{world_size}"))
    run_program.LAUNCHER_GRACE = run_program.SILENT_GRACE = 0.0
    with contextlib.redirect_stderr(io.StringIO()) as logged:
        return train(folder, "--init-method", f"file://{folder}/the ranks meet"), logged.getvalue()


def train(folder: Path, *words: str) -> int:
    places = f"--train-data {folder}/text.txt --data-cache-path {folder}/cache --save {folder}/save --train-iters 1"
    return pretrain_gpt2.main([*SMALL, *places.split(), *words])


def test_the_second_run_is_refused_on_all_its_ranks(tmp_path: Path):
    write_text(tmp_path)
    held = Lease(tmp_path / "save")
    (code, logged), second = run_ranks(second_run, 2, tmp_path)
    assert [path.name for path in (tmp_path / "save").iterdir()] == ["lease_0000000001"], "it wrote something"
    assert (code, second) == (2, (2, ""))
    assert logged == (
        f"error: --save {tmp_path}/save is in use by process {os.getpid()} on {socket.gethostname()}: wait "
        "for that run, end it, or give this one another --save\n"
    )
    held.release()
    assert train(tmp_path) == 0


def test_a_folder_that_is_moved_during_a_run_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    write_text(tmp_path)
    save, owners = tmp_path / "save", list[Lease]()

    def move(trainer: Trainer) -> None:
        """Move the folder twice. After the second move, a different run takes the folder."""
        train_step(trainer)
        if trainer.progress.iteration in (2, 4):
            save.rename(tmp_path / f"moved_{trainer.progress.iteration}")
        if trainer.progress.iteration == 4:
            owners.append(Lease(save))

    monkeypatch.setattr(loop, "train_step", move)
    flags = "--save-interval 2 --train-iters 6 --keep-best --eval-iters 1 --eval-interval 2 --log-interval 1".split()
    assert train(tmp_path, *flags) == 1
    owners[0].release()
    logged = capsys.readouterr().out
    assert f"WARNING: --save {save} was removed or moved during the run: it is made" in logged
    assert f"stopped: --save {save} now belongs to process" in logged
    assert (tmp_path / "moved_2/iter_0000002").is_dir()
    for name in ("config.json", "lease_0000000001", "history.jsonl", "best/tokenizer/tokenizer_facts.json"):
        assert (tmp_path / "moved_4" / name).is_file()


def no_locks(*args: Any) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


@pytest.fixture
def without_locks() -> Iterator[None]:
    """Disable file locks, and shorten the times of a lease."""
    with mock.patch.multiple(lease, try_lock=no_locks, RENEWAL_INTERVAL=0.1, LIFETIME=1.0):
        yield


def save_as(owner: Lease, iteration: int) -> list[str]:
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
    assert not save_as(first, 1)
    first._released.set()  # Stop renewing the first lease, as if its machine had stopped.
    second = Lease(tmp_path)
    assert not save_as(second, 2)
    (warning,) = save_as(first, 3)
    assert f"--save {tmp_path} now belongs to process {os.getpid()} on " in warning
    assert list_iterations(tmp_path) == ["001", "002"]
    assert first.is_lost and not first.is_held() and second.is_held()
    second.release()


@pytest.mark.usefixtures("without_locks")
@pytest.mark.parametrize("iteration", [2, 3])
@pytest.mark.parametrize("stops_after", ["the check", "the first rename"])
def test_an_owner_that_stops_inside_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stops_after: str, iteration: int
) -> None:
    """The new owner removes the temporary folder. The old owner's commit then fails. The latest-iteration file still
    names the new owner's checkpoint."""
    first = Lease(tmp_path)
    assert not save_as(first, 1)
    first._released.set()  # Stop renewing the lease, as a suspended owner would.
    first._renewal.join()
    owners, check = [first], first.check

    def stop() -> None:
        monkeypatch.undo()
        owners.append(Lease(tmp_path))
        assert not [line for line in save_as(owners[1], iteration) if "exists already" not in line]

    def check_and_stop() -> None:
        check()
        stop()

    if stops_after == "the check":
        monkeypatch.setattr(first, "check", check_and_stop)
    else:
        fsync = fsync_path
        monkeypatch.setattr(writer, "fsync_path", lambda path: stop() if path == tmp_path else fsync(path))
    (warning,) = save_as(first, 2)
    assert f"now belongs to process {os.getpid()} on " in warning, warning
    found = find_checkpoint(tmp_path, log=pytest.fail)
    assert found.metadata["owner"] == id(owners[1]) and found.iteration == iteration
    assert (tmp_path / LATEST_FILE).read_text() == f"{iteration}\n" and not list(tmp_path.glob(f"{LATEST_FILE}.tmp*"))
    owners[1].release()
