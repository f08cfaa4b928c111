"""--nproc-per-node: start the ranks of this machine, through torch.multiprocessing, whose join ends the others."""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

from megatron.gpt2.launch.launchers import Launch
from megatron.gpt2.launch.store import listen, serve

Program = Callable[[Sequence[str]], int]
GRACE = 6.0  # seconds that the others have once one rank has ended: to name it, or to save
INTERRUPTED = 128 + signal.SIGINT


def start_ranks(program: Program, argv: Sequence[str], launch: Launch) -> int:
    """Run `program(argv)` on `launch.starts` ranks of this machine, the first of which `launch` describes.

    Returns the exit code of the first rank that fails, else 0. Where one fails, the others end too, after GRACE seconds
    at the latest. SIGTERM is passed on to all of them; Ctrl-C reaches them from the terminal. program: at the top level
    of a module, which the ranks import. The ranks get torchrun's variables and words for `read_launch`.
    """
    variables = {"WORLD_SIZE": f"{launch.world_size}", "LOCAL_WORLD_SIZE": f"{launch.starts}"}
    listener = None
    words = [*argv, f"--init-timeout={launch.timeout}"]
    if launch.where:
        words.append(f"--init-method={launch.where}")
    else:
        listener = listen("127.0.0.1", 0)
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{listener.getsockname()[1]}",
                      "TORCHELASTIC_USE_AGENT_STORE": "True"}
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGINT, lambda number, frame: None)
    # A forked rank need not import anything, which is half of a short run. macOS cannot be forked, nor CUDA where
    # there is a GPU: torch's wheels for Linux are built with it wherever they run.
    method = "fork" if sys.platform == "linux" and torch.cuda.device_count() == 0 else "spawn"
    try:
        context = start_processes(_rank, (launch.rank, program, words, variables, before[signal.SIGINT]),
                                  nprocs=launch.starts, join=False, start_method=method)
        _store = serve(listener) if listener else None  # has threads, so after the fork; it outlives each of the ranks

        def forward(number: int, frame: FrameType | None) -> None:
            for process in context.processes:
                process.terminate()

        signal.signal(signal.SIGTERM, forward)
        while not context.join(grace_period=GRACE):
            pass
    except ProcessExitedException as error:  # the rank has variables why
        if error.exit_code >= 0:
            return error.exit_code
        if error.signal_name != "SIGINT":
            print(f"error: rank {launch.rank + error.error_index} was ended by {error.signal_name}", file=sys.stderr)
        return 128 - error.exit_code
    except ProcessRaisedException as error:
        print(error, file=sys.stderr)  # a bug of ours, with its traceback
        return 1
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0


def _rank(number: int, first: int, program: Program, argv: Sequence[str], variables: dict[str, str],
          interrupt: Any) -> None:
    os.environ.update(variables, RANK=f"{first + number}", LOCAL_RANK=f"{number}")
    signal.signal(signal.SIGINT, interrupt)
    if first + number == 0:  # somebody may type; multiprocessing has put the null device in the place of every rank's
        sys.stdin = os.fdopen(0, closefd=False)
    try:
        sys.exit(program(argv))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
