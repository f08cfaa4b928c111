"""Print docs/reference/flags.md, which is made of the tables that the program reads flags with:

python tools/flag_table.py > docs/reference/flags.md
"""

from collections.abc import Iterable, Sequence

from data_utils.command_line import Parser
from megatron.gpt2.config.flags import flag_table
from megatron.gpt2.config.foreign import KEYS

STATUSES = {
    "honoured": "does what its text says",
    "translated": "another spelling, read as what its text names, which is said once at the start",
    "inert": "changes nothing here, which is said once at the start",
    "refused": "would change result, memory or speed and is not built: an error that names the alternative",
}


def table(rows: Iterable[tuple[str, str, str]], first: str) -> list[str]:
    """Rows of (name, status, text), those with the same status and text together, in Markdown."""
    names: dict[tuple[str, str], list[str]] = {}
    for name, status, text in rows:
        names.setdefault((status, text), []).append(f"`{name}`")
    lines = [f"| {first} | status | |", "|---|---|---|"]
    for wanted in STATUSES:
        for (status, text), together in names.items():
            if status == wanted:
                lines.append(f"| {' '.join(together)} | {status} | {text.replace('|', chr(92) + '|')} |")
    return lines


def page() -> str:
    """docs/reference/flags.md."""
    return "\n".join(
        [
            "# Every flag",
            "",
            "Made by `tools/flag_table.py` from the tables that the command line is read with. `_` may stand for `-` in a",
            "flag. [from-megatron.md](../how-to/from-megatron.md) has files, habits and the rest.",
            "A named run (`--model`) replaces some defaults; so does the quickstart, which runs where no shape is given.",
            "",
            *(f"- {status}: {text}" for status, text in STATUSES.items()),
            "",
            *table(flag_table(), "flag"),
            "",
            "## Keys of a --deepspeed-config",
            "",
            'A key that is `false`, `null`, `"auto"` or `{}`, or in a section with `"enabled": false`, asks for nothing.',
            "",
            *table(((key, row.status, row.documented) for row in KEYS for key in row.flags), "key"),
            "",
        ]
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Print the page."""
    Parser(description=__doc__).parse_args(argv)
    print(page(), end="")
