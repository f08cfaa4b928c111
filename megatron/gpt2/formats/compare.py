"""What a checkpoint holds, and how two differ, of whatever formats and layouts: tensor by tensor, and by what they
compute."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

import mpu
from data_utils.command_line import columns
from megatron.gpt2.checkpoint.reader import Checkpoint
from megatron.gpt2.checkpoint.source import Source, TensorInfo, check_facts
from megatron.gpt2.checkpoint.state import load_state
from megatron.gpt2.formats.foreign import TABLE
from megatron.gpt2.model.gpt2 import GPT2Model, layer_config, parameter_specs
from megatron.gpt2.optimizer.flat_parameters import FlatState

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
LAYOUT = ("model_parallel", "pipeline_parallel", "virtual_pipeline_parallel", "data_parallel")
# What is in a parameter's name, and the part of the model that it belongs to.
PARTS = {"rng.": "random states", ".layers.": "layers", "embeddings": "embeddings", "": "final norm"}
CHUNK = 1 << 20  # entries that are compared at once
SEQUENCES, LENGTH = 2, 32


def describe(source: Source) -> dict[str, Any]:
    """A description of `source` in JSON's types. No tensor is read."""
    facts, model = source.facts, source.facts["config"]["model"]
    tensors: dict[str, dict[str, Any]] = {}
    sums: defaultdict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
    for name, info in source.tensors.items():
        values, part = math.prod(info.shape), next(part for sign, part in PARTS.items() if sign in name)
        size = values * info.dtype.itemsize
        tensors[name] = {"dtype": _dtype(info), "shape": list(info.shape), "bytes": size}
        sums[name.partition(".")[0], part, _dtype(info)].update(tensors=1, values=values, bytes=size)
    found: dict[str, Any] = {
        "path": str(source.path),
        "format": source.format,
        "iteration": source.iteration,
        "layout": facts.get("layout"),
        "model": {**{name: model.get(name) for name in SHAPE}, "vocab_size": facts["vocab_size"]},
        "tokenizer": facts.get("tokenizer"),
        "run": {name: facts[name] for name in PROGRESS if facts.get(name) is not None},
        "parts": [{"kind": kind, "part": part, "dtype": dtype, **total} for (kind, part, dtype), total in sums.items()],
        "tensors": tensors,
        "left_out": list(source.left_out),
    }
    if isinstance(source, Checkpoint):
        found["manifest_sha256"] = source.digest
        found["files"] = {
            file: {"bytes": info.bytes, "boxes": len(info.boxes), "sha256": info.sha256}
            for file, info in source.files.items()
        }
    return found


def lines(found: dict[str, Any]) -> list[str]:
    """`describe` of a source, as lines to print."""
    rows = [("checkpoint", found["path"]), ("format", found["format"]), ("iteration", f"{found['iteration']:,}")]
    if layout := found["layout"]:
        sizes = [(name, layout.get(f"{name}_size", 0)) for name in LAYOUT]
        said = " × ".join(f"{name} {size}".replace("_", "-") for name, size in sizes if size > ("pipeline" in name))
        rows.append(("written by", said + ", optimizer sharded" * bool(layout.get("optimizer_is_sharded"))))
    known = {name: value for name, value in {**found["model"], **found["run"]}.items() if value is not None}
    rows += [(name.replace("_", " "), shown(value)) for name, value in known.items()]
    tokenizer = found["tokenizer"] or {"kind": "none"}
    vocabulary = f", {tokenizer['vocab_size']:,} ids" if "vocab_size" in tokenizer else ""
    rows.append(("tokenizer", tokenizer["kind"] + vocabulary))
    parts = [list(map(shown, part.values())) for part in found["parts"]]
    text = [*columns(rows, "<<"), ""]
    text += columns([("kind", "part", "dtype", "tensors", "values", "bytes"), *parts], "<<<>>>")
    if "files" in found:
        files = [
            (file, shown(info["bytes"]), shown(info["boxes"]), info["sha256"][:12])
            for file, info in found["files"].items()
        ]
        text += ["", *columns([("file", "bytes", "boxes", "sha256"), *files], "<>>>")]
    return text + [f"left out: {line}" for line in found["left_out"]]


def _dtype(info: TensorInfo) -> str:
    return str(info.dtype).removeprefix("torch.")


def shown(value: Any) -> str:
    """`value` as a text; a whole number with commas."""
    return f"{value:,}" if type(value) is int else str(value)


class Row(NamedTuple):
    """One tensor of both. greatest: the largest absolute difference; NaN if only one of the two holds NaN, None if the
    shapes differ. shape: in the first."""

    name: str
    shape: tuple[int, ...]
    greatest: float | None
    note: str


@dataclass(frozen=True)
class Difference:
    """The rows of the tensors that both hold, and the names that only one holds.

    Compared are the kinds (model, master, exp_avg, exp_avg_sq) that both hold; `not_compared` are the other kinds.
    Random states belong to a layout and are never compared.
    """

    rows: list[Row]
    only_in_a: list[str]
    only_in_b: list[str]
    not_compared: list[str]

    @property
    def equal(self) -> bool:
        """Whether both hold the same tensors with the same values."""
        return not self.only_in_a and not self.only_in_b and all(row.greatest == 0 for row in self.rows)


def diff(a: Source, b: Source) -> Difference:
    """Compare every value of `a` with that of `b`, whatever their dtypes and layouts. One tensor of each is in memory
    at a time."""
    kinds_a, kinds_b = ({name.partition(".")[0] for name in source.names()} - {"rng"} for source in (a, b))
    names_a, names_b = (
        [name for name in source.names() if name.partition(".")[0] in kinds_a & kinds_b] for source in (a, b)
    )
    return Difference(
        [_row(a, b, name) for name in names_a if name in b.tensors],
        [name for name in names_a if name not in b.tensors],
        [name for name in names_b if name not in a.tensors],
        sorted(kinds_a ^ kinds_b),
    )


def _row(a: Source, b: Source, name: str) -> Row:
    first, second = a.tensors[name], b.tensors[name]
    if first.shape != second.shape:
        return Row(name, first.shape, None, f"{_size(second.shape)} in the other")
    greatest = greatest_difference(a.read(name), b.read(name))
    notes = [f"{_dtype(first)} and {_dtype(second)}"] * (first.dtype != second.dtype)
    return Row(name, first.shape, greatest, ", ".join([*notes, *["NaN in only one"] * math.isnan(greatest)]))


def greatest_difference(x: Tensor, y: Tensor) -> float:
    """The largest absolute difference of two tensors of one shape, computed in float64, which holds every dtype's
    values. NaN equals NaN, and an infinity itself; NaN compared with a number is a difference of NaN."""
    greatest = []
    for some, other in zip(x.flatten().split(CHUNK), y.flatten().split(CHUNK), strict=True):
        some, other = some.double(), other.double()
        same = (some == other) | (some.isnan() & other.isnan())
        greatest.append((some - other).abs().masked_fill(same, 0).max())  # NaN is more than any number
    return torch.stack(greatest).max().item()


def table(difference: Difference) -> list[str]:
    """`difference` as lines to print."""
    cells = [("tensor", "shape", "greatest difference", "")]
    for row in difference.rows:
        greatest = "another shape" if row.greatest is None else f"{row.greatest:.3g}"
        cells.append((row.name, _size(row.shape), greatest, row.note))
    cells += [(name, "", "only in the first", "") for name in difference.only_in_a]
    cells += [(name, "", "only in the second", "") for name in difference.only_in_b]
    text = columns(cells, "<>><")
    if difference.not_compared:
        text.append(f"only in one of them, and not compared: {', '.join(difference.not_compared)}")
    return text


def _size(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def check(a: Source, b: Source, *, kind: str = "model", log: Callable[[str], None] = print) -> float:
    """The largest absolute difference of the logits of `a` and `b`, in fp32, on fixed random tokens; NaN if one has
    NaN.

    kind: the tensors of `a` that the weights of `b` were made of, "model" or "master"; they are rounded to b's dtype
    first. One model is in memory at a time. ValueError if the vocabularies differ.
    """
    size, other = a.facts["vocab_size"], b.facts["vocab_size"]
    if size != other:
        raise ValueError(f"{a.path} has {size} tokens and {b.path} {other}: give the true number with --vocab-size")
    length = min(LENGTH, *(source.facts["config"]["model"]["max_position_embeddings"] for source in (a, b)))
    tokens = torch.randint(size, (SEQUENCES, length), generator=torch.Generator().manual_seed(0))
    dtype = b.tensors[f"model.{TABLE}"].dtype
    greatest = (logits(a, tokens, kind, dtype) - logits(b, tokens)).abs().max().item()
    log(f"greatest logit difference on {tokens.numel()} tokens in fp32: {greatest:.3g}")
    return greatest


@torch.no_grad()
def logits(source: Source, tokens: Tensor, kind: str = "model", dtype: torch.dtype = torch.float32) -> Tensor:
    """[b, s] -> [s, b, true vocabulary], of the weights of a `kind`, rounded to `dtype`."""
    if not mpu.model_parallel_is_initialized():
        mpu.initialize_model_parallel(1)
    config = check_facts(source)
    model = GPT2Model(config, layer_config(config, device="meta"))
    model.to_empty(device="cpu").eval()  # no weight is drawn, to be replaced
    weights = [FlatState(kind, name, parameter.detach().view(-1)) for name, parameter in model.named_parameters()]
    load_state(weights, parameter_specs(config), source, mp_rank=0, mp_size=1)
    for weight in weights:
        weight.values.copy_(weight.values.to(dtype))
    return model(tokens)[..., : config.vocab_size]  # type: ignore[no-any-return]
