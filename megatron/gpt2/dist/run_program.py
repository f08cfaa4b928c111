"""A program of several ranks, from its command line to its exit code."""

import functools
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence

import torch.distributed as dist

import mpu
from data_utils.command_line import line_buffered
from megatron.gpt2.config import require
from megatron.gpt2.dist.agent import INTERRUPTED, start_ranks
from megatron.gpt2.dist.launch import read_launch
from megatron.gpt2.dist.ranks import LeftRanks, Ranks
from megatron.gpt2.dist.rendezvous import leave, meet, name_lost

Log = Callable[[str], None]
Program = Callable[[Sequence[str], Ranks, Log], int | None]

# A launcher kills all ranks when it sees the first one go. So the rank that prints stays for a while, until the others
# have met the same error by themselves. The others stay until they are told to go: it may be slower than they are.
LAUNCHER_GRACE = 2.0  # seconds
SILENT_GRACE = 10.0


def run_program(program: Program, argv: Sequence[str] | None) -> int:
    """Run `program(argv, ranks, log)` on each rank that the command line or a launcher starts; returns the exit code.

    program: at the top level of a module. It returns its own exit code, None for 0; its `log` writes a line to rank 0's
    standard error. argv: None takes this process's command line.
    Exit codes: the program's; 1 where another rank was lost; 2 for bad input, which one rank reports in one line; 130
    after Ctrl-C.
    """
    try:
        return _run(program, sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:  # also one that comes while the ranks part
        return INTERRUPTED


def _run(program: Program, argv: Sequence[str]) -> int:
    line_buffered()
    ranks = Ranks()
    try:
        launch, words = read_launch(argv)
        require(not launch.elastic, "--elastic is for training: this program needs all of its ranks")
        if launch.starts:
            return start_ranks(functools.partial(run_program, program), words, launch)
        ranks = launch.ranks()
        if launch.notice:
            print(launch.notice, file=sys.stderr)
        ranks = meet(launch)
        return program(words, ranks, lambda line: print(line, file=sys.stderr) if ranks.rank == 0 else None) or 0
    except (ValueError, OSError, RuntimeError) as error:
        return ended_by(error, ranks)
    finally:
        mpu.destroy_model_parallel()
        leave(ranks)


def ended_by(error: Exception, ranks: Ranks) -> int:
    """The exit code of a rank that `error` ends, after the line that says why: 2 for bad input and for a meeting that
    failed, 1 where another rank was lost. Raises `error` where it is a bug of ours."""
    bad_input = isinstance(error, (ValueError, OSError))
    if isinstance(error, LeftRanks):
        ranks.note("lost", str(error))
        refuse(error, ranks)
        return 1
    if not bad_input and name_lost(ranks):
        return 1
    if bad_input or isinstance(error, dist.DistError):
        if ranks.incidents is not None:
            ranks.incidents.refused(error)
        return refuse(error, ranks)
    raise error


def refuse(error: Exception, ranks: Ranks) -> int:
    """Print `error` as one line, on the first rank of each machine, and leave the meeting. Returns the exit code, 2."""
    prints = ranks.local_rank == 0
    if prints:
        where = f" ({os.uname().nodename})" if ranks.rank else ""
        print(f"error{where}: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
    if ranks.world_size > 1:
        told = threading.Event()
        signal.signal(signal.SIGTERM, signal.SIG_IGN if prints else lambda number, frame: told.set())
        told.wait(LAUNCHER_GRACE if prints else SILENT_GRACE)
    ranks.end(2)
    ranks.leave()
    return 2


def refuse_memory(line: str, ranks: Ranks) -> int:
    """Print `line`, which says that this rank is out of memory, unless another rank has printed such a line.

    Other ranks may not run out, or cannot print. Returns the exit code, 2. The caller leaves the process group and the
    meeting.
    """
    if ranks.meeting is None or ranks.meeting.store.add("out of memory", 1) == 1:
        print(f"error: {line}", file=sys.stderr, flush=True)
    return 2
