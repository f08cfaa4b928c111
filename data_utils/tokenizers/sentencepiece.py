"""SentencePiece with settings under which no character is lost, and the training of a model."""

import contextlib
import io
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

from data_utils.corpora.documents import BUILTIN, MOST_BAD_LINES, Log, documents, files_of, utf8
from data_utils.files import file_lock, fingerprint_of, replacing
from data_utils.tokenizers.base import Tokenizer, split_text

SPACE = "\u2581"  # what SentencePiece writes for a space
SPACE_IN_BYTES = [f"<0x{value:02X}>" for value in SPACE.encode()]
TRAINING_CHARACTERS = 100_000_000


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model. `eod` is the model's end-of-sentence id; a model without one gets one more id.

    A model that `train_sentencepiece` made loses nothing. One trained elsewhere may normalise text or put a space
    before it; decoding then returns the normalised text.
    """

    def __init__(self, model: bytes, name: str) -> None:
        sentencepiece = _import_sentencepiece()
        self._model = sentencepiece.SentencePieceProcessor()
        try:
            self._model.LoadFromSerializedProto(model)
            token_bytes = [self._bytes_of(index) for index in range(self._model.vocab_size())]
        except (RuntimeError, OSError, ValueError):
            raise ValueError(f"--tokenizer-model {name} is not a SentencePiece model") from None
        # A U+2581 in the text would come back as a space: it is written as its three bytes, where the model has them.
        marks = [self._model.piece_to_id(piece) for piece in SPACE_IN_BYTES]
        self._mark = marks if all(map(self._model.is_byte, marks)) else None
        eod = self._model.eos_id()
        if eod < 0:
            eod = len(token_bytes)
            token_bytes.append(b"")
        fingerprint = fingerprint_of("sentencepiece", model)
        super().__init__("SentencePieceTokenizer", token_bytes, eod, fingerprint, {"sentencepiece.model": model})

    def _bytes_of(self, index: int) -> bytes:
        """The text that a piece of the model stands for. ValueError if the model has no text or byte there."""
        piece: str = self._model.id_to_piece(index)
        if self._model.is_byte(index):
            return bytes([int(piece[3:5], 16)])
        if self._model.is_control(index) or self._model.is_unknown(index):
            return b""
        return piece.replace(SPACE, " ").encode()

    def encode(self, text: str) -> list[int]:
        """The ids of `text`. ValueError where it holds a lone surrogate."""
        utf8(text)
        ids: list[int] = []
        for number, part in enumerate(text.split(SPACE) if self._mark else [text]):
            if number and self._mark:
                ids += self._mark
            # The library's memory grows with what it is given at once.
            for piece in split_text(part, 1 << 16):
                ids += self._model.encode(piece)
        return ids


def train_sentencepiece(texts: Iterable[str], model_file: str | Path, vocab_size: int) -> None:
    """Train a BPE with byte fallback and `vocab_size` tokens on `texts` and write it to `model_file`, atomically.
    ValueError where there is no text, the text is too short for the size, or the file cannot be written."""
    sentencepiece = _import_sentencepiece()
    model = io.BytesIO()
    # Long documents go in as parts: the trainer drops what is longer than its limit. `utf8` refuses lone surrogates.
    sentences = (part for text in texts for part in split_text(text, 1 << 14) if utf8(part))
    first = next(sentences, None)
    if first is None:
        raise ValueError("there is no text to train a SentencePiece model on: see --train-data")
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=chain([first], sentences),
            model_writer=model,
            vocab_size=vocab_size,
            model_type="bpe",
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            max_sentence_length=1 << 24,
            character_coverage=1.0 - 5e-4,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        raise ValueError(
            f"no SentencePiece model of --tokenizer-vocab-size {vocab_size} can be trained on this text: "
            + " ".join(str(error).split())
        ) from None
    path = Path(model_file)
    with _errors_of_writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(model.getvalue())


def ensure_sentencepiece_model(
    model_file: str,
    *,
    train_data: Sequence[str],
    text_key: str | None,
    vocab_size: int,
    log: Log,
    max_bad_fraction: float = MOST_BAD_LINES,
) -> None:
    """Train `model_file` on the files in `train_data`, or on the built-in corpus, if it is missing. One process trains,
    the others wait for it. ValueError or FileNotFoundError names a flag."""
    if Path(model_file).exists():
        return
    files = [file for path in train_data for file in files_of(path, "--train-data")] or [BUILTIN]

    def texts() -> Iterator[str]:
        size = 0
        for text in chain.from_iterable(documents(path, text_key, log, max_bad_fraction) for path in files):
            if size > TRAINING_CHARACTERS:
                log(f"the SentencePiece model is trained on the first {size:,} characters")
                return
            size += len(text)
            yield text[:TRAINING_CHARACTERS]

    def waiting() -> None:
        log("another process is training the SentencePiece model: waiting for it")

    with _errors_of_writing(model_file), file_lock(Path(f"{model_file}.lock"), waiting):
        if not Path(model_file).exists():
            log(f"training a SentencePiece model of {vocab_size} pieces: {model_file}")
            train_sentencepiece(texts(), model_file, vocab_size)


@contextlib.contextmanager
def _errors_of_writing(model_file: str | Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(f"--tokenizer-model {model_file} cannot be written: {error.strerror}") from None


def _import_sentencepiece():  # type: ignore[no-untyped-def]
    try:
        import sentencepiece
    except ImportError:
        raise ValueError(
            "--tokenizer-type SentencePieceTokenizer needs the package sentencepiece: pip install sentencepiece"
        ) from None
    return sentencepiece
