"""Write a checkpoint of any format as a native --save folder. Merging, splitting and converting use native.py."""

import contextlib
import functools
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from data_utils import Tokenizer
from data_utils.command_line import require
from data_utils.files import fsync_path
from megatron.gpt2.checkpoint.interface import BaseCheckpoint, check_metadata
from megatron.gpt2.checkpoint.saver import PendingSave, Saver
from megatron.gpt2.checkpoint.writer import ShardedTensor
from megatron.gpt2.config import Config
from megatron.gpt2.formats.foreign_checkpoint import OPTIMIZER_KINDS
from megatron.gpt2.model.gpt2 import TIED_WEIGHT, model_partition_specs


def require_new_folder(out: str | Path) -> None:
    """Raise ValueError if `out` exists and is not an empty folder."""
    out = Path(out)
    is_new = not out.exists() or (out.is_dir() and not any(out.iterdir()))
    require(is_new, f"{out}: exists already and is not empty: give a new folder")


@contextlib.contextmanager
def new_folder(out: str | Path) -> Iterator[Path]:
    """Yield a temporary folder next to `out`. At the end of the block, the files in this folder are synced to disk, and
    the folder is renamed to `out`. After an error in the block, the folder is removed. Raises ValueError if `out`
    exists and is not an empty folder."""
    require_new_folder(out)
    out = Path(out)
    folder = out.with_name(f"{out.name}.tmp-{secrets.token_hex(4)}")
    folder.mkdir(parents=True)
    try:
        yield folder
        for path in (*sorted(folder.rglob("*"), reverse=True), folder):
            fsync_path(path)  # `fsync_path` syncs files, too.
        folder.rename(out)  # The rename can only replace an empty folder.
        fsync_path(out.parent)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def write_native(
    source: BaseCheckpoint,
    out: str | Path,
    *,
    tp_size: int,
    tokenizer: Tokenizer | None = None,
) -> Path:
    """Write the iteration of `source` into the new folder `out`. Return the iteration's folder.

    Only one tensor is in memory at a time. Masters and moments are written as files of one data-parallel rank, if the
    source contains all of them. Random states depend on the layout and are not written.

    tp_size: any size that divides the model's shape.
    tokenizer: saved with the checkpoint, if given.

    Raises ValueError, in one line, for a size that does not fit, and OSError if the disk is full.
    """
    metadata = native_metadata(source, tp_size, tokenizer)
    kinds = [kind for kind in ("model", *OPTIMIZER_KINDS) if f"{kind}.{TIED_WEIGHT}" in source.tensors]
    specs = model_partition_specs(check_metadata(source), tp_size)
    files: dict[str, dict[str, ShardedTensor]] = {}
    for rank in range(tp_size):
        for kind in kinds:
            file = "model" if kind == "model" else f"{kind}_dp_00"
            shards = files[f"mp_rank_{rank:02d}/{file}.safetensors"] = {}
            for name, spec in specs.items():
                full_name, tensor_slice = f"{kind}.{name}", spec.local_slice(rank, tp_size)
                if full_name in source.tensors and (spec.dim is not None or rank == 0):
                    shards[full_name] = ShardedTensor(
                        torch.empty(tensor_slice.shape, dtype=source.tensors[full_name].dtype, device="meta"),
                        spec.global_shape,
                        tensor_slice.offset,
                        functools.partial(source.read, full_name, tensor_slice.offset, tensor_slice.shape),
                    )
    with new_folder(out) as folder:
        if tokenizer is not None:
            tokenizer.save(folder / "tokenizer")
        saver = Saver(folder=folder, start_id=secrets.token_hex(8), log=lambda line: None)
        path = saver.write(source.iteration, files, metadata, PendingSave())

    return Path(out) / path.name


def native_metadata(source: BaseCheckpoint, tp_size: int, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Return the metadata for the new manifest: the metadata of `source`, with defaults for missing values that a run
    needs. Without `consumed_samples`, a run starts at the beginning of the data. Without a tokenizer, training asks for
    one."""
    metadata: dict[str, Any] = {"tokenizer": None, **source.metadata}
    metadata.pop("tokenizer_files", None)
    sections = {name: dict(values) for name, values in metadata["config"].items()}
    sections["model"]["vocab_size"] = metadata["vocab_size"]
    layout = {"tensor_model_parallel_size": tp_size}
    sections["parallel"] = {**sections.get("parallel", {}), **layout, "sequence_parallel": False}
    sections.setdefault("data", {}).setdefault("seq_length", sections["model"]["max_position_embeddings"])
    check_tokenizer(source, tokenizer)
    if tokenizer is not None:
        metadata["tokenizer"] = {name: getattr(tokenizer, name) for name in ("kind", "fingerprint", "vocab_size")}
    Config.from_dict(sections)  # `from_dict` raises ValueError for values that a run cannot use.
    return {
        "consumed_samples": 0,
        "optimizer": {"num_updates": source.iteration, "skipped_steps": 0, "adam_steps": 0, "loss_scaler": {}},
        "converted_from": source.format,
        **metadata,
        "config": sections,
        "iteration": source.iteration,
        "torch": torch.__version__,
        "layout": {**layout, "data_parallel_size": 1, "optimizer_is_sharded": False},
    }


def check_tokenizer(source: BaseCheckpoint, tokenizer: Tokenizer | None) -> None:
    """Raise ValueError if `source` and `tokenizer` have different vocabulary sizes."""
    if tokenizer is not None:
        size, other = source.metadata["vocab_size"], tokenizer.vocab_size
        require(
            size == other,
            f"{source.path}: has {size:,} tokens, but the tokenizer {other:,}: give the tokenizer that the model was "
            "trained with, or the true --vocab-size",
        )
