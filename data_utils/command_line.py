"""Helpers for command-line programs: flags, output, progress bars, errors and exit codes."""

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

Log = Callable[[str], None]
ROOT = Path(__file__).resolve().parents[1]
# Some subcommands of `gpt2` have other names than their files in tools/ or scripts/.
COMMANDS = {
    "evaluate_gpt2": "evaluate",
    "pretrain_gpt2": "pretrain",
    "pretrain_gpt2_distributed": "pretrain --nproc-per-node 2",
    "run_text_generation_server": "serve",
}


def require(condition: bool, message: str) -> None:
    """Raise ValueError(message) if `condition` is false. The user sees the message as one line."""
    if not condition:
        raise ValueError(message)


def how_to_call(program: str) -> str:
    """Return the command that starts a program from the current folder, for errors and hints.

    program: the name of a file in tools/ or scripts/, without suffix. In a checkout the command is for example "bash
        scripts/python.sh tools/checkpoint.py" or "bash scripts/pretrain_gpt2.sh". If only the package is installed, the
        command is "gpt2 checkpoint".
    """
    scripts, tool = ROOT / "scripts", ROOT / "tools" / f"{program}.py"
    if not (scripts / "python.sh").exists():
        return f"gpt2 {COMMANDS.get(program, program.replace('_', '-'))}"
    files = [scripts / "python.sh", tool] if tool.exists() else [scripts / f"{program}.sh"]
    return " ".join(["bash", *(shlex.quote(os.path.relpath(file)) for file in files)])


def missing_package(needed_by: str, package: str | None, extra: str = "") -> ValueError:
    """Return an error that says how to install a package.

    extra: the extra of this project that installs `package`, such as "data".
    """
    words = [f"gpt2-model-parallel[{extra}]" if extra else str(package)]
    if extra and (ROOT / "pyproject.toml").exists():
        words = ["-c", os.path.relpath(ROOT / "constraints.txt"), "-e", f"{os.path.relpath(ROOT)}[{extra}]"]
    return ValueError(f"{needed_by} needs the package {package}: python -m pip install {shlex.join(words)}")


def configure_output(*, line_buffering: bool | None = None) -> None:
    """Print "?" for a character that the encoding of the output does not have.

    line_buffering: write each line immediately, even to a pipe or a file.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace", line_buffering=line_buffering)


def plural(number: int, noun: str) -> str:
    """Return a number with its noun: 1 rank, 2,000 ranks."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def align_columns(rows: Sequence[Sequence[str]], alignments: str) -> list[str]:
    """Format `rows` as lines with aligned columns.

    alignments: a "<" (left) or ">" (right) for each column.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, alignments, widths, strict=True)).rstrip()
        for row in rows
    ]


class NoProgressBar:
    """A replacement of tqdm's progress bar that draws nothing."""

    def __init__(self, iterable: Iterable[Any] | None = None) -> None:
        self._iterable = iterable or ()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._iterable)

    def __enter__(self) -> NoProgressBar:
        return self

    def update(self, *values: object, **options: object) -> None:
        """Do nothing."""

    close = __exit__ = update

    def write(self, text: str, file: TextIO) -> None:
        """Print `text`, as `tqdm.write` does."""
        print(text, file=file)


def progress_bar(iterable: Iterable[Any] | None = None, *, visible: bool = True, **options: Any) -> Any:
    """Return a tqdm bar with these `options` if standard error is a terminal, tqdm is installed and `visible` is True.
    Otherwise return a NoProgressBar."""
    if visible and sys.stderr.isatty():
        with contextlib.suppress(ImportError):
            from tqdm import tqdm

            return tqdm(iterable, dynamic_ncols=True, **options)
    return NoProgressBar(iterable)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises ValueError instead of printing its usage and exiting, so that only one of several
    ranks prints the error. The parser does not accept abbreviated flags. The help shows the description as written,
    with the command of each tool replaced by `how_to_call`."""

    def __init__(self, *, description: str | None = None, **options: Any) -> None:
        described = re.sub(r"python tools/(\w+)\.py", lambda found: how_to_call(found[1]), description or "")
        called = os.path.basename(sys.argv[0])
        if called in ("gpt2", "__main__.py") and len(sys.argv) > 1:
            called = f"gpt2 {sys.argv[1]}"
        options = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False, **options}
        super().__init__(description=described, **{"prog": called, **options})

    def error(self, message: str) -> NoReturn:
        """Raise ValueError with argparse's message, in words that say what to do."""
        raise ValueError(message.removeprefix("argument ").replace("ignored explicit argument", "leave out the value"))


def print_help(prog: str, words: Sequence[str], description: str | None) -> None:
    """If `words` contain --help, print the help of a program that takes the flags of pretrain_gpt2, and exit."""
    if {"--help", "-h"} & {*words}:
        Parser(prog=prog, usage=f"{prog} [flags of pretrain_gpt2]", description=description).parse_args(["--help"])


def positive_int(text: str) -> int:
    """Convert an argument to an integer of at least 1, as a `type` of argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


def bounded_float(least: float, most: float) -> Callable[[str], float]:
    """Return a converter for argparse that accepts numbers from `least` to `most`."""

    def number(text: str) -> float:
        value = float(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"must be between {least:g} and {most:g}, not {text}")
        return value

    return number


def error_line(error: Exception) -> str:
    """Return the text of `error` in one line. A name that the locale cannot encode is shown with escapes."""
    text = str(error)
    if isinstance(error, UnicodeEncodeError):
        text = f"the locale's encoding, {error.encoding}, cannot write {error.object!a}: set LC_ALL=C.UTF-8"
    return " ".join(text.split())


def as_command(main: Callable[[], int | None]) -> Callable[[], NoReturn]:
    """Wrap `main` as the entry point of a program: exit with its code, or print one line and exit with 2 if it raises
    ValueError or OSError.

    If the reader of the output ends first, as in `| head`, the program prints nothing and exits with 141, the code of
    SIGPIPE.
    """

    def cli() -> NoReturn:
        configure_output()
        try:
            code = main()
            sys.stdout.flush()  # Flush before Python exits, so that `main` can still catch a broken pipe.
        except BrokenPipeError:
            # When the interpreter exits, it flushes standard output again, which would fail on the broken pipe.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = 141
        except (ValueError, OSError) as error:
            print(f"error: {error_line(error)}", file=sys.stderr)
            code = 2
        sys.exit(code)

    return cli
