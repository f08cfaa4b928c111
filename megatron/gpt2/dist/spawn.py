"""--nproc-per-node: start the ranks of this machine, through torch.multiprocessing, whose join ends the others."""

import functools
import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

from megatron.gpt2.dist.agent import INTERRUPTED, Kept, Round, keep_running
from megatron.gpt2.dist.launchers import Launch
from megatron.gpt2.dist.store import listen, serve

Program = Callable[[Sequence[str]], int]
GRACE = 6.0  # seconds that the others have once one rank has ended: to name it, or to save
PASSED_ON = (signal.SIGTERM, signal.SIGUSR1)


def start_ranks(program: Program, argv: Sequence[str], launch: Launch, kept: Kept | None = None) -> int:
    """Run `program(argv)` on `launch.starts` ranks of this machine, the first of which `launch` describes.

    Returns the exit code of the first rank that fails, else 0. Where one fails, the others end too, after GRACE seconds
    at the latest, and all of them are started again `launch.max_restarts` times at most. SIGTERM and SIGUSR1 are passed
    on to them; Ctrl-C reaches them from the terminal. program: at the top level of a module, which the ranks import.
    The ranks get torchrun's variables and words for `read_launch`. kept: what a training program keeps.
    """
    return keep_running(functools.partial(_round, program, argv, launch), launch.max_restarts, launch.host, kept)


def _round(program: Program, argv: Sequence[str], launch: Launch, attempt: int) -> Round:
    """Start the ranks, and return when all of them have ended."""
    variables = {
        "WORLD_SIZE": f"{launch.world_size}",
        "LOCAL_WORLD_SIZE": f"{launch.starts}",
        "TORCHELASTIC_RESTART_COUNT": f"{attempt}",
    }
    listener = None
    words = [*argv, f"--init-timeout={launch.timeout}"]
    if launch.elastic:
        words.append("--elastic")
    if launch.where:
        words.append(f"--init-method={launch.where}")
    else:
        listener = listen("127.0.0.1", 0)
        variables |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": f"{listener.getsockname()[1]}",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
    before = {number: signal.getsignal(number) for number in (*PASSED_ON, signal.SIGINT)}
    asked: list[int] = []  # signals that came to this process
    signal.signal(signal.SIGINT, lambda number, frame: asked.append(number))
    # A forked rank need not import anything, which is half of a short run. macOS cannot be forked, nor CUDA where
    # there is a GPU: torch's wheels for Linux are built with it wherever they run.
    method = "fork" if sys.platform == "linux" and torch.cuda.device_count() == 0 else "spawn"
    first = None
    try:
        context = start_processes(
            _rank,
            (launch.rank, program, words, variables, before[signal.SIGINT]),
            nprocs=launch.starts,
            join=False,
            start_method=method,
        )
        _store = serve(listener) if listener else None  # has threads, so after the fork; it outlives each of the ranks

        def forward(number: int, frame: FrameType | None) -> None:
            asked.append(number)
            for process in context.processes:
                if process.is_alive():
                    os.kill(process.pid, number)

        for number in PASSED_ON:
            signal.signal(number, forward)
        while not context.join(grace_period=GRACE):
            pass
    except ProcessExitedException as error:
        first = error.error_index
    except ProcessRaisedException as error:
        print(error, file=sys.stderr)  # a bug of ours, with its traceback
        first = error.error_index
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    codes = {launch.rank + number: process.exitcode or 0 for number, process in enumerate(context.processes)}
    return Round(codes, None if first is None else launch.rank + first, bool(asked))


def _rank(
    number: int, first: int, program: Program, argv: Sequence[str], variables: dict[str, str], interrupt: Any
) -> None:
    os.environ.update(variables, RANK=f"{first + number}", LOCAL_RANK=f"{number}")
    signal.signal(signal.SIGINT, interrupt)
    if first + number == 0:  # somebody may type; multiprocessing has put the null device in the place of every rank's
        sys.stdin = os.fdopen(0, closefd=False)
    try:
        sys.exit(program(argv))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
