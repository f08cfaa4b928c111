"""One arm of the training benchmark, run alone in a process of its own: `benchmarks/train.py` starts them.

    python benchmarks/arms.py SPEC.json RESULT.json     # SPEC: {"task": ..., "problem": ..., "arm": ..., ...}

Ours is the program that a user runs: flags through `parse`, `prepare_run` and `build_run`, and the timed function is
`megatron.gpt2.train.train_step.train_step`. Each peer gets a complete step of its own: batch, zero_grad, forward,
backward, clip at 1.0, AdamW. All arms read the same samples, in the same order, through the same loader.
Legend: b micro-batch, s sequence, h hidden, v vocabulary.
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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works in a clone that is not installed

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mpu
from benchmarks import peers
from benchmarks.harness import call_seconds
from benchmarks.problem import BETAS, CLIP_GRAD, LR, SEED, WEIGHT_DECAY, Arm, Problem, flops_by_llm_c
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
from megatron.gpt2.device import DTYPES, set_allocator, set_threads
from megatron.gpt2.dist.ranks import Ranks
from megatron.gpt2.extensions.plan.hook import MemoryPlan
from megatron.gpt2.model.gpt2 import GPT2Model, count_parameters
from megatron.gpt2.train.run import Run, build_run
from megatron.gpt2.train.setup import prepare_run
from megatron.gpt2.train.train_step import train_step


@dataclass(frozen=True)
class Trainer:
    """step: one whole update. read: mean loss since the last read, and the last gradient norm; waits for the device."""

    step: Callable[[], None]
    read: Callable[[], tuple[float, float]]
    computes: str
    padding_nats: float = 0.0  # what rows beyond the vocabulary add to the loss of a model that knows nothing
    close: Callable[[], None] = lambda: None
    expected_peak: int | None = None  # bytes, by our memory planner


class Vocabulary(Tokenizer):
    """Stands in for a tokenizer if the text is tokens already: a size, and nothing to encode with. The id that ends a
    document, 9, is one of 115 tokens of `Problem.write_tokens` at GPT-2's size."""

    def __init__(self, size: int) -> None:
        super().__init__("synthetic", [b""] * size, 9, f"synthetic {size}", {})

    def encode(self, text: str) -> np.ndarray | list[int]:
        raise ValueError("the benchmark's vocabulary has no text")


def dataset(problem: Problem) -> GPT2Dataset | BlendedDataset:
    """The samples of all arms."""
    return build_splits(
        train_data=(),
        data_path=[problem.tokens],
        split="1",
        need_valid=False,
        need_test=False,
        tokenizer=Vocabulary(problem.vocab_size),
        seq_length=problem.seq_length,
        log=print,
    ).train


def batches(problem: Problem) -> BatchLoader:
    """The samples that our program takes, in its order, as tensors [accumulation · b, s + 1], prepared by a thread."""

    def finish(batch: np.ndarray, samples: np.ndarray) -> Tensor:
        host = torch.from_numpy(batch)
        return host.pin_memory() if problem.device == "cuda" else host

    data = dataset(problem)
    return BatchLoader(
        data,
        SampleOrder(len(data), SEED),
        micro_batch_size=problem.micro_batch_size,
        schedule=BatchSchedule.constant(problem.micro_batch_size * problem.accumulation),
        data_parallel_rank=0,
        data_parallel_size=1,
        finish=finish,
    )


def our_flags(problem: Problem, arm: Arm) -> list[str]:
    """The command line of our program for this problem. The global batch is that of one data-parallel rank."""
    flags = f"""
        --num-layers {problem.num_layers} --hidden-size {problem.hidden_size} --gelu {problem.gelu}
        --num-attention-heads {problem.num_attention_heads} --seq-length {problem.seq_length}
        --max-position-embeddings {problem.seq_length} --attention-dropout {problem.dropout}
        --hidden-dropout {problem.dropout} --micro-batch-size {problem.micro_batch_size}
        --global-batch-size {problem.micro_batch_size * problem.accumulation} --lr {LR} --lr-decay-style constant
        --warmup 0 --weight-decay {WEIGHT_DECAY} --adam-beta1 {BETAS[0]} --adam-beta2 {BETAS[1]} --clip-grad {CLIP_GRAD}
        --seed {SEED} --train-iters 1000000 --eval-iters 0 --split 1 --tokenizer-type bytes --device {problem.device}
        --data-path {problem.scratch}/bytes --save {problem.scratch}/save --precision {arm.precision}
        --model-parallel-size {arm.ranks}"""
    return [*flags.split(), *["--compile"] * arm.compiled, *arm.flags]


def our_run(problem: Problem, arm: Arm, ranks: Ranks | None = None) -> Run:
    """The run of the command line, as the program builds it, but for the vocabulary: GPT-2's needs files that may be
    absent, so the run is prepared for a small pair of bytes, and tokenizer, vocabulary size and data are put in
    afterwards. ranks: of this process (default: the first of the arm's)."""
    prepared = prepare_run(parse(our_flags(problem, arm)), ranks or Ranks(0, arm.ranks, 0, 1), print)
    model = dataclasses.replace(prepared.config.model, vocab_size=problem.vocab_size)
    changed: dict[str, Any] = {
        "config": dataclasses.replace(prepared.config, model=model),
        "tokenizer": Vocabulary(problem.vocab_size),
        "splits": dataclasses.replace(prepared.splits, train=dataset(problem)),
    }
    run = build_run(dataclasses.replace(prepared, **changed), print)
    if arm.compiled and problem.compiler != "inductor":
        run.engine.model.compile_layers(problem.compiler, by_document=run.config.data.reset_attention_mask)
    run.engine.model.train()
    return run


def close(run: Run) -> None:
    """End its threads and files."""
    run.data.loader.close()
    run.stop.close()
    run.close()


def ours(problem: Problem, arm: Arm, ranks: Ranks | None = None) -> Trainer:
    """Our training step."""
    run = our_run(problem, arm, ranks)
    steps = 0

    def step() -> None:
        nonlocal steps
        train_step(run)
        run.progress.iteration += 1
        run.progress.consumed_samples += run.samples_of_step
        steps += 1

    def read() -> tuple[float, float]:
        nonlocal steps
        assert int(run.engine.optimizer.skipped_steps) == 0, "a step was skipped: its gradient was not finite"
        loss, norm = run.progress.loss_sum.item() / max(steps, 1), run.engine.optimizer.grad_norm.item()
        run.progress.loss_sum.zero_()
        steps = 0
        return loss, norm

    model = run.engine.model
    rows = model.word_embeddings.weight.size(0) * run.parallel.tensor_model_parallel_size
    kept = str(run.prepared.dtype).removeprefix("torch.")
    computes = (
        f"loss over {model.vocab_size} words, {rows} rows multiplied; weights and activations {kept}, fp32 masters and "
        "gradients, fused AdamW"
    )
    return Trainer(
        step, read, computes, close=lambda: close(run), expected_peak=MemoryPlan(run.config).expected_memory(run)
    )


def one_rank(problem: Problem, arm: Arm) -> Trainer:
    """The first of `arm.ranks` model-parallel ranks, alone: its collectives move nothing and wait for nobody, and its
    weights are drawn on the device, not by the layout's rule. The values mean nothing; the arithmetic is a rank's."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=arm.ranks, store=FakeStore())
    # The ranks agree on when to stop over gloo, which needs the others.
    with (
        mock.patch("megatron.gpt2.train.engine.GPT2Model", model_drawn_in_place),
        mock.patch("megatron.gpt2.train.run.StopSignal"),
    ):
        return ours(problem, arm)


def model_drawn_in_place(config: ModelConfig, layer: mpu.TransformerConfig, **kwargs: Any) -> GPT2Model:
    """A model of `GPT2Model`'s arguments whose weights are drawn on the device, in no time."""
    model = GPT2Model(config, dataclasses.replace(layer, device="meta"), **kwargs)
    marks = {name: vars(parameter) for name, parameter in model.named_parameters()}
    model.to_empty(device=layer.device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            vars(parameter).update(marks[name])  # which parameters are split
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.02)
            else:
                parameter.fill_(1.0 if name.endswith("layernorm.weight") else 0.0)
    return model


def peer(problem: Problem, arm: Arm, nanogpt: str) -> Trainer:
    """A training step around another's model: fp32 weights, autocast (unless shipped), fused AdamW (unless shipped)."""
    device, b, steps = torch.device(problem.device), problem.micro_batch_size, 0
    loader = batches(problem)
    mpu.initialize_model_parallel(1)
    model, loss_of, vocab = peers.build(arm.kind, problem.model, GPT2Model(problem.model, seed=SEED), nanogpt=nanogpt)
    model.to(device).train()
    called: Any = torch.compile(model, backend=problem.compiler) if arm.compiled else model
    optimizer = peers.adamw(model, arm.shipped)
    total, norm = torch.zeros((), device=device), torch.zeros((), device=device)

    def step() -> None:
        nonlocal norm, steps
        text = next(loader).to(device, non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        for part in text.split(b):
            with torch.autocast(device.type, DTYPES["bf16"], enabled=arm.precision == "bf16"):
                loss = loss_of(called, part[:, :-1], part[:, 1:]) / problem.accumulation
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

    how = "fp32 throughout" if arm.precision == "fp32" else "fp32 weights, bf16 by torch.autocast"
    computes = f"loss over {vocab} words, as many rows multiplied; {how}, AdamW {'shipped' if arm.shipped else 'fused'}"
    return Trainer(step, read, computes, math.log(vocab / problem.vocab_size), loader.close)


def measure(problem: Problem, arm: Arm, *, nanogpt: str, warmup: int, steps: int) -> dict[str, Any]:
    """Seconds of every timed step, first loss and gradient norm, peak memory in bytes."""
    device = torch.device(problem.device)
    began = time.perf_counter()
    if arm.kind in ("ours", "rank"):
        training = (ours if arm.kind == "ours" else one_rank)(problem, arm)
    else:
        training = peer(problem, arm, nanogpt)
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
        names = {"peak_allocated": "max_memory_allocated", "allocated": "memory_allocated"}
        names["peak_reserved"] = "max_memory_reserved"
        memory = {name: getattr(torch.cuda, function)(device) for name, function in names.items()}
    else:
        memory = {"peak_resident": peak_resident()}
    training.close()
    parameters = count_parameters(problem.model, arm.ranks)[1]
    width = problem.hidden_size // arm.ranks
    return {
        "step_s": seconds,
        "first_step_s": first_step,
        "build_s": built - began,
        "loss": first[0],
        "grad_norm": first[1],
        "last_loss": last[0],
        "tokens_per_step": problem.micro_batch_size * problem.accumulation * problem.seq_length,
        "flops_per_token": problem.model.flops_per_token(problem.seq_length) // arm.ranks,
        "flops_per_token_llm_c": flops_by_llm_c(parameters, problem.num_layers, width, problem.seq_length),
        "parameters": parameters,
        "memory_bytes": memory,
        "expected_peak_bytes": training.expected_peak,
        "computes": training.computes,
        "padding_nats": training.padding_nats,
        "threads": torch.get_num_threads(),
    }


def peak_resident() -> int | None:
    """The most memory that this process ever had resident, in bytes (VmHWM); None if /proc does not say."""
    try:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return None
    return int(line.split()[1]) * 1024


def linear_shapes(h: int, padded_vocab_size: int) -> dict[str, tuple[int, int]]:
    """[out, in] of the linears of a layer, and of the head."""
    layer = {"query_key_value": (3 * h, h), "dense": (h, h), "h_to_4h": (4 * h, h), "4h_to_h": (h, 4 * h)}
    return {**layer, "head": (padded_vocab_size, h)}


@torch.no_grad()
def ceiling(problem: Problem, precision: str, seconds: float) -> dict[str, Any]:
    """The FLOP/s that MFU refers to on a CPU, for which no datasheet gives them: of this model's own matrix products,
    forward, input gradient and weight gradient of each linear and of the head, each at its best of `seconds` of calls,
    weighted by FLOPs."""
    dtype, m = DTYPES[precision], problem.micro_batch_size * problem.seq_length
    padded = mpu.padded_vocab_size(problem.vocab_size, problem.model.make_vocab_size_divisible_by, 1)
    flops = total = 0.0
    for name, (n, k) in linear_shapes(problem.hidden_size, padded).items():
        x, w, g = (torch.randn(*shape).to(dtype) for shape in ((m, k), (n, k), (m, n)))
        products = (partial(F.linear, x, w), partial(torch.mm, g, w), partial(torch.mm, g.t(), x))
        took = sum(fastest(product, seconds) for product in products)
        count = 1 if name == "head" else problem.num_layers
        flops += 6.0 * m * n * k * count
        total += took * count
    return {"flops_per_s": flops / total, "precision": precision, "threads": torch.get_num_threads()}


def fastest(product: Callable[[], Any], seconds: float) -> float:
    """The least time of a call in seconds, over at least five calls."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 6 or time.perf_counter() < end:
        start = time.perf_counter()
        product()
        times.append(time.perf_counter() - start)
    return min(times)


def result_of(spec: dict[str, Any]) -> dict[str, Any]:
    """What a SPEC asks for."""
    arm, problem = Arm(**spec["arm"]), Problem(**spec["problem"])
    problem = dataclasses.replace(problem, **arm.changes)
    if not arm.shipped:
        set_allocator(torch.device(problem.device))
    set_threads(Ranks())
    if spec["task"] == "ceiling":
        return ceiling(problem, arm.precision, spec["seconds"])
    if spec["task"] == "gate":
        return peers.gate(problem.model, problem.device, spec["kind"], nanogpt=spec["nanogpt"])
    return measure(problem, arm, nanogpt=spec["nanogpt"], warmup=spec["warmup"], steps=spec["steps"])


def main(argv: Sequence[str]) -> None:
    Path(argv[1]).write_text(json.dumps(result_of(json.loads(Path(argv[0]).read_text()))))


if __name__ == "__main__":
    main(sys.argv[1:])
