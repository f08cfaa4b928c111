"""The command-line parser, which has a flag for each field in `sections.py`."""

import argparse
import dataclasses
import inspect
import math
import textwrap
from collections.abc import Sequence
from typing import Any

from data_utils.command_line import Parser
from megatron.gpt2.config.compat import MEGATRON_RULES
from megatron.gpt2.config.presets import PRESETS
from megatron.gpt2.config.sections import SECTIONS, LaunchConfig, flag_name

MODEL_HELP = f"preset: {', '.join(PRESETS)}"
CONFIG_HELP = "config.json of an earlier run: use its flags; flags on the command line win"


def with_dashes(word: str) -> str:
    """Return a word of a command line. `--a_b=c_d` becomes `--a-b=c_d`, and words that are not flags do not change."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else word


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """A help formatter that does not break lines inside a flag."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)


def _integer(text: str) -> int:
    """Parse an integer, which may be written as 300_000 or 3e8."""
    try:
        return int(text)
    except ValueError:
        value = float(text)
        if not value.is_integer():
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        return int(value)


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number")
    return value


_integer.__name__, _finite_float.__name__ = "int", "float"  # argparse prints these names in its errors.

# {type of a field: keyword arguments for `add_argument`}
ARGPARSE_KEYWORDS: dict[Any, dict[str, Any]] = {
    bool: {"action": "store_true"},
    int: {"type": _integer, "metavar": "N"},
    float: {"type": _finite_float, "metavar": "X"},
    str: {"metavar": "TEXT"},
    tuple[int, ...]: {"nargs": "*", "type": _integer},  # In today's Megatron --profile takes no value.
    tuple[str, ...]: {"nargs": "+"},
}
ARGPARSE_KEYWORDS |= {kind | None: ARGPARSE_KEYWORDS[kind] for kind in (int, float, str)}


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the training program. The parser's namespace has only the flags that are given, by
    "section.field". Megatron's flags that have no field in sections.py are left over. `arguments.parse` handles
    Megatron's flags, and reports the errors of all flags at once."""
    parser = Parser(
        prog="pretrain_gpt2",
        argument_default=argparse.SUPPRESS,
        formatter_class=_HelpFormatter,
        usage="%(prog)s [--model NAME] [--flag VALUE | --flag=VALUE] ...",
        description="Pretrain GPT-2. Without flags, train a small model on the built-in corpus.",
    )
    parser.add_argument(
        "--model",
        type=str.lower,
        choices=tuple(PRESETS),
        dest="preset",
        help="preset, whose values other flags override (default: quickstart, unless --num-layers, --hidden-size or "
        "--num-attention-heads is given)",
    )
    parser.add_argument("--config", dest="config_file", metavar="FILE", help=CONFIG_HELP)
    for section, kind in {**SECTIONS, "launch": LaunchConfig}.items():
        add_section(parser, section, kind)
    listed = (
        f"{status}: {' '.join(name for name, rule in MEGATRON_RULES.items() if rule.status == status)}."
        for status in ("translated", "refused")
    )
    parser.add_argument_group(
        "Megatron's other flags, without those that have no effect",
        "\n".join(textwrap.fill(text, 100, break_on_hyphens=False) for text in listed),
    )
    return parser


def add_section(parser: argparse.ArgumentParser, section: str, kind: Any) -> None:
    """Add the flags of one section. The parser stores their values under "section.field"."""
    group = parser.add_argument_group(section, inspect.getdoc(kind))
    for f in dataclasses.fields(kind):
        metadata, keywords = f.metadata, dict(ARGPARSE_KEYWORDS[f.type])
        if metadata["choices"]:
            keywords["metavar"] = f"{{{','.join(metadata['choices'])}}}"
        if metadata["metavar"]:
            keywords["metavar"] = metadata["metavar"]
        if metadata["const"] is not None:
            keywords |= {"nargs": "?", "const": metadata["const"]}
        key, text = f"{section}.{f.name}", help_of_field(f).replace("%", "%%")
        group.add_argument(flag_name(key), *metadata["aliases"], dest=key, help=text, **keywords)


def help_of_field(f: dataclasses.Field[Any]) -> str:
    """Return the help text of a flag with its default."""
    default = " ".join(map(str, f.default)) if isinstance(f.default, tuple) else f.default
    has_none = default is None or default is False or default == ""  # `--help` shows a default of 0.
    return f.metadata["help"] + ("" if has_none else f" (default: {default})")


def parse_launch_flags(argv: Sequence[str]) -> tuple[LaunchConfig, list[str]]:
    """Parse the flags of `LaunchConfig`. Return the flags and the other words of `argv`.

    The flags of `LaunchConfig` are parsed first, because they decide which rank reports a bad flag."""
    names = {flag_name(f.name) for f in dataclasses.fields(LaunchConfig)}
    words = [flag if (flag := with_dashes(word)).partition("=")[0] in names else word for word in argv]
    parser = Parser(add_help=False, argument_default=argparse.SUPPRESS)
    add_section(parser, "launch", LaunchConfig)
    given, rest = parser.parse_known_args(words)
    return LaunchConfig(**{key.removeprefix("launch."): value for key, value in vars(given).items()}), rest
