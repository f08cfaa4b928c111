"""--nproc-per-node: start the ranks of this machine, through torch.multiprocessing."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

from megatron.launch import Launch

Program = Callable[[Sequence[str]], int]
GRACE = 6.0  # seconds in which the others end by themselves once one rank has: to name it, or to save
INTERRUPTED = 128 + signal.SIGINT


def start_ranks(program: Program, argv: Sequence[str], launch: Launch) -> int:
    """`program(argv)` on `launch.starts` ranks; the exit code of the first that fails, else 0. Where one fails the
    others end too. SIGTERM goes on to all of them; Ctrl-C they have from the terminal. `program` lies at the top level
    of a module, which the ranks import."""
    store = TCPStore("localhost", 0, None, True, wait_for_workers=False)  # outlives each of the ranks
    said = {"WORLD_SIZE": f"{launch.starts}", "LOCAL_WORLD_SIZE": f"{launch.starts}", "MASTER_ADDR": "localhost",
            "MASTER_PORT": f"{store.port}", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    words = [*argv, f"--init-timeout={launch.timeout}"]
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    # Handlers of Python's are not inherited by what is spawned, as SIG_IGN would be.
    signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        context = spawn(_rank, (program, words, said), nprocs=launch.starts, join=False)

        def forward(number: int, frame: FrameType | None) -> None:
            for process in context.processes:
                process.terminate()

        signal.signal(signal.SIGTERM, forward)
        while not context.join(grace_period=GRACE):
            pass
    except ProcessExitedException as error:  # the rank has said why
        if error.exit_code >= 0:
            return error.exit_code
        if error.signal_name != "SIGINT":
            print(f"error: rank {error.error_index} was ended by {error.signal_name}", file=sys.stderr)
        return 128 - error.exit_code
    except ProcessRaisedException as error:
        print(error, file=sys.stderr)  # a bug of ours, with its traceback
        return 1
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0


def _rank(number: int, program: Program, argv: Sequence[str], said: dict[str, str]) -> None:
    os.environ.update(said, RANK=f"{number}", LOCAL_RANK=f"{number}")
    try:
        sys.exit(program(argv))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
