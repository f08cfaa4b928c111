#!/usr/bin/env python3
"""Continue a prompt with a trained model:

    python tools/generate_text.py --load checkpoints/gpt2_small --prompt "Once upon a time"
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works in a clone that is not installed

import torch

import mpu
from megatron.device import choose_device, choose_precision
from megatron.generation import generate, load_for_inference
from megatron.launch import Ranks


def report(line: str) -> None:
    print(line, file=sys.stderr)


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def main(argv: list[str] | None = None) -> None:
    parser = Parser(description="Continue a prompt with a trained model.", allow_abbrev=False)
    parser.add_argument("--load", required=True, metavar="DIR", help="the --save folder of a training run")
    parser.add_argument("--prompt", default="", help="text to continue (default: start a new document)")
    parser.add_argument("--max-new-tokens", type=int, default=200, metavar="N")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 takes the likeliest token")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="draw among the K likeliest; 0: among all")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--precision", default="auto", choices=("auto", "fp32", "bf16", "fp16"))
    args = parser.parse_args(argv)
    for flag, least, value in (("--max-new-tokens", 1, args.max_new_tokens), ("--temperature", 0, args.temperature),
                               ("--top-k", 0, args.top_k)):
        if value < least:
            raise ValueError(f"{flag} must be at least {least}, not {value}")

    device, why = choose_device(args.device, Ranks())
    if why.startswith("WARNING"):
        report(why)
    dtype, _ = choose_precision(args.precision, device)
    mpu.initialize_model_parallel(1)
    model, tokenizer, _ = load_for_inference(args.load, device, dtype, log=report)
    new = generate(model, tokenizer, tokenizer.encode(args.prompt), max_new_tokens=args.max_new_tokens,
                   temperature=args.temperature, top_k=args.top_k, generator=torch.Generator().manual_seed(args.seed))
    print(args.prompt + tokenizer.decode(new))


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        report(f"error: {error}")
        sys.exit(2)
