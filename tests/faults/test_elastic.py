"""--elastic: a machine is lost, the run goes on with the others, and begins again when it is back, to the same bits."""

from __future__ import annotations

import json
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron.gpt2.monitor.incidents import read_incidents
from tests.faults.injector import inject
from tests.megatron.gpt2.dist.started_ranks import Rank, free_port, losses
from tests.megatron.gpt2.train.training_runs import write_text

STEPS = 9
WORDS = ("--exact-layouts", "2", "--save-interval", "2", "--exit-interval", f"{STEPS}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("elastic")
    os.utime(write_text(folder, 1000), (1e9, 1e9))
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[float]:
    """The losses of the run that nothing disturbs."""
    code, output = Rank(folder, ["--save", f"{folder}/alone", *WORDS], {}).end()
    assert code == 0, output
    return losses(folder / "alone")


def machine(folder: Path, save: Path, number: int, place: str, *faults: str) -> Rank:
    """The launcher of one of two machines, which starts a rank."""
    flags = f"--nproc-per-node 1 --nnodes 2 --node-rank {number} --init-method {place} --elastic --max-restarts 2"
    words = ("--save", str(save), *WORDS, *flags.split(), "--init-timeout", "8")
    return Rank(folder, words, {"SLURMD_NODENAME": f"127.0.0.{number + 1}"}, before=partial(inject, faults))


def starts(save: Path) -> list[dict[str, Any]]:
    return [one for one in read_incidents(save) if (one["kind"], one["who"]) == ("start", "rank_00000")]


@pytest.mark.wide
def test_a_machine_is_lost_and_comes_back(folder: Path, alone: list[float]) -> None:
    save, place = folder / "lost", f"file://{folder}/place"
    stays = machine(folder, save, 0, place, "hold:rank=0:step=4:attempt=1")
    gone = machine(folder, save, 1, place, "machine:rank=1:step=5")
    assert gone.end()[0] == -signal.SIGKILL
    while len(starts(save)) < 2:  # a machine that is back within --init-timeout was never away
        assert stays.process.is_alive(), stays.end()
        time.sleep(0.05)
    back = machine(folder, save, 1, place)
    ended = [stays.end(), back.end()]
    assert [code for code, _ in ended] == [0, 0], ended
    assert losses(save) == alone
    assert "restart: rank 0 ended with exit code 1: restart 1 of 2, from iteration 4\n" in ended[0][1]
    assert "restart: a machine has come, or starts its ranks again: all ranks meet anew\n" in ended[0][1]
    assert "stopped by ranks that came (--elastic) at iteration" in ended[0][1]
    assert [one["layout"]["data"] for one in starts(save)] == [2, 1, 2]
    assert json.loads((save / "ended.json").read_text())["reason"] == "--exit-interval"


def test_the_machine_where_all_meet_is_lost(folder: Path) -> None:
    """The other one names it, and ends at once instead of waiting for it."""
    save, place = folder / "lost_first", f"tcp://127.0.0.1:{free_port()}"
    nodes = [machine(folder, save, number, place, "machine:rank=0:step=3") for number in range(2)]
    (first, _), (code, output) = [node.end(60) for node in nodes]
    assert (first, code) == (-signal.SIGKILL, 1), output
    assert "error (127.0.0.2): rank 0 (127.0.0.1) gave no sign of life for " in output
    assert output.splitlines()[-1] == "error: the machine of rank 0, in whose store all machines meet, does not answer"
