"""Print docs/reference/flags.md, generated from the tables of the command-line parser:

python tools/flag_table.py > docs/reference/flags.md
"""

import collections
import dataclasses
import re
from collections.abc import Mapping, Sequence

from data_utils.command_line import Parser
from megatron.gpt2.config import SECTIONS, LaunchConfig, flag_name
from megatron.gpt2.config.compat import DEEPSPEED_RULES, MEGATRON_RULES, CompatRule
from megatron.gpt2.config.flags import CONFIG_HELP, MODEL_HELP, help_of_field

TITLES = {
    "translated": "Translated into other flags",
    "ignored": "Ignored with these values",
    "refused": "Refused: give the flag after the colon, or leave the flag out",
}
# These words of a flag's text are left out, because the heading above the flag has the same meaning.
REPEATED = re.compile(
    r"^(read as|give) |[;:]? ?(leave|take) it out$|: no other value is implemented$|bash scripts/python\.sh "
)


def section_lines(kind: type) -> list[str]:
    """Return a line for each flag of a section: its spellings and its help text."""
    lines = []
    for f in dataclasses.fields(kind):  # type: ignore[arg-type]
        names = " ".join(f"`{name}`" for name in (flag_name(f.name), *f.metadata["aliases"]))
        choices = f"{{{','.join(f.metadata['choices'])}}} " * bool(f.metadata["choices"])
        lines.append(f"- {names}: {choices}" + re.sub(r"\(default: ([^)]*)\)", r"[\1]", help_of_field(f)))
    return lines


def rule_lines(rules: Mapping[str, CompatRule], heading: str) -> list[str]:
    """Return Markdown lines with a list of flags for each status, such as "refused". Names with the same text share a
    line. Hundreds of flags without effect are left out, because a run prints the reason why it ignores a flag."""
    names = collections.defaultdict[tuple[str, str], list[str]](list)
    for name, rule in rules.items():
        if rule.status == "ignored" and not rule.accepts and name.startswith("--"):
            continue
        names[rule.status, REPEATED.sub("", rule.help_text)].append(f"`{name}`")
    lines = []
    for wanted, title in TITLES.items():
        lines += ["", f"{heading} {title}", ""]
        lines += [f"- {' '.join(together)}: {text}" for (status, text), together in names.items() if status == wanted]
    return lines


def flags_page() -> str:
    """Return the text of docs/reference/flags.md."""
    sections = [
        line
        for section, kind in {**SECTIONS, "launch": LaunchConfig}.items()
        for line in ("", f"## {section.capitalize()}", "", *section_lines(kind))
    ]
    return "\n".join(
        [
            "# Every flag",
            "",
            "`tools/flag_table.py` generates this page. In a flag, `_` may replace `-`. Defaults are in brackets;",
            "presets (`--model`) and the quickstart change some. `--bert-*` stands for all flags with this beginning.",
            "A run ignores flags of Megatron-LM, Megatron-DeepSpeed and BigScience that are not here, and prints why.",
            "",
            f"- `--model`: {MODEL_HELP}",
            f"- `--config`: {CONFIG_HELP}",
            *sections,
            *rule_lines(MEGATRON_RULES, "##"),
            "",
            "## Keys of a --deepspeed-config",
            "",
            'A key that is `false`, `null`, `"auto"` or `{}`, or in a section with `"enabled": false`, is skipped.',
            *rule_lines(DEEPSPEED_RULES, "###"),
            "",
        ]
    )


def main(argv: Sequence[str] | None = None) -> None:
    Parser(description=__doc__).parse_args(argv)
    print(flags_page(), end="")
