"""--elastic: a run goes on with the ranks that are there, and begins again when more have come.

    the meeting ends    at --init-timeout, with those that came: as many take part as the run can use
    the others          stand by, without a process group or a GPU, until the run ends
    who comes later     stands by as well; when the run could use more ranks than it has, it saves and ends with AGAIN

torchrun's elastic agent does the same to ranks that it starts, but for ranks that a run cannot use: three machines of
which two can divide the batch fail there.
"""

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from megatron.gpt2.dist.heartbeat import BEAT

AGAIN = 75  # EX_TEMPFAIL of sysexits.h: the ranks are to meet again; a launcher does not count it as a failure
MORE_RANKS = "ranks that came (--elastic)"  # why a run stopped
ENDED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

Usable = Callable[[int], int]  # of so many ranks, how many a run can use


class StoodBy(Exception):
    """This rank took no part in the run, which has ended. code: its exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(f"stood by; exit code {code}")
        self.code = code


def seats(hosts: Mapping[int, str], server: int, usable: Usable) -> list[int]:
    """Who takes part, in the order of its new numbers; empty where they are too few.

    hosts: of those that came, by the numbers that their launchers gave them. server: which of them serves the store; it
    is rank 0, and those of its machine come next.
    """
    host = hosts.get(server)
    return sorted(hosts, key=lambda rank: (rank != server, hosts[rank] != host, rank))[: usable(len(hosts))]


def stand_by(store: Store, rank: int, host: str, who: str) -> int:
    """Wait, however long, until the run of the others ends; the exit code of this process. It ends at once, with 0,
    where a signal asks it to: with another code its launcher would end the ranks that save.

    who: what the store keeps of each rank that has come.
    """
    print(f"notice: rank {rank} ({host}) stands by: the run goes on without it (--elastic)", file=sys.stderr)
    with _ended_by_signals():
        try:
            store.set(f"who/{rank}", who)
            store.add("standing by", 1)
            while not store.check(["over"]):
                time.sleep(BEAT)
            store.add("left", 1)
            return int(store.get("over"))
        except dist.DistError:  # rank 0 is gone
            return AGAIN


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    def end(number: int, frame: object) -> None:
        raise SystemExit(0)

    before = {number: signal.signal(number, end) for number in ENDED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Newcomers:
    """On rank 0: whether more ranks have come than take part in the run, and it could use them. ranks: all that could
    come."""

    def __init__(self, ranks: int, taking_part: int, usable: Usable) -> None:
        self._ranks, self._taking_part, self._usable = ranks, taking_part, usable
        self._counted = 0
        self.are_needed = False

    def look(self, store: Store) -> None:
        """Called at each beat of the heart, in its thread."""
        if (standing_by := store.add("standing by", 0)) != self._counted:
            self._counted = standing_by
            came = sum(store.check([f"who/{rank}"]) for rank in range(self._ranks))
            self.are_needed = self._usable(came) > self._taking_part

    def dismiss(self, store: Store) -> int:
        """The run is over: who stands by ends with AGAIN, unless the run has said with what. Returns how many those
        are."""
        store.compare_set("over", "", str(AGAIN))
        return int(store.add("standing by", 0))
