"""Train a tokenizer: a byte-level BPE in GPT-2's format, or a SentencePiece model:

    python tools/train_tokenizer.py bpe --vocab-file encoder.json --merge-file vocab.bpe --train-data text.jsonl
    python tools/train_tokenizer.py sentencepiece --model tokenizer.model --vocab-size 8192 --train-data text.jsonl

Both tokenizers are lossless: decoding restores every text.
"""

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from data_utils import ensure_sentencepiece_model
from data_utils.command_line import Parser
from data_utils.corpora import BUILTIN, expand_paths, read_documents
from data_utils.tokenizers.gpt2 import END_OF_TEXT


def train_bpe(vocab_file: Path, merge_file: Path, vocab_size: int, texts: Iterable[str]) -> None:
    """Learn a byte-level BPE of at most `vocab_size` - 1 tokens. Write GPT-2's two files: the tokens, first the 256
    bytes and last EOD, and the merges."""
    from tokenizers import ByteLevelBPETokenizer

    if vocab_size < 257:
        raise ValueError(f"--vocab-size must be at least 257, 256 bytes and EOD, not {vocab_size}")
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocab_size - 1, min_frequency=0, show_progress=sys.stderr.isatty())
    model = json.loads(tokenizer.to_str())["model"]
    count = len(model["vocab"])
    merges = ["#version: 0.2", *(pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"])]
    vocabulary = json.dumps({**model["vocab"], END_OF_TEXT: count})
    for path, text in ((vocab_file, vocabulary), (merge_file, "\n".join(merges) + "\n")):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    print(f"{vocab_file}, {merge_file}: {count} tokens and EOD")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line `argv` (default: sys.argv[1:])."""
    parser = Parser(description=__doc__)
    kinds = parser.add_subparsers(dest="kind", required=True)
    bpe = kinds.add_parser("bpe", help="a byte-level BPE for --tokenizer-type GPT2BPETokenizer")
    bpe.add_argument("--vocab-file", type=Path, required=True, help="the JSON file of tokens to write")
    bpe.add_argument("--merge-file", type=Path, required=True, help="the file of merges to write")
    bpe.add_argument("--vocab-size", type=int, default=32768)
    model = kinds.add_parser("sentencepiece", help="a lossless SentencePiece BPE")
    model.add_argument("--model", required=True, help="the file to write; an existing one is kept")
    model.add_argument("--vocab-size", type=int, default=8192)
    for made in (bpe, model):
        made.add_argument("--train-data", nargs="*", default=[], metavar="FILE", help="default: the built-in corpus")
        made.add_argument("--text-key", help="the JSON field that holds the text (default: text, else sentence)")
    args = parser.parse_args(argv)
    if args.kind == "bpe":
        files = expand_paths(args.train_data or [BUILTIN], "--train-data")
        texts = (text for path in files for text in read_documents(path, args.text_key, print))
        train_bpe(args.vocab_file, args.merge_file, args.vocab_size, texts)
    else:
        ensure_sentencepiece_model(
            args.model, train_data=args.train_data, text_key=args.text_key, vocab_size=args.vocab_size, log=print
        )
