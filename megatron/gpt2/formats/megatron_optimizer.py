"""Adam's state, the loss scaler and the schedule in Megatron's forms, read and written: 2019's, and that of v2 and later.

A rank keeps lists of fp32 masters and of moments, without names: weights and embeddings first, biases and layer norms
second, both in the order of the file's models. The order is taken if the shapes and the first row of every master,
rounded as the weights are, agree with the file's own model; otherwise the state is left out.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.gpt2.checkpoint.source import Source
from megatron.gpt2.config import OptimizerConfig, require
from megatron.gpt2.formats.foreign import DAMAGE, OPTIMIZER, TABLE, adam_flags, optimizer_config, progress, short_repr
from megatron.gpt2.formats.megatron_model import HEAD, attributes
from megatron.gpt2.optimizer.optimizer import MOMENTS
from mpu.partition import PartitionSpec

States = dict[str, dict[str, list[Tensor]]]
Groups = list[list[dict[str, Tensor]]]  # the tensors of each parameter, by kind
UNKNOWN_FORM = "the optimizer's state: its form is not one that is known here"


class RankFile(NamedTuple):
    """What one rank's file holds. weights: by our names, in the order of the file; HEAD as well."""

    path: Path
    optimizer: Any
    weights: dict[str, Tensor]


Files = list[RankFile]  # stage by stage, within a stage rank by rank


def optimizer_state(
    path: Path, top: Mapping[str, Any], files: Files, specs: Mapping[str, PartitionSpec]
) -> tuple[dict[str, Any], States, list[str]]:
    """The run's facts; the optimizer's tensors; and what is left out, a line each.

    top: the first file. specs: of the parameters as the ranks hold them. The tensors are {"master", "exp_avg",
    "exp_avg_sq": {parameter: its parts, by rank}}, and empty if the files hold no state or one in an unknown form.
    ValueError if the two copies of the tied matrix have different states.
    """
    args = attributes(top.get("args"))
    facts, held = run_facts(args), files[0].optimizer
    if held is None:
        return facts, {}, []
    try:
        states, where, step = _states(files, specs)
        more, left_out = adam_facts(top, args, held, _adam(held)[2], step)
    except DAMAGE as error:
        return facts, {}, [f"{UNKNOWN_FORM} ({type(error).__name__}: {str(error)[:200]})"]
    for kind, by_name in states.items():
        for rank, copy in enumerate(by_name.pop(HEAD, [])):
            if not torch.equal(copy, by_name[TABLE][rank]):
                raise ValueError(
                    f"{where[HEAD][rank]}: {kind} of {HEAD} is not that of the word embeddings in "
                    f"{where[TABLE][rank].relative_to(path)}: are two runs mixed?"
                )
    return facts | more, states, left_out


def run_facts(args: Mapping[str, Any]) -> dict[str, Any]:
    """What the arguments say of the run's progress, under our manifest's names."""
    names = {
        "consumed_samples": "consumed_train_samples",
        "train_iters": "train_iters",
        "global_batch_size": "global_batch_size",
    }
    return {name: args[theirs] for name, theirs in names.items() if type(args.get(theirs)) is int}


def _states(files: Files, specs: Mapping[str, PartitionSpec]) -> tuple[States, dict[str, list[Path]], int]:
    """The tensors, the files that hold them, and Adam's steps."""
    states: States = {kind: {} for kind in OPTIMIZER}
    where: dict[str, list[Path]] = {}
    steps = set()
    for file, optimizer, weights in files:
        masters, moments, groups = _adam(optimizer)
        left = {
            decays: [(name, weight) for name, weight in weights.items() if (weight.dim() > 1) == decays]
            for decays in (True, False)
        }
        for group, own in zip(groups, masters or [None] * len(groups), strict=True):
            numbers = list(map(operator.index, group["params"]))
            decays = moments[numbers[0]]["exp_avg"].dim() > 1
            named, left[decays] = left[decays], []
            for (name, weight), number, master in zip(named, numbers, own or [w for _, w in named], strict=True):
                for kind, tensor in {
                    "master": master,
                    **{moment: moments[number][moment] for moment in MOMENTS},
                }.items():
                    if tensor.shape != weight.shape or tensor.dtype != torch.float32:
                        raise ValueError(f"{kind} {number} of {file} is no {name}")
                    states[kind].setdefault(name, []).append(tensor)
                where.setdefault(name, []).append(file)
                require(
                    torch.equal(master[:1].to(weight.dtype), weight[:1]), f"master {number} of {file} is not {name}"
                )
                steps.add(int(group["step"] if "step" in group else moments[number]["step"]))
        require(not left[True] and not left[False], f"{file} has no state of some parameters")
    for kind, parts in states.items():
        for name, spec in specs.items():
            if spec.dim is None and not all(torch.equal(tensor, parts[name][0]) for tensor in parts[name]):
                raise ValueError(f"{kind}.{name} differs between ranks")
    require(len(steps) == 1, f"steps {sorted(steps)[:5]}")
    return states, where, steps.pop()


def _adam(held: Any) -> tuple[list[Any] | None, Mapping[int, Any], list[Any]]:
    """Masters by group (None in fp32, where the weights are their own), moments by number, groups."""
    inner = held.get("optimizer_state_dict", held.get("optimizer", held))  # 2019's name, v2's, and fp32's
    masters = held.get("fp32_from_fp16", held.get("fp32_from_fp16_params"))
    return masters, inner["state"], inner["param_groups"]


def adam_facts(
    top: Mapping[str, Any], args: Mapping[str, Any], held: Mapping[str, Any], groups: Sequence[Any], step: int
) -> tuple[dict[str, Any], list[str]]:
    """The facts: what `AdamWOptimizer.state_dict` says, and our flags of the schedule, the scale and AdamW. Then what
    those cannot say.

    top: what stands beside the weights. held: the optimizer's part of it. groups: of parameters, with Adam's numbers.
    """
    config: dict[str, Any] = {}
    if type(args.get("clip_grad")) is float:
        config["clip_grad"] = args["clip_grad"]
    scaler: dict[str, float] = {"scale": 1.0}
    if "loss_scaler" in held:  # 2019
        said = attributes(held["loss_scaler"])
        scaler = {"scale": float(said["cur_scale"])}
        if held.get("dynamic_loss_scale"):
            scaler |= {
                "clean_steps": float(said["cur_iter"] - said["last_overflow_iter"] - 1),
                "hysteresis_left": float(said["cur_hysteresis"]),
            }
            config |= {
                "loss_scale_window": int(said["scale_window"]),
                "hysteresis": int(said["delayed_shift"]),
                "min_loss_scale": float(said["min_scale"]),
            }
    elif held.get("grad_scaler"):
        said = held["grad_scaler"]
        scaler = {"scale": float(said["scale"])}
        if "growth_tracker" in said:
            # Theirs goes on below 1, where ours stays: both halve at every overflow from there on.
            scaler |= {
                "clean_steps": float(said["growth_tracker"]),
                "hysteresis_left": float(max(1, said["hysteresis_tracker"])),
            }
    good, flags, left_out = _schedule(top, args, step)
    config = adam_flags(groups[0], [group["weight_decay"] for group in groups], **config, **flags)
    skipped = max(0, top.get("iteration", top.get("total_iters", good)) - good)
    steps = progress(step, good_steps=good, skipped_steps=skipped, loss_scaler=scaler)
    return {"optimizer": steps, "config": {"optimizer": config}}, left_out


def _schedule(top: Mapping[str, Any], args: Mapping[str, Any], step: int) -> tuple[int, dict[str, Any], list[str]]:
    """The steps that were not skipped, our flags, and what those cannot say."""
    said = top.get("lr_scheduler") or top.get("opt_param_scheduler") or {}
    batch, grows = args.get("global_batch_size"), args.get("rampup_batch_size") or args.get("step_batch_size_schedule")
    left_out: list[str] = []
    if "end_iter" in said:  # 2019 counts iterations
        style, end, warmup = (said[name] for name in ("decay_style", "end_iter", "warmup_iter"))
        unit, done, peak = 1, said["num_iters"], said["start_lr"]
        style = {"cosine": "cosine-2019", "None": "constant"}.get(style, style)
        if style in ("linear", "exponential"):
            left_out.append(f"2019's form of the {style} schedule: today's, which is close to it, takes its place")
    elif "max_lr" in said and type(batch) is int:  # later ones samples
        prefix = "" if "decay_style" in said else "lr_"
        style, end, warmup = (said[prefix + name] for name in ("decay_style", "decay_steps", "warmup_steps"))
        unit, done, peak = batch, said["num_steps"], said["max_lr"]
    else:
        return step, {}, ["the schedule"]
    good_steps, end = step if grows else int(done) // unit, int(end)
    if style not in OptimizerConfig.__dataclass_fields__["lr_decay_style"].metadata["choices"]:
        return good_steps, {}, [f"the schedule: its style {short_repr(style)} is unknown here"]
    flags = {
        "lr": float(peak),
        "min_lr": float(said.get("min_lr", 0.0)),
        "lr_decay_style": style,
        "warmup": float(warmup) / end,
        **({"lr_decay_samples": end} if end % unit else {"lr_decay_iters": end // unit}),
    }
    return good_steps, flags, left_out


def optimizer_2019(source: Source, groups: Groups) -> dict[str, Any]:
    """2019's `optimizer`; its loss scaler's class is a dictionary here."""
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
        "optimizer_state_dict": _state_dict(source, groups),
        "fp32_from_fp16": _masters(groups),
    }


def optimizer_later(source: Source, groups: Groups) -> dict[str, Any]:
    """`optimizer` of v2 and v3. In fp32 that is only Adam's state: the weights are their own masters."""
    state = _state_dict(source, groups)
    if source.tensors[f"model.{TABLE}"].dtype == torch.float32:
        return state
    return {"optimizer": state, "fp32_from_fp16_params": _masters(groups), **grad_scaler(source)}


def grad_scaler(source: Source) -> dict[str, Any]:
    """The loss scaler of v2 and later under its name; nothing if the weights are not in fp16."""
    if source.tensors[f"model.{TABLE}"].dtype != torch.float16:
        return {}
    scaler = source.facts["optimizer"]["loss_scaler"]
    said: dict[str, Any] = {"scale": torch.tensor([float(scaler["scale"])])}
    if "clean_steps" in scaler:
        said |= {"growth_tracker": int(scaler["clean_steps"]), "hysteresis_tracker": int(scaler["hysteresis_left"])}
    return {"grad_scaler": said}


def _masters(groups: Groups) -> list[list[Tensor]]:
    return [[states["master"] for states in group] for group in groups]


def _state_dict(source: Source, groups: Groups) -> dict[str, Any]:
    """`state_dict()` of Apex's FusedAdam."""
    moments = [{moment: states[moment] for moment in MOMENTS} for group in groups for states in group]
    first = len(groups[0])
    numbers = list(range(first)), list(range(first, len(moments)))
    return {
        "state": dict(enumerate(moments)),
        "param_groups": [{"params": own, **said} for own, said in zip(numbers, param_groups(source), strict=True)],
    }


def param_groups(source: Source) -> list[dict[str, Any]]:
    """Adam's numbers of the parameters that decay, and of those that do not. Since v2 Megatron multiplies the rate and
    the decay by a number of each group; Megatron Core knows the groups by these and by two names more."""
    config = optimizer_config(source)
    return [
        {
            "weight_decay": config.weight_decay * decays,
            "lr": config.lr,
            "max_lr": config.lr,
            "min_lr": config.min_lr,
            "betas": (config.adam_beta1, config.adam_beta2),
            "eps": config.adam_eps,
            "bias_correction": True,
            "step": source.facts["optimizer"]["adam_steps"],
            "wd_mult": decays,
            "lr_mult": 1.0,
            "is_expert_parallel": False,
            "is_decoupled_lr": False,
            "default_config": True,
        }
        for decays in (1.0, 0.0)
    ]


def schedule(source: Source, format: str, log: Callable[[str], None]) -> dict[str, Any] | None:
    """`lr_scheduler` of 2019, which counts iterations, and of v2, and `opt_param_scheduler` of v3, which count samples;
    None if the format has no such schedule."""
    config, facts = optimizer_config(source), source.facts
    batch, length = facts.get("global_batch_size"), facts.get("train_iters")
    warmup, end = config.warmup_and_decay(facts.get("decay_iters") or length or source.iteration, batch or 1)
    done, style = facts["optimizer"]["good_steps"], config.lr_decay_style
    if format == "megatron-2019":
        if style == "WSD":
            log("left out: the schedule: 2019's Megatron has no WSD")
            return None
        if style not in ("constant", "cosine-2019"):
            log(f"the {style} schedule travels by its name and numbers: 2019's formula is close to today's, not equal")
        return {
            "start_lr": config.lr,
            "warmup_iter": warmup,
            "num_iters": done,
            "decay_style": style.removesuffix("-2019"),
            "end_iter": end,
            "min_lr": config.min_lr,
        }
    if style not in ("linear", "cosine", "constant") or not batch:
        why = f"{format} has no {style}" if batch else "the source does not say its global batch size"
        log(f"left out: the schedule: {why}")
        return None
    train = facts["config"].get("train", {})
    grows = train.get("rampup_batch_size") or train.get("step_batch_size_schedule")
    prefix = "" if format == "megatron-v2" else "lr_"
    said: dict[str, Any] = {
        "max_lr": config.lr,
        "min_lr": config.min_lr,
        "num_steps": facts["consumed_samples"] if grows else done * batch,
        f"{prefix}warmup_steps": warmup * batch,
        f"{prefix}decay_style": style,
        f"{prefix}decay_steps": round(end * batch),
    }
    if prefix:
        said |= {
            "start_wd": config.weight_decay,
            "end_wd": config.weight_decay,
            "wd_incr_style": "constant",
            "wd_incr_steps": round((length or end) * batch),
        }
    return said
