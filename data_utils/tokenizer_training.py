"""Training of a SentencePiece model on the files that a run trains on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from data_utils.corpora.documents import BUILTIN, MOST_BAD_LINES, Log, documents, files_of
from data_utils.files.atomic import file_lock
from data_utils.tokenizers.sentencepiece import train_sentencepiece

TRAINING_CHARACTERS = 100_000_000


def ensure_sentencepiece_model(model_file: str, *, train_data: Sequence[str], text_key: str | None, vocab_size: int,
                               log: Log, max_bad_fraction: float = MOST_BAD_LINES) -> None:
    """Train `model_file` on the files in `train_data`, or on the built-in corpus, if it is missing. One process trains,
    the others wait for it. ValueError or FileNotFoundError names a flag."""
    if Path(model_file).exists():
        return

    def texts() -> Iterator[str]:
        size = 0
        for path in files or [BUILTIN]:
            for text in documents(path, text_key, log, max_bad_fraction):
                if size > TRAINING_CHARACTERS:
                    log(f"the SentencePiece model is trained on the first {size:,} characters")
                    return
                size += len(text)
                yield text[:TRAINING_CHARACTERS]

    files = [file for path in train_data for file in files_of(path, "--train-data")]
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(file_lock(Path(f"{model_file}.lock"), lambda: log(
                "another process is training the SentencePiece model: waiting for it")))
        except OSError as error:
            raise ValueError(f"--tokenizer-model {model_file} cannot be written: {error.strerror}") from None
        if not Path(model_file).exists():
            log(f"training a SentencePiece model of {vocab_size} pieces: {model_file}")
            train_sentencepiece(texts(), model_file, vocab_size)
