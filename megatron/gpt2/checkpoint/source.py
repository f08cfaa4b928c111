"""What a checkpoint of any format looks like to the rest of the program, and a check of what it says about its run.

Every format is read into our own terms: our tensor names, QKV head-major, only the true rows of the vocabulary, global
tensors without ranks. So inspecting, comparing, converting and loading are written once, for all of them; our own
`Checkpoint` is a source as well. A saved tensor consists of boxes, rectangular parts.

A manifest's hash shows that its bytes are those that were written. It does not show who wrote them, so `check_facts`
is called before anything is built from its facts.
"""

import dataclasses
import math
import reprlib
import types
import typing
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.gpt2.config import Config, ModelConfig
from megatron.gpt2.model.gpt2 import parameter_specs
from mpu.partition import Box

_NATURAL = range(1 << 62)
_PADDING = 1 << 16  # rows of the vocabulary that may be padding without a word
_MAX_CELLS = 1 << 26  # of the grid that the edges of a tensor's boxes draw
_COUNTS = ("vocab_size", "iteration", "train_iters", "decay_iters", "consumed_samples", "global_batch_size")
_STEPS = ("optimizer.good_steps", "optimizer.skipped_steps", "optimizer.adam_steps")
_SCALER = [f"optimizer.loss_scaler.{name}" for name in ("scale", "clean_steps", "hysteresis_left")]


def common(a: Box, b: Box) -> Box:
    """The common part of two boxes, of size 0 along a dimension in which they do not meet."""
    ranges = [(max(i.start, j.start), min(i.stop, j.stop)) for i, j in zip(a.slices(), b.slices(), strict=True)]
    return Box(tuple(start for start, _ in ranges), tuple(max(stop - start, 0) for start, stop in ranges))


def within(part: Box, outer: Box) -> Box:
    """The place of `part` in a tensor that holds only `outer`."""
    return Box(tuple(p - o for p, o in zip(part.offset, outer.offset, strict=True)), part.shape)


def check_inside(name: str, shape: tuple[int, ...], box: Box) -> None:
    """Raise ValueError unless `box` is a part, and not an empty one, of a tensor of `shape`."""
    if not box.numel or any(part.stop > size for part, size in zip(box.slices(), shape, strict=True)):
        raise ValueError(f"{name}: {box} is empty or outside of the shape {shape}")


def check_cover(name: str, shape: tuple[int, ...], boxes: Sequence[Box]) -> None:
    """Raise ValueError unless `boxes` make up a tensor of `shape`, each entry once.

    The edges of the boxes draw a grid. If the entries add up and each cell is in at most one box, there is no gap.
    """
    for box in boxes:
        check_inside(name, shape, box)
    if (held := sum(box.numel for box in boxes)) != math.prod(shape):
        raise ValueError(f"{name}: its boxes hold {held} entries of {math.prod(shape)}")
    edges: list[list[int]] = []
    for parts in zip(*(box.slices() for box in boxes), strict=True):  # along each dimension
        edges.append(sorted({*(part.start for part in parts), *(part.stop for part in parts)}))
    if math.prod(map(len, edges)) > _MAX_CELLS:
        raise ValueError(f"{name}: its boxes form no grid")
    filled = torch.zeros([len(cuts) - 1 for cuts in edges], dtype=torch.bool)
    for box in boxes:
        along = zip(edges, box.slices(), strict=True)
        cells = filled[
            tuple(slice(bisect_left(cuts, part.start), bisect_left(cuts, part.stop)) for cuts, part in along)
        ]
        if cells.any():
            raise ValueError(f"{name}: two of its boxes overlap in {box}")
        cells.fill_(True)


class TensorInfo(NamedTuple):
    """The properties of a tensor without its values."""

    dtype: torch.dtype
    shape: tuple[int, ...]  # global, without padding


class Source:
    """A checkpoint, opened for reading. A subclass says in `read_into` how a box of a tensor is filled.

    path: the iteration's folder, or the file. format: as in `formats.FORMATS`. facts: what our manifest says of a run,
    as far as the source knows it; always there: "config" ({"model": {field of ModelConfig: value}} at least),
    "vocab_size", "iteration". left_out: what the files hold and this object does not, a line each.
    tensors: by our names, "model.<parameter>" and, if the source holds them, "master.", "exp_avg.", "exp_avg_sq.".
    """

    path: Path
    format: str
    iteration: int
    facts: dict[str, Any]
    tensors: dict[str, TensorInfo]
    left_out: Sequence[str] = ()

    def names(self) -> list[str]:
        """All names, in the order of the source."""
        return list(self.tensors)

    def read(self, name: str, offset: tuple[int, ...] | None = None, shape: tuple[int, ...] | None = None) -> Tensor:
        """The box of `name` at `offset` with `shape` (default: the whole tensor): a new CPU tensor, dtype as saved."""
        if name not in self.tensors:
            raise ValueError(f"{self.path}: holds no tensor {name}")
        info = self.tensors[name]
        out = torch.empty(info.shape if shape is None else shape, dtype=info.dtype)
        self.read_into(out, name, offset or (0,) * out.dim())
        return out

    def read_into(self, out: Tensor, name: str, offset: tuple[int, ...]) -> None:
        """Fill `out`, of any dtype and device, with the box of `name` that is at `offset` and has its shape."""
        raise NotImplementedError


def check_facts(checkpoint: Source) -> ModelConfig:
    """The model's shape, as the facts describe it.

    ValueError, in one line, unless the tensors have the shapes of that model, and unless what the facts say about the
    run is of the types that a run takes. Most facts may be absent.
    """
    where = f"{checkpoint.path}: its facts"
    facts, hints = dict(_entries(checkpoint.facts)), _hints()
    needed = ["config.model", "vocab_size"]
    if facts.get("tokenizer") is not None:
        needed.append("tokenizer.fingerprint")
    if "optimizer" in facts or any(name.startswith("master.") for name in checkpoint.tensors):
        needed += ["optimizer.loss_scaler", *_STEPS]
    for name in (*needed, *filter(hints.__contains__, facts)):
        if not _fits(facts.get(name), hints[name]):
            raise ValueError(f"{where} have {reprlib.repr(facts.get(name))} for {name}: was it written by training?")
    fields = {field.name for field in dataclasses.fields(ModelConfig)}
    shape = {name: value for name, value in facts["config.model"].items() if name in fields}
    model = ModelConfig(**{**shape, "vocab_size": facts["vocab_size"]})
    if model.make_vocab_size_divisible_by > max(_PADDING, facts["vocab_size"]):
        raise ValueError(f"{where} have {model.make_vocab_size_divisible_by:,} for make_vocab_size_divisible_by")
    if model.num_layers > len(checkpoint.tensors):
        raise ValueError(f"{where} tell of {model.num_layers:,} layers: it holds {len(checkpoint.tensors):,} tensors")
    for name, spec in parameter_specs(model).items():
        held = checkpoint.tensors.get(f"model.{name}")
        if held is None or held.shape != spec.global_shape:
            raise ValueError(f"{where} tell of {name} {spec.global_shape}: it holds {held.shape if held else 'none'}")
    return model


def _entries(values: Mapping[str, Any], before: str = "", depth: int = 3) -> Iterator[tuple[str, Any]]:
    """The entries of nested dictionaries, an inner one as "config.model.num_layers"."""
    for name, value in values.items():
        yield f"{before}{name}", value
        if isinstance(value, dict) and depth > 1:
            yield from _entries(value, f"{before}{name}.", depth - 1)


def _hints() -> dict[str, Any]:
    """The types of the facts that are used, or a range of numbers, by the names that `_entries` gives them."""
    hints: dict[str, Any] = dict.fromkeys(("config", "layout", "optimizer", "optimizer.loss_scaler"), dict)
    hints |= dict.fromkeys((*_COUNTS, *_STEPS), _NATURAL) | dict.fromkeys(_SCALER, float)
    hints |= {"tokenizer": dict | None, "tokenizer.fingerprint": str}
    for section, kind in typing.get_type_hints(Config).items():
        hints[f"config.{section}"] = dict
        hints |= {f"config.{section}.{name}": hint for name, hint in typing.get_type_hints(kind).items()}
    return hints


def _fits(value: Any, hint: Any) -> bool:
    """Whether JSON's `value` is of the type with which a field of a config is annotated, or in a range of numbers."""
    if isinstance(hint, types.UnionType):
        return any(_fits(value, member) for member in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return isinstance(value, list) and all(_fits(entry, typing.get_args(hint)[0]) for entry in value)
    if isinstance(hint, range):
        return type(value) is int and value in hint
    return type(value) in ((int, float) if hint is float else (hint,))


def decay_iters(facts: Mapping[str, Any]) -> int:
    """The iterations over which the learning rate of the run decayed if no flag said so: fewer than those of the run
    if its batch grew."""
    return int(facts.get("decay_iters", facts["train_iters"]))
