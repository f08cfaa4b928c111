"""Who takes part in a run whose ranks need not all come, and what the others do."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from megatron.gpt2.commands import generate_text, pretrain_gpt2
from megatron.gpt2.config import Config, ParallelConfig, TrainConfig
from megatron.gpt2.dist.agent import start_ranks
from megatron.gpt2.dist.launch import Launch
from megatron.gpt2.dist.ranks import MissingRanks, Ranks
from megatron.gpt2.dist.rendezvous import StoodBy, leave, meet
from tests.megatron.gpt2.dist.started_ranks import free_port


def in_twos(ranks: int) -> int:
    return ranks // 2 * 2


def test_as_many_as_divide_the_batch() -> None:
    config = Config(
        train=TrainConfig(micro_batch_size=1, global_batch_size=12), parallel=ParallelConfig(model_parallel_size=2)
    )
    assert [config.usable_ranks(ranks) for ranks in (1, 2, 3, 7, 8, 10, 12, 100)] == [0, 2, 2, 6, 8, 8, 12, 24]


def test_who_is_one_too_many_stands_by_and_ends_as_the_run_does(capfd: pytest.CaptureFixture[str]) -> None:
    where = f"tcp://localhost:{free_port()}"

    def one(rank: int) -> Ranks | int:
        launch = Launch(rank, 3, local=(rank, 3), where=where, host="a", elastic=True, timeout=60)
        try:
            ranks = meet(launch, in_twos)
        except StoodBy as ended:
            return ended.code
        if rank == 0:
            assert ranks.meeting is not None
            while not ranks.meeting.store.add("standing by", 0):
                pass
            ranks.end(7)
        leave(ranks)
        return ranks

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(one, range(3))) == [Ranks(0, 2, 0, 2), Ranks(1, 2, 1, 2), 7]
    assert "notice: rank 2 (a) stands by: the run goes on without it (--elastic)\n" in capfd.readouterr().err


def test_a_machine_that_does_not_come_is_named() -> None:
    launch = Launch(0, 4, (0, 2), where=f"tcp://localhost:{free_port()}", host="a", starts=2, timeout=1)
    with pytest.raises(MissingRanks, match=r"ranks 2-3 of 4 did not come within 1 s \(.*\); ranks 0-1 \(a\) did"):
        start_ranks(lambda words: 0, [], launch)


def test_too_few_for_the_layout() -> None:
    with pytest.raises(ValueError, match="the 2 ranks that came are too few for this layout"):
        where = f"tcp://localhost:{free_port()}"
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda rank: meet(Launch(rank, 2, where=where, timeout=60), lambda ranks: 0), range(2)))


def test_what_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    assert pretrain_gpt2.main(["--elastic", "--train-data", "a.txt"]) == 2
    assert capsys.readouterr().err == (
        "error: --elastic needs --global-batch-size: without it the batch would change with the number of ranks\n"
    )
    assert pretrain_gpt2.main(["--elastic", "--load", "a", "--global-batch-size", "8"]) == 2
    assert capsys.readouterr().err.startswith("error: --elastic needs --micro-batch-size where no model is named: ")
    assert generate_text.main(["--elastic", "--load", "somewhere"]) == 2
    assert capsys.readouterr().err == "error: --elastic is for training: this program needs all of its ranks\n"
