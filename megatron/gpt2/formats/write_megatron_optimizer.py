"""Adam's state, the loss scaler and the schedule in Megatron's forms: 2019's, and that of v2 and v3.

Megatron keeps no names: a file has two groups of parameters, those that decay and those that do not, both in the order
of the file's models.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron.gpt2.checkpoint.source import Source
from megatron.gpt2.config import Config, OptimizerConfig
from megatron.gpt2.optimizer.optimizer import MOMENTS

Groups = list[list[dict[str, Tensor]]]  # the tensors of each parameter, by kind


def optimizer_2019(source: Source, groups: Groups) -> dict[str, Any]:
    """2019's `optimizer`; its loss scaler's class is a dictionary here."""
    config, scaler = optimizer_config(source), source.facts["optimizer"]["loss_scaler"]
    clean_steps = int(scaler.get("clean_steps", 0))
    return {
        "loss_scaler": {
            "cur_scale": float(scaler["scale"]),
            "cur_iter": source.iteration,
            "last_overflow_iter": source.iteration - clean_steps - 1,
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
        "optimizer_state_dict": _adam(source, groups),
        "fp32_from_fp16": [[states["master"] for states in group] for group in groups],
    }


def optimizer_later(source: Source, groups: Groups) -> dict[str, Any]:
    """`optimizer` of v2 and v3. In fp32 that is Adam's state alone: the weights are their own masters."""
    dtype = source.tensors["model.word_embeddings.weight"].dtype
    if dtype == torch.float32:
        return _adam(source, groups)
    state = {
        "optimizer": _adam(source, groups),
        "fp32_from_fp16_params": [[states["master"] for states in group] for group in groups],
    }
    return {**state, **grad_scaler(source)}


def grad_scaler(source: Source) -> dict[str, Any]:
    """The loss scaler of v2 and later under its name; nothing where the weights are not in fp16."""
    if source.tensors["model.word_embeddings.weight"].dtype != torch.float16:
        return {}
    scaler = source.facts["optimizer"]["loss_scaler"]
    said: dict[str, Any] = {"scale": torch.tensor([float(scaler["scale"])])}
    if "clean_steps" in scaler:
        said |= {"growth_tracker": int(scaler["clean_steps"]), "hysteresis_tracker": int(scaler["hysteresis_left"])}
    return {"grad_scaler": said}


def _adam(source: Source, groups: Groups) -> dict[str, Any]:
    """`state_dict()` of Apex's FusedAdam."""
    numbers = iter(range(sum(map(len, groups))))
    numbered = [[(next(numbers), states) for states in group] for group in groups]
    return {
        "state": {
            number: {moment: states[moment] for moment in MOMENTS} for group in numbered for number, states in group
        },
        "param_groups": [
            {"params": [number for number, _ in group], **said}
            for group, said in zip(numbered, param_groups(source), strict=True)
        ],
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


def optimizer_config(source: Source) -> OptimizerConfig:
    """The optimizer's flags of the source; the defaults where it names none."""
    return Config.from_dict({"optimizer": source.facts["config"].get("optimizer", {})}).optimizer


def schedule(source: Source, format: str, log: Callable[[str], None]) -> dict[str, Any] | None:
    """`lr_scheduler` of 2019, which counts iterations, and of v2, and `opt_param_scheduler` of v3, which count samples;
    None where the format has no such schedule."""
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
        log(
            f"left out: the schedule: {format} has no {style}"
            if batch
            else "left out: the schedule: the source does not say its global batch size"
        )
        return None
    train = facts["config"].get("train", {})
    grows = train.get("rampup_batch_size") or train.get("step_batch_size_schedule")
    said: dict[str, Any] = {
        "max_lr": config.lr,
        "min_lr": config.min_lr,
        "num_steps": facts["consumed_samples"] if grows else done * batch,
    }
    if format == "megatron-v2":
        return {**said, "warmup_steps": warmup * batch, "decay_style": style, "decay_steps": round(end * batch)}
    return {
        **said,
        "lr_warmup_steps": warmup * batch,
        "lr_decay_style": style,
        "lr_decay_steps": round(end * batch),
        "start_wd": config.weight_decay,
        "end_wd": config.weight_decay,
        "wd_incr_style": "constant",
        "wd_incr_steps": round((length or end) * batch),
    }
