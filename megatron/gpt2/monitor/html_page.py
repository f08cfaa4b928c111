"""A page that loads nothing else: its frame, and the tables that pages share. All text is escaped, and the page's own
policy allows no script but the one with the right hash."""

import base64
import hashlib
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any


def whole_page(title: str, parts: Sequence[str]) -> str:
    """The page as HTML. parts: what it consists of, as HTML."""
    style, script = (Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("report.css", "report.js"))
    policy = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{policy}'\"><title>{escape(title)}</title><style>{style}</style></head>\n<body>"
        + "\n".join(parts)
        + f"\n<script>{script}</script></body></html>\n"
    )


def remark(text: str) -> str:
    """A line about what stands there, or why nothing does."""
    return f'<p class="none">{escape(text)}</p>'


def cell(text: Any, kind: str = "") -> str:
    """A cell of a table. kind: its class in report.css."""
    return f'<td class="{kind}">{escape(str(text))}</td>'


def pairs(rows: Sequence[tuple[str, Any]]) -> str:
    """A table of names and their values."""
    return (
        "<table>"
        + "".join(
            f"<tr>{cell(name)}{cell(' '.join(map(str, value)) if isinstance(value, list | tuple) else value)}</tr>"
            for name, value in rows
        )
        + "</table>"
    )


def scrolling(head: Sequence[str], rows: Sequence[str]) -> str:
    """A table with a head, in a frame of its own. rows: each the cells of a row, as HTML."""
    return (
        '<div class="scroll"><table><tr>'
        + "".join(f"<th>{escape(name)}</th>" for name in head)
        + "</tr>"
        + "".join(f"<tr>{row}</tr>" for row in rows)
        + "</table></div>"
    )
