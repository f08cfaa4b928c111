"""Checkpoints whose hashes are right and whose paths, headers, boxes or types are not: each is refused at once."""

from __future__ import annotations

import hashlib
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from data_utils.files import sealed_body
from megatron.gpt2.checkpoint.manifest import MANIFEST
from megatron.gpt2.checkpoint.reader import Checkpoint
from megatron.gpt2.checkpoint.writer import Piece, write_tensors
from tests.megatron.gpt2.checkpoint.versions import reseal


def craft(
    folder: Path, version: int, header: bytes | None = None, file: str = "mp_rank_00/model.safetensors", **changes: Any
) -> Path:
    """A checkpoint whose hashes are all right, whatever else is changed in its manifest."""
    folder = folder / "iter_0000001"
    (folder / "mp_rank_00").mkdir(parents=True)
    made = write_tensors(folder, "mp_rank_00/model.safetensors", 1, {"x": Piece(torch.ones(4), (4,), (0,))})
    info = made
    if header is not None:
        path = folder / "mp_rank_00/model.safetensors"
        data = len(header).to_bytes(8, "little") + header + torch.ones(4).numpy().tobytes()
        path.write_bytes(data)
        info.update(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    info.update(changes.pop("info", {}))
    parts = {
        "iteration": 1,
        "facts": {},
        "tensors": {"x": {"dtype": "F32", "shape": (4,)}},
        "files": {file: info},
        **changes,
    }
    if version > 1:
        (folder / "boxes").mkdir()
    reseal(folder, {"version": version, **parts})
    return folder


ONE = '"version": 1, "iteration": 1, "facts": {}, "tensors": {}, "files": {}'


@pytest.mark.parametrize("version", [1, 2])
def test_crafted_files_are_refused_at_once(tmp_path: Path, version: int) -> None:
    """Each has right hashes, as an attacker's would."""
    good = craft(tmp_path / "good", version)
    assert torch.equal(Checkpoint(good).read("x"), torch.ones(4))
    entry = '"x":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}'
    metadata = '"__metadata__":{"format":"pt","file":"mp_rank_00/model.safetensors","iteration":"1"}'
    box = {"offset": [0], "shape": [4]}
    crafted: dict[str, dict[str, Any]] = {
        f"path {file!r}": {"file": file}
        for file in (
            "/etc/passwd",
            "../iter_0000002/mp_rank_00/model.safetensors",
            "mp_rank_00/../../x.safetensors",
            "..",
            "mp_rank_00//model.safetensors",
            "manifest.json",
            "mp_rank_00\\..\\x.safetensors",
            "",
            "mp_rank_00/a.pt",
            "mp_rank_00/model.safetensors\n",
            "mp_rank_00/\x00.safetensors",
        )
    }
    crafted |= {
        "duplicate key in a header": {"header": f"{{{metadata},{entry},{entry}}}".encode()},
        "huge header": {"header": f"{{{metadata},{entry}}}".encode() + b" " * (17 << 20)},
        "pickle for a header": {"header": b"\x80\x04cposix\nsystem\n."},
        "pickle for a file": {"header": b"", "info": {"bytes": 24}},
        "bytes": {"info": {"bytes": 1 << 60}},
        "negative": {"info": {"boxes": {"x": {"offset": [-1], "shape": [4]}}}},
        "float": {"info": {"boxes": {"x": {"offset": [0.0], "shape": [4]}}}},
        "true": {"info": {"boxes": {"x": {"offset": [False], "shape": [4]}}}},
        "dimensions": {"info": {"boxes": {"x": {"offset": [0, 0], "shape": [4, 1]}}}},
        "outside": {"info": {"boxes": {"x": {"offset": [1], "shape": [4]}}}},
        "overlap": {"info": {"boxes": {"x": {"offset": [0], "shape": [3]}, "x#1": {"offset": [2], "shape": [1]}}}},
        "gap": {"info": {"boxes": {"x": {"offset": [0], "shape": [3]}}}},
        "no box": {"info": {"boxes": {}}},
        "stranger": {"info": {"boxes": {"x": box, "y": box}}},
        "list": {"info": {"boxes": [box]}},
        "number": {"info": {"boxes": 3}},
        "bomb": {"tensors": {"x": {"dtype": "F32", "shape": [1 << 62, 1 << 62]}}},
        "many boxes": {
            "tensors": {"x": {"dtype": "F32", "shape": [1, 30_000]}},
            "info": {"boxes": {f"x#{i}": {"offset": [0, i], "shape": [1, 1]} for i in range(30_000)}},
        },
        "many dimensions": {"tensors": {"x": {"dtype": "F32", "shape": [1] * 1000}}},
        "dtype": {"tensors": {"x": {"dtype": "F33", "shape": [4]}}},
        "other dtype": {"tensors": {"x": {"dtype": "I32", "shape": [4]}}},
        "unhashable": {"tensors": {"x": {"dtype": ["F32"], "shape": [4]}}},
        "no shape": {"tensors": {"x": {"dtype": "F32"}}},
        "iteration": {"iteration": 2},
        "iteration 2": {"iteration": "1"},
    }
    texts = {
        "twice": f'{{{ONE}, "iteration": 1, "sha256": "',
        "deep": f'{{{ONE}, "x": {"[" * 100_000}"sha256": "',
        "digits": f'{{{ONE}, "x": {"9" * 100_000}, "sha256": "',
        "version": f'{{{ONE[15:]}, "version": 3, "sha256": "',
        "none": '{"sha256": "',
        "array": '["',
        "surrogate": f'{{{ONE}, "\\ud800": 1, "\\ud800": 1, "sha256": "',
    }
    for name, changes in crafted.items():
        folder = craft(tmp_path / hashlib.sha256(name.encode()).hexdigest()[:8], version, **changes)
        refused(folder, name)
    for name, text in texts.items():
        (good / MANIFEST).write_bytes(sealed_body(text.encode()))
        refused(good, name)
    with open(good / MANIFEST, "wb") as stream:
        stream.truncate(1 << 40)  # takes no room on the disk
    refused(good, "huge manifest")


def refused(folder: Path, name: str) -> None:
    start = time.process_time()
    with pytest.raises(ValueError, match=re.escape(str(folder))) as caught:
        Checkpoint(folder).read("x")
    assert "\n" not in str(caught.value), name
    assert time.process_time() - start < 1, name
