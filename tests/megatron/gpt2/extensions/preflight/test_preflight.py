"""tools/preflight.py finds each of these defects, planted on one rank of two, and nothing if there is none."""

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
from data_utils.files import take_lock
from megatron.gpt2.config.arguments import parse
from megatron.gpt2.dist.ranks import Ranks
from megatron.gpt2.extensions.plan import hook
from megatron.gpt2.extensions.preflight import command as preflight
from megatron.gpt2.extensions.preflight.command import Finding, Row, judge, table
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


def little(device: torch.device, local_world_size: int) -> tuple[int, str]:
    return 1 << 20, "of this test"


Patches = list[tuple[Any, str, Any]]  # on rank 1 only
# name: flags of all ranks, flags of rank 1, patches, the row, what it must say
DEFECTS: dict[str, tuple[str, str, Patches, str, str]] = {
    "nothing": ("", "", [], "", ""),
    "another torch": ("", "", [(torch, "__version__", "9.9")], "versions", r"torch 9\.9 on rank 1 "),
    "other code": ("", "", [(preflight, "code_hash", lambda: "x")], "code", "source files x on rank 1 "),
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
    "a skewed clock": ("", "", [(time, "time", lambda: NOW() + 30)], "clocks", r"rank 1 .* 30\.\d s before most"),
    "a full disk": (
        "",
        "",
        [(shutil, "disk_usage", lambda path: mock.Mock(free=1_000_000))],
        "save folder",
        r"rank 1 .*MB to come, 1\.0 MB free.*--keep-last",
    ),
    "a folder that cannot be written": (
        "",
        "",
        [(os, "access", lambda path, mode: mode != os.W_OK)],
        "save folder",
        "rank 1 .* cannot be written",
    ),
    "a folder that another run has": ("--save {folder}/taken", "", [], "save folder", "taken is in use by"),
    "other data on a rank": ("", "--train-data {folder}/other.txt", [], "data", r"training data \S+ on rank 1 "),
    "a damaged index": ("--data-path {folder}/damaged", "", [], "flags", r"^--data-path: \S+damaged\.idx is damaged"),
    "too few samples": ("--global-batch-size 4096", "", [], "data", "^[^:]+ samples, fewer than a batch of 4,096"),
    "too little memory": (
        "",
        "",
        [(preflight, "available", little), (hook, "available", little)],
        "memory",
        "rank 1 .*MB are expected per rank and 1 MB are there",
    ),
    "a world that cannot be divided": (
        "--model-parallel-size 3 --num-attention-heads 3 --hidden-size 96",
        "",
        [],
        "flags",
        "2 ranks is not divisible by --model-parallel-size 3",
    ),
    "other flags on a rank": ("", "--lr 1e-2", [], "flags", r"--lr 0\.01 on rank 1 "),
    "a checkpoint of another shape": (
        "--save {folder}/stale --hidden-size 64",
        "",
        [],
        "flags",
        "--hidden-size: here 64, checkpoint 128",
    ),
}


def look(rank: int, world_size: int, folder: str) -> dict[str, list[Row]]:
    found = {}
    with mock.patch.object(preflight, "WRITTEN", 1 << 20):
        for name, (flags, own, patches, _, _) in DEFECTS.items():
            line = f"--data-cache-path {folder}/cache --save {folder}/save --train-iters 20 --model-parallel-size 2"
            if "--data-path" not in flags:
                line += f" --train-data {folder}/text.txt"
            words = [*SMALL, *f"{line} {flags} {own * rank}".format(folder=folder).split()]
            with ExitStack() as stack:
                for target, attribute, new in patches * rank:
                    stack.enter_context(mock.patch.object(target, attribute, new))
                found[name] = preflight.look(parse(words), Ranks(rank, world_size, rank, world_size))
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
    run = start(0, 1, str(tmp_path), ["--save", f"{tmp_path}/stale"])
    run.save()
    finish(run)
    (tmp_path / "taken").mkdir()
    before = {path.name for path in tmp_path.iterdir()}
    with open(tmp_path / "taken/lock", "a+b") as lock:
        assert take_lock(lock)
        lock.write(b"process 7 on a machine\n")
        lock.flush()
        first, second = run_ranks(look, 2, str(tmp_path))
    assert first == second, "the ranks would end with other exit codes"
    assert {path.name for path in tmp_path.iterdir()} == before | {"cache"}, "it left something behind"
    for name, (_, _, _, where, said) in DEFECTS.items():
        odd = [row for row in first[name] if row.fix]
        if not where:
            assert not odd and len(first[name]) >= 10, first[name]
            continue
        assert [row.name for row in odd] == [where], (name, odd)
        assert re.search(said, f"{odd[0].text} {odd[0].fix}"), (name, odd)


def test_findings_of_many_ranks_are_compared() -> None:
    """The odd one of four is named, whichever it is, and of two the other than rank 0."""
    hosts = dict(enumerate("aabb"))
    well = Finding("torch 2, numpy 1", "install", alike={"torch": "2", "numpy": "1"})
    assert judge("versions", dict.fromkeys(hosts, well), hosts) == Row("versions", "torch 2, numpy 1")
    wrong = well._replace(problem="is broken")
    for odd, host in hosts.items():
        old = dict.fromkeys(hosts, well) | {odd: well._replace(alike={"torch": "2", "numpy": "0"})}
        expected = f"numpy 0 on rank {odd} ({host}), unlike the others"
        assert judge("versions", old, hosts) == Row("versions", expected, "install")
        bad = dict.fromkeys(hosts, well) | {odd: wrong}
        assert judge("versions", bad, hosts).text == f"rank {odd} ({host}): is broken"
    assert "on rank 1 (a)" in judge("versions", {0: well, 1: well._replace(alike={"torch": "3"})}, hosts).text
    assert judge("versions", dict.fromkeys(hosts, wrong), hosts) == Row("versions", "is broken", "install")
    rows = [Row("a", "well"), Row("long name", "not well", "mend it")]
    assert list(table(rows)) == ["  a          ok   well", "  long name  FIX  not well", " " * 18 + "mend it"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_are_exact_in_every_precision(dtype: torch.dtype) -> None:
    assert preflight.product_problem(torch.device("cpu"), dtype) == ""


def test_the_program(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """From the command line, with ranks of its own."""
    line = f"--data-cache-path {tmp_path}/cache --save {tmp_path}/save --train-iters 20 --nproc-per-node 2"
    flags = [*SMALL, "--train-data", str(write_text(tmp_path)), *line.split()]
    assert preflight.main([*flags, "--model-parallel-size", "2"]) == 0
    said = capfd.readouterr().out
    assert "tensor group" in said and "FIX" not in said and not (tmp_path / "save").exists()
    assert preflight.main([*flags, "--global-batch-size", "40000"]) == 1
    assert re.search(r"data +FIX  [\d,]+ samples, fewer than a batch", capfd.readouterr().out)
    assert preflight.main([*flags[:-2], "--num-attention-heads", "3"]) == 2
    assert "--num-attention-heads 3" in capfd.readouterr().err
