"""Ranks meet in one process, a thread each: who is missing, came twice or finds an old file is said in one line."""

from __future__ import annotations

import contextlib
import math
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.gpt2.commands import generate_text, pretrain_gpt2
from megatron.gpt2.config import Config, ParallelConfig, TrainConfig
from megatron.gpt2.device import choose_device
from megatron.gpt2.dist import ranks as ranks_module
from megatron.gpt2.dist import rendezvous
from megatron.gpt2.dist.launch import Launch
from megatron.gpt2.dist.ranks import (
    BEAT,
    LEFT,
    PATIENCE,
    POLL,
    SILENCE,
    Heartbeat,
    Meeting,
    MissingRanks,
    Ranks,
    gone_words,
    named,
)
from megatron.gpt2.dist.rendezvous import (
    LOST,
    StoodBy,
    address_towards,
    addresses_of,
    initialize_distributed,
    leave,
    meet,
    node_line,
    set_gloo_interface,
)
from megatron.gpt2.dist.run_program import start_ranks
from tests.megatron.gpt2.dist.started_ranks import free_port
from tests.megatron.gpt2.test_device import gpus

PAIR = [Ranks(0, 2, 0, 2), Ranks(1, 2, 1, 2)]  # on one machine


def launches(
    world_size: int, hosts: str, where: str = "", *, timeout: float = 60.0, slurm: str = "", first: int = 0
) -> list[Launch]:
    """A launch for each of the `hosts`, from rank `first` on. slurm: the hosts of all ranks, as Slurm says them."""
    where = where or f"tcp://localhost:{free_port()}"
    return [
        Launch(rank, world_size, where=where, host=host, timeout=timeout, hosts=tuple(slurm))
        for rank, host in enumerate(hosts, start=first)
    ]


def each(launches: list[Launch], use: Callable[[Ranks], Any] = lambda ranks: ranks, **usable: Any) -> list[Any]:
    """Let the ranks of the `launches` meet, a thread each; what `use` returned for each, or the message of its error.
    Those that met leave together: the server of the store waits for the others."""
    met: list[Ranks] = []

    def one(launch: Launch) -> Any:
        try:
            met.append(ranks := meet(launch, **usable))
            return use(ranks)
        except ValueError as error:
            return str(error)
        except StoodBy as ended:
            return ended.code

    with ThreadPoolExecutor(len(launches)) as threads:
        found = list(threads.map(one, launches))
        list(threads.map(leave, met))
    return found


def lacks_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return False
    return True


def test_ranks_find_out_who_is_where(tmp_path: Path) -> None:
    of_two = [Ranks(0, 4, 0, 2), Ranks(1, 4, 0, 2), Ranks(2, 4, 1, 2), Ranks(3, 4, 1, 2)]
    assert each(launches(4, "abab")) == of_two
    alone = meet(Launch(where="tcp://nowhere:1"))
    initialize_distributed(alone, "gloo", torch.device("cpu"), 1.0)
    assert alone == Ranks() and not dist.is_initialized()
    leave(alone)


@pytest.mark.skipif(lacks_ipv6(), reason="this machine has no IPv6")
def test_ranks_meet_over_ipv6_and_ipv4() -> None:
    """A name that resolves to both leads each rank to one of them."""
    port = free_port()
    places = [f"tcp://{place}:{port}" for place in ("[::1]", "127.0.0.1", "localhost")]
    met = each([Launch(rank, 3, where=where, host="a", timeout=60) for rank, where in enumerate(places)])
    assert met == [Ranks(rank, 3, rank, 3) for rank in range(3)]


def test_a_file_of_an_earlier_run(tmp_path: Path) -> None:
    """Rank 0 writes it anew, the others try until it has, and nothing is left."""
    card = tmp_path / "card"
    for text in ("", f"a {free_port()}\n", "something else\n"):
        if text:
            card.write_text(text)
        assert each(launches(2, "aa", f"file://{card}")) == PAIR
        assert not card.exists()
    assert "rank 1 of 2 did not come" in each(launches(2, "a", f"file://{card}", timeout=0.2))[0]
    assert not card.exists()


def test_who_does_not_come_is_named_with_the_host_that_slurm_says() -> None:
    came = each(launches(4, "aa", slurm="aabb", timeout=1))
    assert came == ["ranks 2-3 (b) of 4 did not come within 1 s (--init-timeout); ranks 0-1 (a) did"] * 2
    assert "ranks 2-3 of 4" in each(launches(4, "cc", slurm="aabb", timeout=1))[0]  # the list does not hold
    launch = Launch(0, 4, (0, 2), where=f"tcp://localhost:{free_port()}", host="a", starts=2, timeout=1)
    with pytest.raises(MissingRanks, match=r"ranks 2-3 of 4 did not come within 1 s \(.*\); ranks 0-1 \(a\) did"):
        start_ranks(lambda words: 0, [], launch)


@pytest.mark.parametrize(
    ("rank", "where", "message"),
    [
        (1, "tcp://localhost:{port}", r"nothing answers at localhost:{port}, as seen from b \(Connection refused\)"),
        pytest.param(
            1,
            "tcp://[::1]:{port}",
            r"nothing answers at \[::1\]:{port}, as seen from b ",
            marks=pytest.mark.skipif(lacks_ipv6(), reason="this machine has no IPv6"),
        ),
        (1, "file:///nowhere/card", "it has not made the file /nowhere/card"),
        (1, "file://{folder}/card", "the file {folder}/card holds no address"),
        (
            0,
            "tcp://no.such:{port}",
            r"^rank 0 listens on port {port} of b, but nothing answers at no.such:{port}, as seen from b \(.*\): "
            "MASTER_ADDR or --init-method has to name ",
        ),
    ],
)
def test_a_place_where_rank_0_is_not(tmp_path: Path, rank: int, where: str, message: str) -> None:
    (tmp_path / "card").write_text("something else\n")
    values = {"port": free_port(), "folder": tmp_path}
    if rank:
        message = r"^rank 0 did not come within 0.2 s \(--init-timeout\): " + message
    with pytest.raises(ValueError, match=message.format(**values)):
        meet(Launch(rank, 2, where=where.format(**values), host="b", timeout=0.2))


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ValueError, match=rf"rank 0 cannot listen on port {port} \(Address already in use\)"):
            meet(Launch(0, 2, where=f"tcp://localhost:{port}", timeout=1))


def test_ranks_that_contradict_each_other() -> None:
    first = launches(3, "aa")
    twice = each([*first, *launches(3, "b", first[0].where, first=1)])
    assert set(twice) <= {f"rank 1 was started twice, the second time on {host}" for host in "ab"}
    first = launches(2, "a")
    found = each([*first, *launches(3, "b", first[0].where, first=1)])  # the one that comes second sees it
    said = [
        f"rank {rank} ({host}) is one of {size}, and the first that came one of {5 - size}: each needs the same "
        "world size"
        for rank, host, size in ((0, "a", 2), (1, "b", 3))
    ]
    assert found in ([said[0]] * 2, [said[1]] * 2)


def test_each_rank_sees_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 1)
    here = threading.local()  # what the launcher shows each rank
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=here.gpu))

    def chosen(requested: str, of_ranks: str) -> list[str]:
        def choose(ranks: Ranks) -> str:
            here.gpu = of_ranks[ranks.rank]
            return str(choose_device(requested, ranks, {})[0])

        return each(launches(4, "aabb"), choose)

    assert chosen("cuda", "pqrs") == ["cuda:0"] * 4
    assert chosen("cpu", "pppp") == ["cpu"] * 4
    way_out = (
        ": show each rank a GPU of its own (CUDA_VISIBLE_DEVICES, srun --gpu-bind), start fewer, or train on "
        "the CPU with --device cpu --distributed-backend gloo"
    )
    assert chosen("auto", "pqrr") == [f"ranks 2-3 (b) are on one GPU (UUID r){way_out}"] * 4
    assert chosen("cuda", "pqrp") == [f"ranks 0 (a) and 3 (b) are on one GPU (UUID p){way_out}"] * 4  # two containers


def test_elastic_ranks_that_are_too_many_or_too_few(capfd: pytest.CaptureFixture[str]) -> None:
    """One too many stands by and ends with the exit code of the run."""

    def end(ranks: Ranks) -> Ranks:
        if ranks.rank == 0:
            assert ranks.meeting is not None
            while not ranks.meeting.store.add("standing by", 0):
                pass
            ranks.end(7)
        return ranks

    assert each(launches(3, "aaa"), end, usable=lambda ranks: ranks // 2 * 2) == [*PAIR, 7]
    assert "notice: rank 2 (a) stands by: the run goes on without it (--elastic)\n" in capfd.readouterr().err
    few = each(launches(2, "aa"), usable=lambda ranks: 0)
    assert few[0] == "the 2 ranks that came are too few for this layout (--elastic)"
    config = Config(
        train=TrainConfig(micro_batch_size=1, global_batch_size=12), parallel=ParallelConfig(model_parallel_size=2)
    )
    assert [config.usable_ranks(ranks) for ranks in (1, 2, 3, 7, 8, 10, 12, 100)] == [0, 2, 2, 6, 8, 8, 12, 24]


@pytest.mark.parametrize(
    ("program", "flags", "line"),
    [
        (
            pretrain_gpt2,
            "--train-data a.txt",
            "--elastic needs --global-batch-size: without it the batch would change with the number of ranks\n",
        ),
        (
            pretrain_gpt2,
            "--load a --global-batch-size 8",
            "--elastic needs --micro-batch-size where no model is named: ",
        ),
        (generate_text, "--load a", "--elastic is for training: this program needs all of its ranks\n"),
    ],
)
def test_what_elastic_needs(program: Any, flags: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["--elastic", *flags.split()]) == 2
    assert capsys.readouterr().err.startswith(f"error: {line}")


@pytest.mark.parametrize(
    ("ranks", "hosts", "text"),
    [
        ([3], {}, "rank 3"),
        ([2, 3], {2: "b", 3: "b"}, "ranks 2-3 (b)"),
        ([0, 1, 2, 5], {5: "c"}, "ranks 0-2 and 5 (c)"),
        ([1, 2, 4, 6], {1: "a", 2: "b"}, "ranks 1 (a), 2 (b), 4 and 6"),
    ],
)
def test_names(ranks: list[int], hosts: dict[int, str], text: str) -> None:
    assert named(ranks, hosts) == text


def test_line_of_a_node() -> None:
    gpus = {2: "cuda:0\tNVIDIA H100", 3: "cuda:1\tNVIDIA H100"}
    assert node_line("node4", gpus, 4) == "node4: ranks 2-3 of 4 on cuda:0, cuda:1 (NVIDIA H100)"


class Store(dict[str, bytes]):
    """As much of a store as a heartbeat needs."""

    def set(self, key: str, value: str) -> None:
        if "dead" in self:
            raise dist.DistNetworkError("gone")
        self[key] = value.encode()

    def add(self, key: str, count: int) -> int:
        return 4

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        return self.setdefault(key, value.encode())

    def get(self, key: str) -> bytes:  # type: ignore[override]
        return self[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self[key] for key in keys]


class Clock:
    """Stands in for `time`, and for the threads of all heartbeats: they beat while somebody sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.beating = 0.0, list[Heartbeat]()
        for module in (ranks_module, rendezvous):
            monkeypatch.setattr(module, "time", self)
        monkeypatch.setattr(Heartbeat, "start", lambda one: self.beating.append(one))
        monkeypatch.setattr(Heartbeat, "join", lambda one, timeout: one.run())  # which says that it has left

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            whole = BEAT * (math.floor(self.now / BEAT) + 1)  # of the next beat
            self.now = min(end, whole)
            for one in self.beating if self.now == whole else ():
                if not one.is_stopped:
                    one.beat()


HOSTS = dict(enumerate("aaab"))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def store() -> Any:
    return Store({f"beat/{rank}": b"0" for rank in HOSTS})


def test_heartbeats(
    clock: Clock, store: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (Heartbeat(store, rank, HOSTS, is_first=rank == 0) for rank in range(2))  # 2 and 3 hang
    clock.sleep(SILENCE)
    assert list(first.gone(20)) == [2, 3] and not capsys.readouterr().err
    clock.sleep(2 * BEAT)
    assert list(first.gone(SILENCE)) == [2, 3] and not first.gone(40)
    assert capsys.readouterr().err == "WARNING: no sign of life for 30 s from ranks 2 (a) and 3 (b)\n"
    assert not second.gone(PATIENCE), "it does not read the signs of others"
    # A collective fails: who has hung for long is named at once, with the time since its last sign.
    begun = clock.now
    gone = first.lost()
    assert clock.now == begun and gone == {2: begun - BEAT, 3: begun - BEAT}
    assert gone_words(gone, HOSTS) == "ranks 2 (a) and 3 (b) gave no sign of life for 31 s"
    assert second.lost() == gone, "a rank that did not watch them hears it from the first"
    assert clock.now <= begun + 2 * BEAT
    second.stop()
    clock.sleep(BEAT)
    assert store["beat/1"] == LEFT and first.gone(50) == {1: None} and not capsys.readouterr().err
    assert gone_words({1: None, 2: 60.2}, {}) == "rank 2 gave no sign of life for 60 s and rank 1 left"
    store["dead"] = b""
    monkeypatch.setattr(ranks_module, "BEAT", 0.0)
    first.run()  # ends, since nobody serves the store
    clock.beating.clear()
    clock.sleep(PATIENCE + 1)
    assert first.gone(PATIENCE) == {0: pytest.approx(PATIENCE + 1, abs=POLL + 0.01)}  # with which all meet


def test_a_rank_that_is_lost_ends_a_run_that_waits_for_a_gpu(
    clock: Clock, store: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranks 0, 1 and 2 are on machine a, rank 3 on b. Rank 1 has left in peace; then 3, which only rank 0 watches."""
    ended: list[tuple[int, float]] = []
    monkeypatch.setattr("os._exit", lambda code: ended.append((code, clock.now)))
    beats = [Heartbeat(store, rank, HOSTS, is_first=rank in (0, 3)) for rank in range(4)]
    alive = [Ranks(rank, 4, rank, 3, meeting=Meeting(store, None, HOSTS, beats[rank])) for rank in range(3)]
    alive[1].leave()
    clock.sleep(2 * LOST)
    clock.beating.remove(beats[3])
    for one in alive:
        rendezvous.end_with_lost_rank(one)
    (first, at_first), (second, at_second) = ended
    assert first == second == 1
    assert 3 * LOST < at_first < 3 * LOST + 5 * BEAT + PATIENCE
    assert at_second <= at_first + 2 * BEAT + PATIENCE
    assert capsys.readouterr().err.count("error (a): rank 3 (b) gave no sign of life for ") == 1


@pytest.mark.parametrize(
    ("own", "elsewhere", "before", "interface"),
    [
        ("10.0.0.1", [], {}, "lo"),
        ("127.0.1.1", ["127.0.0.1"], {}, "lo"),
        ("::1", ["127.0.0.1"], {}, "lo"),
        ("", ["192.0.2.2"], {}, None),
        ("192.0.2.1", ["192.0.2.2"], {}, None),
        ("10.0.0.1", [], {"GLOO_SOCKET_IFNAME": "ib0"}, "ib0"),
    ],
)
def test_interface_of_gloo(own: str, elsewhere: list[str], before: dict[str, str], interface: str | None) -> None:
    set_gloo_interface(own, elsewhere, environ := dict(before))
    assert environ.get("GLOO_SOCKET_IFNAME") == interface


def test_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1" and address_towards("no such host") == ""
    assert addresses_of("lo") == ["127.0.0.1", "::1"][: 2 - lacks_ipv6()] and addresses_of("no such") == []
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo0"), (4, "en0")])  # of a Mac
    environ: dict[str, str] = {}
    set_gloo_interface("127.0.0.1", [], environ)
    assert environ == {"GLOO_SOCKET_IFNAME": "lo0"}
