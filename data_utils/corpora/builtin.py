"""The built-in corpus, `--train-data builtin`: about 4 MB of English that every installation has.

The corpus is the prose in the docstrings of Python's standard library, of torch and of the packages that torch needs,
and the language topics of `pydoc_data`. A regular expression finds the docstrings in the sources; no module is
imported. A paragraph that shares RUN words in a row with an earlier one is left out, so no split contains text of
another split. The text differs a little between versions of Python and torch, so results name the hash of the corpus.
"""

import ast
import functools
import hashlib
import importlib.metadata
import importlib.util
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("torch", "sympy", "networkx", "numpy", "setuptools", "jinja2", "fsspec")
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
RUN = 13  # number of words of a run, as in the decontamination of GPT-3 (arXiv:2005.14165, appendix C)
LEAST_WORDS = 12
PLAIN_SHARE = 0.85  # the least share of words in prose that consist of letters and plain punctuation

# The pattern matches every string and comment of a source, so that no match begins inside a string or a comment. The
# named groups are long strings at the beginning of a line: docstrings, and texts for users.
TEXTS = re.compile(r'''(?xms)
    (?: \#[^\n]* | ^[ \t]*[rRuU]?(?: """(?P<double>[^"\\]*(?:(?:\\.|"(?!""))[^"\\]*)*)"""
                        | \'\'\'(?P<single>[^'\\]*(?:(?:\\.|'(?!''))[^'\\]*)*)\'\'\' )
      | """[^"\\]*(?:(?:\\.|"(?!""))[^"\\]*)*"""
      | \'\'\'[^'\\]*(?:(?:\\.|'(?!''))[^'\\]*)*\'\'\'
      | "[^"\\\n]*(?:\\.[^"\\\n]*)*" | '[^'\\\n]*(?:\\.[^'\\\n]*)*' )''')

# A paragraph ends at a blank line, or where the next item of a list begins.
BORDER = re.compile(r"\n[ \t]*\n\s*|\n(?=[ \t]*(?:[-*+•]|\(?\d+[.)])[ \t])")
BULLET = re.compile(r"^(?:[-*+•]|\(?\d+[.)])[ \t]+")
MARKS = tuple(
    (re.compile(pattern), plain)
    for pattern, plain in (
        # :role:`name`, ``literal``, `text <link>`_
        (r"(?::[a-zA-Z:+-]+:)?`+~?([^`]+?)(?:\s+<[^`>]*>)?`+_{0,2}", r"\1"),
        (r"(?<![\w*])(\*\*?)([^\s*](?:[^*]*[^\s*])?)\1(?![\w*])", r"\2"),  # *emphasis*, **strong**
        (r"::(?=\s|$)", ":"),  # The colons introduce a literal block.
    )
)
BEGINS = re.compile(r"""["'“‘(]?[A-Z]""")
ENDS = re.compile(r"""[.!?:]["'”’)]*$""")
# Only lines of code, tables, grammars or remarks contain these characters.
FOREIGN = re.compile(r"[\\|{}<>=~^$@#`*+]|--|\.\.|X{3}")
PLAIN_WORD = re.compile(r"""["'“‘(\[]*[A-Za-z]+(?:['’-][A-Za-z]+)*["'”’)\]]*[.,;:!?]*["'”’)\]]*$""")


# cached, because reading takes seconds and both the hash and the tokens need the documents
@functools.lru_cache(maxsize=1)
def builtin_documents() -> tuple[str, ...]:
    """Return the documents: one per module and one per topic, with a paragraph on each line.

    The documents are in the order of the hashes of their names. The order by hash mixes related modules, so that any
    part of the corpus is a fair sample of the corpus. Raises ValueError if the source of the standard library is
    missing.
    """
    found = dict(_sources())
    if not found:
        raise ValueError(
            f"the built-in corpus needs the source of Python's standard library, which is not in "
            f"{sysconfig.get_path('stdlib')}: name files with --train-data"
        )
    seen: set[int] = set()
    documents = []
    for name in sorted(found, key=lambda name: hashlib.sha256(name.encode()).digest()):
        paragraphs = (paragraph for text in found[name] for paragraph in prose(text) if _is_new(paragraph, seen))
        documents.append("".join(f"{paragraph}\n" for paragraph in paragraphs))
    return tuple(filter(None, documents))


def builtin_versions() -> list[str]:
    """Return the versions of Python and of the packages on which the text depends, and the folder of the library."""
    found = [name for name in PACKAGES if importlib.util.find_spec(name)]
    return [
        sys.version,
        sysconfig.get_path("stdlib"),
        *(f"{name} {importlib.metadata.version(name)}" for name in found),
    ]


def _is_new(paragraph: str, seen: set[int]) -> bool:
    """If none of the runs of RUN words of `paragraph` is in `seen`, add all of them to `seen` and return True."""
    words = paragraph.split(" ")
    runs = {hash(" ".join(words[first : first + RUN])) for first in range(max(1, len(words) - RUN + 1))}
    if runs & seen:
        return False
    seen |= runs
    return True


def _sources() -> Iterator[tuple[str, list[str]]]:
    """Yield (file name, docstrings) of each module, and (name, [text]) of each of Python's help topics."""
    library = Path(sysconfig.get_path("stdlib"))
    specs = map(importlib.util.find_spec, PACKAGES)
    installed = [Path(spec.origin).parent for spec in specs if spec and spec.origin]
    for folder, root in [(library, library), *((folder, folder.parent) for folder in installed)]:
        for path in folder.rglob("*.py"):
            relative = path.relative_to(root)
            if SKIPPED_FOLDERS.intersection(relative.parts[:-1]):
                continue
            try:
                source = path.read_text(encoding="utf-8")
            except (OSError, ValueError):
                continue
            if relative.as_posix() == "pydoc_data/topics.py":
                # topics.py has one dictionary: the names of the help topics and their texts.
                for topics in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Dict)):
                    yield from ((f"topic {name}", [str(text)]) for name, text in ast.literal_eval(topics).items())
            else:
                yield relative.as_posix(), list(texts_of(source))


def texts_of(source: str) -> Iterator[str]:
    """Return the docstrings of a module in the order of the file."""
    return (match[match.lastgroup] for match in TEXTS.finditer(source) if match.lastgroup)


def prose(text: str) -> Iterator[str]:
    """Return the paragraphs of `text` that are prose, each as one line. Prose has at least LEAST_WORDS words, begins
    with a capital letter and ends with a final sign; PLAIN_SHARE of its words are letters and plain punctuation.
    """
    for paragraph in BORDER.split(text):
        if paragraph.count(" ") + paragraph.count("\n") < LEAST_WORDS - 1:
            continue
        words = BULLET.sub("", " ".join(paragraph.split()))
        for pattern, plain in MARKS:
            words = pattern.sub(plain, words)
        if is_prose(words):
            yield words


def is_prose(paragraph: str) -> bool:
    """Return True if a paragraph, given as one line, is English prose."""
    if not BEGINS.match(paragraph) or not ENDS.search(paragraph) or FOREIGN.search(paragraph):
        return False
    words = paragraph.split(" ")
    plain = sum(PLAIN_WORD.match(word) is not None for word in words)
    return len(words) >= LEAST_WORDS and plain >= PLAIN_SHARE * len(words)
