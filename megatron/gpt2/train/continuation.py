"""How a run goes on from a checkpoint, beside the run that wrote it: with the same bits, within rounding, or as another
training; in one line, with what makes it so."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

import mpu
from megatron.gpt2.config import Config, flag
from megatron.gpt2.train.prepare import PreparedRun

# What changes the course of a run. The fields of `optimizer` that concern the loss scale alone are not among them, and
# what decides the schedule of a run that is longer now is `train_iters`.
COURSE = (
    "data_fingerprint",
    "global_batch_size",
    "batch_growth",
    "config.train.seed",
    *(f"config.model.{name}" for name in ("hidden_dropout", "attention_dropout")),
    *(
        f"config.data.{name}"
        for name in ("seq_length", "data_order", "eod_mask_loss", "reset_position_ids", "reset_attention_mask")
    ),
    *(
        f"config.optimizer.{name}"
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
            "weight_decay",
            "adam_beta1",
            "adam_beta2",
            "adam_eps",
            "clip_grad",
        )
    ),
)
# What changes the order of sums, except under --exact-layouts.
LAYOUT = (
    *(
        f"layout.{name}"
        for name in ("model_parallel_size", "pipeline_parallel_size", "data_parallel_size", "optimizer_is_sharded")
    ),
    "config.parallel.sequence_parallel",
    "config.parallel.ddp_bucket_size",
)
# What changes the order of sums, or how a number is rounded, in any case.
ROUNDING = (
    "precision",
    *(
        f"config.parallel.{name}"
        for name in ("exact_layouts", "DDP_impl", "grad_reduce_in_bf16", "cpu_offload_optimizer")
    ),
    *(f"config.train.{name}" for name in ("micro_batch_size", "compile", "attention_backend", "deterministic")),
    "computed_by.torch",
    "computed_by.kernels",
    "computed_by.threads",
)
_DEFAULTS = Config().as_dict()
NAMES = {
    "data_fingerprint": "the training data or --split",
    "global_batch_size": "--global-batch-size",
    "batch_growth": "how the batch grows:",
    "layout.model_parallel_size": "model-parallel size",
    "layout.pipeline_parallel_size": "pipeline-parallel size",
    "layout.data_parallel_size": "data-parallel size",
    "layout.optimizer_is_sharded": "a sharded optimizer",
    "precision": "--precision",
    "computed_by.torch": "torch",
    "computed_by.kernels": "kernels of",
    "computed_by.threads": "threads",
    "train_iters": "--train-iters",
}


def what_decides(prepared: PreparedRun, parallel: mpu.ParallelState, *, sharded: bool) -> dict[str, Any]:
    """What the numbers of a run depend on, beside its weights and state: facts of a checkpoint, as JSON."""
    return {
        "layout": {
            "model_parallel_size": parallel.tensor_model_parallel_size,
            "pipeline_parallel_size": parallel.pipeline_model_parallel_size,
            "data_parallel_size": parallel.data_parallel_size,
            "optimizer_is_sharded": sharded,
        },
        "config": prepared.config.as_dict(),
        "train_iters": prepared.train_iters,
        "decay_iters": prepared.decay_iters,
        "global_batch_size": prepared.global_batch_size,
        "batch_growth": prepared.batch_growth,
        "data_fingerprint": prepared.splits.fingerprint,
        "precision": str(prepared.dtype).removeprefix("torch."),
        "computed_by": computed_by(prepared.device),
    }


def computed_by(device: torch.device) -> dict[str, Any]:
    """What computes a step: torch, whose kernels, and the threads of each rank, which share the sums on a CPU."""
    if device.type == "cuda":
        kernels = (
            f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}, cuDNN "
            f"{torch.backends.cudnn.version()}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
        )
        return {"torch": torch.__version__, "kernels": kernels, "threads": None}
    return {
        "torch": torch.__version__,
        "kernels": f"CPU, {torch.backends.cpu.get_cpu_capability()}",
        "threads": torch.get_num_threads(),
    }


def how_it_goes_on(then: Mapping[str, Any], here: Mapping[str, Any], *, lost: Sequence[str] = ()) -> str:
    """How a run with the facts `here` goes on from a checkpoint with those of `then`, any of which may be missing.

    lost: what of the run's state does not go on, in words.
    """
    course = [*lost, *_differing(COURSE, then, here)]
    config = here["config"]["optimizer"]
    if config["lr_decay_iters"] is config["lr_decay_samples"] is None and config["lr_decay_style"] != "constant":
        course += _differing(("train_iters",), then, here)
    if course:
        return f"another training from here on ({'; '.join(course)})"
    is_exact = here["config"]["parallel"]["exact_layouts"] is not None  # the checkpoint's is compared by ROUNDING
    if rounding := _differing(ROUNDING if is_exact else (*ROUNDING, *LAYOUT), then, here):
        return f"the same training within rounding ({'; '.join(rounding)})"
    if then.get("computed_by") is None:
        return "the same training; the checkpoint does not say by what it was computed"
    return "bit-identical to the run that wrote it"


def _differing(places: tuple[str, ...], then: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """In words, what is not the same in both. A section that the checkpoint lacks says nothing. A flag that it lacks
    had its default: it was not known."""
    found = []
    for place in places:
        *path, name = place.split(".")
        before, now = then, here
        for section in path:
            inner = before.get(section)
            before, now = inner if isinstance(inner, Mapping) else {}, now[section]
        if before and path[:1] == ["config"]:
            before = _DEFAULTS[path[1]] | {**before}
        if name in before and before[name] != now[name]:
            called = NAMES.get(place) or flag(place.removeprefix("config."))
            told = "" if place == "data_fingerprint" else f" {_said(now[name])}, was {_said(before[name])}"
            found.append(called + told)
    return found


def _said(value: Any) -> Any:
    return "not given" if value is None else value
