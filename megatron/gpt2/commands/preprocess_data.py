"""Tokenize text into a .bin/.idx pair, which training reads with --data-path:

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix corpus \\
        --tokenizer-type GPT2BPETokenizer --vocab-file encoder.json --merge-file vocab.bpe --append-eod --workers 8

The input is JSON (one object per line, or one array), plain text (one document per file), or Parquet. Files may be
compressed with gzip or zstd. Each key in --json-keys gives a pair PREFIX_KEY_document.bin and .idx, with a manifest in
.json. After a kill, the same command continues. Unusable lines are skipped, counted, and written to PREFIX.bad.jsonl.
Exit codes: 0; 2 for bad input.
"""

import argparse
import sys
import time
from typing import Any

import numpy as np

from data_utils import IndexedDataset
from data_utils.command_line import Parser, bounded_float, plural, positive_int
from data_utils.corpora import MAX_BAD_FRACTION
from data_utils.indexed_dataset import TokenFile
from data_utils.preprocessing import PreprocessingJob, preprocess
from data_utils.tokenizers import KINDS

BAR = 40  # number of characters


def add_tokenizer_flags(parser: argparse.ArgumentParser, **options: Any) -> None:
    """Add --tokenizer-type, with `options` for argparse, and the flags for its files."""
    parser.add_argument("--tokenizer-type", choices=KINDS, **options)
    parser.add_argument("--vocab-file", metavar="FILE", help="GPT-2 vocabulary (default: one in the user's cache)")
    parser.add_argument("--merge-file", metavar="FILE", help="GPT-2 merges")
    parser.add_argument("--tokenizer-model", metavar="FILE", help="SentencePiece model")


def tokenizer_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `build_tokenizer` from the tokenizer flags."""
    files = {"vocab_file": args.vocab_file, "merge_file": args.merge_file, "model_file": args.tokenizer_model}
    return {"kind": args.tokenizer_type, **files}


def length_histogram(lengths: np.ndarray) -> list[str]:
    """Describe lengths in tokens: a line of statistics, then a histogram with the bins 0, 1, 2-3, 4-7 and so on, from
    the first bin to the last one with documents. Return [] for an empty data set."""
    if not len(lengths):
        return []
    p10, median, p90, p99 = np.percentile(lengths, [10, 50, 90, 99])
    # counts[d]: number of lengths with d binary digits; 0 has no digit
    counts = np.bincount(np.frexp(lengths.astype(np.float64))[1]).tolist()
    first = next(number for number, count in enumerate(counts) if count)
    labels = ["0", "1", *(f"{1 << number:,}-{(2 << number) - 1:,}" for number in range(1, len(counts) - 1))]
    width = len(labels[len(counts) - 1])
    return [
        f"length in tokens: mean {lengths.mean():,.0f}, p10 {p10:,.0f}, median {median:,.0f}, p90 {p90:,.0f}, "
        f"p99 {p99:,.0f}, longest {lengths.max():,}",
        *(
            f"{label:>{width}}  {count:>13,}  {'#' * -(-BAR * count // max(counts))}"
            for label, count in zip(labels[first:], counts[first:], strict=False)
        ),
    ]


def describe_tokens(data: TokenFile, manifest: dict[str, Any] | None) -> list[str]:
    """Describe the content of a token file, in several lines."""
    lines = [
        f"{data.prefix}: {data.kind}, {plural(len(data), 'document')}, {len(data.tokens):,} tokens "
        f"({data.dtype.name}), {data.tokens.nbytes:,} bytes"
    ]
    if manifest:
        made_by, names = manifest["tokenizer"], [entry["file"] for entry in manifest["inputs"]]
        known = f"{made_by['kind']} of {made_by['vocab_size']:,} ids, {made_by['fingerprint'][:16]}" if made_by else ""
        lines.append(f"tokenizer: {known or 'unknown'}")
        lines.append(f"made of {plural(len(names), 'file')}: {', '.join(names[:3])}" + ", ..." * (len(names) > 3))
        if manifest.get("text_bytes"):
            plain = manifest["tokens"] - manifest["documents"] * manifest["append_eod"]
            lines.append(
                f"{manifest['text_bytes']:,} bytes of text, {manifest['text_bytes'] / max(plain, 1):.2f} a token; "
                f"{manifest['bad_lines']:,} bad lines and {manifest['empty_documents']:,} empty documents left out"
            )
    return [*lines, *length_histogram(np.diff(data.document_starts))]


def main(argv: list[str] | None = None) -> int:
    """Run the command line `argv` (default: sys.argv[1:]). Return the exit code."""
    parser = Parser(description=__doc__)
    parser.add_argument("--input", nargs="+", required=True, metavar="PATH", help="files, glob patterns or folders")
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX")
    parser.add_argument(
        "--json-keys",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="fields or columns with text; each is written to a separate pair (default: text)",
    )
    add_tokenizer_flags(parser, required=True, help="as in training")
    parser.add_argument("--append-eod", action="store_true", help="end each document with the end-of-document token")
    parser.add_argument(
        "--workers", type=positive_int, default=1, metavar="N", help="processes; the result does not depend on them"
    )
    parser.add_argument(
        "--max-bad-fraction",
        type=bounded_float(0, 1),
        default=MAX_BAD_FRACTION,
        metavar="F",
        help="fail if more of the lines are unusable (default: %(default)s)",
    )
    ignored = parser.add_argument_group("Megatron's flags, ignored")
    ignored.add_argument(
        "--partitions", type=positive_int, metavar="N", help="the input is cut into shards by its size"
    )
    ignored.add_argument("--log-interval", type=int, metavar="N", help="a progress bar shows the rate")
    ignored.add_argument("--keep-sequential-samples", action="store_true", help="the order is always that of the input")
    ignored.add_argument("--dataset-impl", choices=["mmap"], help="the only implementation")
    args = parser.parse_args(argv)
    job = PreprocessingJob(
        inputs=tuple(args.input),
        output_prefix=args.output_prefix,
        keys=tuple(args.json_keys),
        tokenizer=tuple(tokenizer_arguments(args).items()),
        append_eod=args.append_eod,
        workers=args.workers,
        max_bad_fraction=args.max_bad_fraction,
    )
    started = time.monotonic()
    manifests = preprocess(job, log=lambda line: print(line, file=sys.stderr))
    seconds = time.monotonic() - started
    for key, manifest in manifests.items():
        print("\n".join(describe_tokens(IndexedDataset(job.output(key)), manifest)))
    size = sum(entry["bytes"] for entry in manifest["inputs"])
    print(f"{seconds:.1f} s, {size / 1e6 / seconds:.1f} MB/s of input")
    if not args.append_eod:
        print("the files have no end-of-document tokens, which training needs: --append-eod adds them")
    return 0
