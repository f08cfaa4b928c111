"""A DeepSpeed configuration file as flags: one table of its keys, as `foreign_flags.py` has one of flags.

A key is translated, inert (it changes nothing here, which a note says) or refused with the alternative. A value of
`false`, `null`, `"auto"` or `{}`, and a section with `"enabled": false`, ask for nothing. A flag of the command line
wins over the file, which a note says.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from megatron.gpt2.config import require
from megatron.gpt2.config.flag_names import flag
from megatron.gpt2.config.foreign_flags import (
    FP16,
    NO_STAGE_3,
    OVERLAPS,
    STAGE,
    Foreign,
    inert,
    of_zero_stage,
    refused,
    translated,
)


def _shown(value: Any) -> str:
    """A value or key of the file for a message: whatever it holds, in one line that is not too long."""
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:76]}...{text[-1]}"


def _number(key: str, kind: type = float) -> Callable[[Any], dict[str, Any]]:
    def read(value: Any) -> dict[str, Any]:
        require(
            isinstance(value, (int, float)) and not isinstance(value, bool) and kind(value) == value,
            f"{_shown(value)} is not a {'whole ' if kind is int else ''}number",
        )
        return {key: kind(value)}

    return read


def _stage(value: Any) -> dict[str, Any]:
    require(isinstance(value, int) and 0 <= value <= 3, f"{_shown(value)} is no stage of ZeRO")
    require(value != 3, f"3 is not built: {NO_STAGE_3}")
    return of_zero_stage(value)


def _loss_scale(value: Any) -> dict[str, Any]:
    return _number("optimizer.loss_scale")(value) if value else {}  # 0 is a dynamic one


def _initial_scale(power: Any) -> dict[str, Any]:
    return {"optimizer.initial_loss_scale": 2.0 ** _number("", int)(power)[""]}


def _betas(value: Any) -> dict[str, Any]:
    require(isinstance(value, list) and len(value) == 2, f"{_shown(value)} is not a pair of numbers")
    return {**_number("optimizer.adam_beta1")(value[0]), **_number("optimizer.adam_beta2")(value[1])}


OFFLOAD = {"parallel.cpu_offload_optimizer": True}
LOGGED = "what is logged is fixed, every --log-interval iterations"

KEYS = (
    translated("train_batch_size", "read as --global-batch-size", _number("train.global_batch_size", int)),
    translated("train_micro_batch_size_per_gpu", "read as --micro-batch-size", _number("train.micro_batch_size", int)),
    translated(
        "gradient_accumulation_steps",
        "read as --gradient-accumulation-steps, unless there is a batch size",
        _number("train.gradient_accumulation_steps", int),
    ),
    translated("gradient_clipping", "read as --clip-grad", _number("optimizer.clip_grad")),
    inert(
        "steps_per_print wall_clock_breakdown dump_state memory_breakdown tensorboard wandb csv_monitor comms_logger "
        "flops_profiler",
        LOGGED,
    ),
    # Precision
    translated("fp16.enabled", "read as --precision fp16-on-gpu, which is auto on a CPU", lambda _: FP16),
    translated("bf16.enabled bfloat16.enabled", "read as --precision bf16", lambda _: {"train.precision": "bf16"}),
    translated("fp16.loss_scale", "read as --loss-scale, 0 being dynamic", _loss_scale),
    translated("fp16.initial_scale_power", "read as --initial-loss-scale, its power of 2", _initial_scale),
    translated("fp16.loss_scale_window", "read as --loss-scale-window", _number("optimizer.loss_scale_window", int)),
    translated("fp16.hysteresis", "read as --hysteresis", _number("optimizer.hysteresis", int)),
    translated("fp16.min_loss_scale", "read as --min-loss-scale", _number("optimizer.min_loss_scale")),
    inert("fp32_allreduce prescale_gradients", "gradients are reduced in fp32"),
    translated(
        "communication_data_type",
        "read as --grad-reduce-in-bf16",
        lambda kind: {} if kind == "fp32" else {"parallel.grad_reduce_in_bf16": True},
        accepts=("fp32", "bf16", "bfp16"),
    ),
    refused("fp16.auto_cast fp16.consecutive_hysteresis amp", "--precision fp16 and bf16 are the two ways"),
    # Memory
    translated("zero_optimization.stage", STAGE, _stage),
    translated("zero_optimization.cpu_offload", "read as --cpu-offload-optimizer", lambda _: OFFLOAD),
    translated(
        "zero_optimization.offload_optimizer.device",
        "read as --cpu-offload-optimizer",
        lambda device: OFFLOAD if device == "cpu" else {},
        accepts=("cpu", "none"),
    ),
    inert(
        "zero_optimization.offload_optimizer.pin_memory zero_optimization.cpu_offload_use_pin_memory",
        "what moves between host and GPU is pinned",
    ),
    translated(
        "zero_optimization.reduce_bucket_size", "read as --ddp-bucket-size", _number("parallel.ddp_bucket_size", int)
    ),
    inert(
        "zero_optimization.overlap_comm zero_optimization.allgather_partitions zero_optimization.reduce_scatter "
        "zero_optimization.allgather_bucket_size zero_optimization.contiguous_gradients "
        "zero_optimization.round_robin_gradients",
        OVERLAPS,
    ),
    inert(
        "zero_optimization.load_from_fp32_weights zero_optimization.elastic_checkpoint",
        "checkpoints hold fp32 weights, for every layout",
    ),
    refused(
        "zero_optimization.offload_param zero_optimization.cpu_offload_params",
        "--model-parallel-size divides the weights, --cpu-offload-optimizer moves the optimizer",
    ),
    translated(
        "activation_checkpointing.partition_activations",
        "read as --partition-activations",
        lambda _: {"parallel.partition_activations": True},
    ),
    translated(
        "activation_checkpointing.cpu_checkpointing",
        "read as --checkpoint-in-cpu",
        lambda _: {"parallel.checkpoint_in_cpu": True},
    ),
    inert(
        "activation_checkpointing.contiguous_memory_optimization activation_checkpointing.number_checkpoints "
        "activation_checkpointing.synchronize_checkpoint_boundary activation_checkpointing.profile",
        "--checkpoint-activations recomputes, with one implementation",
    ),
    # Optimizer and schedule
    inert("zero_allow_untested_optimizer zero_force_ds_cpu_optimizer", "the optimizer is AdamW"),
    inert("optimizer.params.max_grad_norm", "gradient_clipping is what clips, in DeepSpeed as well"),
    inert("optimizer.type", "the optimizer is AdamW", accepts=("Adam", "AdamW")),
    translated("optimizer.params.lr", "read as --lr", _number("optimizer.lr")),
    translated("optimizer.params.betas", "read as --adam-beta1 and --adam-beta2", _betas),
    translated("optimizer.params.eps", "read as --adam-eps", _number("optimizer.adam_eps")),
    translated("optimizer.params.weight_decay", "read as --weight-decay", _number("optimizer.weight_decay")),
    inert(
        "optimizer.params.adam_w_mode optimizer.params.bias_correction optimizer.params.torch_adam",
        "the optimizer is AdamW",
        accepts=(True,),
    ),
    refused("scheduler", "--lr-decay-style, --lr-decay-iters, --lr-warmup-iters and --min-lr are the schedule"),
    # What would be another run
    refused("sparse_gradients sparse_attention", "gradients and attention are dense"),
    refused(
        "progressive_layer_drop curriculum_learning data_efficiency compression_training quantize_training "
        "eigenvalue elasticity autotuning pipeline",
        "not built; take it out",
    ),
)
ROWS: dict[str, Foreign] = {key: row for row in KEYS for key in row.flags}
# DeepSpeed takes these without "true" asking for something.
ALWAYS_READ = ("optimizer.params.adam_w_mode", "optimizer.params.bias_correction")


def translate(path: str, command_line: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """What the file sets beside `command_line` ("section.field" to value, as given), and the lines about it.

    ValueError or FileNotFoundError where it is no such file; ValueError names all that is refused in one line.
    """
    values: dict[str, Any] = {}
    said: dict[str, list[str]] = {}
    problems, unknown = [], []
    content = _read(path)
    for key, value in _leaves(content):
        row = ROWS.get(key)
        spelled = f"{key} {_shown(value)}" if not isinstance(value, dict) else key
        if row is None:
            unknown.append(_shown(key)[1:-1])
        elif row.status == "refused":
            problems.append(f"{key}: {row.text}")
        elif row.accepts and value not in row.accepts:
            problems.append(f"{spelled} is not supported, only {' or '.join(map(json.dumps, row.accepts))}: {row.text}")
        else:
            try:
                meant = row.sets(value) if row.sets else {}
            except (ValueError, OverflowError) as error:
                problems.append(f"{key}: {error}")
                continue
            text = row.text if row.status == "translated" else f"without effect here: {row.text}"
            for name in meant.keys() & command_line.keys():
                if command_line[name] != meant[name]:
                    text = f"without effect, since {flag(name)} {command_line[name]} is given"
            if meant or row.status == "inert":
                said.setdefault(text, []).append(spelled)
            values |= {name: new for name, new in meant.items() if name not in command_line}
    problems += _batch(values, command_line)
    if "train.global_batch_size" in {*values, *command_line}:
        values.pop("train.gradient_accumulation_steps", None)
    require(not problems, f"--deepspeed_config {path}: {'; '.join(problems)}")
    notes = [f"{path}: {', '.join(keys)}: {text}" for text, keys in said.items()]
    if unknown:
        notes.append(f"WARNING: {path}: {', '.join(unknown)}: unknown here, and without effect")
    return values, notes


def _batch(values: Mapping[str, Any], command_line: Mapping[str, Any]) -> Iterator[str]:
    """Problems with the batch. DeepSpeed wants two of micro-batch, accumulation and batch; the number of ranks, which
    gives the third, is not known here."""
    if "train.global_batch_size" in values and "train.micro_batch_size" not in {*values, *command_line}:
        yield "train_batch_size: give --micro-batch-size as well, the samples that one rank takes at once"


def _read(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except OSError as error:
        raise FileNotFoundError(f"--deepspeed_config {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--deepspeed_config {path} is not JSON: {error}") from None
    require(isinstance(content, dict), f"--deepspeed_config {path} is not a JSON object")
    if content.get("zero_optimization") is True:
        content["zero_optimization"] = {"stage": 1}  # the spelling of early 2020
    return dict(content)


def _leaves(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The keys that ask for something, with dots, down to those of the table."""
    for name, value in section.items():
        key = prefix + name
        if key not in ALWAYS_READ and (value is None or value is False or value == "auto" or value == {}):
            continue
        if isinstance(value, dict) and value.get("enabled") is False:
            continue
        if key == "zero_optimization.offload_param" and isinstance(value, dict) and value.get("device") == "none":
            continue
        if isinstance(value, dict) and key not in ROWS:
            yield from _leaves(value, f"{key}.")
        else:
            yield key, value
