"""Byte-level BPE in pure Python over the package regex: the reference that the faster engines are tested against, and
what works where tiktoken is absent."""

from __future__ import annotations

import functools
import heapq
from collections.abc import Mapping

# Letters and digits that Unicode added after version 16, which is that of tiktoken 0.14: it takes them for signs, and
# regex, which knows version 18, is made to do the same. Between two ends stands no older letter or digit.
NEW_LETTERS = """558 58b-58c 88f c5c cdc 208f 209d-209f a7ce-a7cf a7d2 a7d4 a7dd-a7f1 ab6c-ab6d 107bb-107bf 10940-10959
    10ec5-10eee 11b0a 11db0-11df1 1246f-1247f 12550-12686 16ea0-16ed3 16ff2-16ff6 187f8-187ff 18cd6-18cda 18d09-191d2
    1b123-1b128 1b168 1d6a6 1df1f-1df24 1df2b-1dfff 1e6c0-1e6ff 2b73a-2b73f 2b81e 2cea2-2cead 323b0-3fc3f"""
REMEMBERED_WORDS = 1 << 16


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
