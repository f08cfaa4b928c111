"""What a tokenizer is, the text that it takes, and the simplest one, of bytes. Each other kind has a file of its own.

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
from data_utils.files.hashing import fingerprint_of

FACTS_FILE = "tokenizer_facts.json"
OLD_FACTS_FILE = "tokenizer.json"  # until a library's own file of another content was found to have this name
NO_EOD = -1  # as `Tokenizer.eod`
PART_CHARACTERS = 1 << 20
SINGLE_SPACE = re.compile(r" (?=\S)(?<=\S )")


def split_text(text: str, limit: int = PART_CHARACTERS) -> Iterator[str]:
    """`text` in parts of `limit` to 2 · `limit` characters, so that a file of gigabytes needs no list of all its ids.

    A cut lies before a single space between two other characters, where every tokenizer starts a new token: the ids
    are those of the whole text. Where the second `limit` has no such space, the cut lies at its end.
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
    NO_EOD where there is none.
    `byte_lengths` are their lengths, int64 [vocab_size]. `fingerprint` is a sha256 over everything that decides ids.
    `files` are the file names and contents that make this tokenizer again. `engine` is the library that runs it where
    several can.
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
        return (
            self.eod
            if self.has_eod
            else next((number for number, data in enumerate(self.token_bytes) if data == b"\n"), 0)
        )

    @abstractmethod
    def encode(self, text: str) -> np.ndarray | list[int]:
        """The ids of `text`, never `eod`. ValueError where `text` holds a lone surrogate."""

    def encode_utf8(self, data: bytes) -> np.ndarray | list[int]:
        """The ids of a text, given as valid UTF-8."""
        return self.encode(data.decode("utf-8"))

    def decode_bytes(self, ids: Sequence[int] | np.ndarray) -> bytes:
        """The bytes that `ids` stand for; ValueError for an id outside the vocabulary."""
        return b"".join(map(self.token_bytes.__getitem__, self._checked(ids).tolist()))

    def _checked(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """int64; ValueError for an id outside the vocabulary."""
        ids = np.asarray(ids, dtype=np.int64)
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < self.vocab_size:
            raise ValueError(f"token ids {ids.min()} to {ids.max()} do not fit a vocabulary of {self.vocab_size}")
        return ids

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

    def decode_bytes(self, ids: Sequence[int] | np.ndarray) -> bytes:
        """The bytes of `ids` without the ends of documents; ValueError for an id outside the vocabulary."""
        ids = self._checked(ids)
        return ids[ids != self.eod].astype(np.uint8).tobytes()
