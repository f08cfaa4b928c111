"""Run one arm of the training benchmark in a separate process, which `benchmarks/train.py` starts:

    python benchmarks/train_worker.py SPEC.json RESULT.json     # SPEC: {"task": ..., "problem": ..., "arm": ..., ...}

Our arm is the training program itself, built from flags. The timed function is
`megatron.gpt2.train.train_step.train_step`. Each peer gets a complete training step: batch, zero_grad, forward,
backward, clip at 1.0, AdamW. All arms read the same samples in the same order with the same loader. Legend: b
micro-batch, s sequence, h hidden, v vocabulary.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # The project need not be installed.

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mpu
from benchmarks import other_libraries
from benchmarks.harness import call_seconds
from benchmarks.workload import BETAS, CLIP_GRAD, LR, SEED, WEIGHT_DECAY, Arm, Workload
from data_utils import (
    BatchLoader,
    BatchSchedule,
    BlendedDataset,
    GPT2Dataset,
    SampleOrder,
    Tokenizer,
    build_splits,
)
from megatron.gpt2.config import ModelConfig
from megatron.gpt2.config.arguments import parse
from megatron.gpt2.device import PRECISION_DTYPES, set_allocator, set_threads
from megatron.gpt2.dist.ranks import RankInfo
from megatron.gpt2.extensions.plan.hook import MemoryPlan
from megatron.gpt2.model.gpt2 import GPT2Model, TransformerBlockConfig, count_parameters
from megatron.gpt2.train.setup import build_context
from megatron.gpt2.train.train_step import train_step
from megatron.gpt2.train.trainer import Trainer, build_trainer


@dataclass(frozen=True)
class TimedStep:
    """A training step to time.

    step: one complete update.
    read: waits for the device and returns the mean loss since the last read, and the last gradient norm.
    computes: a description for the report.
    """

    step: Callable[[], None]
    read: Callable[[], tuple[float, float]]
    computes: str
    padding_nats: float = 0.0  # nats that the vocabulary's padding rows add to an untrained loss
    close: Callable[[], None] = lambda: None
    expected_peak: int | None = None  # the bytes that the memory planner expects


class SyntheticTokenizer(Tokenizer):
    """A tokenizer without text, for synthetic tokens. With GPT-2's vocabulary, about one of 115 tokens of
    `Workload.write_tokens` is 9, its id of the end of a document."""

    def __init__(self, size: int) -> None:
        super().__init__("synthetic", [b""] * size, 9, f"synthetic {size}", {})

    def encode_utf8(self, data: bytes) -> np.ndarray | list[int]:
        raise ValueError("the benchmark's vocabulary has no text")


def build_dataset(workload: Workload) -> GPT2Dataset | BlendedDataset:
    """Build the data set that all arms use."""
    return build_splits(
        train_data=(),
        data_path=[workload.tokens],
        split="1",
        need_valid=False,
        need_test=False,
        tokenizer=SyntheticTokenizer(workload.vocab_size),
        seq_length=workload.seq_length,
        log=print,
    ).train


def build_loader(workload: Workload) -> BatchLoader:
    """Build the loader of the other programs. The loader yields our program's samples in our order, int64 [accumulation
    · b, s + 1]."""

    def finish(batch: np.ndarray, sample_ids: np.ndarray) -> Tensor:
        host = torch.from_numpy(batch)
        return host.pin_memory() if workload.device == "cuda" else host

    data = build_dataset(workload)
    return BatchLoader(
        data,
        SampleOrder(len(data), SEED),
        micro_batch_size=workload.micro_batch_size,
        schedule=BatchSchedule.constant(workload.micro_batch_size * workload.accumulation),
        data_parallel_rank=0,
        data_parallel_size=1,
        collate_fn=finish,
    )


def our_flags(workload: Workload, arm: Arm) -> list[str]:
    """Return the command line of our program, for one data-parallel rank."""
    flags = f"""
        --num-layers {workload.num_layers} --hidden-size {workload.hidden_size} --gelu erf
        --num-attention-heads {workload.num_attention_heads} --seq-length {workload.seq_length}
        --max-position-embeddings {workload.seq_length} --attention-dropout {workload.dropout}
        --hidden-dropout {workload.dropout} --micro-batch-size {workload.micro_batch_size}
        --global-batch-size {workload.micro_batch_size * workload.accumulation} --lr {LR} --lr-decay-style constant
        --warmup 0 --weight-decay {WEIGHT_DECAY} --adam-beta1 {BETAS[0]} --adam-beta2 {BETAS[1]} --clip-grad {CLIP_GRAD}
        --seed {SEED} --train-iters 1000000 --eval-iters 0 --split 1 --tokenizer-type bytes --device {workload.device}
        --data-path {workload.scratch}/bytes --save {workload.scratch}/save --precision {arm.precision}
        --tensor-model-parallel-size {arm.ranks}"""
    return [*flags.split(), *["--compile"] * arm.compiled, *arm.flags]


def build_our_trainer(workload: Workload, arm: Arm, rank_info: RankInfo | None = None) -> Trainer:
    """Build the trainer from the command line, like the program. GPT-2's vocabulary needs files that may be missing.
    The run is therefore prepared with a small data set of bytes. After that, tokenizer, vocabulary size and data are
    replaced.

    rank_info: the rank of this process (default: the first rank of the arm).
    """
    context = build_context(parse(our_flags(workload, arm)), rank_info or RankInfo(0, arm.ranks, 0, 1), print)
    model = dataclasses.replace(context.config.model, vocab_size=workload.vocab_size)
    changed: dict[str, Any] = {
        "config": dataclasses.replace(context.config, model=model),
        "tokenizer": SyntheticTokenizer(workload.vocab_size),
        "splits": dataclasses.replace(context.splits, train=build_dataset(workload)),
    }
    trainer = build_trainer(dataclasses.replace(context, **changed), print)
    if arm.compiled and workload.compiler != "inductor":
        trainer.state.model.compile_layers(workload.compiler, by_document=trainer.config.data.reset_attention_mask)
    trainer.state.model.train()
    return trainer


def build_ours(workload: Workload, arm: Arm, rank_info: RankInfo | None = None) -> TimedStep:
    """Build our training step."""
    trainer = build_our_trainer(workload, arm, rank_info)
    steps = 0

    def step() -> None:
        nonlocal steps
        train_step(trainer)
        trainer.progress.iteration += 1
        trainer.progress.consumed_samples += trainer.current_global_batch_size
        steps += 1

    def read() -> tuple[float, float]:
        nonlocal steps
        assert int(trainer.state.optimizer.skipped_steps) == 0, "a step was skipped: its gradient was not finite"
        loss, norm = trainer.progress.loss_sum.item() / max(steps, 1), trainer.state.optimizer.grad_norm.item()
        trainer.progress.loss_sum.zero_()
        steps = 0
        return loss, norm

    model = trainer.state.model
    rows = model.word_embeddings.weight.size(0) * trainer.parallel.tensor_model_parallel_size
    dtype = str(trainer.context.dtype).removeprefix("torch.")
    computes = (
        f"loss over {model.vocab_size} words, {rows} rows multiplied; weights and activations {dtype}, fp32 masters "
        "and gradients, fused AdamW"
    )
    return TimedStep(
        step,
        read,
        computes,
        close=trainer.close,
        expected_peak=MemoryPlan(trainer.config).expected_memory(trainer).peak,
    )


def build_one_rank(workload: Workload, arm: Arm) -> TimedStep:
    """Build only the first of `arm.ranks` tensor-parallel ranks. Collectives do nothing. The values of the rank are
    therefore meaningless, but the rank computes as much as a rank of a real run."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=arm.ranks, store=FakeStore())
    # StopSignal uses gloo, which would wait for the other ranks.
    with (
        mock.patch("megatron.gpt2.train.train_state.GPT2Model", build_random_model),
        mock.patch("megatron.gpt2.train.trainer.StopSignal"),
    ):
        return build_ours(workload, arm)


def build_random_model(config: ModelConfig, block_config: TransformerBlockConfig, **kwargs: Any) -> GPT2Model:
    """Build `GPT2Model` with random weights that are drawn on the device, which is faster than on the host."""
    model = GPT2Model(config, dataclasses.replace(block_config, device="meta"), **kwargs)
    marks = {name: vars(parameter) for name, parameter in model.named_parameters()}
    model.to_empty(device=block_config.device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            vars(parameter).update(marks[name])  # For example, `model_parallel` marks parameters that are split.
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.02)
            else:
                parameter.fill_(1.0 if name.endswith("layernorm.weight") else 0.0)
    return model


def build_peer_step(workload: Workload, arm: Arm, nanogpt: str) -> TimedStep:
    """Build the training step of a peer: fp32 weights, and autocast and fused AdamW unless `arm.shipped`."""
    device, b, steps = torch.device(workload.device), workload.micro_batch_size, 0
    loader = build_loader(workload)
    mpu.initialize_model_parallel(1)
    model, loss_of, vocab = other_libraries.build_peer(
        arm.kind, workload.model, GPT2Model(workload.model, seed=SEED), nanogpt=nanogpt
    )
    model.to(device).train()
    called: Any = torch.compile(model, backend=workload.compiler) if arm.compiled else model
    optimizer = other_libraries.adamw(model, arm.shipped)
    total, norm = torch.zeros((), device=device), torch.zeros((), device=device)

    def step() -> None:
        nonlocal norm, steps
        tokens = next(loader).to(device, non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        for part in tokens.split(b):
            with torch.autocast(device.type, PRECISION_DTYPES["bf16"], enabled=arm.precision == "bf16"):
                loss = loss_of(called, part[:, :-1], part[:, 1:]) / workload.accumulation
            loss.backward()
            total.add_(loss.detach())
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP_GRAD)
        optimizer.step()
        steps += 1

    def read() -> tuple[float, float]:
        nonlocal steps
        loss = total.item() / max(steps, 1)
        total.zero_()
        steps = 0
        return loss, norm.item()

    precision = "fp32 throughout" if arm.precision == "fp32" else "fp32 weights, bf16 by torch.autocast"
    computes = (
        f"loss over {vocab} words, as many rows multiplied; {precision}, AdamW {'shipped' if arm.shipped else 'fused'}"
    )
    return TimedStep(step, read, computes, math.log(vocab / workload.vocab_size), loader.close)


def measure_arm(workload: Workload, arm: Arm, *, nanogpt: str, warmup: int, steps: int) -> dict[str, Any]:
    """Return the seconds of every timed step, the first loss and gradient norm, and the peak memory in bytes."""
    device = torch.device(workload.device)
    if arm.kind in ("ours", "rank"):
        training = (build_ours if arm.kind == "ours" else build_one_rank)(workload, arm)
    else:
        training = build_peer_step(workload, arm, nanogpt)
    built = time.perf_counter()
    training.step()
    first = training.read()
    first_step = time.perf_counter() - built
    for _ in range(warmup):
        training.step()
    second = training.read()
    seconds = call_seconds(training.step, device, steps)
    last = training.read()
    assert all(map(math.isfinite, (*first, *second, *last))), "a loss or gradient norm is not finite"
    if device.type == "cuda":
        names = {
            "peak_allocated": "max_memory_allocated",
            "allocated": "memory_allocated",
            "peak_reserved": "max_memory_reserved",
        }
        memory = {name: getattr(torch.cuda, function)(device) for name, function in names.items()}
    else:
        memory = {"peak_resident": peak_resident()}
    training.close()
    return {
        "step_s": seconds,
        "first_step_s": first_step,
        "loss": first[0],
        "grad_norm": first[1],
        "last_loss": last[0],
        "tokens_per_step": workload.micro_batch_size * workload.accumulation * workload.seq_length,
        "flops_per_token": workload.model.flops_per_token(workload.seq_length) // arm.ranks,
        "parameters": count_parameters(workload.model, arm.ranks)[1],
        "memory_bytes": memory,
        "expected_peak_bytes": training.expected_peak,
        "computes": training.computes,
        "padding_nats": training.padding_nats,
    }


def peak_resident() -> int | None:
    """Return the peak resident memory of this process in bytes (VmHWM), or None without /proc."""
    try:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return None
    return int(line.split()[1]) * 1024


def linear_shapes(h: int, padded_vocab_size: int) -> dict[str, tuple[int, int]]:
    """Return the [out, in] shapes of the linears of a layer and of the head."""
    layer = {"query_key_value": (3 * h, h), "dense": (h, h), "h_to_4h": (4 * h, h), "4h_to_h": (h, 4 * h)}
    return {**layer, "head": (padded_vocab_size, h)}


@torch.no_grad()
def measure_ceiling(workload: Workload, precision: str, seconds: float) -> dict[str, Any]:
    """Measure the peak FLOP/s of a CPU for MFU, because datasheets do not give this peak.

    The ceiling is the FLOP-weighted mean speed of the model's matrix products: forward, input gradient and weight
    gradient of each linear layer and of the head. Each product is repeated for `seconds`, and its shortest time counts.
    """
    dtype, m = PRECISION_DTYPES[precision], workload.micro_batch_size * workload.seq_length
    padded = mpu.padded_vocab_size(workload.vocab_size, workload.model.make_vocab_size_divisible_by, 1)
    flops = total = 0.0
    for name, (n, k) in linear_shapes(workload.hidden_size, padded).items():
        x, w, g = (torch.randn(*shape).to(dtype) for shape in ((m, k), (n, k), (m, n)))
        products = (partial(F.linear, x, w), partial(torch.mm, g, w), partial(torch.mm, g.t(), x))
        took = sum(fastest_call(product, seconds) for product in products)
        count = 1 if name == "head" else workload.num_layers
        flops += 6.0 * m * n * k * count
        total += took * count
    return {"flops_per_s": flops / total, "precision": precision, "threads": torch.get_num_threads()}


def fastest_call(product: Callable[[], Any], seconds: float) -> float:
    """Return the shortest time of a call in seconds, over at least five calls."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 6 or time.perf_counter() < end:
        start = time.perf_counter()
        product()
        times.append(time.perf_counter() - start)
    return min(times)


def run_task(spec: dict[str, Any]) -> dict[str, Any]:
    """Run the task of a SPEC and return its result."""
    arm, workload = Arm(**spec["arm"]), Workload(**spec["problem"])
    workload = dataclasses.replace(workload, **arm.changes)
    if not arm.shipped:
        set_allocator(torch.device(workload.device))
    set_threads(RankInfo())
    if spec["task"] == "ceiling":
        return measure_ceiling(workload, arm.precision, spec["seconds"])
    if spec["task"] == "gate":
        return other_libraries.compare_with_peer(workload.model, workload.device, spec["kind"], nanogpt=spec["nanogpt"])
    return measure_arm(workload, arm, nanogpt=spec["nanogpt"], warmup=spec["warmup"], steps=spec["steps"])


def main(argv: Sequence[str]) -> None:
    Path(argv[1]).write_text(json.dumps(run_task(json.loads(Path(argv[0]).read_text()))))


if __name__ == "__main__":
    main(sys.argv[1:])
