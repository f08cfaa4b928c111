"""Any source written as a save folder of ours: this is what merging, splitting and converting to our format do."""

import functools
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from data_utils import Tokenizer
from megatron.gpt2.checkpoint.source import Source, check_facts
from megatron.gpt2.checkpoint.writer import Piece, write_checkpoint
from megatron.gpt2.config import Config
from megatron.gpt2.formats.new_folder import new_folder
from megatron.gpt2.model.parameters import parameter_specs
from megatron.gpt2.optimizer.optimizer import MOMENTS

OPTIMIZER = ("master", *MOMENTS)


def write_native(
    source: Source,
    out: str | Path,
    *,
    model_parallel_size: int,
    tokenizer: Tokenizer | None = None,
    log: Callable[[str], None] = print,
) -> Path:
    """Write the iteration of `source` into the new folder `out`; returns the iteration's folder.

    model_parallel_size: any that the model's shape allows. tokenizer: the one that the vocabulary belongs to, if it is
    known. One tensor is in memory at a time. Masters and moments are written where the source holds all three, as files
    of one data-parallel rank. Random states belong to a layout and are not written.

    ValueError, one line, for a size that does not fit; OSError where the disk is full.
    """
    facts = native_facts(source, model_parallel_size, tokenizer)
    names = source.names()
    held = {name.partition(".")[0] for name in names}
    kinds = ("model", *OPTIMIZER) if held.issuperset(OPTIMIZER) else ("model",)
    specs = parameter_specs(check_facts(source), model_parallel_size)
    files: dict[str, dict[str, Piece]] = {}
    for rank in range(model_parallel_size):
        for kind in kinds:
            file = "model" if kind == "model" else f"{kind}_dp_00"
            pieces = files[f"mp_rank_{rank:02d}/{file}.safetensors"] = {}
            for name, spec in specs.items():
                if spec.dim is not None or rank == 0:
                    full_name, box = f"{kind}.{name}", spec.box(rank, model_parallel_size)
                    pieces[full_name] = Piece(
                        torch.empty(box.shape, dtype=source.tensors[full_name].dtype, device="meta"),
                        spec.global_shape,
                        box.offset,
                        functools.partial(source.read, full_name, box.offset, box.shape),
                    )
    with new_folder(out) as folder:
        if tokenizer is not None:
            tokenizer.save(folder / "tokenizer")
        path = write_checkpoint(
            folder,
            source.iteration,
            facts=facts,
            files=files,
            rank=0,
            world_size=1,
            attempt=secrets.token_hex(8),
            timeout_s=60.0,
            log=log,
        )
    taken = {f"{kind}.{name}" for kind in kinds for name in specs}
    if left := [name for name in names if name not in taken and not name.startswith("rng.")]:
        log(f"left out: {len(left)} tensors, {left[0]} among them")
    return Path(out) / path.name


def native_facts(source: Source, model_parallel_size: int, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The facts of the new manifest: what the source knows, and defaults for what a run needs to start from it. Without
    a number of consumed samples the data begin again. Without a tokenizer training asks for one."""
    given: dict[str, Any] = {"tokenizer": None, **source.facts}
    sections = {name: dict(values) for name, values in given["config"].items()}
    model = sections["model"] = {**sections["model"], "vocab_size": given["vocab_size"]}
    sections["parallel"] = {
        **sections.get("parallel", {}),
        "model_parallel_size": model_parallel_size,
        "sequence_parallel": False,
    }
    data = sections.setdefault("data", {})
    data.setdefault("seq_length", model["max_position_embeddings"])
    config = Config.from_dict(sections)
    if tokenizer is not None:
        if tokenizer.vocab_size != given["vocab_size"]:
            raise ValueError(
                f"{source.path}: has {given['vocab_size']:,} tokens and the tokenizer "
                f"{tokenizer.vocab_size:,}: give the files that it was trained with, or its true "
                "--vocab-size"
            )
        given["tokenizer"] = {
            "kind": tokenizer.kind,
            "fingerprint": tokenizer.fingerprint,
            "vocab_size": tokenizer.vocab_size,
        }
    started = {"good_steps": source.iteration, "skipped_steps": 0, "adam_steps": 0, "loss_scaler": {}}
    unknown = {
        "train_iters": source.iteration,
        "consumed_samples": 0,
        "optimizer": started,
        "converted_from": source.format,
    }
    facts = {
        **unknown,
        **given,
        "config": config.as_dict(),
        "iteration": source.iteration,
        "torch": torch.__version__,
        "layout": {"model_parallel_size": model_parallel_size, "data_parallel_size": 1, "optimizer_is_sharded": False},
    }
    facts.pop("tokenizer_files", None)
    return facts
