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
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works in a clone that is not installed

import numpy as np
import torch
from torch import Tensor, nn

import mpu
from benchmarks import peers
from benchmarks.ceiling import ceiling
from benchmarks.flops import by_llm_c
from benchmarks.problem import Arm, Problem
from benchmarks.timing import call_seconds
from data_utils import BatchLoader, BatchSchedule, GPT2Dataset, SampleOrder, Tokenizer, build_splits
from data_utils.blending import BlendedDataset
from megatron.gpt2.config import ModelConfig
from megatron.gpt2.config.arguments import parse
from megatron.gpt2.device import DTYPES, set_allocator, set_threads
from megatron.gpt2.dist.ranks import Ranks
from megatron.gpt2.extensions.plan.hook import MemoryPlan
from megatron.gpt2.model.gpt2 import GPT2Model
from megatron.gpt2.model.parameters import count_parameters
from megatron.gpt2.train.run import Run, build_run
from megatron.gpt2.train.setup import PreparedRun, prepare_run
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
    """Stands in for a tokenizer where the text is tokens already: a size, and nothing to encode with. The id that ends
    a document, 9, is one of 115 tokens of `benchmarks.train.write_tokens` at GPT-2's size."""

    def __init__(self, size: int) -> None:
        super().__init__("synthetic", [b""] * size, 9, f"synthetic {size}", {})

    def encode(self, text: str) -> np.ndarray | list[int]:
        raise ValueError("the benchmark's vocabulary has no text")


def dataset(problem: Problem) -> GPT2Dataset | BlendedDataset:
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
        SampleOrder(len(data), problem.seed),
        micro_batch_size=problem.micro_batch_size,
        schedule=BatchSchedule.constant(problem.micro_batch_size * problem.accumulation),
        data_parallel_rank=0,
        data_parallel_size=1,
        finish=finish,
    )


def our_flags(problem: Problem, arm: Arm) -> list[str]:
    """The command line of our program for this problem."""
    values: dict[str, Any] = {
        "num-layers": problem.num_layers,
        "hidden-size": problem.hidden_size,
        "num-attention-heads": problem.num_attention_heads,
        "seq-length": problem.seq_length,
        "max-position-embeddings": problem.seq_length,
        "gelu": problem.gelu,
        "attention-dropout": problem.dropout,
        "hidden-dropout": problem.dropout,
        "micro-batch-size": problem.micro_batch_size,
        # Over model-parallel ranks alone: the data-parallel size is 1.
        "global-batch-size": problem.micro_batch_size * problem.accumulation,
        "lr": problem.lr,
        "lr-decay-style": "constant",
        "warmup": 0,
        "weight-decay": problem.weight_decay,
        "adam-beta1": problem.betas[0],
        "adam-beta2": problem.betas[1],
        "clip-grad": problem.clip_grad,
        "seed": problem.seed,
        "train-iters": 1_000_000,
        "eval-iters": 0,
        "split": "1",
        "tokenizer-type": "bytes",
        "data-path": f"{problem.scratch}/bytes",
        "save": f"{problem.scratch}/save",
        "device": problem.device,
        "precision": arm.precision,
        "model-parallel-size": arm.ranks,
    }
    flags = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    return flags + (["--compile"] if arm.compiled else []) + list(arm.flags)


def our_run(problem: Problem, arm: Arm, ranks: Ranks | None = None) -> PreparedRun:
    """The run of the command line, but for the vocabulary: GPT-2's needs files that may be absent, so the run is
    prepared for a small pair of bytes, and tokenizer, vocabulary size and data are put in afterwards. ranks: of this
    process (default: the first of the arm's)."""
    prepared = prepare_run(parse(our_flags(problem, arm)), ranks or Ranks(0, arm.ranks, 0, 1), print)
    model = dataclasses.replace(prepared.config.model, vocab_size=problem.vocab_size)
    config = dataclasses.replace(prepared.config, model=model)
    return dataclasses.replace(
        prepared,
        config=config,
        tokenizer=Vocabulary(problem.vocab_size),
        splits=dataclasses.replace(prepared.splits, train=dataset(problem)),
    )


def built(problem: Problem, arm: Arm) -> Run:
    """The run, built as the program builds it."""
    run = build_run(our_run(problem, arm), print)
    if arm.compiled and problem.compiler != "inductor":
        run.engine.model.compile_layers(problem.compiler, by_document=run.config.data.reset_attention_mask)
    return run


def ours(problem: Problem, arm: Arm) -> Trainer:
    return trainer(built(problem, arm))


def one_rank(problem: Problem, arm: Arm) -> Trainer:
    """The first of `arm.ranks` model-parallel ranks, alone: its collectives move nothing and wait for nobody, and its
    weights are drawn where they lie, not by the layout's rule. The values mean nothing; the arithmetic is a rank's."""
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
    """A model of `GPT2Model`'s arguments whose weights are drawn on the device, in no time and not by the layout's
    rule."""
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


def trainer(run: Run) -> Trainer:
    run.engine.model.train()
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

    def close() -> None:
        run.data.loader.close()
        run.stop.close()
        run.close()

    padded = run.engine.model.word_embeddings.weight.size(0) * run.parallel.tensor_model_parallel_size
    precision = str(run.prepared.dtype).removeprefix("torch.")
    return Trainer(
        step,
        read,
        f"loss over {run.engine.model.vocab_size} words, {padded} rows multiplied; weights and "
        f"activations {precision}, fp32 masters and gradients, fused AdamW",
        close=close,
        expected_peak=MemoryPlan(run.config).expected_memory(run),
    )


def peer(problem: Problem, arm: Arm, nanogpt: str) -> Trainer:
    """A training step around another's model: fp32 weights, autocast (unless shipped), fused AdamW (unless shipped)."""
    device = torch.device(problem.device)
    loader = batches(problem)
    model, loss_of, vocab = peers.build(arm.kind, problem.model, nanogpt=nanogpt, device=device, seed=problem.seed)
    called: nn.Module = (
        torch.compile(  # type: ignore[assignment]
            model, backend=problem.compiler
        )
        if arm.compiled
        else model
    )
    optimizer = peers.adamw(model, arm.shipped, lr=problem.lr, betas=problem.betas, weight_decay=problem.weight_decay)
    total = torch.zeros((), device=device)
    norm = torch.zeros((), device=device)
    b, steps = problem.micro_batch_size, 0

    def step() -> None:
        nonlocal norm, steps
        text = next(loader).to(device, non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        for i in range(problem.accumulation):
            part = text[i * b : (i + 1) * b]
            with torch.autocast(device.type, DTYPES["bf16"], enabled=arm.precision == "bf16"):
                loss = loss_of(called, part[:, :-1], part[:, 1:]) / problem.accumulation
            loss.backward()
            total.add_(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), problem.clip_grad)
        optimizer.step()
        steps += 1

    def read() -> tuple[float, float]:
        nonlocal steps
        loss = total.item() / max(steps, 1)
        total.zero_()
        steps = 0
        return loss, norm.item()

    how = "fp32 throughout" if arm.precision == "fp32" else "fp32 weights, bf16 by torch.autocast"
    return Trainer(
        step,
        read,
        f"loss over {vocab} words, as many rows multiplied; {how}, "
        f"{'AdamW as shipped' if arm.shipped else 'fused AdamW'}",
        math.log(vocab / problem.vocab_size),
        loader.close,
    )


def measure(problem: Problem, arm: Arm, *, nanogpt: str, warmup: int, steps: int) -> dict[str, Any]:
    """Seconds of every timed step, first loss and gradient norm, peak memory in bytes."""
    device = torch.device(problem.device)
    gpu = device.type == "cuda"
    make = {"ours": ours, "rank": one_rank}.get(arm.kind)
    began = time.perf_counter()
    training = make(problem, arm) if make else peer(problem, arm, nanogpt)
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
    memory = (
        {
            "peak_allocated": torch.cuda.max_memory_allocated(device),
            "allocated": torch.cuda.memory_allocated(device),
            "peak_reserved": torch.cuda.max_memory_reserved(device),
        }
        if gpu
        else {"peak_resident": peak_resident()}
    )
    training.close()
    parameters = count_parameters(problem.model, arm.ranks)[1]
    return {
        "step_s": seconds,
        "first_step_s": first_step,
        "build_s": built - began,
        "loss": first[0],
        "grad_norm": first[1],
        "last_loss": last[0],
        "tokens_per_step": problem.tokens_per_step,
        "flops_per_token": problem.model.flops_per_token(problem.seq_length) // arm.ranks,
        "flops_per_token_llm_c": by_llm_c(
            parameters, problem.num_layers, problem.hidden_size // arm.ranks, problem.seq_length
        ),
        "parameters": parameters,
        "memory_bytes": memory,
        "expected_peak_bytes": training.expected_peak,
        "computes": training.computes,
        "padding_nats": training.padding_nats,
        "threads": torch.get_num_threads(),
    }


def peak_resident() -> int | None:
    """The most memory that this process ever had resident, in bytes (VmHWM); None where /proc does not say."""
    try:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return None
    return int(line.split()[1]) * 1024


def result_of(spec: dict[str, Any]) -> dict[str, Any]:
    """What a SPEC asks for."""
    arm, problem = Arm(**spec["arm"]), Problem(**spec["problem"])
    arm = dataclasses.replace(arm, flags=tuple(arm.flags))
    problem = dataclasses.replace(problem, betas=(problem.betas[0], problem.betas[1]), **arm.changes)
    if not arm.shipped:
        set_allocator(torch.device(problem.device))
    set_threads(Ranks())
    if spec["task"] == "gate":
        return peers.gate(problem.model, problem.device, spec["kind"], nanogpt=spec["nanogpt"])
    if spec["task"] == "ceiling":
        return ceiling(problem, arm.precision, spec["seconds"])
    return measure(problem, arm, nanogpt=spec["nanogpt"], warmup=spec["warmup"], steps=spec["steps"])


def main(argv: Sequence[str]) -> None:
    Path(argv[1]).write_text(json.dumps(result_of(json.loads(Path(argv[0]).read_text()))))


if __name__ == "__main__":
    main(sys.argv[1:])
