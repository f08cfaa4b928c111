"""Characters as tokens, without an end of document, as nanoGPT's data/*_char have them in their meta.pkl."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data_utils.corpora.documents import utf8
from data_utils.files.checked_json import one_line
from data_utils.files.hashing import fingerprint_of
from data_utils.files.plain_pickle import load_plain_pickle
from data_utils.tokenizers.base import NO_EOD, Tokenizer

CHARACTERS_FILE = "characters.json"


class CharacterTokenizer(Tokenizer):
    """characters: that of each id. ValueError where one is none or occurs twice."""

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
        super().__init__(
            "characters",
            [utf8(c) for c in characters],
            NO_EOD,
            fingerprint_of("characters", content),
            {CHARACTERS_FILE: content},
        )
        self.characters = tuple(characters)
        codes = [ord(c) for c in characters]
        self._ids = np.full(max(codes) + 2, -1, dtype=np.int32)  # by code point; the last one stands for all above
        self._ids[codes] = np.arange(len(codes))

    def encode(self, text: str) -> np.ndarray:
        """int32 [characters of text]. ValueError, with the character, where `text` holds one without an id."""
        return self.encode_utf8(utf8(text))

    def encode_utf8(self, data: bytes) -> np.ndarray:
        """int32 [characters of data], as `encode`."""
        codes = np.frombuffer(data.decode("utf-8").encode("utf-32-le"), dtype="<u4")
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
        meta = load_plain_pickle(data)
        characters = meta.get("itos") if isinstance(meta, dict) else None
        if not isinstance(characters, dict):
            raise ValueError("no meta.pkl of nanoGPT: it has no itos, the character of each id")
        if sorted(characters, key=str) != sorted(range(len(characters)), key=str):
            raise ValueError("its ids are not 0, 1, 2 …")
        return CharacterTokenizer([characters[number] for number in range(len(characters))])
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path}: {one_line(error)}") from None
