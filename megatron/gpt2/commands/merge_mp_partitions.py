"""Merge the files of tensor-parallel ranks: `tools/checkpoint.py merge` with the name and the flags of Megatron:

    python tools/merge_mp_partitions.py --model-type GPT --tensor-model-parallel-size 2 --num-layers 24 \\
        --hidden-size 1024 --num-attention-heads 16 --max-position-embeddings 1024 --load checkpoints/gpt2_345m

The result is written to --save, or to `merged` inside --load. The files store the sizes, and the flags for sizes are
compared with them. Megatron's WORLD_SIZE is not needed, because no process group is started.
"""

import argparse
import sys
from typing import Any

from data_utils.command_line import Parser, how_to_call
from megatron.gpt2.commands import checkpoint
from megatron.gpt2.config.flags import with_dashes
from megatron.gpt2.formats import Hints, open_checkpoint

COMPARED = ("num_layers", "hidden_size", "ffn_hidden_size", "max_position_embeddings")
PASSED_ON = ("num_attention_heads", "vocab_size", "vocab_file", "merge_file", "tokenizer_model", "iteration")
# The files do not depend on these flags of Megatron's command lines.
WITHOUT_MEANING = ("--seq-length", "--tokenizer-type", "--make-vocab-size-divisible-by", "--micro-batch-size")


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Parse the flags, which may contain `-` or `_`, as in Megatron."""
    parser = Parser(description=__doc__)
    parser.add_argument("--load", required=True, metavar="DIR", help="what Megatron, or this project, saved")
    parser.add_argument("--save", metavar="DIR", help="a new folder (default: `merged` inside --load)")
    parser.add_argument("--model-type", default="GPT", help="GPT or GPT2")
    parser.add_argument(
        "--tensor-model-parallel-size",
        "--model-parallel-size",
        dest="ranks",
        type=int,
        metavar="N",
        help="compared with the number of ranks in the files",
    )
    parser.add_argument(
        "--pipeline-model-parallel-size",
        dest="stages",
        type=int,
        metavar="N",
        help="compared with the number of stages in the files",
    )
    parser.add_argument(
        "--target-tensor-parallel-size",
        "--target-pipeline-model-parallel-size",
        dest="target",
        type=int,
        default=1,
        metavar="1",
    )
    for name in COMPARED:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help="compared with the files")
    for name in PASSED_ON:
        parser.add_argument(f"--{name.replace('_', '-')}", metavar="VALUE", help=f"as for {how_to_call('checkpoint')}")
    for flag in WITHOUT_MEANING:
        parser.add_argument(flag, metavar="VALUE", help="accepted and not needed")
    # Megatron used both --num-layers and --num_layers.
    return parser.parse_args([with_dashes(word) for word in (sys.argv[1:] if argv is None else argv)])


def main(argv: list[str] | None = None) -> int:
    """Run the command line `argv` (default: this process's). Return the exit code."""
    args = parse_args(argv)
    if args.model_type not in ("GPT", "GPT2"):
        raise ValueError(f"--model-type {args.model_type}: only GPT-2 is supported")
    if args.target != 1:
        raise ValueError(f"this merges to one rank: use {how_to_call('checkpoint')} split for a different number")
    passed_on = [f"--{name.replace('_', '-')}={getattr(args, name)}" for name in PASSED_ON if getattr(args, name)]
    numbers: dict[str, Any] = {
        name: int(value)
        for name in ("num_attention_heads", "vocab_size", "iteration")
        if (value := getattr(args, name)) is not None
    }
    source = open_checkpoint(args.load, Hints(**numbers), log=lambda line: None)
    model: dict[str, Any] = source.metadata["config"]["model"]
    for name in COMPARED:
        given, found = getattr(args, name), model.get(name) or 4 * model["hidden_size"]
        if given is not None and given != found:
            raise ValueError(f"--{name.replace('_', '-')} {given}: the files of {args.load} have {found}")
    layout = source.metadata["layout"]
    for flag, given, found in (
        ("--tensor-model-parallel-size", args.ranks, layout["tensor_model_parallel_size"]),
        ("--pipeline-model-parallel-size", args.stages, layout.get("pipeline_model_parallel_size")),
    ):
        if given is not None and found not in (None, given):
            raise ValueError(f"{flag} {given}: {args.load} holds the files of {found}")
    checkpoint.return_freed_memory()
    return checkpoint.main(["merge", args.load, args.save or f"{args.load}/merged", *passed_on])
