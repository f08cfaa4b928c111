"""The benchmark of collectives: our ring is all_reduce, a wrong result is seen, and a whole run reports everything."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.gpt2.commands import bench_collectives as bench
from megatron.gpt2.commands.bench_collectives import ring_all_reduce
from tests.distributed import run_ranks
from tests.warm_python import WarmPython

ROOT = Path(__file__).resolve().parents[4]

CPU = torch.device("cpu")


def ring_and_all_reduce(rank: int, world_size: int) -> list[tuple[str, float]]:
    """(case, greatest difference relative to the greatest value) of the ring and the backend's all_reduce."""
    found = []
    for count in (1, 2, 3, 5, 7, 64, 1000, 4099, 300_007):
        for dtype in (torch.float32, torch.float64, torch.int64):
            for segments in (None, 1, 3, 8):
                generator = torch.Generator().manual_seed(1000 * rank + count)
                tensor = (torch.randn(count, generator=generator, dtype=torch.float64) * 1000).to(dtype)
                expected, before = tensor.clone(), tensor.clone()
                dist.all_reduce(expected)
                ring_all_reduce(tensor, segments=segments)
                assert not torch.equal(tensor, before), "nothing was added"
                difference = (tensor - expected).abs().max().double() / expected.abs().max().double()
                found.append((f"{count} {dtype} {segments}", float(difference)))
                gathered = [torch.empty_like(tensor) for _ in range(world_size)]
                dist.all_gather(gathered, tensor)
                assert all(torch.equal(other, tensor) for other in gathered), "ranks differ"
    square = torch.full((33, 5), rank + 1.0)
    ring_all_reduce(square)  # any shape
    assert torch.equal(square, torch.full((33, 5), world_size * (world_size + 1) / 2))
    return found


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.wide)])
def test_the_ring_is_all_reduce(world_size: int) -> None:
    for found in run_ranks(ring_and_all_reduce, world_size):
        assert len(found) == 9 * 3 * 4
        for case, difference in found:
            if "int64" in case:
                assert difference == 0, case
            assert difference <= (1e-6 if "float32" in case else 1e-14), case


def test_the_ring_of_one_rank_is_the_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    tensor = torch.arange(5.0)
    ring_all_reduce(tensor)
    assert torch.equal(tensor, torch.arange(5.0))


def every_operation(rank: int, world_size: int) -> list[str]:
    """The operations, each at three sizes and dtypes, subgroups among them, with right results."""
    found: set[str] = set()
    for dtype, size in ((torch.float32, 4096), (torch.bfloat16, 1001), (torch.float16, 2)):
        world = bench.make_world(CPU, dtype)
        for name, operation in bench.OPERATIONS.items():
            rows, missing = bench.measure_sizes(name, operation, world, [size], iters=1, deadline=float("inf"))
            assert rows or operation.subgroups, missing
            assert all(row.correct and row.iterations == 1 for row in rows), (name, dtype, size)
            found.update(row.operation for row in rows)
    return sorted(found)


@pytest.mark.parametrize("world_size", [3, pytest.param(4, marks=pytest.mark.wide)])
def test_every_operation_is_right(world_size: int) -> None:
    subgroups = {name for name, operation in bench.OPERATIONS.items() if operation.subgroups}
    assert len(subgroups) == 2
    expected = sorted(set(bench.OPERATIONS) - (subgroups if world_size == 3 else set()))
    assert run_ranks(every_operation, world_size) == [expected] * world_size


def wrong_or_refused(rank: int, world_size: int) -> tuple[int, int, list[str]]:
    """Exit codes of a measurement that is right and of one with a wrong result, and the latter's verdict."""

    def wrong(world: bench.World, size: int) -> bench.Trial:
        trial = bench.broadcast(world, size)
        return bench.Trial(trial.bytes, lambda: None, trial.expected)  # rank 1 never gets anything

    def refuse(world: bench.World, size: int) -> bench.Trial:
        def run() -> None:
            raise RuntimeError("no such thing\nhere")

        return bench.Trial(size, run)

    def outcome(*names: str) -> int:
        options = bench.parse(["--max-bytes", "4K", "--iters", "2", "--operations", *names])
        return bench.bench(options, world, "a test")

    world = bench.make_world(CPU, torch.float32)
    bench.OPERATIONS["reduce"] = bench.Operation(refuse)
    right = outcome("reduce", "barrier")
    rows, missing = bench.measure_sizes(
        "reduce", bench.Operation(refuse), world, [64, 256], iters=2, deadline=float("inf")
    )
    assert not rows
    assert missing is not None
    assert missing.reason == "not offered by gloo for fp32 of 64: RuntimeError: no such thing here"
    late, missing = bench.measure_sizes(
        "barrier", bench.OPERATIONS["barrier"], world, [64], iters=2, deadline=0.0 if rank == 0 else float("inf")
    )
    assert not late and missing is not None and "--limit" in missing.reason  # rank 0's clock decides for all
    bench.OPERATIONS["broadcast"] = bench.Operation(wrong)
    rows, _ = bench.measure_sizes(
        "broadcast", bench.OPERATIONS["broadcast"], world, [64], iters=2, deadline=float("inf")
    )
    return right, outcome("broadcast", "barrier"), list(bench.verdict(rows, [], None, ["here"] * world_size))


def test_a_wrong_result_is_an_error_and_a_refused_operation_is_none() -> None:
    for right, wrong, verdict in run_ranks(wrong_or_refused, 2):
        assert (right, wrong) == (0, 1)
        assert verdict[-1] == "WRONG results: broadcast of 64"


def test_bus_factors_are_those_of_nccl_tests() -> None:
    factors = {name: [operation.bus_factor(n) for n in (2, 4, 8)] for name, operation in bench.OPERATIONS.items()}
    for name in ("all_reduce_sum", "all_reduce_product", "all_reduce_min", "all_reduce_max", "ring_all_reduce"):
        assert factors[name] == [1, 1.5, 1.75]
    for name in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"):
        assert factors[name] == [0.5, 0.75, 0.875]
    for name in ("broadcast", "reduce", "send_recv", "isend_irecv"):
        assert factors[name] == [1, 1, 1]
    assert factors["all_reduce_halves"][1:] == [1, 1.5]
    assert factors["all_reduce_across"][1:] == [1, 1]


def test_sizes() -> None:
    assert [bench.size_of(text) for text in ("1", "1000", "64K", "64k", "1M", "256MB", "2GiB")] == [
        1,
        1000,
        65536,
        65536,
        1 << 20,
        256 << 20,
        2 << 30,
    ]
    for text in ("", "0", "-1", "1.5M", "64X", "K"):
        with pytest.raises(argparse.ArgumentTypeError, match="is not a size: write"):
            bench.size_of(text)
    assert [bench.size_name(size) for size in (1, 1000, 1024, 1536, 256 << 20)] == ["1", "1000", "1K", "1536", "256M"]
    assert bench.sizes_between(1024, 256 << 20) == [1024 * 4**power for power in range(10)]
    assert bench.sizes_between(1000, 4000) == [1000, 4000]
    assert bench.sizes_between(1000, 3999) == [1000]


def test_slow_pairs_and_ranks_are_named() -> None:
    good = [[0.0 if source == target else 10.0 for target in range(4)] for source in range(4)]
    assert (bench.Pairs(1, good).slow(), bench.Pairs(1, good).slow_ranks()) == ([], [])
    pair = [
        [4.0 if (source, target) == (0, 3) else value for target, value in enumerate(row)]
        for source, row in enumerate(good)
    ]
    lines = list(bench.verdict([], [], bench.Pairs(1, pair), ["a", "a", "b", "b"]))
    assert lines == [
        "pairs: 4.000 to 10.000 GB/s, median 10.000; 1 below half of it",
        "SLOW: rank 0 on a to rank 3 on b: 4.000 GB/s",
    ]
    assert [line.count("*") for line in bench.pairs_table(bench.Pairs(1, pair))] == [0, 0, 1, 0, 0, 0]
    # of five ranks one is slow: 8 of its 8 directions, and nobody else is blamed
    rank = [
        [0.0 if source == target else 1.0 if 2 in (source, target) else 10.0 for target in range(5)]
        for source in range(5)
    ]
    lines = list(bench.verdict([], [], bench.Pairs(1, rank), ["a", "a", "b", "b", "b"]))
    assert lines[1:] == ["SLOW: rank 2 on b, in most of its pairs"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "tools/bench_collectives.py --nproc-per-node 2"),
        (["--max-bytes", "64X"], "error: --max-bytes: 64X is not a size"),
        (["--min-bytes", "1M", "--max-bytes", "64K"], "--min-bytes 1M is above --max-bytes 64K"),
        (["--iters", "0"], "--iters must be at least 1, not 0"),
        (["--limit", "0"], "--limit must be above 0, not 0"),
        (["--operations", "shout"], "invalid choice: 'shout'"),
    ],
)
def test_what_cannot_be_measured_ends_in_one_line(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [*filter(lambda name: name.startswith("SLURM"), os.environ), "RANK", "WORLD_SIZE"]:
        monkeypatch.delenv(name, raising=False)
    assert bench.main(flags) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ") and err.count("\n") == 1
    assert message in err


@pytest.mark.wide
def test_a_whole_run(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-W",
        "error::FutureWarning",
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(ROOT / "tools" / "bench_collectives.py"),
        "--max-bytes",
        "64K",
        "--iters",
        "3",
        "--device",
        "cpu",
        "--output",
        str(tmp_path / "made" / "here"),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, text=True, capture_output=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warn" not in done.stderr.lower(), done.stderr
    assert done.stdout.count(bench.HEADER) == 1  # one rank speaks
    lines = done.stdout.splitlines()
    for name in bench.OPERATIONS:
        assert any(line.startswith(f"{name} ") for line in lines), name
    table = [line for line in lines if line.endswith("  ok")]
    assert len({len(line) for line in table}) == 1, "the table does not line up"
    assert len(table) == 4 * 14 + 1
    record = json.loads((tmp_path / "made" / "here" / "collectives.json").read_text())
    assert {row["bytes"] for row in record["rows"]} == {0, 1024, 4096, 16384, 65536}
    assert {row["operation"] for row in record["rows"]} == {
        name for name, operation in bench.OPERATIONS.items() if not operation.subgroups
    }
    for row in record["rows"]:
        assert row["correct"] and row["iterations"] == 3
        assert 0 < row["seconds_p10"] <= row["seconds"] <= row["seconds_p90"]
        if row["bytes"]:
            assert row["algorithm_bandwidth"] == pytest.approx(row["bytes"] / row["seconds"] / 1e9)
    assert {one["operation"] for one in record["missing"]} == {"all_reduce_halves", "all_reduce_across"}
    assert record["pairs"]["bandwidth"][0][1] > 0
    assert f"every result was right ({len(table)})" in record["verdict"]
    pytest.importorskip("matplotlib")
    assert (tmp_path / "made" / "here" / "collectives.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_names_the_flags_that_there_are(python: WarmPython) -> None:
    help_text = subprocess.run(
        [python.python, str(ROOT / "tools" / "bench_collectives.py"), "--help"],
        text=True,
        capture_output=True,
        timeout=240,
        check=True,
    ).stdout
    there = set(re.findall(r"--[a-z][\w-]+", help_text)) - {"--nproc-per-node", "--help"}
    page = (ROOT / "docs" / "how-to" / "collectives.md").read_text()
    assert there == set(re.findall(r"`(--[a-z][\w-]+)`", page))
