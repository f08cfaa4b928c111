"""The bytes that a rank sends in a step of GPT-2 345M on 512 ranks equal the formulas in
docs/explanation/parallelism.md. `trace_step` computes one rank at a time, without communication.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from megatron.gpt2.config import Config
from megatron.gpt2.config.arguments import parse
from megatron.gpt2.extensions.plan.process_group import Wait
from megatron.gpt2.extensions.plan.trace import Communication, trace_step

PAGE = Path(__file__).parents[4] / "docs" / "explanation" / "parallelism.md"
T, P, D, M, B = 8, 8, 8, 3, 2  # sizes of the groups, micro-batches per step, micro-batch size
MODEL = (
    "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024 "
    f"--attention-dropout 0 --hidden-dropout 0 --micro-batch-size {B} --global-batch-size {M * B * D} "
    f"--tensor-model-parallel-size {T} --pipeline-model-parallel-size {P}"
)
LAYOUTS = {
    "plain": "--precision bf16",
    "sequence, zero-bubble": "--precision fp32 --sequence-parallel --pipeline-schedule zero-bubble",
    "sequence, sharded, interleaved": (
        "--precision bf16 --sequence-parallel --use-distributed-optimizer --num-layers-per-virtual-pipeline-stage 1"
    ),
}
STAGES = {"first": 0, "middle": 1, "last": P - 1}


class BytesRow(NamedTuple):
    """A row of the page's tables: formulas for the bytes without and with --sequence-parallel or a sharded
    optimizer."""

    group: str
    rank: str
    without: str
    with_flag: str


def config_of(flags: str) -> Config:
    config = parse(f"{MODEL} {flags}".split()).config
    return replace(config, model=replace(config.model, vocab_size=50257))


def bytes_of_a_step(config: Config, stage: int, replica: int) -> dict[str, float]:
    """Return the bytes that a rank sends in a training step, by group, if collectives use rings. The rank is the first
    rank of a tensor-parallel group."""
    dtype = torch.float32 if config.train.precision == "fp32" else torch.bfloat16
    rank = (stage * D + replica) * T
    whole = range(replica * T, T * P * D, T * D)  # the first rank of each stage
    groups = {
        "tensor": range(rank, rank + T),
        "pipeline": whole,
        "data": range(stage * D * T, (stage + 1) * D * T, T),
        "embedding": (whole[0], whole[-1]),
        "model": sorted(first + number for first in whole for number in range(T)),
        "all ranks": range(T * P * D),
    }
    names = {tuple(ranks): name for name, ranks in groups.items()}
    sent: defaultdict[str, float] = defaultdict(float)
    pending = dict[int, str]()
    for event in trace_step(config, rank=rank, world_size=T * P * D, device="cuda", dtype=dtype).events:
        if isinstance(event, Wait):
            del pending[event.number]  # A second wait for the same call raises KeyError.
        if isinstance(event, Communication):
            pending[event.number] = event.name
            if event.name in ("send", "recv"):
                sent["pipeline"] += event.size * (event.name == "send")
                continue
            in_a_ring = (len(event.ranks) - 1) / len(event.ranks)
            sent[names[event.ranks]] += event.size * in_a_ring * (2 if event.name == "all_reduce" else 1)
    # Only the next step waits for the all-gathers of the parameters.
    assert set(pending.values()) == ({"all_gather"} if config.parallel.use_distributed_optimizer else set())
    return dict(sent)


def rows_of_page() -> list[BytesRow]:
    """Return the rows of both tables of docs/explanation/parallelism.md."""
    section = PAGE.read_text(encoding="utf-8").partition("\n## Bytes sent in a step\n")[2].partition("\n## ")[0]
    lines = [line.strip("|").split("|") for line in section.splitlines() if "| `" in line]
    return [
        BytesRow(*(cell.partition(";")[0].strip(" `") for cell in (group, rank, without, with_flag)))
        for group, rank, _, without, with_flag in lines
    ]


def formula_values(config: Config, stage: int, replica: int) -> dict[str, float]:
    """Return the values of the letters in the page's formulas for one rank, without reading the model or its
    buffers."""
    h, s, layers, padded = 1024, 1024, 24 // P, 50304
    partial = 6 * h * layers + (s * h if stage == 0 else 0) + (2 * h if stage == P - 1 else 0)
    others = layers * 7 * h // T  # split biases, which share the last bucket with partial gradients
    matrices, tied = layers * 12 * h * h // T, padded * h // T if stage in (0, P - 1) else 0
    parameters = matrices + tied + others + partial
    bucket = others + partial + (0 if tied else matrices)  # The tied matrix separates two buckets.
    whole = math.ceil(bucket / (64 * D)) * 64 * D
    padding = whole - bucket
    partial += padding
    if config.parallel.use_distributed_optimizer:  # Partial gradients are at the end of the bucket.
        share = whole // D
        partial = max(0, min(share, partial - (D - 1 - replica) * share))
    e = 4 if config.train.precision == "fp32" else 2
    return {
        "t": T,
        "p": P,
        "d": D,
        "v": config.num_model_chunks,
        "m": M,
        "l": layers,
        "b": B,
        "s": s,
        "h": h,
        "V": padded,
        "e": e,
        "n": B * s * h * e,
        "P": parameters + padding,
        "R": partial,
    }


def documented_bytes(config: Config, stage: int, replica: int) -> dict[str, float]:
    """Return the bytes that the page's formulas give, by group."""
    values = formula_values(config, stage, replica)
    total: defaultdict[str, float] = defaultdict(float)
    ranks = {"every", *(name for name, place in STAGES.items() if place == stage)}
    sharded = config.parallel.use_distributed_optimizer
    for group, rank, without, with_flag in rows_of_page():
        if set(re.findall(r"\w+", rank)) & ranks:
            has_flag = config.parallel.sequence_parallel if group in ("tensor", "pipeline") else sharded
            formula = (with_flag if has_flag else without).replace("·", "*").replace("−", "-")
            total["all ranks" if group == "model" and sharded else group] += eval(formula, {}, values)
    return {group: size for group, size in total.items() if size}


@pytest.mark.parametrize(
    "layout, rank",
    [
        *((layout, rank) for layout in ("plain", "sequence, sharded, interleaved") for rank in STAGES),
        ("sequence, zero-bubble", "first"),
    ],
)
def test_a_step_sends_the_documented_bytes(layout: str, rank: str):
    config, stage, replica = config_of(LAYOUTS[layout]), STAGES[rank], D - 1
    counted = bytes_of_a_step(config, stage, replica)
    assert counted == pytest.approx(documented_bytes(config, stage, replica), rel=1e-12)
    assert set(counted) >= {"tensor", "pipeline", "data"}
