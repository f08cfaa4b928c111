"""Train a tokenizer: a byte-level BPE in GPT-2's format, a SentencePiece model, or the small BPE in data_utils.

    python tools/train_tokenizer.py bpe --vocab-file encoder.json --merge-file vocab.bpe --train-data text.jsonl
    python tools/train_tokenizer.py sentencepiece --model tokenizer.model --vocab-size 8192 --train-data text.jsonl
    python tools/train_tokenizer.py builtin

All are lossless: decoding restores every text.
"""

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from data_utils import ensure_sentencepiece_model, tokenizers
from data_utils.command_line import Parser
from data_utils.corpora import BUILTIN, expand_paths, read_documents
from data_utils.corpora.builtin import builtin_documents
from data_utils.tokenizers.gpt2 import BUILTIN_FILE, END_OF_TEXT


def learn_bpe(texts: Iterable[str], vocab_size: int) -> dict[str, Any]:
    """Learn the `vocab` and `merges` of a byte-level BPE. It has at most `vocab_size` - 1 tokens, first the 256 bytes,
    so that EOD can be added."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    if vocab_size < 257:
        raise ValueError(f"--vocab-size must be at least 257, 256 bytes and EOD, not {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        show_progress=sys.stderr.isatty(),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    model: dict[str, Any] = json.loads(tokenizer.to_str())["model"]
    return model


def train_bpe(vocab_file: Path, merge_file: Path, vocab_size: int, texts: Iterable[str]) -> None:
    """Learn at most `vocab_size` - 1 tokens. Write GPT-2's two files: the tokens, with EOD as the last one, and the
    merges."""
    model = learn_bpe(texts, vocab_size)
    count = len(model["vocab"])
    merges = ["#version: 0.2", *(pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"])]
    vocabulary = json.dumps({**model["vocab"], END_OF_TEXT: count})
    for path, text in ((vocab_file, vocabulary), (merge_file, "\n".join(merges) + "\n")):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    print(f"{vocab_file}, {merge_file}: {count} tokens and EOD")


def train_builtin(output: Path, vocab_size: int) -> None:
    """Learn `vocab_size` - 1 tokens and write them in the order of learning. EOD gets the last id."""
    texts = builtin_documents()
    texts = texts[: len(texts) * 17 // 20]  # The rest is the text that a run holds out.
    tokens = list(learn_bpe(texts, vocab_size)["vocab"])  # The order is that of the ids.
    lines = [json.dumps(tokens[first : first + 16])[1:-1] for first in range(0, len(tokens), 16)]
    output.write_text("[" + ",\n ".join(lines) + "]\n", encoding="ascii")
    print(f"{output}: {len(tokens)} tokens and EOD")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line `argv` (default: this process's)."""
    parser = Parser(description=__doc__)
    kinds = parser.add_subparsers(dest="kind", required=True)
    builtin = kinds.add_parser("builtin", help="the small BPE in data_utils")
    builtin.add_argument("--output", type=Path, default=Path(tokenizers.__file__).with_name(BUILTIN_FILE))
    builtin.add_argument("--vocab-size", type=int, default=4096)
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
    if args.kind == "builtin":
        train_builtin(args.output, args.vocab_size)
    elif args.kind == "bpe":
        files = expand_paths(args.train_data or [BUILTIN], "--train-data")
        texts = (text for path in files for text in read_documents(path, args.text_key, print))
        train_bpe(args.vocab_file, args.merge_file, args.vocab_size, texts)
    else:
        ensure_sentencepiece_model(
            args.model, train_data=args.train_data, text_key=args.text_key, vocab_size=args.vocab_size, log=print
        )
