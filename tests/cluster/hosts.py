"""Simulate several hosts on one machine, as network namespaces that bridges connect. Each host has addresses, a host
name and an /etc/hosts with the names of the other hosts.

    with Hosts(folder, 3) as hosts:
        run = hosts.start(0, words)     # on node1
        hosts.unplug(0)                 # nothing closes its connections

Hosts need Linux, root and the program ip; `block` needs nft. Without these programs and rights, a test is skipped.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import pytest

from megatron.gpt2.commands.pretrain_gpt2 import main
from tests.megatron.gpt2.dist.started_ranks import StartedRank

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
_NUMBERS = itertools.count()


def tool(*words: str) -> str:
    """Run a program of the system and return its output. Skip the test if the program is missing or not permitted."""
    try:
        return subprocess.run(words, check=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT).stdout
    except FileNotFoundError:
        pytest.skip(f"the program {words[0]} is not installed")
    except subprocess.CalledProcessError as error:
        message = f"{' '.join(words)}: {error.stdout.strip()}"
        if "not permitted" in message or "not supported" in message.lower():
            pytest.skip(message)  # The user is not root, or the kernel has no namespaces.
        raise RuntimeError(message) from None


def enter(namespace: str, name: str, names: str, prepare: Callable[[], object]) -> None:
    """Move this process, which must have no threads, into the namespace of a host, and call `prepare` there.

    names: the file that replaces /etc/hosts.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def check(code: int) -> None:
        assert code == 0, os.strerror(ctypes.get_errno())

    with open(f"/run/netns/{namespace}") as file:
        check(libc.setns(file.fileno(), CLONE_NEWNET))
    check(libc.unshare(CLONE_NEWUTS | CLONE_NEWNS))
    check(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
    check(libc.mount(names.encode(), b"/etc/hosts", None, MS_BIND, None))
    socket.sethostname(name)
    prepare()


class Hosts:
    """A context manager that makes the hosts node1, node2, …, each with an interface eth0, eth1, … per network.

    family: the version of IP, 4 or 6.
    """

    def __init__(self, folder: Path, count: int = 2, *, networks: int = 1, family: int = 4) -> None:
        self.folder, self.count, self.networks, self.family = folder, count, networks, family
        prefix = f"t{os.getpid()}x{next(_NUMBERS)}"
        self._switch, self._spaces = f"{prefix}s", [f"{prefix}h{host}" for host in range(count)]

    def __enter__(self) -> Hosts:
        for space in (self._switch, *self._spaces):
            tool("ip", "netns", "add", space)
            tool("ip", "-n", space, "link", "set", "lo", "up")
        for network in range(self.networks):
            tool(*f"ip -n {self._switch} link add net{network} up type bridge".split())
            for host, space in enumerate(self._spaces):
                port = f"port{host}_{network}"
                tool(*f"ip link add eth{network} netns {space} type veth peer name {port} netns {self._switch}".split())
                tool(*f"ip -n {self._switch} link set {port} master net{network} up".split())
                size = f"{self.address(host, network)}/" + ("24" if self.family == 4 else "64 nodad")
                tool(*f"ip -n {space} address add {size} dev eth{network}".split())
                tool(*f"ip -n {space} link set eth{network} up".split())
        self.set_names(*[{f"node{host + 1}": self.address(host) for host in range(self.count)}] * self.count)
        return self

    def __exit__(self, *error: object) -> None:
        for host, space in enumerate(self._spaces):
            self.kill(host)
            subprocess.run(["ip", "netns", "delete", space], stderr=subprocess.DEVNULL, check=False)
        subprocess.run(["ip", "netns", "delete", self._switch], stderr=subprocess.DEVNULL, check=False)

    def address(self, host: int, network: int = 0) -> str:
        """Return the address of a host in a network."""
        return f"10.77.{network}.{host + 1}" if self.family == 4 else f"fd00:77:{network}::{host + 1}"

    def set_names(self, *addresses: dict[str, str]) -> None:
        """Write the /etc/hosts of each host, before `start`. Each dict has {name: address} of one host, and the last
        dict also those of all later hosts."""
        for host in range(self.count):
            names = addresses[min(host, len(addresses) - 1)] | {"localhost": "127.0.0.1"}
            (self.folder / f"names_{host}").write_text("".join(f"{at} {name}\n" for name, at in names.items()))

    def start(
        self,
        host: int,
        words: str,
        environ: Mapping[str, str] | None = None,
        *,
        prepare: Callable[[], object] = int,
        program: Callable[[Sequence[str]], int] = main,
    ) -> StartedRank:
        """Start `program` with small flags and `words` on a host.

        prepare: a function that the new process calls before `program`.
        """
        names = str(self.folder / f"names_{host}")
        before = partial(enter, self._spaces[host], f"node{host + 1}", names, prepare)
        return StartedRank(self.folder, words.split(), environ or {}, before=before, program=program)

    def kill(self, host: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to all processes of a host."""
        space = self._spaces[host]
        found = subprocess.run(["ip", "netns", "pids", space], text=True, stdout=subprocess.PIPE, check=False).stdout
        for process in map(int, found.split()):
            os.kill(process, number)

    def unplug(self, host: int, network: int = 0) -> None:
        """Disconnect a host from the switch. The host itself does not notice the loss."""
        tool(*f"ip -n {self._switch} link set port{host}_{network} nomaster".split())

    def plug(self, host: int, network: int = 0) -> None:
        """Undo `unplug`."""
        tool(*f"ip -n {self._switch} link set port{host}_{network} master net{network}".split())

    def cut(self, host: int, other: int) -> None:
        """Cut the route between two hosts, which can both still reach the other hosts."""
        bits = "32" if self.family == 4 else "128"
        tool(*f"ip -n {self._spaces[host]} route add blackhole {self.address(other)}/{bits}".split())

    def vanish(self, host: int) -> None:
        """Let a host lose its power, without closing its connections."""
        for network in range(self.networks):
            self.unplug(host, network)
        self.kill(host)

    def block(self, host: int, rule: str) -> None:
        """Filter the packets that arrive at a host, for example with the rule "tcp dport 29500 drop"."""
        nft = ("ip", "netns", "exec", self._spaces[host], "nft")
        tool("which", "nft")
        tool(*nft, "add table inet filter; add chain inet filter input { type filter hook input priority 0; }")
        tool(*nft, f'add rule inet filter input iifname != "lo" {rule}')


def torchrun(argv: Sequence[str]) -> int:
    """Run torchrun with the words after "--", and pretrain_gpt2.py with the words before "--"."""
    from torch.distributed.run import main as run

    own = argv.index("--")
    run([*argv[own + 1 :], "pretrain_gpt2.py", *argv[:own]])
    return 0
