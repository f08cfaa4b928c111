"""A description of a checkpoint, as data and as lines to print."""

import math
from collections import Counter, defaultdict
from typing import Any

from megatron.gpt2.checkpoint.reader import Checkpoint
from megatron.gpt2.checkpoint.source import Source

SHAPE = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "ffn_hidden_size",
    "max_position_embeddings",
    "gelu",
    "layernorm_epsilon",
)
PROGRESS = ("train_iters", "consumed_samples", "global_batch_size", "precision", "converted_from", "torch")


def describe(source: Source) -> dict[str, Any]:
    """A description of `source` in JSON's types. No tensor is read."""
    facts = source.facts
    model = facts["config"]["model"]
    tensors = {
        name: {
            "dtype": str(info.dtype).removeprefix("torch."),
            "shape": list(info.shape),
            "bytes": math.prod(info.shape) * info.dtype.itemsize,
        }
        for name, info in source.tensors.items()
    }
    found: dict[str, Any] = {
        "path": str(source.path),
        "format": source.format,
        "iteration": source.iteration,
        "layout": facts.get("layout"),
        "model": {**{name: model.get(name) for name in SHAPE}, "vocab_size": facts["vocab_size"]},
        "tokenizer": facts.get("tokenizer"),
        "run": {name: facts[name] for name in PROGRESS if facts.get(name) is not None},
        "parts": _parts(tensors),
        "tensors": tensors,
        "left_out": list(source.left_out),
    }
    if isinstance(source, Checkpoint):
        found["manifest_sha256"] = source.digest
        found["files"] = {
            file: {"bytes": info.bytes, "sha256": info.sha256, "boxes": len(info.boxes)}
            for file, info in source.files.items()
        }
    return found


def _parts(tensors: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Values and bytes of each kind of tensor, by part of the model."""
    sums: defaultdict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
    for name, info in tensors.items():
        kind, _, parameter = name.partition(".")
        part = (
            "random states"
            if kind == "rng"
            else "layers"
            if ".layers." in parameter
            else "embeddings"
            if "embeddings" in parameter
            else "final norm"
        )
        sums[kind, part, info["dtype"]].update(tensors=1, values=math.prod(info["shape"]), bytes=info["bytes"])
    return [{"kind": kind, "part": part, "dtype": dtype, **total} for (kind, part, dtype), total in sums.items()]


def lines(found: dict[str, Any]) -> list[str]:
    """`describe` of a source, as lines to print."""
    layout = found["layout"] or {}
    rows = [("checkpoint", found["path"]), ("format", found["format"]), ("iteration", f"{found['iteration']:,}")]
    if layout:
        names = ("model_parallel", "pipeline_parallel", "virtual_pipeline_parallel", "data_parallel")
        sizes = " × ".join(
            f"{name} {layout[f'{name}_size']}".replace("_", "-")
            for name in names
            if f"{name}_size" in layout and ("pipeline" not in name or layout[f"{name}_size"] > 1)
        )
        rows.append(("written by", sizes + ", optimizer sharded" * bool(layout.get("optimizer_is_sharded"))))
    rows += [
        (name.replace("_", " "), f"{value:,}" if type(value) is int else str(value))
        for name, value in {**found["model"], **found["run"]}.items()
        if value is not None
    ]
    tokenizer = found["tokenizer"]
    rows.append(("tokenizer", f"{tokenizer['kind']}, {tokenizer.get('vocab_size', 0):,} ids" if tokenizer else "none"))
    width = max(len(name) for name, _ in rows)
    text = [f"{name:{width}}  {value}" for name, value in rows]
    text += [
        "",
        *_table(
            ["kind", "part", "dtype", "tensors", "values", "bytes"],
            [
                [
                    str(part["kind"]),
                    part["part"],
                    part["dtype"],
                    *(f"{part[key]:,}" for key in ("tensors", "values", "bytes")),
                ]
                for part in found["parts"]
            ],
            left=3,
        ),
    ]
    if "files" in found:
        text += [
            "",
            *_table(
                ["file", "bytes", "boxes", "sha256"],
                [
                    [file, f"{info['bytes']:,}", f"{info['boxes']:,}", info["sha256"][:12]]
                    for file, info in found["files"].items()
                ],
                left=1,
            ),
        ]
    return text + [f"left out: {line}" for line in found["left_out"]]


def _table(head: list[str], rows: list[list[str]], left: int) -> list[str]:
    """The first `left` columns begin at their left, the others end at their right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in [head, *rows]
    ]
