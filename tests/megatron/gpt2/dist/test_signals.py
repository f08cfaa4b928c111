"""Test stopping by a signal: all ranks stop after the same step, and immediately after a second signal."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
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
    """Wait in C for a locked mutex, like a long operation of torch: Python handles no signals, but other threads
    run."""
    mutex, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
    end = (ctypes.c_long * 2)(int(time.time()) + seconds, 0)  # The C structure is a timespec.
    for _ in range(2):
        libc.pthread_mutex_timedlock(mutex, end)


def first_stop(stop: StopSignal, at_step: Callable[[int], bool | None]) -> tuple[int, str]:
    for step in range(1, 50):
        if reason := stop.agreed(OUT_OF_TIME if at_step(step) else ""):
            return step, reason
    return 0, ""


def stop_two_ranks(rank: int, world_size: int) -> list[tuple[int, str]]:
    results = []
    with contextlib.closing(StopSignal()) as stop:  # Send the signal to rank 1 only.
        results.append(
            first_stop(stop, lambda step: os.kill(os.getpid(), signal.SIGTERM) if step == rank * 7 else None)
        )
    with contextlib.closing(StopSignal()) as stop:  # The clock of rank 1 is ahead.
        results.append(first_stop(stop, lambda step: step >= 9 - 4 * rank))
    with contextlib.closing(StopSignal()) as stop:  # The run ends during an exchange.
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


def hang_in_torch(folder: Path) -> None:
    exit_on_sigterm(2)
    (folder / "hangs").touch()
    long_call()


def test_a_rank_that_starts_obeys_sigterm(tmp_path: Path) -> None:
    """A rank obeys SIGTERM also while it waits in C++, for example for another rank."""
    rank = CONTEXT.Process(target=hang_in_torch, args=(tmp_path,), daemon=True)
    rank.start()
    wait_until((tmp_path / "hangs").exists)
    rank.terminate()
    rank.join(20)
    assert rank.exitcode == 2


def run_until_killed(out: Connection, err: Connection, in_call: bool) -> None:
    """Run steps, and ignore the first signal.

    in_call: whether to run one long call instead of steps.
    """
    os.dup2(out.fileno(), 1)
    os.dup2(err.fileno(), 2)
    with contextlib.closing(StopSignal()) as stop:
        print("ready", flush=True)
        if in_call:
            long_call()
        while True:
            time.sleep(0.02)
            if reason := stop.agreed():
                print(reason, flush=True)


class StepProcess:
    """`run_until_killed` in a separate process, forked from one that has imported torch."""

    def __init__(self, *, in_call: bool) -> None:
        (out, own_out), (err, own_err) = CONTEXT.Pipe(duplex=False), CONTEXT.Pipe(duplex=False)
        self.process = CONTEXT.Process(target=run_until_killed, args=(own_out, own_err, in_call), daemon=True)
        self.process.start()
        for pipe in (own_out, own_err):
            pipe.close()
        self.out, self.err = (os.fdopen(os.dup(pipe.fileno()), encoding="utf-8") for pipe in (out, err))
        assert self.out.readline() == "ready\n"

    def end(self) -> tuple[int | None, str]:
        """Return the exit code (None: the process hung and was killed) and the rest of the errors."""
        self.process.join(240)
        code = self.process.exitcode
        self.process.kill()
        with self.out, self.err:
            return code, self.err.read()


@pytest.mark.parametrize("in_call", [False, True], ids=["in steps", "in a long call"])
def test_ctrl_c_twice(in_call: bool) -> None:
    """During one long call, the first signal also prints its line immediately, and the second one ends the process."""
    started = StepProcess(in_call=in_call)
    if in_call:
        # The main thread of the process waits in the call.
        stat = Path(f"/proc/{started.process.pid}/task/{started.process.pid}/stat")
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "S")
    began = time.monotonic()
    os.kill(started.process.pid, signal.SIGINT)
    assert started.err.readline() == "\n"
    assert started.err.readline() == "Ctrl-C: the step is finished and saved first; Ctrl-C again quits at once\n"
    assert time.monotonic() - began < 20, "only after the call, which takes 30 s"
    if not in_call:
        assert started.out.readline() == "Ctrl-C\n"
    os.kill(started.process.pid, signal.SIGINT)
    again = "\nCtrl-C again: the run ends at once; the same command continues from the last checkpoint\n"
    assert started.end() == ((130, again) if in_call else (-signal.SIGINT, ""))


def step_without_end(folder: Path) -> None:
    """Train. In the second step one call takes half a minute."""

    def hang(trainer: Trainer) -> None:
        (folder / f"hangs_{trainer.parallel.rank}").touch()
        long_call()

    plant(*(Fault(hang, rank, step=1) for rank in range(2)))
    signals.REPEAT_SECONDS[signal.SIGTERM] = 2.0


def test_a_long_step_of_two_ranks(tmp_path: Path) -> None:
    """--nproc-per-node forwards SIGTERM: rank 0 prints one line immediately, and the second signal gives the exit
    code."""
    write_text(tmp_path, 1000)
    rank = StartedRank(
        tmp_path,
        ["--nproc-per-node", "2", "--save", f"{tmp_path}/save"],
        {},
        before=partial(step_without_end, tmp_path),
    )
    wait_until(lambda: len(list(tmp_path.glob("hangs_*"))) == 2 or not rank.process.is_alive())
    assert rank.process.pid is not None and rank.process.exitcode is None, rank.end()
    # The second signal is ignored, because a scheduler may send it to the launcher and to the ranks.
    for _ in range(2):
        os.kill(rank.process.pid, signal.SIGTERM)
        wait_until(lambda: "SIGTERM" in rank.output.read_text(), 20)
    time.sleep(2.2)
    assert rank.output.read_text().count("SIGTERM: the step is finished and saved first") == 1
    os.kill(rank.process.pid, signal.SIGTERM)
    code, said = rank.end(240)
    assert code == 128 + signal.SIGTERM and said.count("SIGTERM again: the run ends at once") == 1, said


def sleep_in_rank(folder: Path, argv: Sequence[str]) -> int:
    Path(folder, str(os.getpid())).touch()
    time.sleep(600)
    return 0


def start_sleeping_ranks(folder: Path) -> None:
    launch = Launch(0, 2, (0, 2), host="a", ranks_to_start=2)
    start_ranks(partial(sleep_in_rank, folder), [], launch)


def test_ranks_end_after_their_launcher(tmp_path: Path) -> None:
    launcher = CONTEXT.Process(target=start_sleeping_ranks, args=(tmp_path,))
    launcher.start()
    wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
    launcher.kill()
    wait_until(lambda: not any(Path("/proc", rank.name).exists() for rank in tmp_path.iterdir()), 30)
