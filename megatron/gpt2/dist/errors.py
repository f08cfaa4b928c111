"""How a rank ends for bad input: one line on standard error, from one rank, and exit code 2."""

import os
import signal
import sys
import threading

from megatron.gpt2.dist.ranks import Ranks

# A launcher kills all ranks when it sees the first one go. So the rank that prints stays for a while, until the others
# have met the same error by themselves. The others stay until they are told to go: it may be slower than they are.
LAUNCHER_GRACE = 2.0  # seconds
SILENT_GRACE = 10.0


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
