"""From a command line to a run: presets, foreign flags, and what a checkpoint decides.

A value comes from the last of these that has one: the field's default; the recipe (`--model`; the run of a `--config`;
or `quickstart` if no shape is given); the checkpoint that is loaded (its shape, tokenizer and schedule; its whole recipe
instead of the quickstart's); the command line. `--a_b` is read as `--a-b`, and prefixes of flags are not completed: a
typing error must not become a different flag.
"""

import dataclasses
import difflib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from data_utils import kind_of_vocabulary
from megatron.gpt2.config.config import SECTIONS, Config, by_key, fields, flag, read_config
from megatron.gpt2.config.flags import build_parser, dashed, flag_table
from megatron.gpt2.config.foreign import FOREIGN, apply_rows, iterations_to_profile, read_deepspeed_config
from megatron.gpt2.config.presets import DEFAULT_TRAIN_ITERS, PRESETS, SHAPE_KEYS
from megatron.gpt2.config.sections import CheckpointConfig, require

LENGTHS = ("train.train_iters", "train.train_samples", "train.train_tokens", "train.train_epochs")
# What the checkpoint decides unless a flag does. The others of ModelConfig do not change what the weights mean.
SAVED = tuple(
    f"model.{name}"
    for name in (
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "ffn_hidden_size",
        "max_position_embeddings",
        "vocab_size",
        "layernorm_epsilon",
        "gelu",
    )
) + ("data.tokenizer_type",)
SCHEDULE = tuple(
    f"optimizer.{name}"
    for name in (
        "lr",
        "min_lr",
        "lr_decay_style",
        "lr_decay_iters",
        "lr_decay_samples",
        "warmup",
        "lr_warmup_iters",
        "lr_warmup_samples",
        "lr_wsd_decay_iters",
    )
)
WARMUPS = ("optimizer.warmup", "optimizer.lr_warmup_iters", "optimizer.lr_warmup_samples")

# One flag of a group replaces the whole group: a recipe's value for one must not meet a given value for another.
ALTERNATIVES = (
    LENGTHS,
    WARMUPS,
    ("optimizer.lr_decay_iters", "optimizer.lr_decay_samples"),
    ("train.global_batch_size", "train.gradient_accumulation_steps", "train.step_batch_size_schedule"),
    ("train.rampup_batch_size", "train.step_batch_size_schedule"),
    tuple(
        f"data.{name}"
        for name in ("train_data", "valid_data", "test_data", "data_path", "valid_data_path", "test_data_path")
    ),
)
# What a run that continues a checkpoint never takes from it.
OF_THIS_START = (
    "train.device",
    "train.exit_interval",
    "train.exit_duration_in_mins",
    "train.tensorboard_dir",
    "train.wandb_project",
    "train.wandb_entity",
    "train.wandb_exp_name",
    "train.wandb_save_dir",
    "train.profile",
    "train.profile_ranks",
    "optimizer.override_opt_param_scheduler",
    "optimizer.use_checkpoint_opt_param_scheduler",
)


@dataclass(frozen=True)
class Arguments:
    """A command line, read. `values` holds what differs from the defaults by "section.field"; `given` names what the
    command line decided, which includes the shape and tokenizer of the `--model` or `--config` that it names; `notes`
    are lines about translated and inert flags."""

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
    def continues(self) -> bool:
        """Whether no model is named, so that a checkpoint's own run would be continued."""
        return self.preset == "quickstart" and "model.num_layers" not in self.given

    @property
    def checkpoint(self) -> CheckpointConfig:
        """That section alone, for the time before the checkpoint is found."""
        return CheckpointConfig(
            **{key.split(".")[1]: value for key, value in self.values.items() if key.startswith("checkpoint.")}
        )


def parse(argv: Sequence[str] | None = None) -> Arguments:
    """Read a command line (default: this process's). Raises ValueError, in one line, for what cannot be understood;
    what is understood but impossible raises it when `.config` is first read. `--help` prints and exits."""
    words = [dashed(word) for word in (sys.argv[1:] if argv is None else argv)]
    parser = build_parser()
    if "--help" in words or "-h" in words:
        parser.print_help()
        raise SystemExit(0)
    namespace, unknown = parser.parse_known_args(words)
    if unknown:
        raise ValueError(_unknown(unknown))
    read = vars(namespace)
    named, rerun = read.pop("preset", None), read.pop("rerun", None)
    require(not (named and rerun), "give --model or --config, not both")
    command_line = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in read.items()
        if not key.startswith(("--", "launch."))
    }  # how the ranks start is no part of the run
    foreign = {name: value for name, value in read.items() if name.startswith("--")}
    values, lines, problems = apply_rows(FOREIGN, foreign, command_line, given_wins=False)
    command_line |= values
    notes = _alias_notes(words) + lines
    for file in {foreign[name] for name in ("--deepspeed-config", "--deepscale-config") if name in foreign}:
        try:
            values, lines = read_deepspeed_config(file, command_line)
        except ValueError as error:
            problems.append(str(error))
        else:
            command_line |= values
            notes += lines
    require(not problems, "; ".join(problems))
    _refuse_pairs(command_line)
    if command_line.get("train.profile") == ():
        command_line["train.profile"] = iterations_to_profile(read)

    own_shape = any(key in command_line for key in SHAPE_KEYS)
    preset = named or (None if own_shape or rerun else "quickstart")
    recipe = PRESETS[preset] if preset else {"train.train_iters": DEFAULT_TRAIN_ITERS}
    values = _recipe_under(read_config(rerun) if rerun else recipe, command_line)
    given = {key for key in values if (named or rerun) and key in SAVED}
    if "data.tokenizer_type" not in command_line:
        command_line |= _implied_tokenizer(command_line)
    values |= command_line
    if "checkpoint.save" not in values:
        values["checkpoint.save"] = _default_save(values, preset, own_shape=own_shape)
    return Arguments(values, frozenset(given | command_line.keys()), preset, tuple(notes))


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


def _recipe_under(recipe: Mapping[str, Any], command_line: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe without what flags of the command line replace; its floor of the learning rate follows --lr."""
    replaced = {key for group in ALTERNATIVES if any(key in command_line for key in group) for key in group}
    values = {key: value for key, value in recipe.items() if key not in replaced}
    if "optimizer.lr" in command_line and values.get("optimizer.min_lr"):
        values["optimizer.min_lr"] *= command_line["optimizer.lr"] / values["optimizer.lr"]
    return values


def _refuse_pairs(command_line: Mapping[str, Any]) -> None:
    """Two flags for one thing, of which a default of the other may not be blamed."""
    require(
        len(command_line.keys() & set(WARMUPS)) < 2,
        "give --warmup (a fraction), --lr-warmup-iters or --lr-warmup-samples, not two",
    )


def _implied_tokenizer(command_line: Mapping[str, Any]) -> dict[str, Any]:
    gpt2 = "data.vocab_file" in command_line or "data.merge_file" in command_line
    sentencepiece = "data.tokenizer_model" in command_line
    require(
        not (gpt2 and sentencepiece),
        "--vocab-file and --tokenizer-model are of two tokenizers: say which with --tokenizer-type",
    )
    if gpt2 or sentencepiece:
        return {
            "data.tokenizer_type": kind_of_vocabulary(str(command_line.get("data.vocab_file", "")))
            if gpt2
            else "SentencePieceTokenizer"
        }
    return {}


def _default_save(values: Mapping[str, Any], preset: str | None, *, own_shape: bool) -> str:
    """A run continues in the folder that it loads; fine-tuning never touches its source."""
    if load := values.get("checkpoint.load"):
        return load.rstrip("/") + "_finetuned" if values.get("checkpoint.finetune") else load
    if preset and not own_shape:
        return f"checkpoints/gpt2_{preset}"
    layers, hidden = (values.get(key, fields()[key].default) for key in SHAPE_KEYS[:2])
    return f"checkpoints/gpt2_{layers}x{hidden}"


def merge_checkpoint(
    arguments: Arguments, saved: Mapping[str, Mapping[str, Any]], saved_iterations: int | None = None
) -> Arguments:
    """Fill in what the checkpoint decides. `saved` is the `Config.as_dict()` that it holds, with the vocabulary size
    and the tokenizer resolved; `saved_iterations` the length of its schedule (default: its train_iters).

    Shape and tokenizer: a flag that is not given takes the checkpoint's value; those that differ are refused, all of
    them in one line.
    --seq-length takes the checkpoint's where neither flag nor --model gives it, and may differ freely.

    A command line without --model or a shape continues the checkpoint's own run: the checkpoint's recipe (data,
    batch, optimizer, seed, length …) takes the place of the quickstart's. Fine-tuning takes no length from it.

    Schedule (not for --finetune and --no-load-optim): likewise, where --override-lr-scheduler keeps every value of
    this run and --use-checkpoint-lr-scheduler takes every value of the checkpoint. A decay length that neither run
    was given follows --train-iters: whoever extends a finished run gets the schedule of the longer run.
    """
    notes = list(arguments.notes)
    old = by_key(saved)
    values = _own_recipe(arguments, old) if arguments.continues else dict(arguments.values)
    differing, problems = [], []
    for key in SAVED:
        then = old.get(key)
        if key == "model.ffn_hidden_size" and key in arguments.given and then is None:
            then = 4 * old["model.hidden_size"]
        if then is None:
            continue
        if key in arguments.given and values[key] != then:
            differing.append(f"{flag(key)}: here {values[key]}, checkpoint {then}")
        values[key] = then
    if differing:
        problems.append(
            "; ".join(differing) + ": leave out what differs, or start afresh with another --save and --load"
        )
    if arguments.preset is None and "data.seq_length" not in arguments.given:
        values["data.seq_length"] = old["data.seq_length"]
    if not (values.get("checkpoint.finetune") or values.get("checkpoint.no_load_optim")):
        notes += _merge_schedule(
            values, arguments.given, old, saved_iterations or old.get("train.train_iters"), problems
        )
    require(not problems, "; ".join(problems))
    return dataclasses.replace(
        arguments, values=values, notes=tuple(notes), preset=None if arguments.continues else arguments.preset
    )


def _own_recipe(arguments: Arguments, old: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a run that goes on as the checkpoint's did, under the command line."""
    fresh = arguments.values.get("checkpoint.finetune") or arguments.values.get("checkpoint.no_load_optim")
    override = arguments.values.get("optimizer.override_opt_param_scheduler")
    left = (
        OF_THIS_START
        + (LENGTHS if arguments.values.get("checkpoint.finetune") else ())
        + (
            ("optimizer.lr_decay_iters", "optimizer.lr_decay_samples", "optimizer.lr_wsd_decay_iters")
            if fresh or override
            else ()
        )
    )
    recipe = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in old.items()
        if key.split(".")[0] not in ("parallel", "checkpoint") and key not in left
    }
    command_line = {key: arguments.values[key] for key in arguments.given}
    values = _recipe_under(recipe, command_line)
    if not any(values.get(key) or key in command_line for key in LENGTHS):
        values["train.train_iters"] = arguments.values["train.train_iters"]
    return values | command_line | {"checkpoint.save": arguments.values["checkpoint.save"]}


def _merge_schedule(
    values: dict[str, Any],
    given: frozenset[str],
    old: Mapping[str, Any],
    saved_iterations: int | None,
    problems: list[str],
) -> list[str]:
    """Bring the schedule of the checkpoint into `values`, and what contradicts it into `problems`; see
    `merge_checkpoint`."""
    if values.get("optimizer.override_opt_param_scheduler"):
        return []
    default = {key: f.default for key, f in fields().items()}
    old = {key: old.get(key, default[key]) for key in SCHEDULE}  # an older checkpoint may lack some
    horizon = old["optimizer.lr_decay_iters"] or (None if old["optimizer.lr_decay_samples"] else saved_iterations)
    if values.get("optimizer.use_checkpoint_opt_param_scheduler"):
        values |= old | {"optimizer.lr_decay_iters": horizon}
        return []
    decided = given | (set(WARMUPS) if "optimizer.warmup" in given else set())
    no_fraction = any(run.get(key) is not None for run in (values, old) for key in WARMUPS[1:])
    taken, differing = [], []
    for key in SCHEDULE:
        now, then = values.get(key, default[key]), old[key]
        if key == "optimizer.lr_decay_iters" and then is None:
            then = horizon if key in given else now
        if now == then or key == "optimizer.warmup" and no_fraction:
            continue
        if key in decided:
            differing.append(f"{flag(key)}: here {now}, checkpoint {then}")
        values[key] = then
        taken.append(f"{flag(key)} {then}")
    if differing:
        problems.append(
            "; ".join(differing) + ": --override-opt-param-scheduler takes the schedule of this "
            "run, --use-checkpoint-opt-param-scheduler that of the checkpoint"
        )
    notes = [f"schedule from the checkpoint: {' '.join(taken)}"] if taken else []
    length = values.get("train.train_iters")
    grows = values.get("train.rampup_batch_size") or values.get("train.step_batch_size_schedule")
    if (
        values.get("optimizer.lr_decay_iters") is None
        and None not in (horizon, length)
        and horizon != length
        and not grows
    ):  # a longer run has more iterations than its schedule then
        notes.append(
            f"the learning rate now decays over {length} iterations, not the checkpoint's {horizon}: "
            f"--lr-decay-iters {horizon} would keep that"
        )
    return notes
