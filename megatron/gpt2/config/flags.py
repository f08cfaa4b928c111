"""The flags: one for each field of the sections in `sections.py`, and those of other programs in `foreign.py`."""

import argparse
import dataclasses
import inspect
import math
import textwrap
from collections.abc import Sequence
from typing import Any

from data_utils.command_line import Parser
from megatron.gpt2.config.foreign import FOREIGN
from megatron.gpt2.config.recipes import PRESETS
from megatron.gpt2.config.sections import SECTIONS, LaunchConfig, fields, flag

RERUN = "the config.json in the --save folder of a run: its flags once more; other flags of the command line win"


def dashed(word: str) -> str:
    """A word of a command line with `--a_b` as `--a-b`; what stands after "=", and what is not a flag, stays."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else word


class _Help(argparse.RawDescriptionHelpFormatter):
    """Never breaks a line inside a flag."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)


def _whole(text: str) -> int:
    """An int, also written 300_000 or 3e8."""
    try:
        return int(text)
    except ValueError:
        value = float(text)
        if not value.is_integer():
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        return int(value)


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number")
    return value


_whole.__name__, _number.__name__ = "int", "float"  # argparse names the type in its errors

# argparse's keywords for each type of a field.
HOW_TO_READ: dict[Any, dict[str, Any]] = {
    bool: {"action": "store_true"},
    int: {"type": _whole, "metavar": "N"},
    float: {"type": _number, "metavar": "X"},
    str: {"metavar": "TEXT"},
    tuple[int, ...]: {"nargs": "*", "type": _whole},  # today's --profile has no value
    tuple[str, ...]: {"nargs": "+"},
}
HOW_TO_READ |= {kind | None: HOW_TO_READ[kind] for kind in (int, float, str)}


def build_parser() -> argparse.ArgumentParser:
    """The parser of the training program: the flags of all sections and Megatron's other flags. It sets only what the
    command line gives, under "section.field" or, for a foreign flag, its own name."""
    parser = Parser(
        prog="pretrain_gpt2",
        argument_default=argparse.SUPPRESS,
        formatter_class=_Help,
        usage="%(prog)s [--model NAME] [--flag VALUE | --flag=VALUE] ...",
        description="Pretrain GPT-2. Without flags a small model is trained on the built-in corpus.",
    )
    parser.add_argument(
        "--model",
        type=str.lower,
        choices=tuple(PRESETS),
        dest="preset",
        help="a named run, every value of which a flag overrides (default: quickstart, unless "
        "--num-layers, --hidden-size or --num-attention-heads is given)",
    )
    parser.add_argument("--config", dest="rerun", metavar="FILE", help=RERUN)
    for section, kind in {**SECTIONS, "launch": LaunchConfig}.items():
        add_section(parser, section, kind)
    listed = (
        f"{status}: {' '.join(name for row in FOREIGN if row.status == status for name in row.flags)}."
        for status in ("translated", "inert", "refused")
    )
    group = parser.add_argument_group(
        "Megatron's other flags", "\n".join(textwrap.fill(text, 100, break_on_hyphens=False) for text in listed)
    )
    for row in FOREIGN:
        for name, nargs in row.flags.items():
            how: dict[str, Any] = {"action": "store_const", "const": None} if nargs == 0 else {"nargs": nargs}
            group.add_argument(name, dest=name, help=argparse.SUPPRESS, **how)
    return parser


def add_section(parser: argparse.ArgumentParser, section: str, kind: Any) -> None:
    """The flags of one section; their values go to "section.field"."""
    group = parser.add_argument_group(section, inspect.getdoc(kind))
    for f in dataclasses.fields(kind):
        text = f.metadata
        how = {"choices": text["choices"]} if text["choices"] else dict(HOW_TO_READ[f.type])
        if text["metavar"]:
            how["metavar"] = text["metavar"]
        if text["alone"] is not None:
            how |= {"nargs": "?", "const": text["alone"]}
        key = f"{section}.{f.name}"
        group.add_argument(flag(key), *text["aliases"], dest=key, help=_told(f).replace("%", "%%"), **how)


def _told(f: dataclasses.Field[Any]) -> str:
    """The text of a flag, with its default."""
    default = " ".join(map(str, f.default)) if isinstance(f.default, tuple) else f.default
    has_none = default is None or default is False or default == ""  # and not if it is 0
    return f.metadata["help"] + ("" if has_none else f" (default: {default})")


def launch_flags(argv: Sequence[str]) -> tuple[LaunchConfig, list[str]]:
    """The flags of `LaunchConfig` in a command line, and the words that are left. They are read before the others:
    which of the processes answers for a bad flag depends on them."""
    names = {flag(f.name) for f in dataclasses.fields(LaunchConfig)}
    words = [meant if (meant := dashed(word)).partition("=")[0] in names else word for word in argv]
    parser = Parser(add_help=False, argument_default=argparse.SUPPRESS)
    add_section(parser, "launch", LaunchConfig)
    given, rest = parser.parse_known_args(words)
    return LaunchConfig(**{key.removeprefix("launch."): value for key, value in vars(given).items()}), rest


def flag_table() -> list[tuple[str, str, str]]:
    """Every flag as (flag, status, text), the status being honoured, translated, inert or refused: what docs/ and the
    suggestions for an unknown flag are made of."""
    table = [("--model", "honoured", "a named run: " + ", ".join(PRESETS)), ("--config", "honoured", RERUN)]
    for f in (*fields().values(), *dataclasses.fields(LaunchConfig)):
        table.append((flag(f.name), "honoured", _told(f)))
        table += [(alias, "translated", f"read as {flag(f.name)}") for alias in f.metadata["aliases"]]
    return table + [(name, row.status, row.documented) for row in FOREIGN for name in row.flags]
