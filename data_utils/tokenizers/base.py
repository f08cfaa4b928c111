"""Text to ids and back: what a tokenizer is, and the two that need no library, of bytes and of characters.

Every tokenizer is lossless (`decode(encode(text)) == text`), or refuses a text that it has no ids for, and no text can
make it emit its end-of-document id.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from data_utils.corpora.documents import utf8
from data_utils.files import fingerprint_of, one_line
from data_utils.files.inert_pickle import read_pickle

FACTS_FILE = "tokenizer_facts.json"
OLD_FACTS_FILE = "tokenizer.json"  # until a library's own file of other content was found to have this name
CHARACTERS_FILE = "characters.json"
NO_EOD = -1  # as `Tokenizer.eod`
PART_CHARACTERS = 1 << 20
SINGLE_SPACE = re.compile(r" (?=\S)(?<=\S )")


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
        self.kind = kind
        self.token_bytes = token_bytes
        self.vocab_size = len(token_bytes)
        self.eod = eod
        self.fingerprint = fingerprint
        self.files = files
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
        return self._joined(ids)

    def _joined(self, ids: np.ndarray) -> bytes:
        return b"".join(map(self.token_bytes.__getitem__, ids.tolist()))

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text; bytes that do not form UTF-8, as a model may generate, become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def save(self, directory: str | Path) -> None:
        """Write all that `load_tokenizer` needs into `directory`."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            (directory / name).write_bytes(content)
        facts = {
            "kind": self.kind,
            "fingerprint": self.fingerprint,
            "vocab_size": self.vocab_size,
            "files": sorted(self.files),
        }
        (directory / FACTS_FILE).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


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

    def _joined(self, ids: np.ndarray) -> bytes:
        return ids[ids != self.eod].astype(np.uint8).tobytes()


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
