"""How every program reads its flags, and how it ends."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """Raises a ValueError where argparse would print its usage and exit: bad input ends in one line, which one of
    several ranks writes. It completes no prefixes, and its help shows the description as it is written."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        raise ValueError(message.removeprefix("argument "))


def end_with(main: Callable[[], int | None]) -> NoReturn:
    """Leave with `main`'s exit code, or with 2 and one line where the input, a flag or the disk is at fault.

    A reader of the output that ends first, as `| head` does, is no error of this program: it ends with 141, the code
    of SIGPIPE, and prints nothing.
    """
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
