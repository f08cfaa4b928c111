"""The ranks meet in a store that all of them reach, learn who is where, and then make the process group.

    meet                    before anything that takes long: all ranks come within --init-timeout, or every rank that
                            did names those that did not
    initialize_distributed  when each rank has its device and its data, however long that took
    name_lost               after a collective has failed: names the ranks that are gone
    leave                   at the end

torch's own rendezvous is not enough: where ranks do not come it prints how many came, and not which; of two processes
with one rank, or with different world sizes, all wait until a time-out or for ever.
"""

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, Store  # type: ignore[attr-defined]

from megatron.gpt2.dist.elastic import AGAIN, Newcomers, StoodBy, Usable, seats, stand_by
from megatron.gpt2.dist.heartbeat import BEAT, LOST, PATIENCE, SILENCE, Heartbeat
from megatron.gpt2.dist.interfaces import address_towards, set_gloo_interface
from megatron.gpt2.dist.launchers import Launch
from megatron.gpt2.dist.ranks import (
    POLL,
    EarlierRound,
    Meeting,
    MissingRanks,
    Peer,
    Ranks,
    keys,
    named,
    wait_for_others,
)
from megatron.gpt2.dist.store import connected, open_store, wait_until_gone

MET = "all have come"


def meet(launch: Launch, usable: Usable | None = None) -> Ranks:
    """Wait until all ranks are there; returns this process's place among them, with the meeting that they share.

    Raises MissingRanks where some ranks do not come within `launch.timeout` seconds, and ValueError where they cannot
    meet at all. A world of one has nobody to meet. usable: with --elastic, for ranks that need not all come; StoodBy
    where this one took no part in the run, which has ended.
    """
    if launch.world_size == 1:
        return launch.ranks()
    deadline = time.monotonic() + launch.timeout
    while time.monotonic() < deadline:
        with contextlib.suppress(EarlierRound):
            return _meet(launch, deadline, usable)
        time.sleep(POLL)
    raise MissingRanks(
        f"the ranks of the round before have not left {launch.where} within {launch.timeout:g} s (--init-timeout)"
    )


def _meet(launch: Launch, deadline: float, usable: Usable | None) -> Ranks:
    # A launcher's store outlives its ranks. Otherwise rank 0 serves a new one each time, and how often each machine has
    # restarted its ranks makes no difference.
    prefix = f"megatron/{launch.attempt}" if launch.served else "megatron"
    with open_store(launch, deadline) as (tcp, server):
        store = PrefixStore(prefix, tcp)
        may_be_earlier = launch.follows_a_round and server is None
        try:
            while may_be_earlier and store.check(["verdict" if usable is None else "over"]):
                if time.monotonic() > deadline:
                    raise EarlierRound
                time.sleep(POLL)  # until the store is gone
            who = Peer(launch.host, address_towards(tcp.host)).as_text()
            # A run that is under way has its verdict.
            numbers = (
                []
                if may_be_earlier and store.check(["verdict"])
                else _come(store, launch, who, deadline, usable, serves=server is not None)
            )
            if launch.rank not in numbers:
                code = stand_by(store, launch.rank, launch.host, who)
                if code == AGAIN and not launch.served:
                    wait_until_gone(tcp.host, tcp.port)
                raise StoodBy(code)
            rank, world_size = numbers.index(launch.rank), len(numbers)
            store.set(f"beat/{rank}", "0")
            peers = [Peer(**json.loads(text)) for text in store.multi_get([f"who/{number}" for number in numbers])]
            own_connection = PrefixStore(prefix, connected(tcp.host, tcp.port, launch.timeout))
        except dist.DistError as error:
            if may_be_earlier:
                raise EarlierRound from error
            raise MissingRanks("rank 0 left while the others came: see its own message") from error
    together = [other for other, peer in enumerate(peers) if peer.host == launch.host]
    local = launch.local if launch.local and usable is None else (together.index(rank), len(together))

    def warn(gone: Iterable[int]) -> None:
        print(f"WARNING: no sign of life for {SILENCE:.0f} s from {named(gone, meeting.hosts)}", file=sys.stderr)

    first = local[0] == 0
    newcomers = Newcomers(launch.world_size, world_size, usable) if usable and rank == 0 else None
    heartbeat = Heartbeat(
        own_connection, rank, world_size, warn=warn if first else None, watched=range(world_size) if first else together
    )
    if newcomers is not None:
        heartbeat.at_each_beat.append(newcomers.look)
    meeting = Meeting(store, server, peers, heartbeat, newcomers)
    return Ranks(rank, world_size, *local, meeting=meeting)


def _come(store: Store, launch: Launch, who: str, deadline: float, usable: Usable | None, *, serves: bool) -> list[int]:
    """Enter this rank into the store, and wait for the verdict that all ranks share: those that take part, in the order
    of their numbers in the run.

    The rank that first finds that somebody has not come, or that two ranks contradict each other, writes the verdict.
    """
    rank, world = launch.rank, launch.world_size
    problem = ""
    store.add("here", 1)
    world_of_first = int(store.compare_set("world", "", str(world)))
    if world_of_first != world:
        problem = (
            f"rank {rank} ({launch.host}) is one of {world}, and the first that came one of {world_of_first}: "
            "each needs the same world size"
        )
    elif store.add(f"came/{rank}", 1) > 1:
        if usable is not None:
            raise EarlierRound  # what came as this rank before may have died since
        problem = f"rank {rank} was started twice, the second time on {launch.host}"
    else:
        store.set(f"who/{rank}", who)
        if serves:
            store.set("server", str(rank))
        if store.add("come", 1) == world:
            store.compare_set("verdict", "", _seated(store, launch, usable) if usable else MET)
    if problem:
        store.compare_set("verdict", "", problem)
    while not store.check(["verdict"]):
        if time.monotonic() > deadline:
            seated = _seated(store, launch, usable) if usable else ""
            store.compare_set("verdict", "", seated or _missing(store, launch))
        time.sleep(POLL)
    verdict = store.get("verdict").decode()
    if not problem and verdict == MET:
        return list(range(world))
    if not problem and verdict.startswith("["):
        return [int(number) for number in json.loads(verdict)]
    wait_for_others(store, "read", store.add("here", 0) if serves else 0)
    raise MissingRanks(problem or verdict)


def _hosts(store: Store, launch: Launch) -> dict[int, str]:
    """The machines of those that have come, by the numbers that their launchers gave them."""
    return {
        rank: json.loads(store.get(key))["host"]
        for rank, key in enumerate(keys("who", launch.world_size))
        if store.check([key])
    }


def _seated(store: Store, launch: Launch, usable: Usable) -> str:
    """The verdict of a meeting to which not all have to come; empty where too few have."""
    server = int(store.get("server")) if store.check(["server"]) else 0
    found = seats(_hosts(store, launch), server, usable)
    return json.dumps(found) if found else ""


def _missing(store: Store, launch: Launch) -> str:
    hosts = _hosts(store, launch)
    gone = [rank for rank in range(launch.world_size) if rank not in hosts]
    # Slurm's list goes by blocks of ranks, unless it was told otherwise.
    fits = launch.hosts and all(launch.hosts[rank] == host for rank, host in hosts.items())
    of_gone: Mapping[int, str] = dict(enumerate(launch.hosts)) if fits else {}
    return (
        f"{named(gone, of_gone)} of {launch.world_size} did not come within {launch.timeout:g} s "
        f"(--init-timeout); {named(hosts, hosts)} did"
    )


def initialize_distributed(ranks: Ranks, backend: str, device: torch.device, timeout_minutes: float) -> None:
    """Make torch's process group; a world of one has none.

    backend: one that `device.choose_backend` has allowed. timeout_minutes: after which a collective ends a run whose
    peer hangs; torch's default is half an hour.
    """
    if ranks.meeting is None:
        assert ranks.world_size == 1, "the ranks have not met"
        return
    meeting, host = ranks.meeting, ranks.meeting.hosts[ranks.rank]
    devices = meeting.gather("device", ranks.rank, _describe(device))
    together = [rank for rank, place in meeting.hosts.items() if place == host]
    if ranks.local_rank == 0:
        print(
            node_line(host, together, ranks.world_size, [devices[rank] for rank in together]),
            flush=True,
            file=sys.stderr,
        )
    use_interface(ranks)
    timeout = timedelta(minutes=timeout_minutes)
    meeting.store.set_timeout(timeout)
    dist.init_process_group(
        backend,
        store=PrefixStore("group", meeting.store),
        rank=ranks.rank,
        world_size=ranks.world_size,
        timeout=timeout,
        device_id=device if backend == "nccl" else None,
    )
    if backend == "nccl":
        threading.Thread(target=end_with_lost_rank, args=(ranks,), name="lost ranks", daemon=True).start()


def end_with_lost_rank(ranks: Ranks) -> None:
    """Watch the signs of life until this rank leaves; end the process with exit code 1 where another rank is lost.

    For NCCL: where a peer dies on the same machine, its kernels wait in silence until torch's watchdog ends the
    process, after --distributed-timeout-minutes, and the training thread waits for the kernels.
    """
    assert ranks.meeting is not None
    heartbeat = ranks.meeting.heartbeat
    while not heartbeat.is_stopped:
        time.sleep(BEAT)
        lost = [rank for rank in heartbeat.silent(LOST) if not heartbeat.has_left(rank)]
        if lost or heartbeat.published is not None:
            time.sleep(PATIENCE)  # a collective of gloo may have failed: then the training thread ends the run
            if name_lost(ranks):
                os._exit(1)  # nothing else ends a thread that waits for a GPU


def _describe(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    return f"{device}\t{name}"


def node_line(host: str, ranks: Sequence[int], world_size: int, devices: Sequence[str]) -> str:
    """The line of a machine: "node004: ranks 2-3 of 4 on cuda:0, cuda:1 (NVIDIA H100)".

    devices: of each rank, as `_describe` has them.
    """
    parts = zip(*(text.split("\t") for text in devices), strict=True)
    places, names = (", ".join(dict.fromkeys(part)) for part in parts)
    return f"{host}: {named(ranks, {})} of {world_size} on {places} ({names})"


def name_lost(ranks: Ranks) -> bool:
    """After a collective has failed: whether other ranks are gone. One rank of each machine prints which.

    If so, this process has left the meeting.
    """
    if ranks.meeting is None or ranks.meeting.heartbeat.is_stopped or not (gone := ranks.meeting.lost()):
        return False
    hosts = ranks.meeting.hosts
    ranks.note("lost", gone_words(gone, hosts), ranks=sorted(gone), silences={str(rank): gone[rank] for rank in gone})
    left = [rank for rank, host in hosts.items() if host == hosts[ranks.rank] and rank not in gone]
    if left[:1] == [ranks.rank]:
        print(
            f"error ({hosts[ranks.rank]}): {gone_words(gone, hosts)}: the run ends here; the same command continues "
            "from the last checkpoint",
            file=sys.stderr,
        )
    ranks.leave(len(gone))
    return True


def gone_words(gone: Mapping[int, float | None], hosts: Mapping[int, str]) -> str:
    """Ranks that are gone, in words: "rank 2 (b) gave no sign of life for 60 s and rank 1 (a) left".

    gone: as `Meeting.lost` has it; of several silent ranks the shortest silence is printed.
    """
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


@contextlib.contextmanager
def temporary_group(ranks: Ranks) -> Iterator[ProcessGroup]:
    """Inside, a process group of all ranks on the host, before the one of the run is made."""
    assert ranks.meeting is not None and dist.group.WORLD is None
    use_interface(ranks)
    dist.init_process_group(
        "gloo", store=PrefixStore("temporary group", ranks.meeting.store), rank=ranks.rank, world_size=ranks.world_size
    )
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def use_interface(ranks: Ranks) -> None:
    """Let gloo take the network interface that leads to the other ranks."""
    assert ranks.meeting is not None
    peers = ranks.meeting.peers
    host = peers[ranks.rank].host
    set_gloo_interface(peers[ranks.rank].address, [peer.address for peer in peers if peer.host != host])
