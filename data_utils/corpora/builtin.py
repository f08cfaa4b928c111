"""The built-in corpus: what Python's standard library says about itself in prose, about 1 MB of English.

Docstrings are found in the source by one regular expression; no module is imported, because imports have side effects.
Comments are left out: they say less in whole sentences, and after as many steps the model is at 1.74 bits per byte with
them where it is at 1.56 without. Language topics come from `pydoc_data`. The text differs a little between versions of
Python: results name its hash.

`prose` takes paragraphs of plain words from these texts, without reStructuredText's marks. It leaves out what a small
model would learn instead of English: doctests, tables, rulers, grammars, lists of parameters, code.
"""

import ast
import functools
import hashlib
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
# Every string and comment of a source, so that none begins inside another. Kept are long strings with which a line
# begins: docstrings, and texts for users.
TEXTS = re.compile(r'''(?xms)
    (?: \#[^\n]* | ^[ \t]*[rRuU]?(?: """(?P<double>[^"\\]*(?:(?:\\.|"(?!""))[^"\\]*)*)"""
                        | \'\'\'(?P<single>[^'\\]*(?:(?:\\.|'(?!''))[^'\\]*)*)\'\'\' )
      | """[^"\\]*(?:(?:\\.|"(?!""))[^"\\]*)*"""
      | \'\'\'[^'\\]*(?:(?:\\.|'(?!''))[^'\\]*)*\'\'\'
      | "[^"\\\n]*(?:\\.[^"\\\n]*)*" | '[^'\\\n]*(?:\\.[^'\\\n]*)*' )''')

LEAST_WORDS = 12
PLAIN_SHARE = 0.85  # of a paragraph's words

# A blank line ends a paragraph; so does the beginning of a list's next item.
BORDER = re.compile(r"\n[ \t]*\n\s*|\n(?=[ \t]*(?:[-*+•]|\(?\d+[.)])[ \t])")
BULLET = re.compile(r"^(?:[-*+•]|\(?\d+[.)])[ \t]+")
MARKS = tuple(
    (re.compile(pattern), plain)
    for pattern, plain in (
        (
            r"(?::[a-zA-Z:+-]+:)?`+~?([^`]+?)(?:\s+<[^`>]*>)?`+_{0,2}",
            r"\1",
        ),  # :role:`name`, ``literal``, `text <link>`_
        (r"(?<![\w*])(\*\*?)([^\s*](?:[^*]*[^\s*])?)\1(?![\w*])", r"\2"),  # *emphasis*, **strong**
        (r"::(?=\s|$)", ":"),
    )
)  # before a literal block
BEGINS = re.compile(r"""["'“‘(]?[A-Z]""")
ENDS = re.compile(r"""[.!?:]["'”’)]*$""")
FOREIGN = re.compile(r"[\\|{}<>=~^$@#`*+]|--|\.\.|X{3}")  # code, tables, grammar, remarks marked with XXX
PLAIN_WORD = re.compile(r"""["'“‘(\[]*[A-Za-z]+(?:['’-][A-Za-z]+)*["'”’)\]]*[.,;:!?]*["'”’)\]]*$""")


@functools.lru_cache(maxsize=1)  # it takes a second, and is read once for its hash and once for its tokens
def builtin_documents() -> tuple[str, ...]:
    """The documents: one per module and one per topic, a docstring or a topic on each line. Their order depends on the
    hashes of their names, which mixes related modules: any part of the corpus is a fair sample of it. ValueError where
    the source of the standard library is missing."""
    found = dict(_sources())
    if not found:
        raise ValueError(
            f"the built-in corpus needs the source of Python's standard library, which is not in "
            f"{sysconfig.get_path('stdlib')}: name files with --train-data"
        )
    names = sorted(found, key=lambda name: hashlib.sha256(name.encode()).digest())
    documents = ("".join(f"{line}\n" for text in found[name] if (line := " ".join(prose(text)))) for name in names)
    return tuple(filter(None, documents))


def _sources() -> Iterator[tuple[str, list[str]]]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS.intersection(relative.parts[:-1]):
            continue
        try:
            source = path.read_text(encoding="utf-8")
        except (OSError, ValueError):
            continue
        if relative.as_posix() == "pydoc_data/topics.py":
            # The values of the one dictionary of literals there.
            for topics in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Dict)):
                yield from ((f"topic {name}", [str(text)]) for name, text in ast.literal_eval(topics).items())
        else:
            yield relative.as_posix(), list(texts_of(source))


def texts_of(source: str) -> Iterator[str]:
    """The docstrings of a module, in their order."""
    return (match[match.lastgroup] for match in TEXTS.finditer(source) if match.lastgroup)


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


def is_prose(paragraph: str) -> bool:
    """Whether a paragraph, given as one line, reads as English."""
    if not BEGINS.match(paragraph) or not ENDS.search(paragraph) or FOREIGN.search(paragraph):
        return False
    words = paragraph.split(" ")
    return len(words) >= LEAST_WORDS and sum(PLAIN_WORD.match(word) is not None for word in words) >= PLAIN_SHARE * len(
        words
    )
