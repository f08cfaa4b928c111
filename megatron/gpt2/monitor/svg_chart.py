"""Curves over the iterations as inline SVG: lines of means, with a band from the least value to the greatest where many
points share a place.

Colours are CSS variables of the page (`--blue` ...), so that one drawing serves light and dark; the numbers that a
script shows under the pointer are in the attributes `data-curves` and `data-scale`.
"""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

PLACES = 320  # points of a line at most
LEFT, RIGHT, TOP, BOTTOM = 58, 24, 8, 24  # around the drawing


@dataclass(frozen=True)
class Curve:
    """A line of the chart: points (iteration, value) by iteration. colour: blue, orange or green."""

    label: str
    colour: str
    points: Sequence[tuple[int, float]]
    dots: bool = False


@dataclass(frozen=True)
class Place:
    """What is drawn in the place of several neighbouring points."""

    x: int
    mean: float
    least: float
    greatest: float


def thinned(points: Sequence[tuple[int, float]], places: int = PLACES) -> list[Place]:
    """`points` in at most `places` groups of neighbours, each placed at its last iteration."""
    size = max(1, -(-len(points) // places))
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [
        Place(
            group[-1][0],
            math.fsum(y for _, y in group) / len(group),
            min(y for _, y in group),
            max(y for _, y in group),
        )
        for group in groups
    ]


def round_steps(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers from `low` to `high`, at most `most` + 1, in steps of 1, 2 or 5 times a power of ten."""
    least = (high - low) / most
    power = 10.0 ** math.floor(math.log10(least))
    step = next(step for step in (power, 2 * power, 5 * power, 10 * power) if step >= least * (1 - 1e-9))
    return [step * i for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def number(value: float) -> str:
    """A number with at most four digits and no needless zeros: 0.00015 is 1.5e-4, 12345 is 12,345."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) < 0.01:
        digits, power = f"{value:.3e}".split("e")
        return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"
    return f"{value:.4g}"


def chart(title: str, curves: Iterable[Curve], *, width: int, height: int, from_zero: bool = False) -> str:
    """A `<figure>` of `width` × `height` pixels: the title, a legend where there are several curves, and the drawing.

    from_zero: whether the vertical axis begins at 0.
    """
    drawn = [(curve, thinned(curve.points)) for curve in curves if curve.points]
    if not drawn:
        return f'<figure><figcaption>{escape(title)}</figcaption><p class="none">no numbers yet</p></figure>'
    x0, x1 = (end(place.x for _, places in drawn for place in places) for end in (min, max))
    x0, x1 = (x0, x1) if x0 < x1 else (x0 - 1, x1 + 1)
    low = min(place.least for _, places in drawn for place in places)
    high = max(place.greatest for _, places in drawn for place in places)
    low = min(low, 0.0) if from_zero else low
    margin = (high - low or abs(high) or 1.0) * 0.05
    low, high = (low if low == 0 and from_zero else low - margin), high + margin
    right, bottom = width - RIGHT, height - BOTTOM

    def at_x(x: float) -> float:
        return round(LEFT + (x - x0) * (right - LEFT) / (x1 - x0), 1)

    def at_y(y: float) -> float:
        return round(bottom - (y - low) * (bottom - TOP) / (high - low), 1)

    parts = []
    for y in round_steps(low, high):
        parts.append(
            f'<path class="grid" d="M{LEFT} {at_y(y)}H{right}"/>'
            f'<text x="{LEFT - 6}" y="{at_y(y) + 4}" text-anchor="end">{number(y)}</text>'
        )
    for x in round_steps(x0, x1):
        if x == int(x):
            parts.append(f'<text x="{at_x(x)}" y="{height - 6}" text-anchor="middle">{x:,.0f}</text>')
    parts += [_line(curve, places, at_x, at_y) for curve, places in drawn]
    parts.append(f'<path class="pointer" d="M0 {TOP}V{bottom}"/>')
    numbers = json.dumps([[curve.label, [[p.x, p.mean] for p in places]] for curve, places in drawn])
    legend = "".join(f'<span class="{curve.colour}">{escape(curve.label)}</span>' for curve, _ in drawn)
    return (
        f"<figure><figcaption>{escape(title)} {legend if len(drawn) > 1 else ''}<output></output></figcaption>"
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}" '
        f'data-curves="{escape(numbers)}" data-scale="{escape(json.dumps([x0, x1, LEFT, right, width]))}">'
        f"{''.join(parts)}</svg></figure>"
    )


def _line(curve: Curve, places: Sequence[Place], at_x: Callable[[float], float], at_y: Callable[[float], float]) -> str:
    parts = []
    if any(place.least < place.greatest for place in places):
        edge = [f"{at_x(place.x)} {at_y(place.greatest)}" for place in places]
        edge += [f"{at_x(place.x)} {at_y(place.least)}" for place in reversed(places)]
        parts.append(f'<path class="band {curve.colour}" d="M{"L".join(edge)}Z"/>')
    line = "L".join(f"{at_x(place.x)} {at_y(place.mean)}" for place in places)
    parts.append(f'<path class="line {curve.colour}" d="M{line}"/>')
    if curve.dots or len(places) == 1:
        parts += [
            f'<circle class="{curve.colour}" cx="{at_x(place.x)}" cy="{at_y(place.mean)}" r="3"/>' for place in places
        ]
    return "".join(parts)
