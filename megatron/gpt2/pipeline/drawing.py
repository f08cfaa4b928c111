"""A schedule as lines of text and as a drawing: one line per rank, time to the right.

The colours of the actions and their dark letters are the same on light and dark pages. Paper, lanes and the words
beside them follow the reader's setting.
"""

from html import escape

from megatron.gpt2.pipeline.schedule import Schedule
from megatron.gpt2.pipeline.timetable import Timetable

# Red, green and blue of the first chunk; later ones are lighter.
COLOURS = {"F": (95, 160, 225), "B": (240, 150, 70), "W": (110, 190, 110)}
STYLE = """text { fill: #1c2733 } .paper { fill: #ffffff } .lane { fill: #e6eaee } .in { fill: #10161c }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .paper { fill: #12171d } .lane { fill: #2d3640 } }"""
LEFT, RIGHT, TOP, HIGH, GAP, WIDE = 62, 14, 66, 30, 8, 1120  # of the drawing, in pixels; WIDE: the longest lane


def as_text(schedule: Schedule, table: Timetable) -> list[str]:
    """A line per rank: each action is its letter and its micro-batch, and the letter of its chunk where there are
    several, `=` while it goes on and `|` at its end; a rank that waits is `.`."""
    names = [
        [f"{action.kind}{action.micro_batch}{_letter(schedule, action.chunk)}" for action in actions]
        for actions in schedule.ranks
    ]
    shortest = min(span.end - span.start for spans in table.ranks for span in spans if span.end > span.start)
    wide = (1 + max(len(name) for own in names for name in own)) / shortest  # characters per unit of time
    lines = []
    for rank, spans in enumerate(table.ranks):
        line = ""
        for name, span in zip(names[rank], spans, strict=True):
            line = line.ljust(round(span.start * wide), ".")
            if span.end > span.start:
                line += name.ljust(round(span.end * wide) - len(line) - 1, "=") + "|"
        lines.append(f"rank {rank:<3}{line.ljust(round(table.length * wide), '.')}")
    return lines


def as_svg(schedule: Schedule, table: Timetable, title: str) -> str:
    """The drawing, with a legend. The lanes that show through are the bubble."""
    scale = min(
        36 / min(span.end - span.start for spans in table.ranks for span in spans if span.end > span.start),
        WIDE / table.length,
    )
    width, height = LEFT + max(table.length * scale, 560) + RIGHT, TOP + schedule.p * (HIGH + GAP) + 22
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height}" width="{width:g}" '
        f'height="{height}" font-family="Helvetica, Arial, sans-serif" font-size="13" role="img" '
        f'aria-label="{escape(title)}">',
        f"<style>{STYLE}</style>",
        '<rect class="paper" width="100%" height="100%"/>',
        f'<text x="{LEFT}" y="22" font-weight="600">{escape(title)}</text>',
        *_legend(schedule),
    ]
    for rank, (actions, spans) in enumerate(zip(schedule.ranks, table.ranks, strict=True)):
        y = TOP + rank * (HIGH + GAP)
        parts += [
            f'<text x="10" y="{y + 20}">rank {rank}</text>',
            f'<rect class="lane" x="{LEFT}" y="{y}" width="{table.length * scale:.2f}" height="{HIGH}"/>',
        ]
        for action, span in zip(actions, spans, strict=True):
            x, wide = LEFT + span.start * scale, (span.end - span.start) * scale
            parts.append(
                f'<rect x="{x:.2f}" y="{y}" width="{wide:.2f}" height="{HIGH}" stroke="#ffffff" '
                f'fill="{_colour(schedule, action.kind, action.chunk)}">'
                f"<title>rank {rank}: {action}</title></rect>"
            )
            if wide >= 8 * len(str(action.micro_batch)):
                parts.append(
                    f'<text class="in" x="{x + wide / 2:.2f}" y="{y + 20}" text-anchor="middle">'
                    f"{action.micro_batch}</text>"
                )
    parts.append(f'<text x="{LEFT}" y="{height - 10}" font-size="12">time →</text>')
    return "\n".join([*parts, "</svg>"])


def _legend(schedule: Schedule) -> list[str]:
    """What the colours mean, and the shades of the chunks."""
    backward = "backward: gradients of the input" + ("" if schedule.splits_backward else " and the weights")
    words = [
        ("F", "forward"),
        *([("B", backward)] if schedule.trains else []),
        *([("W", "gradients of the weights")] if schedule.splits_backward else []),
    ]
    parts, x = [], float(LEFT)
    for kind, word in words:
        for chunk in range(schedule.chunks):
            parts.append(f'<rect x="{x:g}" y="36" width="18" height="16" fill="{_colour(schedule, kind, chunk)}"/>')
            if schedule.chunks > 1:
                parts.append(
                    f'<text class="in" x="{x + 9:g}" y="49" font-size="12" text-anchor="middle">'
                    f"{_letter(schedule, chunk)}</text>"
                )
            x += 20
        parts.append(f'<text x="{x + 4:g}" y="49">{word}{", by chunk" if schedule.chunks > 1 else ""}</text>')
        x += 7.2 * len(word) + (90 if schedule.chunks > 1 else 24)
    return parts


def _letter(schedule: Schedule, chunk: int) -> str:
    """a, b, ... where a rank has several chunks."""
    return "" if schedule.chunks == 1 else chr(ord("a") + chunk) if chunk < 26 else f"_{chunk}"


def _colour(schedule: Schedule, kind: str, chunk: int) -> str:
    lighter = 0.6 * chunk / max(schedule.chunks - 1, 1)
    return "#" + "".join(f"{round(part + (255 - part) * lighter):02x}" for part in COLOURS[kind])
