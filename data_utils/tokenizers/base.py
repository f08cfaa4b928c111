"""The base class of tokenizers, and tokenizers of bytes, of characters and of SentencePiece.

Every tokenizer is lossless (`decode(encode(text)) == text`) or refuses a text for which it has no ids. No text is ever
encoded as the end-of-document id. A SentencePiece model that `train_sentencepiece` did not train may normalise text or
put a space before the text, and decoding returns the normalised text.
"""

import io
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from data_utils.command_line import Log, missing_package
from data_utils.corpora import BUILTIN, MAX_BAD_FRACTION, check_exists, expand_paths, read_documents, utf8
from data_utils.files import atomic_write, file_lock, fingerprint_of, make_folder, read_file, wrap_errors
from data_utils.files.restricted_pickle import read_pickle

METADATA_FILE = "tokenizer_facts.json"
# the name of the metadata file in old checkpoints; HF tokenizers uses this name for another file
OLD_METADATA_FILE = "tokenizer.json"
CHARACTERS_FILE = "characters.json"
MODEL_FILE = "sentencepiece.model"
MAX_FILE_BYTES = 256 << 20  # Larger files of a tokenizer are refused. GPT-2's files have 1 MB.
NO_EOD = -1  # `Tokenizer.eod` of a tokenizer that has no end-of-document id
PART_CHARACTERS = 1 << 20
SINGLE_SPACE = re.compile(r" (?=\S)(?<=\S )")
SPACE = "\u2581"  # SentencePiece's character for a space
SPACE_IN_BYTES = [f"<0x{value:02X}>" for value in SPACE.encode()]
TRAINING_CHARACTERS = 100_000_000  # about the most characters on which a SentencePiece model is trained


def split_text(text: str, limit: int = PART_CHARACTERS) -> Iterator[str]:
    """Split `text` into parts of `limit` to 2 · `limit` characters, so that a huge text needs no list of all its ids.

    A part ends before a single space between two other characters. Every tokenizer starts a new token at a single
    space, so that the parts have the ids of the whole text. A part without a single space has 2 · `limit` characters.
    """
    start = 0
    while len(text) - start > 2 * limit:
        # The end of the search includes one more character, the character after the space.
        space = SINGLE_SPACE.search(text, start + limit, start + 2 * limit + 1)
        cut = space.start() if space else start + 2 * limit
        yield text[start:cut]
        start = cut
    yield text[start:]


class Tokenizer(ABC):
    """Converts text to ids and back.

    token_bytes: the bytes of each id, empty for the end-of-document id.
    eod: the end-of-document id, or NO_EOD.
    byte_lengths: int64 [vocab_size], the lengths of `token_bytes`.
    fingerprint: a sha256 of everything that decides the ids.
    files: names and contents of the files to save.
    """

    def __init__(
        self, kind: str, token_bytes: Sequence[bytes], eod: int, fingerprint: str, files: Mapping[str, bytes]
    ) -> None:
        self.kind, self.token_bytes, self.vocab_size = kind, token_bytes, len(token_bytes)
        self.eod, self.fingerprint, self.files = eod, fingerprint, files
        self.byte_lengths = np.fromiter(map(len, token_bytes), dtype=np.int64, count=len(token_bytes))

    @property
    def has_eod(self) -> bool:
        """Whether the tokenizer has an end-of-document id."""
        return self.eod != NO_EOD

    @property
    def bos(self) -> int:
        """The id before the first token of a text: `eod`, or the id of a new line, or 0."""
        if self.has_eod:
            return self.eod
        return next((number for number, data in enumerate(self.token_bytes) if data == b"\n"), 0)

    @abstractmethod
    def encode_utf8(self, data: bytes) -> np.ndarray | list[int]:
        """Return the ids of a text in valid UTF-8, integers [tokens], never `eod`. Raises ValueError if the text has no
        ids."""

    def encode(self, text: str) -> np.ndarray | list[int]:
        """Return the ids of `text`. Raises ValueError if the text has a lone surrogate, or gives no ids."""
        return self.encode_utf8(utf8(text))

    def decode_bytes(self, ids: Sequence[int] | np.ndarray) -> bytes:
        """Return the bytes of `ids`. Raises ValueError for an id outside the vocabulary."""
        ids = np.asarray(ids, dtype=np.int64)
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < self.vocab_size:
            raise ValueError(f"token ids {ids.min()} to {ids.max()} do not fit a vocabulary of {self.vocab_size}")
        return b"".join(map(self.token_bytes.__getitem__, ids.tolist()))

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of `ids`. Bytes that are not valid UTF-8, as a model may generate them, become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def save(self, directory: str | Path) -> None:
        """Write the files for `load_tokenizer` into `directory`. An existing file with different content is replaced
        atomically."""
        directory = Path(directory)
        make_folder(directory)
        metadata = {name: getattr(self, name) for name in ("kind", "fingerprint", "vocab_size")}
        metadata["files"] = sorted(self.files)
        content = (json.dumps(metadata, indent=1) + "\n").encode()
        for name, data in [*self.files.items(), (METADATA_FILE, content)]:
            path = directory / name
            if not path.is_file() or path.read_bytes() != data:
                with atomic_write(path) as file:
                    file.write(data)


class ByteTokenizer(Tokenizer):
    """A tokenizer without files, whose ids 0 to 255 are the bytes of UTF-8. The id 256 ends a document."""

    def __init__(self) -> None:
        token_bytes = [bytes([value]) for value in range(256)] + [b""]
        super().__init__("bytes", token_bytes, 256, fingerprint_of("bytes"), {})

    def encode_utf8(self, data: bytes) -> np.ndarray:
        """Return the bytes as ids, uint8 [bytes of data]."""
        return np.frombuffer(data, dtype=np.uint8)


class CharacterTokenizer(Tokenizer):
    """A tokenizer with an id for each character and no end-of-document id, like nanoGPT's data/*_char/meta.pkl.

    characters: the character of each id.

    Raises ValueError if an entry is not one character, or occurs twice.
    """

    def __init__(self, characters: Sequence[str]) -> None:
        if (
            not isinstance(characters, Sequence)
            or not characters
            or any(not isinstance(c, str) or len(c) != 1 for c in characters)
        ):
            raise ValueError("a vocabulary of characters must hold one character for each id")
        if len(set(characters)) < len(characters):
            raise ValueError("a character has two ids")
        content = utf8(json.dumps(list(characters), ensure_ascii=False) + "\n")
        fingerprint = fingerprint_of("characters", content)
        super().__init__("characters", [utf8(c) for c in characters], NO_EOD, fingerprint, {CHARACTERS_FILE: content})
        self.characters = tuple(characters)
        codes = [ord(c) for c in characters]
        # The index is the code point; the last entry is for all higher code points.
        self._ids = np.full(max(codes) + 2, -1, dtype=np.int32)
        self._ids[codes] = np.arange(len(codes))

    def encode_utf8(self, data: bytes) -> np.ndarray:
        """Return the ids, int32 [characters of the text]. Raises ValueError, which names the character, for a character
        without an id."""
        codes = np.frombuffer(data.decode().encode("utf-32-le"), dtype="<u4")
        ids: np.ndarray = self._ids[np.minimum(codes, len(self._ids) - 1)]
        if (ids < 0).any():
            missing = chr(codes[np.argmax(ids < 0)])
            raise ValueError(
                f"the text holds {missing!r} (U+{ord(missing):04X}), which is not one of the "
                f"{self.vocab_size:,} characters of the vocabulary"
            )
        return ids


def read_characters(path: str) -> CharacterTokenizer:
    """Read nanoGPT's meta.pkl, or the JSON list of characters that a checkpoint contains. Raises ValueError or
    FileNotFoundError."""
    check_exists(path, "--vocab-file")
    with wrap_errors(path):
        data = read_file(Path(path), MAX_FILE_BYTES)
        if path.endswith(".json"):
            return CharacterTokenizer(json.loads(data))
        meta, _ = read_pickle(data)
        characters = meta.get("itos") if isinstance(meta, dict) else None
        if not isinstance(characters, dict):
            raise ValueError("not a meta.pkl of nanoGPT: it lacks itos, the character of each id")
        if characters.keys() != set(range(len(characters))):
            raise ValueError("its ids are not 0, 1, 2 …")
        return CharacterTokenizer([characters[number] for number in range(len(characters))])


# --- SentencePiece


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model. `eod` is the model's end-of-sentence id, or one more id if the model has none."""

    def __init__(self, model: bytes, name: str) -> None:
        self._model = _sentencepiece().SentencePieceProcessor()
        try:
            self._model.LoadFromSerializedProto(model)
            token_bytes = [self._bytes_of(index) for index in range(self._model.vocab_size())]
        except (RuntimeError, OSError, ValueError):
            raise ValueError(f"--tokenizer-model {name} is not a SentencePiece model") from None
        # A U+2581 in the text would be decoded as a space, so it is encoded as three bytes, if the model has byte
        # tokens.
        marks = [self._model.piece_to_id(piece) for piece in SPACE_IN_BYTES]
        self._mark = marks if all(map(self._model.is_byte, marks)) else None
        eod = self._model.eos_id()
        if eod < 0:
            eod = len(token_bytes)
            token_bytes.append(b"")
        fingerprint = fingerprint_of("sentencepiece", model)
        super().__init__("SentencePieceTokenizer", token_bytes, eod, fingerprint, {MODEL_FILE: model})

    def _bytes_of(self, index: int) -> bytes:
        """Return the bytes of the token `index`. Raises ValueError if the name of a byte token is malformed."""
        piece: str = self._model.id_to_piece(index)
        if self._model.is_byte(index):
            return bytes([int(piece[3:5], 16)])
        if self._model.is_control(index) or self._model.is_unknown(index):
            return b""
        return piece.replace(SPACE, " ").encode()

    def encode_utf8(self, data: bytes) -> list[int]:
        """Return the ids of a text in valid UTF-8."""
        text, ids = data.decode(), list[int]()
        for number, part in enumerate(text.split(SPACE) if self._mark else [text]):
            if number and self._mark:
                ids += self._mark
            # Encode in parts, because the memory of SentencePiece grows with the length of its input.
            for piece in split_text(part, 1 << 16):
                ids += self._model.encode(piece)
        return ids


def train_sentencepiece(texts: Iterable[str], model_file: str | Path, vocab_size: int) -> None:
    """Train a BPE with byte fallback and `vocab_size` tokens on `texts` and write it to `model_file`, atomically.
    Raises ValueError if there is too little text for the size, and OSError if the file cannot be written."""
    model = io.BytesIO()
    # Split long documents, because the trainer drops sentences above its limit. `utf8` refuses lone surrogates.
    sentences = (part for text in texts for part in split_text(text, 1 << 14) if utf8(part))
    try:
        _sentencepiece().SentencePieceTrainer.train(
            sentence_iterator=sentences,
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
            f"--tokenizer-vocab-size {vocab_size}: a SentencePiece model of this size cannot be trained on this text: "
            + " ".join(str(error).split())
        ) from None
    with atomic_write(model_file) as file:
        file.write(model.getvalue())


def ensure_sentencepiece_model(
    model_file: str,
    *,
    train_data: Sequence[str],
    text_key: str | None,
    vocab_size: int,
    log: Log,
    max_bad_fraction: float = MAX_BAD_FRACTION,
) -> None:
    """If `model_file` is missing, train it on the files in `train_data`, or on the built-in corpus. One process trains,
    and other processes wait. A ValueError or FileNotFoundError names the flag."""
    if Path(model_file).exists():
        return
    files = expand_paths(train_data, "--train-data") or [BUILTIN]

    def texts() -> Iterator[str]:
        size = 0
        for text in chain.from_iterable(read_documents(path, text_key, log, max_bad_fraction) for path in files):
            if size > TRAINING_CHARACTERS:
                log(f"the SentencePiece model is trained on the first {size:,} characters")
                return
            size += len(text)
            yield text[:TRAINING_CHARACTERS]

    waiting = "another process is training the SentencePiece model: waiting for it"
    try:
        with file_lock(Path(f"{model_file}.lock"), lambda: log(waiting)):
            if not Path(model_file).exists():
                log(f"training a SentencePiece model of {vocab_size} pieces: {model_file}")
                train_sentencepiece(texts(), model_file, vocab_size)
    except OSError as error:
        raise ValueError(f"--tokenizer-model {model_file} cannot be written: {error.strerror}") from None


def _sentencepiece() -> Any:
    try:
        import sentencepiece
    except ImportError:
        raise missing_package("--tokenizer-type SentencePieceTokenizer", "sentencepiece") from None
    return sentencepiece
