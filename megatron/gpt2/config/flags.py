"""The flags: one for each field of `megatron/gpt2/config/`, and the foreign ones of `foreign_flags.py`."""

import argparse
import dataclasses
import math
import textwrap
import types
import typing
from collections.abc import Sequence
from typing import Any

from data_utils.command_line import Parser
from megatron.gpt2.config.config import SECTIONS, fields, flag
from megatron.gpt2.config.foreign import FOREIGN
from megatron.gpt2.config.presets import PRESETS
from megatron.gpt2.config.sections import LaunchConfig

RERUN = "the config.json in the --save folder of a run: its flags once more, beside which those that are given win"


def dashed(word: str) -> str:
    """A word of a command line with `--a_b` as `--a-b`; what stands after "=", and what is no flag, stays."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else word


class _Help(argparse.HelpFormatter):
    """Never breaks a line inside a flag."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(
            textwrap.fill(line, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
            for line in text.splitlines()
        )


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
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number")
    return value


_whole.__name__ = "int"  # argparse names the type in its errors


def _how_to_read(hint: Any) -> dict[str, Any]:
    """argparse's keywords for the type of a field."""
    if isinstance(hint, types.UnionType):  # int | None
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    if hint is bool:
        return {"action": "store_true"}
    if hint == tuple[int, ...]:
        return {"nargs": "*", "type": _whole}  # today's --profile has no value
    if typing.get_origin(hint) is tuple:
        return {"nargs": "+"}
    return {"type": {int: _whole, float: _number, str: str}[hint]}


def build_parser() -> argparse.ArgumentParser:
    """The parser of the training program: the flags of all sections and Megatron's other flags. It sets only what the
    command line gives, under "section.field" or, for a foreign flag, its own name."""
    parser = Parser(
        prog="pretrain_gpt2",
        add_help=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=_Help,
        usage="%(prog)s [--model NAME] [--flag VALUE | --flag=VALUE] ...",
        description="Pretrain GPT-2. Without flags a small model is trained on the built-in corpus.",
    )
    parser.add_argument("--help", action="store_true", help="print this and exit")
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
    group = parser.add_argument_group(
        "Megatron's other flags",
        "\n".join(
            f"{status}: {' '.join(name for row in FOREIGN if row.status == status for name in row.flags)}."
            for status in ("translated", "inert", "refused")
        ),
    )
    for row in FOREIGN:
        how = (
            {"action": "store_const", "const": None}
            if row.values == 0
            else {"nargs": None if row.values == 1 else row.values}
        )
        for name in row.flags:
            group.add_argument(name, dest=name, help=argparse.SUPPRESS, **how)
    return parser


def add_section(parser: argparse.ArgumentParser, section: str, kind: Any) -> None:
    """The flags of one section; their values go to "section.field"."""
    group = parser.add_argument_group(section, kind.__doc__.split("\n\n")[0])
    hints = typing.get_type_hints(kind)
    for f in dataclasses.fields(kind):
        how = _how_to_read(hints[f.name])
        if f.metadata["alone"] is not None:
            how |= {"nargs": "?", "const": f.metadata["alone"]}
        if f.metadata["choices"]:
            how["choices"] = f.metadata["choices"]
        elif f.metadata["metavar"] or "type" in how:
            how["metavar"] = f.metadata["metavar"] or {_whole: "N", _number: "X"}.get(how["type"], "TEXT")
        group.add_argument(
            flag(f"{section}.{f.name}"),
            *f.metadata["aliases"],
            dest=f"{section}.{f.name}",
            help=_told(f).replace("%", "%%"),
            **how,
        )


def _told(f: dataclasses.Field[Any]) -> str:
    """The text of a flag, with its default."""
    default = " ".join(map(str, f.default)) if isinstance(f.default, tuple) else f.default
    has_none = default is None or default is False or default == ""  # and not where it is 0
    return f.metadata["help"] + ("" if has_none else f" (default: {default})")


def launch_flags(argv: Sequence[str]) -> tuple[LaunchConfig, list[str]]:
    """The flags of `LaunchConfig` in a command line, and the words that are left. They are read before the others:
    which of the processes answers for a bad flag depends on them."""
    names = {flag(f"launch.{f.name}") for f in dataclasses.fields(LaunchConfig)}
    words = [meant if (meant := dashed(word)).partition("=")[0] in names else word for word in argv]
    parser = Parser(add_help=False, argument_default=argparse.SUPPRESS)
    add_section(parser, "launch", LaunchConfig)
    given, rest = parser.parse_known_args(words)
    return LaunchConfig(**{key.split(".")[1]: value for key, value in vars(given).items()}), rest


def flag_table() -> list[tuple[str, str, str]]:
    """Every flag as (flag, status, text), the status being honoured, translated, inert or refused: what docs/ and the
    suggestions for an unknown flag are made of."""
    table = [("--model", "honoured", "a named run: " + ", ".join(PRESETS)), ("--config", "honoured", RERUN)]
    for key, f in fields().items():
        table.append((flag(key), "honoured", _told(f)))
        table += [(alias, "translated", f"read as {flag(key)}") for alias in f.metadata["aliases"]]
    table += [(flag(f"launch.{f.name}"), "honoured", _told(f)) for f in dataclasses.fields(LaunchConfig)]
    return table + [(name, row.status, row.documented) for row in FOREIGN for name in row.flags]
