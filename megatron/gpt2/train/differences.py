"""What a run that continues a checkpoint does in another way than the run that wrote it, and what that changes.

Shape, tokenizer and schedule are not here: where they differ the run is refused, or a note says which value it takes;
see `merge_checkpoint` in megatron/gpt2/config/arguments.py.
"""

from collections.abc import Iterator, Mapping
from typing import Any

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
_SPELLINGS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}  # of torch's names, which a checkpoint has


def differences(then: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[str]:
    """A line for each difference. then: the facts of the checkpoint that is continued; any of them may be missing.
    here: the same facts of this run."""
    for place, line in LINES.items():
        before, now = _look_up(then, place), _look_up(here, place)
        if before is not None and before != now:
            yield line.format(here=now, then=before)


def _look_up(facts: Mapping[str, Any], place: str) -> Any:
    value: Any = facts
    for name in place.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return _SPELLINGS.get(value, value) if isinstance(value, str) else value
