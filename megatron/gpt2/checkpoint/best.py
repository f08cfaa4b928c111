"""--keep-best: the checkpoint with the lowest validation loss, in a folder of its own.

    checkpoints/gpt2_345m/best/     as the folder around it, for `--load`: iter_0000700/, its tracker, tokenizer/

The loss is in the manifest of that checkpoint and nowhere else. A run that continues reads it from there.
"""

import math
from collections.abc import Callable
from pathlib import Path

from megatron.gpt2.checkpoint.folder import TRACKER, find_checkpoint
from megatron.gpt2.monitor.run_log import set_aside
from megatron.gpt2.monitor.run_report import METRICS

BEST = "best"


def best_loss(folder: Path, data_fingerprint: str, log: Callable[[str], None]) -> float:
    """The validation loss, in nats per token, of the checkpoint in `folder`. Infinite where the folder holds no valid
    checkpoint, or one that was trained on other data."""
    try:
        checkpoint = find_checkpoint(folder, log=log, verify=False)
    except ValueError as error:
        log(f"WARNING: {error}")
        return math.inf
    if checkpoint is None or checkpoint.facts.get("data_fingerprint") != data_fingerprint:
        return math.inf
    return float(checkpoint.facts.get("valid_loss", math.inf))


def set_best_aside(save: Path, log: Callable[[str], None]) -> None:
    """Rename the best checkpoint of an earlier run, in the folder of one that starts from iteration 0."""
    if (save / BEST / TRACKER).exists():
        log(f"WARNING: {save / BEST} is of an earlier run: it is now {set_aside(save / BEST)}")


def refuse_best_folder(save: Path) -> None:
    """ValueError where `save` is the folder in which another run keeps its best checkpoint."""
    if save.name == BEST and (save.parent / METRICS).exists():
        raise ValueError(
            f"--save {save} is where the run in {save.parent} keeps its best checkpoint: give another "
            "--save to train on from it"
        )
