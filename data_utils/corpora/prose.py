"""English prose out of the documentation of source code: paragraphs of plain words, without reStructuredText's marks.

Left out is what a small model would learn instead of English: doctests, tables, rulers, grammars, lists of parameters,
code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

LEAST_WORDS = 12
PLAIN_SHARE = 0.85  # of a paragraph's words
PLAIN_SIGNS = ".,;:!?'\"()-‘’“”"

# A blank line ends a paragraph; so does the beginning of a list's next item.
BORDER = re.compile(r"\n[ \t]*\n\s*|\n(?=[ \t]*(?:[-*+•]|\(?\d+[.)])[ \t])")
BULLET = re.compile(r"^(?:[-*+•]|\(?\d+[.)])[ \t]+")
MARKS = tuple((re.compile(pattern), plain) for pattern, plain in (
    (r"(?::[a-zA-Z:+-]+:)?`+~?([^`]+?)(?:\s+<[^`>]*>)?`+_{0,2}", r"\1"),  # :role:`name`, ``literal``, `text <link>`_
    (r"(?<![\w*])(\*\*?)([^\s*](?:[^*]*[^\s*])?)\1(?![\w*])", r"\2"),  # *emphasis*, **strong**
    (r"::(?=\s|$)", ":")))  # before a literal block
BEGINS = re.compile(r"""["'“‘(]?[A-Z]""")
ENDS = re.compile(r"""[.!?:]["'”’)]*$""")
FOREIGN = re.compile(r"[\\|{}<>=~^$@#`*+]|--|\.\.|XXX")  # code, tables, grammar, and notes to oneself
PLAIN_WORD = re.compile(r"""["'“‘(\[]*[A-Za-z]+(?:['’-][A-Za-z]+)*["'”’)\]]*[.,;:!?]*["'”’)\]]*$""")


def prose(text: str) -> Iterator[str]:
    """The paragraphs of `text` that are prose, each as one line. Such a paragraph has at least LEAST_WORDS words,
    begins with a capital letter and ends with a final sign; PLAIN_SHARE of its words are letters and plain punctuation.
    """
    for paragraph in BORDER.split(text):
        if paragraph.count(" ") + paragraph.count("\n") < LEAST_WORDS - 1:
            continue  # the quick way out of most
        words = BULLET.sub("", " ".join(paragraph.split()))
        for pattern, plain in MARKS:
            words = pattern.sub(plain, words)
        if is_prose(words):
            yield words


def share_of_plain_characters(text: str) -> float:
    """The share of letters and plain punctuation among all characters that are not white space, from 0 to 1."""
    seen = "".join(text.split())
    return sum(character.isalpha() or character in PLAIN_SIGNS for character in seen) / max(len(seen), 1)


def is_prose(paragraph: str) -> bool:
    """Whether a paragraph, given as one line, reads as English."""
    if not BEGINS.match(paragraph) or not ENDS.search(paragraph) or FOREIGN.search(paragraph):
        return False
    words = paragraph.split(" ")
    return len(words) >= LEAST_WORDS and \
        sum(PLAIN_WORD.match(word) is not None for word in words) >= PLAIN_SHARE * len(words)
