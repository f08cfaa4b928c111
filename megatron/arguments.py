"""The command line: a flag for each field of `megatron/config.py`, and the foreign ones of `foreign_flags.py`.

What a value comes from, the last one winning: the field's default, the preset (`--model`, or `quickstart` where no
shape is given), the checkpoint that is loaded (shape, tokenizer and schedule alone), the command line. `--a_b` is
read as `--a-b`, and prefixes of flags are not completed: a typing error must not become another flag.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import sys
import textwrap
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

from megatron.config import SECTIONS, CheckpointConfig, Config, require
from megatron.foreign_flags import FOREIGN, Foreign
from megatron.presets import DEFAULT_TRAIN_ITERS, PRESETS, SHAPE_KEYS

LENGTHS = ("train.train_iters", "train.train_samples", "train.train_tokens", "train.train_epochs")
# What the checkpoint decides unless a flag does. The others of ModelConfig do not change what the weights mean.
SAVED = tuple(f"model.{name}" for name in ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size",
              "max_position_embeddings", "vocab_size", "layernorm_epsilon")) + ("data.tokenizer_type",)
SCHEDULE = tuple(f"optimizer.{name}" for name in ("lr", "min_lr", "lr_decay_style", "lr_decay_iters", "warmup",
                                                  "lr_warmup_iters", "lr_wsd_decay_iters"))


def flag(key: str) -> str:
    """The flag of a field: "model.num_layers" -> "--num-layers"."""
    return "--" + key.split(".")[1].replace("_", "-")


def fields() -> dict[str, dataclasses.Field[Any]]:
    """Every field of the configuration by "section.field"."""
    return {f"{name}.{f.name}": f for name, kind in SECTIONS.items() for f in dataclasses.fields(kind)}


@dataclass(frozen=True)
class Arguments:
    """A command line, read. `values` holds what differs from the defaults by "section.field"; `given` names what the
    command line decided, which includes the shape and tokenizer of a `--model` that it names; `notes` are lines
    about translated and inert flags."""

    values: Mapping[str, Any]
    given: frozenset[str]
    preset: str | None
    notes: tuple[str, ...] = ()

    @cached_property
    def config(self) -> Config:
        """The run, validated here and not in `parse`: the shape may yet come from a checkpoint."""
        nested: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
        for key, value in self.values.items():
            section, name = key.split(".")
            nested[section][name] = value
        return Config.from_dict(nested)

    @property
    def checkpoint(self) -> CheckpointConfig:
        """That section alone, for the time before the checkpoint is found."""
        return CheckpointConfig(**{key.split(".")[1]: value for key, value in self.values.items()
                                   if key.startswith("checkpoint.")})


class _Help(argparse.HelpFormatter):
    """Never breaks a line inside a flag."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(textwrap.fill(line, width, initial_indent=indent, subsequent_indent=indent,
                                       break_on_hyphens=False) for line in text.splitlines())


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message.removeprefix("argument "))


def _whole(text: str) -> int:
    """An int, also written 300_000 or 3e8."""
    try:
        return int(text)
    except ValueError:
        value = float(text)
        if not value.is_integer():
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        return int(value)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


_whole.__name__ = "int"  # argparse names the type in its errors


def _how_to_read(hint: Any) -> dict[str, Any]:
    """argparse's keywords for the type of a field."""
    if isinstance(hint, types.UnionType):  # int | None
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    if hint is bool:
        return {"action": "store_true"}
    if typing.get_origin(hint) is tuple:
        return {"nargs": "+"}
    return {"type": {int: _whole, float: _number, str: str}[hint]}


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="pretrain_gpt2", allow_abbrev=False, add_help=False, argument_default=argparse.SUPPRESS,
                     formatter_class=_Help,
                     usage="%(prog)s [--model NAME] [--flag VALUE | --flag=VALUE] ...",
                     description="Pretrain GPT-2. Without flags a small model is trained on the built-in corpus.")
    parser.add_argument("--help", action="store_true", help="print this and exit")
    parser.add_argument("--model", type=str.lower, choices=tuple(PRESETS), dest="preset",
                        help="a named run, every value of which a flag overrides (default: quickstart, unless "
                             "--num-layers, --hidden-size or --num-attention-heads is given)")
    for section, kind in SECTIONS.items():
        group = parser.add_argument_group(section, kind.__doc__.split("\n\n")[0])
        hints = typing.get_type_hints(kind)
        for f in dataclasses.fields(kind):
            how = _how_to_read(hints[f.name])
            if f.metadata["choices"]:
                how["choices"] = f.metadata["choices"]
            elif f.metadata["metavar"] or "type" in how:
                how["metavar"] = f.metadata["metavar"] or {_whole: "N", _number: "X"}.get(how["type"], "TEXT")
            told = f.metadata["help"] + ("" if f.default in (None, False, ()) else f" (default: {f.default})")
            group.add_argument(flag(f"{section}.{f.name}"), *f.metadata["aliases"], dest=f"{section}.{f.name}",
                               help=told.replace("%", "%%"), **how)
    group = parser.add_argument_group("Megatron's other flags", "\n".join(
        f"{status}: {' '.join(name for row in FOREIGN if row.status == status for name in row.flags)}."
        for status in ("translated", "inert", "refused")))
    for row in FOREIGN:
        how = {"action": "store_const", "const": None} if row.values == 0 else {
            "nargs": None if row.values == 1 else row.values}
        for name in row.flags:
            group.add_argument(name, dest=name, help=argparse.SUPPRESS, **how)
    return parser


def flag_table() -> list[tuple[str, str, str]]:
    """Every flag with its status (honoured, translated, inert, refused) and its text: what the documentation shows."""
    table = [("--model", "honoured", "a named run: " + ", ".join(PRESETS))]
    for key, f in fields().items():
        table.append((flag(key), "honoured", f.metadata["help"]))
        table += [(alias, "translated", f"read as {flag(key)}") for alias in f.metadata["aliases"]]
    return table + [(name, row.status, row.text) for row in FOREIGN for name in row.flags]


def parse(argv: Sequence[str] | None = None) -> Arguments:
    """Read a command line (default: this process's). Raises ValueError, in one line, for what cannot be understood;
    what is understood but impossible is said when `.config` is first read. `--help` prints and exits."""
    words = [_dashed(word) for word in (sys.argv[1:] if argv is None else argv)]
    parser = build_parser()
    if "--help" in words or "-h" in words:
        parser.print_help()
        raise SystemExit(0)
    namespace, unknown = parser.parse_known_args(words)
    if unknown:
        raise ValueError(_unknown(unknown))
    read = vars(namespace)
    named = read.pop("preset", None)
    command_line = {key: tuple(value) if isinstance(value, list) else value
                    for key, value in read.items() if not key.startswith("--")}
    notes = _alias_notes(words)
    notes += _apply_foreign({name: value for name, value in read.items() if name.startswith("--")}, command_line)
    _refuse_pairs(command_line)

    preset = named or (None if any(key in command_line for key in SHAPE_KEYS) else "quickstart")
    values: dict[str, Any] = dict(PRESETS[preset]) if preset else {"train.train_iters": DEFAULT_TRAIN_ITERS}
    if any(key in command_line for key in LENGTHS):
        values.pop("train.train_iters")
    given = {key for key in values if named and key in SAVED}
    if "data.tokenizer_type" not in command_line:
        command_line |= _implied_tokenizer(command_line)
    values |= command_line
    if "checkpoint.save" not in values:
        values["checkpoint.save"] = _default_save(values, preset, own_shape=any(k in command_line for k in SHAPE_KEYS))
    return Arguments(values, frozenset(given | command_line.keys()), preset, tuple(notes))


def _dashed(word: str) -> str:
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else word


def _unknown(words: Sequence[str]) -> str:
    name = next((word for word in words if word.startswith("-")), None)
    if name is None:
        return f"unexpected argument {words[0]!r}: every value follows its flag"
    name = name.partition("=")[0]
    known = {row[0].lower(): row[0] for row in flag_table()}
    near = difflib.get_close_matches("--" + name.lstrip("-").lower(), known, n=1)
    return f"unknown flag {name}: " + (f"did you mean {known[near[0]]}?" if near else "--help lists the flags")


def _alias_notes(words: Sequence[str]) -> list[str]:
    names = {word.partition("=")[0]: None for word in words}  # in order, once
    meant = {alias: flag(key) for key, f in fields().items() for alias in f.metadata["aliases"]}
    return [f"{name} is read as {meant[name]}" for name in names if name in meant]


def _apply_foreign(read: Mapping[str, Any], command_line: dict[str, Any]) -> list[str]:
    """Add what the foreign flags set to `command_line`; return the lines that say what became of them."""
    rows: dict[str, Foreign] = {name: row for row in FOREIGN for name in row.flags}
    by: dict[str, str] = {}
    said: dict[str, list[str]] = {}
    for name, value in read.items():
        row = rows[name]
        spelled = f"{name} {value}" if isinstance(value, str) else name
        require(row.status != "refused", f"{spelled} is not supported: {row.text}")
        require(not row.accepts or value in row.accepts,
                f"{spelled} is not supported, only {' or '.join(row.accepts)}: {row.text}")
        for key, meant in (row.sets(value) if row.sets else {}).items():
            other = by.get(key, flag(key))
            require(command_line.setdefault(key, meant) == meant,
                    f"{spelled} contradicts {other}" + ("" if key in by else f" {command_line[key]}"))
            by[key] = name
        said.setdefault(row.text if row.status == "translated" else f"without effect here: {row.text}",
                        []).append(spelled)
    return [f"{', '.join(names)}: {text}" for text, names in said.items()]


def _refuse_pairs(command_line: Mapping[str, Any]) -> None:
    """Two flags for one thing, of which a default of the other may not be blamed."""
    require(not {"optimizer.warmup", "optimizer.lr_warmup_iters"} <= command_line.keys(),
            "give --warmup (a fraction) or --lr-warmup-iters, not both")


def _implied_tokenizer(command_line: Mapping[str, Any]) -> dict[str, Any]:
    gpt2 = "data.vocab_file" in command_line or "data.merge_file" in command_line
    sentencepiece = "data.tokenizer_model" in command_line
    require(not (gpt2 and sentencepiece), "--vocab-file and --tokenizer-model are of two tokenizers: "
                                          "say which with --tokenizer-type")
    if gpt2 or sentencepiece:
        return {"data.tokenizer_type": "GPT2BPETokenizer" if gpt2 else "SentencePieceTokenizer"}
    return {}


def _default_save(values: Mapping[str, Any], preset: str | None, *, own_shape: bool) -> str:
    """A run continues in the folder that it loads; fine-tuning never touches its source."""
    if load := values.get("checkpoint.load"):
        return load.rstrip("/") + "_finetuned" if values.get("checkpoint.finetune") else load
    if preset and not own_shape:
        return f"checkpoints/gpt2_{preset}"
    default = {key: f.default for key, f in fields().items()}
    layers, hidden = (values.get(key, default[key]) for key in SHAPE_KEYS[:2])
    return f"checkpoints/gpt2_{layers}x{hidden}"


def merge_checkpoint(arguments: Arguments, saved: Mapping[str, Mapping[str, Any]],
                     saved_iterations: int | None = None) -> Arguments:
    """Fill in what the checkpoint decides. `saved` is the `Config.as_dict()` that it holds, with the vocabulary size
    and the tokenizer resolved; `saved_iterations` the length of its run (default: its train_iters).

    Shape and tokenizer: a flag that is not given takes the checkpoint's value; one that differs is refused.
    --seq-length takes the checkpoint's where neither flag nor --model gives it, and may differ freely.

    Schedule (not for --finetune and --no-load-optim): likewise, where --override-lr-scheduler keeps every value of
    this run and --use-checkpoint-lr-scheduler takes every value of the checkpoint. A decay length that neither run
    was given follows --train-iters: whoever extends a finished run gets the schedule of the longer run.
    """
    values, notes = dict(arguments.values), list(arguments.notes)
    old = {f"{section}.{name}": value for section, entries in saved.items() for name, value in entries.items()}
    for key in SAVED:
        then = old.get(key)
        if key == "model.ffn_hidden_size" and key in arguments.given and then is None:
            then = 4 * old["model.hidden_size"]
        if then is None:
            continue
        require(key not in arguments.given or values[key] == then,
                f"{flag(key)} is {values.get(key)} here and {then} in the checkpoint: leave the flag out, or start "
                "afresh with another --save and --load")
        values[key] = then
    if "data.seq_length" not in arguments.given and arguments.preset in (None, "quickstart"):
        values["data.seq_length"] = old["data.seq_length"]
    if not (values.get("checkpoint.finetune") or values.get("checkpoint.no_load_optim")):
        notes += _merge_schedule(values, arguments.given, old, saved_iterations or old.get("train.train_iters"))
    return dataclasses.replace(arguments, values=values, notes=tuple(notes))


def _merge_schedule(values: dict[str, Any], given: frozenset[str], old: Mapping[str, Any],
                    saved_iterations: int | None) -> list[str]:
    """Bring the schedule of the checkpoint into `values`; see `merge_checkpoint`."""
    if values.get("optimizer.override_opt_param_scheduler"):
        return []
    horizon = old.get("optimizer.lr_decay_iters") or saved_iterations
    if values.get("optimizer.use_checkpoint_opt_param_scheduler"):
        values |= {key: old[key] for key in SCHEDULE} | {"optimizer.lr_decay_iters": horizon}
        return []
    default = {key: f.default for key, f in fields().items()}
    decided = given | ({"optimizer.lr_warmup_iters"} if "optimizer.warmup" in given else set())
    in_iterations = any(run.get("optimizer.lr_warmup_iters") is not None for run in (values, old))
    taken = []
    for key in SCHEDULE:
        now, then = values.get(key, default[key]), old[key]
        if key == "optimizer.lr_decay_iters" and then is None:
            then = horizon if key in given else now
        if now == then or key == "optimizer.warmup" and in_iterations:
            continue
        require(key not in decided,
                f"{flag(key)} is {now} here and {then} in the checkpoint: --override-lr-scheduler takes the "
                "schedule of this run, --use-checkpoint-lr-scheduler that of the checkpoint")
        values[key] = then
        taken.append(f"{flag(key)} {then}")
    notes = [f"schedule from the checkpoint: {' '.join(taken)}"] if taken else []
    length = values.get("train.train_iters")
    if values.get("optimizer.lr_decay_iters") is None and None not in (horizon, length) and horizon != length:
        notes.append(f"the learning rate now decays over {length} iterations, not the checkpoint's {horizon}: "
                     f"--lr-decay-iters {horizon} would keep that")
    return notes


def differing_flags(config: Config, default: Config | None = None) -> list[tuple[str, Any]]:
    """(flag, value) for each field that is not what `default` (the defaults) has, in the order of the fields."""
    ours, theirs = config.as_dict(), (default or Config()).as_dict()
    return [(flag(key), ours[s][name]) for key in fields() for s, name in [key.split(".")]
            if ours[s][name] != theirs[s][name]]
