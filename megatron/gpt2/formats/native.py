"""Any source written as a save folder of ours: this is what merging, splitting and converting to our format do."""

import contextlib
import functools
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from data_utils import Tokenizer
from data_utils.files import sync_folder
from megatron.gpt2.checkpoint.saver import Parts, Saver
from megatron.gpt2.checkpoint.source import Source, check_facts
from megatron.gpt2.checkpoint.writer import Piece
from megatron.gpt2.config import Config
from megatron.gpt2.formats.foreign import OPTIMIZER, has_optimizer
from megatron.gpt2.model.gpt2 import parameter_specs


@contextlib.contextmanager
def new_folder(out: str | Path) -> Iterator[Path]:
    """A folder next to `out` to write into. At the end of the block its files are put on the disk and it is renamed to
    `out`. An error in the block removes it. ValueError if `out` exists and is not an empty folder."""
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out}: exists already and is not empty: give a new folder")
    folder = out.with_name(f"{out.name}.tmp-{secrets.token_hex(4)}")
    folder.mkdir(parents=True)
    try:
        yield folder
        for path in (*sorted(folder.rglob("*"), reverse=True), folder):
            sync_folder(path)  # of a file this puts the bytes on the disk
        folder.rename(out)  # over an empty folder at most
        sync_folder(out.parent)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


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
    known. One tensor is in memory at a time. Masters and moments are written if the source holds all three, as files
    of one data-parallel rank. Random states belong to a layout and are not written.

    ValueError, one line, for a size that does not fit; OSError if the disk is full.
    """
    facts = native_facts(source, model_parallel_size, tokenizer)
    kinds = ("model", *OPTIMIZER) if has_optimizer(source) else ("model",)
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
        saver = Saver(folder=folder, attempt=secrets.token_hex(8), log=lambda line: None)
        path = saver.write(source.iteration, files, facts, Parts())
    taken = {f"{kind}.{name}" for kind in kinds for name in specs}
    if left := [name for name in source.names() if name not in taken and not name.startswith("rng.")]:
        log(f"left out: {len(left)} tensors, {left[0]} among them")
    return Path(out) / path.name


def native_facts(source: Source, model_parallel_size: int, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The facts of the new manifest: what the source knows, and defaults for what a run needs to start from it. Without
    a number of consumed samples the data begin again. Without a tokenizer training asks for one."""
    given: dict[str, Any] = {"tokenizer": None, **source.facts}
    given.pop("tokenizer_files", None)
    sections = {name: dict(values) for name, values in given["config"].items()}
    sections["model"]["vocab_size"] = given["vocab_size"]
    layout = {"model_parallel_size": model_parallel_size}
    sections["parallel"] = {**sections.get("parallel", {}), **layout, "sequence_parallel": False}
    sections.setdefault("data", {}).setdefault("seq_length", sections["model"]["max_position_embeddings"])
    check_tokenizer(source, tokenizer)
    if tokenizer is not None:
        given["tokenizer"] = {name: getattr(tokenizer, name) for name in ("kind", "fingerprint", "vocab_size")}
    return {
        "train_iters": source.iteration,
        "consumed_samples": 0,
        "optimizer": {"good_steps": source.iteration, "skipped_steps": 0, "adam_steps": 0, "loss_scaler": {}},
        "converted_from": source.format,
        **given,
        "config": Config.from_dict(sections).as_dict(),
        "iteration": source.iteration,
        "torch": torch.__version__,
        "layout": {**layout, "data_parallel_size": 1, "optimizer_is_sharded": False},
    }


def check_tokenizer(source: Source, tokenizer: Tokenizer | None) -> None:
    """ValueError if the vocabulary of `source` is not that of `tokenizer`."""
    size = source.facts["vocab_size"]
    if tokenizer is not None and tokenizer.vocab_size != size:
        raise ValueError(
            f"{source.path}: has {size:,} tokens and the tokenizer {tokenizer.vocab_size:,}: give the files that it "
            "was trained with, or its true --vocab-size"
        )
