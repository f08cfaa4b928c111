"""From a field of the configuration to its flag, and the flags by which a run differs from another."""

import dataclasses
from typing import Any

from megatron.gpt2.config.sections import SECTIONS, Config


def flag(key: str) -> str:
    """The flag of a field: "model.num_layers" -> "--num-layers"."""
    return "--" + key.split(".")[1].replace("_", "-")


def fields() -> dict[str, dataclasses.Field[Any]]:
    """Every field of the configuration by "section.field", in the order in which the sections have them."""
    return {f"{name}.{f.name}": f for name, kind in SECTIONS.items() for f in dataclasses.fields(kind)}


def differing_flags(config: Config, default: Config | None = None) -> list[tuple[str, Any]]:
    """(flag, value) for each field that is not what `default` has (None: the defaults), in the order of the fields."""
    ours, theirs = config.as_dict(), (default or Config()).as_dict()
    return [(flag(key), ours[s][name]) for key in fields() for s, name in [key.split(".")]
            if ours[s][name] != theirs[s][name]]
