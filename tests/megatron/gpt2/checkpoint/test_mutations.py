"""No change of any file of a checkpoint goes unnoticed; boxes and headers are what they should be."""

from __future__ import annotations

import random
import re
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch

from megatron.gpt2.checkpoint.boxes import check_cover
from megatron.gpt2.checkpoint.manifest import file_header
from megatron.gpt2.checkpoint.reader import Checkpoint
from megatron.gpt2.checkpoint.writer import Piece, write_tensors
from mpu import Box
from tests.megatron.gpt2.checkpoint.saved_states import (
    find,
    save,
)


def test_no_mutation_is_silent(tmp_path: Path) -> None:
    """Bit flips, truncations, insertions, deletions and swaps over every file: an error or the true values."""
    save(tmp_path, 7)
    folder = tmp_path / "iter_0000007"
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    original = {path: path.read_bytes() for path in files}
    chance, noticed = random.Random(0), 0
    trials = [(path, kind) for path in files for kind in ["flip"] * 120 + ["cut"] * 10 + ["grow", "empty", "missing"]]
    trials += [(path, "swap") for path in files]
    for path, kind in trials:
        data = bytearray(original[path])
        if kind == "flip":
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        elif kind == "cut":
            del data[chance.randrange(len(data)) :]
        elif kind == "grow":
            data += b"\0"
        elif kind == "swap":
            data = bytearray(original[chance.choice([other for other in files if other != path])])
        path.write_bytes(b"" if kind == "empty" else data)
        if kind == "missing":
            path.unlink()
        with pytest.raises(ValueError, match=re.escape(str(path))) as caught:
            find(tmp_path)
        assert "\n" not in str(caught.value)
        noticed += 1
        path.write_bytes(original[path])
    assert noticed == len(trials) > 600
    assert find(tmp_path) == (7, "")


def test_shards_of_another_rank_or_iteration_are_noticed_without_hashing(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, seed=1)
    save(tmp_path, 2, 2, seed=2)
    one, two = (tmp_path / f"iter_000000{i}" for i in (1, 2))
    for victim, other in ((two / "mp_rank_00", one / "mp_rank_00"), (one / "mp_rank_01", one / "mp_rank_01.x")):
        if not other.exists():
            shutil.copytree(one / "mp_rank_00", other)
        shutil.rmtree(victim)
        shutil.copytree(other, victim)
    for folder in (one, two):
        with pytest.raises(ValueError, match="header is not the one|bytes instead of"):
            Checkpoint(folder).read("model.row")


def test_boxes_that_overlap_in_pairs() -> None:
    """Volumes can add up where boxes overlap and leave a gap. Against a count of every entry."""
    chance, results = random.Random(0), []
    for _ in range(3000):
        shape = chance.choice([(), (4,), (3, 4), (1, 5), (5, 1)])
        boxes, missing = [], 1 if shape == () else torch.Size(shape).numel()
        while missing > 0:
            at = tuple(map(chance.randrange, shape))
            boxes.append(Box(at, tuple(chance.randint(1, size - i) for size, i in zip(shape, at, strict=True))))
            missing -= boxes[-1].numel
        counts = torch.zeros(shape)
        for box in boxes:
            counts[box.slices()] += 1
        try:
            check_cover("x", shape, boxes)
            results.append(True)
        except ValueError:
            results.append(False)
        assert results[-1] == bool((counts == 1).all()), boxes
    assert 300 < sum(results) < 2700


def test_header_matches_the_safetensors_library(tmp_path: Path) -> None:
    tensors = {
        "b": torch.rand(3, 5),
        "a": torch.arange(7, dtype=torch.uint8),
        "c": torch.rand(2).half(),
        "d": torch.tensor(2.0, dtype=torch.float64),
    }
    (tmp_path / "mp_rank_00").mkdir()
    write_tensors(
        tmp_path,
        "mp_rank_00/x.safetensors",
        1,
        {name: Piece(t, tuple(t.shape), (0,) * t.dim()) for name, t in tensors.items()},
    )
    loaded = safetensors.torch.load_file(tmp_path / "mp_rank_00/x.safetensors")
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], t) for name, t in tensors.items())
    header, starts, size = file_header(
        "mp_rank_00/x.safetensors",
        1,
        {n: (t.dtype, Box((0,) * t.dim(), tuple(t.shape))) for n, t in tensors.items()},
    )
    assert size == (tmp_path / "mp_rank_00/x.safetensors").stat().st_size
    assert all(start % tensors[name].itemsize == 0 for name, start in starts.items())
