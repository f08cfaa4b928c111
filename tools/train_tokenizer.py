"""Train a tokenizer: the small byte-level BPE that data_utils ships for the built-in corpus, or a SentencePiece model.

    python tools/train_tokenizer.py builtin
    python tools/train_tokenizer.py sentencepiece --model tokenizer.model --vocab-size 8192 --train-data text.jsonl
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import data_utils
from data_utils.builtin_corpus import builtin_documents
from data_utils.tokenization_gpt2 import BUILTIN_FILE


def train_builtin(output: Path, vocab_size: int) -> None:
    """Learn `vocab_size` - 1 tokens, the last id being EOD, and write them in the order learnt."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # GPT-2's pattern and byte alphabet
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - 1, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(builtin_documents(), trainer)
    tokens = [tokenizer.id_to_token(index) for index in range(vocab_size - 1)]
    lines = [json.dumps(tokens[first:first + 16])[1:-1] for first in range(0, len(tokens), 16)]
    output.write_text("[" + ",\n ".join(lines) + "]\n", encoding="ascii")
    print(f"{output}: {len(tokens)} tokens and EOD")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    builtin = kinds.add_parser("builtin", help="the BPE that the project ships")
    builtin.add_argument("--output", type=Path, default=Path(data_utils.__file__).with_name(BUILTIN_FILE))
    builtin.add_argument("--vocab-size", type=int, default=4096)
    model = kinds.add_parser("sentencepiece", help="a lossless SentencePiece BPE")
    model.add_argument("--model", required=True, help="the file to write; one that exists is left as it is")
    model.add_argument("--vocab-size", type=int, default=8192)
    model.add_argument("--train-data", nargs="*", default=[], metavar="FILE", help="default: the built-in corpus")
    model.add_argument("--text-key", help="the JSON field that holds the text (default: text, else sentence)")
    given = parser.parse_args()
    try:
        if given.kind == "builtin":
            train_builtin(given.output, given.vocab_size)
        else:
            data_utils.ensure_sentencepiece_model(given.model, train_data=given.train_data, text_key=given.text_key,
                                                  vocab_size=given.vocab_size, log=print)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
