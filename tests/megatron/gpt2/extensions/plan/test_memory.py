"""Compare the estimated memory of a rank with published figures and with torch's allocations, and test tools/plan.py,
which prints the estimate."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.gpt2.config import Config
from megatron.gpt2.config.arguments import parse
from megatron.gpt2.dist.ranks import RankInfo
from megatron.gpt2.extensions.plan import hook
from megatron.gpt2.extensions.plan.command import main
from megatron.gpt2.extensions.plan.memory import (
    BATCH_BYTES_PER_TOKEN,
    MemoryInputs,
    estimate_memory,
    held_bytes,
    stage_memory,
    traced_memory,
)
from megatron.gpt2.extensions.plan.search import layouts
from megatron.gpt2.train.train_step import train_step
from tests.conftest import error_line
from tests.distributed import run_ranks
from tests.fork_server import WarmPython
from tests.megatron.gpt2.train.training_runs import finish, start, write_text
from tests.mpu.test_cross_entropy import MemoryCounter

ROOT = Path(__file__).resolve().parents[4]
MB = 2**20


def config(flags: str, vocab_size: int = 50257) -> Config:
    parsed = parse(flags.split()).config
    return dataclasses.replace(parsed, model=dataclasses.replace(parsed.model, vocab_size=vocab_size))


def gpu_inputs(flags: str, ranks: int = 1) -> MemoryInputs:
    return MemoryInputs(config(flags), ranks, "cuda", torch.bfloat16, 600 * MB)


SHAPE = "--num-layers 3 --hidden-size 256 --seq-length 256 --max-position-embeddings 512 --micro-batch-size 2"


def estimate_and_peak(rank: int, world_size: int, folder: str, flags: str) -> tuple[int, int]:
    """Return the estimated bytes of a rank, and the bytes that torch allocated at the peak of its second step."""
    trainer = start(
        rank, world_size, folder, [*SHAPE.split(), *flags.split(), "--save", f"{folder}/{abs(hash(flags))}"]
    )
    train_step(trainer)
    with MemoryCounter() as counter:
        train_step(trainer)
    state = [trainer.state.buffer.params, *(t for moment in trainer.state.optimizer.moments.values() for t in moment)]
    state += trainer.state.buffer.masters if trainer.context.dtype != torch.float32 else []
    inputs = MemoryInputs(trainer.config, world_size, "cpu", trainer.context.dtype, 0)
    # "total" counts a gradient bucket when it is written, "allocated" when it is allocated.
    allocated = next(iter(stage_memory(inputs, inputs.stage_of(rank)).values()))["allocated"]
    finish(trainer)
    return allocated, counter.peak + sum(t.nbytes for t in state)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("memory")
    write_text(folder)
    return folder


ONE_RANK = (
    "--precision fp32 --recompute-granularity selective --micro-batch-size 8",
    "--precision bf16 --recompute-granularity full --micro-batch-size 8",
    "--precision bf16 --micro-batch-size 4 --make-vocab-size-divisible-by 20000",
    "--precision fp32 --global-batch-size 6 --hidden-dropout 0.1",
    "--precision fp32 --optimizer muon",
    "--precision bf16 --attention-dropout 0.1 --micro-batch-size 4",
    "--precision bf16 --exact-layouts 4 --global-batch-size 4 --make-vocab-size-divisible-by 20000",
)
OF_TWO = "--precision fp32 --micro-batch-size 4 --make-vocab-size-divisible-by 2048"
TWO_RANKS = (
    f"{OF_TWO} --use-distributed-optimizer --micro-batch-size 8",
    f"{OF_TWO} --model-parallel-size 2 --sequence-parallel",
    f"{OF_TWO} --use-distributed-optimizer --shard-gradients --global-batch-size 16 --ddp-bucket-size 300000",
    f"{OF_TWO} --model-parallel-size 2 --recompute-granularity full --partition-activations",
)
# The pipelines have two stages, which may have different numbers of layers, and 3 or 4 micro-batches.
STAGES = f"{OF_TWO} --pipeline-model-parallel-size 2"
TWO_STAGES = (
    f"{STAGES} --num-layers 4 --num-layers-per-virtual-pipeline-stage 1 --micro-batch-size 2 --global-batch-size 8",
    f"{STAGES} --exact-layouts 4 --global-batch-size 12",
)
MORE_STAGES = (
    f"{STAGES} --global-batch-size 12 --decoder-first-pipeline-num-layers 2",
    f"{STAGES} --micro-batch-size 8 --global-batch-size 24 --recompute-granularity full",
    f"{STAGES} --pipeline-schedule zero-bubble --global-batch-size 16",
    f"{STAGES} --precision bf16 --micro-batch-size 8 --global-batch-size 24",
)


def estimates_and_peaks(rank: int, world_size: int, folder: str, runs: Sequence[str]) -> list[tuple[int, int]]:
    return [estimate_and_peak(rank, world_size, folder, flags) for flags in runs]


@pytest.mark.parametrize(
    "ranks, runs",
    [
        (1, ONE_RANK),
        (2, TWO_RANKS),
        (2, TWO_STAGES),
        pytest.param(2, MORE_STAGES, marks=pytest.mark.wide),
    ],
    ids=["one rank", "two ranks", "two stages", "more stages"],
)
def test_estimate_matches_torch_allocations(folder: Path, ranks: int, runs: Sequence[str]):
    for rank, of_rank in enumerate(run_ranks(estimates_and_peaks, ranks, str(folder), runs)):
        for flags, (computed, allocated) in zip(runs, of_rank, strict=True):
            assert computed == pytest.approx(allocated, rel=0.01), f"rank {rank} of {flags}"


WIDE = "--hidden-size 2048 --num-attention-heads 16 --micro-batch-size 4 --num-layers"
# Several narrow layers share a gradient bucket.
NARROW = "--hidden-size 384 --num-attention-heads 6 --seq-length 256 --micro-batch-size 16 --num-layers"


@pytest.mark.parametrize(
    "flags, ranks, tolerance",
    [
        (f"{WIDE} 12", 1, 0.002),
        (f"{WIDE} 20 --recompute-granularity full --recompute-num-layers 2 --use-distributed-optimizer", 4, 0.002),
        (f"{WIDE} 16 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2", 4, 0.002),
        (f"{WIDE} 12 --model-parallel-size 2 --sequence-parallel --zero-stage 2 --global-batch-size 32", 4, 0.002),
        (f"{NARROW} 10 --recompute-granularity full", 1, 0.06),
    ],
)
def test_few_layers_are_extrapolated_to_all(flags: str, ranks: int, tolerance: float):
    inputs = gpu_inputs(flags, ranks)
    for stage in range(inputs.stages):
        rough, exact = (max(map(held_bytes, found(inputs, stage).values())) for found in (stage_memory, traced_memory))
        assert rough == pytest.approx(exact, rel=tolerance)


@pytest.mark.wide
def test_low_estimate_is_never_above_the_trace():
    flags = "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --micro-batch-size 2"
    found = [
        candidate
        for batch in (8, 32)  # A batch of 8 gives one micro-batch, with which a rank frees reduced gradients.
        for candidate in [*layouts(gpu_inputs(f"{flags} --global-batch-size {batch}", ranks=4))][::23]
    ]
    assert len(found) > 10
    for candidate in found:
        assert candidate.least <= estimate_memory(candidate.inputs, 0).total, candidate.flags


def test_micro_batches_that_are_left_out_repeat():
    """A step of 24 micro-batches needs as much memory as a step of 6, except for its tokens."""
    flags = "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --pipeline-model-parallel-size 2"
    few, many = (gpu_inputs(f"{flags} --micro-batch-size 1 --global-batch-size {m}", ranks=2) for m in (6, 24))
    for stage in range(2):
        more = 18 * 1024 * BATCH_BYTES_PER_TOKEN
        assert estimate_memory(many, stage).total == pytest.approx(estimate_memory(few, stage).total + more, rel=0.001)


def test_techniques_of_a_gpu_save_memory():
    """`test_estimate_matches_torch_allocations` measures all other techniques on a CPU."""

    def total(flags: str = "") -> int:
        return estimate_memory(gpu_inputs(f"--model 345m {flags}", ranks=4)).total

    full = "--recompute-granularity full --model-parallel-size 2 --micro-batch-size 64"
    for less, more in (
        ("--cpu-offload-optimizer", ""),
        ("--cpu-offloading-num-layers 12", ""),
        ("", "--attention-backend unfused"),
        (f"{full} --checkpoint-in-cpu", f"{full} --partition-activations"),
    ):
        assert total(less) < total(more), (less, more)
    offloaded = estimate_memory(gpu_inputs(f"--model 345m {full} --checkpoint-in-cpu", ranks=2))
    saved = estimate_memory(gpu_inputs("--model 345m --async-save"))
    for memory, size in ((offloaded, 24 * 64 * 1024 * 1024 * 2), (saved, 14 * 354_871_296)):
        assert 0 <= memory.on_host - size < MB  # The tokens of the batch are also in host memory.


def test_a_plan_that_fails_ends_no_run(monkeypatch: pytest.MonkeyPatch):
    def fail(context: object) -> MemoryInputs:
        raise KeyError("no such operator")

    monkeypatch.setattr(hook, "memory_inputs", fail)
    plan = hook.MemoryPlan(config(""))
    trainer: Any = SimpleNamespace(context=SimpleNamespace(rank_info=RankInfo(0, 1, 0, 1)))
    line = "no memory plan (KeyError: 'no such operator'); the run does not need it"
    assert plan.expected_memory(trainer) == ([], [line], None)
    assert plan.explain_out_of_memory(trainer.context) is None


# The program runs under a limit like `ulimit -v`: 555 MB more than the address space of the imported libraries, which
# take gigabytes with CUDA.
LIMITED = """
import re, resource, runpy, megatron.gpt2.commands.pretrain_gpt2
taken = 1024 * int(re.findall(r"VmSize:\\s+(\\d+)", open("/proc/self/status").read())[0])
resource.setrlimit(resource.RLIMIT_AS, (taken + 555 * 2**20,) * 2)
runpy.run_module("megatron.pretrain_gpt2", run_name="__main__", alter_sys=True)
"""


def test_out_of_memory_error_proposes_flags_that_fit(python: WarmPython, tmp_path: Path):
    """Under `ulimit -v` the run warns at its start and ends with one line and exit code 2. Its proposed flags work."""
    text = write_text(tmp_path)
    flags = (
        f"--num-layers 2 --hidden-size 256 --num-attention-heads 4 --max-position-embeddings 256 --seq-length 256 "
        f"--tokenizer-type bytes --train-data {text} --data-cache-path {tmp_path} --precision fp32 --device cpu "
        "--attention-dropout 0 --hidden-dropout 0 --micro-batch-size 64 --train-iters 1 --eval-iters 0 --save"
    )
    base = [python.python, "-c", LIMITED, *flags.split()]

    def start(save: str, *flags: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*base, str(tmp_path / save), *flags], text=True, capture_output=True, cwd=ROOT, timeout=240
        )

    run = start("first")
    assert run.returncode == 2, run.stdout + run.stderr
    (line,) = run.stderr.splitlines()
    assert line.startswith("error: out of memory on rank 0: expected ") and "(ulimit -v)" in line
    assert line.count(" slower)") == 3
    assert "WARNING: about " in run.stdout
    offers = re.findall(r"(--[^;(]+) \(([\d,]+) MB, \d+% slower\)", line)
    least = min(offers, key=lambda offer: int(offer[1].replace(",", "")))[0]
    assert start("second", *least.split()).returncode == 0, least


def plan_as_json(capsys: pytest.CaptureFixture[str], flags: str, code: int = 0) -> dict[str, Any]:
    assert main([*flags.split(), "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("p, steady, peak, parameters", [(1, 6785, 11927, 354_871_296), (2, 3447, 6238, 178_100_224)])
def test_published_memory_of_megatron_2019(
    capsys: pytest.CaptureFixture[str], p: int, steady: int, peak: int, parameters: int
):
    """NVIDIA published MB after 100 iterations and at the peak: fp16, 8 × 1,024 tokens, activation checkpointing."""
    flags = "--model 345m --recompute-granularity full --accounting megatron-2019 --model-parallel-size"
    found = plan_as_json(capsys, f"{flags} {p}")
    of_2019 = found["megatron_2019"]
    assert of_2019["from_step_to_step"] == 20 * parameters
    assert of_2019["from_step_to_step"] / MB == pytest.approx(steady, rel=0.02)
    assert found["memory"]["total"] / MB == pytest.approx(peak, rel=0.02)
    assert p > 1 or of_2019["activations_without_recompute"] == 22_951_231_488


def test_table_and_json_agree(capsys: pytest.CaptureFixture[str]):
    flags = "--model 345m --device cuda --ranks 2 --memory-gb 8"
    found = plan_as_json(capsys, flags)
    cheapest = found["fits"]["cheapest"]
    assert not found["fits"]["as_asked"] and len(cheapest) == 3
    assert main(flags.split()) == 0
    assert f"{cheapest[0]['flags']}\n" in capsys.readouterr().out
    # The first layout that the plan proposes fits into --memory-gb.
    again = plan_as_json(capsys, f"{flags} {cheapest[0]['flags']}")
    assert again["fits"]["as_asked"] and again["memory"]["total"] == cheapest[0]["bytes"]


def test_plan_has_numbers_of_each_stage(capsys: pytest.CaptureFixture[str]):
    flags = "--model 345m --device cuda --pipeline-model-parallel-size 4 --micro-batch-size 4 --global-batch-size 32"
    found = plan_as_json(capsys, flags)
    pipeline = found["pipeline"]
    # With equal stages, the bubble of 1F1B is (p - 1) / (m + p - 1).
    assert (pipeline["schedule"], pipeline["micro_batches"], pipeline["bubble"]) == ("1f1b", 8, 0.2727)
    assert [stage["layers"] for stage in pipeline["stages"]] == [[[0, 5]], [[6, 11]], [[12, 17]], [[18, 23]]]
    assert found["memory"]["total"] == max(stage["total"] for stage in pipeline["stages"])


@pytest.mark.parametrize(
    "flags, says",
    {
        "--memory-gb 0": "--memory-gb",
        "--ranks 3 --model-parallel-size 2": "--tensor-model-parallel-size 2",
        "--no-such-flag": "--no-such-flag",
        "--accounting megatron-2019 --memory-gb 8": "--accounting",
    }.items(),
)
def test_bad_flags_are_one_line(flags: str, says: str):
    assert says in error_line(lambda: main(flags.split()))


def test_smallest_layout_is_printed_if_none_fits(capsys: pytest.CaptureFixture[str]):
    flags = "--model 345m --device cuda --memory-gb 1"
    assert plan_as_json(capsys, flags, code=1)["fits"]["cheapest"] == []
    assert main(flags.split()) == 1
    assert "the smallest needs" in capsys.readouterr().out
