"""The expected memory of a rank compared with published figures, what torch allocates, and what processes had resident;
and tools/plan.py, which prints it."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from data_utils.command_line import program
from megatron.gpt2.config import Config
from megatron.gpt2.config.arguments import parse
from megatron.gpt2.extensions.plan.command import main
from megatron.gpt2.extensions.plan.fit import cheapest, largest_micro_batch, layouts, smallest
from megatron.gpt2.extensions.plan.hook import available
from megatron.gpt2.extensions.plan.pipelines import bubble, situations
from megatron.gpt2.extensions.plan.sizes import Setting, Sizes
from megatron.gpt2.extensions.plan.step import expected, of_stages
from megatron.gpt2.monitor.incidents import is_out_of_memory
from megatron.gpt2.monitor.reporting import resident_memory
from megatron.gpt2.pipeline.analysis import equal_costs, timetable
from megatron.gpt2.train.train_step import train_step
from tests.distributed import run_ranks
from tests.megatron.gpt2.train.training_runs import finish, start, write_text
from tests.mpu.test_cross_entropy import MemoryCounter
from tests.warm_python import WarmPython

ROOT = Path(__file__).resolve().parents[4]
MB = 2**20


def config(flags: str, vocab_size: int = 50257) -> Config:
    made = parse(flags.split()).config
    return dataclasses.replace(made, model=dataclasses.replace(made.model, vocab_size=vocab_size))


def on_gpu(flags: str, ranks: int = 1) -> Setting:
    return Setting(config(flags), ranks, "cuda", torch.bfloat16, 600 * MB)


SHAPE = "--num-layers 3 --hidden-size 256 --seq-length 256 --max-position-embeddings 512 --micro-batch-size 2"


def counted(rank: int, world_size: int, folder: str, flags: str) -> tuple[int, int]:
    """Expected bytes of a rank, and those that torch allocated at the peak of its second step."""
    run = start(rank, world_size, folder, [*SHAPE.split(), *flags.split(), "--save", f"{folder}/{abs(hash(flags))}"])
    train_step(run)
    with MemoryCounter() as counter:
        train_step(run)
    state = [run.engine.flat.params, *(t for moment in run.engine.optimizer.moments.values() for t in moment)]
    state += run.engine.flat.masters if run.prepared.dtype != torch.float32 else []
    setting = Setting(run.config, world_size, "cpu", run.prepared.dtype, 0)
    memory = expected(setting, setting.stage_of(rank))
    finish(run)
    return memory.allocated, counter.peak + sum(t.nbytes for t in state)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("memory")
    write_text(folder)
    return folder


ONE_RANK = (
    "--precision fp32",
    "--precision bf16",
    "--precision fp32 --recompute-granularity selective --micro-batch-size 8",
    "--precision bf16 --recompute-granularity full --micro-batch-size 8",
    "--precision bf16 --micro-batch-size 4 --make-vocab-size-divisible-by 20000",
    "--precision fp32 --global-batch-size 6 --hidden-dropout 0.1",
    "--precision fp32 --attention-dropout 0.1",
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
# Two stages of unequal chunks, with 3 micro-batches or 4.
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


def counted_in_turn(rank: int, world_size: int, folder: str, runs: Sequence[str]) -> list[tuple[int, int]]:
    return [counted(rank, world_size, folder, flags) for flags in runs]


@pytest.mark.parametrize(
    ("ranks", "runs", "tolerance"),
    [
        (1, ONE_RANK, 0.06),
        (2, TWO_RANKS, 0.06),
        (2, TWO_STAGES, 0.08),
        pytest.param(2, MORE_STAGES, 0.08, marks=pytest.mark.wide),
    ],
    ids=["one rank", "two ranks", "two stages", "more stages"],
)
def test_what_torch_allocates(folder: Path, ranks: int, runs: Sequence[str], tolerance: float):
    found = (
        run_ranks(counted_in_turn, 2, str(folder), runs) if ranks > 1 else [counted_in_turn(0, 1, str(folder), runs)]
    )
    for rank, of_rank in enumerate(found):
        for flags, (computed, allocated) in zip(runs, of_rank, strict=True):
            said = f"rank {rank} of {flags}: {computed / MB:.1f} / {allocated / MB:.1f} MB"
            assert computed == pytest.approx(allocated, rel=tolerance), said


@pytest.mark.parametrize(
    "flags",
    [
        "--precision bf16 --make-vocab-size-divisible-by 50304",
        pytest.param(
            "--precision fp32 --recompute-granularity full --micro-batch-size 8 --use-distributed-optimizer "
            "--nproc-per-node 2",
            marks=pytest.mark.wide,
        ),
    ],
)
def test_what_a_process_has_resident(tmp_path: Path, flags: str):
    """Of the training program, as its own log says it; freed blocks go back to the system. `benchmarks/memory.py` has
    larger shapes, and all layouts."""
    (tmp_path / "text.txt").write_text("any text: nothing of it changes what is held. " * 4000)
    command = (
        "-m megatron.pretrain_gpt2 --num-layers 2 --hidden-size 256 --num-attention-heads 4 --seq-length 256 "
        "--max-position-embeddings 1024 --tokenizer-type bytes --device cpu --attention-dropout 0 --hidden-dropout 0 "
        f"--train-iters 2 --log-interval 2 --eval-iters 0 --train-data {tmp_path}/text.txt --data-cache-path {tmp_path} "
        f"--save {tmp_path}/save {flags}"
    )
    threshold = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144"}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    ran = subprocess.run(
        [sys.executable, *command.split()],
        env={**environment, **threshold, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=300,
    )
    found = re.search(r"expected at the peak: ([\d.,]+).*peak resident: ([\d.,]+)", ran.stdout)
    assert found, ran.stdout
    computed, measured = (float(number.replace(",", "")) for number in found.groups())
    assert computed / measured == pytest.approx(1, abs=0.1)


def test_offers_fit_and_come_by_their_cost():
    setting = on_gpu("--model 1.5b", ranks=8)
    budget = 20 * 2**30
    assert expected(setting).total > budget
    offers = cheapest(setting, budget, 3)
    assert len(offers) == 3 and [o.cost for o in offers] == sorted(o.cost for o in offers)
    together = setting.config.train.micro_batch_size * 8
    for offer in offers:
        assert offer.memory.total <= budget and offer.flags
        # The flags, added to the command line, make just this run.
        again = on_gpu(f"--model 1.5b {' '.join(offer.flags)}", ranks=8)
        assert expected(again) == offer.memory
        assert again.micro_batches * again.config.train.micro_batch_size * again.data_parallel_size == together
    assert min(c.cost for c in layouts(setting) if c.memory.total <= budget) == offers[0].cost


def test_a_pipeline_is_offered_where_it_is_the_cheapest():
    """Heads that cannot be divided, and too little room for a whole model: stages are what is left."""
    flags = "--model 1.5b --micro-batch-size 1 --global-batch-size 64 --use-distributed-optimizer"
    setting, budget = on_gpu(flags, ranks=8), 9 * 2**30
    offers = cheapest(setting, budget, 3)
    assert all(
        "--pipeline-model-parallel-size" in str(offer.flags) or "offload" in str(offer.flags) for offer in offers
    ) and "--pipeline-model-parallel-size" in str(offers[0].flags)
    again = on_gpu(f"{flags} {' '.join(offers[0].flags)}", ranks=8)
    assert expected(again) == offers[0].memory == max(of_stages(again), key=lambda memory: memory.total)
    assert bubble(again.config, again.micro_batches) / (1 - bubble(again.config, again.micro_batches)) < offers[0].cost


def test_stages_share_what_one_rank_has():
    """With one micro-batch nothing is kept for another one: the sums over stages are those of the whole model, but for
    the second copy of the tied matrix and what is on its way."""
    whole, parts = on_gpu("--model 345m"), on_gpu("--model 345m --pipeline-model-parallel-size 4", ranks=4)
    assert [parts.stage_of(rank) for rank in range(4)] == [0, 1, 2, 3]
    sizes, one = [Sizes(parts, stage) for stage in range(4)], Sizes(whole)
    tied = 50304 * 1024
    assert sum(size.parameters for size in sizes) == one.parameters + tied
    assert sum(chunk.kept for size in sizes for chunk in size.chunks) == one.chunks[0].kept
    # Of many micro-batches 1F1B keeps 4, 3, 2 and 1.
    many = on_gpu("--model 345m --pipeline-model-parallel-size 4 --global-batch-size 512", ranks=4)
    assert many.micro_batches == 64
    for stage in range(4):
        assert max(now.kept[0] for now in situations(many.config, 64, stage)) == 4 - stage - 1
        assert expected(many, stage).moment.endswith(f" of stage {stage}")


@pytest.mark.parametrize("flags", ["", "--pipeline-schedule zero-bubble", "--num-virtual-stages-per-pipeline-rank 2"])
def test_the_bubble_of_many_micro_batches_is_that_of_the_timetable(flags: str):
    made = config(f"--num-layers 8 --pipeline-model-parallel-size 4 {flags}")
    for m in (1, 3, 12, 13, 15, 16, 30):
        schedule = made.schedule(m)
        assert bubble(made, m) == pytest.approx(timetable(schedule, equal_costs(schedule, 1, 1, 1)).bubble), m


def test_the_least_and_the_largest():
    setting = on_gpu("--model 345m")
    budget = 16 * 2**30
    b = largest_micro_batch(setting, budget)

    def needed(size: int) -> int:
        return expected(on_gpu(f"--model 345m --micro-batch-size {size}")).total

    assert needed(b) <= budget < needed(b + 1)
    assert largest_micro_batch(setting, 2**30) == 0
    assert not cheapest(setting, 2**30, 3)
    least = smallest(setting)
    assert {"--cpu-offload-optimizer", "--recompute-granularity full"} <= set(least.flags)
    assert least.memory.on_host > 0


def test_each_means_helps():
    def total(flags: str = "") -> int:
        return expected(on_gpu(f"--model 345m {flags}", ranks=4)).total

    plain, split = total(), total("--model-parallel-size 2")
    assert total("--recompute-granularity full") < total("--recompute-granularity selective") < plain
    assert total("--use-distributed-optimizer") < plain and total("--cpu-offload-optimizer") < plain
    assert split < plain and total("--model-parallel-size 2 --sequence-parallel") < split
    assert total("--attention-backend unfused") > plain
    full = "--recompute-granularity full --model-parallel-size 2 --micro-batch-size 64"
    assert total(f"{full} --checkpoint-in-cpu") < total(f"{full} --partition-activations") < total(full)
    parked = expected(on_gpu(f"--model 345m {full} --checkpoint-in-cpu", ranks=2))
    assert parked.on_host == 24 * 64 * 1024 * 1024 * 2
    assert total("--cpu-offloading-num-layers 12") < plain
    assert expected(on_gpu("--model 345m --async-save")).on_host == 14 * 354_871_296


def test_what_is_no_shortage_is_left_alone():
    assert is_out_of_memory(MemoryError()) and is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert is_out_of_memory(RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(ValueError("can't allocate memory"))


def test_a_machine_shared_by_ranks():
    alone, where = available(torch.device("cpu"))
    shared, by = available(torch.device("cpu"), 4)
    assert shared == alone // 4 and by == f"{where}, shared by 4 ranks"


# The program, with the limit that `ulimit -v` sets, and beside it what the program takes before it does anything:
# addresses of torch's libraries, gigabytes with CUDA's.
LIMITED = """
import re, resource, runpy, megatron.gpt2.commands.pretrain_gpt2
taken = 1024 * int(re.findall(r"VmSize:\\s+(\\d+)", open("/proc/self/status").read())[0])
resource.setrlimit(resource.RLIMIT_AS, (taken + 555 * 2**20,) * 2)
runpy.run_module("megatron.pretrain_gpt2", run_name="__main__", alter_sys=True)
"""


def test_out_of_memory_ends_in_one_line_whose_offer_helps(python: WarmPython, tmp_path: Path):
    """Under `ulimit -v`: the run warns at its start, ends in the line with exit code 2, and runs as that line says."""
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
    assert all(part in line for part in ("activations ", "optimizer ", "weights ", "fixed "))
    assert line.count(" slower)") == 3
    assert "WARNING: about " in run.stdout
    offers = re.findall(r"(--[^;(]+) \(([\d,]+) MB, \d+% slower\)", line)
    least = min(offers, key=lambda offer: int(offer[1].replace(",", "")))[0]
    assert start("second", *least.split()).returncode == 0, least


def planned(capsys: pytest.CaptureFixture[str], flags: str, code: int = 0) -> dict[str, Any]:
    assert main([*flags.split(), "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize(
    ("p", "steady", "peak", "parameters"), [(1, 6785, 11927, 354_871_296), (2, 3447, 6238, 178_100_224)]
)
def test_the_published_run(capsys: pytest.CaptureFixture[str], p: int, steady: int, peak: int, parameters: int):
    """MB after 100 iterations and at the peak: fp16, 8 × 1,024 tokens, activation checkpointing."""
    flags = "--model 345m --recompute-granularity full --accounting megatron-2019 --model-parallel-size"
    found = planned(capsys, f"{flags} {p}")
    of_2019 = found["megatron_2019"]
    assert found["parameters"]["matrices_12lh2"] == 301_989_888
    assert of_2019["matrices_at_20_bytes"] == 6_039_797_760
    assert of_2019["from_step_to_step"] == sum(found["memory"][part] for part in ("weights", "gradients", "optimizer"))
    assert of_2019["from_step_to_step"] == 20 * parameters
    assert of_2019["from_step_to_step"] / MB == pytest.approx(steady, rel=0.02)
    assert found["memory"]["total"] / MB == pytest.approx(peak, rel=0.02)
    assert p > 1 or of_2019["activations_without_recompute"] == 22_951_231_488


def test_the_table_says_what_the_json_says(capsys: pytest.CaptureFixture[str]):
    flags = "--model 1.5b --device cuda --ranks 8 --memory-gb 20"
    found = planned(capsys, flags)
    assert main(flags.split()) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if line.endswith("%")]
    assert len({len(line) for line in rows}) == 1, "the rows line up"
    assert any(line.split()[:2] == ["all", f"{found['memory']['total'] / MB:,.0f}"] for line in rows)
    parts = {key: value for key, value in found["memory"].items() if key not in ("total", "moment", "on_host")}
    assert sum(parts.values()) == found["memory"]["total"] and len(rows) == 1 + sum(size > 0 for size in parts.values())
    fits = found["fits"]
    assert not fits["as_asked"] and len(fits["cheapest"]) == 3
    assert any(line.endswith(fits["cheapest"][0]["flags"]) for line in lines)
    # What is offered fits when it is asked for.
    again = planned(capsys, f"{flags} {fits['cheapest'][0]['flags']}")
    assert again["fits"]["as_asked"] and again["memory"]["total"] == fits["cheapest"][0]["bytes"]


def test_a_row_for_each_stage(capsys: pytest.CaptureFixture[str]):
    flags = "--model 345m --device cuda --pipeline-model-parallel-size 4 --micro-batch-size 4 --global-batch-size 32"
    found = planned(capsys, flags)
    assert main(flags.split()) == 0
    lines = capsys.readouterr().out.splitlines()
    pipeline, memory = found["pipeline"], found["memory"]
    assert found["ranks"] == 4 and found["data_parallel"] == 1
    # 1F1B, all stages alike: (p - 1) / (m + p - 1).
    assert (pipeline["schedule"], pipeline["micro_batches"], pipeline["bubble"]) == ("1f1b", 8, 0.2727)
    assert [stage["layers"] for stage in pipeline["stages"]] == [[[0, 5]], [[6, 11]], [[12, 17]], [[18, 23]]]
    totals = [stage["total"] for stage in pipeline["stages"]]
    assert memory["total"] == max(totals)
    assert memory["moment"] == pipeline["stages"][totals.index(max(totals))]["moment"]
    for number, total in enumerate(totals):
        assert any(line.split()[:1] == [str(number)] and line.endswith(f" {total / MB:,.0f}") for line in lines)
    assert any("27% of a step idle" in line for line in lines)


def test_nothing_is_allocated(capsys: pytest.CaptureFixture[str]):
    before = resident_memory()["peak resident"]
    found = planned(capsys, "--model 8.3b --model-parallel-size 8 --device cuda --ranks 512")
    assert found["memory"]["total"] > 20 * 2**30
    assert resident_memory()["peak resident"] - before < 50 * MB


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--num-layers 0", "--num-layers"),
        ("--memory-gb 0", "--memory-gb"),
        ("--ranks x", "--ranks"),
        ("--ranks 3 --model-parallel-size 2", "--model-parallel-size 2"),
        ("--no-such-flag", "--no-such-flag"),
        ("--accounting megatron-2019 --memory-gb 8", "--accounting"),
    ],
)
def test_bad_flags_end_in_one_line(capsys: pytest.CaptureFixture[str], flags: str, says: str):
    with pytest.raises(SystemExit, match="^2$"):
        program(lambda: main(flags.split()))()
    captured = capsys.readouterr()
    assert not captured.out and captured.err.startswith("error: ") and says in captured.err
    assert captured.err.count("\n") == 1


def test_what_cannot_fit_says_the_least(capsys: pytest.CaptureFixture[str]):
    flags = "--model 1.5b --device cuda --memory-gb 4"
    assert planned(capsys, flags, code=1)["fits"]["cheapest"] == []
    assert main(flags.split()) == 1
    assert "the least is" in capsys.readouterr().out
