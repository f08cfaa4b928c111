#!/usr/bin/env python3
"""Draw how a checkpoint is committed, and how a run in a different layout reads it.

python docs/figures/draw_checkpoint.py > docs/figures/checkpoint.svg
"""

from __future__ import annotations

from drawing import GREY, INK, PAPER, RANKS, WHOLE, arrow, box, line, picture, text

WIDTH, HEIGHT = 1090, 500
STEPS = [
    ["1 files", "each rank writes", "mp_rank_TT/…", "and hashes it"],
    ["2 table", "each rank writes", "tables/rank_R.jsonl:", "slices and hashes"],
    ["3 manifest", "rank 0 waits for", "all tables, writes", "manifest.json"],
    ["4 rename", "iter_N.tmp-…", "becomes iter_N:", "now it exists"],
    ["5 tracker", "latest_checkpointed_", "iteration.txt", "says N"],
]
LEFT, WIDE, GAP, TOP, HIGH = 60, 164, 37, 62, 88
ROW, BELOW = 36, 250  # height of two drawn rows of the tensor, and top of the lower half of the drawing


def part(x: float, y: float, height: float, words: str, color: str, fill: str = PAPER) -> list[str]:
    """Draw a rectangle for some rows of a tensor, with a text in its middle."""
    return [
        f'<rect x="{x:g}" y="{y:g}" width="210" height="{height:g}" fill="{fill}" stroke="{color}" '
        'stroke-width="1.6"/>',
        text(x + 105, y + height / 2 + 4, words, size=12),
    ]


def checkpoint() -> str:
    """Draw the five steps of a save, and the slices of a tensor that other ranks load."""
    parts = [
        text(WIDTH / 2, 24, "A save is committed in five steps", size=16, bold=True),
        text(WIDTH / 2, 44, "a crash before step 4 leaves the last checkpoint as it was", size=12, color=GREY),
    ]
    for index, words in enumerate(STEPS):
        x = LEFT + index * (WIDE + GAP)
        parts += box(x, TOP, WIDE, HIGH, words, edge=INK, fill=WHOLE)
        if index:
            parts.append(arrow(x - GAP, TOP + HIGH / 2, x))
    parts += [
        text(
            WIDTH / 2, BELOW - 52, "Any layout can read it: a slice is cut out of the saved slices", size=16, bold=True
        ),
        text(WIDTH / 2, BELOW - 32, "one tensor of 8 rows, split by rows", size=12, color=GREY),
    ]
    saved, memory, wanted = 150, 440, 730
    for x, words in (
        (saved, "saved by 2 tensor-parallel ranks"),
        (memory, "the tensor (global shape)"),
        (wanted, "read by 4 tensor-parallel ranks"),
    ):
        parts.append(text(x + 105, BELOW - 8, words, size=12, bold=True))
    for rank, color in enumerate(RANKS):
        y = BELOW + 2 * rank * ROW
        parts += part(saved, y, 2 * ROW, f"slice of rank {rank}: rows {4 * rank} to {4 * rank + 3}", color)
        parts += part(memory, y, 2 * ROW, f"rows {4 * rank} to {4 * rank + 3}", color, WHOLE)
        parts.append(line(saved + 210, y + ROW, memory - 8, y + ROW))
    for rank in range(4):
        y = BELOW + rank * ROW
        parts += part(wanted, y, ROW, f"rank {rank} reads rows {2 * rank} and {2 * rank + 1}", RANKS[rank // 2])
        parts.append(line(memory + 210, y + ROW / 2, wanted - 8, y + ROW / 2))
    parts += [
        text(
            WIDTH / 2,
            BELOW + 4 * ROW + 34,
            "A rank reads only those parts of the slices that it needs.",
            size=12,
            color=GREY,
        ),
        text(
            WIDTH / 2,
            BELOW + 4 * ROW + 54,
            "A range of a sharded optimizer is at most three slices: a partial "
            "first row, whole rows, a partial last row.",
            size=12,
            color=GREY,
        ),
    ]
    return picture(WIDTH, HEIGHT, parts)


if __name__ == "__main__":
    print(checkpoint())
