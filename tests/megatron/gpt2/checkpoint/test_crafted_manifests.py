"""Manifests made to do harm, with right hashes: texts, numbers, types, boxes and paths."""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.gpt2.checkpoint.manifest import MANIFEST, table_path
from megatron.gpt2.checkpoint.reader import Checkpoint
from tests.megatron.gpt2.checkpoint.crafted import FILES, NO_NUMBERS, WHOLE, Manifest, refused, seal
from tests.megatron.gpt2.checkpoint.versions import contents, reseal


def test_the_checkpoint_is_good_before(folder: Path) -> None:
    reseal(folder, contents(folder))
    assert torch.equal(Checkpoint(folder).read("x"), WHOLE)
    assert Checkpoint(folder).verify() == ""


def text(tensors: str = "", files: str = "", more: str = "") -> str:
    return (
        f'{{"version": 1, "iteration": 1, "facts": {{}}, "tensors": {{{tensors}}}, "files": {{{files}}}, '
        f'{more}"sha256": "'
    )


EMPTY, LONG = '{"dtype": "F32", "shape": [0]}', "x" * 10_000_000
TEXTS: dict[str, Callable[[], str]] = {  # some are megabytes: made when they are wanted
    "nothing": lambda: "",
    "a list": lambda: "[" + text(),
    "nested lists": lambda: text(more='"x": ' + "[" * 100_000),
    "nested objects": lambda: '{"x":' * 100_000,
    "a second key": lambda: text(more='"iteration": 1, '),
    "an escaped second key": lambda: text(more='"iter\\u0061tion": 1, '),
    "a second sha256": lambda: text(more='"sha256": "", '),
    "a second tensor": lambda: text(f'"x": {EMPTY}, "x": {EMPTY}'),
    "a lone surrogate": lambda: text('"\\ud800": 0'),
    "a number of many digits": lambda: text().replace("1", "1" * 100_000, 1),
    "a great exponent": lambda: text().replace("1", "1e400"),
    "lines in a name": lambda: text('"a\\nb\\rc": {"dtype": "F32", "shape": [1]}'),
    "a long name": lambda: text(f'"{LONG}": {{"dtype": "F32", "shape": [1]}}'),
    "a long path": lambda: text(files=f'"{LONG}": {{}}'),
    "many dimensions": lambda: text(f'"x": {{"dtype": "F32", "shape": [{"1," * 5_000_000}1]}}'),
    "great dimensions": lambda: text(f'"x": {{"dtype": "F32", "shape": [{f"{10**4000}," * 3000}1]}}'),
    "a million boxes": lambda: text(
        '"x": {"dtype": "U8", "shape": [1000000]}',
        f'"{FILES[0]}": {{"bytes": 1, "boxes": {{'
        + ",".join(f'"x#{i}": {{"offset": [{i}], "shape": [1]}}' for i in range(1_000_000))
        + "}}",
    ),
    "white space": lambda: " " * (17 << 20),
}


@pytest.mark.parametrize("name", TEXTS)
def test_texts(folder: Path, name: str) -> None:
    seal(folder, TEXTS[name]())
    refused(folder)


PLACES: dict[str, Callable[[Manifest, Any], None]] = {
    "version": lambda m, value: m.update(version=value),
    "iteration": lambda m, value: m.update(iteration=value),
    "bytes": lambda m, value: m["files"][FILES[0]].update(bytes=value),
    "the right bytes": lambda m, value: m["files"][FILES[0]].update(bytes=float(m["files"][FILES[0]]["bytes"])),
    "offset": lambda m, value: m["files"][FILES[0]]["boxes"]["x"].update(offset=[value, 0]),
    "shape of a box": lambda m, value: m["files"][FILES[0]]["boxes"]["x"].update(shape=[4, value]),
    "shape": lambda m, value: m["tensors"]["x"].update(shape=[8, value]),
}


@pytest.mark.parametrize("place", PLACES)
def test_what_is_no_size(folder: Path, place: str) -> None:
    true = contents(folder)
    for value in NO_NUMBERS:
        manifest = copy.deepcopy(true)
        PLACES[place](manifest, value)
        reseal(folder, manifest)
        refused(folder)


FILE = f"files {FILES[0]}"
WAYS = [
    "tensors",
    "tensors x",
    "tensors x dtype",
    "tensors x shape",
    "files",
    FILE,
    f"{FILE} sha256",
    f"{FILE} boxes",
    f"{FILE} boxes x",
    f"{FILE} boxes x offset",
    f"{FILE} boxes x shape",
]


@pytest.mark.parametrize("value", [None, True, 3, "x", [], [[]], [1, 2], {"x": []}, {"x": {}}, {"x": None}], ids=repr)
def test_values_of_another_type(folder: Path, value: Any) -> None:
    true = contents(folder)
    for way in WAYS:
        manifest, keys = copy.deepcopy(true), way.split()
        at = functools.reduce(operator.getitem, keys[:-1], manifest)
        at[keys[-1]] = value
        reseal(folder, manifest)
        refused(folder)
        del at[keys[-1]]
        reseal(folder, manifest)
        refused(folder)


def boxes(*first: tuple[list[int], list[int]], shape: tuple[int, int] = (8, 6)) -> Callable[[Manifest], None]:
    def change(manifest: Manifest) -> None:
        manifest["tensors"]["x"]["shape"] = list(shape)
        manifest["files"][FILES[0]]["boxes"] = {
            f"x#{i}": {"offset": offset, "shape": size} for i, (offset, size) in enumerate(first)
        }

    return change


BOXES: dict[str, Callable[[Manifest], Any]] = {
    "a gap": boxes(([0, 0], [3, 6])),
    "an overlap": boxes(([1, 0], [4, 6])),
    "the right number of entries": boxes(([0, 0], [3, 6]), ([2, 0], [1, 6])),
    "one box twice": boxes(([0, 0], [2, 6]), ([0, 0], [2, 6])),
    "outside": boxes(([5, 0], [4, 6])),
    "outside in the other dimension": boxes(([0, 1], [4, 6])),
    "beyond 2^61": boxes(([1 << 61, 0], [4, 6])),
    "greater than the file": boxes(([0, 0], [1 << 61, 6])),
    "greater than any file": boxes(([0, 0], [1 << 61, 1 << 61]), shape=((1 << 61) + 4, 1 << 61)),
    "empty": boxes(([0, 0], [4, 6]), ([4, 0], [0, 6])),
    "one dimension": boxes(([0], [24])),
    "none": boxes(),
    "a shape of 2^120 entries": boxes(([0, 0], [4, 6]), shape=(1 << 60, 1 << 60)),
    "a shape of none": boxes(([0, 0], [4, 6]), shape=(0, 0)),
    "other dtype": lambda m: m["tensors"]["x"].update(dtype="I32"),
    "smaller dtype": lambda m: m["tensors"]["x"].update(dtype="U8"),
    "larger dtype": lambda m: m["tensors"]["x"].update(dtype="F64"),
    "a box of a stranger": lambda m: m["files"][FILES[0]]["boxes"].update(y={"offset": [0], "shape": [1]}),
    "a tensor without a box": lambda m: m["tensors"].update(y={"dtype": "F32", "shape": [4]}),
    "three dimensions": lambda m: (
        m["tensors"]["x"]["shape"].append(1),
        [numbers.append(end) for file in FILES for end, numbers in enumerate(m["files"][file]["boxes"]["x"].values())],
    ),
    "more than the file holds": lambda m: (
        m["tensors"].update(y={"dtype": "U8", "shape": [1000]}),
        m["files"][FILES[0]]["boxes"].update(y={"offset": [0], "shape": [1000]}),
    ),
    "a file of two ranks": lambda m: m["files"].update({"mp_rank_07/model.safetensors": m["files"][FILES[1]]}),
    "another version": lambda m: m.update(version=3),
    "a version of nobody": lambda m: m.update(version=0),
    "another iteration": lambda m: m.update(iteration=2),
    "facts in a list": lambda m: m.update(facts=[{}] * 1_000_000),
}


@pytest.mark.parametrize("name", BOXES)
def test_boxes(folder: Path, name: str) -> None:
    manifest = contents(folder)
    BOXES[name](manifest)
    reseal(folder, manifest)
    refused(folder)
    if "dtype" not in name:  # those are seen when the file's header is compared
        with pytest.raises(ValueError, match=f"{MANIFEST}|{table_path(0)}"):
            Checkpoint(folder).read("x")


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "/dev/zero",
        "..",
        "../../secret",
        "../iter_0000002/mp_rank_00/model.safetensors",
        "",
        ".",
        MANIFEST,
        "mp_rank_00/../../secret",
        "mp_rank_00/../mp_rank_00/model.safetensors",
        "mp_rank_00//model.safetensors",
        "./mp_rank_00/model.safetensors",
        "mp_rank_00/model.safetensors/",
        "mp_rank_00/model.safetensors\n",
        "mp_rank_00/mo\0del.safetensors",
        "mp_rank_00\\..\\x.safetensors",
        "mp_rank_٠٠/model.safetensors",
        "mp_rank_00/x.pt",
        "~/x.safetensors",
        "$HOME/x.safetensors",
        "C:/x.safetensors",
        "file:///etc/passwd",
    ],
)
def test_paths_elsewhere(folder: Path, path: str) -> None:
    (folder.parent / "secret").write_bytes((folder / FILES[0]).read_bytes())
    manifest = contents(folder)
    manifest["files"][path] = manifest["files"].pop(FILES[0])
    reseal(folder, manifest)
    assert "names the file" in refused(folder)
