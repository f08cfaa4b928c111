"""`BaseCheckpoint`, the interface of every checkpoint format, and `check_metadata`.

Each reader translates its format into the same terms: our tensor names, QKV rows ordered by head, a vocabulary without
padding rows, and global tensors without ranks. The code that inspects, compares, converts and loads checkpoints
therefore exists only once. A saved tensor consists of rectangular slices of the global tensor.

The hash in a manifest shows that the manifest did not change, but does not show who wrote it. Callers therefore use
`check_metadata` before they build anything from the metadata.
"""

import dataclasses
import math
import reprlib
import types
import typing
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from data_utils.command_line import require
from megatron.gpt2.config import ModelConfig
from megatron.gpt2.config.sections import SECTIONS, config_fields
from megatron.gpt2.model.gpt2 import model_partition_specs
from mpu.partition import TensorSlice

Shape = tuple[int, ...]  # one number per dimension; also the type of an offset
_NATURAL = range(1 << 62)
_PADDING = 1 << 16  # the most padding rows of the vocabulary that are accepted
_COUNTS = ("vocab_size", "iteration", "train_iters", "decay_iters", "consumed_samples", "global_batch_size")
_MAX_CELLS = 1 << 26  # the most cells of the grid in `check_coverage`
_STEPS = ("optimizer.num_updates", "optimizer.skipped_steps", "optimizer.adam_steps")
_SCALER = [f"optimizer.loss_scaler.{name}" for name in ("scale", "clean_steps", "hysteresis_left")]


def intersection(a: TensorSlice, b: TensorSlice) -> TensorSlice:
    """Return the common part of two slices. The common part has size 0 in each dimension in which the slices do not
    overlap."""
    ranges = [(max(i.start, j.start), min(i.stop, j.stop)) for i, j in zip(a.slices(), b.slices(), strict=True)]
    return TensorSlice(tuple(start for start, _ in ranges), tuple(max(stop - start, 0) for start, stop in ranges))


def relative_slice(part: TensorSlice, outer: TensorSlice) -> TensorSlice:
    """Return `part` with its offset counted from the start of `outer`."""
    return TensorSlice(tuple(p - o for p, o in zip(part.offset, outer.offset, strict=True)), part.shape)


def check_inside(name: str, shape: Shape, tensor_slice: TensorSlice) -> None:
    """Raise ValueError unless `tensor_slice` is not empty and lies inside a tensor of `shape`."""
    if not tensor_slice.numel or any(part.stop > size for part, size in zip(tensor_slice.slices(), shape, strict=True)):
        raise ValueError(f"{name}: {tensor_slice} is empty or outside of the shape {shape}")


def check_coverage(name: str, shape: Shape, slices: Sequence[TensorSlice]) -> None:
    """Raise ValueError unless `slices` cover each entry of a tensor of `shape` exactly once.

    The edges of all slices cut the tensor into a grid. The slices leave no gap if they have as many entries as the
    tensor and each cell of the grid is in at most one slice.
    """
    for tensor_slice in slices:
        check_inside(name, shape, tensor_slice)
    covered = sum(tensor_slice.numel for tensor_slice in slices)
    require(covered == math.prod(shape), f"{name}: its slices hold {covered} entries of {math.prod(shape)}")
    # the edges of all slices along each dimension
    edges = [
        sorted({edge for part in parts for edge in (part.start, part.stop)})
        for parts in zip(*(tensor_slice.slices() for tensor_slice in slices), strict=True)
    ]
    require(math.prod(map(len, edges)) <= _MAX_CELLS, f"{name}: has too many slices at different positions")
    filled = torch.zeros([len(cuts) - 1 for cuts in edges], dtype=torch.bool)
    for tensor_slice in slices:
        along = zip(edges, tensor_slice.slices(), strict=True)
        cells = filled[
            tuple(slice(bisect_left(cuts, part.start), bisect_left(cuts, part.stop)) for cuts, part in along)
        ]
        if cells.any():
            raise ValueError(f"{name}: two of its slices overlap in {tensor_slice}")
        cells.fill_(True)


class TensorInfo(NamedTuple):
    """The dtype and the shape of a tensor."""

    dtype: torch.dtype
    shape: Shape  # the global shape, without padding


class BaseCheckpoint:
    """A checkpoint, opened for reading. Subclasses implement `saved_slices`.

    path: the iteration's folder, or the file.
    format: one of `formats.FORMATS`.
    tensors: the saved tensors by our names, "model.<parameter>" and, if the checkpoint contains them, "master.",
        "exp_avg." and "exp_avg_sq.".
    metadata: the values that our manifest has about a run, as far as this format saves them. "config" (at least
        {"model": {field of ModelConfig: value}}), "vocab_size" and "iteration" are always there.
    left_out: one line for each part of the files that this object does not contain.
    """

    path: Path
    format: str
    iteration: int
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    left_out: Sequence[str] = ()

    def read(self, name: str, offset: Shape | None = None, shape: Shape | None = None) -> Tensor:
        """Return the slice of `name` at `offset` with `shape` (default: the whole tensor) as a new CPU tensor with the
        saved dtype."""
        if name not in self.tensors:
            raise ValueError(f"{self.path}: holds no tensor {name}")
        info = self.tensors[name]
        out = torch.empty(info.shape if shape is None else shape, dtype=info.dtype)
        self.read_into(out, name, offset or (0,) * out.dim())
        return out

    def read_into(self, out: Tensor, name: str, offset: Shape) -> None:
        """Fill `out`, of any dtype and device, with the slice of `name` that begins at `offset` and has the shape of
        `out`, from all saved slices that overlap this slice. Resuming, merging, splitting and converting all use this
        method. Raises ValueError if the slice is outside of the tensor."""
        target = TensorSlice(offset, tuple(out.shape))
        if not target.numel:
            return
        check_inside(f"{self.path}: {name}", self.tensors[name].shape, target)
        for saved, load in self.saved_slices(name, target):
            if (shared := intersection(saved, target)).numel:
                out[relative_slice(shared, target).slices()] = load()[relative_slice(shared, saved).slices()]

    def saved_slices(self, name: str, target: TensorSlice) -> Iterable[tuple[TensorSlice, Callable[[], Tensor]]]:
        """Return pairs of a saved slice of `name` and a function that returns its values. The slices cover `target`,
        and some may lie outside `target`."""
        raise NotImplementedError


def check_metadata(checkpoint: BaseCheckpoint) -> ModelConfig:
    """Return the model configuration that the metadata describes.

    Raises ValueError, in one line, if the tensors do not have the shapes of the described model, or if a value has a
    type that a run cannot use. Most values of the metadata may be absent.
    """
    where = f"{checkpoint.path}: its metadata"
    metadata, hints = dict(_flatten(checkpoint.metadata)), _metadata_types()
    needed = ["config.model", "vocab_size"]
    if metadata.get("tokenizer") is not None:
        needed.append("tokenizer.fingerprint")
    if "optimizer" in metadata or any(name.startswith("master.") for name in checkpoint.tensors):
        needed += ["optimizer.loss_scaler", *_STEPS]
    for name in (*needed, *filter(hints.__contains__, metadata)):
        value = metadata.get(name)
        require(
            _has_type(value, hints[name]), f"{where} has {reprlib.repr(value)} for {name}: was it written by training?"
        )
    fields = {field.name for field in dataclasses.fields(ModelConfig)}
    shape = {name: value for name, value in metadata["config.model"].items() if name in fields}
    model = ModelConfig(**{**shape, "vocab_size": metadata["vocab_size"]})
    divisor, tensors = model.make_vocab_size_divisible_by, len(checkpoint.tensors)
    most = max(_PADDING, metadata["vocab_size"])
    require(divisor <= most, f"{where} has {divisor:,} for make_vocab_size_divisible_by")
    require(
        model.num_layers <= tensors, f"{where} has {model.num_layers:,} layers, but the checkpoint {tensors:,} tensors"
    )
    for name, spec in model_partition_specs(model).items():
        saved = checkpoint.tensors.get(f"model.{name}")
        if saved is None or saved.shape != spec.global_shape:
            problem = f"has shape {saved.shape}" if saved else "is missing"
            raise ValueError(f"{where} describes a model with {name} of shape {spec.global_shape}, which {problem}")
    return model


def _flatten(values: Mapping[str, Any], before: str = "", depth: int = 3) -> Iterator[tuple[str, Any]]:
    """Yield the entries of nested dictionaries under names such as "config.model.num_layers"."""
    for name, value in values.items():
        yield f"{before}{name}", value
        if isinstance(value, dict) and depth > 1:
            yield from _flatten(value, f"{before}{name}.", depth - 1)


def _metadata_types() -> dict[str, Any]:
    """Return the type, or the range of numbers, of each value that a run uses. The keys are the names of `_flatten`."""
    hints: dict[str, Any] = dict.fromkeys(("config", "layout", "optimizer", "optimizer.loss_scaler"), dict)
    hints |= dict.fromkeys((*_COUNTS, *_STEPS), _NATURAL) | dict.fromkeys(_SCALER, float)
    hints |= {"tokenizer": dict | None, "tokenizer.fingerprint": str}
    hints |= {f"config.{section}": dict for section in SECTIONS}
    return hints | {f"config.{name}": field.type for name, field in config_fields().items()}


def _has_type(value: Any, hint: Any) -> bool:
    """Return True if the JSON `value` has the type `hint` of a config's field, or is in the range `hint`."""
    if isinstance(hint, types.UnionType):
        return any(_has_type(value, member) for member in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return isinstance(value, list) and all(_has_type(entry, typing.get_args(hint)[0]) for entry in value)
    if isinstance(hint, range):
        return type(value) is int and value in hint
    return type(value) in ((int, float) if hint is float else (hint,))


def saved_decay_iters(metadata: Mapping[str, Any]) -> int | None:
    """Return the number of iterations of the learning rate's decay, if no flag set it. With batch ramp-up, the number
    is smaller than `train_iters`. Return None if another program's files do not contain the number."""
    return metadata.get("decay_iters", metadata.get("train_iters"))
