"""A rank that lives and does not come: who waits for it where, and where it is, in one line."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

from megatron.gpt2.dist.hang import Place, set_flight_recorder, words
from megatron.gpt2.monitor.incidents import read_incidents
from tests.faults.state_faults import plant
from tests.megatron.gpt2.dist.started_ranks import Rank, free_port
from tests.megatron.gpt2.train.training_runs import write_text

REDUCES = Place(True, "all_reduce (mpu/mappings.py:61, called at mpu/layers.py:210)")
RECEIVES = Place(True, "wait (mpu/pipeline.py:35, called at schedule_runner.py:9)")
READS = Place(False, "data_utils/samplers.py:88 (next_batch)")
HOSTS = {rank: "ab"[rank // 2] for rank in range(4)}


def test_the_line_says_who_waits_where_for_whom() -> None:
    of_reduce = "all_reduce (mpu/mappings.py:61, called at mpu/layers.py:210)"
    assert words({0: REDUCES, 1: REDUCES, 2: READS, 3: REDUCES}, {}, HOSTS, 3, 6.0) == (
        f"rank 2 (b) did not come to {of_reduce} within 6 s, where ranks 0-1 (a) and 3 (b) wait: "
        "rank 2 is at data_utils/samplers.py:88 (next_batch)"
    )
    assert words({0: REDUCES, 1: RECEIVES, 3: REDUCES}, {2: 7.2}, HOSTS, 0, 6.0) == (
        f"rank 2 (b) gave no sign of life for 7 s and did not come to {of_reduce} within 6 s, where ranks 0 (a) and 3 "
        "(b) wait, rank 1 (a) waits in wait (mpu/pipeline.py:35, called at schedule_runner.py:9)"
    )
    assert words({0: REDUCES, 1: RECEIVES}, {}, HOSTS, 1, 6.0).startswith(
        "a collective took longer than 6 s (--distributed-timeout-minutes), and every rank waits in one, rank 1 (a)"
    )
    assert "did not come to the end of the step within 6 s: rank 0 is at" in words({0: READS}, {}, HOSTS, 0, 6.0)


def test_a_rank_that_hangs_is_asked_where_it_is(tmp_path: Path) -> None:
    write_text(tmp_path, 1000)
    words = (
        f"--save {tmp_path}/save --world-size 3 --init-method tcp://localhost:{free_port()} --global-batch-size 3 "
        "--distributed-timeout-minutes 0.1 --log-interval 100"
    ).split()
    ranks = [
        Rank(tmp_path, [*words, "--rank", str(rank)], {}, before=partial(plant, "hang", 2, 2)) for rank in range(3)
    ]
    ended = [rank.end(240) for rank in ranks]  # also the one that hangs, though no launcher ends it
    assert [code for code, _ in ended] == [1, 1, 1], ended
    lines = [line for _, output in ended for line in output.splitlines() if line.startswith("error (")]
    assert len(lines) == 1 and "Traceback" not in "".join(output for _, output in ended), ended
    assert re.fullmatch(
        r"error \((\S+)\): rank 2 \(\1\) did not come to \w+ \(\S+:\d+, called at megatron/gpt2/\S+:\d+\) "
        r"within 6 s, where ranks 0-1 \(\1\) wait: rank 2 is at megatron/gpt2/train/loop\.py:\d+ \(train\): "
        r"the run ends here; the same command continues from the last checkpoint",
        lines[0],
    ), lines[0]
    hangs = [record for record in read_incidents(tmp_path / "save") if record["kind"] == "hang"]
    of_two = next(record for record in hangs if record["who"] == "rank_00002" and "stack" in record)
    assert "(hang)" in of_two["stack"][-1]
    assert {record["iteration"] for record in hangs} == {2}
    (line,) = [record for record in hangs if "ranks" in record]
    assert line["ranks"] == [2]
    first = min(record["time"] for record in hangs)
    assert line["time"] - first < 3, f"named {line['time'] - first:.1f} s after the timeout"


def test_what_nccl_leaves_lies_beside_the_incidents(tmp_path: Path) -> None:
    environ: dict[str, str] = {}
    set_flight_recorder(tmp_path, environ)
    assert environ == {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/incidents/nccl_trace_rank_",
    }
    assert (tmp_path / "incidents").is_dir()
    own = {"TORCH_FR_BUFFER_SIZE": "7", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/x"}
    set_flight_recorder(tmp_path, own)
    assert own == {
        "TORCH_FR_BUFFER_SIZE": "7",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/x",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }
