"""Stopping: all ranks after the same step, and at once where asked twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.gpt2.launch.signals import StopSignal
from tests.distributed import run_ranks

REPOSITORY = Path(__file__).parents[4]


def stops_at(stop: StopSignal, at_step: Callable[[int], bool | None]) -> tuple[int, str]:
    for step in range(1, 50):
        if reason := stop.agreed(bool(at_step(step))):
            return step, reason
    return 0, ""


def stop_two_ranks(rank: int, world_size: int) -> list[tuple[int, str]]:
    results = []
    with StopSignal() as stop:  # a signal to rank 1 alone
        results.append(stops_at(stop, lambda step: os.kill(os.getpid(), signal.SIGTERM) if step == rank * 7 else None))
    with StopSignal() as stop:  # rank 1's clock is ahead
        results.append(stops_at(stop, lambda step: step >= 9 - 4 * rank))
    with StopSignal() as stop:  # the run ends by itself, an exchange being under way
        results += [(step, stop.agreed()) for step in range(2)]
    with pytest.raises(ZeroDivisionError), StopSignal() as stop:  # a failure of rank 0 is not waited for
        stop.agreed()
        if rank == 0:
            stop.agreed()
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    return results


def test_ranks_stop_after_the_same_step() -> None:
    results = run_ranks(stop_two_ranks, 2, timeout=60)
    assert results[0] == results[1] == [(8, "SIGTERM"), (6, "--exit-duration-in-mins"), (0, ""), (1, "")]


def test_alone() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with StopSignal() as stop:
        assert stop.agreed() == ""
        assert stop.agreed(True) == "--exit-duration-in-mins"
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.agreed() == "SIGTERM"
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


STEPS = """
import time
from megatron.gpt2.launch.signals import StopSignal
with StopSignal() as stop:
    print("ready", flush=True)
    reason = ""
    while not reason or {stubborn}:
        time.sleep(0.02)
        reason = stop.agreed()
        if reason: print(reason, flush=True)
print("saved", flush=True)
"""


@pytest.mark.parametrize("twice", [False, True])
def test_ctrl_c(twice: bool) -> None:
    process = subprocess.Popen([sys.executable, "-c", STEPS.format(stubborn=twice)], cwd=REPOSITORY, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    if twice:
        assert process.stdout.readline() == "Ctrl-C\n"
        process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert err == "\nCtrl-C: the step is finished and saved first; Ctrl-C quits at once\n"
    assert (process.returncode, "saved" in out) == ((-signal.SIGINT, False) if twice else (0, True)), out
