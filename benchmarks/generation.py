#!/usr/bin/env python3
"""Tokens a second of generation beside transformers' `generate`, both with their caches, on the same weights:

    OMP_NUM_THREADS=2 python benchmarks/generation.py    # GPT-2 124M on a CPU, 5 minutes
    python benchmarks/generation.py --smoke              # a tiny model: does it run?
    ONEDNN_MAX_CPU_ISA=AVX512_CORE python benchmarks/generation.py --precision bf16    # without bf16 products

The two take turns (A-B-B-A). Greedy, 64 tokens after prompts of 64, at batch 1 and 8, in bf16 and fp32. Then the cost
of a token by its position in the context.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works in a clone that is not installed

import torch

import mpu
from benchmarks import report
from data_utils.tokenizers.base import NO_EOD
from megatron.gpt2.config import ModelConfig
from megatron.gpt2.device import PRECISIONS
from megatron.gpt2.generate.generation import Continuation, Generator
from megatron.gpt2.generate.load_model import store_by_column
from megatron.gpt2.generate.sampling import Sampling
from megatron.gpt2.model.gpt2 import GPT2Model

GPT2 = ModelConfig(
    num_layers=12, hidden_size=768, num_attention_heads=12, max_position_embeddings=1024, vocab_size=50257
)
TINY = ModelConfig(num_layers=2, hidden_size=32, num_attention_heads=2, max_position_embeddings=64, vocab_size=300)
GOALS = {torch.bfloat16: 1.5, torch.float32: 1.25}  # times the tokens a second of transformers
FLAT = 1.5  # the cost of a token late in the context against an early one


class Ids:
    """In the place of a tokenizer: ids without text, none of which ends a document."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size, self.eod, self.start, self.token_bytes = vocab_size, NO_EOD, 0, [b"x"] * vocab_size


def pair(config: ModelConfig) -> tuple[GPT2Model, Any]:
    """Our model and transformers', with the same weights in float32."""
    from transformers import GPT2Config, GPT2LMHeadModel

    ours = GPT2Model(config).eval()
    theirs = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=config.vocab_size,
            n_positions=config.max_position_embeddings,
            n_embd=config.hidden_size,
            n_layer=config.num_layers,
            n_head=config.num_attention_heads,
            bos_token_id=None,
            eos_token_id=None,
        )
    ).eval()
    weights = {name: tensor.detach() for name, tensor in ours.named_parameters()}
    names = {
        "input_layernorm": "ln_1",
        "attention.query_key_value": "attn.c_attn",
        "attention.dense": "attn.c_proj",
        "post_attention_layernorm": "ln_2",
        "mlp.dense_h_to_4h": "mlp.c_fc",
        "mlp.dense_4h_to_h": "mlp.c_proj",
    }
    n, h = config.num_attention_heads, config.hidden_size
    state = {
        "transformer.wte.weight": weights["word_embeddings.weight"][: config.vocab_size],
        "transformer.wpe.weight": weights["position_embeddings.weight"],
        "transformer.ln_f.weight": weights["transformer.final_layernorm.weight"],
        "transformer.ln_f.bias": weights["transformer.final_layernorm.bias"],
    }
    for layer in range(config.num_layers):
        for name, their_name in names.items():
            for part in ("weight", "bias"):
                value = weights[f"transformer.layers.{layer}.{name}.{part}"]
                if "query_key_value" in name:  # [n, 3, d] rows -> [3, n, d]
                    value = value.view(n, 3, h // n, -1).transpose(0, 1).reshape(value.shape)
                state[f"transformer.h.{layer}.{their_name}.{part}"] = value.t() if value.dim() == 2 else value
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected, (missing, unexpected)
    return ours, theirs


def our_tokens(model: GPT2Model, prompts: torch.Tensor, new: int) -> tuple[list[list[int]], list[float]]:
    """The new tokens, and when each step ended."""
    made = [Continuation(prompt, Sampling(temperature=0, max_new_tokens=new)) for prompt in prompts.tolist()]
    ends = [time.perf_counter()]
    for generated in Generator(model, Ids(model.vocab_size)).stream(made):  # type: ignore[arg-type]
        if generated.row == len(made) - 1:
            ends.append(time.perf_counter())
    return [c.ids for c in made], ends


def their_tokens(model: Any, prompts: torch.Tensor, new: int) -> list[list[int]]:
    made = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        pad_token_id=0,
    )
    ids: list[list[int]] = made[:, prompts.size(1) :].tolist()
    return ids


def compare(ours: GPT2Model, theirs: Any, batch: int, length: int, new: int, rounds: int) -> dict[str, Any]:
    """Seconds of each side, in turns; tokens a second by the medians."""
    prompts = torch.randint(ours.vocab_size, (batch, length), generator=torch.Generator().manual_seed(0))
    seconds: dict[str, list[float]] = {"ours": [], "transformers": []}
    tokens: dict[str, list[list[int]]] = {}
    for number in range(rounds + 1):
        for side in ("ours", "transformers", "transformers", "ours"):
            began = time.perf_counter()
            tokens[side] = our_tokens(ours, prompts, new)[0] if side == "ours" else their_tokens(theirs, prompts, new)
            if number:  # the first round warms up
                seconds[side].append(time.perf_counter() - began)
    assert all(len(ids) == new for ids in tokens["ours"] + tokens["transformers"])
    speed = {side: batch * new / statistics.median(times) for side, times in seconds.items()}
    equal = sum(a == b for a, b in zip(tokens["ours"], tokens["transformers"], strict=True))
    return {
        "batch": batch,
        "tokens_per_second": speed,
        "ratio": speed["ours"] / speed["transformers"],
        "seconds": seconds,
        "equal_texts": f"{equal} of {batch}",
    }


def by_position(model: GPT2Model, batch: int, early: int, late: int, steps: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of a step whose token stands near place `early`, and near `late`; the two in turns."""
    times: dict[int, list[float]] = {early: [], late: []}
    for _ in range(rounds):
        for place in (early, late, late, early):
            prompts = torch.randint(model.vocab_size, (batch, place - steps // 2))
            ends = our_tokens(model, prompts, steps)[1][1:]  # without the reading of the prompt
            times[place] += [1e3 * (end - start) for start, end in zip(ends, ends[1:], strict=False)]
    medians = {place: statistics.median(values) for place, values in times.items()}
    return {
        "batch": batch,
        "milliseconds": {str(place): value for place, value in medians.items()},
        "ratio": medians[late] / medians[early],
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a tiny model; writes nothing unless --output is given")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--precision", choices=[PRECISIONS[dtype] for dtype in GOALS], help="default: both")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/generation.json")
    args = parser.parse_args(argv)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    output = args.output or (None if args.smoke else report.RESULTS / "generation.json")
    config, length, new, places = (TINY, 8, 8, (8, 48)) if args.smoke else (GPT2, 64, 64, (100, 1000))
    mpu.initialize_model_parallel(1)
    result: dict[str, Any] = {
        **report.header("generation"),
        "threads": torch.get_num_threads(),
        "onednn_max_cpu_isa": os.environ.get("ONEDNN_MAX_CPU_ISA", "default"),
        "model": dataclasses.asdict(config),
        "prompt_tokens": length,
        "new_tokens": new,
        "speed": [],
        "by_position": [],
    }
    ours, theirs = pair(config)
    print(f"{'':22}{'ours':>10}{'transformers':>14}{'ratio':>8}{'goal':>7}   tokens a second")
    for dtype, goal in GOALS.items():
        if args.precision not in (None, PRECISIONS[dtype]):
            continue
        ours, theirs = ours.to(dtype), theirs.to(dtype)
        store_by_column(ours)
        for batch in (1, 8):
            row = compare(ours, theirs, batch, length, new, args.rounds)
            result["speed"].append({"precision": PRECISIONS[dtype], "goal": goal, **row})
            print(
                f"{PRECISIONS[dtype]}, batch {batch:<11}{row['tokens_per_second']['ours']:10.1f}"
                f"{row['tokens_per_second']['transformers']:14.1f}{row['ratio']:8.2f}{goal:7.2f}",
                flush=True,
            )
        row = by_position(ours, 1, *places, 16, args.rounds)
        result["by_position"].append({"precision": PRECISIONS[dtype], "goal": FLAT, **row})
        print(
            f"{PRECISIONS[dtype]}, a token at {' and '.join(row['milliseconds'])}: "
            f"{' and '.join(f'{ms:.1f}' for ms in row['milliseconds'].values())} ms, ratio {row['ratio']:.2f} "
            f"(at most {FLAT})",
            flush=True,
        )
        if output:
            report.write(output, result)


if __name__ == "__main__":
    main()
