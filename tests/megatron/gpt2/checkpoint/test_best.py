"""--keep-best: which checkpoint is kept in best/, over restarts, and what may be done with that folder."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from megatron.gpt2.checkpoint.folder import best_loss, find_checkpoint
from megatron.gpt2.commands import pretrain_gpt2
from tests.distributed import run_ranks
from tests.megatron.gpt2.train.training_runs import finish, start, steps, write_text
from tests.test_command_line import FLAGS, work  # noqa: F401


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
    flags = [
        *FLAGS,
        "--train-data",
        "text.txt",
        "--save",
        "run",
        "--eval-interval",
        "2",
        "--eval-iters",
        "1",
        "--keep-best",
        "--keep-last",
        "1",
    ]
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
