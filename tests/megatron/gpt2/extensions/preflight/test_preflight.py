"""tools/preflight.py finds each of these defects on one rank of two, and reports nothing without a defect."""

from __future__ import annotations

import os
import re
import shutil
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from data_utils import IndexedDatasetBuilder
from data_utils.files import try_lock
from megatron.gpt2.config.arguments import parse
from megatron.gpt2.dist.ranks import RankInfo
from megatron.gpt2.extensions.plan import hook
from megatron.gpt2.extensions.preflight import command as preflight
from megatron.gpt2.extensions.preflight.command import CheckResult, Finding, combine_findings, result_table
from tests.distributed import run_ranks
from tests.megatron.gpt2.train.training_runs import SMALL, finish, start, write_text

ALL_REDUCE, CHECK_PRODUCTS, NOW = dist.all_reduce, preflight.product_problem, time.time


def wrong_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    c = torch.matmul(a, b)
    c[3, 4] += 1
    return c


def wrong_reduce(tensor: torch.Tensor, *args: Any, **options: Any) -> None:
    ALL_REDUCE(tensor, *args, **options)
    if tensor.nbytes == preflight.COLLECTIVE_BYTES and options["group"] is not dist.group.WORLD:
        tensor.view(-1)[5] += 1


def little_memory(device: torch.device, local_world_size: int) -> tuple[int, str]:
    return 1 << 20, "of this test"


Patches = list[tuple[Any, str, Any]]  # on rank 1 only
# name: flags of all ranks, flags of rank 1, patches, the row, pattern of its text
DEFECTS: dict[str, tuple[str, str, Patches, str, str]] = {
    "nothing": ("", "", [], "", ""),
    "a different torch": ("", "", [(torch, "__version__", "9.9")], "versions", r"torch 9\.9 on rank 1 "),
    "different code": ("", "", [(preflight, "code_hash", lambda: "x")], "code", "source files x on rank 1 "),
    "a wrong product": (
        "",
        "",
        [(preflight, "product_problem", lambda device, dtype: CHECK_PRODUCTS(device, dtype, wrong_product))],
        "products",
        r"rank 1 .*: product 1 of 4 has 2 of 1,024",
    ),
    "a wrong collective": (
        "",
        "",
        [(dist, "all_reduce", wrong_reduce)],
        "tensor group",
        "rank 1 .*: all_reduce gave wrong values",
    ),
    "a skewed clock": ("", "", [(time, "time", lambda: NOW() + 30)], "clocks", r"rank 1 .* 30\.\d s ahead of most"),
    "a full disk": (
        "",
        "",
        [(shutil, "disk_usage", lambda path: mock.Mock(free=1_000_000))],
        "save folder",
        r"rank 1 .*MB needed, 1\.0 MB free.*--keep-last",
    ),
    "a folder that cannot be written": (
        "",
        "",
        [(os, "access", lambda path, mode: mode != os.W_OK)],
        "save folder",
        "rank 1 .* cannot be written",
    ),
    "a folder that another run uses": ("--save {folder}/taken", "", [], "save folder", "taken is in use by"),
    "different data on a rank": ("", "--train-data {folder}/other.txt", [], "data", r"training data \S+ on rank 1 "),
    "a damaged index": ("--data-path {folder}/damaged", "", [], "flags", r"^--data-path: \S+damaged\.idx is damaged"),
    "too few samples": ("--global-batch-size 4096", "", [], "data", "^[^:]+ samples, fewer than a batch of 4,096"),
    "too little memory": (
        "",
        "",
        [(preflight, "available_memory", little_memory), (hook, "available_memory", little_memory)],
        "memory",
        "rank 1 .*MB are expected per rank, and 1 MB are available",
    ),
    "a world that cannot be divided": (
        "--model-parallel-size 3 --num-attention-heads 3 --hidden-size 96",
        "",
        [],
        "flags",
        "--model-parallel-size 3 needs a multiple of 3 ranks",
    ),
    "different flags on a rank": ("", "--lr 1e-2", [], "flags", r"--lr 0\.01 on rank 1 "),
    "a checkpoint of a different shape": (
        "--save {folder}/stale --hidden-size 64",
        "",
        [],
        "flags",
        "--hidden-size: here 64, checkpoint 128",
    ),
}


def results_of_defects(rank: int, world_size: int, folder: str) -> dict[str, list[CheckResult]]:
    found = {}
    with mock.patch.object(preflight, "WRITE_TEST_BYTES", 1 << 20):
        for name, (flags, own, patches, _, _) in DEFECTS.items():
            line = f"--data-cache-path {folder}/cache --save {folder}/save --train-iters 20 --model-parallel-size 2"
            if "--data-path" not in flags:
                line += f" --train-data {folder}/text.txt"
            words = [*SMALL, *f"{line} {flags} {own * rank}".format(folder=folder).split()]
            with ExitStack() as stack:
                for target, attribute, new in patches * rank:
                    stack.enter_context(mock.patch.object(target, attribute, new))
                found[name] = preflight.run_checks(parse(words), RankInfo(rank, world_size, rank, world_size))
    return found


def test_each_planted_defect_is_found(tmp_path: Path) -> None:
    write_text(tmp_path)
    (tmp_path / "other.txt").write_text("other words " * 3000)
    builder = IndexedDatasetBuilder(tmp_path / "damaged", np.dtype("<u2"))
    builder.add([1] * 5000)
    builder.end_document()
    builder.finish()
    index = bytearray((tmp_path / "damaged.idx").read_bytes())
    index[-1] = 9
    (tmp_path / "damaged.idx").write_bytes(index)
    trainer = start(0, 1, str(tmp_path), ["--save", f"{tmp_path}/stale"])
    trainer.save()
    finish(trainer)
    (tmp_path / "taken").mkdir()
    before = {path.name for path in tmp_path.iterdir()}
    with open(tmp_path / "taken/lock", "a+b") as lock:
        assert try_lock(lock)
        lock.write(b"process 7 on a machine\n")
        lock.flush()
        first, second = run_ranks(results_of_defects, 2, str(tmp_path))
    assert first == second, "the ranks would end with different exit codes"
    assert {path.name for path in tmp_path.iterdir()} == before | {"cache"}, "a check left a file"
    for name, (_, _, _, where, said) in DEFECTS.items():
        odd = [row for row in first[name] if row.fix]
        if not where:
            assert not odd and len(first[name]) >= 10, first[name]
            continue
        assert [row.name for row in odd] == [where], (name, odd)
        assert re.search(said, f"{odd[0].text} {odd[0].fix}"), (name, odd)


def test_findings_of_many_ranks_are_compared() -> None:
    """The rank that differs is named. If two ranks differ from each other, rank 1 is named."""
    hosts = dict(enumerate("aabb"))
    well = Finding("torch 2, numpy 1", "install", must_match={"torch": "2", "numpy": "1"})
    assert combine_findings("versions", dict.fromkeys(hosts, well), hosts) == CheckResult(
        "versions", "torch 2, numpy 1"
    )
    wrong = well._replace(problem="is broken")
    for odd, host in hosts.items():
        old = dict.fromkeys(hosts, well) | {odd: well._replace(must_match={"torch": "2", "numpy": "0"})}
        expected = f"numpy 0 on rank {odd} ({host}), different from the others"
        assert combine_findings("versions", old, hosts) == CheckResult("versions", expected, "install")
        bad = dict.fromkeys(hosts, well) | {odd: wrong}
        assert combine_findings("versions", bad, hosts).text == f"rank {odd} ({host}): is broken"
    assert (
        "on rank 1 (a)"
        in combine_findings("versions", {0: well, 1: well._replace(must_match={"torch": "3"})}, hosts).text
    )
    assert combine_findings("versions", dict.fromkeys(hosts, wrong), hosts) == CheckResult(
        "versions", "is broken", "install"
    )
    rows = [CheckResult("a", "well"), CheckResult("long name", "not well", "correct it")]
    assert list(result_table(rows)) == ["  a          ok   well", "  long name  FIX  not well", " " * 18 + "correct it"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_are_exact_in_every_precision(dtype: torch.dtype) -> None:
    assert preflight.product_problem(torch.device("cpu"), dtype) == ""


def test_program(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The program starts its own ranks."""
    line = f"--data-cache-path {tmp_path}/cache --save {tmp_path}/save --train-iters 20 --nproc-per-node 2"
    flags = [*SMALL, "--train-data", str(write_text(tmp_path)), *line.split()]
    assert preflight.main([*flags, "--model-parallel-size", "2"]) == 0
    said = capfd.readouterr().out
    assert "tensor group" in said and "FIX" not in said and not (tmp_path / "save").exists()
    assert preflight.main([*flags, "--global-batch-size", "40000"]) == 1
    assert re.search(r"data +FIX  [\d,]+ samples, fewer than a batch", capfd.readouterr().out)
    assert preflight.main([*flags[:-2], "--num-attention-heads", "3"]) == 2
    assert "--num-attention-heads 3" in capfd.readouterr().err
