"""Read and write Adam's state, the loss scaler and the learning-rate schedule in the forms of Megatron 2019, and of v2
and later. Read Adam's state that DeepSpeed has sharded.

A rank saves fp32 masters and moments in lists without names: first weights and embeddings, then biases and layer norms,
both in the order of the file's model.

DeepSpeed's ZeRO 1 and 2 concatenate each group of parameters to one flat vector. Every data-parallel rank saves an
equal part of the vectors; padding is at the end. `param_shapes` of the model's file has the order of the parameters.
Older files without `param_shapes` have the model's order.
"""

import itertools
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from data_utils.command_line import Log, require
from megatron.gpt2.checkpoint.interface import BaseCheckpoint, TensorInfo
from megatron.gpt2.config import OptimizerConfig
from megatron.gpt2.formats.foreign_checkpoint import (
    OPTIMIZER_KINDS,
    Entries,
    LazyTensor,
    LazyTensors,
    TensorsByKind,
    adam_metadata,
    adam_param_groups,
    names_by_group,
    optimizer_config,
    read_adam,
    same_step,
    short_repr,
)
from megatron.gpt2.formats.megatron_model import TRAIN_ARGS, namespace_dict, native_name
from megatron.gpt2.formats.torch_files import load_torch_file
from megatron.gpt2.model.gpt2 import TIED_WEIGHT
from megatron.gpt2.optimizer.optimizer import MOMENTS

# For each parameter of each param group, there is a dictionary of tensors by kind.
ParamGroups = list[list[dict[str, Tensor]]]
# (tensors by kind and our name, saved optimizer with the loss scaler, Adam's param groups, number of steps)
RankOptimizer = tuple[dict[str, LazyTensors], Entries, list[Any], int]


class ScheduleKeys(NamedTuple):
    """The keys that a version of Megatron uses for the values of its schedule."""

    peak: str
    style: str
    warmup: str
    end: str
    done: str


SCHEDULE_KEYS = {  # Megatron of 2019 counts iterations, later versions count samples.
    "megatron-2019": ScheduleKeys("start_lr", "decay_style", "warmup_iter", "end_iter", "num_iters"),
    "megatron-v2": ScheduleKeys("max_lr", "decay_style", "warmup_steps", "decay_steps", "num_steps"),
    "megatron-v3": ScheduleKeys("max_lr", "lr_decay_style", "lr_warmup_steps", "lr_decay_steps", "num_steps"),
}
DECAY_STYLES = {"cosine": "cosine-2019", "None": "constant"}  # {name in Megatron 2019: our name}
PROGRESS = {"consumed_samples": "consumed_train_samples"} | {n: n for n in ("train_iters", "global_batch_size")}


# --- read


def progress_metadata(args: Entries) -> dict[str, Any]:
    """Return the run's progress and its flags from Megatron's arguments, under our manifest's names."""
    train = {name: args[name] for name in TRAIN_ARGS if type(args.get(name)) is int}
    progress = {name: args[argument] for name, argument in PROGRESS.items() if type(args.get(argument)) is int}
    return {**progress, "config": {"train": train}}


def read_rank_optimizer(optimizer: Any, weights: LazyTensors) -> RankOptimizer:
    """Read the optimizer of a rank. Raises the errors of `read_adam`.

    weights: the weights of the same file, in the order of the file.
    """
    # Megatron of 2019 and Megatron since v2 use different keys. With fp32 weights there are no masters, and `optimizer`
    # is Adam's state.
    adam = optimizer.get("optimizer_state_dict", optimizer.get("optimizer", optimizer))
    masters = optimizer.get("fp32_from_fp16", optimizer.get("fp32_from_fp16_params"))
    states, groups, step = read_adam(adam, weights, masters or ())
    return states, optimizer, groups, step


def read_zero_optimizer(files: Sequence[Path], top: Entries, weights: LazyTensors) -> RankOptimizer:
    """Read the optimizer of a rank that DeepSpeed sharded.

    files: the files by data-parallel rank.
    top, weights: the dictionary and the weights in the model's file of the rank.

    Raises one of `PARSE_ERRORS` if the files do not belong together.
    """
    parts = [load_torch_file(file)["optimizer_state_dict"] for file in files]
    rank_0, adams = parts[0], [part["base_optimizer_state"] for part in parts]
    count = rank_0["partition_count"]
    count = max(count) if isinstance(count, list) else count
    require(count == len(files), f"{len(files)} of {count} files of data-parallel ranks like {files[0].name} are there")
    # With --elastic-checkpoint, `base_optimizer_state` is a list: the state of each group, without settings.
    elastic = isinstance(adams[0], list)
    moments = adams if elastic else [adam["state"] for adam in adams]
    groups = [] if elastic else adams[0]["param_groups"]
    names = [list(map(native_name, shapes)) for shapes in top.get("param_shapes") or ()] or names_by_group(weights)
    states: TensorsByKind = {kind: {} for kind in OPTIMIZER_KINDS}
    # The number of AdamW's steps is in a group's settings, in its state, or in the file.
    steps = [settings["step"] for settings in groups if "step" in settings]
    for number, in_order in enumerate(names):
        flat = {"master": [part["single_partition_of_fp32_groups"][number] for part in parts]}
        flat |= {moment: [each[number][moment] for each in moments] for moment in MOMENTS}
        position = 0
        for name in in_order:
            info = TensorInfo(torch.float32, weights[name].info.shape)
            for kind, vectors in flat.items():
                states[kind][name] = LazyTensor(info, partial(_slice, vectors, position, info.shape))
            position += math.prod(info.shape)
        unused = sum(map(len, flat["master"])) - position
        require(0 <= unused <= 4 * count, f"group {number} has {unused} values more than the model")
        steps += [each[number]["step"] for each in moments if "step" in each[number]]
    return states, rank_0, groups, same_step(steps or [rank_0["base_optimizer_state_step"]])  # type: ignore[return-value]


def _slice(vectors: Sequence[Tensor], start: int, shape: tuple[int, ...]) -> Tensor:
    """Return the tensor of `shape` from value `start` of the concatenated `vectors`."""
    end, begins = start + math.prod(shape), itertools.accumulate(map(len, vectors), initial=0)
    parts = [x[max(start - begin, 0) : max(end - begin, 0)] for x, begin in zip(vectors, begins, strict=False)]
    return torch.cat(parts).view(shape)


def megatron_adam_metadata(
    top: Entries, optimizer: Entries, groups: Sequence[Any], step: int, left_out: list[str]
) -> dict[str, Any]:
    """Return the metadata of Adam's state, with our flags for the schedule, the loss scale and AdamW. `left_out` gets a
    line for each setting that our flags do not have.

    top: all entries of the file.
    optimizer: the entry with the optimizer.
    groups: Adam's param groups.
    """
    args = namespace_dict(top.get("args"))
    flags: dict[str, Any] = {"clip_grad": args["clip_grad"]} if type(args.get("clip_grad")) is float else {}
    scaler = {"scale": 1.0}
    if "loss_scaler" in optimizer:  # the key in files of Megatron 2019 and of DeepSpeed
        saved: Any = namespace_dict(optimizer["loss_scaler"])
        scaler["scale"] = saved["cur_scale"]
        if optimizer.get("dynamic_loss_scale"):
            scaler["clean_steps"] = saved["cur_iter"] - saved["last_overflow_iter"] - 1
            scaler["hysteresis_left"] = saved["cur_hysteresis"]
            flags["loss_scale_window"] = int(saved["scale_window"])
            flags["hysteresis"] = int(saved["delayed_shift"])
            flags["min_loss_scale"] = float(saved["min_scale"])
    elif saved := optimizer.get("grad_scaler"):
        scaler["scale"] = saved["scale"]
        if "growth_tracker" in saved:
            scaler["clean_steps"] = saved["growth_tracker"]
            # Megatron's loss-scale tracker goes below 1, and ours stays at 1. With a tracker of at most 1, both
            # programs halve the scale at every overflow.
            scaler["hysteresis_left"] = max(1, saved["hysteresis_tracker"])
    num_updates, schedule_flags = _read_scheduler(top, args, step, left_out)
    skipped = max(0, top.get("iteration", top.get("total_iters", num_updates)) - num_updates)
    numbers = {name: float(value) for name, value in scaler.items()}
    progress = {"num_updates": num_updates, "skipped_steps": skipped, "loss_scaler": numbers}
    return adam_metadata(step, groups, {**flags, **schedule_flags}, **progress)


def _read_scheduler(top: Entries, args: Entries, step: int, left_out: list[str]) -> tuple[int, dict[str, Any]]:
    """Read the learning rate schedule. Return the number of optimizer steps that were not skipped, and the schedule as
    {field of OptimizerConfig: value}."""
    saved = top.get("lr_scheduler") or top.get("opt_param_scheduler") or {}
    version = next((version for version, names in SCHEDULE_KEYS.items() if names.end in saved), None)
    is_2019 = version == "megatron-2019"
    unit: Any = 1 if is_2019 else args.get("global_batch_size")
    if version is None or type(unit) is not int:
        left_out += ["the schedule: its form or its global batch size is unknown"] * bool(saved)
        return step, {}
    names = SCHEDULE_KEYS[version]
    style, end = saved[names.style], int(saved[names.end])
    if is_2019:
        style = DECAY_STYLES.get(style, style)
        if style in ("linear", "exponential"):
            left_out.append(f"the {style} schedule of 2019: the formula of today is used, which is close to it")
    grows = args.get("rampup_batch_size") or args.get("step_batch_size_schedule")
    num_updates = step if grows else int(saved[names.done]) // unit
    if style not in OptimizerConfig.__dataclass_fields__["lr_decay_style"].metadata["choices"]:
        left_out.append(f"the schedule: its style {short_repr(style)} is unknown")
        return num_updates, {}
    # Megatron fills in --train-iters if there is no --lr-decay-iters. The decay then follows the length of the new run.
    length, decay = ("samples", end) if end % unit else ("iters", end // unit)
    fixed = {} if decay == args.get(f"train_{length}") else {f"lr_decay_{length}": decay}
    return num_updates, {
        "lr": float(saved[names.peak]),
        "min_lr": float(saved.get("min_lr", 0.0)),
        "lr_decay_style": style,
        "lr_warmup_fraction": float(saved[names.warmup]) / end,
        **fixed,
    }


# --- write


def optimizer_state_dict(source: BaseCheckpoint, groups: ParamGroups, format: str) -> dict[str, Any]:
    """Return the entry `optimizer` of a rank's file. In the format megatron-2019, Megatron's files have an object as
    the loss scaler, and ours have a dictionary. For fp32 weights, later formats have only Adam's state, because the
    weights are the masters."""
    numbered = [{moment: states[moment] for moment in MOMENTS} for group in groups for states in group]
    num_decayed, param_groups = len(groups[0]), megatron_param_groups(source)
    param_groups[0]["params"] = list(range(num_decayed))
    param_groups[1]["params"] = list(range(num_decayed, len(numbered)))
    adam = {"state": dict(enumerate(numbered)), "param_groups": param_groups}  # in the form of Apex's FusedAdam
    masters = [[states["master"] for states in group] for group in groups]
    if format != "megatron-2019":
        if source.tensors[f"model.{TIED_WEIGHT}"].dtype == torch.float32:
            return adam
        return {"optimizer": adam, "fp32_from_fp16_params": masters, **grad_scaler_state_dict(source)}
    config, scaler = optimizer_config(source), source.metadata["optimizer"]["loss_scaler"]
    return {
        "loss_scaler": {
            "cur_scale": float(scaler["scale"]),
            "cur_iter": source.iteration,
            "last_overflow_iter": source.iteration - int(scaler.get("clean_steps", 0)) - 1,
            "scale_factor": 2.0,
            "scale_window": config.loss_scale_window,
            "min_scale": config.min_loss_scale,
            "delayed_shift": config.hysteresis,
            "consecutive_hysteresis": False,
            "cur_hysteresis": int(scaler.get("hysteresis_left", config.hysteresis)),
        },
        "dynamic_loss_scale": "clean_steps" in scaler,
        "overflow": False,
        "first_closure_call_this_step": True,
        "optimizer_state_dict": adam,
        "fp32_from_fp16": masters,
    }


def grad_scaler_state_dict(source: BaseCheckpoint) -> dict[str, Any]:
    """Return {"grad_scaler": state of the loss scaler} of Megatron v2 and later, or {} if the weights are not fp16."""
    if source.tensors[f"model.{TIED_WEIGHT}"].dtype != torch.float16:
        return {}
    scaler = source.metadata["optimizer"]["loss_scaler"]
    state: dict[str, Any] = {"scale": torch.tensor([float(scaler["scale"])])}
    if "clean_steps" in scaler:
        state |= {"growth_tracker": int(scaler["clean_steps"]), "hysteresis_tracker": int(scaler["hysteresis_left"])}
    return {"grad_scaler": state}


def megatron_param_groups(source: BaseCheckpoint) -> list[dict[str, Any]]:
    """Return Adam's param groups with and without weight decay. Since v2, Megatron multiplies the learning rate and the
    decay by `lr_mult` and `wd_mult` of each group. Megatron Core identifies groups by `lr_mult`, `wd_mult` and the two
    `is_...` keys."""
    config = optimizer_config(source)
    return [
        {
            **group,
            "max_lr": config.lr,
            "min_lr": config.min_lr,
            "bias_correction": True,
            "step": source.metadata["optimizer"]["adam_steps"],
            "wd_mult": decays,
            "lr_mult": 1.0,
            "is_expert_parallel": False,
            "is_decoupled_lr": False,
            "default_config": True,
        }
        for group, decays in zip(adam_param_groups(source), (1.0, 0.0), strict=True)
    ]


def scheduler_state_dict(source: BaseCheckpoint, format: str, log: Log) -> dict[str, Any] | None:
    """Return the entry `lr_scheduler` of Megatron 2019 and v2, or `opt_param_scheduler` of v3. Return None if the
    format does not have the schedule of `source`."""
    config, metadata = optimizer_config(source), source.metadata
    style, is_2019 = config.lr_decay_style, format == "megatron-2019"
    batch: Any = metadata.get("global_batch_size")
    length: Any = metadata.get("train_iters")
    has_style = style != "WSD" if is_2019 else style in ("linear", "cosine", "constant")
    if not has_style or not (is_2019 or batch):
        why = "the source does not contain its global batch size" if has_style else f"{format} has no {style}"
        log(f"left out: the schedule: {why}")
        return None
    if is_2019 and style not in ("constant", "cosine-2019"):
        log(f"the formula of 2019 for the {style} schedule is close to that of today, but not equal")
    warmup, end = config.warmup_and_decay(metadata.get("decay_iters") or length or source.iteration, batch or 1)
    names, unit = SCHEDULE_KEYS[format], 1 if is_2019 else batch
    train, done = metadata["config"].get("train", {}), metadata["optimizer"]["num_updates"] * unit
    if not is_2019 and (train.get("rampup_batch_size") or train.get("step_batch_size_schedule")):
        done = metadata["consumed_samples"]
    state = {
        names.peak: config.lr,
        "min_lr": config.min_lr,
        names.style: style.removesuffix("-2019"),
        names.warmup: warmup * unit,
        names.end: end if is_2019 else round(end * unit),
        names.done: done,
    }
    if format == "megatron-v3":
        state |= dict.fromkeys(("start_wd", "end_wd"), config.weight_decay)
        state |= {"wd_incr_style": "constant", "wd_incr_steps": round((length or end) * unit)}
    return state
