"""Who takes part in a run whose ranks need not all come, and what the others do."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from megatron.gpt2.commands import generate_text, pretrain_gpt2
from megatron.gpt2.config import Config, ParallelConfig, TrainConfig
from megatron.gpt2.dist.agent import Round, keep_running
from megatron.gpt2.dist.elastic import AGAIN, Newcomers, seats, stand_by
from megatron.gpt2.dist.launchers import Launch
from megatron.gpt2.dist.ranks import Ranks
from megatron.gpt2.dist.rendezvous import leave, meet
from tests.megatron.gpt2.dist.started_ranks import free_port

HERE, THERE = "127.0.0.1", "127.0.0.2"  # names of two machines, both of which are this one


def in_twos(ranks: int) -> int:
    return ranks // 2 * 2


def test_as_many_as_divide_the_batch() -> None:
    config = Config(
        train=TrainConfig(micro_batch_size=1, global_batch_size=12), parallel=ParallelConfig(model_parallel_size=2)
    )
    assert [config.usable_ranks(ranks) for ranks in (1, 2, 3, 7, 8, 10, 12, 100)] == [0, 2, 2, 6, 8, 8, 12, 24]


def test_numbers_begin_at_the_machine_of_the_store() -> None:
    hosts = {0: "a", 1: "a", 4: "c", 5: "c", 6: "d", 7: "d"}
    assert seats(hosts, 0, in_twos) == [0, 1, 4, 5, 6, 7]
    assert seats(hosts, 5, in_twos) == [5, 4, 0, 1, 6, 7]
    assert seats(hosts, 4, lambda ranks: 3) == [4, 5, 0]
    assert seats(hosts, 4, lambda ranks: 0) == []


def meet_those(where: str, numbers: tuple[int, ...], timeout: float = 2.0) -> list[Ranks]:
    """Of two machines with two ranks each, those that come."""
    launches = [
        Launch(
            number,
            4,
            local=(number % 2, 2),
            where=where,
            host=(HERE, THERE)[number // 2],
            elastic=True,
            timeout=timeout,
        )
        for number in numbers
    ]
    with ThreadPoolExecutor(len(launches)) as threads:
        met = list(threads.map(lambda launch: meet(launch, in_twos), launches))
        list(threads.map(leave, met))
    return met


def test_those_that_come_take_part(tmp_path: Path) -> None:
    assert meet_those(f"tcp://localhost:{free_port()}", (0, 1)) == [Ranks(0, 2, 0, 2), Ranks(1, 2, 1, 2)]
    card = tmp_path / "card"
    card.write_text(f"{HERE} {free_port()}\n")  # of a machine that is lost: nobody answers there
    assert meet_those(f"file://{card}", (2, 3)) == [Ranks(0, 2, 0, 2), Ranks(1, 2, 1, 2)]
    assert card.read_text().startswith(THERE)
    all_come = meet_those(f"file://{tmp_path}/other", (3, 1, 2, 0), timeout=60)
    assert all_come == [Ranks(3, 4, 1, 2), Ranks(1, 4, 1, 2), Ranks(2, 4, 0, 2), Ranks(0, 4, 0, 2)]
    assert (tmp_path / "other").read_text().startswith(HERE)


def test_who_stands_by_ends_as_the_run_does() -> None:
    store = HashStore()
    store.set("over", "0")
    assert stand_by(store, 3, "b", '{"host": "b"}') == 0
    assert (store.get("who/3"), store.add("standing by", 0), store.add("left", 0)) == (b'{"host": "b"}', 1, 1)
    with pytest.raises(SystemExit) as ended:  # with 0: its launcher would end the others, which save
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        stand_by(HashStore(), 3, "b", "{}")
    assert ended.value.code == 0


def test_only_rank_0_dismisses_who_stands_by() -> None:
    """Another rank leaves before rank 0 has said how the run ended."""
    place = f"tcp://localhost:{free_port()}"
    launches = [Launch(number, 2, where=place, host=HERE, elastic=True, timeout=60) for number in range(2)]
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda launch: meet(launch, in_twos), launches)
    assert first.meeting is not None
    leave(second)
    assert not first.meeting.store.check(["over"])
    first.end(0)
    first.meeting.store.add("standing by", 1)
    threading.Timer(0.3, stand_by_and_leave, (first.meeting.store,)).start()
    leave(first)
    assert (first.meeting.store.get("over"), first.meeting.store.add("left", 0)) == (b"0", 3)


def stand_by_and_leave(store: Store) -> None:
    store.add("left", 1)


def test_a_run_begins_again_when_it_can_use_who_came() -> None:
    store, newcomers = HashStore(), Newcomers(8, 4, in_twos)
    needed = []
    for number in range(7):
        store.set(f"who/{number}", "{}")
        if number >= 4:
            store.add("standing by", 1)
        newcomers.look(store)
        needed.append(newcomers.are_needed)
    assert needed == [False] * 5 + [True] * 2


def test_meeting_anew_counts_as_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    ends: Iterator[Round] = iter([Round({0: AGAIN}, 0), Round({0: 1}, 0), Round({0: AGAIN}, 0), Round({0: 1}, 0)])
    attempts = []

    def start(attempt: int) -> Round:
        attempts.append(attempt)
        return next(ends)

    assert keep_running(start, 1, "a", None) == 1
    assert attempts == [0, 1, 2, 3]
    assert capsys.readouterr().err.splitlines() == [
        "restart: the ranks meet anew (--elastic)",
        "restart: rank 0 ended with exit code 1: restart 1 of 1",
        "restart: the ranks meet anew (--elastic)",
        "error: rank 0 ended with exit code 1; no restart is left (--max-restarts 1)",
    ]


def test_what_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    assert pretrain_gpt2.main(["--elastic", "--train-data", "a.txt"]) == 2
    assert capsys.readouterr().err == (
        "error: --elastic needs --global-batch-size: without it the batch would change with the number of ranks\n"
    )
    assert pretrain_gpt2.main(["--elastic", "--load", "a", "--global-batch-size", "8"]) == 2
    assert capsys.readouterr().err.startswith("error: --elastic needs --micro-batch-size where no model is named: ")
    assert generate_text.main(["--elastic", "--load", "somewhere"]) == 2
    assert capsys.readouterr().err == "error: --elastic is for training: this program needs all of its ranks\n"
