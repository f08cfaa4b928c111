"""Adam's state and the schedule out of a Megatron checkpoint.

A rank keeps lists of fp32 masters and of moments, without names: weights and embeddings first, biases and layer norms
second, both in the order of the file's models. The order is taken where the shapes and the first row of every master,
rounded as the weights are, agree with the file's own model; otherwise the state is left out.
"""

import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.gpt2.config import OptimizerConfig, require
from megatron.gpt2.formats.foreign import short_repr
from megatron.gpt2.formats.megatron_files import HEAD, Part, RankFiles, attributes
from mpu.partition import PartitionSpec

States = dict[str, dict[str, list[Tensor]]]
Heads = dict[str, list[tuple[Path, Tensor]]]  # by kind: each rank's file and tensor


def optimizer_state(
    ranks: RankFiles, args: Mapping[str, Any], specs: Mapping[str, PartitionSpec]
) -> tuple[dict[str, Any], States, list[str]]:
    """The run's facts; the optimizer's tensors; and what is left out, a line each.

    specs: of the parameters as the ranks hold them. The tensors are {"master", "exp_avg", "exp_avg_sq": {parameter: its
    parts, by rank}}, and empty where the files hold no state or one in an unknown form. ValueError where the two copies
    of the tied matrix have different states.
    """
    facts = run_facts(args)
    optimizer = ranks.parts[0][0].optimizer
    if optimizer is None:
        return facts, {}, []
    try:
        states, heads, step = _states(ranks, specs)
        optimizer_facts, config, left_out = adam_facts(ranks.top, args, optimizer, _adam(ranks.parts[0][0])[2], step)
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError) as error:
        return (
            facts,
            {},
            [
                "the optimizer's state: its form is not one that is known here "
                f"({type(error).__name__}: {str(error)[:200]})"
            ],
        )
    for kind, copies in heads.items():
        for rank, (path, copy) in enumerate(copies):
            if not torch.equal(copy, states[kind]["word_embeddings.weight"][rank]):
                raise ValueError(
                    f"{path}: {kind} of {HEAD} is not that of the word embeddings in "
                    f"{ranks.parts[0][rank].path.relative_to(ranks.path)}: are two runs mixed?"
                )
    return {**facts, "optimizer": optimizer_facts, "config": {"optimizer": config}}, states, left_out


def run_facts(args: Mapping[str, Any]) -> dict[str, Any]:
    """What the arguments say of the run's progress, under our manifest's names."""
    return {
        name: args[theirs]
        for name, theirs in (
            ("consumed_samples", "consumed_train_samples"),
            ("train_iters", "train_iters"),
            ("global_batch_size", "global_batch_size"),
        )
        if type(args.get(theirs)) is int
    }


def _states(ranks: RankFiles, specs: Mapping[str, PartitionSpec]) -> tuple[States, Heads, int]:
    """The tensors; those of the last stage's copy of the tied matrix, apart; and Adam's steps."""
    states: States = {kind: {name: [] for name in specs} for kind in ("master", "exp_avg", "exp_avg_sq")}
    heads: Heads = {kind: [] for kind in states}
    steps = set()
    for chunks in ranks.files():
        file = chunks[0].path
        masters, moments, groups = _adam(chunks[0])
        weights = [(name, part.tensors[name]) for part in chunks for name in part.names]
        left = {
            decays: [(name, weight) for name, weight in weights if (weight.dim() > 1) == decays]
            for decays in (True, False)
        }
        for group, own in zip(groups, masters or [None] * len(groups), strict=True):
            numbers = group["params"]
            decays = moments[operator.index(numbers[0])]["exp_avg"].dim() > 1
            named, left[decays] = left[decays], []
            for index, ((name, weight), number) in enumerate(zip(named, map(operator.index, numbers), strict=True)):
                found = {
                    "master": weight if own is None else own[index],
                    "exp_avg": moments[number]["exp_avg"],
                    "exp_avg_sq": moments[number]["exp_avg_sq"],
                }
                for kind, tensor in found.items():
                    if tensor.shape != weight.shape or tensor.dtype != torch.float32:
                        raise ValueError(f"{kind} {number} of {file} is no {name}")
                    if name == HEAD:
                        heads[kind].append((file, tensor))
                    else:
                        states[kind][name].append(tensor)
                if not torch.equal(found["master"][:1].to(weight.dtype), weight[:1]):
                    raise ValueError(f"master {number} of {file} is not {name}")
                steps.add(int(group["step"] if "step" in group else moments[number]["step"]))
        require(not left[True] and not left[False], f"{file} has no state of some parameters")
    for kind, parts in states.items():
        for name, tensors in parts.items():
            if specs[name].dim is None and not all(torch.equal(tensor, tensors[0]) for tensor in tensors):
                raise ValueError(f"{kind}.{name} differs between ranks")
    require(len(steps) == 1, f"steps {sorted(steps)[:5]}")
    return states, heads, steps.pop()


def _adam(part: Part) -> tuple[list[Any] | None, Mapping[int, Any], list[Any]]:
    """Masters by group (None in fp32, where the weights are their own), moments by number, groups."""
    held = part.optimizer
    inner = held.get("optimizer_state_dict", held.get("optimizer", held))  # 2019's name, v2's, and fp32's
    masters = held.get("fp32_from_fp16", held.get("fp32_from_fp16_params"))
    return masters, inner["state"], inner["param_groups"]


def adam_facts(
    top: Mapping[str, Any], args: Mapping[str, Any], held: Mapping[str, Any], groups: Sequence[Any], step: int
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """What `AdamWOptimizer.state_dict` says; our flags of the schedule, the scale and AdamW; what those cannot say.

    top: what stands beside the weights. held: the optimizer's part of it. groups: of parameters, with Adam's numbers.
    """
    first, second = groups[0]["betas"]
    config: dict[str, Any] = {
        "weight_decay": max(float(group["weight_decay"]) for group in groups),
        "adam_beta1": float(first),
        "adam_beta2": float(second),
        "adam_eps": float(groups[0]["eps"]),
    }
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
    good_steps, schedule, left_out = _schedule(top, args, step)
    config |= schedule
    OptimizerConfig(**config)  # a ValueError for what cannot be
    iteration = top.get("iteration", top.get("total_iters", good_steps))
    return (
        {
            "good_steps": good_steps,
            "skipped_steps": max(0, iteration - good_steps),
            "adam_steps": step,
            "loss_scaler": scaler,
        },
        config,
        left_out,
    )


def _schedule(top: Mapping[str, Any], args: Mapping[str, Any], step: int) -> tuple[int, dict[str, Any], list[str]]:
    """The steps that were not skipped, our flags, and what those cannot say."""
    said = top.get("lr_scheduler") or top.get("opt_param_scheduler") or {}
    batch, grows = args.get("global_batch_size"), args.get("rampup_batch_size") or args.get("step_batch_size_schedule")
    left_out: list[str] = []
    if "end_iter" in said:  # 2019 counts iterations
        style, unit, done, peak = said["decay_style"], 1, said["num_iters"], said["start_lr"]
        end, warmup = int(said["end_iter"]), said["warmup_iter"]
        style = "cosine-2019" if style == "cosine" else "constant" if style == "None" else style
        if style in ("linear", "exponential"):
            left_out.append(f"2019's form of the {style} schedule: today's, which is close to it, takes its place")
    elif "max_lr" in said and type(batch) is int:  # later ones samples
        old = "decay_style" in said
        style, end, warmup = (
            said[name if old else f"lr_{name}"] for name in ("decay_style", "decay_steps", "warmup_steps")
        )
        unit, done, peak = batch, said["num_steps"], said["max_lr"]
    else:
        return step, {}, ["the schedule"]
    good_steps = step if grows else int(done) // unit
    if style not in OptimizerConfig.__dataclass_fields__["lr_decay_style"].metadata["choices"]:
        return good_steps, {}, [f"the schedule: its style {short_repr(style)} is unknown here"]
    decay = {"lr_decay_samples": int(end)} if int(end) % unit else {"lr_decay_iters": int(end) // unit}
    return (
        good_steps,
        {
            "lr": float(peak),
            "min_lr": float(said.get("min_lr", 0.0)),
            "lr_decay_style": style,
            **decay,
            "warmup": float(warmup) / int(end),
        },
        left_out,
    )
