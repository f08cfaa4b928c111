"""tools/preflight.py finds each of these defects, planted on one rank of two, and nothing where there is none."""

from __future__ import annotations

import contextlib
import copy
import os
import re
import shutil
import time
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
from megatron.gpt2.extensions.preflight import command as preflight
from megatron.gpt2.extensions.preflight import facts
from megatron.gpt2.extensions.preflight.command import Found, Row, table
from tests.distributed import run_ranks
from tests.megatron.gpt2.train.training_runs import SMALL, finish, start, write_text

ALL_REDUCE = dist.all_reduce
Defect = tuple[list[str], list[str], str, str]  # flags of all ranks, of rank 1 alone, the row, what it must say
DEFECTS: dict[str, Defect] = {
    "nothing": ([], [], "", ""),
    "another torch": ([], [], "versions", r"torch 9\.9 on rank 1 "),
    "other code": ([], [], "code", "rank 1 .* run other source files"),
    "a wrong product": ([], [], "products", r"rank 1 .*: product 1 of 4 has 2 of 1,024"),
    "a wrong collective": ([], [], "tensor group", "all_reduce gave wrong values on rank 1 "),
    "a skewed clock": ([], [], "clocks", r"that of rank 1 .* 30\.\d s before most"),
    "a full disk": ([], [], "save folder", r"MB to come, 1\.0 MB free.*--keep-last"),
    "a folder that cannot be written": ([], [], "save folder", "rank 1 .* cannot be written"),
    "a folder that another run has": (["--save", "{folder}/taken"], [], "save folder", "taken is in use by"),
    "other data on a rank": ([], ["--train-data", "{folder}/other.txt"], "data", "rank 1 .* read other training data"),
    "a damaged index": (["--data-path", "{folder}/damaged", "--train-data"], [], "flags", r"damaged\.idx is damaged"),
    "too few samples": (["--global-batch-size", "4096"], [], "data", "fewer than a batch of 4,096"),
    "too little memory": ([], [], "memory", "rank 1 .*MB are expected per rank and 1 MB are there"),
    "a world that cannot be divided": (
        ["--model-parallel-size", "3", "--num-attention-heads", "3", "--hidden-size", "96"],
        [],
        "flags",
        "2 ranks is not divisible by --model-parallel-size 3",
    ),
    "other flags on a rank": ([], ["--lr", "1e-2"], "flags", "rank 1 .* another --lr: 0.01"),
    "a checkpoint of another shape": (
        ["--save", "{folder}/stale", "--hidden-size", "64"],
        [],
        "flags",
        "--hidden-size: here 64, checkpoint 128",
    ),
}


@contextlib.contextmanager
def planted(name: str, rank: int) -> Any:
    """The defect, on rank 1 where it is one of a rank."""
    with contextlib.ExitStack() as stack:

        def patch(target: Any, attribute: str, new: Any) -> None:
            stack.enter_context(mock.patch.object(target, attribute, new))

        if name == "a full disk":
            patch(shutil, "disk_usage", lambda path: mock.Mock(free=1_000_000))
        if rank == 1:
            if name == "another torch":
                patch(torch, "__version__", "9.9")
            elif name == "other code":
                patch(facts, "code_hash", lambda: "another")
            elif name == "a wrong product":

                def wrong(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
                    c = torch.matmul(a, b)
                    c[3, 4] += 1
                    return c

                patch(
                    facts,
                    "product_problem",
                    lambda device, dtype, check=facts.product_problem: check(device, dtype, wrong),
                )
            elif name == "a wrong collective":

                def all_reduce(tensor: torch.Tensor, *args: Any, **options: Any) -> None:
                    ALL_REDUCE(tensor, *args, **options)
                    if tensor.nbytes == facts.COLLECTIVE_BYTES and options["group"] is not dist.group.WORLD:
                        tensor.view(-1)[5] += 1

                patch(dist, "all_reduce", all_reduce)
            elif name == "a folder that cannot be written":
                patch(os, "access", lambda path, mode: mode != os.W_OK)
            elif name == "a skewed clock":
                patch(time, "time", lambda now=time.time: now() + 30)
            elif name == "too little memory":
                patch(facts, "available", lambda device, local: (1 << 20, "of this test"))
                stack.enter_context(
                    mock.patch("megatron.gpt2.extensions.plan.hook.available", return_value=(1 << 20, "of this test"))
                )
        yield


def look(rank: int, world_size: int, folder: str) -> dict[str, list[Row]]:
    found = {}
    with mock.patch.object(facts, "WRITTEN", 1 << 20), mock.patch.object(preflight, "source_commit", lambda root: ""):
        for name, (flags, own, _, _) in DEFECTS.items():
            line = (
                f"--train-data {folder}/text.txt --data-cache-path {folder}/cache --save {folder}/save --train-iters 20 "
                "--model-parallel-size 2"
            )
            words = [*SMALL, *line.split(), *(word.format(folder=folder) for word in flags + own * rank)]
            if name == "a damaged index":
                words.remove("--train-data")
                words.remove(f"{folder}/text.txt")
                words.remove("--train-data")
            with planted(name, rank):
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
    with open(tmp_path / "taken/lock", "a+b") as lock:
        assert take_lock(lock)
        lock.write(b"process 7 on a machine\n")
        lock.flush()
        first, second = run_ranks(look, 2, str(tmp_path))
    assert first == second, "the ranks would end with other exit codes"
    assert {path.name for path in tmp_path.iterdir()} == {
        "text.txt",
        "other.txt",
        "damaged.bin",
        "damaged.idx",
        "stale",
        "taken",
        "cache",
    }, "it left something behind"
    for name, (_, _, where, said) in DEFECTS.items():
        odd = [row for row in first[name] if row.fix]
        if not where:
            assert not odd and len(first[name]) >= 10, first[name]
            continue
        assert [row.name for row in odd] == [where], (name, odd)
        assert re.search(said, f"{odd[0].text} {odd[0].fix}"), (name, odd)


def test_facts_of_many_ranks_are_compared() -> None:
    """The odd one of four is named, whichever it is."""
    of_rank = facts.facts_of_process(torch.device("cpu")) | {
        "decisions": {"--lr": "1"},
        "data": "a",
        "samples": 100,
        "used": 300,
        "batch": 8,
        "train_iters": 40,
        "product": "",
        "is_finished": False,
        "precision": "fp32",
        "start": 0,
        "memory": "5 MB of 9 MB",
        "memory_problem": "",
        "free": 10**9,
        "bytes_per_s": 1e8,
        "bytes_to_come": 10**6,
        "checkpoint_bytes": 10**5,
        "clock": 0.0,
    }

    def rows(found: list[Any]) -> list[Row]:
        return [*Found(found).process_rows(), *Found(found).run_rows()]

    good = [copy.deepcopy(of_rank) for _ in range(4)]
    assert not [row for row in rows(good) if row.fix]
    for odd in range(4):
        found = [copy.deepcopy(of_rank) for _ in range(4)]
        found[odd]["versions"]["torch"] = "0"
        found[odd]["clock"] = 60.0
        lines = [row.text for row in rows(found) if row.fix]
        assert len(lines) == 2 and all(f"rank {odd} " in line for line in lines), lines
    assert len({line.index("ok") for line in table(rows(good))}) == 1, "the columns line up"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_are_exact_in_every_precision(dtype: torch.dtype) -> None:
    assert facts.product_problem(torch.device("cpu"), dtype) == ""


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
