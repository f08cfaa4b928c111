"""The bytes that a rank sends in a step of GPT-2 345M on 512 ranks equal the formulas in
docs/explanation/parallelism.md.

One process runs one rank after the other. torch's fake process group sends nothing, and tensors have only shapes.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import mpu
from data_utils import BatchSchedule
from megatron.gpt2.config import Config
from megatron.gpt2.config.arguments import parse
from megatron.gpt2.monitor.timers import Timers
from megatron.gpt2.train.forward_backward import ForwardBackward
from megatron.gpt2.train.train_state import build_train_state

PAGE = Path(__file__).parents[4] / "docs" / "explanation" / "parallelism.md"
T, P, D, M, B = 8, 4, 16, 3, 2  # sizes of the groups, micro-batches per step, micro-batch size
MODEL = [
    *(
        "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 "
        "--max-position-embeddings 1024 --micro-batch-size"
    ).split(),
    str(B),
    *"--train-data none --train-iters 1 --tensor-model-parallel-size".split(),
    str(T),
    "--pipeline-model-parallel-size",
    str(P),
]
META = torch.device("meta")
LAYOUTS = {
    "plain": ["--precision", "bf16"],
    "sequence, zero-bubble": "--precision fp32 --sequence-parallel --pipeline-schedule zero-bubble".split(),
    "sequence, sharded, interleaved": (
        "--precision bf16 --sequence-parallel --use-distributed-optimizer --num-layers-per-virtual-pipeline-stage 3"
    ).split(),
}
STAGES = {"first": 0, "middle": 1, "last": P - 1}


class BytesRow(NamedTuple):
    """A row of the page's tables: the bytes without and with the flag."""

    group: str
    rank: str
    without: str
    with_flag: str


class BytesSent(TorchDispatchMode):
    """Counts the bytes that this rank sends, by group, if collectives use rings."""

    def __init__(self, parallel: mpu.ParallelState) -> None:
        super().__init__()
        self.sent: defaultdict[str, float] = defaultdict(float)
        groups = {
            "tensor": parallel.tensor_model_parallel_group,
            "pipeline": parallel.pipeline_model_parallel_group,
            "data": parallel.data_parallel_group,
            "embedding": parallel.embedding_group,
            "model": parallel.model_parallel_group,
            "all ranks": dist.group.WORLD,
        }
        self._names = {
            frozenset(dist.get_process_group_ranks(group)): name for name, group in groups.items() if group is not None
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition("::")[2].partition(".")[0].strip("_")
        if name == "fused_adamw":
            return None  # it works in place and has no meta kernel
        if func.namespace == "c10d":
            group = next(dist.ProcessGroup.unbox(x) for x in args if isinstance(x, torch.ScriptObject))
            whole = args[1] if name == "reduce_scatter_base" else args[0]
            size = sum(x.numel() * x.element_size() for x in tree_leaves(whole) if isinstance(x, torch.Tensor))
            in_a_ring = (group.size() - 1) / group.size()
            times = {
                "allreduce": 2 * in_a_ring,
                "allgather": in_a_ring,
                "allgather_base": in_a_ring,
                "reduce_scatter_base": in_a_ring,
                "alltoall_base": in_a_ring,
                "send": 1.0,
                "recv": 0.0,
            }[name]
            self.sent[self._names[frozenset(dist.get_process_group_ranks(group))]] += times * size
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def fake_groups(stage: int, replica: int) -> Iterator[mpu.ParallelState]:
    """Create the groups of one of 512 ranks, which is the first rank of its tensor-parallel group."""
    dist.init_process_group(
        "cpu:fake,meta:fake", rank=(stage * D + replica) * T, world_size=T * P * D, store=FakeStore()
    )
    try:
        yield mpu.initialize_model_parallel(T, P)
    finally:
        mpu.destroy_model_parallel()
        dist.destroy_process_group()


def config_of(flags: Sequence[str]) -> Config:
    config = parse([*MODEL, *"--attention-dropout 0 --hidden-dropout 0".split(), *flags]).config
    return replace(config, model=replace(config.model, vocab_size=50257))


def bytes_of_a_step(config: Config, parallel: mpu.ParallelState) -> dict[str, float]:
    """Return the bytes that this rank sends in a training step, by group."""
    dtype = torch.float32 if config.train.precision == "fp32" else torch.bfloat16
    context: Any = SimpleNamespace(
        config=config,
        device=META,
        dtype=dtype,
        train_iters=1,
        decay_iters=1,
        hooks=(),
        batch_schedule=BatchSchedule.constant(1),
        global_batch_size=1,
    )
    state = build_train_state(context, parallel, lambda line: None)
    state.model.train()
    run_schedule = ForwardBackward(config.pipeline_schedule, state, parallel, Timers(torch.device("cpu")))
    tokens = torch.zeros(B, 1024, dtype=torch.int64, device=META)
    micro_batch = {"tokens": tokens, "labels": tokens, "token_weight": tokens.float()}
    with BytesSent(parallel) as counted:
        run_schedule([micro_batch] * M)
        state.reducer.finish()
        state.optimizer.step()
    return dict(counted.sent)


def rows_of_page() -> list[BytesRow]:
    """Return the rows of both tables of the page."""
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
    bucket = others + partial + (0 if tied else matrices)  # the tied matrix separates two buckets
    whole = math.ceil(bucket / (64 * D)) * 64 * D
    padding = whole - bucket
    partial += padding
    if config.parallel.use_distributed_optimizer:  # partial gradients are at the end of the bucket
        share = whole // D
        partial = max(0, min(share, partial - (D - 1 - replica) * share))
    e = 4 if config.train.precision == "fp32" else 2
    return {
        "t": T,
        "p": P,
        "d": D,
        "v": config.virtual_stages,
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
    ("layout", "rank"),
    [
        *((layout, rank) for layout in ("plain", "sequence, sharded, interleaved") for rank in STAGES),
        ("sequence, zero-bubble", "first"),
    ],
)
def test_a_step_sends_the_documented_bytes(layout: str, rank: str):
    config, stage, replica = config_of(LAYOUTS[layout]), STAGES[rank], D - 1
    with fake_groups(stage, replica) as parallel:
        counted = bytes_of_a_step(config, parallel)
    assert counted == pytest.approx(documented_bytes(config, stage, replica), rel=1e-12)
    assert set(counted) >= {"tensor", "pipeline", "data"}


def test_every_row_is_of_a_group_and_a_rank():
    rows = rows_of_page()
    assert {row.group for row in rows} == {"tensor", "pipeline", "data", "embedding", "model"} and len(rows) == 11
    assert {row.rank for row in rows} == {"every", "first", "middle", "last", "first, last"}
