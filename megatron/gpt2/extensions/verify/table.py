"""What a person sees of a comparison on the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megatron.gpt2.dist.ranks import named
from megatron.gpt2.extensions.verify.layouts import Layout
from megatron.gpt2.extensions.verify.operations import operation
from megatron.gpt2.extensions.verify.parts import Key
from megatron.gpt2.extensions.verify.trace import Trace
from megatron.gpt2.extensions.verify.verdict import Finding, Verdict

HEAD = ("layout", "ranks", "verdict", "equal", "median", "99 %", "greatest", "of bound")
WIDEST = 60  # characters of a layout's flags in the table


class Result(NamedTuple):
    """A layout, the facts of its run, and what came out."""

    layout: Layout
    facts: Mapping[str, Any]
    verdict: Verdict


def units(value: float) -> str:
    """A difference in units, with two digits: 0, 0.71, 12, 3.1e+05."""
    return f"{value:.2g}" if value < 100 or value >= 1e4 else f"{value:.0f}"


def first_line(reference: str, trace: Trace) -> str:
    """What everything is compared with."""
    facts, size = trace.facts, sum(row.dtype.itemsize * _numel(row.shape) for row in trace.rows.values())
    samples, steps = facts["global_batch_size"], facts["steps"]
    return (
        f"compared with {reference}: {steps} step{'s' * (steps > 1)} of {samples} samples, {facts['precision']} on "
        f"{facts['device']}, {len(trace.rows):,} tensors, {size / 2**20:,.1f} MiB"
    )


def skipped(trace: Trace) -> str:
    """A warning where the steps of the trace were skipped: nothing was learned in them."""
    steps = [key.step for key, row in trace.rows.items() if key.name == "skipped" and row.rms > 0]
    if not steps:
        return ""
    return (
        f"WARNING: the gradients of step {', '.join(map(str, steps))} of the reference are not finite, and it was "
        "skipped: with a smaller --initial-loss-scale more is compared"
    )


def _numel(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def rows(results: Sequence[Result]) -> list[tuple[str, ...]]:
    """A row of the table for each result, as HEAD names its columns."""
    found = []
    for result in results:
        computed = result.verdict.computed
        numbers = (computed.quantile(0.5), computed.quantile(0.99), computed.greatest, result.verdict.share_of_bound[0])
        found.append(
            (
                result.layout.name,
                str(result.layout.world_size),
                result.verdict.word,
                f"{computed.equal / max(computed.count, 1):.1%}",
                *map(units, numbers),
            )
        )
    return found


def table(results: Sequence[Result]) -> str:
    """The table, its columns aligned. The flags of a layout that are long stand in several lines."""
    cells = [(row, textwrap.wrap(row[0], WIDEST, break_on_hyphens=False)) for row in (HEAD, *rows(results))]
    width = max(len(line) for _, name in cells for line in name)
    sizes = [max(len(row[column]) for row, _ in cells) for column in range(1, len(HEAD))]
    lines = []
    for row, name in cells:
        others = [
            f"{text:<{size}}" if column == "verdict" else f"{text:>{size}}"
            for text, size, column in zip(row[1:], sizes, HEAD[1:], strict=True)
        ]
        lines.append("  ".join([f"{name[0]:<{width}}", *others]).rstrip())
        lines += name[1:]
    return "\n".join(lines)


def place(key: Key, at: Sequence[int]) -> str:
    """Where an element lies, in words."""
    if key.kind in ("input", "activation", "activation gradient"):
        return ", ".join(f"{name} {i}" for name, i in zip(("sample", "position", "channel"), at, strict=False))
    return f"[{', '.join(map(str, at))}]"


def explanation(result: Result) -> list[str]:
    """The first difference that rounding does not explain: what, where, by how much, and which operation made it."""
    verdict = result.verdict
    finding = verdict.findings[0]
    key, found = finding.row.key, finding.found
    when = f"in step {key.step}" if key.step else "before the first step"
    lines = [
        f"{result.layout.name}: the first difference is {when}, {key.name} ({key.kind}), on {named(finding.ranks, {})}"
    ]
    if finding.missing:
        lines.append(f"{finding.missing:,} of its numbers were not computed there, once each")
    else:
        lines.append(how_far(finding))
        if (factor := found.factor) is not None and abs(factor - 1) > 1e-3:
            lines.append(f"all of it is {factor:.4g} times what it was")
    lines.append(f"made by {operation(key, result.facts)}")
    count = len(verdict.findings)
    lines.append(
        f"{count:,} of {len(verdict.worst):,} tensors differ by more than rounding; those before this one do not"
        if count > 1
        else "no other tensor differs by more than rounding"
    )
    return [lines[0], *(f"    {line}" for line in lines[1:])]


def how_far(finding: Finding) -> str:
    """The greatest difference of a tensor, and its place."""
    found, key = finding.found, finding.row.key
    if key.kind in ("scalar", "loss"):
        return f"it is {found.own:.9g} and was {found.reference:.9g}"
    return (
        f"by {units(found.greatest)} units of roundoff, where rounding explains {units(finding.bound)}: at "
        f"{place(key, found.at)} it is {found.own:.6g} and was {found.reference:.6g}"
    )
