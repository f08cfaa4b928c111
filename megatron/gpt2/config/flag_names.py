"""From a field of the configuration to its flag, and the flags by which a run differs from another."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from megatron.gpt2.config.sections import SECTIONS, Config


def flag(key: str) -> str:
    """The flag of a field: "model.num_layers" -> "--num-layers"."""
    return "--" + key.split(".")[1].replace("_", "-")


def fields() -> dict[str, dataclasses.Field[Any]]:
    """Every field of the configuration by "section.field", in the order in which the sections have them."""
    return {f"{name}.{f.name}": f for name, kind in SECTIONS.items() for f in dataclasses.fields(kind)}


def by_key(sections: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """{section: {field: value}}, as `Config.as_dict` gives it, by "section.field" in the same order."""
    return {f"{section}.{name}": value for section, values in sections.items() for name, value in values.items()}


def differing_flags(config: Config, default: Config | None = None) -> list[tuple[str, Any]]:
    """(flag, value) for each field that is not what `default` has (None: the defaults), in the order of the fields."""
    theirs = by_key((default or Config()).as_dict())
    return [(flag(key), value) for key, value in by_key(config.as_dict()).items() if value != theirs[key]]
