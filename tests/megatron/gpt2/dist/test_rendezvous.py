"""Ranks meet in one process, a thread each: who is missing, came twice or finds an old file is said in one line."""

from __future__ import annotations

import contextlib
import math
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.gpt2.device import choose_device
from megatron.gpt2.dist import heartbeat, rendezvous
from megatron.gpt2.dist import ranks as ranks_module
from megatron.gpt2.dist.heartbeat import BEAT, LEFT, PATIENCE, POLL, SILENCE, Heartbeat, gone_words, named
from megatron.gpt2.dist.interfaces import address_towards, interface_of, set_gloo_interface
from megatron.gpt2.dist.launch import Launch
from megatron.gpt2.dist.ranks import Meeting, MissingRanks, Ranks
from megatron.gpt2.dist.rendezvous import LOST, initialize_distributed, leave, meet, node_line
from tests.megatron.gpt2.dist.started_ranks import free_port
from tests.megatron.gpt2.test_device import gpus


def meet_together(launches: list[Launch]) -> list[Ranks | str]:
    """What each gets: ranks, or the message of its error."""

    def one(launch: Launch) -> Ranks | str:
        try:
            return meet(launch)
        except ValueError as error:
            return str(error)

    with ThreadPoolExecutor(len(launches)) as threads:
        met = list(threads.map(one, launches))
    with ThreadPoolExecutor(len(launches)) as threads:  # the keeper of the store waits for the others
        list(threads.map(leave, [ranks for ranks in met if isinstance(ranks, Ranks)]))
    return met


def launches(world_size: int, where: str, hosts: str, timeout: float = 60.0) -> list[Launch]:
    return [Launch(rank, world_size, where=where, host=host, timeout=timeout) for rank, host in enumerate(hosts)]


def test_ranks_find_out_who_is_where(tmp_path: Path) -> None:
    card = tmp_path / "card"
    assert meet_together(launches(4, f"tcp://localhost:{free_port()}", "abab")) == [
        Ranks(0, 4, 0, 2),
        Ranks(1, 4, 0, 2),
        Ranks(2, 4, 1, 2),
        Ranks(3, 4, 1, 2),
    ]
    for _ in range(2):  # the file is free again
        assert meet_together(launches(2, f"file://{card}", "aa")) == [Ranks(0, 2, 0, 2), Ranks(1, 2, 1, 2)]


def lacks_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return False
    return True


@pytest.mark.skipif(lacks_ipv6(), reason="this machine has no IPv6")
def test_ranks_meet_over_ipv6_and_ipv4() -> None:
    """A name that resolves to both leads each rank to one of them."""
    port = free_port()
    assert meet_together(
        [
            Launch(rank, 3, where=f"tcp://{place}:{port}", host="a", timeout=60)
            for rank, place in enumerate(("[::1]", "127.0.0.1", "localhost"))
        ]
    ) == [Ranks(0, 3, 0, 3), Ranks(1, 3, 1, 3), Ranks(2, 3, 2, 3)]
    port = free_port()
    with pytest.raises(MissingRanks, match=rf"rank 0 did not come .*: nothing answers at \[::1\]:{port}, as seen "):
        meet(Launch(1, 2, where=f"tcp://[::1]:{port}", host="b", timeout=0.2))


def test_rank_0_on_another_machine_than_was_said() -> None:
    port = free_port()
    with pytest.raises(
        ValueError,
        match=rf"rank 0 listens on port {port} of b, but nothing answers at no.such:{port},"
        r" as seen from b \(.*\): MASTER_ADDR or --init-method has to name ",
    ):
        meet(Launch(0, 2, where=f"tcp://no.such:{port}", host="b", timeout=0.2))


def test_each_rank_sees_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 1)
    here = threading.local()  # what the launcher shows each rank
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=here.gpu))

    def choose(launch: Launch, requested: str, gpu: str) -> str:
        here.gpu = gpu
        ranks = meet(launch)
        try:
            return str(choose_device(requested, ranks, {})[0])
        except ValueError as error:
            return str(error)
        finally:
            leave(ranks)

    def chosen(requested: str, of_ranks: str) -> list[str]:
        with ThreadPoolExecutor(4) as threads:
            return list(
                threads.map(choose, launches(4, f"tcp://localhost:{free_port()}", "aabb"), [requested] * 4, of_ranks)
            )

    assert chosen("cuda", "pqrs") == ["cuda:0"] * 4
    assert chosen("cpu", "pppp") == ["cpu"] * 4
    way_out = (
        ": show each rank a GPU of its own (CUDA_VISIBLE_DEVICES, srun --gpu-bind), start fewer, or train on "
        "the CPU with --device cpu --distributed-backend gloo"
    )
    assert chosen("auto", "pqrr") == [f"ranks 2-3 (b) are on one GPU (UUID r){way_out}"] * 4
    assert chosen("cuda", "pqrp") == [f"ranks 0 (a) and 3 (b) are on one GPU (UUID p){way_out}"] * 4  # two containers


def test_one_alone_has_nobody_to_meet() -> None:
    alone = meet(Launch(where="tcp://nowhere:1"))
    initialize_distributed(alone, "gloo", torch.device("cpu"), 1.0)
    assert alone == Ranks() and not dist.is_initialized()
    leave(alone)


def test_who_does_not_come_is_named_with_the_host_that_slurm_says() -> None:
    where = f"tcp://localhost:{free_port()}"
    came = [Launch(rank, 4, where=where, host="ab"[rank // 2], hosts=tuple("aabb"), timeout=2) for rank in (0, 1)]
    assert meet_together(came) == ["ranks 2-3 (b) of 4 did not come within 2 s (--init-timeout); ranks 0-1 (a) did"] * 2
    elsewhere = [Launch(rank, 4, where=where, host="c", hosts=tuple("aabb"), timeout=2) for rank in (0, 1)]
    assert "ranks 2-3 of 4" in str(meet_together(elsewhere)[0])  # the list does not hold


def test_rank_0_that_does_not_come() -> None:
    port = free_port()
    with pytest.raises(
        MissingRanks,
        match=rf"rank 0 did not come within 0.2 s \(--init-timeout\): nothing answers at "
        rf"localhost:{port}, as seen from b \(Connection refused\)",
    ):
        meet(Launch(1, 2, where=f"tcp://localhost:{port}", host="b", timeout=0.2))
    with pytest.raises(MissingRanks, match="it has not made the file /nowhere/card"):
        meet(Launch(1, 2, where="file:///nowhere/card", host="b", timeout=0.2))


def test_a_file_of_an_earlier_run(tmp_path: Path) -> None:
    """Rank 0 writes it anew, and the others try until it has."""
    card = tmp_path / "card"
    where = f"file://{card}"
    for text in (f"a {free_port()}\n", "something else\n"):
        card.write_text(text)
        assert meet_together(launches(2, where, "aa")) == [Ranks(0, 2, 0, 2), Ranks(1, 2, 1, 2)]
        assert not card.exists()
    card.write_text("something else\n")
    with pytest.raises(MissingRanks, match=f"the file {card} holds no address"):
        meet(Launch(1, 2, where=where, host="b", timeout=0.2))
    assert "nobody" not in str(meet_together(launches(2, where, "a", timeout=0.2)))
    assert not card.exists()  # a meeting that failed leaves none


def test_ranks_that_contradict_each_other() -> None:
    where = f"tcp://localhost:{free_port()}"
    twice = [*launches(3, where, "aa"), Launch(1, 3, where=where, host="b", timeout=60)]
    assert set(meet_together(twice)) <= {f"rank 1 was started twice, the second time on {host}" for host in "ab"}
    other_size = [*launches(2, where, "a"), Launch(1, 3, where=where, host="b", timeout=60)]
    found = meet_together(other_size)  # whoever comes second sees it
    said = [
        f"rank {rank} ({host}) is one of {size}, and the first that came one of {5 - size}: each needs the same "
        "world size"
        for rank, host, size in ((0, "a", 2), (1, "b", 3))
    ]
    assert found in ([said[0]] * 2, [said[1]] * 2)


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ValueError, match=rf"rank 0 cannot listen on port {port} \(Address already in use\)"):
            meet(Launch(0, 2, where=f"tcp://localhost:{port}", timeout=1))


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
    gpus = [f"cuda:{number}\tNVIDIA H100" for number in range(2)]
    assert node_line("node4", [2, 3], 4, gpus) == "node4: ranks 2-3 of 4 on cuda:0, cuda:1 (NVIDIA H100)"


class Store(dict[str, bytes]):
    """As much of a store as a heartbeat needs."""

    def set(self, key: str, value: str) -> None:
        if "dead" in self:
            raise dist.DistNetworkError("gone")
        self[key] = value.encode()

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        return self.setdefault(key, value.encode())

    def get(self, key: str) -> bytes:  # type: ignore[override]
        return self[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self[key] for key in keys]


class Clock:
    """In the place of `time`, and of the threads of all heartbeats: they beat while somebody sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.beating = 0.0, list[Heartbeat]()
        for module in (heartbeat, ranks_module, rendezvous):
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


def test_heartbeats(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock(monkeypatch)
    store: Any = Store({f"beat/{rank}": b"0" for rank in range(4)})
    hosts = dict(enumerate("aaab"))
    first, second = (Heartbeat(store, rank, hosts, is_first=rank == 0) for rank in range(2))  # 2 and 3 hang
    clock.sleep(SILENCE)
    assert first.silent(20) == [2, 3] and not capsys.readouterr().err
    clock.sleep(2 * BEAT)
    assert first.silent(SILENCE) == [2, 3] and first.silent(40) == []
    assert capsys.readouterr().err == "WARNING: no sign of life for 30 s from ranks 2 (a) and 3 (b)\n"
    assert second.silent(PATIENCE) == [] and second.silence(2) == 0.0
    # A collective fails: who has hung for long is named at once, with the time since its last sign.
    begun = clock.now
    gone = first.lost()
    assert clock.now == begun and gone == {2: begun - BEAT, 3: begun - BEAT}
    assert gone_words(gone, hosts) == "ranks 2 (a) and 3 (b) gave no sign of life for 31 s"
    assert second.lost() == gone, "whoever did not watch them hears it from the first"
    assert clock.now <= begun + 2 * BEAT
    second.stop()
    clock.sleep(BEAT)
    assert store["beat/1"] == LEFT and first.silent(50) == [1] and not capsys.readouterr().err
    assert gone_words({1: None, 2: 60.2}, {}) == "rank 2 gave no sign of life for 60 s and rank 1 left"
    store["dead"] = b""
    monkeypatch.setattr(heartbeat, "BEAT", 0.0)
    first.run()  # ends, since nobody serves the store
    clock.beating.clear()
    clock.sleep(PATIENCE + 1)
    assert first.silent(PATIENCE) == [0]  # with whom all meet
    assert first.silence(0) == pytest.approx(PATIENCE + 1, abs=POLL + 0.01)


def test_a_rank_that_is_lost_ends_a_run_that_waits_for_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranks 0, 1 and 2 are on machine a, rank 3 on b. Rank 1 has left in peace; then 3, which only rank 0 watches."""
    clock = Clock(monkeypatch)
    ended: list[tuple[int, float]] = []
    monkeypatch.setattr("os._exit", lambda code: ended.append((code, clock.now)))
    store: Any = Store({f"beat/{rank}": b"0" for rank in range(4)})
    monkeypatch.setattr(store, "add", lambda key, count: 4, raising=False)
    hosts = dict(enumerate("aaab"))
    beats = [Heartbeat(store, rank, hosts, is_first=rank in (0, 3)) for rank in range(4)]
    alive = [Ranks(rank, 4, rank, 3, meeting=Meeting(store, None, hosts, beats[rank])) for rank in range(3)]
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


def test_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert address_towards("no such host") == ""
    assert interface_of("127.0.0.1") == "lo" and interface_of("10.255.255.254") == ""
    assert lacks_ipv6() or interface_of("::1") == "lo"
    assert interface_of("2001:db8::1") == ""
    for own, elsewhere, named_before, expected in (
        ("10.0.0.1", [], {}, "lo"),
        ("127.0.1.1", ["127.0.0.1"], {}, "lo"),
        ("::1", ["127.0.0.1"], {}, "lo"),
        ("", ["192.0.2.2"], {}, None),
        ("192.0.2.1", ["192.0.2.2"], {}, None),
        ("10.0.0.1", [], {"GLOO_SOCKET_IFNAME": "ib0"}, "ib0"),
    ):
        environ = dict(named_before)
        set_gloo_interface(own, elsewhere, environ)
        assert environ.get("GLOO_SOCKET_IFNAME") == expected
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo0"), (4, "en0")])  # of a Mac
    environ = {}
    set_gloo_interface("127.0.0.1", [], environ)
    assert environ == {"GLOO_SOCKET_IFNAME": "lo0"}
