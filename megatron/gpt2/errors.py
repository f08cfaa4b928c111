"""How a program ends for bad input: one line on standard error, from one rank, and exit code 2."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any, Protocol

# A launcher kills all ranks when it sees the first one go: time for each of them to meet the same error by itself.
LAUNCHER_GRACE = 2.0  # seconds


class RankInWorld(Protocol):
    """This process among all ranks; `megatron.gpt2.launch.ranks.Ranks` is one."""

    @property
    def rank(self) -> int:
        """Its number among all."""
        ...

    @property
    def world_size(self) -> int:
        """How many there are."""
        ...

    @property
    def local_rank(self) -> int:
        """Its number among those of its machine."""
        ...

    @property
    def meeting(self) -> Any:
        """What the ranks share once they have met, with a `store`; None before, and in a world of one."""
        ...

    def leave(self) -> None:
        """Leave the meeting."""
        ...


def refuse(error: Exception, ranks: RankInWorld) -> int:
    """Print `error` as one line, on the first rank of each machine, and leave. Returns the exit code, 2."""
    if ranks.local_rank == 0:
        where = f" ({os.uname().nodename})" if ranks.rank else ""
        print(f"error{where}: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
    if ranks.world_size > 1:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(LAUNCHER_GRACE)
    ranks.leave()
    return 2


def refuse_memory(line: str, ranks: RankInWorld) -> int:
    """Print `line`, which says that this rank is out of memory, unless another rank has printed such a line: others may
    not run out, or cannot say so. Returns the exit code, 2. The caller leaves the process group and the meeting."""
    if ranks.meeting is None or ranks.meeting.store.add("out of memory", 1) == 1:
        print(f"error: {line}", file=sys.stderr, flush=True)
    return 2
