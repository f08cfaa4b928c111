"""What a checkpoint of any format looks like to the rest of the program, and a check of what it says about its run.

Every format is read into our own terms: our tensor names, QKV head-major, only the true rows of the vocabulary, global
tensors without ranks. So inspecting, comparing, converting and loading are written once, for all of them; our own
`Checkpoint` is a source as well.

A manifest's hash shows that its bytes are those that were written. It does not show who wrote them, so `check_facts`
comes before anything is built from its facts.
"""

import dataclasses
import reprlib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.gpt2.config import Config, ModelConfig
from megatron.gpt2.model.gpt2 import parameter_specs
from mpu.partition import Box

_NATURAL = range(1 << 62)
_NUMBERS = ("iteration", "train_iters", "decay_iters", "consumed_samples", "global_batch_size")
_PADDING = 1 << 16  # rows of the vocabulary that may be padding without a word


@dataclass(frozen=True)
class TensorInfo:
    """The properties of a tensor without its values."""

    dtype: torch.dtype
    shape: tuple[int, ...]  # global


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

    def global_shape(self, name: str) -> tuple[int, ...]:
        """The shape of the whole tensor, without padding."""
        return self.tensors[name].shape

    def read(self, name: str, offset: tuple[int, ...] | None = None, shape: tuple[int, ...] | None = None) -> Tensor:
        """The box of `name` at `offset` with `shape` (default: the whole tensor): a new CPU tensor, dtype as saved."""
        if name not in self.tensors:
            raise ValueError(f"{self.path}: holds no tensor {name}")
        info = self.tensors[name]
        box = Box(offset or (0,) * len(info.shape), info.shape if shape is None else shape)
        self.check_box(name, box)
        out = torch.empty(box.shape, dtype=info.dtype)
        self.read_into(out, name, box.offset)
        return out

    def check_box(self, name: str, box: Box) -> None:
        """ValueError unless the files hold all of the box of `name`: no memory is taken for what is not there."""

    def read_into(self, out: Tensor, name: str, offset: tuple[int, ...]) -> None:
        """Fill `out`, of any dtype and device, with the box of `name` that is at `offset` and has its shape."""
        raise NotImplementedError


def check_facts(checkpoint: Source) -> ModelConfig:
    """The model's shape, as the facts describe it.

    ValueError, in one line, unless the tensors have the shapes of that model, and unless what the facts say about the
    run is of the types that a run takes. A fact that is absent is not checked.
    """
    facts, where = checkpoint.facts, f"{checkpoint.path}: its facts"
    config = _fact(facts, "config", dict, where)
    sections = typing.get_type_hints(Config)
    for section in config:
        values = _fact(config, section, dict, where)
        hints = typing.get_type_hints(sections[section]) if section in sections else {}
        for name in values.keys() & hints.keys():
            _fact(values, name, hints[name], where)
    for name in _NUMBERS:
        if name in facts:
            _fact(facts, name, _NATURAL, where)
    if facts.get("tokenizer") is not None:
        _fact(_fact(facts, "tokenizer", dict, where), "fingerprint", str, where)
    if "optimizer" in facts or any(name.startswith("master.") for name in checkpoint.tensors):
        state = _fact(facts, "optimizer", dict, where)
        for name in ("good_steps", "skipped_steps", "adam_steps"):
            _fact(state, name, _NATURAL, where)
        scaler = _fact(state, "loss_scaler", dict, where)
        for name in scaler:
            _fact(scaler, name, float, where)
    fields = {field.name for field in dataclasses.fields(ModelConfig)}
    shape = {name: value for name, value in _fact(config, "model", dict, where).items() if name in fields}
    model = ModelConfig(**{**shape, "vocab_size": _fact(facts, "vocab_size", _NATURAL, where)})
    if model.make_vocab_size_divisible_by > max(_PADDING, facts["vocab_size"]):
        raise ValueError(f"{where} have {model.make_vocab_size_divisible_by:,} for make_vocab_size_divisible_by")
    if model.num_layers > len(checkpoint.tensors):
        raise ValueError(f"{where} tell of {model.num_layers:,} layers: it holds {len(checkpoint.tensors):,} tensors")
    for name, spec in parameter_specs(model).items():
        held = checkpoint.tensors.get(f"model.{name}")
        if held is None or held.shape != spec.global_shape:
            raise ValueError(f"{where} tell of {name} {spec.global_shape}: it holds {held.shape if held else 'none'}")
    return model


def decay_iters(facts: Mapping[str, Any]) -> int:
    """The iterations over which the learning rate of the run decayed if no flag said so: fewer than those of the run
    if its batch grew."""
    return int(facts.get("decay_iters", facts["train_iters"]))


def _fact(values: Mapping[str, Any], name: str, hint: Any, where: str) -> Any:
    """The value of that name. ValueError unless it is as `hint` says."""
    value = values.get(name)
    if not _fits(value, hint):
        raise ValueError(f"{where} have {reprlib.repr(value)} for {name}: was it written by training?")
    return value


def _fits(value: Any, hint: Any) -> bool:
    """Whether JSON's `value` is of the type with which a field of a config is annotated, or in a range of numbers."""
    if isinstance(hint, types.UnionType):
        return any(_fits(value, member) for member in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return isinstance(value, list) and all(_fits(entry, typing.get_args(hint)[0]) for entry in value)
    if isinstance(hint, range):
        return type(value) is int and value in hint
    return type(value) in ((int, float) if hint is float else (hint,))
