"""The built-in corpus: what Python's standard library says about itself, about 2.2 MB of English.

Docstrings are read from source by `ast`; no module is imported, because imports have side effects. Language topics
come from `pydoc_data`. The text differs a little between versions of Python: results name its hash.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import sysconfig
import warnings
from collections import deque
from collections.abc import Iterator
from pathlib import Path

SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@functools.lru_cache(maxsize=1)  # it takes seconds, and is read once for its hash and once for its tokens
def builtin_documents() -> tuple[str, ...]:
    """One document a module, and one a topic, in an order that depends on their names alone: the hashes of the names
    mix related modules, so that any part of the corpus is a fair sample of it."""
    found = dict(_modules())
    if not found:
        raise ValueError(f"the built-in corpus needs the source of Python's standard library, which is not in "
                         f"{sysconfig.get_path('stdlib')}: name files with --train-data")
    return tuple(found[name] for name in sorted(found, key=lambda name: hashlib.sha256(name.encode()).digest()))


def _modules() -> Iterator[tuple[str, str]]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS.intersection(relative.parts[:-1]):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of escapes in other people's strings
                tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError):
            continue
        if relative.as_posix() == "pydoc_data/topics.py":
            yield from _topics(tree)
            continue
        texts = [ast.get_docstring(node) for node in _statements(tree)
                 if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))]
        text = "\n\n".join(text for text in texts if text)
        if text:
            yield relative.as_posix(), text.encode("utf-8", "replace").decode() + "\n"


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """`ast.walk` without expressions, which hold no definitions and are most of a tree."""
    queue: deque[ast.AST] = deque([tree])
    while queue:
        node = queue.popleft()
        yield node
        for name in node._fields:
            if name in ("body", "handlers", "orelse", "finalbody", "cases") and not isinstance(node, ast.expr):
                queue.extend(getattr(node, name))


def _topics(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """The values of the one dictionary of literals in `pydoc_data/topics.py`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            for key, value in ast.literal_eval(node).items():
                yield f"topic {key}", str(value)
