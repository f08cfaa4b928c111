"""Look inside token files, show documents as text, and verify every byte:

    python tools/inspect_data.py corpus_text_document
    python tools/inspect_data.py corpus_text_document --documents 0 17 --tokenizer-type GPT2BPETokenizer
    python tools/inspect_data.py corpus_text_document --plot lengths.png
    python tools/inspect_data.py corpus_text_document --verify

It reads .bin/.idx pairs of ours and of Megatron, and the .bin files of nanoGPT and llm.c.
Exit codes: 0; 1 where damage was found; 2 for bad input.
"""

import argparse
from pathlib import Path

import numpy as np

from data_utils.command_line import Parser, program
from data_utils.files import damaged_parts
from data_utils.indexed_dataset import IndexedDataset
from data_utils.preprocessing.document_lengths import histogram, plot, summary
from data_utils.token_files import ForeignBin, open_tokens, prefix_of, read_manifest
from data_utils.tokenizers import KINDS, build_tokenizer
from data_utils.tokenizers.base import Tokenizer

GPT2_EOD = 50256
BLOCK = 1 << 24  # tokens


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """The flags."""
    parser = Parser(description=__doc__)
    parser.add_argument("path", metavar="PATH", help="the prefix of a pair, or a .bin file")
    parser.add_argument("--verify", action="store_true", help="read every byte: hashes of the manifest, range of ids")
    parser.add_argument("--documents", type=int, nargs="+", default=[], metavar="N", help="show these as text")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the lengths of the documents")
    parser.add_argument("--tokenizer-type", choices=KINDS, help="needed for --documents")
    parser.add_argument("--vocab-file", metavar="FILE", help="GPT-2 vocabulary (default: one in the user's cache)")
    parser.add_argument("--merge-file", metavar="FILE", help="GPT-2 merges")
    parser.add_argument("--tokenizer-model", metavar="FILE", help="SentencePiece model")
    return parser.parse_args(argv)


def verify(prefix: str, data: IndexedDataset | ForeignBin, vocab_size: int | None) -> list[str]:
    """What is wrong, one line for each damage. FileNotFoundError where there is nothing to compare with."""
    manifest = None if isinstance(data, ForeignBin) else read_manifest(prefix)
    if manifest is None and vocab_size is None:
        raise FileNotFoundError(
            f"{prefix}.json is missing, so there are no hashes to compare with; --tokenizer-type "
            "would at least check that every id is of its vocabulary"
        )
    found = []
    if manifest is not None:
        found = [line for suffix in (".bin", ".idx") for line in damaged_parts(f"{prefix}{suffix}", manifest[suffix])]
        vocab_size = vocab_size or (manifest["tokenizer"] or {}).get("vocab_size")
    if vocab_size is not None and len(data.tokens):
        blocks = [data.tokens[first : first + BLOCK] for first in range(0, len(data.tokens), BLOCK)]
        least, most = min(int(block.min()) for block in blocks), max(int(block.max()) for block in blocks)
        if not 0 <= least <= most < vocab_size:
            found.append(f"{prefix}.bin holds ids from {least} to {most}, but the vocabulary has {vocab_size:,}")
    return found


def show(data: IndexedDataset | ForeignBin, number: int, tokenizer: Tokenizer) -> None:
    """Print document `number` as text. ValueError where there is none of this number."""
    if not 0 <= number < len(data):
        raise ValueError(f"--documents {number}: there are documents 0 to {len(data) - 1:,}")
    tokens = data[number]
    print(f"--- document {number:,}: {len(tokens):,} tokens\n{tokenizer.decode(tokens)}")


def main(argv: list[str] | None = None) -> int:
    """Run the command line `argv` (default: this process's); returns the exit code."""
    args = arguments(argv)
    tokenizer = None
    if args.tokenizer_type:
        tokenizer = build_tokenizer(
            args.tokenizer_type, vocab_file=args.vocab_file, merge_file=args.merge_file, model_file=args.tokenizer_model
        )
    elif args.documents:
        raise ValueError("--documents needs --tokenizer-type, and its files where they are not in the user's cache")
    prefix = prefix_of(args.path)
    data = open_tokens(args.path, tokenizer.eod if tokenizer else GPT2_EOD)
    manifest = None if isinstance(data, ForeignBin) else read_manifest(prefix)
    made_by = manifest["tokenizer"] if manifest else None
    if made_by and tokenizer and made_by["fingerprint"] != tokenizer.fingerprint:
        raise ValueError(
            f"--tokenizer-type {tokenizer.kind}: {prefix}.json names another tokenizer, a "
            f"{made_by['kind']} of {made_by['vocab_size']:,} ids"
        )
    if args.verify:
        found = verify(prefix, data, tokenizer.vocab_size if tokenizer else None)
        print(
            "\n".join(f"DAMAGED: {line}" for line in found)
            or f"{prefix}: " + ("every byte as it was written" if manifest else "every id is of the vocabulary")
        )
        return 1 if found else 0
    lengths = np.diff(data.document_starts)
    kind = data.kind if isinstance(data, ForeignBin) else "indexed"
    print(
        f"{prefix}: {kind}, {len(data):,} documents, {len(data.tokens):,} tokens ({data.dtype.name}), "
        f"{data.tokens.nbytes:,} bytes"
    )
    if manifest:
        print(
            f"tokenizer: {made_by['kind']} of {made_by['vocab_size']:,} ids, {made_by['fingerprint'][:16]}"
            if made_by
            else "tokenizer: unknown"
        )
        print(
            f"made of {len(manifest['inputs'])} files: "
            + ", ".join(entry["file"] for entry in manifest["inputs"][:3])
            + ", ..." * (len(manifest["inputs"]) > 3)
        )
        if manifest.get("text_bytes"):
            plain = manifest["tokens"] - manifest["documents"] * manifest["append_eod"]
            print(
                f"{manifest['text_bytes']:,} bytes of text, {manifest['text_bytes'] / max(plain, 1):.2f} a token; "
                f"{manifest['bad_lines']:,} bad lines and {manifest['empty_documents']:,} empty documents left out"
            )
    if len(data):
        print("\n".join([summary(lengths), *histogram(lengths)]))
    for number in args.documents:
        assert tokenizer is not None
        show(data, number, tokenizer)
    if args.plot:
        plot(lengths, args.plot, f"{Path(prefix).name}: {len(data):,} documents, {len(data.tokens):,} tokens")
        print(f"wrote {args.plot}")
    return 0


cli = program(main)

if __name__ == "__main__":
    cli()
