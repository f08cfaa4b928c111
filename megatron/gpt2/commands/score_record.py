"""The JSON file of scores: which model they belong to, and how they were computed."""

import json
from pathlib import Path
from typing import Any

import torch

import mpu
from data_utils.files import replace_text
from megatron.gpt2.device import PRECISIONS
from megatron.gpt2.generate.load_model import LoadedModel


def check_output(path: str | None) -> None:
    """FileNotFoundError where the file of --output could not be written, before any work is done."""
    if path is not None and not Path(path).absolute().parent.is_dir():
        raise FileNotFoundError(f"--output {path}: its folder does not exist")


def record(loaded: LoadedModel, micro_batch_size: int) -> dict[str, Any]:
    """What every score of this model depends on, by name."""
    checkpoint, tokenizer = loaded.checkpoint, loaded.tokenizer
    return {
        "checkpoint": str(checkpoint.path),
        "iteration": checkpoint.iteration,
        "manifest_sha256": checkpoint.digest,  # which seals every file
        "tokenizer": tokenizer.kind,
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "precision": PRECISIONS[loaded.dtype],
        "device": loaded.device.type,
        "model_parallel_size": mpu.get_model_parallel_world_size(),
        "data_parallel_size": mpu.get_data_parallel_world_size(),
        "micro_batch_size": micro_batch_size,
        "torch": torch.__version__,
    }


def write_record(path: str, value: dict[str, Any]) -> None:
    """Write `value` as JSON into `path`, whole or not at all; infinities and NaN, which JSON lacks, become null."""
    finite = json.loads(json.dumps(value), parse_constant=lambda name: None)
    replace_text(Path(path), json.dumps(finite, indent=1, allow_nan=False) + "\n")
