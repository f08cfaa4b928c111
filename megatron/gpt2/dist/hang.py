"""Ranks that wait for one that does not come: who waits where, and where the other one is.

The rank whose collective times out first publishes "hang" in the store. The heartbeat of every rank that lives then
writes where its main thread is, whether that waits as well, or is somewhere else and has not noticed anything. One line
per machine says what they wrote; the whole stacks go to the incidents. With gloo the collective raises. With NCCL the
kernels wait in silence, so there a training step that takes longer than the timeout counts as a hang.

torch's flight recorder numbers the collectives of gloo as well, which names the rank that is behind, but no line of the
program; here it is for NCCL, whose kernels it records and Python does not see.
"""

import json
import linecache
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Mapping, MutableMapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from data_utils.command_line import ROOT
from megatron.gpt2.dist.ranks import BEAT, PATIENCE, POLL, Gone, Ranks, gone_words, named
from megatron.gpt2.dist.rendezvous import ENDS
from megatron.gpt2.hooks import Hook
from megatron.gpt2.monitor.incidents import FOLDER, Incidents

ROOMS = ("mpu/", "data_utils/", "megatron/")
# What a line of ours calls that waits for other ranks, or for a device that waits for them.
WAITS = re.compile(r"\.(wait|synchronize|item|tolist)\(")
TIMED_OUT = re.compile(r"timed? ?out", re.IGNORECASE)  # gloo: "Timed out waiting 6000ms", "Application timeout caused"
ECHO = 0.5  # seconds after a rank's timeout within which the others' connections to it have failed

Frames = Sequence[tuple[FrameType, int]]  # with the line of each, the innermost last


class Place(NamedTuple):
    """Where a rank's main thread is: whether it waits in a collective, and the text that says where, such as
    "all_reduce (mpu/mappings.py:61, called at mpu/layers.py:210)" or "data_utils/samplers.py:88 (next_batch)"."""

    waits: bool
    text: str


def place_of(frames: Frames, *, has_failed: bool = False) -> tuple[Place, list[str]]:
    """Return the place, and the whole stack. has_failed: a collective was the innermost call; autograd may hide it."""
    stack, ours, waits = list[str](), list[tuple[str, str]](), ""
    for frame, line in frames:
        file, function = frame.f_code.co_filename.removeprefix(f"{ROOT}/"), frame.f_code.co_name
        stack.append(f"{file}:{line} ({function})")
        if file.startswith(ROOMS):
            ours.append((f"{file}:{line}", function))
            called = WAITS.search(linecache.getline(frame.f_code.co_filename, line))
            waits = called[1] if called else ""
        elif "torch/distributed/" in file:
            if function != "wrapper" and function[0] != "_":
                waits = function
        elif "torch/" not in file:
            waits = ""  # in another library, called by what could have waited
    waits = waits or "a collective" * has_failed
    if waits:
        return Place(True, f"{waits} ({', called at '.join(name for name, _ in ours[:-3:-1])})"), stack
    return Place(False, f"{ours[-1][0]} ({ours[-1][1]})" if ours else stack[-1]), stack


def frames_of_main_thread() -> Frames:
    """The main thread's frames, seen from another thread. On a GPU a thread of autograd, which Python has not started,
    may run backward for it."""
    frames, main = sys._current_frames(), threading.main_thread().ident
    known = {thread.ident for thread in threading.enumerate()}
    found = list(traceback.walk_stack(frames[main] if main is not None else None))[::-1]
    if found and found[-1][0].f_code.co_name == "_engine_run_backward":
        for other in [frame for number, frame in frames.items() if number not in known]:
            found += list(traceback.walk_stack(other))[::-1]
    return found


class Hang(Hook):
    """Finds out, with the others, why a collective does not end. Every rank with a meeting has one.

    timeout: of a collective. watches_steps: whether a step that takes longer than that is a hang.
    """

    def __init__(self, ranks: Ranks, timeout: timedelta, incidents: Incidents, *, watches_steps: bool) -> None:
        assert ranks.meeting is not None
        self._ranks, self._seconds, self._incidents = ranks, timeout.total_seconds(), incidents
        self._hosts, self._heartbeat, self._store = (
            ranks.meeting.hosts,
            ranks.meeting.heartbeat,
            ranks.meeting.heartbeat.store,
        )
        self._watches_steps, self._since = watches_steps, float("inf")  # when the step began
        self._has_written, self._main_leaves = threading.Lock(), False
        self._heartbeat.at_each_beat = self._look

    def before_step(self, run: Any) -> None:
        """A training step begins."""
        self._since = time.monotonic()

    def after_step(self, run: Any) -> None:
        """It is done. What comes between two steps may take as long as it likes."""
        self._since = float("inf")

    def explains(self, run: Any, error: BaseException) -> bool:
        """After a collective has failed with `error`, in the main thread: whether ranks waited for one that did not
        come. If so one rank of each machine has printed which, and this process has left the meeting."""
        if self._heartbeat.is_stopped or not self._heartbeat.is_answered(PATIENCE):
            return False  # a store beyond a cut cable would keep this thread for --init-timeout seconds
        self._main_leaves = True
        frames = list(traceback.walk_tb(error.__traceback__))
        try:
            if TIMED_OUT.search(str(error)):
                self._write(frames, has_failed=True)
                self._publish()
            end = time.monotonic() + ECHO
            while not self._store.check(["hang"]):
                if time.monotonic() > end:
                    return False
                time.sleep(POLL)
            self._write(frames, has_failed=True)
            gone = self._report()
        except dist.DistError:  # nobody serves the store any more
            return False
        self._ranks.leave(len(gone))
        return True

    def _publish(self) -> None:
        self._store.compare_set("hang", "", f"{self._ranks.rank}")

    def _look(self, store: Store) -> None:
        """In the heartbeat's thread."""
        if self._watches_steps and time.monotonic() - self._since > self._seconds:
            self._publish()
        if store.check(["hang"]) and self._write(frames_of_main_thread()):
            threading.Thread(target=self._end, name="hang", daemon=True).start()

    def _write(self, frames: Frames, *, has_failed: bool = False) -> bool:
        """Tell the others where this rank is, once, from the thread that notices first. Returns whether this call
        did."""
        if not self._has_written.acquire(blocking=False):
            return False
        place, stack = place_of(frames, has_failed=has_failed)
        self._store.set(f"place/{self._ranks.rank}", json.dumps(place))
        self._incidents.note("hang", f"{'waits in' if place.waits else 'is at'} {place.text}", stack=stack)
        return True

    def _end(self) -> None:
        """End the process, whose main thread hangs or waits without an end."""
        self._report()
        time.sleep(PATIENCE)
        if not self._main_leaves:  # else it may still have a checkpoint to finish
            os._exit(1)

    def _report(self) -> Gone:
        """Print what the ranks have written, unless another rank of this machine does. Returns the ranks that are
        gone."""
        places, gone = self._collect()
        host = self._hosts[self._ranks.rank]
        if self._store.add(f"told/{host}", 1) == 1:
            line = f"{words(places, gone, self._hosts, int(self._store.get('hang')), self._seconds)}: {ENDS}"
            print(f"error ({host}): {line}", file=sys.stderr, flush=True)
            late = [*gone, *(rank for rank, place in places.items() if not place.waits)]
            self._incidents.note("hang", line, ranks=late, found_by=self._ranks.rank)
        return gone

    def _collect(self) -> tuple[dict[int, Place], Gone]:
        """The places of the ranks that live, and the others with the seconds since their last sign of life."""
        places = dict[int, Place]()
        self._heartbeat.watches_all = True
        end = time.monotonic() + PATIENCE + 2 * BEAT
        while True:
            for rank in self._hosts.keys() - places.keys():
                if self._store.check([key := f"place/{rank}"]):
                    places[rank] = Place(*json.loads(self._store.get(key)))
            missing, silent = sorted(self._hosts.keys() - places.keys()), self._heartbeat.gone(PATIENCE)
            if all(rank in silent for rank in missing) or time.monotonic() > end:
                return places, {rank: silent.get(rank, 0.0) for rank in missing}
            time.sleep(POLL)


def words(places: Mapping[int, Place], gone: Gone, hosts: Mapping[int, str], first: int, seconds: float) -> str:
    """Say who waits where, for whom. first: the rank whose collective timed out first, after so many seconds."""
    waiting: dict[str, list[int]] = {}
    for rank, place in sorted(places.items(), key=lambda item: (item[0] != first, item[0])):
        if place.waits:
            waiting.setdefault(place.text, []).append(rank)
    elsewhere = sorted(rank for rank, place in places.items() if not place.waits)
    late, where = [*gone, *elsewhere], next(iter(waiting), "the end of the step")
    if not late:
        places_apart = " and ".join(f"{named(ranks, hosts)} in {at}" for at, ranks in waiting.items())
        return (
            f"a collective took longer than {seconds:g} s (--distributed-timeout-minutes), and every rank waits in "
            f"one, {places_apart}: the network is slow, or the ranks run different programs"
        )
    missing = f"did not come to {where} within {seconds:g} s"
    for at, ranks in waiting.items():
        wait = f"{named(ranks, hosts)} wait{'s' * (len(ranks) == 1)}"
        missing += f", where {wait}" if at == where else f", {wait} in {at}"
    facts = [gone_words(gone, hosts)] if gone else []
    if gone and not elsewhere:  # begins as if no collective had timed out
        return f"{facts[0]} and {missing}"
    facts += [f"{named([rank], {})} is at {places[rank].text}" for rank in elsewhere]
    return f"{named(late, hosts)} {missing}: {', '.join(facts)}"


def set_flight_recorder(save_directory: str | Path, environ: MutableMapping[str, str] = os.environ) -> None:
    """Before a process group of NCCL is made, let torch's flight recorder keep the last collectives of each rank and
    write them next to the incidents when one times out, unless the user has set it. `torchfrtrace` reads the files."""
    folder = Path(save_directory).resolve() / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    environ.setdefault("TORCH_FR_BUFFER_SIZE", environ.get("TORCH_NCCL_TRACE_BUFFER_SIZE", "2000"))
    environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    if "TORCH_NCCL_DEBUG_INFO_TEMP_FILE" not in environ:  # its older name
        environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", f"{folder}/nccl_trace_rank_")
