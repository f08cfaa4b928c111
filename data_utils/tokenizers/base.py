"""Text to ids and back: what a tokenizer is, and those of bytes, of characters and of SentencePiece.

Every tokenizer is lossless (`decode(encode(text)) == text`), or refuses a text that it has no ids for, and no text can
make it emit its end-of-document id. Only a SentencePiece model that was trained elsewhere may normalise text or put a
space before it; decoding then returns the normalised text.
"""

import contextlib
import io
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from data_utils.corpora import BUILTIN, MOST_BAD_LINES, Log, documents, files_of, utf8
from data_utils.files import file_lock, fingerprint_of, one_line, replacing
from data_utils.files.inert_pickle import read_pickle

FACTS_FILE = "tokenizer_facts.json"
OLD_FACTS_FILE = "tokenizer.json"  # until a library's own file of other content was found to have this name
CHARACTERS_FILE = "characters.json"
MODEL_FILE = "sentencepiece.model"
NO_EOD = -1  # as `Tokenizer.eod`
PART_CHARACTERS = 1 << 20
SINGLE_SPACE = re.compile(r" (?=\S)(?<=\S )")
SPACE = "\u2581"  # what SentencePiece writes for a space
SPACE_IN_BYTES = [f"<0x{value:02X}>" for value in SPACE.encode()]
TRAINING_CHARACTERS = 100_000_000  # of a SentencePiece model


def split_text(text: str, limit: int = PART_CHARACTERS) -> Iterator[str]:
    """`text` in parts of `limit` to 2 · `limit` characters, so that a file of gigabytes needs no list of all its ids.

    A cut lies before a single space between two other characters, where every tokenizer starts a new token: the ids
    are those of the whole text. If the second `limit` has no such space, the cut lies at its end.
    """
    start = 0
    while len(text) - start > 2 * limit:
        space = SINGLE_SPACE.search(text, start + limit, start + 2 * limit + 1)  # with the character behind it
        cut = space.start() if space else start + 2 * limit
        yield text[start:cut]
        start = cut
    yield text[start:]


class Tokenizer(ABC):
    """Text to ids and back.

    `token_bytes` holds the bytes of text that each id stands for, nothing for the end-of-document id `eod`, which is
    NO_EOD if there is none. `byte_lengths` are their lengths, int64 [vocab_size]. `fingerprint` is a sha256 over
    everything that decides ids. `files` are the file names and contents that make this tokenizer again. `engine` is
    the library that runs it if several can.
    """

    engine = ""

    def __init__(
        self, kind: str, token_bytes: Sequence[bytes], eod: int, fingerprint: str, files: Mapping[str, bytes]
    ) -> None:
        self.kind, self.token_bytes, self.vocab_size = kind, token_bytes, len(token_bytes)
        self.eod, self.fingerprint, self.files = eod, fingerprint, files
        self.byte_lengths = np.fromiter(map(len, token_bytes), dtype=np.int64, count=len(token_bytes))

    @property
    def has_eod(self) -> bool:
        """Whether an id ends documents."""
        return self.eod != NO_EOD

    @property
    def start(self) -> int:
        """The id after which a text begins: the end of a document, else a new line, else 0."""
        if self.has_eod:
            return self.eod
        return next((number for number, data in enumerate(self.token_bytes) if data == b"\n"), 0)

    @abstractmethod
    def encode(self, text: str) -> np.ndarray | list[int]:
        """The ids of `text`, never `eod`. ValueError if `text` holds a lone surrogate."""

    def encode_utf8(self, data: bytes) -> np.ndarray | list[int]:
        """The ids of a text, given as valid UTF-8."""
        return self.encode(data.decode("utf-8"))

    def decode_bytes(self, ids: Sequence[int] | np.ndarray) -> bytes:
        """The bytes that `ids` stand for; ValueError for an id outside the vocabulary."""
        ids = np.asarray(ids, dtype=np.int64)
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < self.vocab_size:
            raise ValueError(f"token ids {ids.min()} to {ids.max()} do not fit a vocabulary of {self.vocab_size}")
        return b"".join(map(self.token_bytes.__getitem__, ids.tolist()))

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text; bytes that do not form UTF-8, as a model may generate, become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def save(self, directory: str | Path) -> None:
        """Write all that `load_tokenizer` needs into `directory`."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        facts = {name: getattr(self, name) for name in ("kind", "fingerprint", "vocab_size")}
        facts["files"] = sorted(self.files)
        content = (json.dumps(facts, indent=1) + "\n").encode()
        for name, data in [*self.files.items(), (FACTS_FILE, content)]:
            (directory / name).write_bytes(data)


class ByteTokenizer(Tokenizer):
    """Needs no library and no file. Ids 0 to 255 are the bytes of UTF-8, 256 ends a document."""

    def __init__(self) -> None:
        token_bytes = [bytes([value]) for value in range(256)] + [b""]
        super().__init__("bytes", token_bytes, 256, fingerprint_of("bytes"), {})

    def encode(self, text: str) -> np.ndarray:
        """uint8 [bytes of text]."""
        return self.encode_utf8(utf8(text))

    def encode_utf8(self, data: bytes) -> np.ndarray:
        """uint8 [bytes of data]: the bytes themselves."""
        return np.frombuffer(data, dtype=np.uint8)


class CharacterTokenizer(Tokenizer):
    """An id for each character and no end of document, as nanoGPT's data/*_char have them in their meta.pkl.

    characters: that of each id. ValueError if one is not a character or occurs twice."""

    def __init__(self, characters: Sequence[str]) -> None:
        if (
            not isinstance(characters, Sequence)
            or not characters
            or any(not isinstance(c, str) or len(c) != 1 for c in characters)
        ):
            raise ValueError("a vocabulary of characters holds one character for each id")
        if len(set(characters)) < len(characters):
            raise ValueError("a character has two ids")
        content = utf8(json.dumps(list(characters), ensure_ascii=False) + "\n")
        fingerprint = fingerprint_of("characters", content)
        super().__init__("characters", [utf8(c) for c in characters], NO_EOD, fingerprint, {CHARACTERS_FILE: content})
        self.characters = tuple(characters)
        codes = [ord(c) for c in characters]
        self._ids = np.full(max(codes) + 2, -1, dtype=np.int32)  # by code point; the last one stands for all above
        self._ids[codes] = np.arange(len(codes))

    def encode(self, text: str) -> np.ndarray:
        """int32 [characters of text]. ValueError, with the character, if `text` holds one without an id."""
        codes = np.frombuffer(utf8(text).decode().encode("utf-32-le"), dtype="<u4")
        ids: np.ndarray = self._ids[np.minimum(codes, len(self._ids) - 1)]
        if (ids < 0).any():
            missing = chr(codes[np.argmax(ids < 0)])
            raise ValueError(
                f"the text holds {missing!r} (U+{ord(missing):04X}), which is none of the "
                f"{self.vocab_size:,} characters of the vocabulary"
            )
        return ids


def read_characters(path: str | Path) -> CharacterTokenizer:
    """The tokenizer in nanoGPT's meta.pkl, or in our own JSON list. ValueError or FileNotFoundError, one line."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"--vocab-file: no such file: {path}")
    try:
        data = path.read_bytes()
        if path.suffix == ".json":
            return CharacterTokenizer(json.loads(data))
        meta, _ = read_pickle(data)
        characters = meta.get("itos") if isinstance(meta, dict) else None
        if not isinstance(characters, dict):
            raise ValueError("no meta.pkl of nanoGPT: it has no itos, the character of each id")
        if sorted(characters, key=str) != sorted(range(len(characters)), key=str):
            raise ValueError("its ids are not 0, 1, 2 …")
        return CharacterTokenizer([characters[number] for number in range(len(characters))])
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path}: {one_line(error)}") from None


# --- SentencePiece


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model. `eod` is the model's end-of-sentence id; a model without one gets one more id."""

    def __init__(self, model: bytes, name: str) -> None:
        self._model = _sentencepiece().SentencePieceProcessor()
        try:
            self._model.LoadFromSerializedProto(model)
            token_bytes = [self._bytes_of(index) for index in range(self._model.vocab_size())]
        except (RuntimeError, OSError, ValueError):
            raise ValueError(f"--tokenizer-model {name} is not a SentencePiece model") from None
        # A U+2581 in the text would come back as a space: it is written as its three bytes, if the model has them.
        marks = [self._model.piece_to_id(piece) for piece in SPACE_IN_BYTES]
        self._mark = marks if all(map(self._model.is_byte, marks)) else None
        eod = self._model.eos_id()
        if eod < 0:
            eod = len(token_bytes)
            token_bytes.append(b"")
        fingerprint = fingerprint_of("sentencepiece", model)
        super().__init__("SentencePieceTokenizer", token_bytes, eod, fingerprint, {MODEL_FILE: model})

    def _bytes_of(self, index: int) -> bytes:
        """The text that a piece of the model stands for. ValueError if the model has no text or byte there."""
        piece: str = self._model.id_to_piece(index)
        if self._model.is_byte(index):
            return bytes([int(piece[3:5], 16)])
        if self._model.is_control(index) or self._model.is_unknown(index):
            return b""
        return piece.replace(SPACE, " ").encode()

    def encode(self, text: str) -> list[int]:
        """The ids of `text`. ValueError if it holds a lone surrogate."""
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
    ValueError if there is no text, the text is too short for the size, or the file cannot be written."""
    model = io.BytesIO()
    # Long documents go in as parts: the trainer drops what is longer than its limit. `utf8` refuses lone surrogates.
    sentences = (part for text in texts for part in split_text(text, 1 << 14) if utf8(part))
    first = next(sentences, None)
    if first is None:
        raise ValueError("there is no text to train a SentencePiece model on: see --train-data")
    try:
        _sentencepiece().SentencePieceTrainer.train(
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
    with _errors_of_writing(model_file):
        Path(model_file).parent.mkdir(parents=True, exist_ok=True)
        with replacing(model_file) as file:
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
    files = files_of(train_data, "--train-data") or [BUILTIN]

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


def _sentencepiece() -> Any:
    try:
        import sentencepiece
    except ImportError:
        raise ValueError(
            "--tokenizer-type SentencePieceTokenizer needs the package sentencepiece: pip install sentencepiece"
        ) from None
    return sentencepiece
