"""The comparison on one HTML page that loads nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from megatron.gpt2.config import by_key, flag
from megatron.gpt2.extensions.verify.table import HEAD, Result, explanation, rows, units
from megatron.gpt2.extensions.verify.trace import Trace
from megatron.gpt2.monitor.html_page import cell, pairs, remark, scrolling, whole_page
from megatron.gpt2.monitor.svg_chart import Curve, chart

MOST = 300  # tensors of a table


def page(first_line: str, command: str, trace: Trace, results: Sequence[Result]) -> str:
    """The whole page. first_line: what everything is compared with. command: the command line without the layouts."""
    parts = [
        f'<header><h1>Is it the same training?</h1><p class="status">{escape(first_line)}</p></header>',
        "<h2>Verdicts</h2>",
        remark(
            "differences are in units of roundoff of each tensor's own scale; the last "
            "column is the greatest share of what rounding explains"
        ),
        scrolling(
            HEAD, ["".join(cell(text, "alarm" if text == "DIFFERS" else "") for text in row) for row in rows(results)]
        ),
    ]
    for result in results:
        parts += [f"<h2>{escape(result.layout.name)}</h2>", *_of_layout(result)]
    parts += ["<h2>The reference</h2>", remark(command), pairs(_settings(trace))]
    return whole_page("Is it the same training?", parts)


def _of_layout(result: Result) -> list[str]:
    verdict = result.verdict
    told = "<br>".join(escape(line) for line in explanation(result)) if verdict.findings else escape(verdict.word)
    left = f"{verdict.left_out:,} tensors of the reference are not in this run" if verdict.left_out else ""
    return [
        f'<p class="{"alarm" if verdict.findings else "status"}">{told}</p>',
        remark(left) if left else "",
        _kinds(result),
        f'<div class="charts">{_chart(result)}</div>',
        _tensors(result),
    ]


def _kinds(result: Result) -> str:
    head = ("what", "numbers", "equal", "median", "99 %", "greatest")
    return scrolling(
        head,
        [
            "".join(
                cell(text, kind)
                for text, kind in (
                    (name, ""),
                    (f"{d.count:,}", "number"),
                    (f"{d.equal / d.count:.1%}", "number"),
                    *((units(value), "number") for value in (d.quantile(0.5), d.quantile(0.99), d.greatest)),
                )
            )
            for name, d in result.verdict.by_kind.items()
        ],
    )


def _chart(result: Result) -> str:
    """Against the place of a tensor in the run: its greatest difference, and what rounding explains."""
    found, bounds = [], []
    for number, (_, difference, bound) in enumerate(result.verdict.worst):
        if bound > 0 and math.isfinite(bound):
            bounds.append((number, math.log10(bound)))
        if 0 < difference.excess < math.inf:
            found.append((number, math.log10(difference.excess)))
    return chart(
        "greatest difference of each tensor in the order of the steps, log10 of units",
        [Curve("difference", "blue", found), Curve("explained by rounding", "orange", bounds)],
        width=970,
        height=330,
    )


def _tensors(result: Result) -> str:
    """The tensors that rounding does not explain, and those that come nearest to that."""
    differing = [finding.row.key for finding in result.verdict.findings]
    worst = sorted(
        result.verdict.worst, reverse=True, key=lambda each: each[1].excess / each[2] if 0 < each[2] < math.inf else 0.0
    )
    body = []
    for row, difference, bound in worst[:MOST]:
        kind = "alarm" if row.key in differing else "number"
        body.append(
            "".join(
                (
                    cell(row.key.name, "alarm" if kind == "alarm" else ""),
                    cell(row.key.step, "number"),
                    cell(units(difference.quantile(0.5)), "number"),
                    cell(units(difference.quantile(0.99)), "number"),
                    cell(units(difference.greatest), kind),
                    cell(units(difference.excess), kind),
                    cell(units(bound), "number"),
                )
            )
        )
    head = ("tensor", "step", "median", "99 %", "greatest", "to explain", "bound")
    shown = f"the {MOST} of {len(worst):,} tensors that differ most" if len(worst) > MOST else "all tensors"
    return f"<details><summary>{shown}</summary>{scrolling(head, body)}</details>"


def _settings(trace: Trace) -> list[tuple[str, Any]]:
    facts = trace.facts
    plain = [(name.replace("_", " "), value) for name, value in facts.items() if name != "config"]
    return plain + [(flag(key), value) for key, value in by_key(facts["config"]).items() if value not in (None, ())]
