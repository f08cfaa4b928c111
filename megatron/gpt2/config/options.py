"""What the sections are written with: a field that is also a flag, and the checks of their values."""

from dataclasses import field
from typing import Any


def option(
    default: Any, help: str, *aliases: str, choices: tuple[str, ...] = (), metavar: str | None = None, alone: Any = None
) -> Any:
    """A dataclass field that is also a flag. help: its text for --help and docs/reference/flags.md. aliases: other
    spellings of the flag, written as on the command line. choices: the values that it takes; empty: any. metavar: what
    stands for its value in --help. alone: the value where the flag is given without one."""
    return field(
        default=default,
        metadata={"help": help, "aliases": aliases, "choices": choices, "metavar": metavar, "alone": alone},
    )


def require(condition: bool, message: str) -> None:
    """Raise ValueError(message), the error that a user sees as one line, unless `condition` holds."""
    if not condition:
        raise ValueError(message)


def require_positive(section: Any, *names: str) -> None:
    """ValueError, which names the flag, unless each of these fields of `section` is above 0 or None."""
    for name in names:
        value = getattr(section, name)
        require(value is None or value > 0, f"--{name.replace('_', '-')} must be positive, not {value}")


def require_fraction(section: Any, *names: str) -> None:
    """ValueError, which names the flag, unless each of these fields of `section` is in [0, 1)."""
    for name in names:
        value = getattr(section, name)
        require(0.0 <= value < 1.0, f"--{name.replace('_', '-')} must be in [0, 1), not {value}")
