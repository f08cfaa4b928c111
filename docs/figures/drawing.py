"""Functions that return shapes as SVG, for the drawings in the docs."""

from __future__ import annotations

from html import escape

RANKS = ("#1f6fb2", "#c2571a")
INK, GREY, PAPER, WHOLE = "#1c2733", "#5b6875", "#ffffff", "#eef1f4"


def text(
    x: float, y: float, words: str, *, size: int = 13, color: str = INK, bold: bool = False, anchor: str = "middle"
) -> str:
    """Return a line of text on the baseline `y`.

    anchor: the part of the text that is at `x`: start, middle or end.
    """
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{color}"{weight} text-anchor="{anchor}">'
        f"{escape(words)}</text>"
    )


def box(
    x: float, y: float, width: float, height: float, lines: list[str], *, edge: str, fill: str = PAPER
) -> list[str]:
    """Return a rounded box with lines of text. The first line, the name of the box, is bold."""
    middle, top = x + width / 2, y + height / 2 - 8 * (len(lines) - 1) + 4
    drawn = [
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" fill="{fill}" stroke="{edge}" '
        'stroke-width="1.5"/>'
    ]
    return drawn + [
        text(middle, top + 17 * i, line, bold=not i, size=13 if not i else 12, color=INK if not i else GREY)
        for i, line in enumerate(lines)
    ]


def arrow(x: float, y: float, to: float) -> str:
    """Return a horizontal arrow from left to right."""
    return f'<path d="M{x:g} {y:g} H{to - 7:g}" stroke="{INK}" stroke-width="1.4" marker-end="url(#tip)"/>'


def line(x: float, y: float, to_x: float, to_y: float) -> str:
    """Return a straight line that ends in an arrow tip."""
    return (
        f'<path d="M{x:g} {y:g} L{to_x:g} {to_y:g}" stroke="{GREY}" stroke-width="1.2" fill="none" '
        'marker-end="url(#tip)"/>'
    )


def picture(width: int, height: int, parts: list[str]) -> str:
    """Return an SVG of `width` x `height` pixels with these `parts`, and the arrow tip that `arrow` and `line` use."""
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="Helvetica, Arial, sans-serif">\n'
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="1" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto">'
        f'<path d="M0 0 L8 4 L0 8 z" fill="{INK}"/></marker></defs>\n'
        f'<rect width="100%" height="100%" fill="{PAPER}"/>\n{body}\n</svg>'
    )
