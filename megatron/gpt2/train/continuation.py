"""How a run goes on from a checkpoint, compared with the run that wrote it: with the same bits, within rounding, or as
another training. Shape, tokenizer and schedule are not here: if they differ, the run is refused, or a note says which
value it takes (`merge_checkpoint` in megatron/gpt2/config/arguments.py).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from megatron.gpt2.config import Config, flag
from megatron.gpt2.config.arguments import SCHEDULE

# What changes the course of a run. The fields of `optimizer` that concern the loss scale alone are not among them, and
# what decides the schedule of a run that is longer now is `train_iters`.
COURSE = (
    "data_fingerprint",
    "global_batch_size",
    "batch_growth",
    "config.train.seed",
    "config.model.hidden_dropout",
    "config.model.attention_dropout",
    "config.data.seq_length",
    "config.data.data_order",
    "config.data.eod_mask_loss",
    "config.data.reset_position_ids",
    "config.data.reset_attention_mask",
    *(f"config.{key}" for key in SCHEDULE),
    "config.optimizer.weight_decay",
    "config.optimizer.adam_beta1",
    "config.optimizer.adam_beta2",
    "config.optimizer.adam_eps",
    "config.optimizer.clip_grad",
)
# What changes the order of sums, except under --exact-layouts.
LAYOUT = (
    "layout.model_parallel_size",
    "layout.pipeline_parallel_size",
    "layout.data_parallel_size",
    "layout.optimizer_is_sharded",
    "config.parallel.sequence_parallel",
    "config.parallel.ddp_bucket_size",
)
# What changes the order of sums, or how a number is rounded, in any case.
ROUNDING = (
    "precision",
    "config.parallel.exact_layouts",
    "config.parallel.DDP_impl",
    "config.parallel.grad_reduce_in_bf16",
    "config.parallel.cpu_offload_optimizer",
    "config.train.micro_batch_size",
    "config.train.compile",
    "config.train.attention_backend",
    "config.train.deterministic",
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
    course = [*lost, *_named(COURSE, then, here)]
    config = here["config"]["optimizer"]
    if config["lr_decay_iters"] is config["lr_decay_samples"] is None and config["lr_decay_style"] != "constant":
        course += _named(("train_iters",), then, here)
    if course:
        return f"another training from here on ({'; '.join(course)})"
    is_exact = here["config"]["parallel"]["exact_layouts"] is not None  # the checkpoint's is compared by ROUNDING
    if rounding := _named(ROUNDING if is_exact else (*ROUNDING, *LAYOUT), then, here):
        return f"the same training within rounding ({'; '.join(rounding)})"
    if then.get("computed_by") is None:
        return "the same training; the checkpoint does not say by what it was computed"
    return "bit-identical to the run that wrote it"


def _named(places: Sequence[str], then: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """In words, what is not the same in both."""
    found = []
    for place, before, now in _differing(places, then, here):
        called = NAMES.get(place) or flag(place)
        found.append(called if place == "data_fingerprint" else f"{called} {_shown(now)}, was {_shown(before)}")
    return found


def _differing(
    places: Iterable[str], then: Mapping[str, Any], here: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    """(place, value in `then`, value in `here`) of each that both have and that is not the same. A flag that a section
    of the checkpoint lacks had its default: it was not known."""
    for place in places:
        *path, name = place.split(".")
        before, now = then, here
        for section in path:
            inner = before.get(section)
            before, now = inner if isinstance(inner, Mapping) else {}, now.get(section, {})
        if before and path[:1] == ["config"]:
            before = _DEFAULTS[path[1]] | {**before}
        if name in before and name in now and before[name] != now[name]:
            yield place, before[name], now[name]


def _shown(value: Any) -> Any:
    """`value` as a line has it: torch's name of a type as the flag has it."""
    return {None: "not given", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(value, value)


# The line about each difference, by its place in the facts of a checkpoint. A warning is about a difference that
# changes the course of the run; the others change rounding and chance alone.
LINES = {
    "data_fingerprint": "WARNING: the training data or --split are not those of the checkpoint: the run goes on with "
    "the new data, in which part of what was held out may have been seen",
    "global_batch_size": "WARNING: a step takes {here} samples here and took {then} in the checkpoint: "
    "--global-batch-size {then} (with a --micro-batch-size that divides it) goes on as before",
    "batch_growth": "WARNING: the batch grows in another way than in the checkpoint: {here} here, {then} there",
    "config.train.seed": "WARNING: --seed {here} here, {then} in the checkpoint: samples come in another order from "
    "here on, so that this epoch reads some of them twice and leaves others out",
    "config.model.hidden_dropout": "WARNING: --hidden-dropout {here} here, {then} in the checkpoint: the training loss "
    "jumps, and is not comparable with the one before",
    "config.model.attention_dropout": "WARNING: --attention-dropout {here} here, {then} in the checkpoint: the "
    "training loss jumps, and is not comparable with the one before",
    "precision": "--precision {here} here, {then} in the checkpoint: masters and moments go on in fp32; what is "
    "computed is rounded in another way",
    "config.train.micro_batch_size": "--micro-batch-size {here} here, {then} in the checkpoint: speed, memory and "
    "rounding change",
}


def differences(then: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[str]:
    """A line for each difference. then: the facts of the checkpoint that is continued; any of them may be missing.
    here: the same facts of this run."""
    for place, before, now in _differing(LINES, then, here):
        yield LINES[place].format(here=_shown(now), then=_shown(before))
