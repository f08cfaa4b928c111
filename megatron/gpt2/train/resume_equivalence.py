"""Compares a resumed run with the run that wrote its checkpoint: bit-identical, equal within rounding, or different.

`merge_checkpoint` in megatron/gpt2/config/arguments.py compares model shape, tokenizer and schedule.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from megatron.gpt2.config import Config, flag_name
from megatron.gpt2.config.arguments import SCHEDULE_KEYS
from megatron.gpt2.device import library_versions

# A changed value of a training key makes a different training. `resume_equivalence` compares `train_iters`
# in addition, because a longer run may have a different schedule.
TRAINING_KEYS = (
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
    *(f"config.{key}" for key in SCHEDULE_KEYS),
    "config.optimizer.weight_decay",
    "config.optimizer.adam_beta1",
    "config.optimizer.adam_beta2",
    "config.optimizer.adam_eps",
    "config.optimizer.optimizer",
    "config.optimizer.muon_momentum",
    "config.optimizer.muon_num_ns_steps",
    "config.optimizer.muon_extra_scale_factor",
    "config.optimizer.clip_grad",
)
LOSS_SCALE_KEYS = tuple(  # training keys of fp16
    f"config.optimizer.{name}" for name in ("loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
)
# A changed value of a layout key changes the order of sums, except under --exact-layouts.
LAYOUT_KEYS = (
    "layout.tensor_model_parallel_size",
    "layout.pipeline_model_parallel_size",
    "layout.data_parallel_size",
    "layout.optimizer_is_sharded",
    "config.parallel.shard_gradients",
    "config.parallel.decoder_first_pipeline_num_layers",
    "config.parallel.decoder_last_pipeline_num_layers",
    "config.parallel.num_layers_per_virtual_pipeline_stage",
    "config.parallel.num_virtual_stages_per_pipeline_rank",
    "config.parallel.sequence_parallel",
    "config.parallel.ddp_bucket_size",
)
# A changed value of a rounding key always changes the order of sums or the rounding.
ROUNDING_KEYS = (
    "precision",
    "config.parallel.exact_layouts",
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
DISPLAY_NAMES = {  # {key: name of the key in messages}. Messages name all other keys by their flags.
    "data_fingerprint": "the training data or --split",
    "batch_growth": "how the batch grows:",
    "layout.data_parallel_size": "data-parallel size",
    "layout.optimizer_is_sharded": "a sharded optimizer",
    "computed_by.torch": "torch",
    "computed_by.kernels": "kernels of",
    "computed_by.threads": "threads",
}


def compute_environment(device: torch.device) -> dict[str, Any]:
    """Return the software and hardware that compute a step: torch's version, the kernels, and on a CPU the number of
    threads of each rank, which changes the order of sums."""
    if device.type == "cuda":
        versions = library_versions(device)
        libraries = ", ".join(f"{name} {versions[name]}" for name in ("CUDA", "cuDNN", "NCCL"))
        kernels = f"{torch.cuda.get_device_name(device)}, {libraries}"
        return {"torch": torch.__version__, "kernels": kernels, "threads": None}
    return {
        "torch": torch.__version__,
        "kernels": f"CPU, {torch.backends.cpu.get_cpu_capability()}",
        "threads": torch.get_num_threads(),
    }


def resume_equivalence(
    saved: Mapping[str, Any], current: Mapping[str, Any], *, not_restored: Sequence[str] = ()
) -> str:
    """Describe in a few words how a run with the metadata `current` continues a checkpoint with the metadata `saved`.

    saved: metadata in which keys may be missing.
    not_restored: descriptions of the state that was not loaded.
    """
    training_keys = (*TRAINING_KEYS, *LOSS_SCALE_KEYS * (current.get("precision") == "float16"))
    changes = [*not_restored, *_describe_changes(training_keys, saved, current)]
    config = current["config"]["optimizer"]
    if config["lr_decay_iters"] is config["lr_decay_samples"] is None and config["lr_decay_style"] != "constant":
        changes += _describe_changes(("train_iters",), saved, current)
    if changes:
        return f"a different training from here on ({'; '.join(changes)})"
    rounding_keys = list(ROUNDING_KEYS)
    has_exact_layouts = current["config"]["parallel"]["exact_layouts"] is not None
    if not has_exact_layouts:  # ROUNDING_KEYS contains exact_layouts, too.
        rounding_keys += LAYOUT_KEYS
    is_on_gpu = current["computed_by"]["threads"] is None
    if is_on_gpu:  # Layers with selective recomputation have other kernels.
        rounding_keys.append("config.train.recompute_granularity")
    rounding = _describe_changes(rounding_keys, saved, current)
    # Some kernels add in a different order in each run, and a run chooses some kernels by measured times.
    if is_on_gpu and not has_exact_layouts and not current["config"]["train"]["deterministic"]:
        rounding.append("a GPU without --deterministic")
    if rounding:
        return f"the same training within rounding ({'; '.join(rounding)})"
    if saved.get("computed_by") is None:
        return "the same training; the checkpoint does not say which software and hardware computed it"
    return "bit-identical to the run that wrote it"


def _describe_changes(keys: Iterable[str], saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Describe each key that has different values in `saved` and `current`. A flag that a checkpoint of this program
    lacks is newer than the checkpoint, and counts as if it had its default. A checkpoint of another program is compared
    only by the keys that it has."""
    is_converted = saved.get("converted_from", "native") != "native"
    changes = []
    for key in keys:
        *path, name = key.split(".")
        before, now = saved, current
        for section in path:
            inner = before.get(section)
            before, now = inner if isinstance(inner, Mapping) else {}, now.get(section, {})
        if before and path[:1] == ["config"] and not is_converted:
            before = _DEFAULTS[path[1]] | {**before}
        if name in before and name in now and before[name] != now[name]:
            values = f" {_as_flag_value(now[name])}, was {_as_flag_value(before[name])}"
            changes.append(DISPLAY_NAMES.get(key, flag_name(key)) + values * (key != "data_fingerprint"))
    return changes


def _as_flag_value(value: Any) -> Any:
    """Return `value` as on the command line, such as bf16 for torch's bfloat16."""
    return {None: "not given", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(value, value)
