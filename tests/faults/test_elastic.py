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
from tests.megatron.gpt2.dist.started_ranks import Rank, losses
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
    words = (
        "--save",
        str(save),
        *WORDS,
        "--nproc-per-node",
        "1",
        "--nnodes",
        "2",
        "--node-rank",
        f"{number}",
        "--init-method",
        place,
        "--init-timeout",
        "8",
        "--elastic",
        "--max-restarts",
        "2",
    )
    return Rank(folder, words, {"SLURMD_NODENAME": f"127.0.0.{number + 1}"}, before=partial(inject, faults))


def starts(save: Path) -> list[dict[str, Any]]:
    return [one for one in read_incidents(save) if (one["kind"], one["who"]) == ("start", "rank_00000")]


@pytest.mark.wide
@pytest.mark.parametrize("lost", [0, 1])
def test_a_machine_is_lost_and_comes_back(folder: Path, alone: list[float], lost: int) -> None:
    """Where they meet in a file, the machine of rank 0 can be lost, too."""
    save, place = folder / f"lost_{lost}", f"file://{folder}/place_{lost}"
    stays = machine(folder, save, 1 - lost, place, "hold:rank=0:step=4:attempt=1")
    gone = machine(folder, save, lost, place, "machine:rank=any:step=5")
    assert gone.end()[0] == -signal.SIGKILL
    while len(starts(save)) < 2:  # a machine that is back within --init-timeout was never away
        assert stays.process.is_alive(), stays.end()
        time.sleep(0.05)
    back = machine(folder, save, lost, place)
    ended = [stays.end(), back.end()]
    assert [code for code, _ in ended] == [0, 0], ended
    assert losses(save) == alone
    assert ended[1][1].startswith(f"notice: rank {lost} (127.0.0.{lost + 1}) stands by: the run goes on without it")
    assert "stopped by ranks that came (--elastic) at iteration" in ended[0][1]
    assert [one["layout"]["data"] for one in starts(save)] == [2, 1, 2]
    assert json.loads((save / "ended.json").read_text())["reason"] == "--exit-interval"
