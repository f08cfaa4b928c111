"""Checkpoints: our own, and those of other programs."""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import math
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

from data_utils.files import sealed_body
from megatron.gpt2.checkpoint.reader import MANIFEST, Checkpoint
from megatron.gpt2.checkpoint.source import Source
from megatron.gpt2.checkpoint.writer import manifest_bytes
from megatron.gpt2.config import ModelConfig
from megatron.gpt2.formats import Hints, open_source
from megatron.gpt2.formats.torch_files import load_pickle
from megatron.gpt2.model.gpt2 import parameter_specs
from tests.fuzz.fuzzing import Files, Target
from tests.megatron.gpt2.checkpoint.saved_states import find, save
from tests.megatron.gpt2.formats.made import (
    SHAPE,
    core,
    nanogpt_checkpoint,
    openai_state,
    random_weights,
    unpack,
    write_huggingface,
    write_megatron,
)

NO_HINTS = Hints()
ITERATION = "iter_0000007"
SEAL = b'"sha256": "'
VERSION_1 = Path(__file__).parents[1] / "megatron/gpt2/checkpoint/version_1.tar.gz"


def read_saved(folder: Path) -> None:
    """Whatever is taken has the values that were saved."""
    found, _ = find(folder)
    assert found == 7


def read_any(folder: Path) -> None:
    """The newest iteration, its hashes aside: each tensor is of its shape or refused, and none is larger than the files
    that should hold it."""
    checkpoint = Checkpoint(next(folder.glob("iter_*")))
    if problem := checkpoint.damage(hashed=False):
        raise ValueError(problem)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    for name in checkpoint.names():
        info = checkpoint.tensors[name]
        assert math.prod(info.shape) * info.dtype.itemsize <= size, f"{name} {info}"
        assert checkpoint.read(name).shape == info.shape


def reseal(files: Files) -> None:
    """The seal of a manifest that was changed."""
    name = next(name for name in files if name.endswith(MANIFEST))
    body, _, _ = files[name].rpartition(SEAL)
    files[name] = sealed_body((body or files[name]) + SEAL)


def reseal_tables(files: Files) -> None:
    """The manifest that the changed tables have, where they can be understood so far; else at least their hashes."""
    name = f"{ITERATION}/{MANIFEST}"
    manifest, tables = json.loads(files[name]), sorted(name for name in files if "/boxes/" in name)
    for table in tables:
        data = files[table]
        manifest["tables"][f"boxes/{Path(table).name}"].update(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    try:
        files[name] = manifest_bytes(7, manifest["facts"], [files[table] for table in tables])
    except (ValueError, TypeError, LookupError, AttributeError, AssertionError, RecursionError):
        files[name] = json.dumps(manifest).encode()
        reseal(files)


def read_foreign(folder: Path, hints: Hints = NO_HINTS) -> None:
    """Every tensor has the shape that the model of the facts asks for."""
    source: Source = open_source(folder, hints, log=lambda line: None)
    shapes = {
        name: spec.global_shape
        for name, spec in parameter_specs(ModelConfig(**source.facts["config"]["model"])).items()
    }
    for name in source.names():
        assert source.read(name).shape == source.tensors[name].shape == shapes[name.partition(".")[2]], name


def read_with_heads(folder: Path) -> None:
    """Of files that do not say how many heads there are."""
    read_foreign(folder, Hints(num_attention_heads=SHAPE.num_attention_heads))


def huggingface_shards(folder: Path) -> None:
    write_huggingface(folder)
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    names = openai_state(random_weights(), transposed=True)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, "model-1.safetensors")})
    )


def pickled(folder: Path, legacy: bool) -> None:
    """All kinds of things that genuine files hold."""
    base = torch.arange(48.0).view(6, 8)
    torch.save(
        {
            "model": core({"transformer.final_layernorm.bias": torch.ones(4)}, False),
            5: {0.5: None},
            "views": (base, base.t(), base[2:4, 1:3], torch.empty(0, 3), torch.tensor(3.5)),
            "set": {1, 2},
            "args": argparse.Namespace(lr=1.0, dtype=torch.float16),
            "numpy": np.arange(3),
            "long": -(2**70),
            "parameter": torch.nn.Parameter(base),
            "text": "é\n",
            "flags": [None, True, 1, 255, 65535, 2**31],
        },
        folder / "x.pt",
        _use_new_zipfile_serialization=not legacy,
    )


def read_pickled(folder: Path) -> None:
    """No tensor has more elements than the file has bytes, and each can be read."""
    path = folder / "x.pt"
    seen: set[int] = set()

    def visit(value: Any) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            assert value.numel() <= path.stat().st_size
            value.double().sum()
        elif isinstance(value, dict):
            for inner in value.values():
                visit(inner)
        elif isinstance(value, (list, tuple)):
            for inner in value:
                visit(inner)

    visit(load_pickle(path))


def nanogpt(folder: Path) -> None:
    torch.save(nanogpt_checkpoint()[0], folder / "ckpt.pt")


def plain_dcp(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the one process, which is meant
        save_dcp({"model": openai_state(random_weights(), transposed=True)}, checkpoint_id=folder, no_dist=True)


def megatron(form: str, version: int, legacy: bool = False) -> Callable[[Path], object]:
    return lambda folder: write_megatron(folder, random_weights(), form, version=version, tp=2, legacy=legacy)


TARGETS = [
    Target("checkpoint", lambda folder: save(folder, 7), read_saved),
    Target(
        "checkpoint: manifest behind its seal",
        lambda folder: save(folder, 7),
        read_any,
        f"{ITERATION}/{MANIFEST}",
        reseal,
    ),
    Target(
        "checkpoint: tables behind their hashes",
        lambda folder: save(folder, 7),
        read_any,
        f"{ITERATION}/boxes/*",
        reseal_tables,
    ),
    Target(
        "checkpoint: manifest of version 1",
        lambda folder: shutil.unpack_archive(VERSION_1, folder, filter="data"),
        read_any,
        f"iter_0000003/{MANIFEST}",
        reseal,
    ),
    Target("checkpoint: safetensors without hashes", lambda folder: save(folder, 7), read_any, "**/*.safetensors"),
    Target("Hugging Face: config.json", write_huggingface, read_foreign, "config.json"),
    Target("Hugging Face: safetensors", write_huggingface, read_foreign, "*.safetensors"),
    Target("Hugging Face: index", huggingface_shards, read_foreign, "*.index.json"),
    Target(".pt zip", lambda folder: pickled(folder, False), read_pickled),
    Target(".pt legacy", lambda folder: pickled(folder, True), read_pickled),
    Target("nanoGPT", nanogpt, read_foreign),
    Target("Megatron, flat", megatron("flat", 0), read_foreign),
    Target("Megatron v2, legacy .pt", megatron("v2", 3, legacy=True), read_foreign),
    Target("Megatron Core", megatron("fused", 3), read_foreign),
    Target("torch_dist", functools.partial(unpack, "plain-0.16.1"), read_foreign),
    Target(
        "torch_dist: .metadata", functools.partial(unpack, "fully_reshardable_dp2-0.16.1"), read_foreign, "**/.metadata"
    ),
    Target("DCP", plain_dcp, read_with_heads, "**/*"),
    Target("DCP: .metadata", plain_dcp, read_with_heads, ".metadata"),
]
