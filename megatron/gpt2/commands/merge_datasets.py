"""Merge token files into one .bin/.idx pair with a manifest, in the order given:

    python tools/merge_datasets.py --input part1_text_document part2_text_document --output-prefix all_text_document

A folder stands for all pairs in it, in order of their names, as for Megatron. nanoGPT's and llm.c's files are named
with their .bin.
"""

from pathlib import Path

from data_utils.command_line import Parser
from data_utils.preprocessing import merge

GPT2_EOD = 50256


def sources(inputs: list[str]) -> list[str]:
    """The prefixes and files that `inputs` name, each folder replaced by the pairs in it. FileNotFoundError where it
    has none."""
    found = []
    for name in inputs:
        if not Path(name).is_dir():
            found.append(name)
            continue
        pairs = sorted(str(path.with_suffix("")) for path in Path(name).glob("*.idx"))
        if not pairs:
            raise FileNotFoundError(f"--input {name}: the folder holds no .idx file")
        found += pairs
    return found


def main(argv: list[str] | None = None) -> int:
    """Run the command line `argv` (default: this process's); returns the exit code."""
    parser = Parser(description=__doc__)
    parser.add_argument("--input", nargs="+", required=True, metavar="PATH", help="prefixes, .bin files or folders")
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX")
    parser.add_argument(
        "--eod",
        type=int,
        default=GPT2_EOD,
        metavar="ID",
        help="the id that ends a document in files without .idx (default: %(default)s, GPT-2's)",
    )
    args = parser.parse_args(argv)
    names = sources(args.input)
    manifest = merge(names, args.output_prefix, args.eod)
    print(
        f"{args.output_prefix}.bin, .idx, .json: {manifest['documents']:,} documents and {manifest['tokens']:,} "
        f"tokens ({manifest['dtype']}) of {len(names)} files"
    )
    return 0
