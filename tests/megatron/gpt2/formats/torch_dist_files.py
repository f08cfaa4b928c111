"""The checkpoints in `torch_dist/`, which megatron-core wrote, and what they hold."""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megatron.gpt2.formats import Hints, Source, open_source
from megatron.gpt2.formats.megatron_model import name_of_2019

FIXTURES = Path(__file__).parent / "torch_dist"
CASES = {path.name.removesuffix(".tar.xz"): path for path in sorted(FIXTURES.glob("*.tar.xz"))}
VOCABULARY, KINDS = 29, ("model", "master", "exp_avg", "exp_avg_sq")


def unpacked(base: Path) -> dict[str, Path]:
    """Every checkpoint, in a folder of its name in `base`."""
    for name in CASES:
        unpack(name, base / name)
    return {name: base / name for name in CASES}


def unpack(name: str, folder: Path) -> None:
    """The checkpoint of this name into `folder`."""
    with tarfile.open(CASES[name]) as archive:
        archive.extractall(folder, filter="data")


def opened(folder: Path) -> Source:
    return open_source(folder, Hints(vocab_size=VOCABULARY), log=lambda line: None)


def expected(kind: str) -> dict[str, Tensor]:
    """What megatron-core held in memory when it wrote, by our names."""
    with np.load(FIXTURES / "expected.npz") as held:
        return {
            name_of_2019(name.removeprefix(f"{kind}.")): torch.from_numpy(held[name])
            for name in held.files
            if name.startswith(f"{kind}.")
        }


def in_fp32(name: str) -> bool:
    return "fp32" in name
