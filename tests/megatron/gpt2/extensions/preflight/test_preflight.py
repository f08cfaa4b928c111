"""Test that tools/preflight.py finds each of DEFECTS on one rank of two, and reports nothing without a defect."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from data_utils.files import try_lock
from megatron.gpt2.config.arguments import parse
from megatron.gpt2.dist.ranks import RankInfo
from megatron.gpt2.extensions.plan import hook
from megatron.gpt2.extensions.preflight import command as preflight
from megatron.gpt2.extensions.preflight.command import CheckResult
from tests.data_utils.data_files import write_pair
from tests.distributed import run_ranks
from tests.megatron.gpt2.train.training_runs import SMALL, finish, start, write_text

ALL_REDUCE, CHECK_PRODUCTS, NOW = dist.all_reduce, preflight.product_problem, time.time


def wrong_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    c = torch.matmul(a, b)
    c[0, 3, 4] += 1
    return c


def wrong_reduce(tensor: torch.Tensor, *args: Any, **options: Any) -> None:
    ALL_REDUCE(tensor, *args, **options)
    if tensor.nbytes == preflight.COLLECTIVE_BYTES and options["group"] is not dist.group.WORLD:
        tensor.view(-1)[5] += 1


def little_memory(device: torch.device, local_world_size: int) -> tuple[int, str]:
    return 1 << 20, "of this test"


class Defect(NamedTuple):
    """A defect of rank 1 that preflight must report.

    found: {name of a check that reports the defect: pattern of the printed text}. flags: the flags of all ranks.
    own: further flags of rank 1.
    patches: changes on rank 1.
    """

    found: dict[str, str]
    flags: str = ""
    own: str = ""
    patches: Sequence[tuple[Any, str, Any]] = ()


DEFECTS = {
    "nothing": Defect({}),
    "a different torch": Defect(
        {"versions": r"torch 9\.9 on rank 1 ", "flags": "torch"}, patches=[(torch, "__version__", "9.9")]
    ),
    "different code and different data": Defect(
        {"code": "source files x on rank 1 ", "data": r"training data \S+ on rank 1 "},
        own="--train-data {folder}/other.txt",
        patches=[(preflight, "code_hash", lambda: "x")],
    ),
    "a wrong product": Defect(
        {"products": r"rank 1 .*: 2 row and column sums of 4 products are wrong"},
        patches=[(preflight, "product_problem", lambda device, dtype: CHECK_PRODUCTS(device, dtype, wrong_product))],
    ),
    "a wrong collective": Defect(
        {"tensor group": "rank 1 .*: all_reduce_sum gave wrong values"}, patches=[(dist, "all_reduce", wrong_reduce)]
    ),
    "a skewed clock": Defect(
        {"clocks": r"rank 1 .* 30\.\d s ahead of most"}, patches=[(time, "time", lambda: NOW() + 30)]
    ),
    "a full disk": Defect(
        {"save folder": r"rank 1 .*GB needed, 0\.001 GB free.*--keep-last"},
        patches=[(shutil, "disk_usage", lambda path: mock.Mock(free=1_000_000))],
    ),
    "a folder that cannot be written": Defect(
        {"save folder": "rank 1 .* cannot be written"},
        patches=[(os, "access", lambda path, mode: mode != os.W_OK)],
    ),
    "a folder that another run uses": Defect({"save folder": "taken is in use by"}, "--save {folder}/taken"),
    "a damaged index": Defect({"flags": r"^--data-path: \S+damaged\.idx is damaged"}, "--data-path {folder}/damaged"),
    "too few samples": Defect({"length": "^[^:]+ samples, fewer than a batch of 4,096"}, "--global-batch-size 4096"),
    "text that is read too often": Defect(
        {"length": r"^\d+\.\d epochs: after about 4, .* repeated text use a larger corpus or a smaller --train-iters"},
        "--train-iters 20000",
    ),
    "too little memory": Defect(
        {"memory": "rank 1 .*MB are expected per rank, and 1 MB are available"},
        patches=[(module, "available_memory", little_memory) for module in (preflight, hook)],
    ),
    "a world that cannot be divided": Defect(
        {"flags": "--tensor-model-parallel-size 3 needs a multiple of 3 ranks"},
        "--model-parallel-size 3 --num-attention-heads 3 --hidden-size 96",
    ),
    "different flags on a rank": Defect(
        {"flags": r"--lr 0\.01 on rank 1 .*\n.*--seed 7 on rank 1 "}, own="--lr 1e-2 --seed 7"
    ),
    "a checkpoint of a different shape": Defect(
        {"flags": "--hidden-size: here 64, checkpoint 128"}, "--save {folder}/stale --hidden-size 64"
    ),
}


def results_of_defects(rank: int, world_size: int, folder: Path) -> dict[str, list[CheckResult]]:
    found = {}
    with mock.patch.object(preflight, "WRITE_TEST_BYTES", 1 << 20):
        for name, (_, flags, own, patches) in DEFECTS.items():
            line = f"--data-cache-path {folder}/cache --save {folder}/save --train-iters 20 --model-parallel-size 2"
            if "--data-path" not in flags:
                line += f" --train-data {folder}/text.txt"
            words = [*SMALL, *f"{line} {flags} {own * rank}".format(folder=folder).split()]
            with ExitStack() as stack:
                for target, attribute, new in patches if rank else ():
                    stack.enter_context(mock.patch.object(target, attribute, new))
                found[name] = preflight.run_checks(parse(words), RankInfo(rank, world_size, rank, world_size))
    return found


def test_each_planted_defect_is_found(tmp_path: Path):
    write_text(tmp_path)
    (tmp_path / "other.txt").write_text("other words " * 3000)
    write_pair(tmp_path / "damaged", [[1] * 5000])
    index = (tmp_path / "damaged.idx").read_bytes()
    (tmp_path / "damaged.idx").write_bytes(index[:-1] + b"\t")
    trainer = start(0, 1, tmp_path, f"--save {tmp_path}/stale")
    trainer.checkpoints.save()
    finish(trainer)
    (tmp_path / "taken").mkdir()
    with open(tmp_path / "taken/lease_0000000007", "a+b") as lock:
        assert try_lock(lock)
        lock.write(b"process 7 on a machine\n")
        lock.flush()
        of_rank_0, of_rank_1 = run_ranks(results_of_defects, 2, tmp_path)
    assert of_rank_0 == of_rank_1, "the ranks would end with different exit codes"
    assert not (tmp_path / "save").exists(), "a check left a file"
    for name, (expected, *_) in DEFECTS.items():
        odd = [row for row in of_rank_0[name] if row.mark != "ok"]
        assert list(dict.fromkeys(row.name for row in odd)) == list(expected), (name, odd)
        assert {row.mark for row in odd} <= {"WARN" if "too often" in name else "FIX"}
        for check, pattern in expected.items():
            found = "\n".join(f"{row.text} {row.fix}" for row in odd if row.name == check)
            assert re.search(pattern, found), (name, found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_are_exact_in_every_precision(dtype: torch.dtype):
    assert preflight.product_problem(torch.device("cpu"), dtype) == ""


def test_program(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    line = f"--data-cache-path {tmp_path}/cache --save {tmp_path}/save --train-iters 20 --nproc-per-node 2"
    flags = [*SMALL, "--train-data", str(write_text(tmp_path)), *line.split()]
    assert preflight.main([*flags, "--global-batch-size", "40000"]) == 1
    assert re.search(r"length +FIX   [\d,]+ samples, fewer than a batch", capfd.readouterr().out)
    assert preflight.main([*flags[:-2], "--num-attention-heads", "3"]) == 2
    assert "--num-attention-heads 3" in capfd.readouterr().err
