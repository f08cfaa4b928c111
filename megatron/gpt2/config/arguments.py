"""Parse a command line, and merge it with a preset and the loaded checkpoint.

A value is taken from the last of these sources that has it:

    1. the defaults of the fields
    2. the preset (`--model`, or `quickstart` if no shape is given) or the run of a `--config`
    3. the loaded checkpoint: its shape, tokenizer and schedule; instead of the quickstart, all its values except
       layout and saving
    4. the command line

`--a_b` is read as `--a-b`. Abbreviated flags are errors, so that a typing error cannot select a different flag.
"""

import contextlib
import dataclasses
import difflib
import re
import string
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from data_utils import BatchSchedule, kind_of_vocabulary
from data_utils.command_line import require
from megatron.gpt2.config.compat import (
    MEGATRON_RULES,
    OTHER_VALUES,
    apply_rules,
    find_rule,
    iterations_to_profile,
    read_deepspeed_config,
)
from megatron.gpt2.config.flags import build_parser, with_dashes
from megatron.gpt2.config.presets import ADAM_QUICKSTART, DEFAULT_TRAIN_ITERS, PRESETS, SHAPE_KEYS, read_config
from megatron.gpt2.config.sections import (
    SECTIONS,
    CheckpointConfig,
    Config,
    config_fields,
    flag_name,
    flatten_sections,
)

LENGTH_KEYS = ("train.train_iters", "train.train_samples", "train.train_tokens", "train.train_epochs")
WARMUP_KEYS = ("optimizer.lr_warmup_fraction", "optimizer.lr_warmup_iters", "optimizer.lr_warmup_samples")
DECAY_KEYS = ("optimizer.lr_decay_iters", "optimizer.lr_decay_samples", "optimizer.lr_wsd_decay_iters")
SCHEDULER_KEYS = ("optimizer.override_opt_param_scheduler", "optimizer.use_checkpoint_opt_param_scheduler")
# A loaded checkpoint decides shape and tokenizer of the model. A flag that contradicts the checkpoint is an error.
CHECKPOINT_KEYS = (
    *SHAPE_KEYS,
    "model.ffn_hidden_size",
    "model.max_position_embeddings",
    "model.vocab_size",
    "model.layernorm_epsilon",
    "model.gelu",
    "model.mup_base_width",
    "data.tokenizer_type",
)
SCHEDULE_KEYS = ("optimizer.lr", "optimizer.min_lr", "optimizer.lr_decay_style", *DECAY_KEYS, *WARMUP_KEYS)

# Groups of flags that exclude each other.
MUTUALLY_EXCLUSIVE = (
    WARMUP_KEYS,
    DECAY_KEYS[:2],
    SCHEDULER_KEYS,
    ("parallel.num_layers_per_virtual_pipeline_stage", "parallel.num_virtual_stages_per_pipeline_rank"),
    ("train.rampup_batch_size", "train.step_batch_size_schedule"),
    ("data.data_path", "data.train_data"),
    ("data.valid_data_path", "data.valid_data"),
    ("data.test_data_path", "data.test_data"),
)
# A flag of a group replaces the whole group in a preset: `--train-tokens` also removes the preset's train_iters.
REPLACED_TOGETHER = (
    LENGTH_KEYS,
    *MUTUALLY_EXCLUSIVE,
    ("train.global_batch_size", "train.gradient_accumulation_steps", "train.step_batch_size_schedule"),
    sum(MUTUALLY_EXCLUSIVE[-3:], ()),
)
# A run that continues a checkpoint takes all values from it except layout (`parallel.*`), saving (`checkpoint.*`) and
# these.
NEVER_FROM_CHECKPOINT = (
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
    *SCHEDULER_KEYS,
)


@dataclass(frozen=True)
class Arguments:
    """A parsed command line.

    values: the values of the preset or --config, of a merged checkpoint and of the command line, by "section.field".
        Other fields have their defaults.
    given: the keys of `values` that the command line decided, including shape and tokenizer of --model or --config.
    preset: the name of the preset; None if a shape or --config is given.
    notes: lines about translated and ignored flags.
    sources: {flag: the key and file of a DeepSpeed file that sets it}.
    """

    values: Mapping[str, Any]
    given: frozenset[str]
    preset: str | None
    notes: tuple[str, ...] = ()
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @cached_property
    def config(self) -> Config:
        """The validated configuration. `parse` does not validate values, because a checkpoint may change the shape."""
        with self._naming_sources():
            return Config.from_dict({section: self._values_of(section) for section in SECTIONS})

    def build_batch_schedule(self, world_size: int, consumed_samples: int = 0) -> BatchSchedule:
        """See `Config.build_batch_schedule`. An error about a value of a DeepSpeed file names its key and the file."""
        with self._naming_sources():
            return self.config.build_batch_schedule(world_size, consumed_samples)

    @contextlib.contextmanager
    def _naming_sources(self) -> Iterator[None]:
        """In a ValueError of the block, replace each flag that a DeepSpeed file sets by the key and the file."""
        try:
            yield
        except ValueError as error:
            names = "|".join(map(re.escape, self.sources)) or "$."
            raise ValueError(re.sub(rf"({names})(?![\w-])", lambda match: self.sources[match[0]], str(error))) from None

    @property
    def checkpoint(self) -> CheckpointConfig:
        """The flags of saving and loading, with which a run finds the checkpoint before `config` is built."""
        return CheckpointConfig(**self._values_of("checkpoint"))

    def _values_of(self, section: str) -> dict[str, Any]:
        prefix = section + "."
        return {key.removeprefix(prefix): value for key, value in self.values.items() if key.startswith(prefix)}

    @property
    def continues(self) -> bool:
        """Whether the run of a loaded checkpoint continues, because the command line names no model."""
        return self.preset == "quickstart" and "model.num_layers" not in self.given


def parse(argv: Sequence[str] | None = None) -> Arguments:
    """Parse a command line (default: this process's). `--help` prints and exits.

    Raises ValueError in one line for unknown flags and bad values. The first access to `config` raises ValueError for
    values that do not fit together."""
    args = [with_dashes(word) for word in (sys.argv[1:] if argv is None else argv)]
    parser = build_parser()
    namespace, rest = parser.parse_known_args(args)
    parsed = vars(namespace)
    model_name, config_file = parsed.pop("preset", None), parsed.pop("config_file", None)
    require(not (model_name and config_file), "give --model or --config, not both")
    command_line = {key: value for key, value in parsed.items() if not key.startswith("launch.")}
    megatron_flags, problems = _megatron_flags(rest, (*parser._option_string_actions, *MEGATRON_RULES))
    for key, value in command_line.items():
        if (choices := config_fields()[key].metadata["choices"]) and value not in choices:
            problems.append(
                f"{flag_name(key)} {value} is not supported: {OTHER_VALUES[value]}"
                if value in OTHER_VALUES
                else f"{flag_name(key)}: invalid choice: {value!r} (choose from {', '.join(choices)})"
            )
    translated, _, notes, refused = apply_rules(MEGATRON_RULES, megatron_flags, command_line)
    problems += refused
    command_line |= translated
    sources: dict[str, str] = {}
    if file := megatron_flags.get("--deepspeed-config") or megatron_flags.get("--deepscale-config"):
        try:
            from_file, set_by, file_notes, _ = read_deepspeed_config(file, command_line)
        except (OSError, ValueError) as error:
            problems.append(str(error))
        else:
            command_line |= from_file
            notes += file_notes
            sources = {flag_name(key): source for key, source in set_by.items()}
    require(not problems, "; ".join(problems))
    for group in MUTUALLY_EXCLUSIVE:
        given = [flag_name(key) for key in group if key in command_line]
        require(len(given) < 2, f"give {' or '.join(given)}, not {'both' if len(given) == 2 else 'all'}")
    if command_line.get("train.profile") == []:
        command_line["train.profile"] = iterations_to_profile(megatron_flags)

    own_shape = any(key in command_line for key in SHAPE_KEYS)
    preset = model_name or (None if own_shape or config_file else "quickstart")
    base = PRESETS[preset] if preset else {"train.train_iters": DEFAULT_TRAIN_ITERS}
    needs_adam = command_line.get("optimizer.optimizer") == "adam" or command_line.get("parallel.cpu_offload_optimizer")
    if preset == "quickstart" and needs_adam:
        base = base | ADAM_QUICKSTART
    values = _override_preset(read_config(config_file) if config_file else base, command_line)
    from_preset = {key for key in values if (model_name or config_file) and key in CHECKPOINT_KEYS}
    command_line = _implied_tokenizer(command_line) | command_line
    values |= command_line
    values.setdefault("checkpoint.save", _default_save(values, None if own_shape else preset))
    return Arguments(
        values, frozenset(from_preset | command_line.keys()), preset, tuple(_alias_notes(args) + notes), sources
    )


def _megatron_flags(args: Sequence[str], known_flags: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return {name: value} of Megatron's flags in `args`, and errors about unknown flags. The value is None, the word
    that follows the flag, or a list of words.

    known_flags: the flags that an error about a misspelled flag may suggest.
    """
    groups: list[tuple[str, list[str]]] = [("", [])]
    for arg in args:
        if arg.startswith("-") and arg[1:2] not in ("", ".", *string.digits):
            name, equals, value = arg.partition("=")
            groups.append((name, [value] if equals else []))
        else:
            groups[-1][1].append(arg)
    known = {flag.lower(): flag for flag in known_flags}
    found: dict[str, Any] = {}
    unknown, problems = [], []
    for name, values in groups:
        rule = find_rule(MEGATRON_RULES, name)
        takes_values = rule.names.get(name) if rule and rule.status != "refused" else None
        if not name or takes_values is False:
            problems += [f"unexpected argument {value!r}: a value must follow a flag" for value in values[:1]]
            values = []
        if rule is None:
            spelling = "" if name.startswith("--no-") else "--" + name.lstrip("-").lower()  # --no-x is not --x.
            similar = difflib.get_close_matches(spelling, known, n=1, cutoff=0.9)
            unknown += [f"{name}: did you mean {known[similar[0]]}?" if similar else name] * bool(name)
        elif values or not takes_values:
            found[name] = values if len(values) > 1 else values[0] if values else None
        else:
            problems.append(f"{name}: expected a value")
    if unknown:
        problems.append(
            f"unknown flag{'s' * (len(unknown) > 1)} {', '.join(unknown)}"
            + ("" if unknown[-1].endswith("?") else ": --help lists the flags")
        )
    return found, problems


def _alias_notes(args: Sequence[str]) -> list[str]:
    names = dict.fromkeys(arg.partition("=")[0] for arg in args)  # dict.fromkeys drops repeated names.
    flag_of = {alias: flag_name(key) for key, f in config_fields().items() for alias in f.metadata["aliases"]}
    return [f"{name} is read as {flag_of[name]}" for name in names if name in flag_of]


def _override_preset(preset: Mapping[str, Any], command_line: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the preset that the command line does not replace. If --lr is given, min_lr of the preset
    keeps its ratio to lr."""
    replaced = {key for group in REPLACED_TOGETHER if any(key in command_line for key in group) for key in group}
    values = {key: value for key, value in preset.items() if key not in replaced}
    if "optimizer.lr" in command_line and values.get("optimizer.min_lr"):
        values["optimizer.min_lr"] *= command_line["optimizer.lr"] / values["optimizer.lr"]
    return values


def _implied_tokenizer(command_line: Mapping[str, Any]) -> dict[str, str]:
    """Return the tokenizer type that the flags of tokenizer files imply."""
    gpt2 = "data.vocab_file" in command_line or "data.merge_file" in command_line
    sentencepiece = "data.tokenizer_model" in command_line
    require(
        not (gpt2 and sentencepiece) or "data.tokenizer_type" in command_line,
        "--vocab-file and --tokenizer-model are for different tokenizers: choose one with --tokenizer-type",
    )
    if gpt2:
        return {"data.tokenizer_type": kind_of_vocabulary(command_line.get("data.vocab_file", ""))}
    return {"data.tokenizer_type": "SentencePieceTokenizer"} if sentencepiece else {}


def _default_save(values: Mapping[str, Any], preset: str | None) -> str:
    """Return the default of --save: the --load folder, or a new folder for --finetune or without --load."""
    if load := values.get("checkpoint.load"):
        return load.rstrip("/") + "_finetuned" if values.get("checkpoint.finetune") else load
    if preset:
        return f"checkpoints/gpt2_{preset}"
    layers, hidden = (values.get(key, config_fields()[key].default) for key in SHAPE_KEYS[:2])
    return f"checkpoints/gpt2_{layers}x{hidden}"


def merge_checkpoint(
    arguments: Arguments, saved: Mapping[str, Mapping[str, Any]], saved_iterations: int | None = None
) -> Arguments:
    """Return `arguments` with the values that the checkpoint decides.

    saved: the `Config.as_dict()` of the checkpoint, with vocabulary size and tokenizer.
    saved_iterations: the length of the checkpoint's schedule (default: its train_iters).

    Shape and tokenizer: the checkpoint decides both. Flags that give different values raise ValueError, which names
    all of these flags in one line. --seq-length may differ from the checkpoint. If neither --seq-length nor --model is
    given, the checkpoint decides the sequence length, too.

    Other values: without --model or a shape, the run of the checkpoint continues with its data, batch, optimizer, seed
    and length. --finetune does not take the length of the checkpoint's run.

    Schedule: the checkpoint decides it like the shape, except with --finetune or --no-load-optim.
    --override-opt-param-scheduler keeps the schedule of this run. --use-checkpoint-opt-param-scheduler takes that of
    the checkpoint without an error. If neither run gives a decay length, the learning rate decays over --train-iters,
    so a greater --train-iters stretches the schedule.
    """
    old, given_flags, continues = flatten_sections(saved), arguments.given, arguments.continues
    keeps_schedule = any(
        arguments.values.get(key)
        for key in ("checkpoint.finetune", "checkpoint.no_load_optim", "optimizer.override_opt_param_scheduler")
    )
    values = _continued_values(arguments, old, keeps_schedule) if continues else dict(arguments.values)
    # A checkpoint of an older version lacks the keys of newer flags.
    saved_values = {key: old.get(key, config_fields()[key].default) for key in CHECKPOINT_KEYS}
    shape = {key: value for key, value in saved_values.items() if value is not None}
    if "model.ffn_hidden_size" in given_flags:
        shape.setdefault("model.ffn_hidden_size", 4 * old["model.hidden_size"])
    _, problem = _take_from_checkpoint(
        shape, values, given_flags, "leave these flags out, or start a new run with different --save and --load"
    )
    problems, notes = [problem], list(arguments.notes)
    if arguments.preset is None and "data.seq_length" not in given_flags:
        values["data.seq_length"] = old["data.seq_length"]
    if not keeps_schedule:
        lines, problem = _merge_schedule(values, given_flags, old, saved_iterations or old.get("train.train_iters"))
        problems.append(problem)
        notes += lines
    optimizer, old_optimizer = (run.get("optimizer.optimizer", "adam") for run in (values, old))
    lr = values.get("optimizer.lr")
    if optimizer != old_optimizer and lr == old.get("optimizer.lr") and "optimizer.lr" not in given_flags:
        problems.append(
            f"--optimizer {optimizer}: the checkpoint's --lr {lr} is for {old_optimizer}: give --lr and --no-load-optim"
        )
    require(not any(problems), "; ".join(filter(None, problems)))
    return dataclasses.replace(
        arguments, values=values, notes=tuple(notes), preset=None if continues else arguments.preset
    )


def _take_from_checkpoint(
    saved_values: Mapping[str, Any], values: dict[str, Any], given: frozenset[str], way_out: str
) -> tuple[list[str], str]:
    """Update `values` with the values of the checkpoint. Return a text for each changed flag, and an error message that
    names the changed flags of the command line, or ""."""
    current = {key: values.get(key, config_fields()[key].default) for key in saved_values}
    changed = {key: value for key, value in saved_values.items() if value != current[key]}
    values |= changed
    differing = [f"{flag_name(key)}: here {current[key]}, checkpoint {changed[key]}" for key in changed if key in given]
    problem = f"{'; '.join(differing)}: {way_out}" if differing else ""
    return [f"{flag_name(key)} {value}" for key, value in changed.items()], problem


def _continued_values(arguments: Arguments, old: Mapping[str, Any], keeps_schedule: bool) -> dict[str, Any]:
    """Return the values of the run that wrote the checkpoint, overridden by the command line."""
    left_out = NEVER_FROM_CHECKPOINT + (DECAY_KEYS if keeps_schedule else ())
    if arguments.values.get("checkpoint.finetune"):
        left_out += LENGTH_KEYS
    from_checkpoint = {
        key: value
        for key, value in old.items()
        if not key.startswith(("parallel.", "checkpoint.")) and key not in left_out
    }
    command_line = {key: arguments.values[key] for key in arguments.given}
    values = _override_preset(from_checkpoint, command_line) | command_line
    if not any(values.get(key) for key in LENGTH_KEYS):
        values["train.train_iters"] = arguments.values["train.train_iters"]
    return values | {"checkpoint.save": arguments.values["checkpoint.save"]}


def _merge_schedule(
    values: dict[str, Any], given: frozenset[str], old: Mapping[str, Any], saved_iterations: int | None
) -> tuple[list[str], str]:
    """Update `values` with the schedule of the checkpoint, see `merge_checkpoint`. Return lines for the log, and an
    error message or ""."""
    saved_schedule = {key: old.get(key, config_fields()[key].default) for key in SCHEDULE_KEYS}
    horizon = saved_schedule["optimizer.lr_decay_iters"] or (
        None if saved_schedule["optimizer.lr_decay_samples"] else saved_iterations
    )
    if values.get("optimizer.use_checkpoint_opt_param_scheduler"):
        values |= saved_schedule | {"optimizer.lr_decay_iters": horizon}
        return [], ""
    if "optimizer.lr_warmup_fraction" in given:
        given |= set(WARMUP_KEYS)
    if any(run.get(key) is not None for run in (values, saved_schedule) for key in WARMUP_KEYS[1:]):
        del saved_schedule["optimizer.lr_warmup_fraction"]
    if saved_schedule["optimizer.lr_decay_iters"] is None:
        if "optimizer.lr_decay_iters" in given:
            saved_schedule["optimizer.lr_decay_iters"] = horizon
        else:
            del saved_schedule["optimizer.lr_decay_iters"]
    changes, problem = _take_from_checkpoint(
        saved_schedule,
        values,
        given,
        "--override-opt-param-scheduler takes the schedule of this run, --use-checkpoint-opt-param-scheduler that of "
        "the checkpoint",
    )
    return [f"schedule from the checkpoint: {' '.join(changes)}"] if changes else [], problem
