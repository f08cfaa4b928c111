"""Inspect, verify, merge, split, convert and compare checkpoints of any format and layout:

    python tools/checkpoint.py inspect DIR [--json]
    python tools/checkpoint.py verify DIR
    python tools/checkpoint.py merge DIR OUT
    python tools/checkpoint.py split DIR OUT --tensor-model-parallel-size N
    python tools/checkpoint.py convert DIR OUT --to {native,huggingface,megatron-2019,...} [--check]
    python tools/checkpoint.py diff A B

The program runs on a CPU without a process group, has about one tensor in memory at a time, and detects the format of
the source. Exit codes: 0; 1 if a difference or damage was found; 2 for bad input.
"""

import argparse
import contextlib
import ctypes
import json
import platform
import sys
from pathlib import Path
from typing import Any

from data_utils import Tokenizer, build_tokenizer, kind_of_vocabulary, load_tokenizer
from data_utils.command_line import Parser, plural, require
from megatron.gpt2.checkpoint.reader import NativeCheckpoint
from megatron.gpt2.device import PRECISION_DTYPES
from megatron.gpt2.formats import BaseCheckpoint, Hints, open_checkpoint
from megatron.gpt2.formats.compare import (
    compare_logits,
    compare_tensors,
    describe,
    format_description,
    format_difference,
)
from megatron.gpt2.formats.foreign_checkpoint import has_optimizer
from megatron.gpt2.formats.gguf import TYPES as GGUF_TYPES
from megatron.gpt2.formats.gguf import write_gguf
from megatron.gpt2.formats.huggingface import write_huggingface
from megatron.gpt2.formats.megatron import write_megatron
from megatron.gpt2.formats.megatron_model import PIPELINE_FLAG, VIRTUAL_FLAG, MegatronLayout
from megatron.gpt2.formats.nanogpt_and_dcp import export_kind, write_dcp, write_nanogpt
from megatron.gpt2.formats.native import require_new_folder, write_native
from megatron.gpt2.formats.openai_tokenizer import open_tokenizer
from megatron.gpt2.formats.torch_dist import write_torch_dist
from megatron.gpt2.pipeline.schedule import FIRST_LAYERS_FLAG, LAST_LAYERS_FLAG

MEGATRON = ("megatron-2019", "megatron-v2", "megatron-v3", "megatron-core", "torch_dist")
OTHERS = ("huggingface", "gguf", "nanogpt", "dcp")
TARGETS = ("native", *OTHERS, *MEGATRON)
TENSOR_FLAGS = (
    "--tensor-model-parallel-size",
    "--model-parallel-size",
    "--target-tensor-model-parallel-size",
    "--target-tensor-parallel-size",
)
PIPELINE_FLAGS = (PIPELINE_FLAG, "--target-pipeline-model-parallel-size", "--target-pipeline-parallel-size")
# --check accepts logits that differ by at most CHECK_LIMIT. A correct conversion gives 0, or 1e-6 if kernels differ.
CHECK_LIMIT = 1e-4


def return_freed_memory() -> None:
    """Make glibc return the memory of freed tensors to the system. By default glibc keeps blocks of up to 32 MB in its
    heap. The heap fragments, which costs 1.4 GB for a 345M model."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD is -3 in malloc.h.


def print_stderr(line: str) -> None:
    """Print a line to standard error. Only the result goes to standard output."""
    print(line, file=sys.stderr)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Parse the flags of the command that `argv` names."""
    parser = Parser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    # Commands that read have the flags of `reads`, commands that write those of `writes`, and commands that write for
    # several ranks also those of `splits`.
    reads, writes, splits = (Parser(add_help=False) for _ in range(3))
    integer: dict[str, Any] = {"type": int, "metavar": "N"}
    reads.add_argument("--num-attention-heads", **integer, help="if the source does not store it")
    reads.add_argument("--vocab-size", **integer, help="true size, if the source has a padded one")
    reads.add_argument("--gelu", choices=("tanh", "erf"), help="if the inferred one is wrong")
    reads.add_argument("--iteration", **integer, help="which one to read (default: the newest valid one)")

    vocabulary = "for a source without a tokenizer: GPT-2's vocabulary, or nanoGPT's meta.pkl"
    writes.add_argument("--vocab-file", metavar="FILE", help=vocabulary)
    writes.add_argument("--merge-file", metavar="FILE")
    writes.add_argument("--tokenizer-model", metavar="FILE", help="likewise, a SentencePiece model")
    writes.add_argument("--tokenizer-type", choices=("bytes", "builtin"), help="likewise, a tokenizer without files")
    splits.add_argument(*TENSOR_FLAGS, dest="tensor", default=1, **integer, help="ranks to write for (default: 1)")
    splits.add_argument(
        *PIPELINE_FLAGS, dest="pipeline", default=1, **integer, help="stages to write Megatron's files for (default: 1)"
    )
    splits.add_argument(VIRTUAL_FLAG, dest="virtual_layers", **integer, help="of interleaved stages")
    splits.add_argument(FIRST_LAYERS_FLAG, dest="first", **integer, help="layers of the first stage (megatron-core)")
    splits.add_argument(LAST_LAYERS_FLAG, dest="last", **integer, help="of the last stage, likewise")

    def command(name: str, help: str, folders: str, *parents: Parser) -> Parser:
        subparser = commands.add_parser(name, help=help, parents=[reads, *parents])
        for folder in folders.split():
            subparser.add_argument(folder.lower(), metavar=folder)
        return subparser

    command("inspect", "print its content", "DIR").add_argument("--json", action="store_true", help="as JSON")
    command("verify", "read and check every byte", "DIR")
    command("merge", "write the files of one tensor-parallel rank", "DIR OUT", writes)
    command("split", "write the files of N tensor-parallel ranks", "DIR OUT", writes, splits)
    convert = command("convert", "to another format", "DIR OUT", writes, splits)
    convert.add_argument("--to", choices=TARGETS, required=True)
    convert.add_argument(
        "--dtype",
        choices=("source", "fp32", "bf16", "fp16", "q8_0"),
        default="source",
        help="of an export to huggingface or gguf; q8_0, 8 bits in blocks of 32, is for gguf",
    )
    convert.add_argument("--check", action="store_true", help="compare the logits of both")
    command("diff", "tensor by tensor", "A B")
    parser.set_defaults(to=None, dtype="source", check=False)
    return parser.parse_args(argv)


def open_source(args: argparse.Namespace, path: str, *, check_hashes: bool = True) -> BaseCheckpoint:
    """Open the source at `path`. `args` has values that the files do not contain. If the files have hashes, every byte
    is verified, unless `check_hashes` is False."""
    hints = Hints(args.num_attention_heads, args.vocab_size, args.gelu, args.iteration)
    source = open_checkpoint(path, hints, log=print_stderr)
    if isinstance(source, NativeCheckpoint) and check_hashes and (problem := source.find_damage()):
        raise ValueError(f"{problem}; use --iteration N for a different one")
    return source


def open_pair(args: argparse.Namespace) -> list[BaseCheckpoint]:
    """Open the two sources of `diff`. If one source does not contain its number of heads, the number of the other
    source is used."""
    opened: dict[str, BaseCheckpoint] = {}
    for path in (args.a, args.b):
        with contextlib.suppress(ValueError):  # Without the number of heads, the error is raised again below.
            opened[path] = open_source(args, path)
    for source in opened.values():
        args.num_attention_heads = source.metadata["config"]["model"]["num_attention_heads"]
    return [opened[path] if path in opened else open_source(args, path) for path in (args.a, args.b)]


def find_tokenizer(args: argparse.Namespace, source: BaseCheckpoint) -> Tokenizer | None:
    """Return the tokenizer that the flags name, or the source's tokenizer, or None."""
    if args.tokenizer_type:
        return build_tokenizer(args.tokenizer_type)
    if args.tokenizer_model:
        return build_tokenizer("SentencePieceTokenizer", model_file=args.tokenizer_model)
    if args.vocab_file or args.merge_file:
        return build_tokenizer(
            kind_of_vocabulary(str(args.vocab_file)), vocab_file=args.vocab_file, merge_file=args.merge_file
        )
    if files := source.metadata.get("tokenizer_files"):
        return open_tokenizer(files)
    if source.metadata.get("tokenizer") is None:
        print_stderr(
            "the source has no tokenizer: give --vocab-file and --merge-file, --tokenizer-model, or --tokenizer-type, "
            "to add one"
        )
        return None
    return load_tokenizer(source.path.parent / "tokenizer")


def layout_from_args(args: argparse.Namespace) -> MegatronLayout:
    """Return the layout in which to write, from the flags. `merge` has no flags for the layout and writes for one
    rank."""
    fields = MegatronLayout.__dataclass_fields__
    return MegatronLayout(**{name: value for name, value in vars(args).items() if name in fields})


def write_format(args: argparse.Namespace, source: BaseCheckpoint, to: str, layout: MegatronLayout) -> Path:
    """Write `source` in the format `to`, for the ranks of `layout`, into the new folder `args.out`. Return the
    folder."""
    ranks = layout.tensor
    require(ranks > 0, f"--tensor-model-parallel-size must be positive, not {ranks}")
    require(to not in OTHERS or ranks == 1, f"--tensor-model-parallel-size {ranks}: {to} has no model parallelism")
    require(
        to in MEGATRON or layout == MegatronLayout(ranks),
        f"{PIPELINE_FLAG}, {VIRTUAL_FLAG}, {FIRST_LAYERS_FLAG} and {LAST_LAYERS_FLAG} are for Megatron's formats, "
        f"and this writes {to}" + ", which loads under any of them" * (to == "native"),
    )
    allowed = {"gguf": list(GGUF_TYPES), "huggingface": list(PRECISION_DTYPES)}.get(to, [])
    require(
        args.dtype == "source" or args.dtype in allowed,
        f"--dtype {args.dtype}: {to} has {', '.join(allowed) or 'the dtype of the source'}",
    )
    require(to != "gguf" or not args.check, "--check: this program writes gguf and does not read it")
    kinds = {name.partition(".")[0] for name in source.tensors}
    left_out = list(source.left_out)
    if "rng" in kinds:
        left_out.append("the random states, which belong to a layout")
    if "master" in kinds and to != "native":
        if not has_optimizer(source):
            left_out.append("the optimizer's state, which has no second moment of each weight")
        elif to in ("huggingface", "gguf", "megatron-core"):
            left_out.append("the optimizer's state, which this format does not hold")
    if source.metadata.get("tokenizer") and to in (*MEGATRON, "dcp"):
        left_out.append("the tokenizer, which this format does not hold")
    for line in left_out:
        print_stderr(f"left out: {line}")
    if to == "torch_dist":
        return write_torch_dist(source, args.out, layout, log=print_stderr)
    if to in MEGATRON:
        return write_megatron(source, args.out, to, layout, log=print_stderr)
    if to == "dcp":
        return write_dcp(source, args.out)
    tokenizer = find_tokenizer(args, source)
    if to == "huggingface":
        return write_huggingface(source, args.out, dtype=args.dtype, tokenizer=tokenizer, log=print_stderr)
    if to == "gguf":
        return write_gguf(source, args.out, dtype=args.dtype, tokenizer=tokenizer, log=print_stderr)
    if to == "nanogpt":
        return write_nanogpt(source, args.out, tokenizer=tokenizer, log=print_stderr)
    return write_native(source, args.out, tp_size=ranks, tokenizer=tokenizer)


def main(argv: list[str] | None = None) -> int:
    """Run the command line `argv` (default: sys.argv[1:]). Return the exit code."""
    return_freed_memory()
    args = parse_args(argv)
    if hasattr(args, "out"):
        require_new_folder(args.out)
    if args.command == "inspect":
        found = describe(open_source(args, args.dir, check_hashes=False))
        print(json.dumps(found, indent=1) if args.json else "\n".join(format_description(found)))
        return 0
    if args.command == "verify":
        return verify(args)
    if args.command == "diff":
        difference = compare_tensors(*open_pair(args))
        print("\n".join(format_difference(difference)))
        print("equal" if difference.equal else "NOT EQUAL")
        return 0 if difference.equal else 1
    source = open_source(args, args.dir)
    to = args.to or (source.format if source.format in MEGATRON else "native")
    layout = layout_from_args(args)
    path = write_format(args, source, to, layout)
    ranks = f", {plural(layout.tensor, 'tensor-parallel rank')}" * (to not in OTHERS)
    stages = f" of {layout.pipeline} pipeline stages" * (layout.pipeline > 1)
    print(f"{source.path} ({source.format}) is now {path} ({to}{ranks}{stages})")
    if args.check:
        # Megatron's files of 2019 do not contain the number of heads; DCP files contain neither the number of heads nor
        # the form of GELU.
        model = source.metadata["config"]["model"]
        hints = Hints(model["num_attention_heads"], gelu=model["gelu"] if to == "dcp" else None)
        dtype = args.dtype if to == "huggingface" else "fp32" if to in OTHERS else "source"
        kind = export_kind(source, dtype)
        greatest = compare_logits(source, open_checkpoint(args.out, hints, log=print_stderr), kind=kind, log=print)
        if not greatest <= CHECK_LIMIT:
            print(f"NOT EQUAL: more than {CHECK_LIMIT:g}")
            return 1
    return 0


def verify(args: argparse.Namespace) -> int:
    """Read every byte of the checkpoint and check all hashes. Return 1 if the checkpoint is damaged."""
    source = open_source(args, args.dir, check_hashes=False)
    tensors = plural(len(source.tensors), "tensor")
    if not isinstance(source, NativeCheckpoint):
        for name in source.tensors:
            source.read(name)
        print(f"{source.path}: {tensors} can be read; {source.format} files have no hashes to check")
        return 0
    if problem := source.verify():
        print(f"DAMAGED: {problem}")
        return 1
    print(f"{source.path}: {plural(len(source.files), 'file')}, all hashes match; the shards of {tensors} are complete")
    return 0
