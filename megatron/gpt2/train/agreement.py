"""What each rank decides alone before the ranks meet, compared as soon as they do.

Every rank reads its own command line, looks for a checkpoint in its own view of the file system and chooses the
precision by its own device. A rank that decided otherwise would train another model in silence, or wait for a
collective that the others never call. Extensions add decisions of theirs.
"""

import hashlib

import torch

from megatron.gpt2.config import by_key, flag
from megatron.gpt2.train.collectives import gather_over_ranks
from megatron.gpt2.train.prepare import PreparedRun

# Flags that may differ: paths, which machines may name in their own way, and what concerns one rank alone. What is in
# the files is compared by the fingerprints of data and tokenizer.
MAY_DIFFER = {
    *(
        f"data.{name}"
        for name in (
            "train_data",
            "valid_data",
            "test_data",
            "data_path",
            "valid_data_path",
            "test_data_path",
            "split",
            "text_key",
            "data_cache_path",
            "vocab_file",
            "merge_file",
            "tokenizer_model",
            "cache_dir",
            "num_workers",
        )
    ),
    *(
        f"train.{name}"
        for name in ("device", "tensorboard_dir", "wandb_project", "wandb_entity", "wandb_exp_name", "wandb_save_dir")
    ),
    "checkpoint.save",
    "checkpoint.load",
    "checkpoint.local_checkpoint_dir",
}


def check_ranks_agree(prepared: PreparedRun) -> None:
    """ValueError, on every rank, that names the first decision that differs. A collective over all ranks."""
    own = decisions(prepared)
    if len(set(gather_over_ranks(_number(repr(own)), prepared.device))) == 1:
        return
    for name, value in own.items():
        numbers = gather_over_ranks(_number(value), prepared.device)
        others = [rank for rank, number in enumerate(numbers) if number != numbers[0]]
        if others:
            raise ValueError(
                f"rank {others[0]} has another {name} than rank 0 (on rank {prepared.ranks.rank} it is "
                f"{value}): start every rank with the same command line and environment, and let all "
                "machines see the same files"
            )


def check_data_is_the_same(prepared: PreparedRun) -> None:
    """ValueError, on every rank, unless the training data of all ranks have one fingerprint."""
    if len(set(gather_over_ranks(int(prepared.splits.fingerprint[:15], 16), prepared.device))) > 1:
        raise ValueError("the ranks read different training data: every machine needs the same files")


def decisions(prepared: PreparedRun) -> dict[str, str]:
    """What must be the same on all ranks, by the words that an error has for it."""
    values = by_key(prepared.config.as_dict())
    return {
        **{flag(key): repr(value) for key, value in values.items() if key not in MAY_DIFFER},
        "precision": str(prepared.dtype),
        "kind of device": prepared.device.type,
        "backend": prepared.backend,
        "checkpoint to start from": f"iteration {prepared.start.get('iteration', 0)}, "
        f"{'none' if prepared.source is None else 'found'}",
        "length in iterations": str(prepared.train_iters),
        "tokenizer": prepared.tokenizer.fingerprint,
        "version of torch": torch.__version__,
        **{name: text for hook in prepared.hooks for name, text in hook.decisions(prepared).items()},
    }


def _number(text: str) -> int:
    return int(hashlib.sha256(text.encode()).hexdigest()[:15], 16)
