"""Engines of byte-level BPE beside tiktoken: a reference in pure Python, and gigatoken, which is faster.

`BytePairEncoding` runs over the package regex. The faster engines are tested against it, and it works where tiktoken is
absent. `gigatoken` is used only for texts for which its ids are tiktoken's.
"""

import base64
import functools
import heapq
import re
import tempfile
from collections.abc import Mapping, Sequence

import numpy as np

# Letters and digits that Unicode added after version 16, which is that of tiktoken 0.14: it takes them for signs, and
# regex, which knows version 18, is made to do the same. Between two ends stands no older letter or digit.
NEW_LETTERS = """558 58b-58c 88f c5c cdc 208f 209d-209f a7ce-a7cf a7d2 a7d4 a7dd-a7f1 ab6c-ab6d 107bb-107bf 10940-10959
    10ec5-10eee 11b0a 11db0-11df1 1246f-1247f 12550-12686 16ea0-16ed3 16ff2-16ff6 187f8-187ff 18cd6-18cda 18d09-191d2
    1b123-1b128 1b168 1d6a6 1df1f-1df24 1df2b-1dfff 1e6c0-1e6ff 2b73a-2b73f 2b81e 2cea2-2cead 323b0-3fc3f"""
REMEMBERED_WORDS = 1 << 16

# What follows depends on the Unicode tables inside gigatoken, so another release has to be compared first.
GIGATOKEN_RELEASE = "0.10."
# gigatoken knows the letters and digits that Unicode 17 added, tiktoken 0.14 those of Unicode 16; whether a character
# is a letter decides where text is cut. These bytes begin all 4,657 characters on which they differ, and of those
# beyond U+FFFF many more; only U+1F000 to U+1FFFF, emoji above all, are common, and they agree.
NEW_LETTER_BYTES = {
    b"\xe0": re.compile(rb"\xe0(?:\xa2\x8f|\xb1\x9c|\xb3\x9c)"),
    b"\xea": re.compile(rb"\xea\x9f[\x8e\x8f\x92\x94\xb1]"),
    b"\xf0": re.compile(rb"\xf0(?!\x9f)"),
}
# gigatoken remembers every distinct word, about 100 bytes each, and forgets none: it is made anew after so much text.
REMEMBERED_BYTES = 1 << 29


class BytePairEncoding:
    """Cuts a text into words by `pattern` and merges the bytes of each: the pair whose union has the lowest rank first,
    of equal ones the leftmost, until no union is in `ranks`. It knows no special tokens. ImportError without regex."""

    def __init__(self, pattern: str, ranks: Mapping[bytes, int]) -> None:
        import regex

        new = "".join("-".join(rf"\U{int(end, 16):08x}" for end in ends.split("-")) for ends in NEW_LETTERS.split())
        for known in (r"\p{L}", r"\p{N}"):  # alone, and inside [^...]
            pattern = pattern.replace(rf" ?{known}", rf" ?[{known}--[{new}]]")
        pattern = pattern.replace(r"[^\s\p{L}\p{N}]", rf"[^\s[\p{{L}}\p{{N}}--[{new}]]]")
        self._cut = regex.compile(pattern, regex.VERSION1).findall
        self._ranks = ranks
        self._merged = functools.lru_cache(maxsize=REMEMBERED_WORDS)(self._merge)

    def encode_ordinary(self, text: str) -> list[int]:
        """The ranks of the tokens of `text`."""
        return [rank for word in self._cut(text) for rank in self._merged(word.encode("utf-8"))]

    def _merge(self, word: bytes) -> tuple[int, ...]:
        if word in self._ranks:
            return (self._ranks[word],)
        # A token is a start and an end in `word`. ends[start] is 0 where no token starts any more, starts[end] is the
        # start of the token that ends there. `pairs` holds (rank, start of the left, end of the right); those whose
        # tokens have changed since are passed over when they come up.
        size = len(word)
        ends, starts = list(range(1, size + 1)), list(range(-1, size))
        pairs: list[tuple[int, int, int]] = []

        def consider(start: int, end: int) -> None:
            rank = self._ranks.get(word[start:end])
            if rank is not None:
                heapq.heappush(pairs, (rank, start, end))

        for start in range(size - 1):
            consider(start, start + 2)
        while pairs:
            _, start, end = heapq.heappop(pairs)
            middle = ends[start]
            if not middle or middle >= end or ends[middle] != end:
                continue
            ends[start], ends[middle], starts[end] = end, 0, start
            if start:
                consider(starts[start], end)
            if end < size:
                consider(start, ends[end])
        return tuple(self._ranks[word[start:end]] for start, end in enumerate(ends) if end)


class Gigatoken:
    """The engine for a vocabulary. ranked: the tokens in the order in which they were learnt, as tiktoken takes them.

    Called with valid UTF-8 it returns the ranks, uint32 [tokens], or None where they might not be tiktoken's.
    """

    def __init__(self, ranked: Sequence[bytes]) -> None:
        self._ranked = ranked
        self._make()

    def _make(self) -> None:
        from gigatoken.gigatoken_rs import BPETokenizer

        with tempfile.NamedTemporaryFile(suffix=".tiktoken") as file:
            file.writelines(b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(self._ranked))
            file.flush()
            # No special tokens are registered, so that no text can inject one.
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
    """The engine, or None where the package is absent or of another release, or where it panics, as it does where a
    token does not come about by merges."""
    from importlib import metadata  # here, since it takes 7 ms: programs that read no text start without it

    try:
        return Gigatoken(ranked) if metadata.version("gigatoken").startswith(GIGATOKEN_RELEASE) else None
    except BaseException as error:  # a panic is no Exception
        if not isinstance(error, ImportError) and type(error).__name__ != "PanicException":
            raise
        return None
