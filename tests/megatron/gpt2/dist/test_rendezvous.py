"""Test the rendezvous of ranks that are threads of one process, and its one-line errors for missing or repeated
ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.gpt2.commands import generate_text, pretrain_gpt2
from megatron.gpt2.config.arguments import parse
from megatron.gpt2.device import choose_device
from megatron.gpt2.dist import ranks as ranks_module
from megatron.gpt2.dist import rendezvous, run_program
from megatron.gpt2.dist.launch import Launch
from megatron.gpt2.dist.ranks import (
    POLL_INTERVAL,
    MissingRanksError,
    RankInfo,
    TimedStore,
    describe_lost,
)
from megatron.gpt2.dist.rendezvous import (
    StandbyExit,
    join_rendezvous,
    set_gloo_interface,
    shutdown_distributed,
)
from megatron.gpt2.dist.run_program import start_ranks
from tests.distributed import CONTEXT
from tests.megatron.gpt2.dist.started_ranks import StartedRank, free_port
from tests.megatron.gpt2.test_device import gpus

PAIR = [RankInfo(0, 2, 0, 2), RankInfo(1, 2, 1, 2)]  # two ranks of one machine


def make_launches(
    world_size: int, hosts: str, where: str = "", *, timeout: float = 60.0, first: int = 0
) -> list[Launch]:
    """Return a launch for each of the `hosts`, from rank `first` on."""
    where = where or f"tcp://localhost:{free_port()}"
    return [
        Launch(rank, world_size, init_method=where, host=host, timeout=timeout)
        for rank, host in enumerate(hosts, start=first)
    ]


def join_all(
    make_launches: list[Launch], use: Callable[[RankInfo], Any] = lambda ranks: ranks, **usable: Any
) -> list[Any]:
    """Run the rendezvous of each launch in a thread. Return the result of `use`, or the error message, for each rank.
    The ranks that have joined leave at the same time, because the server of the store waits for all of them."""
    met: list[RankInfo] = []

    def one(launch: Launch) -> Any:
        try:
            met.append(rank_info := join_rendezvous(launch, **usable))
            return use(rank_info)
        except ValueError as error:
            return str(error)
        except StandbyExit as ended:
            return ended.code

    with ThreadPoolExecutor(len(make_launches)) as threads:
        found = list(threads.map(one, make_launches))
        list(threads.map(shutdown_distributed, met))
    return found


def has_no_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return False
    return True


def test_local_ranks_follow_from_the_hosts() -> None:
    of_two = [RankInfo(0, 4, 0, 2), RankInfo(1, 4, 0, 2), RankInfo(2, 4, 1, 2), RankInfo(3, 4, 1, 2)]
    assert join_all(make_launches(4, "abab")) == of_two


@pytest.mark.skipif(has_no_ipv6(), reason="this machine has no IPv6")
def test_rendezvous_over_ipv6_and_ipv4() -> None:
    """Ranks may use IPv6 and IPv4 addresses of one server, and a name that has both."""
    port = free_port()
    places = [f"tcp://{place}:{port}" for place in ("[::1]", "127.0.0.1", "localhost")]
    met = join_all([Launch(rank, 3, init_method=where, host="a", timeout=60) for rank, where in enumerate(places)])
    assert met == [RankInfo(rank, 3, rank, 3) for rank in range(3)]


def test_a_file_of_an_earlier_run(tmp_path: Path) -> None:
    """Rank 0 overwrites the file. The other ranks read the file again until its content is valid. The file is removed
    at the end."""
    card = tmp_path / "card"
    for text in (f"a {free_port()}\n", "something else\n"):
        card.write_text(text)
        assert join_all(make_launches(2, "aa", f"file://{card}")) == PAIR
        assert not card.exists()


def test_missing_ranks_are_named() -> None:
    came = join_all(make_launches(4, "aa", timeout=1))
    assert came == ["ranks 2-3 of 4 did not join within 1 s (--init-timeout); ranks 0-1 (a) did"] * 2
    launch = Launch(0, 4, (0, 2), init_method=f"tcp://localhost:{free_port()}", host="a", ranks_to_start=2, timeout=1)
    with pytest.raises(MissingRanksError, match=r"ranks 2-3 of 4 did not join within 1 s \(.*\); ranks 0-1 \(a\) did"):
        start_ranks(lambda words: 0, [], launch)
    assert not [thread.name for thread in threading.enumerate() if "KeepAlive" in thread.name]
    begin = time.monotonic()
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    start_ranks(lambda words: 0, [], dataclasses.replace(launch, timeout=60))
    assert time.monotonic() < begin + 20, "SIGTERM does not end the wait for the other machine"


def no_program(words: Sequence[str]) -> int:
    return 0


def start_node(place: str, rank: int, dies: bool) -> None:
    """Start a launcher with one rank. If `dies` is set, the launcher dies after it has joined the rendezvous."""
    if dies:
        join = run_program.NodeRendezvous.next_rendezvous

        def join_and_die(handler: run_program.NodeRendezvous) -> None:
            join(handler)
            os.kill(os.getpid(), signal.SIGKILL)

        run_program.NodeRendezvous.next_rendezvous = join_and_die  # type: ignore[assignment,method-assign]
    launch = Launch(rank, 2, (0, 1), init_method=place, host=f"host{rank}", ranks_to_start=1, timeout=5)
    sys.exit(start_ranks(no_program, [], launch))


@pytest.mark.wide
def test_a_machine_is_lost_between_joining_and_starting_ranks() -> None:
    """The other machine joins again and finds the lost machine, which has returned."""
    place = f"tcp://localhost:{free_port()}"
    nodes = [CONTEXT.Process(target=start_node, args=(place, rank, rank == 1)) for rank in range(2)]
    for node in nodes:
        node.start()
    nodes[1].join(60)
    nodes.append(CONTEXT.Process(target=start_node, args=(place, 1, False)))
    nodes[2].start()
    for node in nodes:
        node.join(120)
    assert [node.exitcode for node in nodes] == [0, -signal.SIGKILL, 0]


@pytest.mark.parametrize(
    "rank, where, message",
    [
        (1, "tcp://localhost:{port}", r"nothing answers at localhost:{port}, as seen from b \(Connection refused\)"),
        (1, "file:///nowhere/card", "the file /nowhere/card does not exist on b"),
        (1, "file://{folder}/card", "the file {folder}/card has no address"),
        (
            0,
            "tcp://no.such:{port}",
            r"^rank 0 listens on port {port} of b, but nothing answers at no.such:{port}, as seen from b \(.*\): "
            "MASTER_ADDR or --init-method has to name ",
        ),
    ],
)
def test_an_address_without_rank_0(tmp_path: Path, rank: int, where: str, message: str) -> None:
    (tmp_path / "card").write_text("something else\n")
    values = {"port": free_port(), "folder": tmp_path}
    if rank:
        message = r"^rank 0 did not join within 0.2 s \(--init-timeout\): " + message
    with pytest.raises(ValueError, match=message.format(**values)):
        join_rendezvous(Launch(rank, 2, init_method=where.format(**values), host="b", timeout=0.2))


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_a_port_that_does_not_answer(answer: bytes) -> None:
    """Another program accepts connections at the address of rank 0."""

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                accepted.append(server.accept()[0])
                accepted[-1].sendall(answer)

    accepted: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=accept, daemon=True).start()
        where = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(MissingRanksError, match=r"accepts connections, but does not answer .*--init-timeout 0.3"):
            join_rendezvous(Launch(1, 2, init_method=where, host="b", timeout=0.3))
        server.shutdown(socket.SHUT_RDWR)
        for one in accepted:
            one.close()


def serve(port: int) -> None:
    server = rendezvous.start_store_server("localhost", port)
    while server:
        time.sleep(600)


def test_a_store_that_stops_to_answer(tmp_path: Path) -> None:
    """Suspend the store, whose connections stay open. A rank's wait ends at its time-out, and a signal ends a
    launcher's wait."""
    port = free_port()
    server = CONTEXT.Process(target=serve, args=(port,), daemon=True)
    server.start()
    store = rendezvous.connect_store(("localhost", port), 60)
    flags = (
        f"--save {tmp_path}/save --nnodes 3 --init-method tcp://localhost:{port} --init-timeout 60 --nproc-per-node 1"
    )
    launcher = StartedRank(tmp_path, [*flags.split(), "--node-rank", "1", "--max-restarts", "1"], {})
    rank = StartedRank(tmp_path, [*flags.split(), "--node-rank", "2"], {})
    while not store.check([key := "torch.rendezvous.ranks", "megatron/joined/2"]):
        assert launcher.process.is_alive() and rank.process.is_alive(), launcher.end()[1] + rank.end()[1]
        time.sleep(POLL_INTERVAL)
    os.kill(server.pid, signal.SIGSTOP)
    while "State:\tT" not in Path(f"/proc/{server.pid}/status").read_text():
        time.sleep(POLL_INTERVAL)
    with pytest.raises(MissingRanksError, match="on the machine of rank 0, did not answer for 0.3 s"):
        TimedStore(store, 0.3).get(key)
    for one in (launcher, rank):
        os.kill(one.process.pid, signal.SIGTERM)
    ended = [one.end(20) for one in (launcher, rank)]
    server.kill()
    assert None not in [code for code, _ in ended], ended


def test_a_port_in_use() -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ValueError, match=rf"rank 0 cannot listen on port {port} \(Address already in use\)"):
            join_rendezvous(Launch(0, 2, init_method=f"tcp://localhost:{port}", timeout=1))


def test_ranks_that_contradict_each_other() -> None:
    first = make_launches(3, "aa")
    twice = join_all([*first, *make_launches(3, "b", first[0].init_method, first=1)])
    assert set(twice) <= {f"rank 1 was started twice, the second time on {host}" for host in "ab"}
    first = make_launches(2, "a")
    # Ranks of both world sizes use the store of rank 0.
    found = join_all([*first, *make_launches(3, "b", first[0].init_method, first=1)])
    line = (
        r"rank \d \(\w\) has world size (2, but the first rank has 3|3, but the first rank has 2): all ranks need the "
    )
    assert found[0] == found[1] and re.match(line, found[0]), found


def test_each_rank_needs_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 1)
    here = threading.local()  # Each thread is a rank and sees the GPU `here.gpu`.
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=here.gpu))

    def chosen(requested: str, of_ranks: str) -> list[str]:
        def choose(rank_info: RankInfo) -> str:
            here.gpu = of_ranks[rank_info.rank]
            return str(choose_device(requested, rank_info, {})[0])

        return join_all(make_launches(4, "aabb"), choose)

    assert chosen("cuda", "pqrs") == ["cuda:0"] * 4
    way_out = (
        ": give each rank a different GPU (CUDA_VISIBLE_DEVICES, srun --gpu-bind), start fewer ranks, or train on "
        "the CPU with --device cpu --distributed-backend gloo"
    )
    # Hosts a and b may be containers on one machine, which share a GPU.
    assert chosen("cuda", "pqrp") == [f"ranks 0 (a) and 3 (b) use the same GPU (UUID p){way_out}"] * 4


def test_too_many_or_too_few_elastic_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    """A rank that the run cannot use waits on standby and ends with the exit code of the run."""

    def end(rank_info: RankInfo) -> RankInfo:
        if rank_info.rank == 0:
            while not rank_info.rendezvous.store.add("standing by", 0):
                pass
            rank_info.end(7)
        return rank_info

    assert join_all(make_launches(3, "aaa"), end, usable=lambda ranks: ranks // 2 * 2) == [*PAIR, 7]
    assert "notice: rank 2 (a) is on standby: the run continues without it (--elastic)\n" in capfd.readouterr().err
    few = join_all(make_launches(2, "aa"), usable=lambda ranks: 0)
    assert few[0] == "2 ranks joined, too few for this layout (--elastic)"
    config = parse("--micro-batch-size 1 --global-batch-size 12 --model-parallel-size 2".split()).config
    assert [config.usable_ranks(ranks) for ranks in (1, 3, 7, 10, 100)] == [0, 2, 6, 8, 24]


@pytest.mark.parametrize(
    "program, flags, line",
    [
        (pretrain_gpt2, "--train-data a.txt", "--elastic needs --global-batch-size: without it the batch would change"),
        (pretrain_gpt2, "--load a --global-batch-size 8", "--elastic needs --micro-batch-size if no model is named: "),
        (generate_text, "--load a", "--elastic is for training: this program needs all of its ranks\n"),
    ],
)
def test_flags_that_elastic_needs(program: Any, flags: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["--elastic", *flags.split()]) == 2
    assert capsys.readouterr().err.startswith(f"error: {line}")


def test_silent_ranks_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """If ranks 2 and 3 hang, the other ranks name them and end, also while they wait for a GPU."""
    for name, seconds in (("HEARTBEAT_INTERVAL", 0.1), ("LOST_TIMEOUT", 0.5), ("SILENCE_TIMEOUT", 2.0)):
        for module in (ranks_module, rendezvous):
            monkeypatch.setattr(module, name, seconds)
    with ThreadPoolExecutor(4) as threads:
        met = list(threads.map(join_rendezvous, make_launches(4, "aaab")))
    beats = [one.rendezvous.heartbeat for one in met if one.rendezvous]
    for hanging in beats[2:]:
        monkeypatch.setattr(hanging, "beat", lambda: None)
    while list(beats[0].lost_ranks(1.0)) != [2, 3]:
        time.sleep(POLL_INTERVAL)
    assert not beats[1].lost_ranks(1.0), "only the first rank of a machine reads all heartbeats"
    lost = beats[0].wait_for_lost_ranks()
    assert list(lost) == [2, 3] and beats[1].wait_for_lost_ranks() == lost, "other ranks read it from the store"
    ended: list[int] = []
    monkeypatch.setattr("os._exit", ended.append)
    rendezvous.end_if_rank_lost(met[0], "nccl")
    said = capsys.readouterr().err
    assert ended == [1]
    line = r"error \(a\): ranks 2 \(a\) and 3 \(b\) sent no heartbeat for \d s: the run ends here"
    assert re.search(line, said), said
    assert describe_lost({1: None, 2: 60.2}, {}) == "rank 2 sent no heartbeat for 60 s and rank 1 left"
    for one in met[1:]:
        one.leave(4)


def test_a_store_that_no_longer_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a collective has failed, the machine that serves the store is suspended. Rank 0, on this machine, is
    lost."""
    for name, seconds in (("HEARTBEAT_INTERVAL", 0.1), ("LOST_TIMEOUT", 0.5)):
        monkeypatch.setattr(ranks_module, name, seconds)
    beats, answers = itertools.count(), threading.Event()
    answers.set()
    store: Any = SimpleNamespace(
        set=lambda key, value: answers.wait(20),
        check=lambda keys: False,
        multi_get=lambda keys: [b"%d" % next(beats) for _ in keys],
    )
    heartbeat = ranks_module.Heartbeat(store, 1, {0: "a", 1: "b"}, is_first_on_node=True)
    threading.Timer(0.3, answers.clear).start()
    assert list(heartbeat.wait_for_lost_ranks()) == [0]
    answers.set()
    heartbeat.stop()


@pytest.mark.parametrize(
    "own, elsewhere, interface",
    [
        ("10.0.0.1", [], "lo"),
        ("::1", ["127.0.0.1"], "lo"),
        ("", ["192.0.2.2"], None),
        ("192.0.2.1", ["192.0.2.2"], None),
    ],
)
def test_gloo_interface(own: str, elsewhere: list[str], interface: str | None) -> None:
    environ: dict[str, str] = {}
    set_gloo_interface(own, elsewhere, environ)
    assert environ.get("GLOO_SOCKET_IFNAME") == interface


def test_a_gloo_interface_that_the_user_chose() -> None:
    set_gloo_interface("192.0.2.1", ["192.0.2.2"], {"GLOO_SOCKET_IFNAME": "lo"})
    line = r"GLOO_SOCKET_IFNAME=lo,ib7 is not a network interface of this machine, which has .*\blo\b.*: correct"
    with pytest.raises(ValueError, match=line):
        set_gloo_interface("10.0.0.1", [], {"GLOO_SOCKET_IFNAME": "lo,ib7"})
