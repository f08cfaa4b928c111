"""How every program is called, reads its flags, prints, shows its progress and ends."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

ROOT = Path(__file__).resolve().parents[1]
# What follows "gpt2" where it is not the name of the file in tools/ or scripts/.
COMMANDS = {
    "evaluate_gpt2": "evaluate",
    "pretrain_gpt2": "pretrain",
    "pretrain_gpt2_distributed": "pretrain --nproc-per-node 2",
    "run_text_generation_server": "serve",
}


def how_to_call(program: str) -> str:
    """The words that start a program from the current folder, for errors and hints.

    program: a file of tools/ or scripts/ without its suffix.
    In a checkout it is "bash scripts/python.sh tools/checkpoint.py", in the environment that python.sh finds, or "bash
    scripts/pretrain_gpt2.sh"; if only the package is installed it is "gpt2 checkpoint".
    """
    scripts, tool = ROOT / "scripts", ROOT / "tools" / f"{program}.py"
    if not (scripts / "python.sh").exists():
        return f"gpt2 {COMMANDS.get(program, program.replace('_', '-'))}"
    files = [scripts / "python.sh", tool] if tool.exists() else [scripts / f"{program}.sh"]
    return " ".join(["bash", *(shlex.quote(os.path.relpath(file)) for file in files)])


def line_buffered() -> None:
    """Let every line of this process appear when it is written, also in a pipe or a file."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)


def columns(rows: Sequence[Sequence[str]], sides: str) -> list[str]:
    """A line for each of `rows`. sides: of each column, "<" if its cells begin at its left, ">" if they end at its
    right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)).rstrip()
        for row in rows
    ]


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

    clear = close = __exit__ = update

    def write(self, text: str, file: TextIO) -> None:
        """Print a line."""
        print(text, file=file)


def progress_bar(iterable: Iterable[Any] | None = None, *, seen: bool = True, **options: Any) -> Any:
    """tqdm's bar on standard error, if that is a terminal, tqdm is installed and `seen` is True; else a NoProgressBar.
    `options` are tqdm's."""
    if seen and sys.stderr.isatty():
        with contextlib.suppress(ImportError):
            from tqdm import tqdm

            return tqdm(iterable, dynamic_ncols=True, **options)
    return NoProgressBar(iterable)


class Parser(argparse.ArgumentParser):
    """Raises a ValueError instead of argparse's usage and exit: bad input ends in one line, which one of several ranks
    writes. It completes no prefixes. Its help shows the description as it is written, but a program of tools/ is called
    in it as `how_to_call` says."""

    def __init__(self, *, description: str | None = None, **options: Any) -> None:
        described = re.sub(r"python tools/(\w+)\.py", lambda found: how_to_call(found[1]), description or "")
        called = os.path.basename(sys.argv[0])
        if called in ("gpt2", "__main__.py") and len(sys.argv) > 1:
            called = f"gpt2 {sys.argv[1]}"
        options = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False, **options}
        super().__init__(description=described, **{"prog": called, **options})

    def error(self, message: str) -> NoReturn:
        """ValueError with argparse's message, without the word that it puts before it."""
        raise ValueError(message.removeprefix("argument "))


def program(main: Callable[[], int | None]) -> Callable[[], NoReturn]:
    """`main` as a separate program, which exits: with its code, or with 2 and one line if the input, a flag or the
    disk is at fault.

    If the reader of the output ends first, as `| head` does, the program exits with 141, the code of SIGPIPE, and
    prints nothing.
    """

    def cli() -> NoReturn:
        try:
            code = main()
            sys.stdout.flush()  # here, where a broken pipe can still be caught
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the interpreter's end
            code = 141
        except (ValueError, OSError) as error:
            print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
            code = 2
        sys.exit(code)

    return cli
