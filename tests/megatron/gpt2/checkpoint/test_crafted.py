"""Checkpoints made to do harm: all hashes are right, as an attacker's would be. Each is an error in one line, at once,
in little memory, and nothing that it holds is executed."""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import json
import operator
import os
import pickle
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from data_utils.files import sealed_body, sealed_lines
from megatron.gpt2.checkpoint.boxes import extent
from megatron.gpt2.checkpoint.folder import TRACKER, find_checkpoint
from megatron.gpt2.checkpoint.manifest import MANIFEST, table_path, tensor_name
from megatron.gpt2.checkpoint.reader import Checkpoint
from megatron.gpt2.checkpoint.writer import Piece
from mpu import Box
from tests.megatron.gpt2.checkpoint.saved_states import write

FILES = [f"mp_rank_0{rank}/model.safetensors" for rank in (0, 1)]
WHOLE = torch.arange(48.0).view(8, 6)
NO_NUMBERS = [True, 1.0, -1, "1", None, [], {}, float("inf"), float("nan"), 1 << 62, 10**4000]
GONE = object()
IN_PLACE: dict[str, Callable[[Path], Any]] = {
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "empty": lambda path: path.symlink_to("/dev/null"),
    "loop": lambda path: path.symlink_to(path.name),
    "dangling": lambda path: path.symlink_to("nowhere"),
    "elsewhere": lambda path: path.symlink_to("/proc/self/status"),
    "other": lambda path: path.symlink_to(__file__),
    "sparse": lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 1 << 40),
}


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A save folder of one iteration: a matrix of 8 x 6, a half of its rows in each of two files, of two ranks."""
    save = tmp_path_factory.mktemp("written") / "save"
    for rank in (1, 0):
        piece = Piece(WHOLE[4 * rank : 4 * rank + 4], (8, 6), (4 * rank, 0))
        write(save, 1, {FILES[rank]: {"x": piece}}, rank=rank, world_size=2)
    return save


@pytest.fixture
def newest(written: Path, tmp_path: Path) -> Path:
    """The iteration in a copy of its own, to be changed."""
    return shutil.copytree(written, tmp_path / "save") / "iter_0000001"


@pytest.fixture(params=[1, 2])
def folder(newest: Path, request: pytest.FixtureRequest) -> Path:
    """The same, of each version of the format."""
    if request.param == 1:
        found = contents(newest)
        shutil.rmtree(newest / "boxes")
        reseal(newest, {**found, "version": 1})
    return newest


def contents(folder: Path) -> dict[str, Any]:
    """As a manifest of version 1 has it: "files" with their boxes, whichever table lists them."""
    found: dict[str, Any] = json.loads((folder / MANIFEST).read_bytes())
    del found["sha256"]
    if "tables" in found:
        del found["held"], found["tensors"]["x"]["held"]
        found["files"] = {
            file: info
            for table in found.pop("tables")
            for file, info in json.loads((folder / table).read_bytes().partition(b"\n")[2]).items()
        }
    return found


def reseal(folder: Path, changed: dict[str, Any]) -> None:
    """Write `changed` with right hashes: into the manifest if the folder is of version 1, else the files into one
    table, of which the manifest says what fits its boxes, as far as they can be understood."""
    if (folder / "boxes").exists():
        shutil.rmtree(folder / "boxes")
        (folder / "boxes").mkdir()
        changed, held = copy.deepcopy(changed), []
        files = changed.pop("files", None)
        table = b"{}\n" + json.dumps(files).encode()
        (folder / table_path(0)).write_bytes(table)
        boxes: dict[str, list[Box]] = {}
        with contextlib.suppress(Exception):
            for info in files.values():
                for key, box in info["boxes"].items():
                    boxes.setdefault(tensor_name(key), []).append(Box(tuple(box["offset"]), tuple(box["shape"])))
        with contextlib.suppress(Exception):
            for place, (name, info) in enumerate(changed["tensors"].items()):
                held.append([[0, 0, 8, 48]])
                with contextlib.suppress(Exception):
                    held[-1] = [[0, *extent(boxes[name])]]
                info["held"] = place
        info = {
            "bytes": len(table),
            "sha256": hashlib.sha256(table).hexdigest(),
            "files": len(files) if isinstance(files, dict) else 0,
        }
        changed |= {"held": held, "tables": {table_path(0): info}}
    (folder / MANIFEST).write_bytes(sealed_lines(changed))


def put(manifest: Any, way: str, value: Any) -> None:
    """Set what lies at `way`, a text of keys and indices, or remove it for GONE."""
    *keys, last = (int(key) if key.isdigit() else key for key in way.split())
    at = functools.reduce(operator.getitem, keys, manifest)
    if value is GONE:
        del at[last]
    else:
        at[last] = value


def change(folder: Path, *changes: tuple[str, Any]) -> None:
    """Change the manifest of the newer version alone."""
    manifest = json.loads((folder / MANIFEST).read_bytes())
    del manifest["sha256"]
    for way, value in changes:
        put(manifest, way, value)
    (folder / MANIFEST).write_bytes(sealed_lines(manifest))


def refused(folder: Path) -> str:
    """Open, hash and read it as a load does, with half a gigabyte more memory than there is by now; what the error
    says."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    began = time.process_time()
    resource.setrlimit(resource.RLIMIT_AS, (now + (1 << 29), hard))
    try:
        with pytest.raises(ValueError) as caught:
            checkpoint = find_checkpoint(folder.parent, log=lambda line: None)
            assert checkpoint is not None
            for name in checkpoint.names():
                checkpoint.read(name)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert time.process_time() - began < 1
    said = str(caught.value)
    assert str(folder) in said and "\n" not in said and len(said) < 1000, said
    return said


def test_the_checkpoint_is_good_before(folder: Path) -> None:
    reseal(folder, contents(folder))
    assert torch.equal(Checkpoint(folder).read("x"), WHOLE)
    assert Checkpoint(folder).verify() == ""


# ------------------------------------------------------------------------------------------- manifests as text


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
    (folder / MANIFEST).write_bytes(sealed_body(TEXTS[name]().encode()))
    refused(folder)


# ------------------------------------------------------------------------------------------- values and types

FILE, TABLE = f"files {FILES[0]}", f"tables {table_path(0)}"
SIZES = ["version", "iteration", "tensors x shape 1"]
SIZES += [f"{FILE} bytes", f"{FILE} boxes x offset 0", f"{FILE} boxes x shape 1"]


def test_the_right_size_as_a_fraction(folder: Path) -> None:
    manifest = contents(folder)
    put(manifest, f"{FILE} bytes", float(manifest["files"][FILES[0]]["bytes"]))
    reseal(folder, manifest)
    refused(folder)


@pytest.mark.parametrize("way", SIZES)
def test_what_is_no_size(folder: Path, way: str) -> None:
    true = contents(folder)
    for value in NO_NUMBERS:
        manifest = copy.deepcopy(true)
        put(manifest, way, value)
        reseal(folder, manifest)
        refused(folder)


@pytest.mark.parametrize(
    "way", [*(f"held 0 0 {column}" for column in range(4)), "tensors x held", f"{TABLE} bytes", f"{TABLE} files"]
)
def test_what_is_no_number_of_a_table(newest: Path, way: str) -> None:
    for value in NO_NUMBERS:
        change(newest, (way, value))
        refused(newest)


@pytest.mark.parametrize("value", [None, True, 3, "x", [], [[]], [1, 2], {"x": []}, {"x": {}}, {"x": None}], ids=repr)
def test_values_of_another_type(folder: Path, value: Any) -> None:
    true = contents(folder)
    ways = ["tensors", "tensors x", "tensors x dtype", "tensors x shape", "files", FILE]
    ways += [f"{FILE} {inner}" for inner in ("sha256", "boxes", "boxes x", "boxes x offset", "boxes x shape")]
    for way in ways:
        for other in (value, GONE):
            manifest = copy.deepcopy(true)
            put(manifest, way, other)
            reseal(folder, manifest)
            refused(folder)


def boxes(*found: tuple[list[int], list[int]]) -> tuple[str, Any]:
    return f"{FILE} boxes", {f"x#{i}": {"offset": offset, "shape": size} for i, (offset, size) in enumerate(found)}


STRANGER, SECOND = {"offset": [0], "shape": [1]}, {"offset": [4, 0], "shape": [4, 6]}
BOXES: dict[str, list[tuple[str, Any]]] = {
    "a gap": [boxes(([0, 0], [3, 6]))],
    "an overlap": [boxes(([1, 0], [4, 6]))],
    "the right number of entries": [boxes(([0, 0], [3, 6]), ([2, 0], [1, 6]))],
    "one box twice": [boxes(([0, 0], [2, 6]), ([0, 0], [2, 6]))],
    "outside": [boxes(([5, 0], [4, 6]))],
    "outside in the other dimension": [boxes(([0, 1], [4, 6]))],
    "beyond 2^61": [boxes(([1 << 61, 0], [4, 6]))],
    "greater than the file": [boxes(([0, 0], [1 << 61, 6]))],
    "greater than any file": [boxes(([0, 0], [1 << 61, 1 << 61])), ("tensors x shape", [(1 << 61) + 4, 1 << 61])],
    "empty": [boxes(([0, 0], [4, 6]), ([4, 0], [0, 6]))],
    "one dimension": [boxes(([0], [24]))],
    "none": [boxes()],
    "many": [boxes(*(([0, i], [1, 1]) for i in range(30_000))), ("tensors x shape", [1, 30_000])],
    "a shape of 2^120 entries": [("tensors x shape", [1 << 60, 1 << 60])],
    "a shape of none": [("tensors x shape", [0, 0])],
    "other dtype": [("tensors x dtype", "I32")],
    "smaller dtype": [("tensors x dtype", "U8")],
    "larger dtype": [("tensors x dtype", "F64")],
    "a box of a stranger": [(f"{FILE} boxes y", STRANGER)],
    "a tensor without a box": [("tensors y", {"dtype": "F32", "shape": [4]})],
    "three dimensions": [("tensors x shape", [8, 6, 1]), boxes(([0, 0, 0], [4, 6, 1]))],
    "more than the file holds": [
        ("tensors y", {"dtype": "U8", "shape": [1000]}),
        (f"{FILE} boxes y", {"offset": [0], "shape": [1000]}),
    ],
    "a file of two ranks": [
        ("files mp_rank_07/model.safetensors", {"bytes": 1000, "sha256": "", "boxes": {"x": SECOND}})
    ],
    "another version": [("version", 3)],
    "a version of nobody": [("version", 0)],
    "another iteration": [("iteration", 2)],
    "facts in a list": [("facts", [{}] * 1_000_000)],
}


@pytest.mark.parametrize("name", BOXES)
def test_boxes(folder: Path, name: str) -> None:
    manifest = contents(folder)
    for way, value in BOXES[name]:
        put(manifest, way, value)
    reseal(folder, manifest)
    refused(folder)


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


# ------------------------------------------------------------------------------------------------------ tables

SAID: list[tuple[tuple[str, Any], ...]] = [
    (("held 0 0 0", 2),),
    (("held 0 1 0", 0),),
    (("held 0 0 3", 23),),
    (("held 0 0 2", 5),),
    (("held 0", [[1, 4, 8, 24], [0, 0, 4, 24]]),),
    (("held 0", [[0, 0, 4, 23], [1, 4, 8, 25]]),),
    (("held 0", [[0, 9, 9, 24], [1, 9, 9, 24]]),),
    (("held 0", [[0, 0, 8, 48]]),),
    (("held 0 0", [0, 0, 4]),),
    (("held 0 0", [0, 0, 4, 24, 1]),),
    (("held", GONE),),
    (("tensors x held", 1),),
    (("tensors x held", GONE),),
    (("tensors y", {"dtype": "F32", "shape": [8, 6], "held": 0}),),
    (("tables", {}),),
    ((f"{TABLE} files", 2),),
    ((f"{TABLE} files", 0),),
    ((f"{TABLE} sha256", "0" * 64),),
    ((f"{TABLE} sha256", None),),
    ((f"{TABLE} bytes", 10),),
    ((f"{TABLE} bytes", 1 << 40),),
    (("tensors x shape", [1 << 30, 1 << 30]), ("held 0", [[0, 0, 1 << 30, 1 << 60]])),
    (("held", [[[0, 0, 4, 24], [1, 4, 8, 24]], [[i, 0, 1, 1] for i in range(100_000)]]),),
]


@pytest.mark.parametrize("changes", SAID)
def test_what_a_manifest_says_of_tables(newest: Path, changes: tuple[tuple[str, Any], ...]) -> None:
    change(newest, *changes)
    refused(newest)


def put_table(folder: Path, data: bytes, rank: int = 0) -> None:
    """A table of any bytes, of which the manifest says the right size and hash."""
    (folder / table_path(rank)).write_bytes(data)
    info = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest(), "files": 1}
    change(folder, (f"tables {table_path(rank)}", info))


OTHER_THINGS = [
    b"",
    b"\n",
    b"{}",
    b"{}\n",
    b"{}\n[]",
    b"{}\nnull",
    b"{}\n" + b"[" * 100_000,
    b"{}\n" + b'{"x":' * 100_000,
    b"{}\n" + b" " * (17 << 20),
    b"\x80\x04cposix\nsystem\n.",
    b'{}\n{"a": 1, "a": 1}',
]


@pytest.mark.parametrize("data", OTHER_THINGS, ids=lambda data: repr(data[:9]))
def test_tables_of_other_things(newest: Path, data: bytes) -> None:
    put_table(newest, data)
    refused(newest)


def test_a_file_of_two_tables(newest: Path) -> None:
    put_table(newest, (newest / table_path(0)).read_bytes(), rank=1)
    change(newest, ("held 0", [[0, 0, 4, 24], [1, 0, 4, 24]]))
    assert "another table lists too" in refused(newest)


@pytest.mark.parametrize(
    "path",
    [
        "../boxes/rank_00000.jsonl",
        "/dev/zero",
        "boxes/../boxes/rank_00000.jsonl",
        MANIFEST,
        FILES[0],
        "boxes/rank_00000.jsonl\n",
        "boxes/rank_٠٠٠٠٠.jsonl",
        "boxes//rank_00000.jsonl",
    ],
)
def test_tables_elsewhere(newest: Path, path: str) -> None:
    change(newest, (TABLE, GONE), ("tables", {path: {"bytes": 1, "sha256": "", "files": 1}}))
    assert "names the file" in refused(newest)


def test_a_newer_version_is_named(newest: Path) -> None:
    change(newest, ("version", 3))
    assert (
        f"{newest / MANIFEST}: format version 3 is newer than 2, the newest that this program reads: update the "
        "program" in refused(newest)
    )


# ------------------------------------------------------------------------------------------------------- files


@pytest.mark.timeout(120, method="thread")
@pytest.mark.parametrize("name", IN_PLACE)
@pytest.mark.parametrize("file", [MANIFEST, FILES[1], table_path(1)])
def test_what_is_no_file(newest: Path, file: str, name: str) -> None:
    (newest / file).unlink()
    IN_PLACE[name](newest / file)
    refused(newest)


@pytest.mark.timeout(120, method="thread")
@pytest.mark.parametrize("name", ["pipe", "endless"])
def test_what_has_no_size(folder: Path, name: str) -> None:
    manifest = contents(folder)
    manifest["files"]["mp_rank_00/more.safetensors"] = {"bytes": 0, "sha256": hashlib.sha256().hexdigest(), "boxes": {}}
    reseal(folder, manifest)
    IN_PLACE[name](folder / "mp_rank_00/more.safetensors")
    refused(folder)


class Payload:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("place", [MANIFEST, TRACKER, *FILES])
def test_pickles_are_not_executed(folder: Path, place: str) -> None:
    done = folder.parent / "executed"
    payload = pickle.dumps(Payload(done))
    pickle.loads(payload)
    done.unlink()  # it would have worked
    manifest = contents(folder)
    if place == TRACKER:
        (folder.parent / TRACKER).write_bytes(payload)
        checkpoint = find_checkpoint(folder.parent, log=lambda line: None)
        assert checkpoint is not None and torch.equal(checkpoint.read("x"), WHOLE)
    else:
        if place == MANIFEST:
            (folder / MANIFEST).write_bytes(sealed_body(payload))
        else:
            payload += bytes(manifest["files"][place]["bytes"] - len(payload))
            (folder / place).write_bytes(payload)
            manifest["files"][place]["sha256"] = hashlib.sha256(payload).hexdigest()
            reseal(folder, manifest)
        refused(folder)
    assert not done.exists()


def headers(header: bytes) -> Iterator[bytes]:
    """Others in the place of this one, with what comes before them."""
    entry = header[header.index(b'"x"') : header.rindex(b"}")]
    for old, new in [
        (b"F32", b"I32"),
        (b"[4,6]", b"[6,4]"),
        (b'"x"', b'"y"'),
        (b'"x"', b'"\x00"'),
        (b"[0,96]", b"[1,96]"),
        (b"[0,96]", b"[0,95]"),
        (b"[0,96]", b"[0,1152921504606846976]"),
        (b"mp_rank_00", b"mp_rank_01"),
        (b'"iteration":"1"', b'"iteration":"2"'),
        (entry, entry + b"," + entry),
        (entry, entry + b"," + entry.replace(b'"x"', b'"z"')),
    ]:
        changed = header.replace(old, new)
        yield len(changed).to_bytes(8, "little") + changed
    for changed in (b"", b"{}", b"null", pickle.dumps(header), header + b" ", b" " * (17 << 20)):
        yield len(changed).to_bytes(8, "little") + changed
    for size in (1 << 60, (1 << 64) - 1):
        yield size.to_bytes(8, "little") + header


def test_headers_that_disagree(folder: Path) -> None:
    """With the right sha256 and size in the manifest."""
    true, data = contents(folder), (folder / FILES[0]).read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    for start in headers(data[8:end]):
        assert start != data[:end]
        made = start + data[end:]
        (folder / FILES[0]).write_bytes(made)
        true["files"][FILES[0]].update(bytes=len(made), sha256=hashlib.sha256(made).hexdigest())
        reseal(folder, true)
        refused(folder)
