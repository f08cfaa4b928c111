"""A rank is cut off, is stopped, or has a full disk: the run reports the fault in one line, and every checkpoint
stays complete. Runs whose ranks or machines are killed restart automatically, and their losses are bit-identical. A run
that cannot continue gives the reason."""

from __future__ import annotations

import json
import os
import re
import signal
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from data_utils.command_line import how_to_call
from megatron.gpt2.checkpoint.save_folder import find_checkpoint
from megatron.gpt2.dist import run_program
from megatron.gpt2.dist.launch import Launch
from megatron.gpt2.dist.ranks import RankInfo
from megatron.gpt2.dist.rendezvous import join_rendezvous
from megatron.gpt2.dist.run_program import CRASH_LOOP_FAILURES
from megatron.gpt2.extensions.post_mortem.command import report
from megatron.gpt2.monitor.incidents import read_incidents
from megatron.gpt2.train import start_and_end
from tests.faults import injector
from tests.faults.injector import Fault, cut, full, hold, kill, plant, stop
from tests.megatron.gpt2.dist.started_ranks import StartedRank, free_port, losses, wait_until
from tests.megatron.gpt2.train.training_runs import write_text

FLAGS = (
    "--model-parallel-size 2 --nproc-per-node 2 --save-interval 2 --exit-interval 5 --log-interval 1 "
    "--distributed-timeout-minutes 0.1"
).split()
HOST = os.uname().nodename
ENDS = "the run ends here; the same command continues from the last checkpoint"


def plant_and_hurry(fault: Fault) -> None:
    """Plant the fault in the launcher's process, and shorten the two waits before the launcher kills a process that
    does not answer."""
    plant(fault)
    if fault.action is stop:
        mock.patch.object(run_program, "EXIT_TIMEOUT", 0.5).start()


def test_a_cut_a_full_disk_and_a_stop(tmp_path: Path) -> None:
    """Each fault of rank 1 before the fourth step ends its run with one line that gives the reason, without a
    traceback. The checkpoint on disk is complete. The runs are parallel, since they mostly wait.

    cut: All connections of rank 1 are lost. Each side names the other one as lost, unless the launcher stops a side
        before that.
    full: Rank 1 cannot write anything, not even an error. The run continues, and gives the reason at each save.
    stop: A rank that gets SIGSTOP sends no heartbeat and closes no connection.
    """
    os.utime(write_text(tmp_path, 1000), (1e9, 1e9))
    unsaved = (
        rf"rank 1 could not write its files: {tmp_path}/full/iter_\d+\.tmp-\S+: cannot write its [\d,]+ bytes: "
        "File too large; earlier checkpoints are untouched: make room or give another --save"
    )
    not_saved, rank_1 = f"iteration 5 is not saved: {unsaved}", rf"error \({HOST}\): rank 1 \({HOST}\)"
    # {fault: (pattern of the error line, kind of the failure, pattern of the cause that post_mortem.py prints)}
    expected = {
        cut: (
            rf"{rank_1} (sent no heartbeat for \d+ s|left): {ENDS}",
            "lost link",
            "ranks 0-1 lost each other at iteration 3",
        ),
        full: (f"error: {not_saved}", "failed save", rf"rank 0 \({HOST}\), iteration 5: {not_saved}"),
        stop: (
            rf"{rank_1} sent no heartbeat for \d+ s and did not reach all_reduce \(\S+:\d+, called at \S+:\d+\) "
            rf"within 6 s, where rank 0 \({HOST}\) waits: {ENDS}",
            "hang",
            "rank 1 did not reach a collective that the others had entered at iteration 3",
        ),
    }
    runs = {}
    for fault in expected:
        before, save = partial(plant_and_hurry, Fault(fault, rank=1, step=3)), tmp_path / fault.__name__
        words = ["--save", str(save), *FLAGS, *["--async-save"] * (fault is full)]
        runs[fault] = save, StartedRank(tmp_path, words, {}, before=before)
    for fault, (save, run) in runs.items():
        code, output = run.end()
        pattern, kind, cause = expected[fault]
        errors = [line for line in output.splitlines() if line.startswith("error")]
        (line,) = (line for line in errors if fault is not cut or f" rank 0 ({HOST}) " not in line)
        assert code == 1 and re.fullmatch(pattern, line) and "Traceback" not in output, output
        assert find_checkpoint(save, log=pytest.fail).iteration == 2
        assert [path.name for path in save.glob("iter_*")] == ["iter_0000002"]
        failure, _ = report(save)
        assert failure.kind == kind and re.fullmatch(cause, failure.cause), failure
        if fault is full:
            assert len(losses(save)) == 5
            assert re.search(f"^WARNING: no checkpoint at iteration 4: {unsaved}$", output, re.MULTILINE), output


MP2 = "--model-parallel-size 2 --nproc-per-node 2 --save-interval 2 --exit-interval 7"
ELASTIC = "--exact-layouts 2 --save-interval 2 --exit-interval 9"
MEET_AGAIN = "restart: a machine has joined or restarted its ranks: all ranks restart\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kills")
    os.utime(write_text(folder, 1000), (1e9, 1e9))
    return folder


def started(save: Path, words: str, *faults: Fault, **environ: str) -> StartedRank:
    return StartedRank(save.parent, ["--save", str(save), *words.split()], environ, before=partial(plant, *faults))


def undisturbed(save: Path, words: str) -> list[float]:
    """Return the losses of a run without faults."""
    code, output = started(save, words).end()
    assert code == 0, output
    return losses(save)


@pytest.fixture(scope="module")
def reference(folder: Path) -> list[float]:
    assert len(found := undisturbed(folder / "reference", MP2)) == 7
    return found


def noted(save: Path) -> Counter[tuple[str, str, int]]:
    return Counter((line["who"].partition("_")[0], line["kind"], line["attempt"]) for line in read_incidents(save))


def test_kills_at_a_step_and_inside_a_save(folder: Path, reference: list[float]) -> None:
    """The run restarts twice from its newest checkpoint, which is a local one, and ends with the same losses."""
    save = folder / "killed"
    near = f"--local-checkpoint-dir {folder}/memory --local-checkpoint-interval 1 --max-restarts 3"
    faults = Fault(kill, rank=1, step=3), Fault(kill, rank=0, step=4, attempt=1, in_save=3)
    code, output = started(save, f"{MP2} {near}", *faults).end()
    assert code == 0, output
    assert losses(save) == reference
    assert "restart: rank 1 was ended by SIGKILL: restart 1 of 3, from iteration 3\n" in output
    assert "restart: rank 0 was ended by SIGKILL: restart 2 of 3, from iteration 3\n" in output
    ended = json.loads((save / "ended.json").read_text())
    assert (ended["reason"], ended["iteration"], ended["exit_code"]) == ("--exit-interval", 7, 0)
    expected = Counter({("rank", "end", 2): 2})
    for attempt in range(2):
        expected[("launcher", "rank ended", attempt)] = expected[("rank", "start", attempt)] = 2
        expected[("launcher", "restart", attempt)] = expected[("rank", "lost", attempt)] = 1
    assert expected <= noted(save) and not noted(save)["launcher", "rank ended", 2]
    lost = next(incident for incident in read_incidents(save) if incident["kind"] == "lost")
    assert (lost["iteration"], lost["ranks"]) == (3, [1])


def test_a_crash_loop_ends(folder: Path) -> None:
    """Under --max-restarts, the only rank, which runs in a child process, is killed at the same step in each
    attempt."""
    save = folder / "loop"
    fault = Fault(kill, rank=0, step=3, attempt=None)
    code, output = started(save, "--nproc-per-node 1 --max-restarts 10 --save-interval 2", fault).end()
    assert code == 1, output
    assert output.count("restart: ") == CRASH_LOOP_FAILURES - 1
    assert output.splitlines()[-1] == (
        "error: crash loop: rank 0 was ended by SIGKILL; the ranks have failed at iteration 3 3 times in a row; "
        f"{how_to_call('post_mortem')} {save} prints what failed first"
    )
    assert not (save / "ended.json").exists()


def stop_before_joining() -> None:
    """Let rank 0 of the first attempt stop before it joins the other rank."""

    def join(launch: Launch, *args: Any) -> RankInfo:
        if launch.rank == launch.restart_count == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        return join_rendezvous(launch, *args)

    mock.patch.object(run_program, "EXIT_TIMEOUT", 0.5).start()
    mock.patch.object(start_and_end, "join_rendezvous", join).start()


def test_a_rank_that_does_not_join_is_named_and_restarted(folder: Path, reference: list[float]) -> None:
    """Rank 1 prints the error, because the first rank of its machine is missing."""
    words = [*MP2.split(), *f"--save {folder}/late --max-restarts 1 --init-timeout 5".split()]
    code, output = StartedRank(folder, words, {}, before=stop_before_joining).end()
    assert code == 0 and losses(folder / "late") == reference, output
    error = f"error ({HOST}): rank 0 of 2 did not join within 5 s (--init-timeout); rank 1 ({HOST}) did\n"
    assert output.count(error) == 1 and "restart: rank 1 ended with exit code 1: restart 1 of 1" in output, output


def test_bad_input_is_not_started_again(folder: Path) -> None:
    save = folder / "bad"
    (save / "incidents").mkdir(parents=True)  # An earlier run has left this folder.
    code, output = started(save, f"{MP2} --max-restarts 3 --train-data nothing.txt").end()
    assert code == 2 and "restart" not in output and output.count("error") == 1, output
    assert noted(save) == {("rank", "refused", 0): 2}
    failure, _ = report(save)
    assert failure.kind == "bad input" and "nothing.txt" in failure.cause


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_stops_the_run_in_order(folder: Path, reference: list[float], name: str) -> None:
    """The signal arrives while --async-save writes. The launcher does not restart the run, and the run can be resumed
    with equal bits."""
    save = folder / name
    rank = started(save, f"{MP2} --async-save --max-restarts 3")
    wait_until(lambda: "iteration        2/" in rank.output.read_text())
    os.kill(rank.process.pid, signal.Signals[name])
    code, output = rank.end()
    assert code == 0 and "restart" not in output, output
    ended = json.loads((save / "ended.json").read_text())
    assert ended["reason"] in (name, "--exit-interval"), ended  # The signal may arrive in the last step.
    if ended["iteration"] < 7:
        assert f"stopped by {name} at iteration {ended['iteration']}: the same command continues" in output
        undisturbed(save, MP2)
    assert losses(save) == reference


def test_machines_restart_their_ranks(folder: Path, reference: list[float]) -> None:
    """Two launchers run one rank each. The launcher of the killed rank restarts it, and the other launcher joins again.
    The first kill is inside a save, before the rank has written its files. Rank 0 has written its files, and must not
    wait ten minutes for the files of the killed rank."""
    save = folder / "nodes"
    words = (
        "--model-parallel-size 2 --nproc-per-node 1 --nnodes 2 --save-interval 2 --exit-interval 7 --max-restarts 2 "
        f"--init-method tcp://localhost:{free_port()} --node-rank"
    )
    faults = Fault(kill, rank=1, step=4, in_save=2), Fault(kill, rank=0, step=5, attempt=1)
    nodes = [started(save, f"{words} {node}", *faults, SLURMD_NODENAME=f"node{node}") for node in range(2)]
    ended = [node.end() for node in nodes]
    assert [code for code, _ in ended] == [0, 0], ended
    assert losses(save) == reference
    first, second = (said for _, said in ended)
    assert "rank 1 was ended by SIGKILL: restart 1 of 2, from iteration 2" in second and MEET_AGAIN in second
    # Rank 0 may end with an error before its launcher hears of the first restart. The launcher then counts it, too.
    restarts = re.findall(r"rank 0 (.*): restart \d of 2, from iteration ", first)
    assert restarts[-1:] == ["was ended by SIGKILL"] and (MEET_AGAIN in first or len(restarts) == 2), first
    assert "error (node0): rank 1 (node1) sent no heartbeat for " in first
    assert {incident["who"] for incident in read_incidents(save)} == {
        *(f"rank_0000{rank}" for rank in range(2)),
        *(f"launcher_node{node}" for node in range(2)),
    }


@pytest.mark.wide
def test_a_suspended_rank_does_not_block_the_other_machine(folder: Path, reference: list[float]) -> None:
    """The launcher of the suspended rank does not wait ten minutes for a save."""
    save = folder / "suspended"
    words = (
        "--model-parallel-size 2 --nproc-per-node 1 --nnodes 2 --save-interval 2 --exit-interval 7 --max-restarts 1 "
        f"--distributed-timeout-minutes 0.1 --init-method tcp://localhost:{free_port()} --node-rank"
    )
    nodes = [
        started(save, f"{words} {node}", Fault(stop, rank=1, step=3), SLURMD_NODENAME=f"node{node}")
        for node in range(2)
    ]
    ended = [node.end() for node in nodes]
    assert [code for code, _ in ended] == [0, 0], ended
    assert losses(save) == reference and MEET_AGAIN in ended[1][1]


def machine(save: Path, number: int, place: str, *faults: Fault) -> StartedRank:
    """Start the launcher of one of two machines of an elastic run. The launcher starts one rank."""
    flags = f"--nproc-per-node 1 --nnodes 2 --node-rank {number} --init-method {place} --elastic --max-restarts 2"
    words = f"{ELASTIC} {flags} --init-timeout 8"
    return started(save, words, *faults, SLURMD_NODENAME=f"127.0.0.{number + 1}")


@pytest.mark.wide
def test_a_machine_is_lost_and_comes_back(folder: Path) -> None:
    """The run continues on the other machine, and restarts on both when the lost machine is back."""
    save, place = folder / "lost", f"file://{folder}/place"

    def starts() -> list[dict[str, Any]]:
        return [line for line in read_incidents(save) if (line["kind"], line["who"]) == ("start", "rank_00000")]

    stays = machine(save, 0, place, Fault(hold, rank=0, step=4, attempt=1))
    gone = machine(save, 1, place, Fault(injector.machine, rank=1, step=5))
    assert gone.end()[0] == -signal.SIGKILL
    wait_until(lambda: len(starts()) == 2)  # A machine that returns within --init-timeout does not count as lost.
    back = machine(save, 1, place)
    ended = [stays.end(), back.end()]
    assert [code for code, _ in ended] == [0, 0], ended
    assert losses(save) == undisturbed(folder / "alone_elastic", ELASTIC)
    said = ended[0][1]
    assert "restart: rank 0 ended with exit code 1: restart 1 of 2, from iteration 4\n" in said and MEET_AGAIN in said
    assert "stopped by new ranks (--elastic) at iteration" in said
    assert [incident["layout"]["data"] for incident in starts()] == [2, 1, 2]
    assert json.loads((save / "ended.json").read_text())["reason"] == "--exit-interval"
    assert any("rank 1 on 127.0.0.2 stopped responding at iteration 5" in line for line in report(save)[1])


def test_the_machine_where_all_meet_is_lost(folder: Path) -> None:
    """The other machine names the lost machine and ends immediately."""
    save, place = folder / "lost_first", f"tcp://127.0.0.1:{free_port()}"
    nodes = [machine(save, number, place, Fault(injector.machine, rank=0, step=3)) for number in range(2)]
    (first, _), (code, output) = [node.end(60) for node in nodes]
    assert (first, code) == (-signal.SIGKILL, 1), output
    assert "error (127.0.0.2): rank 0 (127.0.0.1) sent no heartbeat for " in output
    assert output.splitlines()[-1] == "error: the machine of rank 0, which serves the rendezvous, does not answer"
