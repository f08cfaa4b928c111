"""A model of the time of a training step on an H200. It needs no GPU, and no GPU is measured.

    bash scripts/test_fake_cuda.sh --collect-only -q            # makes .venv-cuda, with torch's CUDA build
    .venv-cuda/bin/python -m tests.fake_cuda.modelled_step      # writes benchmarks/results/modelled_step.json

The program trains on the fake GPU of tests/fake_cuda, which records each kernel with its shapes and bytes. The time of
a kernel follows from `Assumptions`: its FLOPs or bytes at a rate, plus a launch time. The assumptions were set before
any measurement and corrected once, also before any: attention has the rates that were published for an H100 and a head
size of 64, dropout of hidden states has arithmetic, and the vocabulary has GPT-2's size. They are fixed, so only a
change of the program changes the result. docs/how-to/gpu.md explains how to measure a step.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import math
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from data_utils.tokenizers.base import ByteTokenizer
from megatron.gpt2.config import ModelConfig
from megatron.gpt2.config.presets import SHAPES
from tests.fake_cuda.fake_gpu import Kernel
from tests.fake_cuda.program import running, steps, write_documents

TILES = {(128, 256): 1.0, (256, 128): 1.0, (128, 192): 0.96, (128, 128): 0.88, (64, 256): 0.85}  # efficiency
PROCESSORS = 132  # of an H200, each with one tile at a time
VOCABULARY, PADDED = 50_257, 50_304
RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "modelled_step.json"
MODELS = ("345M", "774M", "1.5B")
MICRO_BATCH_SIZE, SAMPLES = 32, 128


@dataclass(frozen=True)
class Assumptions:
    """Rates in FLOP/s and bytes/s, times in seconds. Attention rates are those of cuDNN for heads of size 64 and 1,024
    tokens, with causal FLOPs only: forward is published for an H100, backward is an estimate."""

    product: float = 760e12
    attention: float = 288e12
    attention_backward: float = 250e12
    memory: float = 3.7e12
    dropout: float = 32 * 2**20 / 37e-6  # elements/s of hidden states, by the instructions of the kernel
    start: float = 1.5e-6  # between two kernels
    least: float = 2e-6  # the shortest kernel
    deepest: float = 220  # a product with this k (of m, n, k) reaches half of its rate
    peak: float = 989e12  # dense bf16 from the datasheet, for the MFU


def product_rate(m: int, n: int, k: int, assumed: Assumptions) -> float:
    """Return FLOP/s of [m, k] @ [k, n]: tiles fill the processors in waves. Use the best tile size and split of k."""
    best = 0.0
    for (rows, columns), efficiency in TILES.items():
        tiles = math.ceil(m / rows) * math.ceil(n / columns)
        filled = m * n / (tiles * rows * columns)  # of the tiles
        for split in (1, 2, 4, 8):
            waves = tiles * split / PROCESSORS
            depth = k / split
            share = efficiency * filled * waves / math.ceil(waves) * depth / (depth + assumed.deepest)
            best = max(best, share * (1.0 if split == 1 else 0.95))
    return assumed.product * best


def seconds(kernel: Kernel, assumed: Assumptions) -> float:
    """Return the time of a kernel and the gap before it. For kernels of torch.compile only their bytes count. With a
    gap for each of them, the MFU of a step would be 0.3 to 0.5 points lower."""
    if kernel.name in ("mm", "addmm", "addmm_"):
        (m, k), (_, n) = kernel.shapes[-2:] if kernel.name.startswith("addmm") else kernel.shapes[:2]
        busy = 2 * m * n * k / product_rate(m, n, k, assumed)
    elif kernel.name.startswith("_scaled_dot_product"):
        b, heads, s, d = kernel.shapes[0]
        forward = 2 * b * heads * s * s * d  # two products, half of each masked
        busy = 2.5 * forward / assumed.attention_backward if "backward" in kernel.name else forward / assumed.attention
    else:
        busy = (kernel.read + kernel.written) / assumed.memory
        if kernel.name == "seeded_dropout":
            busy = max(busy, math.prod(kernel.shapes[0]) / assumed.dropout)
        if kernel.name == "triton":
            return busy
    return max(busy, assumed.least) + assumed.start


def kind(kernel: Kernel) -> str:
    """Return the part of the step that a kernel belongs to."""
    if kernel.name in ("mm", "addmm", "addmm_"):
        return "head products" if any(PADDED in shape for shape in kernel.shapes) else "layer products"
    if kernel.name.startswith("_scaled_dot_product"):
        return "attention"
    of_file = {
        "cross_entropy": "cross-entropy",
        "mpu/grads": "optimizer",
        "optimizer/optimizer": "optimizer",
        "bucket_reducer": "gradient buckets",
        "param_and_grad_buffer": "optimizer",
    }
    of_name = {
        "triton": "compiled layer",
        "sum": "bias sums",
        "stack": "copies of qkv's gradient",
        "stack_qkv": "copies of qkv's gradient",
        "clone": "copies of qkv's gradient",
        "native_layer_norm": "layer norm",
        "bias_dropout_add_norm": "residual and norm",
        "bias_gelu": "GELU",
        "gelu": "GELU",
        "native_dropout": "dropout",
        "seeded_dropout": "dropout",
    }
    return next((part for file, part in of_file.items() if file in kernel.place), None) or of_name.get(
        kernel.name.removesuffix("_backward"), "other element-wise"
    )


def trace(name: str, num_layers: int, *, compiled: bool) -> tuple[dict[str, float], int, ModelConfig]:
    """Run a step of the model `name` with `num_layers` layers. Return the seconds of each part, the number of kernels,
    and the configuration."""
    _, h, heads = SHAPES[name.lower()]
    flags = (
        f"--num-layers {num_layers} --hidden-size {h} --num-attention-heads {heads} --seq-length 1024 "
        f"--max-position-embeddings 1024 --make-vocab-size-divisible-by {PADDED} "
        f"--micro-batch-size {MICRO_BATCH_SIZE} --global-batch-size {SAMPLES}{' --compile' if compiled else ''}"
    )
    size = property(lambda self: VOCABULARY, lambda self, size: None)
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(ByteTokenizer, "vocab_size", size, create=True),
    ):
        write_documents(Path(folder))
        with running(Path(folder), Path(folder) / "save", flags) as (trainer, gpu):
            steps(trainer, gpu)
            config = trainer.config.model
    parts: dict[str, float] = collections.defaultdict(float)
    for kernel in gpu.kernels:
        parts[kind(kernel)] += seconds(kernel, Assumptions())
    return parts, len(gpu.kernels), config


def model(name: str, *, compiled: bool) -> dict[str, Any]:
    """Model one step: milliseconds by part, tokens per second and MFU. All layers are equal, so that models of two and
    of four layers give the time of any number."""
    layers, tokens = SHAPES[name.lower()][0], SAMPLES * 1024
    (of_two, fewer, _), (of_four, more, config) = (trace(name, count, compiled=compiled) for count in (2, 4))
    steps_of_two = (layers - 2) / 2
    parts = {part: of_two[part] + steps_of_two * (time - of_two[part]) for part, time in of_four.items()}
    whole = sum(parts.values())
    flops = dataclasses.replace(config, num_layers=layers).flops_per_token(1024)
    return {
        "compiled": compiled,
        "milliseconds": {part: round(1e3 * time, 2) for part, time in sorted(parts.items(), key=lambda item: -item[1])},
        "kernels": round(fewer + steps_of_two * (more - fewer)),
        "step_ms": round(1e3 * whole, 1),
        "tokens_per_s": round(tokens / whole),
        "mfu": round(tokens / whole * flops / Assumptions().peak, 4),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", metavar="FILE", type=Path, default=RESULT)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    chosen = parser.parse_args()
    if torch.version.cuda is None:
        parser.error("this needs torch's CUDA build: bash scripts/test_fake_cuda.sh --collect-only -q makes .venv-cuda")
    result: dict[str, Any] = {
        "what": "modelled step of one H200, 4 micro-batches of 32: nothing here is measured",
        "torch": torch.__version__,
        "commit": subprocess.check_output(["git", "describe", "--always", "--dirty=+"], text=True).strip(),
        "assumptions": dataclasses.asdict(Assumptions()),
        "steps": {},
    }
    for name in chosen.models:
        for compiled in (False, True):
            step = model(name, compiled=compiled)
            result["steps"][f"{name} {'compiled' if compiled else 'eager'}"] = step
            chosen.output.write_text(json.dumps(result, indent=1) + "\n")
            parts = " + ".join(f"{part} {ms}" for part, ms in step["milliseconds"].items())
            print(
                f"{name} {'compiled' if compiled else 'eager'}: {step['step_ms']:,.1f} ms = {parts}; "
                f"{step['tokens_per_s']:,} tokens/s, MFU {step['mfu']:.1%}, modelled; {step['kernels']:,} kernels",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
