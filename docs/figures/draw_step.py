#!/usr/bin/env python3
"""Draw one training step: what a rank computes, and what its two process groups send at the same time.

python docs/figures/draw_step.py > docs/figures/step.svg
"""

from __future__ import annotations

from drawing import GREY, INK, RANKS, WHOLE, arrow, box, line, picture, text

WIDTH, HEIGHT = 1230, 430
TOP, HIGH = 92, 90  # y and height of the boxes of computations
MODEL, DATA, SENT = 222, 322, 72  # y of the boxes of messages of each process group, and their height

# (x, width, text) of the box of each computation of a rank
COMPUTED = [
    (120, 112, ["batch", "tokens", "[samples, s + 1]"]),
    (256, 168, ["forward", "embedding, l layers,", "head and loss", "in chunks of tokens"]),
    (448, 160, ["backward", "layers in reverse;", "gradients are added", "in float32 buckets"]),
    (632, 116, ["wait", "until all buckets", "are reduced"]),
    (772, 124, ["norm", "same on all ranks;", "not finite: skip"]),
    (920, 118, ["AdamW", "on fp32 masters", "and moments"]),
    (1062, 150, ["weights", "round; next rate", "and loss scale"]),
]
FORWARD, BACKWARD, WAIT, NORM, WEIGHTS = 1, 2, 3, 4, 6


def middle(index: int) -> float:
    """Return the x coordinate of the middle of the box COMPUTED[index]."""
    return COMPUTED[index][0] + COMPUTED[index][1] / 2


def sent(top: float, first: int, last: int, words: list[str], color: str) -> list[str]:
    """Draw the box of a message below the boxes COMPUTED[first] to COMPUTED[last]."""
    x, end = COMPUTED[first][0], COMPUTED[last][0] + COMPUTED[last][1]
    return box(x, top, end - x, SENT, words, edge=color)


def step() -> str:
    """Draw the computations of a rank in a training step, and below them the messages of its two process groups."""
    parts = [text(WIDTH / 2, 24, "One training step", size=16, bold=True)]
    for y, words in (
        (TOP + HIGH / 2, ("each rank", "computes")),
        (MODEL + SENT / 2, ("model-parallel", "group sends")),
        (DATA + SENT / 2, ("data-parallel", "group sends")),
    ):
        parts += [text(56, y - 2, words[0], size=12, bold=True), text(56, y + 14, words[1], size=12, bold=True)]
    for index, (x, width, words) in enumerate(COMPUTED):
        parts += box(x, TOP, width, HIGH, words, edge=INK, fill=WHOLE)
        if index:
            before = COMPUTED[index - 1]
            parts.append(arrow(before[0] + before[1], TOP + HIGH / 2, x))
    start, end = COMPUTED[FORWARD][0], COMPUTED[BACKWARD][0] + COMPUTED[BACKWARD][1]
    parts += [
        f'<path d="M{start} {TOP - 8} V{TOP - 22} H{end} V{TOP - 8}" stroke="{GREY}" stroke-width="1.4" fill="none"/>',
        text((start + end) / 2, TOP - 28, "once for each micro-batch", size=12, color=GREY),
    ]
    tensor, data = RANKS
    parts += [line(middle(index), TOP + HIGH, middle(index), MODEL - 7) for index in (FORWARD, BACKWARD, NORM)]
    parts += sent(
        MODEL, FORWARD, FORWARD, ["all-reduce", "2 per layer, 1 embedding;", "all-gather: 1 per chunk"], tensor
    )
    parts += sent(MODEL, BACKWARD, BACKWARD, ["all-reduce", "2 per layer, 1 head"], tensor)
    parts += sent(MODEL, NORM, NORM, ["all-reduce", "1 squared norm"], tensor)
    parts += [
        line(middle(WAIT), DATA, middle(WAIT), TOP + HIGH + 7),
        line(middle(WEIGHTS), TOP + HIGH, middle(WEIGHTS), DATA - 7),
    ]
    parts += sent(
        DATA,
        BACKWARD,
        WAIT,
        [
            "all-reduce of each full bucket",
            "in the last micro-batch, while backward runs",
            "(sharded optimizer: reduce-scatter)",
        ],
        data,
    )
    parts += sent(DATA, WEIGHTS, WEIGHTS, ["sharded optimizer:", "all-gather while the", "next forward runs"], data)
    return picture(WIDTH, HEIGHT, parts)


if __name__ == "__main__":
    print(step())
