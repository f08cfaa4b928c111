"""How every program reads its flags, and how it ends."""

from __future__ import annotations

import argparse
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
    """Leave with `main`'s exit code, or with 2 and one line where the input, a flag or the disk is at fault."""
    try:
        sys.exit(main())
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
