"""Inspect token files, print documents as text, and verify every byte:

    python tools/inspect_data.py corpus_text_document
    python tools/inspect_data.py corpus_text_document --documents 0 17 --tokenizer-type GPT2BPETokenizer
    python tools/inspect_data.py corpus_text_document --plot lengths.png
    python tools/inspect_data.py corpus_text_document --verify

inspect_data.py reads our and Megatron's .bin/.idx pairs, and .bin files of nanoGPT and llm.c. Exit codes: 0; 1 if
damage was found; 2 for bad input.
"""

from pathlib import Path
from typing import Any

import numpy as np

from data_utils.command_line import Parser, missing_package, plural
from data_utils.files import find_damaged_chunks
from data_utils.indexed_dataset import TokenFile, open_token_file
from data_utils.tokenizers import build_tokenizer
from megatron.gpt2.commands.merge_datasets import GPT2_EOD
from megatron.gpt2.commands.preprocess_data import add_tokenizer_flags, describe_tokens, tokenizer_arguments

TOKENS_AT_ONCE = 1 << 24


def verify(data: TokenFile, manifest: dict[str, Any] | None, vocab_size: int | None) -> list[str]:
    """Return one line for each damaged part. Raises FileNotFoundError if there is neither a manifest nor a
    vocabulary."""
    if manifest is None and vocab_size is None:
        raise FileNotFoundError(
            f"{data.prefix}.json is missing, which has the hashes to compare with; give --tokenizer-type "
            "to check that every id is in its vocabulary"
        )
    found = []
    if manifest is not None:
        for suffix in (".bin", ".idx"):
            found += find_damaged_chunks(f"{data.prefix}{suffix}", manifest[suffix])
        vocab_size = vocab_size or (manifest["tokenizer"] or {}).get("vocab_size")
    if vocab_size is not None and len(data.tokens):
        blocks = [data.tokens[first : first + TOKENS_AT_ONCE] for first in range(0, len(data.tokens), TOKENS_AT_ONCE)]
        least, most = min(int(block.min()) for block in blocks), max(int(block.max()) for block in blocks)
        if not 0 <= least <= most < vocab_size:
            found.append(f"{data.prefix}.bin holds ids from {least} to {most}, but the vocabulary has {vocab_size:,}")
    return found


def plot_lengths(lengths: np.ndarray, path: Path, title: str) -> None:
    """Save a histogram of the document lengths to `path`. Raises ValueError if matplotlib is missing or does not
    support the suffix."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise missing_package(f"--plot {path}", "matplotlib") from None
    figure = Figure(figsize=(6, 3.6), dpi=120, layout="constrained")
    axes = figure.subplots()
    axes.hist(lengths[lengths > 0], bins=np.geomspace(1, lengths.max(initial=2), 40).tolist())
    axes.set(title=title, xscale="log", xlabel="document length in tokens", ylabel="documents")
    if path.suffix.lower().lstrip(".") not in figure.canvas.get_supported_filetypes():
        raise ValueError(f"--plot {path}: give a file that ends in .png, .svg or .pdf")
    figure.savefig(path)


def main(argv: list[str] | None = None) -> int:
    """Run the command line `argv` (default: sys.argv[1:]). Return the exit code."""
    parser = Parser(description=__doc__)
    parser.add_argument("path", metavar="PATH", help="the prefix of a pair, or a .bin file")
    parser.add_argument("--verify", action="store_true", help="read every byte: hashes of the manifest, range of ids")
    parser.add_argument("--documents", type=int, nargs="+", default=[], metavar="N", help="print these as text")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the document lengths to FILE")
    add_tokenizer_flags(parser, help="needed for --documents")
    args = parser.parse_args(argv)
    tokenizer = build_tokenizer(**tokenizer_arguments(args)) if args.tokenizer_type else None
    if args.documents and tokenizer is None:
        raise ValueError("--documents needs --tokenizer-type, and its files if they are not in the user's cache")
    data = open_token_file(args.path, tokenizer.eod if tokenizer else GPT2_EOD)
    manifest = data.manifest()
    if tokenizer:
        data.check_tokenizer(tokenizer)
    if args.verify:
        damage = verify(data, manifest, tokenizer.vocab_size if tokenizer else None)
        result = "all hashes match" if manifest else "every id is in the vocabulary"
        print("\n".join(f"DAMAGED: {line}" for line in damage) or f"{data.prefix}: {result}")
        return 1 if damage else 0
    print("\n".join(describe_tokens(data, manifest)))
    for number in args.documents:
        if not 0 <= number < len(data):
            raise ValueError(f"--documents {number}: there are documents 0 to {len(data) - 1:,}")
        assert tokenizer is not None
        print(f"--- document {number:,}: {plural(len(data[number]), 'token')}\n{tokenizer.decode(data[number])}")
    if args.plot:
        title = f"{Path(data.prefix).name}: {plural(len(data), 'document')}, {plural(len(data.tokens), 'token')}"
        plot_lengths(np.diff(data.document_starts), args.plot, title)
        print(f"wrote {args.plot}")
    return 0
