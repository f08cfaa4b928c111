"""From a command line to a run: recipes, foreign flags, and what a checkpoint decides.

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
from megatron.gpt2.config.flags import build_parser, dashed, flag_table
from megatron.gpt2.config.foreign import FOREIGN, apply_rows, iterations_to_profile, read_deepspeed_config
from megatron.gpt2.config.recipes import DEFAULT_TRAIN_ITERS, PRESETS, SHAPE_KEYS, read_config
from megatron.gpt2.config.sections import SECTIONS, CheckpointConfig, Config, by_key, fields, flag, require

LENGTHS = ("train.train_iters", "train.train_samples", "train.train_tokens", "train.train_epochs")
WARMUPS = ("optimizer.warmup", "optimizer.lr_warmup_iters", "optimizer.lr_warmup_samples")
DECAYS = ("optimizer.lr_decay_iters", "optimizer.lr_decay_samples", "optimizer.lr_wsd_decay_iters")
SCHEDULERS = ("optimizer.override_opt_param_scheduler", "optimizer.use_checkpoint_opt_param_scheduler")
# What the checkpoint decides unless a flag does. The other fields of ModelConfig do not change what the weights mean.
SAVED = (
    *SHAPE_KEYS,
    "model.ffn_hidden_size",
    "model.max_position_embeddings",
    "model.vocab_size",
    "model.layernorm_epsilon",
    "model.gelu",
    "data.tokenizer_type",
)
SCHEDULE = ("optimizer.lr", "optimizer.min_lr", "optimizer.lr_decay_style", *DECAYS, *WARMUPS)

# At most one flag of each group can be given.
EXCLUSIVE = (
    LENGTHS,
    WARMUPS,
    DECAYS[:2],
    SCHEDULERS,
    ("parallel.num_layers_per_virtual_pipeline_stage", "parallel.num_virtual_stages_per_pipeline_rank"),
    ("train.rampup_batch_size", "train.step_batch_size_schedule"),
    ("data.data_path", "data.train_data"),
    ("data.valid_data_path", "data.valid_data"),
    ("data.test_data_path", "data.test_data"),
)
# One flag of a group replaces the whole group: a recipe's value for one must not meet a given value for another.
ALTERNATIVES = (
    *EXCLUSIVE,
    ("train.global_batch_size", "train.gradient_accumulation_steps", "train.step_batch_size_schedule"),
    sum(EXCLUSIVE[-3:], ()),
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
    *SCHEDULERS,
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
        return Config.from_dict({section: self._values_of(section) for section in SECTIONS})

    @property
    def checkpoint(self) -> CheckpointConfig:
        """Only that section, for the time before the checkpoint is found."""
        return CheckpointConfig(**self._values_of("checkpoint"))

    def _values_of(self, section: str) -> dict[str, Any]:
        prefix = section + "."
        return {key.removeprefix(prefix): value for key, value in self.values.items() if key.startswith(prefix)}

    @property
    def continues(self) -> bool:
        """Whether no model is named, so that a checkpoint's own run would be continued."""
        return self.preset == "quickstart" and "model.num_layers" not in self.given


def parse(argv: Sequence[str] | None = None) -> Arguments:
    """Read a command line (default: this process's). Raises ValueError, in one line, for what cannot be understood;
    what is understood but impossible raises it when `.config` is first read. `--help` prints and exits."""
    words = [dashed(word) for word in (sys.argv[1:] if argv is None else argv)]
    namespace, unknown = build_parser().parse_known_args(words)
    if unknown:
        raise ValueError(_unknown(unknown))
    read = vars(namespace)
    named, rerun = read.get("preset"), read.get("rerun")
    require(not (named and rerun), "give --model or --config, not both")
    known = fields()
    command_line = {key: value for key, value in read.items() if key in known}
    foreign = {name: value for name, value in read.items() if name.startswith("--")}
    values, notes, problems = apply_rows(FOREIGN, foreign, command_line)
    command_line |= values
    if file := foreign.get("--deepspeed-config") or foreign.get("--deepscale-config"):
        try:
            values, lines = read_deepspeed_config(file, command_line)
        except ValueError as error:
            problems.append(str(error))
        else:
            command_line |= values
            notes += lines
    require(not problems, "; ".join(problems))
    for group in EXCLUSIVE:
        given = [flag(key) for key in group if key in command_line]
        require(len(given) < 2, f"give {' or '.join(given)}, not {'both' if len(given) == 2 else 'all'}")
    if command_line.get("train.profile") == []:
        command_line["train.profile"] = iterations_to_profile(read)

    own_shape = any(key in command_line for key in SHAPE_KEYS)
    preset = named or (None if own_shape or rerun else "quickstart")
    recipe = PRESETS[preset] if preset else {"train.train_iters": DEFAULT_TRAIN_ITERS}
    values = _recipe_under(read_config(rerun) if rerun else recipe, command_line)
    of_recipe = {key for key in values if (named or rerun) and key in SAVED}
    command_line = _implied_tokenizer(command_line) | command_line
    values |= command_line
    values.setdefault("checkpoint.save", _default_save(values, None if own_shape else preset))
    return Arguments(values, frozenset(of_recipe | command_line.keys()), preset, tuple(_alias_notes(words) + notes))


def _unknown(words: Sequence[str]) -> str:
    name = next((word for word in words if word.startswith("-")), None)
    if name is None:
        return f"unexpected argument {words[0]!r}: every value follows its flag"
    name = name.partition("=")[0]
    known = {row[0].lower(): row[0] for row in flag_table()}
    near = difflib.get_close_matches("--" + name.lstrip("-").lower(), known, n=1)
    return f"unknown flag {name}: " + (f"did you mean {known[near[0]]}?" if near else "--help lists the flags")


def _alias_notes(words: Sequence[str]) -> list[str]:
    names = dict.fromkeys(word.partition("=")[0] for word in words)  # in order, once
    meant = {alias: flag(key) for key, f in fields().items() for alias in f.metadata["aliases"]}
    return [f"{name} is read as {meant[name]}" for name in names if name in meant]


def _recipe_under(recipe: Mapping[str, Any], command_line: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe without what flags of the command line replace; its floor of the learning rate follows --lr."""
    replaced = {key for group in ALTERNATIVES if any(key in command_line for key in group) for key in group}
    values = {key: value for key, value in recipe.items() if key not in replaced}
    if "optimizer.lr" in command_line and values.get("optimizer.min_lr"):
        values["optimizer.min_lr"] *= command_line["optimizer.lr"] / values["optimizer.lr"]
    return values


def _implied_tokenizer(command_line: Mapping[str, Any]) -> dict[str, str]:
    """The tokenizer of the files that the command line names."""
    gpt2 = "data.vocab_file" in command_line or "data.merge_file" in command_line
    sentencepiece = "data.tokenizer_model" in command_line
    require(
        not (gpt2 and sentencepiece) or "data.tokenizer_type" in command_line,
        "--vocab-file and --tokenizer-model are of two tokenizers: say which with --tokenizer-type",
    )
    if gpt2:
        return {"data.tokenizer_type": kind_of_vocabulary(command_line.get("data.vocab_file", ""))}
    return {"data.tokenizer_type": "SentencePieceTokenizer"} if sentencepiece else {}


def _default_save(values: Mapping[str, Any], preset: str | None) -> str:
    """A run continues in the folder that it loads; fine-tuning never touches its source."""
    if load := values.get("checkpoint.load"):
        return load.rstrip("/") + "_finetuned" if values.get("checkpoint.finetune") else load
    if preset:
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
    --seq-length takes the checkpoint's if neither a flag nor --model gives it, and may differ freely.

    A command line without --model or a shape continues the checkpoint's own run: the checkpoint's recipe (data,
    batch, optimizer, seed, length …) takes the place of the quickstart's. Fine-tuning takes no length from it.

    Schedule (not for --finetune and --no-load-optim): likewise, but --override-opt-param-scheduler keeps every value of
    this run and --use-checkpoint-opt-param-scheduler takes every value of the checkpoint. A decay length that neither
    run was given follows --train-iters: whoever extends a finished run gets the schedule of the longer run.
    """
    old, given, continues = by_key(saved), arguments.given, arguments.continues
    keeps_schedule = any(
        arguments.values.get(key)
        for key in ("checkpoint.finetune", "checkpoint.no_load_optim", "optimizer.override_opt_param_scheduler")
    )
    values = _own_recipe(arguments, old, keeps_schedule) if continues else dict(arguments.values)
    shape = {key: old[key] for key in SAVED if old.get(key) is not None}
    if "model.ffn_hidden_size" in given:
        shape.setdefault("model.ffn_hidden_size", 4 * old["model.hidden_size"])
    _, problem = _take(shape, values, given, "leave out what differs, or start afresh with another --save and --load")
    problems, notes = [problem], list(arguments.notes)
    if arguments.preset is None and "data.seq_length" not in given:
        values["data.seq_length"] = old["data.seq_length"]
    if not keeps_schedule:
        lines, problem = _merge_schedule(values, given, old, saved_iterations or old.get("train.train_iters"))
        problems.append(problem)
        notes += lines
    require(not any(problems), "; ".join(filter(None, problems)))
    return dataclasses.replace(
        arguments, values=values, notes=tuple(notes), preset=None if continues else arguments.preset
    )


def _take(
    then: Mapping[str, Any], values: dict[str, Any], given: frozenset[str], way_out: str
) -> tuple[list[str], str]:
    """Bring what the checkpoint has into `values`. Returns what changed, and the error about what was `given`."""
    now = {key: values.get(key, fields()[key].default) for key in then}
    changed = {key: value for key, value in then.items() if value != now[key]}
    values |= changed
    differing = [f"{flag(key)}: here {now[key]}, checkpoint {changed[key]}" for key in changed if key in given]
    problem = f"{'; '.join(differing)}: {way_out}" if differing else ""
    return [f"{flag(key)} {value}" for key, value in changed.items()], problem


def _own_recipe(arguments: Arguments, old: Mapping[str, Any], keeps_schedule: bool) -> dict[str, Any]:
    """The values of a run that goes on as the checkpoint's did, under the command line."""
    left = OF_THIS_START + (DECAYS if keeps_schedule else ())
    if arguments.values.get("checkpoint.finetune"):
        left += LENGTHS
    recipe = {
        key: value for key, value in old.items() if not key.startswith(("parallel.", "checkpoint.")) and key not in left
    }
    command_line = {key: arguments.values[key] for key in arguments.given}
    values = _recipe_under(recipe, command_line) | command_line
    if not any(values.get(key) for key in LENGTHS):
        values["train.train_iters"] = arguments.values["train.train_iters"]
    return values | {"checkpoint.save": arguments.values["checkpoint.save"]}


def _merge_schedule(
    values: dict[str, Any], given: frozenset[str], old: Mapping[str, Any], saved_iterations: int | None
) -> tuple[list[str], str]:
    """Bring the schedule of the checkpoint into `values`, see `merge_checkpoint`. Returns lines about it, and the error
    about what contradicts it."""
    then = {key: old.get(key, fields()[key].default) for key in SCHEDULE}  # an older checkpoint may lack some
    horizon = then["optimizer.lr_decay_iters"] or (None if then["optimizer.lr_decay_samples"] else saved_iterations)
    if values.get("optimizer.use_checkpoint_opt_param_scheduler"):
        values |= then | {"optimizer.lr_decay_iters": horizon}
        return [], ""
    if "optimizer.warmup" in given:
        given |= set(WARMUPS)
    if any(run.get(key) is not None for run in (values, then) for key in WARMUPS[1:]):
        del then["optimizer.warmup"]
    if then["optimizer.lr_decay_iters"] is None:
        if "optimizer.lr_decay_iters" in given:
            then["optimizer.lr_decay_iters"] = horizon
        else:
            del then["optimizer.lr_decay_iters"]
    taken, problem = _take(
        then,
        values,
        given,
        "--override-opt-param-scheduler takes the schedule of this run, --use-checkpoint-opt-param-scheduler that of "
        "the checkpoint",
    )
    notes = [f"schedule from the checkpoint: {' '.join(taken)}"] if taken else []
    length = values.get("train.train_iters")
    grows = values.get("train.rampup_batch_size") or values.get("train.step_batch_size_schedule")
    decays_over_all = values.get("optimizer.lr_decay_iters") is None and not grows
    if decays_over_all and None not in (horizon, length) and horizon != length:
        notes.append(
            f"the learning rate now decays over {length} iterations, not the checkpoint's {horizon}: "
            f"--lr-decay-iters {horizon} would keep that"
        )
    return notes, problem
