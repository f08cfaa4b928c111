"""Byte-level BPE as GPT-2 does it, from local files: GPT-2's own vocabulary, another in its format, and the shipped one.

tiktoken runs it, or HF tokenizers if tiktoken is absent. If gigatoken is installed it does most of the work, ten times
faster. All of them give the same ids. They merge by rank: a token's rank is the order in which it was learnt, the 256
single bytes first. GPT-2's vocabulary file may give tokens any id (a vocabulary trained elsewhere often has its special
tokens first), so ids are looked up from ranks. No engine gets special tokens, so that no text can inject one.
"""

import base64
import functools
import itertools
import json
import re
import reprlib
import tempfile
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from data_utils.corpora import utf8
from data_utils.files import fingerprint_of, one_line
from data_utils.tokenizers.base import Tokenizer

BUILTIN_FILE = "builtin_bpe.json"
END_OF_TEXT = "<|endoftext|>"

# GPT-2 cuts text into these before it merges: contractions, words, numbers, signs, each with at most one space before
# it, and white space. Possessive quantifiers (++) keep the pattern from backtracking; the cuts are the same.
PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""

# The pattern overflows its stack on about a million white-space characters in a row: longer runs are cut before.
WHITE_RUN = 1 << 14
LONG_WHITE_SPACE = re.compile(rf"\s{{{2 * WHITE_RUN}}}")

# gigatoken's Unicode tables decide where text is cut, so another release has to be compared first.
GIGATOKEN_RELEASE = "0.10."
# It knows the letters and digits that Unicode 17 added, tiktoken 0.14 those of Unicode 16. These bytes begin all 4,657
# characters on which they differ, and of those beyond U+FFFF many more; only U+1F000 to U+1FFFF, emoji above all, are
# common, and they agree.
NEW_LETTER_BYTES = {
    b"\xe0": re.compile(rb"\xe0(?:\xa2\x8f|\xb1\x9c|\xb3\x9c)"),
    b"\xea": re.compile(rb"\xea\x9f[\x8e\x8f\x92\x94\xb1]"),
    b"\xf0": re.compile(rb"\xf0(?!\x9f)"),
}
# It remembers every distinct word, about 100 bytes each, and forgets none: it is made anew after so much text.
REMEMBERED_BYTES = 1 << 29


def byte_alphabet() -> list[str]:
    """The character that stands for each byte in GPT-2's files: the byte's own if it prints, else one from U+0100 on.
    256 of them, by byte."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = itertools.count(256)
    return [chr(value if value in printable else next(others)) for value in range(256)]


def bpe_engine() -> str | None:
    """The library that runs byte-level BPE here: tiktoken, else tokenizers, which has a third of the speed, else
    None."""
    return next((name for name in ("tiktoken", "tokenizers") if find_spec(name)), None)


def _tiktoken(ranked: Sequence[bytes]) -> Callable[[str], list[int]]:
    import tiktoken

    ranks = {token: rank for rank, token in enumerate(ranked)}
    return tiktoken.Encoding("", pat_str=PATTERN, special_tokens={}, mergeable_ranks=ranks).encode_ordinary


def _hf_tokenizers(ranked: Sequence[bytes]) -> Callable[[str], list[int]]:
    from tokenizers import Tokenizer, models, pre_tokenizers

    alphabet = byte_alphabet()

    def written(token: bytes) -> str:
        return "".join(alphabet[value] for value in token)

    ranks = {token: rank for rank, token in enumerate(ranked)}
    vocabulary = {written(token): rank for token, rank in ranks.items()}
    merges = [(written(pair[0]), written(pair[1])) for token in ranked if (pair := merge_of(token, ranks))]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return lambda text: tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids


def merge_of(token: bytes, ranks: Mapping[bytes, int]) -> tuple[bytes, bytes] | None:
    """The merge that makes `token`: the pair that is left of it after all earlier merges. None if it is a single byte
    or does not come about by merges."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        joined = [ranks.get(left + right, len(ranks)) for left, right in zip(parts, parts[1:], strict=False)]
        at = joined.index(min(joined))
        if joined[at] >= ranks[token]:
            return None
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return (parts[0], parts[1]) if len(parts) == 2 else None


class Gigatoken:
    """The engine for a vocabulary. ranked: the tokens in the order in which they were learnt, as tiktoken takes them.

    Called with valid UTF-8 it returns the ranks, uint32 [tokens], or None if they might not be tiktoken's.
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
        self._left = REMEMBERED_BYTES

    def __call__(self, data: bytes) -> np.ndarray | None:
        if not data.isascii():
            for first, pattern in NEW_LETTER_BYTES.items():
                if first in data and pattern.search(data):  # one byte is found ten times faster than the pattern
                    return None
        self._left -= len(data)
        if self._left < 0:
            self._make()
        return self._encode(data)


def gigatoken(ranked: Sequence[bytes]) -> Gigatoken | None:
    """The engine, or None if the package is absent or of another release, or if it panics, as it does if a token does
    not come about by merges."""
    from importlib import metadata  # here, since it takes 7 ms: programs that read no text start without it

    try:
        return Gigatoken(ranked) if metadata.version("gigatoken").startswith(GIGATOKEN_RELEASE) else None
    except BaseException as error:  # a panic is not an Exception
        if not isinstance(error, ImportError) and type(error).__name__ != "PanicException":
            raise
        return None


class BytePairTokenizer(Tokenizer):
    """A byte-level BPE.

    ranked: the tokens in the order in which they were learnt. ids: the id of each of them, below `vocab_size`. files:
    the names and contents that make this tokenizer again. ValueError if no library that runs it is installed.
    """

    def __init__(
        self, kind: str, ranked: Sequence[bytes], ids: Sequence[int], vocab_size: int, eod: int, files: dict[str, bytes]
    ) -> None:
        engine = bpe_engine()
        if engine is None:
            raise ValueError(
                f"--tokenizer-type {kind} needs the package tiktoken or tokenizers: pip install tiktoken, "
                "or take --tokenizer-type bytes"
            )
        self.engine = engine
        self._ranked = ranked
        self._ranks_of = (_tiktoken if engine == "tiktoken" else _hf_tokenizers)(ranked)
        self._ids = None if list(ids) == list(range(len(ranked))) else np.asarray(ids, dtype=np.int32)
        fingerprint = fingerprint_of("byte-level BPE", PATTERN, json.dumps([list(ids), eod]), *ranked)
        bytes_of = dict(zip(ids, ranked, strict=True))
        token_bytes = [bytes_of.get(number, b"") for number in range(vocab_size)]
        super().__init__(kind, token_bytes, eod, fingerprint, files)

    @functools.cached_property
    def _faster(self) -> Gigatoken | None:
        """gigatoken, made when the first text comes: many programs have none."""
        return gigatoken(self._ranked)

    def encode(self, text: str) -> np.ndarray:
        """int32 or uint32 [tokens]. ValueError if `text` holds a lone surrogate."""
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
        return np.asarray(array("I", self._ranks_of(data.decode("utf-8")))) if ranks is None else ranks


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
    return BytePairTokenizer("builtin", ranked, range(eod), eod + 1, eod, {BUILTIN_FILE: data})


def gpt2_tokenizer(
    vocab_data: bytes, merge_data: bytes, vocab_name: str = "--vocab-file", merge_name: str = "--merge-file"
) -> BytePairTokenizer:
    """GPT-2's BPE, or another in its format, from the contents of two files: a JSON of token to id, and the merges in
    order. The names stand in errors. ValueError if a file is no such JSON or list of merges."""
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
    ids = [vocabulary[token] for token in tokens]
    files = {"encoder.json": vocab_data, "vocab.bpe": merge_data}
    return BytePairTokenizer("GPT2BPETokenizer", ranked, ids, len(vocabulary), vocabulary[END_OF_TEXT], files)
