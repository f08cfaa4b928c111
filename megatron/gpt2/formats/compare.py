"""Describe a checkpoint, and compare two of any formats and layouts: tensor by tensor, and by their logits."""

import math
from collections import Counter, defaultdict
from typing import Any, NamedTuple

import torch
from torch import Tensor

import mpu
from data_utils.command_line import Log, align_columns, require
from megatron.gpt2.checkpoint.interface import BaseCheckpoint, Shape, TensorInfo, check_metadata
from megatron.gpt2.checkpoint.reader import NativeCheckpoint
from megatron.gpt2.checkpoint.sharded_state import load_sharded_state_dict
from megatron.gpt2.model.gpt2 import TIED_WEIGHT, GPT2Model, build_block_config, model_partition_specs
from megatron.gpt2.optimizer.param_and_grad_buffer import ParamShard

PROGRESS_KEYS = ("train_iters", "consumed_samples", "global_batch_size", "precision", "converted_from", "torch")
CHUNK = 1 << 20  # elements that `max_abs_difference` converts to float64 at a time
SEQUENCES, LENGTH = 2, 32


def describe(source: BaseCheckpoint) -> dict[str, Any]:
    """Describe `source` in JSON types. The function reads no tensor."""
    metadata = source.metadata
    tensors: dict[str, dict[str, Any]] = {}
    sums: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for name, info in source.tensors.items():
        values, dtype = math.prod(info.shape), _dtype_name(info)
        size = values * info.dtype.itemsize
        tensors[name] = {"dtype": dtype, "shape": list(info.shape), "bytes": size}
        sums[name.partition(".")[0], dtype].update(tensors=1, values=values, bytes=size)
    found: dict[str, Any] = {
        "path": str(source.path),
        "format": source.format,
        "iteration": source.iteration,
        "layout": metadata.get("layout"),
        "model": {**metadata["config"]["model"], "vocab_size": metadata["vocab_size"]},
        "tokenizer": metadata.get("tokenizer"),
        "run": {name: metadata[name] for name in PROGRESS_KEYS if metadata.get(name) is not None},
        "kinds": [{"kind": kind, "dtype": dtype, **total} for (kind, dtype), total in sums.items()],
        "tensors": tensors,
        "left_out": list(source.left_out),
    }
    if isinstance(source, NativeCheckpoint):
        found["manifest_sha256"] = source.manifest_sha256
        found["files"] = {
            file: {"bytes": info.bytes, "slices": len(info.slices), "sha256": info.sha256}
            for file, info in source.files.items()
        }
    return found


def format_description(found: dict[str, Any]) -> list[str]:
    """Format the result of `describe` as lines to print."""
    known = {
        "checkpoint": found["path"],
        "format": found["format"],
        "iteration": found["iteration"],
        **(found["layout"] or {}),
        **found["model"],
        **found["run"],
        "tokenizer": (found["tokenizer"] or {}).get("kind"),
    }
    rows = [(name.replace("_", " "), format_value(value)) for name, value in known.items() if value is not None]
    kinds = [list(map(format_value, kind.values())) for kind in found["kinds"]]
    text = [
        *align_columns(rows, "<<"),
        "",
        *align_columns([("kind", "dtype", "tensors", "values", "bytes"), *kinds], "<<>>>"),
    ]
    if "files" in found:
        files = [(file, *map(format_value, info.values())) for file, info in found["files"].items()]
        text += ["", *align_columns([("file", "bytes", "slices", "sha256"), *files], "<>>>")]
    return text + [f"left out: {line}" for line in found["left_out"]]


def _dtype_name(info: TensorInfo) -> str:
    return str(info.dtype).removeprefix("torch.")


def format_value(value: Any) -> str:
    """Convert `value` to text. An integer gets commas."""
    return f"{value:,}" if type(value) is int else str(value)


class TensorComparison(NamedTuple):
    """The difference between two checkpoints in one tensor.

    shape: the shape in the first checkpoint.
    max_difference: the largest absolute difference; NaN if only one of the tensors has a NaN, None if the shapes differ
        or if only one checkpoint has the tensor.
    """

    name: str
    shape: Shape
    max_difference: float | None
    note: str


class CheckpointDifference(NamedTuple):
    """The differences of all tensors of the kinds (model, master, exp_avg, exp_avg_sq) that both checkpoints contain.

    `not_compared` lists the kinds that only one checkpoint has. Random states depend on the layout and are never
    compared.
    """

    rows: list[TensorComparison]
    not_compared: list[str]

    @property
    def equal(self) -> bool:
        """True if both checkpoints have the same tensors with the same values."""
        return all(row.max_difference == 0 for row in self.rows)


def compare_tensors(a: BaseCheckpoint, b: BaseCheckpoint) -> CheckpointDifference:
    """Compare all values of `a` and `b`, which may have different dtypes and layouts. Only one tensor of each
    checkpoint is in memory at a time."""
    kinds_a, kinds_b = ({name.partition(".")[0] for name in source.tensors} - {"rng"} for source in (a, b))
    names = [name for name in {**a.tensors, **b.tensors} if name.partition(".")[0] in kinds_a & kinds_b]
    return CheckpointDifference([_row(a, b, name) for name in names], sorted(kinds_a ^ kinds_b))


def _row(a: BaseCheckpoint, b: BaseCheckpoint, name: str) -> TensorComparison:
    info_a, info_b = a.tensors.get(name), b.tensors.get(name)
    if info_a is None or info_b is None:
        return TensorComparison(name, (), None, f"only in the {'first' if info_a else 'second'}")
    if info_a.shape != info_b.shape:
        note = f"different shape: {_format_shape(info_b.shape)} in the second"
        return TensorComparison(name, info_a.shape, None, note)
    names = [_stored_weight(a, name, info_b), _stored_weight(b, name, info_a)]
    max_difference = max_abs_difference(a.read(names[0]), b.read(names[1]))
    notes = [f"{_dtype_name(info_a)} and {_dtype_name(info_b)}"] * (info_a.dtype != info_b.dtype)
    notes += ["the master is compared"] * (names != [name, name])
    notes += ["NaN in only one"] * math.isnan(max_difference)
    return TensorComparison(name, info_a.shape, max_difference, ", ".join(notes))


def _stored_weight(source: BaseCheckpoint, name: str, other: TensorInfo) -> str:
    """Return the tensor of `source` to compare with the tensor `name` of the other checkpoint. A 16-bit weight is
    replaced by its fp32 master if the other tensor is fp32, because an export in fp32 has the masters as weights."""
    master = name.replace("model.", "master.", 1)
    is_rounded = source.tensors[name].dtype != other.dtype == torch.float32
    return master if is_rounded and master in source.tensors else name


def max_abs_difference(x: Tensor, y: Tensor) -> float:
    """Return the largest absolute difference of two tensors of equal shape, computed in float64. Two NaNs, or two
    infinities of the same sign, count as equal. The difference of a NaN and a number is NaN."""
    differences = []
    for part_x, part_y in zip(x.flatten().split(CHUNK), y.flatten().split(CHUNK), strict=True):
        part_x, part_y = part_x.double(), part_y.double()
        is_same = (part_x == part_y) | (part_x.isnan() & part_y.isnan())
        differences.append((part_x - part_y).abs().masked_fill(is_same, 0).max())  # max returns NaN if there is a NaN.
    return torch.stack(differences).max().item()


def format_difference(difference: CheckpointDifference) -> list[str]:
    """Format `difference` as lines to print."""
    cells = [("tensor", "shape", "greatest difference", "")]
    for row in difference.rows:
        max_difference = "" if row.max_difference is None else f"{row.max_difference:.3g}"
        cells.append((row.name, _format_shape(row.shape), max_difference, row.note))
    text = align_columns(cells, "<>><")
    if difference.not_compared:
        text.append(f"only in one checkpoint, and not compared: {', '.join(difference.not_compared)}")
    return text


def _format_shape(shape: Shape) -> str:
    return " x ".join(map(str, shape))


def compare_logits(a: BaseCheckpoint, b: BaseCheckpoint, *, kind: str = "model", log: Log = print) -> float:
    """Return the largest absolute difference of the logits of `a` and `b` in fp32, on fixed random tokens, or NaN if a
    logit is NaN.

    kind: the tensors of `a` from which the weights of `b` were converted, "model" or "master". The tensors of `a` are
        first rounded to the dtype of `b`. Only one model is in memory at a time. Raises ValueError if the vocabularies
        differ.
    """
    size, other = a.metadata["vocab_size"], b.metadata["vocab_size"]
    require(size == other, f"{a.path} has {size} tokens and {b.path} {other}: give the true number with --vocab-size")
    length = min(LENGTH, *(source.metadata["config"]["model"]["max_position_embeddings"] for source in (a, b)))
    tokens = torch.randint(size, (SEQUENCES, length), generator=torch.Generator().manual_seed(0))
    dtype = b.tensors[f"model.{TIED_WEIGHT}"].dtype
    max_difference = (compute_logits(a, tokens, kind, dtype) - compute_logits(b, tokens)).abs().max().item()
    log(f"greatest logit difference on {tokens.numel()} tokens in fp32: {max_difference:.3g}")
    return max_difference


@torch.no_grad()
def compute_logits(
    source: BaseCheckpoint, tokens: Tensor, kind: str = "model", dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return the logits [s, b, true vocabulary] of `tokens` [b, s].

    kind: "model" or "master". The weights are rounded to `dtype`.
    """
    if not mpu.model_parallel_is_initialized():
        mpu.initialize_model_parallel(1)
    config = check_metadata(source)
    model = GPT2Model(config, build_block_config(config, device="meta"))
    model.to_empty(device="cpu").eval()  # without a random initialisation
    weights = [ParamShard(kind, name, parameter.detach().view(-1)) for name, parameter in model.named_parameters()]
    load_sharded_state_dict(weights, model_partition_specs(config), source, tp_rank=0, tp_size=1)
    for weight in weights:
        weight.values.copy_(weight.values.to(dtype))
    return model(tokens)[..., : config.vocab_size]  # type: ignore[no-any-return]
