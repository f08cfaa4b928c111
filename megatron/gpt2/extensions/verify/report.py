"""What a person sees of a comparison: the table, the first difference with the operation that made it, and the page."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from data_utils.command_line import columns
from megatron.gpt2.config import by_key, flag
from megatron.gpt2.dist.ranks import named
from megatron.gpt2.extensions.verify.compare import Judged, Verdict
from megatron.gpt2.extensions.verify.trace import Key, Trace
from megatron.gpt2.model.gpt2 import TIED
from megatron.gpt2.monitor.plots import BLUE, ORANGE, Curve, as_svg

HEAD = ("ranks", "verdict", "equal", "median", "99 %", "greatest", "of bound", "layout")
MOST = 300  # tensors of a table of the page
DATA = "the data loader: the order of samples, and which of them are this rank's"
STATE = ("gradient", "moment", "master", "parameter")  # the kinds of tensors that a parameter has
MADE_BY = {
    "input_layernorm": "the layer norm {module}",
    "post_attention_layernorm": "the layer norm {module}",
    "attention.query_key_value": "the product of {module}{gathered}",
    "attention.core": "attention of {layer}: softmax(QKᵀ/√d)V, or its dropout",
    "attention.dense": "{total_of}{module}, with its bias",
    "mlp.dense_h_to_4h": "the product of {module}{gathered}",
    "mlp.gelu": "GELU of {layer}",
    "mlp.dense_4h_to_h": "{total_of}{module}, with its bias",
    "": "the residual sum at the end of {layer}, or dropout",
    "transformer.final_layernorm": "the layer norm {module}",
    "embeddings": "{total_of}the word embeddings, or the position embeddings that are added to it, or dropout",
    "loss": "the head and the cross-entropy, and the sum of the samples over micro-batches and data-parallel ranks",
    "gradient norm": "the sum of the squares of all gradients, each of which counts once",
    "skipped": "the test whether the gradient norm is finite",
    "learning rate": "the schedule of the learning rate",
    "steps of the optimizer": "the count of steps in AdamW",
    "samples": DATA,
    "tokens": DATA,
    "labels": DATA,
}
# The gradient of a tensor, in backward.
MADE_IN_BACKWARD = {
    "input_layernorm": "{total_of}the gradient of the input of {layer}'s attention.query_key_value",
    "post_attention_layernorm": "{total_of}the gradient of the input of {layer}'s mlp.dense_h_to_4h",
    "transformer.final_layernorm": "{total_of}the gradient of the cross-entropy and the head",
    "": "what follows {layer}: the layer norms and residual sums behind it",
    "embeddings": "the layer norms and residual sums behind the embeddings",
}


def operation(key: Key, facts: Mapping[str, Any]) -> str:
    """What made the tensor `key` in a run with these `facts` of its layout, in the words of mpu's layers."""
    p, dp, micro_batches = (facts[n] for n in ("model_parallel_size", "data_parallel_size", "micro_batches"))
    parallel, name = facts["config"]["parallel"], key.name if key.name in MADE_BY else key.name.split(" of ")[-1]
    sequence, sharded = parallel["sequence_parallel"] and p > 1, parallel["use_distributed_optimizer"] and dp > 1
    total = "reduce-scatter" if sequence else "all-reduce"
    found = re.match(r"transformer\.layers\.(\d+)\.?(.*)", name)
    layer, part = (f"layer {found[1]}", found[2]) if found else ("", name)
    module = f"{layer}'s {part}" if layer else name.removeprefix("transformer.")
    if key.kind not in STATE:
        in_backward = key.kind == "activation gradient"
        words = (MADE_IN_BACKWARD if in_backward else MADE_BY)[part].format(
            module=module,
            layer=layer,
            gathered=", or the all-gather of its input" if sequence else "",
            total_of=f"the {total} of " if p > 1 else "",
        )
        return words + (", backward" if in_backward else ", forward" if key.kind == "activation" else "")
    if key.kind == "gradient":
        is_partial = re.search(r"layernorm|position_embeddings|(attention\.dense|mlp\.dense_4h_to_h)\.bias$", name)
        by = "reduce-scatter" if sharded else "all-reduce"
        sums = {
            f"over {micro_batches} micro-batches": micro_batches > 1,
            f"over {dp} data-parallel ranks by the {by} of its bucket": dp > 1,
            f"over {p} model-parallel ranks, since each has a part of the sequence": sequence and is_partial,
            "over the first and the last stage of the pipeline": facts["pipeline_parallel_size"] > 1 and name == TIED,
        }
        of = " and ".join(words for words, applies in sums.items() if applies)
        return f"the gradient of {module} in backward" + (f", and its sum {of}" if of else "")
    if key.step == 0:
        return f"the initialisation of {module}, or its part of the checkpoint"
    if key.kind == "moment":
        return f"AdamW's update of its moments of {module}: the gradient after clipping"
    gathered = f", or the all-gather that brings it to the other {dp - 1} data-parallel ranks"
    return f"AdamW's update of {module}" + (gathered if sharded and key.kind == "parameter" else "")


class Layout(NamedTuple):
    """flags: as they were given. words: the whole command line of pretrain_gpt2 without what starts ranks. batch: the
    samples of a step."""

    flags: str
    words: tuple[str, ...]
    world_size: int
    batch: int

    @property
    def name(self) -> str:
        """Its flags, or that it has none."""
        return self.flags or "(no flags)"


class Result(NamedTuple):
    """A layout, the facts of its run, and what came out."""

    layout: Layout
    facts: Mapping[str, Any]
    verdict: Verdict


def units(value: float) -> str:
    """A difference in units, with two digits: 0, 0.71, 12, 3.1e+05."""
    return f"{value:.2g}" if value < 100 or value >= 1e4 else f"{value:.0f}"


def first_lines(reference: str, trace: Trace) -> list[str]:
    """What everything is compared with, and a warning if its steps were skipped: nothing was learned in them."""
    facts, rows = trace.facts, trace.rows.values()
    size, steps = sum(row.dtype.itemsize * math.prod(row.shape) for row in rows), facts["steps"]
    skipped = ", ".join(str(row.key.step) for row in rows if row.key.name == "skipped" and row.rms > 0)
    lines = [
        f"compared with {reference}: {steps} step{'s' * (steps > 1)} of {facts['global_batch_size']} samples, "
        f"{facts['precision']} on {facts['device']}, {len(rows):,} tensors, {size / 2**20:,.1f} MiB"
    ]
    if skipped:
        lines.append(
            f"WARNING: the gradients of step {skipped} of the reference are not finite, and it was skipped: with a "
            "smaller --initial-loss-scale more is compared"
        )
    return lines


def rows(results: Sequence[Result]) -> list[tuple[str, ...]]:
    """A row of the table for each result, as HEAD names its columns."""
    found = []
    for layout, _, verdict in results:
        computed = verdict.computed
        numbers = computed.quantile(0.5), computed.quantile(0.99), computed.greatest, verdict.nearest.share
        equal = f"{computed.equal / computed.count:.1%}"
        found.append((str(layout.world_size), verdict.word, equal, *map(units, numbers), layout.name))
    return found


def table(results: Sequence[Result]) -> list[str]:
    """The lines of the table."""
    return columns([HEAD, *rows(results)], "><" + ">" * (len(HEAD) - 3) + "<")


def explanation(result: Result) -> list[str]:
    """The first difference that rounding does not explain: what, where, by how much, and which operation made it."""
    verdict = result.verdict
    first = verdict.findings[0]
    key = first.row.key
    when = f"in step {key.step}" if key.step else "before the first step"
    where = f", on {named(first.ranks, {})}" if first.ranks else ""
    lines = [f"{result.layout.name}: the first difference is {when}, {key.name} ({key.kind}){where}", how_far(first)]
    if (factor := first.difference.factor) is not None and abs(factor - 1) > 1e-3:
        lines.append(f"all of it is {factor:.4g} times what it was")
    lines.append(f"made by {operation(key, result.facts)}")
    count = len(verdict.findings)
    lines.append(
        f"{count:,} of {len(verdict.tensors):,} tensors differ by more than rounding; those before this one do not"
        if count > 1
        else "no other tensor differs by more than rounding"
    )
    return [lines[0], *(f"    {line}" for line in lines[1:])]


def how_far(finding: Judged) -> str:
    """The greatest difference of a tensor, and its place; or how many of its numbers there are."""
    found, (_, kind, _, _), size = finding.difference, finding.row.key, math.prod(finding.row.shape)
    if not finding.ranks:
        return f"the ranks computed {finding.made:,} numbers for the {size:,} of it: not each of them once"
    if kind in ("scalar", "loss"):
        return f"it is {found.own:.9g} and was {found.reference:.9g}"
    place = f"[{', '.join(map(str, found.at))}]"
    if kind in ("input", "activation", "activation gradient"):
        dimensions = zip(("sample", "position", "channel"), found.at, strict=False)
        place = ", ".join(f"{name} {i}" for name, i in dimensions)
    return (
        f"by {units(found.greatest)} units of roundoff, where rounding explains {units(finding.bound)}: at "
        f"{place} it is {found.own:.6g} and was {found.reference:.6g}"
    )


def page(lines: Sequence[str], command: str, trace: Trace, results: Sequence[Result]) -> str:
    """The comparison on one HTML page that loads nothing else. lines: what everything is compared with. command: the
    command line without the layouts."""
    import jinja2

    folder = Path(__file__).parent
    template = jinja2.Environment(
        loader=jinja2.FileSystemLoader([folder, folder.parents[1] / "monitor"]), autoescape=True, trim_blocks=True
    ).get_template("page.html")

    def sections() -> Iterator[tuple[Result, str, list[Judged]]]:
        for result in results:
            tensors = result.verdict.tensors
            title = "greatest difference of each tensor in the order of the steps, log10 of units"
            curves = [
                Curve("difference", BLUE, logarithms(each.difference.excess for each in tensors)),
                Curve("explained by rounding", ORANGE, logarithms(each.bound for each in tensors)),
            ]
            worst = sorted(tensors, key=lambda each: (each.is_explained, -each.share))[:MOST]
            yield result, as_svg({title: curves}), worst

    return template.render(
        lines=lines,
        head=HEAD,
        rows=rows(results),
        results=sections(),
        explanation=explanation,
        units=units,
        command=command,
        facts=[(name.replace("_", " "), value) for name, value in trace.facts.items() if name != "config"],
        flags=[(flag(k), value) for k, value in by_key(trace.facts["config"]).items() if value not in (None, ())],
    )


def logarithms(values: Iterable[float]) -> list[tuple[int, float]]:
    """log10 of each value against its place. One that has none is left out."""
    return [(place, math.log10(value)) for place, value in enumerate(values) if 0 < value < math.inf]
