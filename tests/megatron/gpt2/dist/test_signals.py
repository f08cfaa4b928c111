"""Test stopping by a signal: all ranks stop after the same step, and immediately after a second signal."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

from megatron.gpt2.dist import signals
from megatron.gpt2.dist.launch import Launch
from megatron.gpt2.dist.run_program import start_ranks
from megatron.gpt2.dist.signals import OUT_OF_TIME, StopSignal, exit_on_sigterm
from megatron.gpt2.train.trainer import Trainer
from tests.distributed import CONTEXT, run_ranks
from tests.faults.injector import Fault, plant
from tests.megatron.gpt2.dist.started_ranks import StartedRank, wait_until
from tests.megatron.gpt2.train.training_runs import write_text


def long_call(seconds: int = 30) -> None:
    """Wait in C, like a long operation of torch: Python cannot handle signals, but other threads run."""
    mutex, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
    end = (ctypes.c_long * 2)(int(time.time()) + seconds, 0)  # a timespec of C
    for _ in range(2):
        libc.pthread_mutex_timedlock(mutex, end)


def first_stop(stop: StopSignal, at_step: Callable[[int], bool | None]) -> tuple[int, str]:
    for step in range(1, 50):
        if reason := stop.agreed(OUT_OF_TIME if at_step(step) else ""):
            return step, reason
    return 0, ""


def stop_two_ranks(rank: int, world_size: int) -> list[tuple[int, str]]:
    results = []
    with contextlib.closing(StopSignal()) as stop:  # Only rank 1 gets the signal.
        results.append(first_stop(stop, lambda step: signal.raise_signal(signal.SIGTERM) if step == rank * 7 else None))
    with contextlib.closing(StopSignal()) as stop:  # Rank 1 reaches its time limit four steps earlier than rank 0.
        results.append(first_stop(stop, lambda step: step >= 9 - 4 * rank))
    with contextlib.closing(StopSignal()) as stop:  # The run ends during an all-reduce.
        results += [(step, stop.agreed()) for step in range(2)]
    stop = StopSignal()
    stop.agreed()
    if rank == 0:
        stop.agreed()
    stop.restore()  # Rank 1 does not wait for the failed rank 0.
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    return results


def test_ranks_stop_after_the_same_step() -> None:
    results = run_ranks(stop_two_ranks, 2)
    assert results[0] == results[1] == [(8, "SIGTERM"), (6, "--exit-duration-in-mins"), (0, ""), (1, "")]


def test_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with contextlib.closing(StopSignal()) as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.agreed() == "" and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    signal.signal(signal.SIGHUP, before)


def step_without_end(folder: Path) -> None:
    """Let the second step of each rank call `long_call`."""

    def hang(trainer: Trainer) -> None:
        threading.Timer(0.3, (folder / f"hangs_{trainer.parallel.rank}").touch).start()  # during the call
        long_call()

    plant(*(Fault(hang, rank, step=1) for rank in range(2)))
    signals.REPEAT_SECONDS[signal.SIGTERM] = 2.0


@pytest.mark.parametrize("name, number, ranks", [("SIGTERM", signal.SIGTERM, 2), ("Ctrl-C", signal.SIGINT, 1)])
def test_a_second_signal_in_a_long_step(tmp_path: Path, name: str, number: int, ranks: int) -> None:
    """After the first signal, rank 0 prints one line at once. The second signal ends the run with its exit code.
    --nproc-per-node forwards SIGTERM."""
    write_text(tmp_path, 1000)
    flags = ["--nproc-per-node", str(ranks), "--save", f"{tmp_path}/save"]
    rank = StartedRank(tmp_path, flags, {}, before=partial(step_without_end, tmp_path))
    wait_until(lambda: len(list(tmp_path.glob("hangs_*"))) == ranks or not rank.process.is_alive())
    assert rank.process.pid is not None and rank.process.exitcode is None, rank.end()
    # A SIGTERM that is repeated at once is ignored, because a scheduler sends it to the launcher and to the ranks.
    for _ in range(ranks):
        os.kill(rank.process.pid, number)
        wait_until(lambda: name in rank.output.read_text(), 20)
    time.sleep(2.2)
    assert rank.output.read_text().count(f"{name}: the step is finished and saved first") == 1
    os.kill(rank.process.pid, number)
    code, said = rank.end(240)
    assert code == 128 + number and said.count(f"{name} again: the run ends at once") == 1, said


def wait_in_rank(folder: Path, saves: bool, argv: Sequence[str]) -> int:
    stopped, file = threading.Event(), Path(folder, str(os.getpid()))
    if saves:
        signal.signal(signal.SIGTERM, lambda number, frame: stopped.set())
    else:
        exit_on_sigterm(2)  # Training calls this function at its start.
    file.touch()
    try:
        stopped.wait(600)
    except KeyboardInterrupt:
        file.write_text("Ctrl-C")
    return 0


def start_waiting_ranks(folder: Path, saves: bool) -> None:
    faulthandler.dump_traceback_later(25)  # Show what a launcher waits for that does not end.
    launch = Launch(0, 2, (0, 2), host="a", ranks_to_start=2)
    sys.exit(start_ranks(partial(wait_in_rank, folder, saves), [], launch))


@pytest.mark.parametrize(
    "number, saves, code", [(signal.SIGKILL, True, -signal.SIGKILL), (signal.SIGTERM, False, 128 + signal.SIGTERM)]
)
def test_ranks_end_with_their_launcher(tmp_path: Path, number: int, saves: bool, code: int) -> None:
    launcher = CONTEXT.Process(target=start_waiting_ranks, args=(tmp_path, saves))
    launcher.start()
    wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
    os.kill(launcher.pid or 0, number)
    wait_until(lambda: not any(Path("/proc", rank.name).exists() for rank in tmp_path.iterdir()), 30)
    launcher.join(30)
    assert launcher.exitcode == code
    assert not any(rank.read_text() for rank in tmp_path.iterdir()), "the ranks got SIGINT instead of SIGTERM"
