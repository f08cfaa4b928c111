#!/usr/bin/env python3
"""Draw how a transformer layer is split over two ranks, and where the ranks communicate.

python docs/figures/draw_layer.py > docs/figures/layer.svg
"""

from __future__ import annotations

from drawing import GREY, INK, RANKS, WHOLE, arrow, box, picture, text

WIDTH, HEIGHT = 1090, 350
LANES = (92, 212)  # y of the row of boxes of rank 0 and of rank 1
LANE = 84  # height of the boxes in a row
BRANCH = 506  # width of attention, and of the MLP


def whole(x: float, width: float, lines: list[str]) -> list[str]:
    """Draw one box over the rows of both ranks, for a computation that every rank repeats."""
    return box(x, LANES[0], width, LANES[1] + LANE - LANES[0], lines, edge=GREY, fill=WHOLE)


def split(x: float, width: float, of_rank: list[list[str]]) -> list[str]:
    """Draw one box in the row of each rank, for a computation with this rank's part of the weights."""
    return [
        line
        for top, edge, lines in zip(LANES, RANKS, of_rank, strict=True)
        for line in box(x, top, width, LANE, lines, edge=edge)
    ]


def operation(x: float, name: str, forward: str, backward: str) -> list[str]:
    """Draw *f* or *g* as a bar over the rows of both ranks. Its communication in forward is written above the bar, that
    in backward below."""
    top, bottom = LANES[0] - 6, LANES[1] + LANE + 6
    return [
        f'<rect x="{x - 11:g}" y="{top}" width="22" height="{bottom - top}" rx="11" fill="{INK}"/>',
        f'<text x="{x:g}" y="{(top + bottom) / 2 + 5:g}" font-size="16" font-style="italic" fill="#fff" '
        f'text-anchor="middle">{name}</text>',
        text(x, top - 26, "forward", size=11, color=GREY),
        text(x, top - 11, forward, size=12, bold=True),
        text(x, bottom + 17, "backward", size=11, color=GREY),
        text(x, bottom + 32, backward, size=12, bold=True),
    ]


def branch(x: float, first: list[str], second: list[str]) -> list[str]:
    """Draw x + g(row-parallel(column-parallel(f(norm(x))))) for both ranks: attention or the MLP."""
    middle = (LANES[0] + LANES[1] + LANE) / 2
    parts = [
        f'<path d="M{x - 14:g} {middle:g} H{x + 452:g}" stroke="{GREY}" stroke-width="1.4" '
        'stroke-dasharray="5 4" fill="none"/>'
    ]  # the residual connection, which is drawn behind the boxes
    parts += whole(x, 66, ["norm", "[s, b, h]"]) + whole(x + 452, 40, ["+", "drop-", "out"])
    parts += operation(x + 105, "f", "identity", "all-reduce")
    parts += split(x + 138, 108, [first] * len(RANKS)) + split(x + 266, 100, [second] * len(RANKS))
    parts += operation(x + 406, "g", "all-reduce", "identity")
    for top in LANES:
        y = top + LANE / 2
        parts += [
            arrow(x + start, y, x + end) for start, end in ((66, 94), (116, 138), (246, 266), (366, 395), (417, 452))
        ]
    return parts


def layer() -> str:
    """Draw a transformer layer on two tensor-parallel ranks: attention on the left, the MLP on the right."""
    parts = [
        text(34, top + LANE / 2 + 4, f"rank {rank}", color=color, bold=True)
        for rank, (top, color) in enumerate(zip(LANES, RANKS, strict=True))
    ]
    parts += branch(76, ["QKV", "column-parallel", "h → 3h/tp", "n/tp heads"], ["dense", "row-parallel", "h/tp → h"])
    parts += branch(
        76 + BRANCH, ["MLP in", "column-parallel", "h → 4h/tp", "GELU"], ["MLP out", "row-parallel", "4h/tp → h"]
    )
    parts += [text(WIDTH / 2, 24, "One transformer layer on two tensor-parallel ranks", size=16, bold=True)]
    return picture(WIDTH, HEIGHT, parts)


if __name__ == "__main__":
    print(layer())
