"""Adam's state, the loss scaler and the schedule in Megatron's forms, read and written: 2019's, and that of v2 and later.

A rank keeps lists of fp32 masters and of moments, without names: weights and embeddings first, biases and layer norms
second, both in the order of the file's models. The order is taken if the shapes and the first row of every master,
rounded as the weights are, agree with the file's own model; otherwise the state is left out.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.gpt2.checkpoint.source import Source
from megatron.gpt2.config import OptimizerConfig, require
from megatron.gpt2.formats.foreign import OPTIMIZER, TABLE, adam_facts, adam_groups, optimizer_config, short_repr
from megatron.gpt2.formats.megatron_model import attributes
from megatron.gpt2.optimizer.optimizer import MOMENTS

Groups = list[list[dict[str, Tensor]]]  # of the parameters that decay, and of the others, what each has by kind


class ScheduleNames(NamedTuple):
    """What a version of Megatron calls the numbers of its schedule."""

    peak: str
    style: str
    warmup: str
    end: str
    done: str


SCHEDULES = {  # 2019 counts iterations, later versions samples
    "megatron-2019": ScheduleNames("start_lr", "decay_style", "warmup_iter", "end_iter", "num_iters"),
    "megatron-v2": ScheduleNames("max_lr", "decay_style", "warmup_steps", "decay_steps", "num_steps"),
    "megatron-v3": ScheduleNames("max_lr", "lr_decay_style", "lr_warmup_steps", "lr_decay_steps", "num_steps"),
}
STYLES = {"cosine": "cosine-2019", "None": "constant"}  # of 2019, which are called otherwise here


# --- read


def run_facts(args: Mapping[str, Any]) -> dict[str, Any]:
    """What the arguments say of the run's progress, under our manifest's names."""
    names = {
        "consumed_samples": "consumed_train_samples",
        "train_iters": "train_iters",
        "global_batch_size": "global_batch_size",
    }
    return {name: args[theirs] for name, theirs in names.items() if type(args.get(theirs)) is int}


def rank_state(held: Any, weights: Mapping[str, Tensor]) -> tuple[dict[str, dict[str, Tensor]], list[Any], int]:
    """Masters and moments by kind and parameter, out of the optimizer of a rank's file; its groups; Adam's steps.

    weights: of the same file, in its order. ValueError if the state is not theirs.
    """
    inner = held.get("optimizer_state_dict", held.get("optimizer", held))  # 2019's name, v2's, and fp32's
    masters = held.get("fp32_from_fp16", held.get("fp32_from_fp16_params"))  # in fp32 the weights are their own
    groups, moments = inner["param_groups"], inner["state"]
    states: dict[str, dict[str, Tensor]] = {kind: {} for kind in OPTIMIZER}
    steps = set()
    for group, own in zip(groups, masters or [None] * len(groups), strict=True):
        numbers = list(map(operator.index, group["params"]))
        decays = moments[numbers[0]]["exp_avg"].dim() > 1
        named = {name: weight for name, weight in weights.items() if (weight.dim() > 1) == decays}
        for (name, weight), number, master in zip(named.items(), numbers, own or named.values(), strict=True):
            require(torch.equal(master[:1].to(weight.dtype), weight[:1]), f"master {number} is not {name}")
            for kind, x in {"master": master, **{moment: moments[number][moment] for moment in MOMENTS}}.items():
                require(x.shape == weight.shape and name not in states[kind], f"{kind} {number} is not that of {name}")
                states[kind][name] = x
            steps.add(int(group["step"] if "step" in group else moments[number]["step"]))
    require(len(steps) == 1, f"steps {sorted(steps)[:5]}")
    return states, groups, steps.pop()


def megatron_adam_facts(
    top: Mapping[str, Any], held: Mapping[str, Any], groups: Sequence[Any], step: int, left_out: list[str]
) -> dict[str, Any]:
    """The facts of Adam's state, and our flags of the schedule, the scale and AdamW; `left_out` gets what those cannot
    say.

    top: what stands next to the weights. held: the optimizer's part of it. groups: of parameters, with Adam's numbers.
    """
    args = attributes(top.get("args"))
    flags: dict[str, Any] = {"clip_grad": args["clip_grad"]} if type(args.get("clip_grad")) is float else {}
    scaler, said = {"scale": 1.0}, held.get("grad_scaler")
    if "loss_scaler" in held:  # 2019
        said = attributes(held["loss_scaler"])
        scaler = {"scale": float(said["cur_scale"])}
        if held.get("dynamic_loss_scale"):
            scaler["clean_steps"] = float(said["cur_iter"] - said["last_overflow_iter"] - 1)
            scaler["hysteresis_left"] = float(said["cur_hysteresis"])
            flags["loss_scale_window"] = int(said["scale_window"])
            flags["hysteresis"] = int(said["delayed_shift"])
            flags["min_loss_scale"] = float(said["min_scale"])
    elif said:
        scaler = {"scale": float(said["scale"])}
        if "growth_tracker" in said:
            scaler["clean_steps"] = float(said["growth_tracker"])
            # Theirs goes on below 1, where ours stays: both halve at every overflow from there on.
            scaler["hysteresis_left"] = float(max(1, said["hysteresis_tracker"]))
    good, more = _schedule(top, args, step, left_out)
    skipped = max(0, top.get("iteration", top.get("total_iters", good)) - good)
    progress = {"good_steps": good, "skipped_steps": skipped, "loss_scaler": scaler}
    return adam_facts(step, groups, {**flags, **more}, **progress)


def _schedule(
    top: Mapping[str, Any], args: Mapping[str, Any], step: int, left_out: list[str]
) -> tuple[int, dict[str, Any]]:
    """The steps that were not skipped, and our flags."""
    said = top.get("lr_scheduler") or top.get("opt_param_scheduler") or {}
    version = next((version for version, names in SCHEDULES.items() if names.end in said), None)
    old = version == "megatron-2019"
    unit: Any = 1 if old else args.get("global_batch_size")
    if version is None or type(unit) is not int:
        left_out.append("the schedule")
        return step, {}
    names = SCHEDULES[version]
    style, end = said[names.style], int(said[names.end])
    if old:
        style = STYLES.get(style, style)
        if style in ("linear", "exponential"):
            left_out.append(f"2019's form of the {style} schedule: today's, which is close to it, takes its place")
    grows = args.get("rampup_batch_size") or args.get("step_batch_size_schedule")
    good_steps = step if grows else int(said[names.done]) // unit
    if style not in OptimizerConfig.__dataclass_fields__["lr_decay_style"].metadata["choices"]:
        left_out.append(f"the schedule: its style {short_repr(style)} is unknown here")
        return good_steps, {}
    return good_steps, {
        "lr": float(said[names.peak]),
        "min_lr": float(said.get("min_lr", 0.0)),
        "lr_decay_style": style,
        "warmup": float(said[names.warmup]) / end,
        **({"lr_decay_samples": end} if end % unit else {"lr_decay_iters": end // unit}),
    }


# --- written


def optimizer_state(source: Source, groups: Groups, format: str) -> dict[str, Any]:
    """`optimizer` of a rank's file. 2019's loss scaler, a class there, is a dictionary here. In fp32 later versions keep
    only Adam's state: the weights are their own masters."""
    numbered = [{moment: states[moment] for moment in MOMENTS} for group in groups for states in group]
    first, said = len(groups[0]), param_groups(source)
    said[0]["params"], said[1]["params"] = list(range(first)), list(range(first, len(numbered)))
    adam = {"state": dict(enumerate(numbered)), "param_groups": said}  # as Apex's FusedAdam has it
    masters = [[states["master"] for states in group] for group in groups]
    if format != "megatron-2019":
        if source.tensors[f"model.{TABLE}"].dtype == torch.float32:
            return adam
        return {"optimizer": adam, "fp32_from_fp16_params": masters, **grad_scaler(source)}
    config, scaler = optimizer_config(source), source.facts["optimizer"]["loss_scaler"]
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


def grad_scaler(source: Source) -> dict[str, Any]:
    """The loss scaler of v2 and later under its name; nothing if the weights are not in fp16."""
    if source.tensors[f"model.{TABLE}"].dtype != torch.float16:
        return {}
    scaler = source.facts["optimizer"]["loss_scaler"]
    said: dict[str, Any] = {"scale": torch.tensor([float(scaler["scale"])])}
    if "clean_steps" in scaler:
        said |= {"growth_tracker": int(scaler["clean_steps"]), "hysteresis_tracker": int(scaler["hysteresis_left"])}
    return {"grad_scaler": said}


def param_groups(source: Source) -> list[dict[str, Any]]:
    """Adam's numbers of the parameters that decay, and of those that do not. Since v2 Megatron multiplies the rate and
    the decay by a number of each group; Megatron Core knows the groups by these and by two names more."""
    config = optimizer_config(source)
    return [
        {
            **group,
            "max_lr": config.lr,
            "min_lr": config.min_lr,
            "bias_correction": True,
            "step": source.facts["optimizer"]["adam_steps"],
            "wd_mult": decays,
            "lr_mult": 1.0,
            "is_expert_parallel": False,
            "is_decoupled_lr": False,
            "default_config": True,
        }
        for group, decays in zip(adam_groups(source), (1.0, 0.0), strict=True)
    ]


def schedule(source: Source, format: str, log: Callable[[str], None]) -> dict[str, Any] | None:
    """`lr_scheduler` of 2019 and of v2, and `opt_param_scheduler` of v3; None if the format has no such schedule."""
    config, facts = optimizer_config(source), source.facts
    style, old = config.lr_decay_style, format == "megatron-2019"
    batch: Any = facts.get("global_batch_size")
    length: Any = facts.get("train_iters")
    if old:
        known = style != "WSD"
        why = "2019's Megatron has no WSD"
        if style not in ("constant", "cosine-2019", "WSD"):
            log(f"the {style} schedule travels by its name and numbers: 2019's formula is close to today's, not equal")
    else:
        known = bool(batch) and style in ("linear", "cosine", "constant")
        why = f"{format} has no {style}" if batch else "the source does not say its global batch size"
    if not known:
        log(f"left out: the schedule: {why}")
        return None
    warmup, end = config.warmup_and_decay(facts.get("decay_iters") or length or source.iteration, batch or 1)
    names, unit = SCHEDULES[format], 1 if old else batch
    train, done = facts["config"].get("train", {}), facts["optimizer"]["good_steps"] * unit
    if not old and (train.get("rampup_batch_size") or train.get("step_batch_size_schedule")):
        done = facts["consumed_samples"]
    said = {
        names.peak: config.lr,
        "min_lr": config.min_lr,
        names.style: style.removesuffix("-2019"),
        names.warmup: warmup * unit,
        names.end: end if old else round(end * unit),
        names.done: done,
    }
    if format == "megatron-v3":
        said |= {"start_wd": config.weight_decay, "end_wd": config.weight_decay}
        said |= {"wd_incr_style": "constant", "wd_incr_steps": round((length or end) * unit)}
    return said
