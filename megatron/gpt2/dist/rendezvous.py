"""Rendezvous: the ranks join a store, exchange their hosts, and later create the process group.

    join_rendezvous         at the start: waits until all ranks have joined, or names the missing ranks
    initialize_distributed  when each rank has its device and its data: creates the process group
    report_lost_ranks       after a collective has failed: names the lost ranks
    shutdown_distributed    at the end: destroys the process group

The rendezvous of torch has these defects:

- If ranks are missing, torch prints their number, but not which ranks are missing.
- If two processes have the same rank or different world sizes, all ranks wait until a timeout or forever.
- If rank 0 does not answer, torch prints 30 lines of C++ frames.
- With a file:// store that a killed run has left, one rank fails and the other ranks hang.
"""

import contextlib
import fcntl
import functools
import ipaddress
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, Store, TCPStore  # type: ignore[attr-defined]

from data_utils.command_line import plural, require
from data_utils.files import atomic_write_text
from megatron.gpt2.dist.launch import Launch, host_port
from megatron.gpt2.dist.ranks import (
    HEARTBEAT_INTERVAL,
    LEAVE_TIMEOUT,
    LOST_TIMEOUT,
    POLL_INTERVAL,
    SILENCE_TIMEOUT,
    Heartbeat,
    MissingRanksError,
    RankInfo,
    Rendezvous,
    TimedStore,
    describe_lost,
    format_ranks,
    print_status,
    run_in_thread,
    wait_for_others,
)

CONTINUE_HINT = "the run ends here; the same command continues from the last checkpoint"
OPEN_PORTS = "open all ports between the machines, or name the interface in GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME"
ALL_JOINED = "all ranks have joined"
LINK_TIMEOUT = 8.0  # The test of the connections between machines takes at most this number of seconds.
SIOCGIFADDR = 0x8915  # Linux's ioctl request for the IPv4 address of an interface.

UsableRanks = Callable[[int], int]  # From the number of ranks that have joined to the number that the run can use.


class StandbyExit(Exception):
    """Raised on a rank on standby when the run of the other ranks has ended.

    code: the exit code of the run.
    """

    def __init__(self, code: int) -> None:
        super().__init__(f"was on standby; exit code {code}")
        self.code = code


@contextlib.contextmanager
def open_store(launch: Launch, *, is_server: bool) -> Iterator[tuple[TCPStore, TCPStore | None]]:
    """Connect to the store at `launch.init_method`. Yield the store, and its server (None in processes that do not
    serve the store).

    For file:///PATH the server writes its address into the file and removes the file at the end. Raises
    MissingRanksError if the server does not answer within `launch.timeout`, and ValueError if the address is wrong.

    is_server: whether this process serves the store.
    """
    address, end = urlsplit(launch.init_method), time.monotonic() + launch.timeout
    path = Path(launch.init_method.removeprefix("file://")) if address.scheme == "file" else None
    at = address.hostname or launch.host, address.port or 0
    server = start_store_server(*at) if is_server else None
    try:
        if server:
            at = "localhost" if path else at[0], server.port
        if server and path:
            atomic_write_text(path, f"{launch.host} {server.port}\n")
        while True:  # Connect with Python's sockets first, because torch prints C++ frames for an error.
            try:
                if path and not server:
                    host, _, port = path.read_text(encoding="utf-8").partition(" ")
                    at = "localhost" if host == launch.host else host, int(port)
                socket.create_connection(at, timeout=max(POLL_INTERVAL, end - time.monotonic())).close()
                break
            except FileNotFoundError:
                silence = f"the file {path} does not exist on {launch.host}"
            except OSError as error:
                silence = f"nothing answers at {host_port(*at)}, as seen from {launch.host} ({error.strerror or error})"
            except ValueError:
                silence = f"the file {path} has no address"
            if time.monotonic() > end and server:
                raise ValueError(
                    f"rank 0 listens on port {at[1]} of {launch.host}, but {silence}: MASTER_ADDR or --init-method has "
                    "to name the machine of rank 0"
                )
            if time.monotonic() > end:
                raise MissingRanksError(f"rank 0 did not join within {launch.timeout:g} s (--init-timeout): {silence}")
            time.sleep(POLL_INTERVAL)
        yield connect_store(at, launch.timeout), server
    finally:
        if server and path:
            path.unlink(missing_ok=True)


def start_store_server(host: str, port: int) -> TCPStore:
    """Serve a store on `port` (0: any free port) over IPv4. If `host` has an IPv6 address, serve the store over IPv6,
    too. Raises ValueError if the port is in use.

    torch's own server always uses both protocols and looks up the name of each client, which is not in /etc/hosts for
    IPv4 clients of an IPv6 socket. With a slow DNS server, four ranks needed 5.6 s instead of 0.5 s to join.
    """
    families: set[int] = set()
    with contextlib.suppress(OSError):
        families = {info[0] for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    both = socket.AF_INET6 in families and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:  # torch's error for a port in use would be many lines.
        listener = socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=2048)
    except OSError as error:
        raise ValueError(
            f"rank 0 cannot listen on port {port} ({os.strerror(error.errno or 0)}): another run may "
            "use it; set a different port in MASTER_PORT or --init-method"
        ) from error
    port = listener.getsockname()[1]
    return TCPStore("localhost", port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())


def connect_store(at: tuple[str, int], timeout: float) -> TCPStore:
    """Open a new connection to the store. Operations of the store wait at most `timeout` seconds. Raises
    MissingRanksError if no store answers."""
    seconds = timedelta(seconds=timeout)
    silence = f"{host_port(*at)} accepts connections, but does not answer like rank 0 (--init-timeout {timeout:g}): a "
    silence += "different program may use this port, or the network may be cut"
    try:
        return run_in_thread(
            lambda: TCPStore(*at, None, False, timeout=seconds, wait_for_workers=False), timeout, silence
        )
    except dist.DistError:
        raise MissingRanksError(silence) from None


def prefix_in_agent_store(restart_count: int) -> str:
    """Return the prefix of the ranks' keys after a number of restarts. The store of the launcher or of torchrun still
    has the keys of earlier starts."""
    return f"megatron/{restart_count}"


def join_rendezvous(launch: Launch, usable: UsableRanks | None = None) -> RankInfo:
    """Wait until all ranks have joined. Return rank and world size of this process, with the rendezvous. A run of one
    rank has no rendezvous.

    Raises MissingRanksError if some ranks do not join within `launch.timeout` seconds, and ValueError for a bad
    address.

    usable: with --elastic, returns how many of the joined ranks the run can use. The other ranks wait until the run
        ends, and then raise StandbyExit.
    """
    if launch.world_size == 1:
        return launch.rank_info()
    prefix = prefix_in_agent_store(launch.restart_count) if launch.use_agent_store else "megatron"
    with open_store(launch, is_server=launch.rank == 0 and not launch.use_agent_store) as (tcp, server):
        store, address = PrefixStore(prefix, tcp), address_towards(tcp.host)
        timed = TimedStore(store, launch.timeout)
        try:
            wait = functools.partial(_wait_for_all_ranks, store, launch, address, is_server=server is not None)
            silence = f"rank 0 stopped answering (--init-timeout {launch.timeout:g})"
            run_in_thread(wait, launch.timeout + 2 * LEAVE_TIMEOUT, silence)
            keys = [f"joined/{rank}" for rank in range(launch.world_size)]
            joined = [json.loads(text) for text in timed.multi_get(keys)]
            world_size = launch.world_size if usable is None else usable(launch.world_size)
            if world_size == 0:
                raise MissingRanksError(f"{launch.world_size} ranks joined, too few for this layout (--elastic)")
            if launch.rank >= world_size:
                raise StandbyExit(stand_by(store, launch))
            timed.set(f"beat/{launch.rank}", "0")
            own_connection = PrefixStore(prefix, connect_store((tcp.host, tcp.port), launch.timeout))
        except dist.DistError as error:
            raise MissingRanksError("rank 0 left while the others joined: see its own message") from error
    hosts, addresses = (dict(enumerate(part)) for part in zip(*joined[:world_size], strict=True))
    set_gloo_interface(address, [address for host, address in joined if host != launch.host])
    together = [rank for rank, host in hosts.items() if host == launch.host]
    local = launch.local if launch.local and usable is None else (together.index(launch.rank), len(together))
    heartbeat = Heartbeat(own_connection, launch.rank, hosts, is_first_on_node=local[0] == 0)
    return RankInfo(launch.rank, world_size, *local, rendezvous=Rendezvous(store, server, hosts, heartbeat, addresses))


def _wait_for_all_ranks(store: Store, launch: Launch, address: str, *, is_server: bool) -> None:
    """Add this rank to the store and wait until all ranks have joined.

    The last rank to join writes the result ALL_JOINED. The first rank that finds a missing, repeated or contradicting
    rank writes an error message instead, and all ranks raise MissingRanksError with this message.
    """
    rank, world = launch.rank, launch.world_size
    end, problem = time.monotonic() + launch.timeout, ""
    store.add("started", 1)
    world_of_first = int(store.compare_set("world", "", str(world)))
    if world_of_first != world:
        problem = (
            f"rank {rank} ({launch.host}) has world size {world}, but the first rank has {world_of_first}: all ranks "
            "need the same world size"
        )
    elif store.add(f"started/{rank}", 1) > 1:
        problem = f"rank {rank} was started twice, the second time on {launch.host}"
    else:
        store.set(f"joined/{rank}", json.dumps([launch.host, address]))
    if problem or store.add("joined", 1) == world:
        store.compare_set("result", "", problem or ALL_JOINED)
    while not store.check(["result"]):
        if time.monotonic() > end:
            joined = {other: key for other in range(world) if store.check([key := f"joined/{other}"])}
            hosts = {other: json.loads(store.get(key))[0] for other, key in joined.items()}
            store.compare_set("result", "", describe_missing(hosts, world, launch))
        time.sleep(POLL_INTERVAL)
    result = store.get("result").decode()
    if problem or result != ALL_JOINED:
        error, local_rank = MissingRanksError(problem or result), launch.rank_info().local_rank
        error.is_first_on_node = not any(store.check([f"joined/{other}"]) for other in range(rank - local_rank, rank))
        if launch.use_agent_store:  # The launcher has started all ranks, so the missing ranks hang.
            error.exit_code = 1
        wait_for_others(store, "read", store.add("started", 0) if is_server else 0)
        raise error


def describe_missing(hosts: Mapping[int, str], world_size: int, launch: Launch) -> str:
    """Return the error message for ranks that did not join.

    hosts: {rank: host name} of the ranks that joined.
    """
    missing = [rank for rank in range(world_size) if rank not in hosts]
    return (
        f"{format_ranks(missing, {})} of {world_size} did not join within {launch.timeout:g} s (--init-timeout); "
        f"{format_ranks(hosts, hosts)} did"
    )


def stand_by(store: Store, launch: Launch) -> int:
    """Wait without a time limit until the run of the other ranks ends, and return its exit code. Signals end this
    process at once."""
    print_status(
        f"rank {launch.rank} ({launch.host}) is on standby: the run continues without it (--elastic)", "notice"
    )
    try:
        store.add("standing by", 1)
        while not store.check(["over"]):
            time.sleep(HEARTBEAT_INTERVAL)
        store.add("left", 1)
        return int(store.get("over"))
    except dist.DistError:  # Rank 0 is lost. A launcher may restart all ranks during this sleep.
        time.sleep(LOST_TIMEOUT + HEARTBEAT_INTERVAL)
        return 1


def set_gloo_interface(own: str, elsewhere: Sequence[str], environ: MutableMapping[str, str] = os.environ) -> None:
    """Set GLOO_SOCKET_IFNAME to the network interface towards the other ranks, unless the user has set it. Raises
    ValueError if the user has set it to an interface that this machine does not have.

    Without the variable, gloo uses the address of the host name. On many systems this address is a loopback address
    that other machines cannot reach. NCCL finds an interface by itself.

    own: this machine's address towards rank 0.
    elsewhere: the addresses of ranks on other machines; empty if all ranks are on this machine.
    """
    interfaces, user_setting = [name for _, name in socket.if_nameindex()], environ.get("GLOO_SOCKET_IFNAME")
    if user_setting is not None:
        require(
            set(user_setting.split(",")) <= set(interfaces),
            f"GLOO_SOCKET_IFNAME={user_setting} is not a network interface of this machine, which has "
            f"{', '.join(interfaces)}: correct the variable or unset it",
        )
        return
    if elsewhere and own and ipaddress.ip_address(own).is_loopback:  # Rank 0 is on this machine.
        own = next(filter(None, map(address_towards, elsewhere)), "")
    if elsewhere:
        address = own.partition("%")[0]  # Remove the scope of an IPv6 address, such as %eth0.
        name = next((name for name in interfaces if address in addresses_of(name)), "")
    else:  # Use the loopback interface, because in many containers gloo cannot look up the host name.
        name = next((name for name in interfaces if name in ("lo", "lo0")), "")
    if name:
        environ["GLOO_SOCKET_IFNAME"] = name


def address_towards(host: str) -> str:
    """Return this machine's address towards `host`, or "" without a route. The function sends no packet."""
    with contextlib.suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
    return ""


def addresses_of(interface: str) -> list[str]:
    """Return the IPv4 and IPv6 addresses of a network interface. The function works only on Linux."""
    addresses = []
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket.fileno(), SIOCGIFADDR, struct.pack("256s", interface.encode()))
        addresses.append(socket.inet_ntoa(answer[20:24]))
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            # A line of if_inet6 has address, number, length of the prefix, scope, flags and name.
            digits, *_, name = line.split()
            addresses += [str(ipaddress.IPv6Address(int(digits, 16)))] if name == interface else []
    return addresses


def initialize_distributed(rank_info: RankInfo, backend: str, device: torch.device, timeout_minutes: float) -> None:
    """Create torch's process group, if the run has several ranks. Wait for other ranks without a time limit.

    backend: the result of `device.choose_backend`.
    timeout_minutes: the time limit of a collective. torch's default is 30 minutes.
    """
    if rank_info.rendezvous is None:
        assert rank_info.world_size == 1, "join_rendezvous was not called"
        return
    rendezvous = rank_info.rendezvous
    threads = torch.get_num_threads()
    kind = f"{plural(threads, 'thread')} each"
    if device.type == "cuda":
        kind = torch.cuda.get_device_name(device)
    devices = rendezvous.gather("device", rank_info.rank, f"{device}\t{kind}")
    if rank_info.local_rank == 0:
        host = rendezvous.hosts[rank_info.rank]
        of_ranks = {rank: devices[rank] for rank in rendezvous.hosts if rendezvous.hosts[rank] == host}
        print_status(node_line(of_ranks, rank_info.world_size), f"host {host}")
    if cut := find_cut_link(rank_info, "start"):
        raise MissingRanksError(f"{' and '.join(cut)} cannot connect to each other: {OPEN_PORTS}")
    timeout = timedelta(minutes=timeout_minutes)
    rendezvous.store.set_timeout(timeout)
    threading.Thread(target=end_if_rank_lost, args=(rank_info, backend), name="lost ranks", daemon=True).start()
    try:
        dist.init_process_group(
            backend,
            store=PrefixStore("group", rendezvous.store),
            rank=rank_info.rank,
            world_size=rank_info.world_size,
            timeout=timeout,
            device_id=device if backend == "nccl" else None,
        )
    except RuntimeError as error:
        raise dist.DistNetworkError(f"this rank cannot connect to others ({error}): {OPEN_PORTS}") from error


def node_line(devices: Mapping[int, str], world_size: int) -> str:
    """Describe the ranks of a machine: "ranks 2-3 of 4 on cuda:0, cuda:1 (NVIDIA H100)".

    devices: {rank: "device\tkind"} of the ranks of the machine.
    """
    pairs = [text.split("\t") for text in devices.values()]
    places, kinds = (", ".join(dict.fromkeys(part)) for part in zip(*pairs, strict=True))
    return f"{format_ranks(devices, {})} of {world_size} on {places} ({kinds})"


def find_cut_link(rank_info: RankInfo, name: str) -> list[str]:
    """Return the names of two machines that cannot connect to each other, or []. The first rank of each machine listens
    on a port and tries to connect to the other machines. All ranks must call this function.

    name: a name that is equal on all ranks and used once.
    """
    rendezvous = rank_info.rendezvous
    assert rendezvous is not None
    store, hosts = PrefixStore(f"links/{name}", rendezvous.store), rendezvous.hosts
    firsts = {host: rank for rank, host in reversed(hosts.items())}
    addresses = {host: rendezvous.addresses.get(rank, "") for host, rank in firsts.items()}
    tested = {host: at for host, at in addresses.items() if at and not ipaddress.ip_address(at).is_loopback}
    this_host, end = hosts[rank_info.rank], time.monotonic() + LINK_TIMEOUT
    with contextlib.ExitStack() as stack:
        if this_host in tested and firsts[this_host] == rank_info.rank:
            family = socket.AF_INET6 if ":" in tested[this_host] else socket.AF_INET
            server = stack.enter_context(socket.create_server(("", 0), family=family))
            store.set(f"port/{this_host}", str(server.getsockname()[1]))
            for host in tested.keys() - {this_host}:
                try:
                    while not store.check([f"port/{host}"]) and time.monotonic() < end:
                        time.sleep(POLL_INTERVAL)
                    port = int(store.get(f"port/{host}"))
                    socket.create_connection((tested[host], port), timeout=LINK_TIMEOUT / 4).close()
                except OSError:
                    store.compare_set("cut", "", json.dumps([this_host, host]))
            store.add("tested", 1)
        while store.add("tested", 0) < len(tested) and time.monotonic() < end:
            time.sleep(POLL_INTERVAL)
    cut: list[str] = json.loads(store.get("cut")) if store.check(["cut"]) else []
    return cut


def end_if_rank_lost(rank_info: RankInfo, backend: str) -> None:
    """Watch the heartbeats until this rank leaves. If another rank is silent for SILENCE_TIMEOUT seconds, let the
    collectives of this process fail (gloo), or end the process with exit code 1 (NCCL).

    Without this function, a rank waits for --distributed-timeout-minutes if a machine vanishes without closing its
    connections, or if an NCCL kernel waits for a rank of the same machine that has died. gloo's own `abort` does not
    end a wait.
    """
    assert rank_info.rendezvous is not None
    heartbeat = rank_info.rendezvous.heartbeat
    while not heartbeat.is_stopped:
        time.sleep(HEARTBEAT_INTERVAL)
        has_group = dist.is_initialized()  # A rank that leaves before the group exists is lost, too.
        silences = heartbeat.lost_ranks(SILENCE_TIMEOUT).values()
        if heartbeat.published_lost is None and not any(not has_group or silence is not None for silence in silences):
            continue
        if has_group and backend == "gloo":
            heartbeat.wait_for_lost_ranks()  # Publish the lost ranks before the collectives fail.
            return close_connections(rank_info.rendezvous.store.underlying_store.port)  # type: ignore[attr-defined]
        time.sleep(LOST_TIMEOUT)  # The training thread may end the run during this sleep, if a collective fails.
        if report_lost_ranks(rank_info):
            os._exit(1)  # No exception can end a thread that waits for a GPU or for a connection.


def close_connections(store_port: int) -> None:
    """Shut down the TCP connections of this process, except its connections to the store."""
    for descriptor in map(int, os.listdir("/dev/fd")):
        with contextlib.suppress(OSError):  # The file is not a connection.
            connection = socket.socket(fileno=descriptor)
            try:
                ports = connection.getsockname()[1:2] + connection.getpeername()[1:2]
                if connection.family != socket.AF_UNIX and store_port not in ports:
                    connection.shutdown(socket.SHUT_RDWR)
            finally:
                connection.detach()


def report_lost_ranks(rank_info: RankInfo) -> bool:
    """After a collective has failed, return whether other ranks are lost. If ranks are lost, one rank of each machine
    prints them, and this process leaves the rendezvous.
    """
    if (
        rank_info.rendezvous is None
        or rank_info.rendezvous.heartbeat.is_stopped
        or not (lost := rank_info.rendezvous.heartbeat.wait_for_lost_ranks())
    ):
        return False
    hosts = rank_info.rendezvous.hosts
    words, host = describe_lost(lost, hosts), hosts[rank_info.rank]
    rank_info.note("lost", words, ranks=sorted(lost), silences={str(rank): seconds for rank, seconds in lost.items()})
    if rank_info.rank == next((rank for rank in hosts if hosts[rank] == host and rank not in lost), -1):
        print_status(f"{words}: {CONTINUE_HINT}", f"error ({host})")
    rank_info.leave(len(lost))
    return True


def shutdown_distributed(rank_info: RankInfo) -> None:
    """Destroy the process group, if there is one, and leave the rendezvous."""
    if dist.is_initialized():
        dist.destroy_process_group()
    rank_info.leave()


@contextlib.contextmanager
def temporary_group(rank_info: RankInfo) -> Iterator[ProcessGroup]:
    """Create a gloo process group of all ranks, and destroy it at the end of the block. The run must not have a process
    group yet."""
    assert rank_info.rendezvous is not None and dist.group.WORLD is None
    store = PrefixStore("temporary group", rank_info.rendezvous.store)
    dist.init_process_group("gloo", store=store, rank=rank_info.rank, world_size=rank_info.world_size)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
