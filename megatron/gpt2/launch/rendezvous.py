"""The ranks meet: one store that all of them reach, a table of who is where, and then the process group.

    meet                    before anything that takes long: all ranks come within --init-timeout, or every one that
                            did names those that did not
    Meeting.gather          all learn what each says, and that nobody has left
    initialize_distributed  when each has its device and its data, however long that took
    name_lost               whom a collective has failed for
    leave                   at the end
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from megatron.gpt2.launch.heartbeat import BEAT, PATIENCE, SILENCE, Heart
from megatron.gpt2.launch.interfaces import address_towards, set_gloo_interface
from megatron.gpt2.launch.meeting_place import POLL, MissingRanks, connected, open_store
from megatron.gpt2.launch.ranks import Launch, Ranks

FAREWELL = 5.0  # seconds that the keeper of the store waits for the others to leave it
MET = "all have come"


@dataclass(frozen=True)
class Present:
    """Where a rank is, as it says itself."""

    host: str
    address: str  # of this machine on its way to the store


@dataclass(frozen=True)
class Meeting:
    """What the ranks share once they have met."""

    store: Store
    keeper: Store | None  # the store's server, where this process runs it
    table: Sequence[Present]  # of all ranks
    heart: Heart

    @property
    def hosts(self) -> dict[int, str]:
        return {rank: present.host for rank, present in enumerate(self.table)}

    def gather(self, name: str, rank: int, value: str) -> list[str]:
        """The values of all ranks, once every one has come here, as long as all of them live. Once for each name."""
        self.store.set(f"{name}/{rank}", value)
        if self.store.add(name, 1) == len(self.table):
            self.store.set(f"{name}/all", "")
        with self.heart.listening():
            while not self.store.check([f"{name}/all"]):
                if gone := self.heart.silent(SILENCE):
                    raise MissingRanks(f"{named(gone, self.hosts)} left before the training began")
                time.sleep(POLL)
        return [text.decode() for text in self.store.multi_get(_keys(name, len(self.table)))]

    def lost(self) -> dict[int, float | None]:
        """The ranks that are gone, after a collective has failed, each with the seconds since its last sign of life,
        None where it has left by itself; empty where all give signs of life. The first that knows tells the others:
        when it leaves as well, it is not the one they have lost."""
        with self.heart.listening():
            # Who died just now is silent for PATIENCE at the end of this. Who is so already is what has failed, and
            # those that fell silent within the same beat are known as well: no need to wait.
            end = time.monotonic() + PATIENCE + BEAT
            while (time.monotonic() < end and self.heart.published is None
                   and not self.heart.silent(PATIENCE + BEAT)):
                time.sleep(POLL)
            gone = {rank: None if self.heart.has_said_farewell(rank) else self.heart.silence(rank)
                    for rank in self.heart.silent(PATIENCE)}
        said = self.heart.published
        if said is None and gone and self.heart.is_answered(PATIENCE):
            said = self.store.compare_set("lost", "", json.dumps(gone)).decode()
        if said is None:
            return gone
        told = {int(rank): seconds for rank, seconds in json.loads(said).items()}
        # Another machine may have heard it later than this one did.
        return {rank: seconds if seconds is None else max(seconds, self.heart.silence(rank))
                for rank, seconds in told.items()}

    def leave(self, gone: int) -> None:
        if self.heart.has_left:
            return
        self.heart.stop()
        if not self.heart.is_alive():  # else it waits for a store that does not answer
            with contextlib.suppress(dist.DistError):
                _wait_for_others(self.store, "left", len(self.table) - gone if self.keeper else 0)


def meet(launch: Launch) -> Ranks:
    """Wait until all ranks are there. Raises MissingRanks where some do not come within `launch.timeout` seconds, and
    ValueError where they cannot meet at all."""
    if launch.world_size == 1:
        return launch.ranks()
    deadline = time.monotonic() + launch.timeout
    prefix = f"megatron/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"  # torchrun may start the ranks again
    with open_store(launch, deadline) as (tcp, keeper):
        store = PrefixStore(prefix, tcp)
        try:
            _come(store, launch, Present(launch.host, address_towards(tcp.host)), deadline, keeps=keeper is not None)
            table = [Present(**json.loads(text)) for text in store.multi_get(_keys("who", launch.world_size))]
            of_heart = PrefixStore(prefix, connected(tcp.host, tcp.port, launch.timeout))
        except dist.DistError as error:
            raise MissingRanks("rank 0 left while the others came: see its own message") from error
    together = [rank for rank, present in enumerate(table) if present.host == launch.host]
    local = launch.local or (together.index(launch.rank), len(together))

    def warn(gone: Iterable[int]) -> None:
        print(f"WARNING: no sign of life for {SILENCE:.0f} s from {named(gone, meeting.hosts)}", file=sys.stderr)

    first = local[0] == 0
    heart = Heart(of_heart, launch.rank, launch.world_size, watched=range(launch.world_size) if first else together,
                  warn=warn if first else None)
    meeting = Meeting(store, keeper, table, heart)
    return Ranks(launch.rank, launch.world_size, *local, meeting=meeting)


def _come(store: Store, launch: Launch, present: Present, deadline: float, *, keeps: bool) -> None:
    """Say that this rank is there, and wait for the verdict that all share: who finds first that somebody has not
    come, or that two contradict each other, writes it down."""
    rank, world = launch.rank, launch.world_size
    problem = ""
    store.add("here", 1)
    world_of_first = int(store.compare_set("world", "", str(world)))
    if world_of_first != world:
        problem = (f"rank {rank} ({launch.host}) is one of {world}, and the first that came one of {world_of_first}: "
                   "each needs the same world size")
    elif store.add(f"came/{rank}", 1) > 1:
        problem = f"rank {rank} was started twice, the second time on {launch.host}"
    else:
        store.set(f"who/{rank}", json.dumps(dataclasses.asdict(present)))
        store.set(f"beat/{rank}", "0")
        if store.add("come", 1) == world:
            store.compare_set("verdict", "", MET)
    if problem:
        store.compare_set("verdict", "", problem)
    while not store.check(["verdict"]):
        if time.monotonic() > deadline:
            store.compare_set("verdict", "", _missing(store, launch))
        time.sleep(POLL)
    verdict = store.get("verdict").decode()
    if problem or verdict != MET:
        _wait_for_others(store, "read", store.add("here", 0) if keeps else 0)
        raise MissingRanks(problem or verdict)


def _missing(store: Store, launch: Launch) -> str:
    hosts = {rank: json.loads(store.get(key))["host"] for rank, key in enumerate(_keys("who", launch.world_size))
             if store.check([key])}
    gone = [rank for rank in range(launch.world_size) if rank not in hosts]
    # Slurm's list goes by blocks of ranks, unless it was told otherwise.
    fits = launch.hosts and all(launch.hosts[rank] == host for rank, host in hosts.items())
    of_gone: Mapping[int, str] = dict(enumerate(launch.hosts)) if fits else {}
    return (f"{named(gone, of_gone)} of {launch.world_size} did not come within {launch.timeout:g} s "
            f"(--init-timeout); {named(hosts, hosts)} did")


def _keys(name: str, count: int) -> list[str]:
    return [f"{name}/{number}" for number in range(count)]


def _wait_for_others(store: Store, key: str, count: int) -> None:
    """Count this process, and wait until `count` are counted, or for a while."""
    end = time.monotonic() + FAREWELL
    store.add(key, 1)
    while store.add(key, 0) < count and time.monotonic() < end:
        time.sleep(POLL)


def named(ranks: Iterable[int], hosts: Mapping[int, str]) -> str:
    """ "ranks 2-3 (node004) and 5 (node007)": runs of numbers with their host, where it is known."""
    runs: list[tuple[int, int, str]] = []
    for rank in sorted(ranks):
        host = hosts.get(rank, "")
        if runs and runs[-1][1:] == (rank - 1, host):
            runs[-1] = runs[-1][0], rank, host
        else:
            runs.append((rank, rank, host))
    words = [(f"{first}-{last}" if first < last else f"{first}") + (f" ({host})" if host else "")
             for first, last, host in runs]
    several = len(runs) > 1 or runs[0][0] < runs[0][1]
    return f"rank{'s' * several} " + " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def initialize_distributed(ranks: Ranks, backend: str, device: torch.device, timeout_minutes: float) -> None:
    """Join the process group; nothing to join in a world of one. `backend` is what `device.choose_backend` allowed.
    The timeout is what ends a run whose peer hangs: torch's default is half an hour."""
    if ranks.meeting is None:
        assert ranks.world_size == 1, "the ranks have not met"
        return
    meeting, host = ranks.meeting, ranks.meeting.hosts[ranks.rank]
    devices = meeting.gather("device", ranks.rank, _describe(device))
    together = [rank for rank, place in meeting.hosts.items() if place == host]
    if ranks.local_rank == 0:
        print(node_line(host, together, ranks.world_size, [devices[rank] for rank in together]), flush=True,
              file=sys.stderr)
    set_gloo_interface(meeting.table[ranks.rank].address, [p.address for p in meeting.table if p.host != host])
    timeout = timedelta(minutes=timeout_minutes)
    meeting.store.set_timeout(timeout)
    dist.init_process_group(backend, store=PrefixStore("group", meeting.store), rank=ranks.rank,
                            world_size=ranks.world_size, timeout=timeout,
                            device_id=device if backend == "nccl" else None)


def _describe(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    return f"{device}\t{name}"


def node_line(host: str, ranks: Sequence[int], world_size: int, devices: Sequence[str]) -> str:
    """ "node004: ranks 2-3 of 4 on cuda:0, cuda:1 (NVIDIA H100)" """
    parts = zip(*(text.split("\t") for text in devices), strict=True)
    places, names = (", ".join(dict.fromkeys(part)) for part in parts)
    return f"{host}: {named(ranks, {})} of {world_size} on {places} ({names})"


def name_lost(ranks: Ranks) -> bool:
    """After a collective has failed: whether others are gone. One rank of each machine says which."""
    if ranks.meeting is None or ranks.meeting.heart.has_left or not (gone := ranks.meeting.lost()):
        return False
    hosts = ranks.meeting.hosts
    left = [rank for rank, host in hosts.items() if host == hosts[ranks.rank] and rank not in gone]
    if left[:1] == [ranks.rank]:
        print(f"error ({hosts[ranks.rank]}): {gone_words(gone, hosts)}: the run ends here; the same command continues "
              "from the last checkpoint", file=sys.stderr)
    ranks.leave(len(gone))
    return True


def gone_words(gone: Mapping[int, float | None], hosts: Mapping[int, str]) -> str:
    """ "rank 2 (b) gave no sign of life for 60 s and rank 1 (a) left": of several the shortest silence."""
    silent = {rank: seconds for rank, seconds in gone.items() if seconds is not None}
    words = [f"{named(silent, hosts)} gave no sign of life for {min(silent.values()):.0f} s"] if silent else []
    if left := gone.keys() - silent.keys():
        words.append(f"{named(left, hosts)} left")
    return " and ".join(words)


def leave(ranks: Ranks) -> None:
    """Leave the process group, if there is one, and the meeting."""
    if dist.is_initialized():
        dist.destroy_process_group()
    ranks.leave()
