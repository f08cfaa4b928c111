"""What a manifest says about its run, checked before anything is built from it.

The manifest's hash shows that its bytes are those that were written. It does not show who wrote them.
"""

import dataclasses
import reprlib
import types
import typing
from collections.abc import Mapping
from typing import Any

from megatron.gpt2.checkpoint.source import Source
from megatron.gpt2.config import Config, ModelConfig
from megatron.gpt2.model.parameters import parameter_specs

_NUMBERS = ("iteration", "train_iters", "decay_iters", "consumed_samples", "global_batch_size")
_PADDING = 1 << 16  # rows of the vocabulary that may be padding without a word


def check_facts(checkpoint: Source) -> ModelConfig:
    """The model's shape, as the facts describe it.

    ValueError, in one line, unless the tensors have the shapes of that model, and unless what the facts say about the
    run is of the types that a run takes. A fact that is absent is not checked.
    """
    facts, where = checkpoint.facts, f"{checkpoint.path}: its facts"
    config = _mapping(facts, "config", where)
    sections = typing.get_type_hints(Config)
    for section in config:
        known = typing.get_type_hints(sections[section]) if section in sections else {}
        for name, value in _mapping(config, section, where).items():
            if name in known and not _fits(value, known[name]):
                raise ValueError(f"{where} have {reprlib.repr(value)} for {section}.{name}")
    for name in _NUMBERS:
        if name in facts:
            _natural(facts, name, where)
    if facts.get("tokenizer") is not None and not _fits(_mapping(facts, "tokenizer", where).get("fingerprint"), str):
        raise ValueError(f"{where} lack the tokenizer's fingerprint")
    if "optimizer" in facts or any(name.startswith("master.") for name in checkpoint.tensors):
        state = _mapping(facts, "optimizer", where)
        for name in ("good_steps", "skipped_steps", "adam_steps"):
            _natural(state, name, where)
        if not all(_fits(value, float) for value in _mapping(state, "loss_scaler", where).values()):
            raise ValueError(f"{where} have {reprlib.repr(state['loss_scaler'])} for loss_scaler")
    fields = {field.name for field in dataclasses.fields(ModelConfig)}
    shape = {name: value for name, value in _mapping(config, "model", where).items() if name in fields}
    model = ModelConfig(**{**shape, "vocab_size": _natural(facts, "vocab_size", where)})
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
    """The iterations over which the learning rate of the run decayed where no flag said so: fewer than those of the run
    where its batch grew."""
    return int(facts.get("decay_iters", facts["train_iters"]))


def _mapping(values: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    if not isinstance(values.get(name), dict):
        raise ValueError(f"{where} lack {name}: was it written by training?")
    return typing.cast(Mapping[str, Any], values[name])


def _natural(values: Mapping[str, Any], name: str, where: str) -> int:
    value = values.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 62:
        raise ValueError(f"{where} have {reprlib.repr(value)} for {name}")
    return value


def _fits(value: Any, hint: Any) -> bool:
    """Whether JSON's `value` is of the type that a field of a config is annotated with."""
    if isinstance(hint, types.UnionType):
        return any(_fits(value, member) for member in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return isinstance(value, list) and all(_fits(entry, typing.get_args(hint)[0]) for entry in value)
    if hint is float:
        return type(value) in (int, float)
    return type(value) is hint
