"""Which of this machine's network interfaces leads to the other ranks.

torch does not look: gloo takes the address that the host's own name resolves to, which on many systems is a loopback
address that no other machine can reach. NCCL looks for itself.
"""

import contextlib
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import MutableMapping, Sequence
from pathlib import Path

SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


def address_towards(host: str) -> str:
    """This machine's address on its way to `host`, "" where there is no way. Nothing is sent."""
    with contextlib.suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
    return ""


def interface_of(address: str) -> str:
    """The name of the interface that has this IPv4 or IPv6 address, "" where that cannot be found out."""
    if sys.platform != "linux":
        return ""
    if ":" in address:
        return _interface_of_ipv6(address)
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(any_socket.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return ""


def _interface_of_ipv6(address: str) -> str:
    sought = ipaddress.IPv6Address(address)
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()  # address, number, length of the prefix, scope, flags, name
            if int(digits, 16) == int(sought):
                return name
    return ""


def set_gloo_interface(own: str, elsewhere: Sequence[str], environ: MutableMapping[str, str] = os.environ) -> None:
    """Set GLOO_SOCKET_IFNAME in `environ` unless the user has.

    own: this machine's address towards rank 0. elsewhere: the addresses of the ranks on other machines, none where all
    ranks are on this one.
    """
    if "GLOO_SOCKET_IFNAME" in environ:
        return
    if elsewhere:
        if own and ipaddress.ip_address(own).is_loopback:  # rank 0's own machine, by a name that loops back
            own = next(filter(None, map(address_towards, elsewhere)), "")
        name = interface_of(own)
    else:  # the loopback: looking the host name up fails or warns in many a container
        name = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "")
    if name:
        environ["GLOO_SOCKET_IFNAME"] = name
