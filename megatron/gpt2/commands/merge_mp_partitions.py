"""Merge the files of tensor-parallel ranks: `tools/checkpoint.py merge` with the name and the flags of Megatron:

    python tools/merge_mp_partitions.py --model-type GPT --tensor-model-parallel-size 2 --num-layers 24 \\
        --hidden-size 1024 --num-attention-heads 16 --max-position-embeddings 1024 --load checkpoints/gpt2_345m

The result is written to --save, or to `merged` inside --load. The files store the sizes, and flags for sizes must agree
with the files. Megatron's WORLD_SIZE is not needed, because no process group is started.
"""

import argparse
import sys
from typing import Any

from data_utils.command_line import Parser, how_to_call, require
from megatron.gpt2.commands import checkpoint
from megatron.gpt2.config.flags import with_dashes
from megatron.gpt2.config.sections import flag_name
from megatron.gpt2.formats import Hints, open_checkpoint

COMPARED = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "max_position_embeddings",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
)
HINTS = ("num_attention_heads", "vocab_size", "iteration")
FILES = ("vocab_file", "merge_file", "tokenizer_model")
# Flags of Megatron's command lines that do not change the merged files.
WITHOUT_MEANING = ("--seq-length", "--tokenizer-type", "--make-vocab-size-divisible-by", "--micro-batch-size")


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Parse the flags, which may contain `-` or `_`, as in Megatron."""
    parser = Parser(description=__doc__)
    parser.add_argument("--load", required=True, metavar="DIR", help="what Megatron, or this project, saved")
    parser.add_argument("--save", metavar="DIR", help="a new folder (default: `merged` inside --load)")
    parser.add_argument("--model-type", default="GPT", choices=("GPT", "GPT2"))
    targets = ("--target-tensor-parallel-size", "--target-pipeline-model-parallel-size")
    parser.add_argument(*targets, dest="target", type=int, default=1, metavar="1")
    as_checkpoint = f"as for {how_to_call('checkpoint')}"
    for name in COMPARED:
        other = ["--model-parallel-size"] if name.startswith("tensor") else []
        parser.add_argument(flag_name(name), *other, type=int, metavar="N", help="compared with the files")
    for name in HINTS:
        parser.add_argument(flag_name(name), type=int, metavar="N", help=as_checkpoint)
    for name in FILES:
        parser.add_argument(flag_name(name), metavar="FILE", help=as_checkpoint)
    for flag in WITHOUT_MEANING:
        parser.add_argument(flag, metavar="VALUE", help="accepted and not needed")
    # Megatron used both --num-layers and --num_layers.
    return parser.parse_args([with_dashes(word) for word in (sys.argv[1:] if argv is None else argv)])


def main(argv: list[str] | None = None) -> int:
    """Run the command line `argv` (default: sys.argv[1:]). Return the exit code."""
    args = parse_args(argv)
    other = f"this merges to one rank: use {how_to_call('checkpoint')} split for a different number"
    require(args.target == 1, other)
    source = open_checkpoint(args.load, Hints(**{name: getattr(args, name) for name in HINTS}), log=lambda line: None)
    model: dict[str, Any] = source.metadata["config"]["model"]
    ffn_size = model.get("ffn_hidden_size") or 4 * model["hidden_size"]
    sizes = {**source.metadata["layout"], **model, "ffn_hidden_size": ffn_size}
    for name in COMPARED:
        flag_size, saved_size = getattr(args, name), sizes.get(name)
        fits = flag_size is None or saved_size in (None, flag_size)
        require(fits, f"{flag_name(name)} {flag_size}: the files of {args.load} have {saved_size}")
    passed_on = {flag_name(name): getattr(args, name) for name in (*HINTS, *FILES)}
    words = [f"{flag}={value}" for flag, value in passed_on.items() if value is not None]
    return checkpoint.main(["merge", args.load, args.save or f"{args.load}/merged", *words])
