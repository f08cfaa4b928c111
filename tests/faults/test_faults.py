"""A rank is cut off, is stopped, or has a full disk: the run reports it in one line, and every checkpoint stays
complete."""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path
from unittest import mock

import pytest

from megatron.gpt2.checkpoint.folder import find_checkpoint
from megatron.gpt2.dist import run_program
from megatron.gpt2.extensions.post_mortem.command import report
from tests.faults.injector import Fault, cut, full, plant, stop
from tests.megatron.gpt2.dist.started_ranks import StartedRank, losses
from tests.megatron.gpt2.train.training_runs import write_text

FLAGS = (
    "--model-parallel-size 2 --nproc-per-node 2 --save-interval 2 --exit-interval 5 --log-interval 1 "
    "--distributed-timeout-minutes 0.1"
).split()
HOST = os.uname().nodename
ENDS = "the run ends here; the same command continues from the last checkpoint"
Ended = dict[str, tuple[int | None, list[str], Path]]


def plant_and_hurry(fault: Fault) -> None:
    """Run in the launcher's process. Shortens the two waits before the launcher kills a process that does not
    answer."""
    plant(fault)
    if fault.action is stop:
        mock.patch.object(run_program, "EXIT_TIMEOUT", 0.5).start()


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """The results for each fault of rank 1 before its fourth step: exit code, lines and --save folder. The runs are
    parallel, since they mostly wait."""
    folder = tmp_path_factory.mktemp("faults")
    os.utime(write_text(folder, 1000), (1e9, 1e9))
    runs = {}
    for fault in (cut, full, stop):
        before, save = partial(plant_and_hurry, Fault(fault, rank=1, step=3)), folder / fault.__name__
        runs[save] = StartedRank(folder, ["--save", str(save), *FLAGS], {}, before=before)
    ended = {save: run.end() for save, run in runs.items()}
    return {save.name: (code, output.splitlines(), save) for save, (code, output) in ended.items()}


def check(save: Path, code: int | None, lines: list[str], pattern: str) -> None:
    """The run fails with one line that gives the reason, without a traceback, and the checkpoint on disk is
    complete."""
    (line,) = (line for line in lines if line.startswith("error"))
    assert code == 1 and re.fullmatch(pattern, line), line
    assert not any("Traceback" in line for line in lines), lines
    checkpoint = find_checkpoint(save, log=pytest.fail)
    assert checkpoint is not None and checkpoint.iteration == 2
    assert [path.name for path in save.glob("iter_*")] == ["iter_0000002"]


def test_cut(ended: Ended) -> None:
    """All connections of rank 1 are lost. Each side names the other, unless it is stopped first. post_mortem.py reads
    both reports."""
    code, lines, save = ended["cut"]
    of_rank_1 = [line for line in lines if line.startswith(f"error ({HOST}): rank 0 ({HOST}) ")]
    check(
        save,
        code,
        [line for line in lines if line not in of_rank_1],
        rf"error \({HOST}\): rank 1 \({HOST}\) (sent no heartbeat for \d+ s|left): {ENDS}",
    )
    assert len(of_rank_1) <= 1 and all(line.endswith(ENDS) for line in of_rank_1)
    failure, _ = report(save)
    assert (failure.kind, failure.cause) == ("lost link", "ranks 0-1 lost each other at iteration 3")


def test_full(ended: Ended) -> None:
    """Rank 1 cannot write anything, not even an error. The run continues, and gives the reason at each save and at its
    end."""
    code, lines, save = ended["full"]
    wrong = (
        rf"rank 1 could not write its files: {save}/iter_\d+\.tmp-\S+: cannot write its [\d,]+ bytes: "
        "File too large; earlier checkpoints are untouched: make room or give another --save"
    )
    check(save, code, lines, f"error: iteration 5 is not saved: {wrong}")
    assert len(losses(save)) == 5
    assert any(re.fullmatch(f"WARNING: no checkpoint at iteration 4: {wrong}", line) for line in lines), lines
    failure, _ = report(save)
    what = rf"rank 0 \({HOST}\), iteration 5: iteration 5 is not saved: {wrong}"
    assert failure.kind == "full disk" and re.fullmatch(what, failure.cause), failure


def test_stop(ended: Ended) -> None:
    """The fault is SIGSTOP."""
    code, lines, save = ended["stop"]
    check(
        save,
        code,
        lines,
        rf"error \({HOST}\): rank 1 \({HOST}\) sent no heartbeat for \d+ s and did not reach "
        rf"all_reduce \(\S+:\d+, called at \S+:\d+\) within 6 s, where rank 0 \({HOST}\) waits: {ENDS}",
    )
    failure, _ = report(save)
    assert (failure.kind, failure.cause) == (
        "hang",
        "rank 1 did not reach a collective that the others had entered at iteration 3",
    )
