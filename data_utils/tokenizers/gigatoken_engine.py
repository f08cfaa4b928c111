"""gigatoken, the faster engine of byte-level BPE, used only for texts for which its ids are tiktoken's."""

from __future__ import annotations

import base64
import re
import tempfile
from collections.abc import Sequence

import numpy as np

# What follows depends on the Unicode tables inside the library, so another release has to be compared first.
RELEASE = "0.10."
# gigatoken knows the letters and digits that Unicode 17 added, tiktoken 0.14 those of Unicode 16; whether a character
# is a letter decides where text is cut. These bytes begin all 4,657 characters on which they differ, and of those
# beyond U+FFFF many more; only U+1F000 to U+1FFFF, emoji above all, are common, and they agree.
NEW_LETTERS = {b"\xe0": re.compile(rb"\xe0(?:\xa2\x8f|\xb1\x9c|\xb3\x9c)"),
               b"\xea": re.compile(rb"\xea\x9f[\x8e\x8f\x92\x94\xb1]"), b"\xf0": re.compile(rb"\xf0(?!\x9f)")}
# The library remembers every distinct word, about 100 bytes each, and forgets none: it is made anew after so much text.
REMEMBERED_BYTES = 1 << 29


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
            for first, pattern in NEW_LETTERS.items():
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
        return Gigatoken(ranked) if metadata.version("gigatoken").startswith(RELEASE) else None
    except ImportError:
        return None
    except BaseException as error:  # a panic is no Exception
        if type(error).__name__ != "PanicException":
            raise
        return None
