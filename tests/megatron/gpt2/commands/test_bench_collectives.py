"""Test the benchmark of collectives: the ring equals all_reduce, wrong results are detected, and a run is complete."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.gpt2.commands import bench_collectives as bench
from tests.distributed import run_ranks

ROOT = Path(__file__).resolve().parents[4]
CPU = torch.device("cpu")


def check_the_ring(rank: int, world_size: int) -> None:
    """Check that the ring gives the sum of the backend's all_reduce, with equal bits on all ranks."""
    for count in (1, 2, 3, 5, 7, 64, 4099):
        for dtype in (torch.float32, torch.float64, torch.int64):
            generator = torch.Generator().manual_seed(1000 * rank + count)
            tensor = (torch.randn(count, generator=generator, dtype=torch.float64) * 1000).to(dtype)
            expected = tensor.clone()
            dist.all_reduce(expected)
            bench.ring_all_reduce(tensor)
            difference = (tensor - expected).abs().max().double() / expected.abs().max().double()
            assert difference <= {torch.int64: 0, torch.float32: 1e-6}.get(dtype, 1e-14), (count, dtype)
            assert all(torch.equal(other, tensor) for other in bench.gather_objects(tensor)), "ranks differ"


def run_bench(folder: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    """Run the benchmark in the current process group. Return the exit code and the results that rank 0 has written."""
    options = bench.parse_args(["--iters", "2", "--output", str(folder), *flags])
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = bench.measure_all(options, CPU, "a test")
    assert printed.getvalue().count(bench.HEADER) == (dist.get_rank() == 0), "only rank 0 prints"
    dist.barrier()
    return code, json.loads((folder / "collectives.json").read_text())


def measure_everything(rank: int, world_size: int, folder: Path) -> None:
    """Measure all operations at some sizes and dtypes. Then measure an operation that the backend lacks, one after the
    deadline, and one with a wrong result."""
    check_the_ring(rank, world_size)
    subgroups = {"all_reduce_halves", "all_reduce_across"} if world_size < 4 or world_size % 2 else set()
    for dtype, least, most, count in (("fp32", "1K", "16K", 3), ("bf16", "1001", "1001", 1), ("fp16", "2", "2", 1)):
        code, record = run_bench(folder, "--dtype", dtype, "--min-bytes", least, "--max-bytes", most)
        rows = record["rows"]
        assert code == 0 and f"every result was right ({len(rows)})" in record["verdict"]
        assert [row["operation"] for row in rows] == [
            name
            for name, operation in bench.OPERATIONS.items()
            if name not in subgroups
            for _ in range(count if operation.bus else 1)
        ]
        assert {one["operation"] for one in record["missing"]} == subgroups
        for row in rows:
            assert row["correct"] and row["iterations"] == 2
            assert 0 < row["seconds_p10"] <= row["seconds"] <= row["seconds_p90"]
        assert record["pairs"]["bandwidth"][0][1] > 0

    def refuse(group: dist.ProcessGroup, x: torch.Tensor, y: torch.Tensor) -> None:
        raise RuntimeError("no such thing\nhere")

    bench.OPERATIONS["reduce"] = bench.OPERATIONS["reduce"]._replace(run=refuse)
    code, record = run_bench(folder, "--operations", "reduce", "barrier", "--max-bytes", "1K")
    assert code == 0 and [row["operation"] for row in record["rows"]] == ["barrier"]
    refusal = "not offered by gloo for fp32 of 1K: RuntimeError: no such thing here"
    assert record["missing"] == [{"operation": "reduce", "reason": refusal}]
    late = bench.parse_args(["--min-bytes", "64"])
    # The clock of rank 0 decides for all ranks.
    with pytest.raises(bench.SkipOperation, match="64 and above: .*--limit"):
        deadline = 0.0 if rank == 0 else float("inf")
        next(bench.measure_sizes("barrier", bench.make_groups(), CPU, late, deadline))
    bench.OPERATIONS["broadcast"] = bench.OPERATIONS["broadcast"]._replace(run=lambda group, x, y: None)
    code, record = run_bench(folder, "--operations", "broadcast", "barrier", "--max-bytes", "1K")
    assert code == 1 and record["verdict"][-1] == "WRONG results: broadcast of 1K"
    assert [row["correct"] for row in record["rows"]] == [False, True]


@pytest.mark.parametrize("world_size", [*(pytest.param(n, marks=pytest.mark.wide) for n in (2, 3)), 4])
def test_a_whole_measurement(world_size: int, tmp_path: Path) -> None:
    run_ranks(measure_everything, world_size, tmp_path)
    pytest.importorskip("matplotlib")
    assert (tmp_path / "collectives.png").read_bytes().startswith(b"\x89PNG")


def test_bus_factors_are_those_of_nccl_tests() -> None:
    factors = {name: operation.bus(4) for name, operation in bench.OPERATIONS.items() if operation.bus}
    of_blocks = dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"), 0.75)
    assert factors == {name: 1.5 if "all_reduce" in name else 1 for name in factors} | of_blocks


def test_slow_pairs_and_ranks_are_named() -> None:
    around_two = [(rank, 2) for rank in (0, 1, 3, 4)] + [(2, rank) for rank in (0, 1, 3, 4)]
    for n, slow, named in (
        (4, [], []),
        (4, [(0, 3)], ["SLOW: rank 0 on a to rank 3 on b: 4.000 GB/s"]),
        (5, around_two, ["SLOW: rank 2 on b, in most of its pairs"]),  # Rank 2 is reported instead of its pairs.
    ):
        bandwidth = 10.0 - 10.0 * torch.eye(n, dtype=torch.float64)
        for pair in slow:
            bandwidth[pair] = 4.0
        line, *lines = bench.describe_pairs(bandwidth, ["a", "a", "b", "b", "b"][:n])
        low = 4 if slow else 10
        assert line == f"pairs: {low}.000 to 10.000 GB/s, median 10.000; {len(slow) or 'none'} below half of it"
        assert lines == named and bench.pairs_table(bandwidth).count("10.000") == n * (n - 1) - len(slow)


@pytest.mark.parametrize(
    "flags, message",
    {
        "": "tools/bench_collectives.py --nproc-per-node 2",
        "--max-bytes 64X": "error: --max-bytes: 64X is not a size",
        "--min-bytes 1M --max-bytes 64K": "--min-bytes 1M is above --max-bytes 64K",
        "--iters 0": "--iters: must be at least 1, not 0",
        "--limit 0": "--limit must be above 0, not 0",
        "--operations shout": "invalid choice: 'shout'",
    }.items(),
)
def test_bad_flags_of_bench_collectives_are_one_line(
    flags: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [*filter(lambda name: name.startswith("SLURM"), os.environ), "RANK", "WORLD_SIZE"]:
        monkeypatch.delenv(name, raising=False)
    assert bench.main(flags.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and message in err


def test_the_docs_list_all_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.parse_args(["--help"])
    there = set(re.findall(r"--[a-z][\w-]+", capsys.readouterr().out)) - {"--nproc-per-node", "--help"}
    page = (ROOT / "docs" / "how-to" / "collectives.md").read_text()
    assert there == set(re.findall(r"`(--[a-z][\w-]+)`", page))
