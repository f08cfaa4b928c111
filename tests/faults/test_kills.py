"""Runs that are killed go on without a person, to the same bits; what cannot go on ends with its reason."""

from __future__ import annotations

import json
import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest

from data_utils.command_line import how_to_call
from megatron.gpt2.dist.run_program import LOOP
from megatron.gpt2.extensions.post_mortem.command import report
from megatron.gpt2.monitor.incidents import read_incidents
from tests.faults.injector import inject
from tests.megatron.gpt2.dist.started_ranks import Rank, free_port, losses
from tests.megatron.gpt2.train.training_runs import write_text

MP2 = "--model-parallel-size 2 --nproc-per-node 2 --save-interval 2 --exit-interval 7".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kills")
    os.utime(write_text(folder, 1000), (1e9, 1e9))
    return folder


def started(folder: Path, name: str, *words: str, faults: tuple[str, ...] = ()) -> Rank:
    return Rank(folder, ["--save", f"{folder}/{name}", *words], {}, before=partial(inject, faults))


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[float]:
    """The losses of the run that nothing disturbs."""
    code, output = started(folder, "alone", *MP2).end()
    assert code == 0, output
    assert len(found := losses(folder / "alone")) == 7
    return found


def kinds(save: Path) -> list[tuple[str, str, int]]:
    return [(one["who"].partition("_")[0], one["kind"], one["attempt"]) for one in read_incidents(save)]


def test_kills_at_a_step_and_inside_a_save(folder: Path, alone: list[float]) -> None:
    """The run is started again from its newest checkpoint, a local one, twice, and ends with the same losses."""
    save = folder / "killed"
    near = f"--local-checkpoint-dir {folder}/memory --local-checkpoint-interval 1 --max-restarts 3".split()
    faults = ("kill:rank=1:step=3", "kill:rank=0:step=4:attempt=1:inside=save:event=3")
    code, output = started(folder, "killed", *MP2, *near, faults=faults).end()
    assert code == 0, output
    assert losses(save) == alone
    assert "restart: rank 1 was ended by SIGKILL: restart 1 of 3, from iteration 3\n" in output
    assert "restart: rank 0 was ended by SIGKILL: restart 2 of 3, from iteration 3\n" in output
    ended = json.loads((save / "ended.json").read_text())
    assert (ended["reason"], ended["iteration"], ended["exit_code"]) == ("--exit-interval", 7, 0)
    found = kinds(save)
    assert [
        found.count(("launcher", kind, attempt))
        for kind, attempt in (("rank ended", 0), ("rank ended", 1), ("rank ended", 2), ("restart", 0), ("restart", 1))
    ] == [2, 2, 0, 1, 1]
    assert [
        found.count(("rank", kind, attempt))
        for kind, attempt in (("start", 0), ("start", 2), ("lost", 0), ("lost", 1), ("end", 2))
    ] == [2, 2, 1, 1, 2]
    lost = next(one for one in read_incidents(save) if one["kind"] == "lost")
    assert (lost["iteration"], lost["ranks"]) == (3, [1])


def test_a_crash_loop_ends(folder: Path) -> None:
    """One rank, which starts another process for itself under --max-restarts, is killed in the same step each time."""
    words = "--nproc-per-node 1 --max-restarts 10 --save-interval 2".split()
    code, output = started(folder, "loop", *words, faults=("kill:rank=0:step=3:attempt=any",)).end()
    assert code == 1, output
    assert output.count("restart: ") == LOOP - 1
    assert output.splitlines()[-1] == (
        "error: crash loop: rank 0 was ended by SIGKILL; the ranks have failed at iteration 3 3 times in a row; "
        f"{how_to_call('post_mortem')} {folder}/loop says what failed first"
    )
    assert not (folder / "loop" / "ended.json").exists()


def test_bad_input_is_not_started_again(folder: Path) -> None:
    (folder / "bad" / "incidents").mkdir(parents=True)  # as where a run was before
    code, output = started(folder, "bad", *MP2, "--max-restarts", "3", "--train-data", "nothing.txt").end()
    assert code == 2 and "restart" not in output and output.count("error") == 1, output
    assert kinds(folder / "bad") == [("rank", "refused", 0)] * 2
    death, _ = report(folder / "bad")
    assert death.kind == "bad input" and "nothing.txt" in death.what


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_stops_the_run_in_order(folder: Path, alone: list[float], name: str) -> None:
    """While --async-save writes: nothing is started again, and the run continues with the same bits."""
    save = folder / name
    rank = started(folder, name, *MP2, "--async-save", "--max-restarts", "3")
    end = time.monotonic() + 240
    while not (rank.output.exists() and "iteration        2/" in rank.output.read_text()):
        assert time.monotonic() < end and rank.process.is_alive(), rank.end()
        time.sleep(0.01)
    assert rank.process.pid is not None
    os.kill(rank.process.pid, signal.Signals[name])
    code, output = rank.end()
    assert code == 0 and "restart" not in output, output
    ended = json.loads((save / "ended.json").read_text())
    assert ended["reason"] in (name, "--exit-interval"), ended  # the signal may come in the last step
    if ended["iteration"] < 7:
        assert f"stopped by {name} at iteration {ended['iteration']}: the same command continues" in output
        code, output = started(folder, name, *MP2).end()
        assert code == 0, output
    assert losses(save) == alone


def test_machines_restart_their_ranks(folder: Path, alone: list[float]) -> None:
    """Two launchers, each with one of two ranks. The one that lost a rank starts it again, and the other meets it. The
    first rank is lost inside a save, before it
    has written its part: rank 0, whose part is written, does not wait for it until the time-out of ten minutes."""
    save, place = folder / "nodes", f"tcp://localhost:{free_port()}"
    words = (
        f"--model-parallel-size 2 --nproc-per-node 1 --nnodes 2 --init-method {place} --save-interval 2 "
        "--exit-interval 7 --max-restarts 2"
    ).split()
    nodes = [
        Rank(
            folder,
            ["--save", str(save), *words, "--node-rank", str(node)],
            {"SLURMD_NODENAME": f"node{node}"},
            before=partial(inject, ("kill:rank=1:step=4:inside=save:event=2", "kill:rank=0:step=5:attempt=1")),
        )
        for node in range(2)
    ]
    ended = [node.end() for node in nodes]
    assert [code for code, _ in ended] == [0, 0], ended
    assert losses(save) == alone
    assert "rank 1 was ended by SIGKILL: restart 1 of 2, from iteration 2" in ended[1][1]
    assert "rank 0 was ended by SIGKILL: restart 1 of 2, from iteration " in ended[0][1]
    assert all(
        "restart: a machine has come, or starts its ranks again: all ranks meet anew\n" in said for _, said in ended
    )
    assert "error (node0): rank 1 (node1) gave no sign of life for " in ended[0][1]
    assert {one["who"] for one in read_incidents(save)} == {
        "rank_00000",
        "rank_00001",
        "launcher_node0",
        "launcher_node1",
    }
