"""Text as tokenizers take it: valid Unicode, and in parts where it is long."""

from __future__ import annotations

from collections.abc import Iterator

PART_CHARACTERS = 1 << 20


def utf8(text: str) -> bytes:
    """`text` as UTF-8; ValueError where it holds a lone surrogate, which tokenizer libraries replace silently."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"text with a lone surrogate {text[error.start]!r} at character {error.start} "
                         "is not Unicode") from None


def split_text(text: str, limit: int = PART_CHARACTERS) -> Iterator[str]:
    """`text` in parts of `limit` to 2 · `limit` characters, so that a file of gigabytes needs no list of all its ids.

    A cut lies before a single space between two other characters, where every tokenizer starts a new token: the ids
    are those of the whole text. Where the second `limit` has no such space, the cut lies at its end.
    """
    start = 0
    while len(text) - start > 2 * limit:
        cut = start + limit
        while cut < start + 2 * limit:
            cut = text.find(" ", cut, start + 2 * limit)
            if cut < 0:
                cut = start + 2 * limit
            elif text[cut - 1].isspace() or text[cut + 1].isspace():
                cut += 1
            else:
                break
        yield text[start:cut]
        start = cut
    yield text[start:]
