"""Arithmetic of boxes, the rectangular parts of tensors of at most two dimensions."""

import bisect
import math
from collections.abc import Iterable, Sequence

from mpu.partition import Box


def common(a: Box, b: Box) -> Box:
    """The common part, of size 0 along a dimension where there is none."""
    starts = tuple(map(max, a.offset, b.offset))
    ends = (min(i + m, j + n) for i, m, j, n in zip(a.offset, a.shape, b.offset, b.shape, strict=True))
    return Box(starts, tuple(max(end - start, 0) for start, end in zip(starts, ends, strict=True)))


def within(part: Box, outer: Box) -> Box:
    """Where `part` lies within a tensor that holds `outer` alone."""
    return Box(tuple(p - o for p, o in zip(part.offset, outer.offset, strict=True)), part.shape)


def rows(box: Box) -> tuple[int, int]:
    """First row, and one past the last; a number without dimensions is one row."""
    return (box.offset[0], box.offset[0] + box.shape[0]) if box.shape else (0, 1)


def extent(boxes: Sequence[Box]) -> tuple[int, int, int]:
    """First row, one past the last, and entries of the boxes of a tensor."""
    tops, bottoms = zip(*map(rows, boxes), strict=True)
    return min(tops), max(bottoms), sum(box.numel for box in boxes)


def check_inside(name: str, shape: tuple[int, ...], box: Box) -> None:
    """Raise ValueError unless `box` is a part, and not an empty one, of a tensor of `shape`."""
    if (
        not box.numel
        or len(box.shape) != len(shape)
        or len(box.offset) != len(shape)
        or any(start + size > whole for start, size, whole in zip(box.offset, box.shape, shape, strict=True))
    ):
        raise ValueError(f"{name}: {box} is empty or outside of the shape {shape}")


def check_cover(name: str, shape: tuple[int, ...], boxes: Iterable[Box]) -> None:
    """Raise ValueError unless `boxes` make up a tensor of `shape`, of at most two dimensions, each entry once.

    A sweep over the rows, for a few boxes or a hundred thousand: where the entries add up and no two boxes overlap,
    there is no gap.
    """
    events, held = [], 0
    for box in boxes:
        check_inside(name, shape, box)
        held += box.numel
        (top, left), (height, width) = (*box.offset, 0, 0)[:2], (*box.shape, 1, 1)[:2]
        events += [(top, True, left, left + width), (top + height, False, left, left + width)]
    if held != math.prod(shape):
        raise ValueError(f"{name}: its boxes hold {held} entries of {math.prod(shape)}")
    columns: list[tuple[int, int]] = []  # of the boxes that the present row crosses, from left to right
    for row, begins, left, right in sorted(events):  # where one box ends and another begins, the end comes first
        at = bisect.bisect_left(columns, (left, right))
        if not begins:
            del columns[at]
        elif (at and columns[at - 1][1] > left) or (at < len(columns) and columns[at][0] < right):
            raise ValueError(f"{name}: two of its boxes overlap in row {row}, columns {left} to {right}")
        else:
            columns.insert(at, (left, right))
