#!/usr/bin/env python3
"""Compare tokens per second of generation with transformers' `generate`, both with a cache and the same weights:

    OMP_NUM_THREADS=2 python benchmarks/generation.py      # GPT-2 124M on a CPU, 5 minutes
    python benchmarks/generation.py --smoke --output DIR   # a quick check with a tiny model
    ONEDNN_MAX_CPU_ISA=AVX512_CORE python benchmarks/generation.py --precision bf16    # without bf16 instructions

This project and transformers run in turn (A B B A). Each program generates 64 tokens after prompts of 64 tokens,
greedily, at batch 1 and 8, in bf16 and fp32. Then the time of a token is measured at an early and a late position in
the context.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # The project need not be installed.

import torch

import mpu
from benchmarks import harness, other_libraries
from data_utils.tokenizers.base import NO_EOD
from megatron.gpt2.config import ModelConfig
from megatron.gpt2.device import PRECISION_DTYPES
from megatron.gpt2.generate.generation import GenerationRequest, Generator
from megatron.gpt2.generate.load_model import store_for_inference
from megatron.gpt2.generate.sampling import SamplingParams
from megatron.gpt2.model.gpt2 import GPT2Model

GPT2 = ModelConfig(
    num_layers=12, hidden_size=768, num_attention_heads=12, max_position_embeddings=1024, vocab_size=50257
)
TINY = ModelConfig(num_layers=2, hidden_size=32, num_attention_heads=2, max_position_embeddings=64, vocab_size=300)
PRECISIONS = ("bf16", "fp32")


class IdOnlyTokenizer:
    """A tokenizer without text and without an end-of-document id."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size, self.eod, self.bos, self.token_bytes = vocab_size, NO_EOD, 0, [b"x"] * vocab_size


def generate_ours(model: GPT2Model, prompts: torch.Tensor, new: int) -> tuple[list[list[int]], list[float]]:
    """Return the new tokens, and the time at the end of each step."""
    requests = [
        GenerationRequest(prompt, SamplingParams(temperature=0, max_new_tokens=new)) for prompt in prompts.tolist()
    ]
    ends = [time.perf_counter()]
    for generated in Generator(model, IdOnlyTokenizer(model.vocab_size)).stream(requests):  # type: ignore[arg-type]
        if generated.number == len(requests) - 1:
            ends.append(time.perf_counter())
    return [c.ids for c in requests], ends


def generate_transformers(model: Any, prompts: torch.Tensor, new: int) -> list[list[int]]:
    mask, length = torch.ones_like(prompts), {"max_new_tokens": new, "min_new_tokens": new}
    outputs = model.generate(prompts, attention_mask=mask, **length, do_sample=False, pad_token_id=0)
    ids: list[list[int]] = outputs[:, prompts.size(1) :].tolist()
    return ids


def compare(ours: GPT2Model, theirs: Any, batch: int, length: int, new: int, rounds: int) -> dict[str, Any]:
    """Time this project and transformers in turn. Return tokens per second, from median times, and the number of equal
    texts."""
    prompts = torch.randint(ours.vocab_size, (batch, length), generator=torch.Generator().manual_seed(0))
    tokens: dict[str, list[list[int]]] = {}

    def timed(side: str) -> float:
        began = time.perf_counter()
        tokens[side] = (
            generate_ours(ours, prompts, new)[0] if side == "ours" else generate_transformers(theirs, prompts, new)
        )
        return time.perf_counter() - began

    sides = {side: partial(timed, side) for side in ("ours", "transformers")}
    harness.alternate(sides, 2)  # These untimed calls warm up the caches.
    seconds = harness.alternate(sides, 2 * rounds)
    assert all(len(ids) == new for ids in tokens["ours"] + tokens["transformers"])
    speed = {side: batch * new / statistics.median(times) for side, times in seconds.items()}
    equal = sum(a == b for a, b in zip(*tokens.values(), strict=True))
    return {
        "batch": batch,
        "tokens_per_second": speed,
        "ratio": speed["ours"] / speed["transformers"],
        "seconds": seconds,
        "equal_texts": f"{equal} of {batch}",
    }


def time_by_position(model: GPT2Model, early: int, late: int, rounds: int) -> dict[str, Any]:
    """Return the median milliseconds of a generated token near the positions `early` and `late` of the context."""

    def median(position: int) -> float:
        prompts = torch.randint(model.vocab_size, (1, position - 8))
        ends = generate_ours(model, prompts, 16)[1][1:]  # Skip the first token, whose time includes reading the prompt.
        return statistics.median(1e3 * (end - start) for start, end in zip(ends, ends[1:], strict=False))

    times = harness.alternate({str(position): partial(median, position) for position in (early, late)}, 2 * rounds)
    medians = {position: statistics.median(values) for position, values in times.items()}
    return {"milliseconds": medians, "ratio": medians[str(late)] / medians[str(early)]}


def main(argv: list[str] | None = None) -> None:
    parser = harness.make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--precision", choices=PRECISIONS, help="default: both")
    args = harness.parse_args(parser, argv)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    config, length, new, positions = (TINY, 8, 8, (8, 48)) if args.smoke else (GPT2, 64, 64, (100, 1000))
    mpu.initialize_model_parallel(1)
    result: dict[str, Any] = {
        **harness.header("generation"),
        "threads": torch.get_num_threads(),
        "model": dataclasses.asdict(config),
        "prompt_tokens": length,
        "new_tokens": new,
        "speed": [],
        "by_position": [],
    }
    ours = GPT2Model(config).eval()
    theirs = other_libraries.build_huggingface(config, use_cache=True, bos_token_id=None, eos_token_id=None)[0].eval()
    other_libraries.load_peer_weights(theirs, ours, config, conv1d=True)
    print(f"{'':22}{'ours':>10}{'transformers':>14}{'ratio':>8}   tokens per second")
    for precision in [args.precision] if args.precision else PRECISIONS:
        ours, theirs = ours.to(PRECISION_DTYPES[precision]), theirs.to(PRECISION_DTYPES[precision])
        for batch in (8, 1):
            stored = copy.deepcopy(ours)
            store_for_inference(stored)
            row = compare(stored, theirs, batch, length, new, args.rounds)
            result["speed"].append({"precision": precision, **row})
            speeds = "{ours:10.1f}{transformers:14.1f}".format(**row["tokens_per_second"])
            print(f"{precision}, batch {batch:<11}{speeds}{row['ratio']:8.2f}", flush=True)
        row = time_by_position(stored, *positions, args.rounds)
        result["by_position"].append({"precision": precision, **row})
        ms = " and ".join(f"{ms:.1f}" for ms in row["milliseconds"].values())
        where = " and ".join(row["milliseconds"])
        print(f"{precision}, a token at {where}: {ms} ms, ratio {row['ratio']:.2f}", flush=True)
        harness.write_json(args.output / "generation.json", result)


if __name__ == "__main__":
    main()
