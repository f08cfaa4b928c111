"""The parser of every program's flags."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """Raises a ValueError where argparse would print its usage and exit: bad input ends in one line, which one of
    several ranks writes. It completes no prefixes, and its help shows the description as it is written."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        raise ValueError(message.removeprefix("argument "))
