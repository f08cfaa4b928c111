"""--max-restarts: the ranks of a machine are started again when one of them has failed, without a person.

The same words are run again, and so the run goes on from its newest checkpoint. Every rank of a run ends when one is
lost. So over several machines each machine restarts its own ranks, and no launcher talks to another one.
"""

import itertools
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from data_utils.command_line import how_to_call
from megatron.gpt2.dist.elastic import AGAIN
from megatron.gpt2.monitor.incidents import Incidents, read_incidents
from megatron.gpt2.monitor.plots import read_records
from megatron.gpt2.monitor.run_report import METRICS

REFUSED = 2
INTERRUPTED = 128 + signal.SIGINT
FINAL = (0, REFUSED, INTERRUPTED)  # exit codes after which ranks are not started again
LOOP = 3  # so often at the same iteration: what fails there fails every time


@dataclass(frozen=True)
class Round:
    """How the ranks of this machine have ended, all of them. codes: exit code of each rank, -N where signal N ended it.
    first: the rank that failed first, if one did. stopped: this launcher was asked to stop."""

    codes: Mapping[int, int]
    first: int | None = None
    stopped: bool = False

    @property
    def code(self) -> int:
        """The exit code for all of them."""
        code = 0 if self.first is None else self.codes[self.first]
        return code if code >= 0 else 128 - code


@dataclass(frozen=True)
class Kept:
    """What a run keeps on the disk. folder: of --save. newest: the iteration of the newest checkpoint there, 0 where
    there is none."""

    folder: Path
    newest: Callable[[], int]

    def reached(self, since: float) -> int:
        """The iteration that the ranks have reached, as far as they have said so. since: when they were started, as
        `time.time()`."""
        said = [record["iteration"] for record in read_incidents(self.folder) if record["time"] >= since]
        logged = [record["iteration"] for record in read_records(self.folder / METRICS)[-1:]]
        return max([self.newest(), *said, *logged])


def keep_running(start: Callable[[int], Round], max_restarts: int, host: str, kept: Kept | None) -> int:
    """Start the ranks, and again where they fail, `max_restarts` times at most. Returns the last exit code; 1 where
    they fail at the same iteration LOOP times in a row.

    start: runs the ranks, given the number of the restart. kept: None for a program that does not train.
    """
    reached: list[int] = []
    restarts = 0
    for attempt in itertools.count():
        incidents = Incidents(kept.folder, f"launcher_{host}", attempt=attempt, host=host) if kept else None
        began = time.time()
        ended = start(attempt)
        for rank, code in ended.codes.items():
            if incidents and ended.code not in (0, REFUSED):
                incidents.note(
                    "rank ended",
                    how_it_ended(rank, code),
                    rank=rank,
                    first=rank == ended.first,
                    **({"exit_code": code} if code >= 0 else {"signal": signal_name(-code)}),
                )
        if ended.first is None or ended.code in FINAL:
            return ended.code
        if ended.code == AGAIN and not ended.stopped:
            say("the ranks meet anew (--elastic)", "restart")
            continue
        why = how_it_ended(ended.first, ended.codes[ended.first])
        if ended.stopped or restarts == max_restarts:
            if max_restarts and not ended.stopped:
                say(f"{why}; no restart is left (--max-restarts {max_restarts})")
            elif ended.codes[ended.first] < 0:  # otherwise the rank itself has said why
                say(why)
            return ended.code
        where = ""
        if kept and incidents:
            incidents.iteration = kept.reached(began)
            reached.append(incidents.iteration)
            if reached[-LOOP:] == [reached[-1]] * LOOP:
                line = (
                    f"crash loop: {why}; the ranks have failed at iteration {reached[-1]} {LOOP} times in a row; "
                    f"{how_to_call('post_mortem')} {kept.folder} says what failed first"
                )
                incidents.note("crash loop", line)
                say(line)
                return 1
            newest = kept.newest()
            where = f", from iteration {newest}" if newest else ", from the beginning"
        restarts += 1
        line = f"{why}: restart {restarts} of {max_restarts}{where}"
        if incidents:
            incidents.note("restart", line)
        say(line, "restart")
    raise AssertionError("an attempt returns")


def say(line: str, kind: str = "error") -> None:
    """A line of this launcher on standard error."""
    print(f"{kind}: {line}", file=sys.stderr, flush=True)


def how_it_ended(rank: int, code: int) -> str:
    """A rank's end in words. code: -N where signal N ended it."""
    return f"rank {rank} was ended by {signal_name(-code)}" if code < 0 else f"rank {rank} ended with exit code {code}"


def signal_name(number: int) -> str:
    """SIGKILL, for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
