"""The store in which the ranks meet: a TCPStore that one process serves and all ranks reach at a known address.

The launcher serves it, or else rank 0. With file:// rank 0 writes its address into the file, and removes the file once
all ranks have come, so that a file which is there before belongs to an earlier run. torch's own rendezvous does neither
as well: where rank 0 does not answer it prints 30 lines of C++ frames, and with the file of a run that was killed one
rank fails and the others hang.

With --elastic and file:// any machine may serve it, because that of rank 0 may be the lost one. Then the file stays: it
leads those that come later to the run.
"""

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from data_utils.files import file_lock, replace_text
from megatron.gpt2.config import require
from megatron.gpt2.dist.launchers import Launch, host_port
from megatron.gpt2.dist.ranks import FAREWELL, POLL, EarlierRound, MissingRanks

ANSWER = 10.0  # seconds that a machine has to answer before its store counts as gone
CONNECT = 0.25  # of --init-timeout, after which a connection is tried anew: torch would knock at a port that is closed,
# because an earlier round has ended meanwhile, for all of it


@contextlib.contextmanager
def open_store(launch: Launch, deadline: float) -> Iterator[tuple[TCPStore, TCPStore | None]]:
    """The store of all ranks, and its server where this process runs it.

    deadline: of `time.monotonic()`, until which it waits for rank 0. The file of file:// is there as long as the
    context. Raises MissingRanks where rank 0 does not come in time, and ValueError where the place cannot be right.
    """
    path = launch.where.removeprefix("file://") if launch.where.startswith("file://") else ""
    place = urlsplit(launch.where)
    host, port = place.hostname or "localhost", place.port or 0
    server = None
    if launch.elastic and path:
        host, port, server = _elect(Path(path), launch, deadline)
        path = ""
    elif launch.rank == 0 and not launch.served:
        server = serve(listen(launch.host if path else host, port))
        host, port = "localhost" if path else host, server.port
    elif path:
        host, port = _read_card(path, launch, deadline)
    with _card(path, launch.host, port) if server and path else contextlib.nullcontext():
        yield _connect(host, port, launch, deadline, stale=path, serves=server is not None), server


def _elect(path: Path, launch: Launch, deadline: float) -> tuple[str, int, TCPStore | None]:
    """Where the file says that a store is. Where none answers there, rank 0 serves a new one; where it has not come
    after half of the time, the first rank of any machine."""
    while True:
        card = _card_of(path)
        with contextlib.suppress(OSError, ValueError):  # no machine, nobody listening, or no card at all
            host, port = _place(card, str(path), launch)
            socket.create_connection((host, port), timeout=ANSWER).close()
            return host, port, None
        is_first = launch.local is None or launch.local[0] == 0
        if launch.rank == 0 or is_first and time.monotonic() > deadline - launch.timeout / 2:
            with file_lock(path.with_name(f"{path.name}.lock"), waiting=int):
                if _card_of(path) == card:  # else somebody was faster
                    server = serve(listen(launch.host, 0))
                    replace_text(path, f"{launch.host} {server.port}\n")
                    return "localhost", server.port, server
        if time.monotonic() > deadline:
            raise MissingRanks(f"no first rank of a machine came within {launch.timeout:g} s (--init-timeout)")
        time.sleep(POLL)


def _card_of(path: Path) -> str:
    with contextlib.suppress(FileNotFoundError):
        return path.read_text(encoding="utf-8")
    return ""


def listen(host: str, port: int) -> socket.socket:
    """Where a store is to be served: a socket on `port` (0: any that is free), over IPv6 and IPv4 where `host` has an
    IPv6 address. Clients may connect already. ValueError where the port is taken.

    torch's own server always listens over both and looks up the name of each client, and one that comes over IPv4 to a
    socket of both is not in /etc/hosts: with a slow DNS server four ranks met in 5.6 s instead of 0.5.
    """
    families: set[int] = set()
    with contextlib.suppress(OSError):
        families = {found[0] for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    both = socket.AF_INET6 in families and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:  # by Python, for a message of one line
        return socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=2048)
    except OSError as error:
        raise ValueError(
            f"rank 0 cannot listen on port {port} ({os.strerror(error.errno or 0)}): another run may have "
            "it; name another in MASTER_PORT or --init-method"
        ) from error


def serve(listener: socket.socket) -> TCPStore:
    """The server of a store, which takes `listener` over. Its threads must not be there when a process is forked: the
    child could inherit a lock that one of them holds."""
    return TCPStore(
        "localhost", listener.getsockname()[1], None, True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


@contextlib.contextmanager
def _card(path: str, host: str, port: int) -> Iterator[None]:
    """Inside, the file `path` says where rank 0 is."""
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(f"{host} {port}\n")
    except FileExistsError as error:
        raise ValueError(_stale(path)) from error
    try:
        yield
    finally:
        os.unlink(path)


def _stale(path: str) -> str:
    return f"--init-method file://{path}: the file is left of an earlier run; remove it, or name another"


def _read_card(path: str, launch: Launch, deadline: float) -> tuple[str, int]:
    while True:
        with contextlib.suppress(FileNotFoundError), open(path, encoding="utf-8") as file:
            if (line := file.read()).endswith("\n"):
                break
        if time.monotonic() > deadline:
            raise MissingRanks(
                f"rank 0 did not come within {launch.timeout:g} s (--init-timeout): it has not made the "
                f"file {path}, as seen from {launch.host}"
            )
        time.sleep(POLL)
    return _place(line, path, launch)


def _place(line: str, path: str, launch: Launch) -> tuple[str, int]:
    """Host and port, of the line of the file."""
    host, _, port = line.partition(" ")
    require(port.strip().isdecimal(), _stale(path))
    return "localhost" if host == launch.host else host, int(port)


def _connect(host: str, port: int, launch: Launch, deadline: float, *, stale: str, serves: bool) -> TCPStore:
    while True:  # Python's sockets say why they fail, and once
        try:
            socket.create_connection((host, port), timeout=max(POLL, deadline - time.monotonic())).close()
            break
        except OSError as error:
            if stale and isinstance(error, ConnectionRefusedError):
                raise ValueError(_stale(stale)) from error
            if time.monotonic() > deadline:
                silence = (
                    f"nothing answers at {host_port(host, port)}, as seen from {launch.host} "
                    f"({error.strerror or error})"
                )
                if launch.rank == 0 and not launch.served:
                    raise ValueError(
                        f"rank 0 listens on port {port} of {launch.host}, but {silence}: MASTER_ADDR or "
                        "--init-method has to name the machine of rank 0"
                    ) from error
                raise MissingRanks(
                    f"rank 0 did not come within {launch.timeout:g} s (--init-timeout): {silence}"
                ) from error
            time.sleep(POLL)
    if serves or not launch.follows_a_round:
        return connected(host, port, launch.timeout)
    try:
        store = connected(host, port, CONNECT * launch.timeout)
    except dist.DistError as error:
        raise EarlierRound from error
    store.set_timeout(timedelta(seconds=launch.timeout))
    return store


def wait_until_gone(host: str, port: int) -> None:
    """Wait until nobody listens there, for FAREWELL seconds at most: of the next round somebody may."""
    end = time.monotonic() + FAREWELL
    with contextlib.suppress(OSError):
        while time.monotonic() < end:
            socket.create_connection((host, port), timeout=POLL).close()
            time.sleep(POLL)


def connected(host: str, port: int, timeout: float) -> TCPStore:
    """A connection of its own to the store at `host` and `port`; its operations wait for `timeout` seconds at most."""
    return TCPStore(host, port, None, False, timeout=timedelta(seconds=timeout), wait_for_workers=False)
