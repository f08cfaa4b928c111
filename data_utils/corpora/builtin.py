"""The built-in corpus: what Python's standard library says about itself in prose, about 1 MB of English.

Docstrings are found in the source by one regular expression; no module is imported, because imports have side effects.
Comments are left out: they say less in whole sentences, and after as many steps the model is at 1.74 bits per byte with
them where it is at 1.56 without. Language topics come from `pydoc_data`. The text differs a little between versions of
Python: results name its hash.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from data_utils.corpora.prose import prose

SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
# Every string and comment of a source, so that none begins inside another. Kept are long strings with which a line
# begins: docstrings, and texts for users.
TEXTS = re.compile(r'''(?xms)
    (?: \#[^\n]* | ^[ \t]*[rRuU]?(?: """(?P<double>[^"\\]*(?:(?:\\.|"(?!""))[^"\\]*)*)"""
                        | \'\'\'(?P<single>[^'\\]*(?:(?:\\.|'(?!''))[^'\\]*)*)\'\'\' )
      | """[^"\\]*(?:(?:\\.|"(?!""))[^"\\]*)*"""
      | \'\'\'[^'\\]*(?:(?:\\.|'(?!''))[^'\\]*)*\'\'\'
      | "[^"\\\n]*(?:\\.[^"\\\n]*)*" | '[^'\\\n]*(?:\\.[^'\\\n]*)*' )''')


@functools.lru_cache(maxsize=1)  # it takes a second, and is read once for its hash and once for its tokens
def builtin_documents() -> tuple[str, ...]:
    """The documents: one per module and one per topic, a docstring or a topic on each line. Their order depends on the
    hashes of their names, which mixes related modules: any part of the corpus is a fair sample of it. ValueError where
    the source of the standard library is missing."""
    found = dict(_sources())
    if not found:
        raise ValueError(f"the built-in corpus needs the source of Python's standard library, which is not in "
                         f"{sysconfig.get_path('stdlib')}: name files with --train-data")
    documents = []
    for name in sorted(found, key=lambda name: hashlib.sha256(name.encode()).digest()):
        lines = [" ".join(paragraphs) + "\n" for text in found[name] if (paragraphs := list(prose(text)))]
        if lines:
            documents.append("".join(lines))
    return tuple(documents)


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
            yield from _topics(source)
        else:
            yield relative.as_posix(), list(texts_of(source))


def texts_of(source: str) -> Iterator[str]:
    """The docstrings of a module, in their order."""
    return (match[match.lastgroup] for match in TEXTS.finditer(source) if match.lastgroup)


def _topics(source: str) -> Iterator[tuple[str, list[str]]]:
    """The values of the one dictionary of literals in `pydoc_data/topics.py`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Dict):
            for key, value in ast.literal_eval(node).items():
                yield f"topic {key}", [str(value)]
