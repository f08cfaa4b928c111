"""Report a hang: which ranks wait in which collective, and where the late rank is.

The first rank whose collective times out sets "hang" in the store. Each live rank then writes the location of its main
thread to the store. One rank per machine prints a line with all locations. The incident log gets the whole stacks. With
gloo a collective that times out raises an error. NCCL's kernels wait without an error, so with NCCL a training step
that takes longer than the timeout counts as a hang.

torch's flight recorder names the rank that is late, but not the line of the program. The recorder is only used for
NCCL, because Python does not see in which kernel a GPU waits.
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
from megatron.gpt2.dist.ranks import (
    HEARTBEAT_INTERVAL,
    LOST_TIMEOUT,
    POLL_INTERVAL,
    LostRanks,
    RankInfo,
    describe_lost,
    format_ranks,
    print_status,
)
from megatron.gpt2.dist.rendezvous import CONTINUE_HINT, find_cut_link
from megatron.gpt2.hooks import Hook
from megatron.gpt2.monitor.incidents import FOLDER, IncidentLog

SOURCE_FOLDERS = ("mpu/", "data_utils/", "megatron/")
# These calls wait for other ranks, or for a device whose kernels wait for other ranks.
WAITING_CALL = re.compile(r"\.(wait|synchronize|item|tolist)\(")
# gloo's errors contain "Timed out waiting 6000ms" or "Application timeout caused".
TIMED_OUT = re.compile(r"timed? ?out", re.IGNORECASE)
PEER_FAILURE_SECONDS = 0.5  # After a rank has timed out, its connections to other ranks fail within this time.

Frames = Sequence[tuple[FrameType, int]]  # pairs of stack frame and line number, the innermost frame last


class RankLocation(NamedTuple):
    """The location of a rank's main thread.

    is_waiting: whether the thread waits in a collective.
    text: the call or the line, for example "all_reduce (mpu/mappings.py:61, called at mpu/layers.py:210)" or
        "data_utils/gpt2_dataset.py:88 (rows)".
    """

    is_waiting: bool
    text: str


def find_location(frames: Frames, *, has_failed: bool = False) -> tuple[RankLocation, list[str]]:
    """Return the location of the thread whose stack is `frames`, and this stack as lines.

    has_failed: whether a collective has failed in the thread. If autograd called the collective, `frames` may not show
        the call.
    """
    stack, calls, waits = list[str](), list[tuple[str, str]](), ""
    for frame, line in frames:
        file, function = frame.f_code.co_filename.removeprefix(f"{ROOT}/"), frame.f_code.co_name
        stack.append(f"{file}:{line} ({function})")
        if file.startswith(SOURCE_FOLDERS):
            calls.append((f"{file}:{line}", function))
            called = WAITING_CALL.search(linecache.getline(frame.f_code.co_filename, line))
            waits = called[1] if called else ""
        elif "torch/distributed/" in file:
            if function != "wrapper" and function[0] != "_":
                waits = function
        elif "torch/" not in file:
            waits = ""  # This function belongs to neither torch nor this project.
    waits = waits or "a collective" * has_failed
    if waits:
        return RankLocation(True, f"{waits} ({', called at '.join(name for name, _ in calls[:-3:-1])})"), stack
    return RankLocation(False, f"{calls[-1][0]} ({calls[-1][1]})" if calls else stack[-1]), stack


def frames_of_main_thread() -> Frames:
    """Return the frames of the main thread; any thread may call this function. If the main thread waits for backward,
    the frames of autograd's thread follow, which Python has not started."""
    frames, main = sys._current_frames(), threading.main_thread().ident
    known = {thread.ident for thread in threading.enumerate()}
    stack = list(traceback.walk_stack(frames[main] if main is not None else None))[::-1]
    if stack and stack[-1][0].f_code.co_name == "_engine_run_backward":
        for other in [frame for thread, frame in frames.items() if thread not in known]:
            stack += list(traceback.walk_stack(other))[::-1]
    return stack


class HangDetector(Hook):
    """Finds and reports why a collective hangs. Each rank of a run with several ranks has a detector.

    timeout: the timeout of a collective.
    watches_steps: whether a training step that takes longer than the timeout counts as a hang.
    """

    def __init__(self, rank_info: RankInfo, timeout: timedelta, incidents: IncidentLog, *, watches_steps: bool) -> None:
        assert rank_info.rendezvous is not None
        self._rank_info, self._seconds, self._incidents = rank_info, timeout.total_seconds(), incidents
        self._hosts, self._heartbeat, self._store = (
            rank_info.rendezvous.hosts,
            rank_info.rendezvous.heartbeat,
            rank_info.rendezvous.heartbeat.store,
        )
        self._watches_steps, self._step_started = watches_steps, float("inf")
        self._published, self._main_thread_exits = threading.Lock(), False
        self._heartbeat.on_beat = self._check

    def on_step_begin(self, trainer: Any) -> None:
        """Store the start time of the step."""
        self._step_started = time.monotonic()

    def on_step_end(self, trainer: Any) -> None:
        """Forget the start time of the step, because the time between two steps is not limited."""
        self._step_started = float("inf")

    def handle_error(self, trainer: Any, error: BaseException) -> bool:
        """Return True if a collective has failed with `error` because it waited for a late rank. Before it returns
        True, one rank of each machine prints which rank is late, and this process leaves the rendezvous. The main
        thread calls this method."""
        if self._heartbeat.is_stopped or not self._heartbeat.store_answers(LOST_TIMEOUT):
            return False  # Reading from an unreachable store would block for --init-timeout seconds.
        self._main_thread_exits = True
        frames = list(traceback.walk_tb(error.__traceback__))
        try:
            if TIMED_OUT.search(str(error)):
                self._publish_location(frames, has_failed=True)
                self._publish_hang()
            end = time.monotonic() + PEER_FAILURE_SECONDS
            while not self._store.check(["hang"]):
                if time.monotonic() > end:
                    return False
                time.sleep(POLL_INTERVAL)
            self._publish_location(frames, has_failed=True)
            lost = self._report()
        except dist.DistError:  # The server of the store has ended.
            return False
        self._rank_info.leave(len(lost))
        return True

    def _publish_hang(self) -> None:
        self._store.compare_set("hang", "", f"{self._rank_info.rank}")

    def _check(self, store: Store) -> None:
        """Check in the store whether a rank hangs. The thread of the heartbeat calls this method."""
        if self._watches_steps and time.monotonic() - self._step_started > self._seconds:
            self._publish_hang()
        if store.check(["hang"]) and self._publish_location(frames_of_main_thread()):
            threading.Thread(target=self._exit, name="hang", daemon=True).start()

    def _publish_location(self, frames: Frames, *, has_failed: bool = False) -> bool:
        """Write this rank's location to the store in the first call, and return True. Later calls return False."""
        if not self._published.acquire(blocking=False):
            return False
        location, stack = find_location(frames, has_failed=has_failed)
        self._store.set(f"location/{self._rank_info.rank}", json.dumps(location))
        self._incidents.note("hang", f"{'waits in' if location.is_waiting else 'is at'} {location.text}", stack=stack)
        return True

    def _exit(self) -> None:
        """Report the hang and end the process, whose main thread hangs."""
        self._report()
        time.sleep(LOST_TIMEOUT)
        if not self._main_thread_exits:  # A main thread that exits by itself may still finish a checkpoint.
            os._exit(1)

    def _report(self) -> LostRanks:
        """Print the locations of all ranks, on one rank of each machine. Return the lost ranks."""
        locations, lost = self._collect_locations()
        host = self._hosts[self._rank_info.rank]
        missing = [*lost, *(rank for rank, location in locations.items() if not location.is_waiting)]
        cut = [] if missing else find_cut_link(self._rank_info, "hang")
        if self._store.add(f"reported/{host}", 1) == 1:
            first = int(self._store.get("hang"))
            line = f"{describe_hang(locations, lost, self._hosts, first, self._seconds, cut)}: {CONTINUE_HINT}"
            print_status(line, f"error ({host})")
            self._incidents.note("hang", line, ranks=missing, cut=cut, found_by=self._rank_info.rank)
        return lost

    def _collect_locations(self) -> tuple[dict[int, RankLocation], LostRanks]:
        """Return {rank: location} of the live ranks, and {rank: seconds since its last heartbeat} of the lost ranks."""
        locations = dict[int, RankLocation]()
        self._heartbeat.reads_all = True
        end = time.monotonic() + LOST_TIMEOUT + 2 * HEARTBEAT_INTERVAL
        while True:
            for rank in self._hosts.keys() - locations.keys():
                if self._store.check([key := f"location/{rank}"]):
                    locations[rank] = RankLocation(*json.loads(self._store.get(key)))
            missing, silent = sorted(self._hosts.keys() - locations.keys()), self._heartbeat.lost_ranks(LOST_TIMEOUT)
            if all(rank in silent for rank in missing) or time.monotonic() > end:
                return locations, {rank: silent.get(rank, 0.0) for rank in missing}
            time.sleep(POLL_INTERVAL)


def describe_hang(
    locations: Mapping[int, RankLocation],
    lost: LostRanks,
    hosts: Mapping[int, str],
    first: int,
    seconds: float,
    cut: Sequence[str] = (),
) -> str:
    """Describe in which collective each rank waits, and for which rank.

    first: the rank whose collective timed out first, after `seconds`.
    cut: the names of two machines that cannot connect to each other, if any.
    """
    waiting: dict[str, list[int]] = {}
    for rank, location in sorted(locations.items(), key=lambda item: (item[0] != first, item[0])):
        if location.is_waiting:
            waiting.setdefault(location.text, []).append(rank)
    elsewhere = sorted(rank for rank, location in locations.items() if not location.is_waiting)
    absent, where = [*lost, *elsewhere], next(iter(waiting), "the end of the step")
    if not absent:
        described = " and ".join(f"{format_ranks(ranks, hosts)} in {at}" for at, ranks in waiting.items())
        return (
            f"a collective took longer than {seconds:g} s (--distributed-timeout-minutes), and every rank waits in "
            f"one, {described}: "
            + (
                f"{' and '.join(cut)} cannot connect to each other, check the network between them"
                if cut
                else "the network is slow, or the ranks run different programs"
            )
        )
    missing = f"did not reach {where} within {seconds:g} s"
    for at, ranks in waiting.items():
        wait = f"{format_ranks(ranks, hosts)} wait{'s' * (len(ranks) == 1)}"
        missing += f", where {wait}" if at == where else f", {wait} in {at}"
    reasons = [describe_lost(lost, hosts)] if lost else []
    if lost and not elsewhere:  # `report_lost_ranks` describes a lost rank with the same words.
        return f"{reasons[0]} and {missing}"
    reasons += [f"{format_ranks([rank], {})} is at {locations[rank].text}" for rank in elsewhere]
    return f"{format_ranks(absent, hosts)} {missing}: {', '.join(reasons)}"


def set_flight_recorder(save_directory: str | Path, environ: MutableMapping[str, str] = os.environ) -> None:
    """Let torch's flight recorder record the last NCCL collectives of each rank. When a collective times out, the
    recorder writes them into the folder of the incident log, and `torchfrtrace` reads these files. Call this function
    before NCCL's process group is created. Variables that the user has set are not changed."""
    folder = Path(save_directory).resolve() / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", f"{folder}/nccl_trace_rank_")
