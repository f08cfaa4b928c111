"""Byte-level BPE as GPT-2 does it, run by tiktoken from local files: GPT-2's own vocabulary and the shipped small one.
Where gigatoken is installed it does most of the work, and where tiktoken is absent regex does it, to the same ids.

The engines merge by rank: a token's rank is the order in which it was learnt, the 256 single bytes first. GPT-2's
vocabulary file may give tokens any id (a vocabulary trained elsewhere often has its special tokens first), so ids are
looked up from ranks.
"""

import contextlib
import functools
import importlib
import json
import re
import reprlib
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from data_utils.corpora.documents import utf8
from data_utils.files.checked_json import one_line
from data_utils.files.hashing import fingerprint_of
from data_utils.tokenizers.base import Tokenizer
from data_utils.tokenizers.bpe_engines import BytePairEncoding, Gigatoken, gigatoken

BUILTIN_FILE = "builtin_bpe.json"
END_OF_TEXT = "<|endoftext|>"

# What GPT-2 cuts text into before it merges: contractions, words, numbers, signs, each with at most one space before
# it, and white space. Possessive quantifiers (++) keep the pattern from backtracking; the cuts are the same.
PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""

# The pattern overflows its stack on about a million white-space characters in a row: longer runs are cut before.
WHITE_RUN = 1 << 14
LONG_WHITE_SPACE = re.compile(rf"\s{{{2 * WHITE_RUN}}}")


def byte_alphabet() -> list[str]:
    """The character that stands for each byte in GPT-2's files: the byte's own where it prints, else one from U+0100
    on. 256 of them, by byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    characters = {value: chr(value) for value in printable}
    for value in range(256):
        characters.setdefault(value, chr(256 + len(characters) - len(printable)))
    return [characters[value] for value in range(256)]


class BytePairTokenizer(Tokenizer):
    """A byte-level BPE.

    ranked: the tokens in the order in which they were learnt. ids: the id of each of them. token_bytes: the bytes of
    every id. files: the names and contents that make this tokenizer again. ValueError where no library that runs it is
    installed.
    """

    def __init__(
        self,
        kind: str,
        ranked: Sequence[bytes],
        ids: Sequence[int],
        token_bytes: Sequence[bytes],
        eod: int,
        files: dict[str, bytes],
    ) -> None:
        engine = bpe_engine()
        if engine is None:
            raise ValueError(
                f"--tokenizer-type {kind} needs the package tiktoken or regex: pip install tiktoken, "
                "or take --tokenizer-type bytes"
            )
        self.engine = engine.__name__
        self._ids = None if list(ids) == list(range(len(ranked))) else np.asarray(ids, dtype=np.int32)
        ranks = {token: rank for rank, token in enumerate(ranked)}
        # No special tokens are registered, so that no text can inject one.
        self._encoding: Any = (
            BytePairEncoding(PATTERN, ranks)
            if self.engine == "regex"
            else engine.Encoding(kind, pat_str=PATTERN, special_tokens={}, mergeable_ranks=ranks)
        )
        self._ranked = ranked
        fingerprint = fingerprint_of("byte-level BPE", PATTERN, json.dumps([list(ids), eod]), *ranked)
        super().__init__(kind, token_bytes, eod, fingerprint, files)

    @functools.cached_property
    def _faster(self) -> Gigatoken | None:
        """gigatoken, made when the first text comes: many programs have none."""
        return gigatoken(self._ranked)

    def encode(self, text: str) -> np.ndarray:
        """int32 or uint32 [tokens]. ValueError where `text` holds a lone surrogate."""
        return self.encode_utf8(utf8(text))  # tiktoken would replace lone surrogates silently

    def encode_utf8(self, data: bytes) -> np.ndarray:
        """int32 or uint32 [tokens] of valid UTF-8; endless white space is cut into parts before."""
        if len(data) < 2 * WHITE_RUN:
            ranks = self._ranks(data)
        else:
            ranks = np.concatenate([self._ranks(part.encode()) for part in _cut_white_space(data.decode("utf-8"))])
        return ranks if self._ids is None else self._ids[ranks]

    def _ranks(self, data: bytes) -> np.ndarray:
        ranks = self._faster(data) if self._faster else None
        # numpy takes an array three times faster than a list.
        return np.asarray(array("I", self._encoding.encode_ordinary(data.decode("utf-8")))) if ranks is None else ranks


def bpe_engine() -> ModuleType | None:
    """The library that runs byte-level BPE here: tiktoken, else regex, which is three times slower, else None."""
    for name in ("tiktoken", "regex"):
        with contextlib.suppress(ImportError):
            return importlib.import_module(name)
    return None


def _cut_white_space(text: str) -> Iterator[str]:
    """Parts of `text` without endless white space. A run is cut at multiples of a power of two from its start and its
    last part is never empty, so that runs of one repeated character keep the ids they have uncut."""
    start = 0
    while found := LONG_WHITE_SPACE.search(text, start):
        yield text[start : found.start() + WHITE_RUN]
        start = found.start() + WHITE_RUN
    yield text[start:]


def _byte_strings(tokens: Sequence[str], name: str) -> list[bytes]:
    """The bytes of tokens that are written in GPT-2's alphabet. ValueError unless all 256 bytes are among them and no
    token occurs twice."""
    values = {character: value for value, character in enumerate(byte_alphabet())}
    try:
        ranked = [bytes(values[character] for character in token) for token in tokens]
    except (KeyError, TypeError):
        raise ValueError(f"{name} holds a token that is not written in GPT-2's byte alphabet") from None
    if len(set(ranked)) < len(ranked) or not {bytes([value]) for value in range(256)} <= set(ranked):
        raise ValueError(f"{name} holds a token twice or lacks one of the 256 bytes")
    return ranked


def builtin_tokenizer(path: Path | None = None) -> BytePairTokenizer:
    """The small BPE of the built-in corpus, which `tools/train_tokenizer.py` made, from the shipped file or from a copy
    at `path`."""
    name = str(path or BUILTIN_FILE)
    try:
        data = (path or Path(__file__).with_name(BUILTIN_FILE)).read_bytes()
        ranked = _byte_strings(list(json.loads(data)), name)
    except FileNotFoundError:
        raise FileNotFoundError(f"{name}: no such file: the tokenizer is incomplete") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{name} is damaged: {one_line(error)}") from None
    eod = len(ranked)
    return BytePairTokenizer("builtin", ranked, range(eod), [*ranked, b""], eod, {BUILTIN_FILE: data})


def gpt2_tokenizer(vocab_path: Path, merge_path: Path) -> BytePairTokenizer:
    """GPT-2's BPE, or another in its format, from a JSON of token to id and the merges in order."""
    return gpt2_tokenizer_of(
        vocab_path.read_bytes(), merge_path.read_bytes(), f"--vocab-file {vocab_path}", f"--merge-file {merge_path}"
    )


def gpt2_tokenizer_of(vocab_data: bytes, merge_data: bytes, vocab_name: str, merge_name: str) -> BytePairTokenizer:
    """`gpt2_tokenizer` of the contents of the two files. The names stand in errors. ValueError where a file is no such
    JSON or list of merges."""
    try:
        vocabulary: dict[str, int] = json.loads(vocab_data)
        dense = sorted(vocabulary.values()) == list(range(len(vocabulary)))
    except (ValueError, TypeError, AttributeError, RecursionError):
        dense = False
    if not dense or END_OF_TEXT not in vocabulary:
        raise ValueError(
            f"{vocab_name} is not a JSON object of token to id, the ids from 0 on without a "
            f"gap and {END_OF_TEXT} among them"
        )
    try:
        merges = [line.split() for line in merge_data.decode("utf-8").split("\n")]
    except ValueError:
        raise ValueError(f"{merge_name} is not UTF-8 text") from None
    if merges[0][:1] == ["#version:"]:
        del merges[0]
    if any(len(pair) not in (0, 2) for pair in merges):
        raise ValueError(f"{merge_name} is not a list of merges, two tokens a line")
    alphabet = byte_alphabet()
    tokens = list(dict.fromkeys([*alphabet, *("".join(pair) for pair in merges if pair)]))
    missing = next((token for token in tokens if token not in vocabulary), None)
    if missing is not None:
        raise ValueError(f"{vocab_name} lacks the token {reprlib.repr(missing)} of {merge_name}")
    tokens[:256] = sorted(alphabet, key=vocabulary.__getitem__)  # GPT-2's own ids are then its ranks
    ranked = _byte_strings(tokens, merge_name)
    token_bytes = [b""] * len(vocabulary)
    for token, value in zip(tokens, ranked, strict=True):
        token_bytes[vocabulary[token]] = value
    return BytePairTokenizer(
        "GPT2BPETokenizer",
        ranked,
        [vocabulary[token] for token in tokens],
        token_bytes,
        vocabulary[END_OF_TEXT],
        {"encoder.json": vocab_data, "vocab.bpe": merge_data},
    )
