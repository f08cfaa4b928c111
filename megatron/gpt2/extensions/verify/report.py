"""The output of a comparison: the table, the first difference with the operation that caused it, and the HTML page."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from data_utils.command_line import align_columns, plural
from megatron.gpt2.dist.ranks import format_ranks
from megatron.gpt2.extensions.verify.compare import Comparison, Difference
from megatron.gpt2.extensions.verify.trace import TensorKey, TensorTrace
from megatron.gpt2.model.gpt2 import TIED_WEIGHT

COLUMNS = ("ranks", "verdict", "equal", "median", "99 %", "greatest", "of bound", "layout")
MAX_TENSORS = 300  # the largest number of tensors in a table of the page
DATA = "the data loader: the order of the samples, or their assignment to ranks"
STATE_KINDS = ("gradient", "moment", "parameter")  # kinds of tensors that belong to a parameter
FORWARD_OPERATIONS = {
    "input_layernorm": "the layer norm {module}",
    "post_attention_layernorm": "the layer norm {module}, or the residual sum and the dropout before it",
    "attention.query_key_value": "the product of {module}{gathered}",
    "attention.core": "attention of {layer}: softmax(QKᵀ/√d)V, or its dropout",
    "attention.dense": "{total_of}{module}, with its bias",
    "mlp.dense_h_to_4h": "the product of {module}{gathered}",
    "mlp.gelu": "GELU of {layer}",
    "mlp.dense_4h_to_h": "{total_of}{module}, with its bias",
    "": "the residual sum at the end of {layer}, or dropout",
    "transformer.final_layernorm": "the layer norm {module}",
    "embeddings": "{total_of}the word embeddings, or the position embeddings that are added to it, or dropout",
    "loss": "the head and the cross-entropy, or the sum over micro-batches and data-parallel ranks",
    "gradient norm": "the sum of the squares of all gradients, each of which counts once",
    "skipped": "the test whether the gradient norm is finite",
    "learning rate": "the schedule of the learning rate",
    "steps of the optimizer": "the count of steps in AdamW",
    "sample_ids": DATA,
    "tokens": DATA,
    "labels": DATA,
    "token_weight": "the mask of the loss, or the number of tokens in the global batch",
}
# {name of a tensor: the operation that computes the tensor's gradient in backward}
BACKWARD_OPERATIONS = {
    "input_layernorm": "{total_of}the gradient of the input of {layer}'s attention.query_key_value",
    "post_attention_layernorm": "{total_of}the gradient of the input of {layer}'s mlp.dense_h_to_4h",
    "transformer.final_layernorm": "{total_of}the gradient of the cross-entropy and the head",
    "": "what follows {layer}: the layer norms and residual sums behind it",
    "embeddings": "the layer norms and residual sums behind the embeddings",
}


def producing_operation(key: TensorKey, metadata: Mapping[str, Any]) -> str:
    """Describe the operation that computes the tensor `key`, in the terms of mpu's layers.
    metadata: see `run_metadata`."""
    tp, dp, num_microbatches = (
        metadata[n] for n in ("tensor_model_parallel_size", "data_parallel_size", "micro_batches")
    )
    parallel = metadata["config"]["parallel"]
    name = key.name if key.name in FORWARD_OPERATIONS else key.name.split(" of ")[-1]
    sequence, sharded = parallel["sequence_parallel"] and tp > 1, parallel["use_distributed_optimizer"] and dp > 1
    total = "reduce-scatter" if sequence else "all-reduce"
    found = re.match(r"transformer\.layers\.(\d+)\.?(.*)", name)
    layer, part = (f"layer {found[1]}", found[2]) if found else ("", name)
    module = f"{layer}'s {part}" if layer else name.removeprefix("transformer.")
    if key.kind not in STATE_KINDS:
        in_backward = key.kind == "activation gradient"
        words = (BACKWARD_OPERATIONS if in_backward else FORWARD_OPERATIONS)[part].format(
            module=module,
            layer=layer,
            gathered=", or the all-gather of its input" if sequence else "",
            total_of=f"the {total} of " if tp > 1 else "",
        )
        return words + (", backward" if in_backward else ", forward" if key.kind == "activation" else "")
    if key.kind == "gradient":
        is_partial = re.search(r"layernorm|position_embeddings|(attention\.dense|mlp\.dense_4h_to_h)\.bias$", name)
        by = "reduce-scatter" if sharded else "all-reduce"
        sums = {
            f"over {num_microbatches} micro-batches": num_microbatches > 1,
            f"over {dp} data-parallel ranks by the {by} of its bucket": dp > 1,
            f"over {tp} tensor-parallel ranks, since each has a part of the sequence": sequence and is_partial,
            "over the first and the last stage of the pipeline": metadata["pipeline_model_parallel_size"] > 1
            and name == TIED_WEIGHT,
        }
        of = " and ".join(words for words, applies in sums.items() if applies)
        return f"the gradient of {module} in backward" + (f", and its sum {of}" if of else "")
    if key.step == 0:
        return f"the initialisation of {module}, or its part of the checkpoint"
    if key.kind == "moment":
        return f"the optimizer's update of its moments of {module}: the gradient after clipping"
    gathered = f", or the all-gather that brings it to the other {dp - 1} data-parallel ranks"
    return f"the optimizer's update of {module}" + (gathered if sharded and key.kind == "parameter" else "")


class LayoutSpec(NamedTuple):
    """A layout to run.

    name: the flags of its --layout, or "(no flags)".
    words: its command line for pretrain_gpt2, without launcher flags.
    batch: the samples of a step.
    """

    name: str
    words: tuple[str, ...]
    world_size: int
    batch: int


class LayoutResult(NamedTuple):
    """The comparison of a layout with the reference.

    metadata: see `run_metadata`.
    """

    layout: LayoutSpec
    metadata: Mapping[str, Any]
    comparison: Comparison


def format_units(value: float) -> str:
    """Format a difference in units with about two digits: 0, 0.71, 12, 3.1e+05."""
    return f"{value:.2g}" if value < 100 or value >= 1e4 else f"{value:.0f}"


def reference_lines(reference: str, trace: TensorTrace) -> list[str]:
    """Return a line that describes the reference, and a warning if it skipped steps."""
    metadata, entries = trace.metadata, trace.entries.values()
    skipped = ", ".join(str(entry.key.step) for entry in entries if entry.key.name == "skipped" and entry.rms > 0)
    lines = [
        f"compared with {reference}: {plural(metadata['steps'], 'step')} of "
        f"{plural(metadata['global_batch_size'], 'sample')}, {metadata['precision']} on {metadata['device']}, "
        f"{plural(len(entries), 'tensor')}"
    ]
    if skipped:
        lines.append(
            f"WARNING: the gradients of step {skipped} of the reference are not finite, and it was skipped: with a "
            "smaller --initial-loss-scale more is compared"
        )
    return lines


def table_rows(results: Sequence[LayoutResult]) -> list[tuple[str, ...]]:
    """Return the row of each result in the table. COLUMNS names the columns."""
    found = []
    for layout, _, comparison in results:
        total = comparison.total
        numbers = total.quantile(0.5), total.quantile(0.99), total.greatest, comparison.bound_fraction
        equal = f"{total.equal / total.count:.1%}"
        found.append((str(layout.world_size), comparison.verdict, equal, *map(format_units, numbers), layout.name))
    return found


def comparison_table(results: Sequence[LayoutResult]) -> list[str]:
    """Return the lines of the table of all results."""
    return align_columns([COLUMNS, *table_rows(results)], "><>>>>><")


def explain_mismatch(result: LayoutResult) -> list[str]:
    """Describe the first difference that rounding does not explain: tensor, ranks, size, and the operation."""
    comparison = result.comparison
    (key, _, shape, _), found = comparison.mismatches[0]
    when = f"in step {key.step}" if key.step else "before the first step"
    on_ranks = f", on {format_ranks(found.ranks, {})}" if found.ranks else ""
    lines = [
        f"{result.layout.name}: the first difference is {when}, {key.name} ({key.kind}){on_ranks}",
        describe_mismatch(key, found, math.prod(shape)),
    ]
    if (factor := found.factor) is not None and abs(factor - 1) > 1e-3:
        lines.append(f"the whole tensor is {factor:.4g} times the reference")
    lines.append(f"made by {producing_operation(key, result.metadata)}")
    count, total = len(comparison.mismatches), plural(len(comparison.tensors), "tensor")
    lines.append(f"{count:,} of {total} differ by more than rounding; those before this one do not")
    return [lines[0], *(f"    {line}" for line in lines[1:])]


def describe_mismatch(key: TensorKey, found: Difference, size: int) -> str:
    """Describe the largest difference of a tensor and its index, or the wrong number of elements."""
    if not found.ranks:
        return f"the ranks computed {found.elements:,} elements, but the tensor has {size:,}"
    if key.kind in ("scalar", "loss"):
        return f"it is {found.own:.9g} instead of {found.reference:.9g}"
    index = f"[{', '.join(map(str, found.at))}]"
    if key.kind in ("input", "activation", "activation gradient"):
        dimensions = zip(("sample", "position", "channel"), found.at, strict=False)
        index = ", ".join(f"{name} {i}" for name, i in dimensions)
    return (
        f"by {format_units(found.greatest)} units of roundoff (rounding explains {format_units(found.bound)}): "
        f"at {index} it is {found.own:.6g} instead of {found.reference:.6g}"
    )


def render_html(lines: Sequence[str], command: str, results: Sequence[LayoutResult]) -> str:
    """Return the comparison as one self-contained HTML page.

    lines: see `reference_lines`.
    command: the command line without the layouts.
    """
    import jinja2

    folder = Path(__file__).parent
    template = jinja2.Environment(
        loader=jinja2.FileSystemLoader([folder, folder.parents[1] / "monitor"]), autoescape=True, trim_blocks=True
    ).get_template("page.html")
    sections = []
    for result in results:
        worst = sorted(result.comparison.tensors, key=lambda each: (not each[1].ranks, -each[1].bound_fraction))
        sections.append((result, explain_mismatch(result) if result.comparison.mismatches else [], worst[:MAX_TENSORS]))
    return template.render(
        lines=lines,
        head=COLUMNS,
        rows=table_rows(results),
        sections=sections,
        format_units=format_units,
        command=command,
    )
