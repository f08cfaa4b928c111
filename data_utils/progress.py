"""A progress bar on a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any, TextIO


class NoProgressBar:
    """The methods of tqdm's bar that are used here, without a bar."""

    def __init__(self, iterable: Iterable[Any] | None = None) -> None:
        self._iterable = iterable or ()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._iterable)

    def __enter__(self) -> NoProgressBar:
        return self

    def update(self, *values: object, **options: object) -> None:
        """Nothing is drawn."""

    clear = close = set_postfix_str = __exit__ = update

    def write(self, text: str, file: TextIO) -> None:
        """Print a line."""
        print(text, file=file)


def progress_bar(iterable: Iterable[Any] | None = None, *, seen: bool = True, **options: Any) -> Any:
    """tqdm's bar on standard error, where that is a terminal, tqdm is installed and `seen` is True; else a
    NoProgressBar. `options` are tqdm's."""
    if seen and sys.stderr.isatty():
        with contextlib.suppress(ImportError):
            from tqdm import tqdm

            return tqdm(iterable, dynamic_ncols=True, **options)
    return NoProgressBar(iterable)
