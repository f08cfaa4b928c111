"""The ranks meet in a store that all of them reach, learn who is where, and then make the process group.

    meet                    before anything that takes long: all ranks come within --init-timeout, or every rank that
                            did names those that did not
    initialize_distributed  when each rank has its device and its data, however long that took
    name_lost               after a collective has failed: names the ranks that are gone
    leave                   at the end

torch's own rendezvous is not enough: if ranks do not come it prints how many came, and not which; of two processes with
one rank, or with different world sizes, all wait until a time-out or for ever; if rank 0 does not answer it prints 30
lines of C++ frames, and with the file of a run that was killed one rank fails and the others hang.
"""

import contextlib
import fcntl
import ipaddress
import json
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, Store, TCPStore  # type: ignore[attr-defined]

from data_utils.files import replace_text
from megatron.gpt2.dist.launch import Launch, host_port
from megatron.gpt2.dist.ranks import (
    BEAT,
    PATIENCE,
    POLL,
    Heartbeat,
    Meeting,
    MissingRanks,
    Ranks,
    gone_words,
    named,
    wait_for_others,
)

ENDS = "the run ends here; the same command continues from the last checkpoint"
MET = "all have come"
LOST = 25.0  # seconds without a sign of life after which a run ends whose collectives would not notice
SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface

Usable = Callable[[int], int]  # of so many ranks, how many a run can use


class StoodBy(Exception):
    """This rank took no part in the run, which has ended. code: its exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(f"stood by; exit code {code}")
        self.code = code


@contextlib.contextmanager
def open_store(launch: Launch, *, serves: bool) -> Iterator[tuple[TCPStore, TCPStore | None]]:
    """Connect to the store of all ranks at `launch.where`; gives it, and its server if this process `serves` it.

    For file:///PATH the server writes its address into the file, which is there as long as the context. Raises
    MissingRanks if the server does not answer within `launch.timeout`, and ValueError if the place cannot be right.
    """
    place, end = urlsplit(launch.where), time.monotonic() + launch.timeout
    path = Path(launch.where.removeprefix("file://")) if place.scheme == "file" else None
    at = place.hostname or launch.host, place.port or 0
    server = serve(*at) if serves else None
    try:
        if server:
            at = "localhost" if path else at[0], server.port
        if server and path:
            replace_text(path, f"{launch.host} {server.port}\n")
        while True:  # Python's sockets say why they fail, and once
            try:
                if path and not server:
                    host, _, port = path.read_text(encoding="utf-8").partition(" ")
                    at = "localhost" if host == launch.host else host, int(port)
                socket.create_connection(at, timeout=max(POLL, end - time.monotonic())).close()
                break
            except FileNotFoundError:
                silence = f"it has not made the file {path}, as seen from {launch.host}"
            except OSError as error:
                silence = f"nothing answers at {host_port(*at)}, as seen from {launch.host} ({error.strerror or error})"
            except ValueError:
                silence = f"the file {path} holds no address"
            if time.monotonic() > end and server:
                raise ValueError(
                    f"rank 0 listens on port {at[1]} of {launch.host}, but {silence}: MASTER_ADDR or --init-method has "
                    "to name the machine of rank 0"
                )
            if time.monotonic() > end:
                raise MissingRanks(f"rank 0 did not come within {launch.timeout:g} s (--init-timeout): {silence}")
            time.sleep(POLL)
        yield connected(at, launch.timeout), server
    finally:
        if server and path:
            path.unlink(missing_ok=True)


def serve(host: str, port: int) -> TCPStore:
    """Serve a store on `port` (0: any that is free), over IPv6 and IPv4 if `host` has an IPv6 address. ValueError if
    the port is taken.

    torch's own server always listens over both and looks up the name of each client, and one that comes over IPv4 to a
    socket of both is not in /etc/hosts: with a slow DNS server four ranks met in 5.6 s instead of 0.5.
    """
    families: set[int] = set()
    with contextlib.suppress(OSError):
        families = {found[0] for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    both = socket.AF_INET6 in families and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:  # by Python, for a message of one line
        listener = socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=2048)
    except OSError as error:
        raise ValueError(
            f"rank 0 cannot listen on port {port} ({os.strerror(error.errno or 0)}): another run may have "
            "it; name another in MASTER_PORT or --init-method"
        ) from error
    port = listener.getsockname()[1]
    return TCPStore("localhost", port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())


def connected(at: tuple[str, int], timeout: float) -> TCPStore:
    """A new connection to the store at this host and port; its operations wait for `timeout` seconds at most."""
    return TCPStore(*at, None, False, timeout=timedelta(seconds=timeout), wait_for_workers=False)


def meet(launch: Launch, usable: Usable | None = None) -> Ranks:
    """Wait until all ranks are there. Returns this process's place among them, with the meeting that they share.

    Raises MissingRanks if some ranks do not come within `launch.timeout` seconds, and ValueError if they cannot meet at
    all. A world of one has nobody to meet. usable: with --elastic; StoodBy if this rank took no part in the run, which
    has ended.
    """
    if launch.world_size == 1:
        return launch.ranks()
    # A launcher's store outlives its ranks.
    prefix = f"megatron/{launch.attempt}" if launch.served else "megatron"
    with open_store(launch, serves=launch.rank == 0 and not launch.served) as (tcp, server):
        store = PrefixStore(prefix, tcp)
        try:
            _come(store, launch, json.dumps([launch.host, address_towards(tcp.host)]), serves=server is not None)
            who = [json.loads(text) for text in store.multi_get([f"who/{rank}" for rank in range(launch.world_size)])]
            world_size = launch.world_size if usable is None else usable(launch.world_size)
            if world_size == 0:
                raise MissingRanks(f"the {launch.world_size} ranks that came are too few for this layout (--elastic)")
            if launch.rank >= world_size:
                raise StoodBy(stand_by(store, launch))
            store.set(f"beat/{launch.rank}", "0")
            own_connection = PrefixStore(prefix, connected((tcp.host, tcp.port), launch.timeout))
        except dist.DistError as error:
            raise MissingRanks("rank 0 left while the others came: see its own message") from error
    hosts = {rank: host for rank, (host, _) in enumerate(who[:world_size])}
    set_gloo_interface(who[launch.rank][1], [address for host, address in who if host != launch.host])
    together = [rank for rank, host in hosts.items() if host == launch.host]
    local = launch.local if launch.local and usable is None else (together.index(launch.rank), len(together))
    heartbeat = Heartbeat(own_connection, launch.rank, hosts, is_first=local[0] == 0)
    return Ranks(launch.rank, world_size, *local, meeting=Meeting(store, server, hosts, heartbeat))


def _come(store: Store, launch: Launch, who: str, *, serves: bool) -> None:
    """Enter this rank into the store, and wait for the verdict that all ranks share; MissingRanks if it is a bad one.

    The rank that first finds that somebody has not come, or that two ranks contradict each other, writes the verdict.
    """
    rank, world = launch.rank, launch.world_size
    end, problem = time.monotonic() + launch.timeout, ""
    store.add("here", 1)
    world_of_first = int(store.compare_set("world", "", str(world)))
    if world_of_first != world:
        problem = (
            f"rank {rank} ({launch.host}) is one of {world}, and the first that came one of {world_of_first}: "
            "each needs the same world size"
        )
    elif store.add(f"came/{rank}", 1) > 1:
        problem = f"rank {rank} was started twice, the second time on {launch.host}"
    else:
        store.set(f"who/{rank}", who)
    if problem or store.add("come", 1) == world:
        store.compare_set("verdict", "", problem or MET)
    while not store.check(["verdict"]):
        if time.monotonic() > end:
            came = {other: f"who/{other}" for other in range(world) if store.check([f"who/{other}"])}
            hosts = {other: json.loads(store.get(key))[0] for other, key in came.items()}
            store.compare_set("verdict", "", missing(hosts, world, launch))
        time.sleep(POLL)
    verdict = store.get("verdict").decode()
    if problem or verdict != MET:
        wait_for_others(store, "read", store.add("here", 0) if serves else 0)
        raise MissingRanks(problem or verdict)


def missing(hosts: Mapping[int, str], world_size: int, launch: Launch) -> str:
    """Say who did not come. hosts: of the ranks that came."""
    gone = [rank for rank in range(world_size) if rank not in hosts]
    listed = dict(enumerate(launch.hosts))
    # Slurm's list goes by blocks of ranks, unless it was told otherwise.
    fits = all(listed.get(rank) == host for rank, host in hosts.items())
    return (
        f"{named(gone, listed if fits else {})} of {world_size} did not come within {launch.timeout:g} s "
        f"(--init-timeout); {named(hosts, hosts)} did"
    )


def stand_by(store: Store, launch: Launch) -> int:
    """Wait, however long, until the run of the others ends. Returns the exit code of this process; a signal ends it at
    once."""
    print(
        f"notice: rank {launch.rank} ({launch.host}) stands by: the run goes on without it (--elastic)",
        file=sys.stderr,
        flush=True,
    )
    try:
        store.add("standing by", 1)
        while not store.check(["over"]):
            time.sleep(BEAT)
        store.add("left", 1)
        return int(store.get("over"))
    except dist.DistError:  # rank 0 is gone; a launcher may start all ranks again before this one has ended
        time.sleep(PATIENCE + BEAT)
        return 1


def set_gloo_interface(own: str, elsewhere: Sequence[str], environ: MutableMapping[str, str] = os.environ) -> None:
    """Set GLOO_SOCKET_IFNAME to the network interface that leads to the other ranks, unless the user has set it.

    torch does not look: gloo takes the address that the host's own name resolves to, which on many systems is a
    loopback address that no other machine can reach. NCCL looks for itself.

    own: this machine's address towards rank 0. elsewhere: the addresses of the ranks on other machines; empty if all
    ranks are on this one.
    """
    if elsewhere and own and ipaddress.ip_address(own).is_loopback:  # rank 0's own machine, by a name that loops back
        own = next(filter(None, map(address_towards, elsewhere)), "")
    interfaces = [name for _, name in socket.if_nameindex()]
    if elsewhere:
        address = own.partition("%")[0]  # without the interface that IPv6 adds within a link
        name = next((name for name in interfaces if address in addresses_of(name)), "")
    else:  # the loopback: looking the host name up fails or warns in many a container
        name = next((name for name in interfaces if name in ("lo", "lo0")), "")
    if name:
        environ.setdefault("GLOO_SOCKET_IFNAME", name)


def address_towards(host: str) -> str:
    """This machine's address on its way to `host`, "" if there is no way. Nothing is sent."""
    with contextlib.suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
    return ""


def addresses_of(interface: str) -> list[str]:
    """The IPv4 and IPv6 addresses of a network interface, as far as Linux tells them."""
    found = []
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket.fileno(), SIOCGIFADDR, struct.pack("256s", interface.encode()))
        found.append(socket.inet_ntoa(answer[20:24]))
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()  # address, number, length of the prefix, scope, flags, name
            found += [str(ipaddress.IPv6Address(int(digits, 16)))] if name == interface else []
    return found


def initialize_distributed(ranks: Ranks, backend: str, device: torch.device, timeout_minutes: float) -> None:
    """Make torch's process group; a world of one has none.

    backend: one that `device.choose_backend` has allowed. timeout_minutes: after which a collective ends a run whose
    peer hangs; torch's default is half an hour.
    """
    if ranks.meeting is None:
        assert ranks.world_size == 1, "the ranks have not met"
        return
    meeting = ranks.meeting
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    devices = meeting.gather("device", ranks.rank, f"{device}\t{kind}")
    if ranks.local_rank == 0:
        host = meeting.hosts[ranks.rank]
        of_ranks = {rank: devices[rank] for rank in meeting.hosts if meeting.hosts[rank] == host}
        print(node_line(host, of_ranks, ranks.world_size), flush=True, file=sys.stderr)
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


def node_line(host: str, devices: Mapping[int, str], world_size: int) -> str:
    """Return the line of a machine: "node004: ranks 2-3 of 4 on cuda:0, cuda:1 (NVIDIA H100)". devices: of each of its
    ranks, with the kind behind a tab."""
    pairs = [text.split("\t") for text in devices.values()]
    places, kinds = (", ".join(dict.fromkeys(part)) for part in zip(*pairs, strict=True))
    return f"{host}: {named(devices, {})} of {world_size} on {places} ({kinds})"


def end_with_lost_rank(ranks: Ranks) -> None:
    """Watch the signs of life until this rank leaves; end the process with exit code 1 if another rank is lost.

    For NCCL: if a peer dies on the same machine, its kernels wait in silence until torch's watchdog ends the process,
    after --distributed-timeout-minutes, and the training thread waits for the kernels.
    """
    assert ranks.meeting is not None
    heartbeat = ranks.meeting.heartbeat
    while not heartbeat.is_stopped:
        time.sleep(BEAT)
        is_lost = any(silence is not None for silence in heartbeat.gone(LOST).values())
        if is_lost or heartbeat.published is not None:
            time.sleep(PATIENCE)  # a collective of gloo may have failed: then the training thread ends the run
            if name_lost(ranks):
                os._exit(1)  # nothing else ends a thread that waits for a GPU


def name_lost(ranks: Ranks) -> bool:
    """After a collective has failed: whether other ranks are gone. One rank of each machine prints which.

    If so, this process has left the meeting.
    """
    if ranks.meeting is None or ranks.meeting.heartbeat.is_stopped or not (gone := ranks.meeting.heartbeat.lost()):
        return False
    hosts = ranks.meeting.hosts
    words, host = gone_words(gone, hosts), hosts[ranks.rank]
    ranks.note("lost", words, ranks=sorted(gone), silences={str(rank): seconds for rank, seconds in gone.items()})
    if ranks.rank == next((rank for rank in hosts if hosts[rank] == host and rank not in gone), -1):
        print(f"error ({host}): {words}: {ENDS}", file=sys.stderr, flush=True)
    ranks.leave(len(gone))
    return True


def leave(ranks: Ranks) -> None:
    """Leave the process group, if there is one, and the meeting."""
    if dist.is_initialized():
        dist.destroy_process_group()
    ranks.leave()


@contextlib.contextmanager
def temporary_group(ranks: Ranks) -> Iterator[ProcessGroup]:
    """Make a process group of all ranks on the host, before the one of the run is made; it ends with the context."""
    assert ranks.meeting is not None and dist.group.WORLD is None
    store = PrefixStore("temporary group", ranks.meeting.store)
    dist.init_process_group("gloo", store=store, rank=ranks.rank, world_size=ranks.world_size)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
