"""Merge token files, in the given order, into one .bin/.idx pair with a manifest:

    python tools/merge_datasets.py --input part1_text_document part2_text_document --output-prefix all_text_document

A folder means all pairs inside, sorted by name, as in Megatron. Name a file of nanoGPT or llm.c with its suffix .bin.
"""

from pathlib import Path

from data_utils.command_line import Parser, plural
from data_utils.preprocessing import merge_datasets

GPT2_EOD = 50256


def expand_folders(inputs: list[str]) -> list[str]:
    """Replace each folder in `inputs` by the prefixes of its pairs. Raises FileNotFoundError for a folder without
    pairs."""
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
    """Run the command line `argv` (default: sys.argv[1:]). Return the exit code."""
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
    names = expand_folders(args.input)
    manifest = merge_datasets(names, args.output_prefix, args.eod)
    print(
        f"{args.output_prefix}.bin, .idx, .json: {plural(manifest['documents'], 'document')} and "
        f"{manifest['tokens']:,} tokens ({manifest['dtype']}) of {plural(len(names), 'file')}"
    )
    return 0
