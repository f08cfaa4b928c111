"""GPT-2's byte-level BPE: with GPT-2's own vocabulary, a vocabulary in the same format, or the shipped one.

tiktoken runs the BPE. If gigatoken is installed, it encodes most texts, ten times faster, to the same ids. gigatoken
and tiktoken merge by rank: a token's rank is its position in the order of training, after the 256 single bytes. Ids are
looked up from ranks, because a vocabulary file may give tokens any id (special tokens often come first). The libraries
get no special tokens, so that no text can inject one.
"""

import base64
import functools
import itertools
import json
import re
import reprlib
import tempfile
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from data_utils.command_line import missing_package
from data_utils.files import fingerprint_of, parse_json_object, read_file, wrap_errors
from data_utils.tokenizers.base import MAX_FILE_BYTES, Tokenizer

BUILTIN_FILE = "builtin_bpe.json"
END_OF_TEXT = "<|endoftext|>"

# GPT-2 splits text by this pattern before it merges: into contractions; words, numbers and punctuation, with at most
# one space before each; and whitespace. Possessive quantifiers (++) avoid backtracking and give the same result.
PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""

# The regex engine's stack overflows at about a million consecutive whitespace characters, so long runs are split first.
MAX_WHITESPACE_RUN = 1 << 14
LONG_WHITESPACE = re.compile(rf"\s{{{2 * MAX_WHITESPACE_RUN}}}")

# gigatoken's Unicode tables decide where text is split, so a new release must be compared with tiktoken first.
GIGATOKEN_RELEASE = "0.10."
# gigatoken 0.10 has the letters and digits of Unicode 17, tiktoken 0.14 those of Unicode 16. The patterns match the
# first bytes of the 4,657 characters that differ, and of many more beyond U+FFFF. The patterns do not match U+1F000 to
# U+1FFFF, mostly emoji, which do not differ: beyond U+FFFF only these characters are common.
NEW_LETTER_BYTES = {
    b"\xe0": re.compile(rb"\xe0(?:\xa2\x8f|\xb1\x9c|\xb3\x9c)"),
    b"\xea": re.compile(rb"\xea\x9f[\x8e\x8f\x92\x94\xb1]"),
    b"\xf0": re.compile(rb"\xf0(?!\x9f)"),
}
# gigatoken caches every distinct word, about 100 bytes each, without a limit. The encoder is recreated after
# CACHE_LIMIT_BYTES bytes of text.
CACHE_LIMIT_BYTES = 1 << 29


def bytes_to_unicode() -> list[str]:
    """Return the character for each of the 256 bytes in GPT-2's files: the byte's own character if it is printable,
    otherwise a character from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = itertools.count(256)
    return [chr(value if value in printable else next(others)) for value in range(256)]


def find_merge(token: bytes, ranks: Mapping[bytes, int]) -> tuple[bytes, bytes] | None:
    """Return the pair of tokens whose merge gives `token`, after all earlier merges. Return None if the token is a
    single byte or is not the result of a merge."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        joined = [ranks.get(left + right, len(ranks)) for left, right in zip(parts, parts[1:], strict=False)]
        at = joined.index(min(joined))
        if joined[at] >= ranks[token]:
            return None
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return (parts[0], parts[1]) if len(parts) == 2 else None


class Gigatoken:
    """An encoder that calls gigatoken: valid UTF-8 -> ranks, uint32 [tokens]. A call returns None if tiktoken might
    give different ranks.

    ranked: the tokens in the order of training.
    """

    def __init__(self, ranked: Sequence[bytes]) -> None:
        self._ranked = ranked
        self._make()

    def _make(self) -> None:
        from gigatoken.gigatoken_rs import BPETokenizer

        with tempfile.NamedTemporaryFile(suffix=".tiktoken") as file:
            file.writelines(b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(self._ranked))
            file.flush()
            self._encode = BPETokenizer.from_tiktoken(file.name, "gpt2", {}).encode
        self._left = CACHE_LIMIT_BYTES

    def __call__(self, data: bytes) -> np.ndarray | None:
        if not data.isascii():
            for first, pattern in NEW_LETTER_BYTES.items():
                # Finding one byte is ten times faster than finding the pattern.
                if first in data and pattern.search(data):
                    return None
        self._left -= len(data)
        if self._left < 0:
            self._make()
        return self._encode(data)


class BytePairTokenizer(Tokenizer):
    """A byte-level BPE.

    ranked: the tokens in the order of training.
    ids: the id of each token, below `vocab_size`.
    files: names and contents of the files to save.

    Raises ValueError if tiktoken is not installed.
    """

    def __init__(
        self, kind: str, ranked: Sequence[bytes], ids: Sequence[int], vocab_size: int, eod: int, files: dict[str, bytes]
    ) -> None:
        try:
            import tiktoken
        except ImportError:
            raise missing_package(f"--tokenizer-type {kind}, unlike bytes,", "tiktoken") from None
        self._ranked = ranked
        ranks = {token: rank for rank, token in enumerate(ranked)}
        encoding = tiktoken.Encoding("", pat_str=PATTERN, special_tokens={}, mergeable_ranks=ranks)
        self._ranks_of = encoding.encode_ordinary
        self._ids = None if list(ids) == list(range(len(ranked))) else np.asarray(ids, dtype=np.int32)
        fingerprint = fingerprint_of("byte-level BPE", PATTERN, json.dumps([list(ids), eod]), *ranked)
        bytes_of = dict(zip(ids, ranked, strict=True))
        token_bytes = [bytes_of.get(number, b"") for number in range(vocab_size)]
        super().__init__(kind, token_bytes, eod, fingerprint, files)

    @functools.cached_property
    def _faster(self) -> Gigatoken | None:
        """The encoder of gigatoken, or None if the package is missing, has a different release, or panics.
        gigatoken panics if a token is not the result of merges. The encoder is created for the first text, because many
        programs encode no text."""
        from importlib import metadata  # imported late, because the import takes 7 ms

        try:
            return Gigatoken(self._ranked) if metadata.version("gigatoken").startswith(GIGATOKEN_RELEASE) else None
        except BaseException as error:  # A panic of gigatoken is not an Exception.
            if not isinstance(error, ImportError) and type(error).__name__ != "PanicException":
                raise
            return None

    def encode_utf8(self, data: bytes) -> np.ndarray:
        """Return the ids of valid UTF-8, int32 or uint32 [tokens]. Long runs of whitespace are split first."""
        if len(data) < 2 * MAX_WHITESPACE_RUN:
            ranks = self._ranks(data)
        else:
            ranks = np.concatenate(
                [self._ranks(part.encode()) for part in _split_whitespace_runs(data.decode("utf-8"))]
            )
        return ranks if self._ids is None else self._ids[ranks]

    def _ranks(self, data: bytes) -> np.ndarray:
        ranks = self._faster(data) if self._faster else None
        # numpy converts an array three times faster than a list.
        return np.asarray(array("I", self._ranks_of(data.decode("utf-8")))) if ranks is None else ranks


def _split_whitespace_runs(text: str) -> Iterator[str]:
    """Split long runs of whitespace in `text`. Each cut is at a multiple of MAX_WHITESPACE_RUN, a power of two, from
    the start of its run. Therefore a run of one repeated character has the same ids as without cuts."""
    start = 0
    while found := LONG_WHITESPACE.search(text, start):
        yield text[start : found.start() + MAX_WHITESPACE_RUN]
        start = found.start() + MAX_WHITESPACE_RUN
    yield text[start:]


def _byte_strings(tokens: Sequence[str]) -> list[bytes]:
    """Decode tokens from GPT-2's alphabet to bytes. Raises ValueError if one of the 256 bytes is missing or a token
    occurs twice."""
    values = {character: value for value, character in enumerate(bytes_to_unicode())}
    try:
        ranked = [bytes(map(values.__getitem__, token)) for token in tokens]
    except KeyError:
        raise ValueError("holds a token that is not written in GPT-2's byte alphabet") from None
    if len(set(ranked)) < len(ranked) or not {bytes([value]) for value in range(256)} <= set(ranked):
        raise ValueError("holds a token twice or lacks one of the 256 bytes")
    return ranked


def builtin_tokenizer(path: Path | None = None) -> BytePairTokenizer:
    """Load the small BPE of the built-in corpus. `train_bpe` of `tools/train_tokenizer.py` learned the BPE from
    the first 17/20 of the documents. The file lists the tokens in the order of their ids.

    path: the file (default: the shipped one).
    """
    path = path or Path(__file__).with_name(BUILTIN_FILE)
    with wrap_errors(path):
        data = read_file(path, MAX_FILE_BYTES)
        ranked = _byte_strings(list(json.loads(data)))
    eod = len(ranked)
    return BytePairTokenizer("builtin", ranked, range(eod), eod + 1, eod, {BUILTIN_FILE: data})


def gpt2_tokenizer(
    vocab_data: bytes, merge_data: bytes, vocab_name: str = "--vocab-file", merge_name: str = "--merge-file"
) -> BytePairTokenizer:
    """Make a BPE in GPT-2's format from the contents of two files: JSON of token to id, and the merges in order.
    `vocab_name` and `merge_name` name the files in errors. Raises ValueError if a file has a different format."""
    with wrap_errors(vocab_name):
        vocabulary: dict[str, int] = parse_json_object(vocab_data)
        if sorted(vocabulary.values()) != list(range(len(vocabulary))) or END_OF_TEXT not in vocabulary:
            raise ValueError(f"its ids must run from 0 without a gap, and {END_OF_TEXT} must be one of its tokens")
    alphabet = bytes_to_unicode()
    with wrap_errors(merge_name):
        merges = [line.split() for line in merge_data.decode("utf-8").split("\n")]
        if merges[0][:1] == ["#version:"]:
            del merges[0]
        if any(len(pair) not in (0, 2) for pair in merges):
            raise ValueError("is not a list of merges, with two tokens per line")
        tokens = list(dict.fromkeys([*alphabet, *("".join(pair) for pair in merges if pair)]))
        if missing := [token for token in tokens if token not in vocabulary]:
            raise ValueError(f"{vocab_name} lacks its token {reprlib.repr(missing[0])}")
        tokens[:256] = sorted(
            alphabet, key=vocabulary.__getitem__
        )  # In this order, GPT-2's ids are equal to its ranks.
        ranked = _byte_strings(tokens)
    ids = [vocabulary[token] for token in tokens]
    files = {"encoder.json": vocab_data, "vocab.bpe": merge_data}
    return BytePairTokenizer("GPT2BPETokenizer", ranked, ids, len(vocabulary), vocabulary[END_OF_TEXT], files)
