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
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from data_utils.files.sealed_json import sealed_body, sealed_lines
from megatron.gpt2.checkpoint.folder import TRACKER, Checkpoint, Piece, find_checkpoint, write_checkpoint
from megatron.gpt2.checkpoint.manifest import MANIFEST, table_path
from tests.megatron.gpt2.checkpoint.versions import contents, make_version_1, reseal

FILES = [f"mp_rank_0{rank}/model.safetensors" for rank in (0, 1)]
WHOLE = torch.arange(48.0).view(8, 6)
Manifest = dict[str, Any]


@pytest.fixture
def newest(tmp_path: Path) -> Path:
    """An iteration: one matrix of 8 x 6, a half of its rows in each of two files, of two ranks."""
    for rank in (1, 0):
        write_checkpoint(tmp_path / "save", 1, files={FILES[rank]: {"x": Piece(WHOLE[4 * rank:4 * rank + 4], (8, 6),
                         (4 * rank, 0))}}, facts={}, rank=rank, world_size=2, attempt="a", timeout_s=5)
    return tmp_path / "save" / "iter_0000001"


@pytest.fixture(params=[1, 2])
def folder(newest: Path, request: pytest.FixtureRequest) -> Path:
    """The same, of each version of the format."""
    if request.param == 1:
        make_version_1(newest)
    return newest


def seal(folder: Path, body: str | bytes) -> None:
    """Write the manifest that begins with `body`, up to its own sha256."""
    body = body.encode() if isinstance(body, str) else body
    (folder / MANIFEST).write_bytes(sealed_body(body))


@contextlib.contextmanager
def little_memory() -> Iterator[None]:
    """Half a gigabyte more than there is by now."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + (1 << 29), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def refused(folder: Path) -> str:
    """Open, hash and read it as a load does; what the error says."""
    began = time.process_time()
    with little_memory(), pytest.raises(ValueError) as caught:
        checkpoint = find_checkpoint(folder.parent, log=lambda line: None)
        assert checkpoint is not None
        for name in checkpoint.names():
            checkpoint.read(name)
    assert time.process_time() - began < 1
    said = str(caught.value)
    assert str(folder) in said and "\n" not in said and len(said) < 1000, said
    return said


def test_the_checkpoint_is_good_before(folder: Path) -> None:
    reseal(folder, contents(folder))
    assert torch.equal(Checkpoint(folder).read("x"), WHOLE)
    assert Checkpoint(folder).verify() == ""


def text(tensors: str = "", files: str = "", more: str = "") -> str:
    return (f'{{"version": 1, "iteration": 1, "facts": {{}}, "tensors": {{{tensors}}}, "files": {{{files}}}, '
            f'{more}"sha256": "')


EMPTY, LONG = '{"dtype": "F32", "shape": [0]}', "x" * 10_000_000
TEXTS = {
    "nothing": "",
    "a list": "[" + text(),
    "nested lists": text(more='"x": ' + "[" * 100_000),
    "nested objects": '{"x":' * 100_000,
    "a second key": text(more='"iteration": 1, '),
    "an escaped second key": text(more='"iter\\u0061tion": 1, '),
    "a second sha256": text(more='"sha256": "", '),
    "a second tensor": text(f'"x": {EMPTY}, "x": {EMPTY}'),
    "a lone surrogate": text('"\\ud800": 0'),
    "a number of many digits": text().replace("1", "1" * 100_000, 1),
    "a great exponent": text().replace("1", "1e400"),
    "lines in a name": text('"a\\nb\\rc": {"dtype": "F32", "shape": [1]}'),
    "a long name": text(f'"{LONG}": {{"dtype": "F32", "shape": [1]}}'),
    "a long path": text(files=f'"{LONG}": {{}}'),
    "many dimensions": text(f'"x": {{"dtype": "F32", "shape": [{"1," * 5_000_000}1]}}'),
    "great dimensions": text(f'"x": {{"dtype": "F32", "shape": [{f"{10**4000}," * 3000}1]}}'),
    "a million boxes": text('"x": {"dtype": "U8", "shape": [1000000]}', f'"{FILES[0]}": {{"bytes": 1, "boxes": {{'
                            + ",".join(f'"x#{i}": {{"offset": [{i}], "shape": [1]}}' for i in range(1_000_000)) + "}}"),
    "white space": " " * (17 << 20),
}


@pytest.mark.parametrize("name", TEXTS)
def test_texts(folder: Path, name: str) -> None:
    seal(folder, TEXTS[name])
    refused(folder)


NO_NUMBERS = [True, 1.0, -1, "1", None, [], {}, float("inf"), float("nan"), 1 << 62, 10**4000]
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
WAYS = ["tensors", "tensors x", "tensors x dtype", "tensors x shape", "files", FILE, f"{FILE} sha256", f"{FILE} boxes",
        f"{FILE} boxes x", f"{FILE} boxes x offset", f"{FILE} boxes x shape"]


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
            f"x#{i}": {"offset": offset, "shape": size} for i, (offset, size) in enumerate(first)}
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
    "three dimensions": lambda m: (m["tensors"]["x"]["shape"].append(1), [
        numbers.append(end) for file in FILES for end, numbers in enumerate(m["files"][file]["boxes"]["x"].values())]),
    "more than the file holds": lambda m: (m["tensors"].update(y={"dtype": "U8", "shape": [1000]}),
                                           m["files"][FILES[0]]["boxes"].update(y={"offset": [0], "shape": [1000]})),
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


@pytest.mark.parametrize("path", [
    "/etc/passwd", "/dev/zero", "..", "../../secret", "../iter_0000002/mp_rank_00/model.safetensors", "", ".", MANIFEST,
    "mp_rank_00/../../secret", "mp_rank_00/../mp_rank_00/model.safetensors", "mp_rank_00//model.safetensors",
    "./mp_rank_00/model.safetensors", "mp_rank_00/model.safetensors/", "mp_rank_00/model.safetensors\n",
    "mp_rank_00/mo\0del.safetensors", "mp_rank_00\\..\\x.safetensors", "mp_rank_٠٠/model.safetensors",
    "mp_rank_00/x.pt", "~/x.safetensors", "$HOME/x.safetensors", "C:/x.safetensors", "file:///etc/passwd"])
def test_paths_elsewhere(folder: Path, path: str) -> None:
    (folder.parent / "secret").write_bytes((folder / FILES[0]).read_bytes())
    manifest = contents(folder)
    manifest["files"][path] = manifest["files"].pop(FILES[0])
    reseal(folder, manifest)
    assert "names the file" in refused(folder)


IN_PLACE: dict[str, Callable[[Path], Any]] = {
    "pipe": os.mkfifo, "folder": Path.mkdir, "endless": lambda path: path.symlink_to("/dev/zero"),
    "empty": lambda path: path.symlink_to("/dev/null"), "loop": lambda path: path.symlink_to(path.name),
    "dangling": lambda path: path.symlink_to("nowhere"), "elsewhere": lambda path: path.symlink_to("/proc/self/status"),
    "other": lambda path: path.symlink_to(__file__), "sparse": lambda path: os.truncate(
        os.open(path, os.O_CREAT | os.O_WRONLY), 1 << 40)}


@pytest.mark.timeout(30, method="thread")
@pytest.mark.parametrize("name", IN_PLACE)
@pytest.mark.parametrize("file", [MANIFEST, FILES[1]])
def test_what_is_no_file(folder: Path, file: str, name: str) -> None:
    (folder / file).unlink()
    IN_PLACE[name](folder / file)
    refused(folder)


@pytest.mark.timeout(30, method="thread")
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
            seal(folder, payload)
        else:
            payload += bytes(manifest["files"][place]["bytes"] - len(payload))
            (folder / place).write_bytes(payload)
            manifest["files"][place]["sha256"] = hashlib.sha256(payload).hexdigest()
            reseal(folder, manifest)
        refused(folder)
    assert not done.exists()


def test_headers_that_disagree(folder: Path) -> None:
    """With the right sha256 and size in the manifest; the last two say another size of the header."""
    true = contents(folder)
    data = (folder / FILES[0]).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, values = data[8:8 + length], data[8 + length:]
    entry = header[header.index(b'"x"'):header.rindex(b"}")]
    exchanges = [(b"F32", b"I32"), (b"[4,6]", b"[6,4]"), (b'"x"', b'"y"'), (b'"x"', b'"\x00"'), (b"[0,96]", b"[1,96]"),
                 (b"[0,96]", b"[0,95]"), (b"[0,96]", b"[0,1152921504606846976]"), (b"mp_rank_00", b"mp_rank_01"),
                 (b'"iteration":"1"', b'"iteration":"2"'), (entry, entry + b"," + entry),
                 (entry, entry + b"," + entry.replace(b'"x"', b'"z"'))]
    headers = [header.replace(*exchange) for exchange in exchanges]
    headers += [b"", b"{}", b"null", pickle.dumps(header), header + b" ", b" " * (17 << 20)]
    starts = [len(changed).to_bytes(8, "little") + changed for changed in headers]
    starts += [size.to_bytes(8, "little") + header for size in (1 << 60, (1 << 64) - 1)]
    for start in starts:
        assert start != data[:8 + length]
        (folder / FILES[0]).write_bytes(start + values)
        true["files"][FILES[0]].update(bytes=len(start + values), sha256=hashlib.sha256(start + values).hexdigest())
        reseal(folder, true)
        refused(folder)


# ------------------------------------------------------------------------------------- tables, and what is said of them


def change(folder: Path, crafted: Callable[[Manifest], Any]) -> None:
    manifest = json.loads((folder / MANIFEST).read_bytes())
    del manifest["sha256"]
    crafted(manifest)
    (folder / MANIFEST).write_bytes(sealed_lines(manifest))


def put_table(folder: Path, data: bytes, rank: int = 0) -> None:
    """A table of any bytes, of which the manifest says the right size and hash."""
    (folder / table_path(rank)).write_bytes(data)
    change(folder, lambda m: m["tables"].setdefault(table_path(rank), {"files": 1}).update(
        bytes=len(data), sha256=hashlib.sha256(data).hexdigest()))


SAID: dict[str, Callable[[Manifest], Any]] = {
    "another table": lambda m: m["held"][0][0].__setitem__(0, 2),
    "the tables backwards": lambda m: m["held"][0].reverse(),
    "one table twice": lambda m: m["held"][0][1].__setitem__(0, 0),
    "fewer entries": lambda m: m["held"][0][0].__setitem__(3, 23),
    "entries of another": lambda m: [part.__setitem__(3, 23 + 2 * i) for i, part in enumerate(m["held"][0])],
    "other rows": lambda m: m["held"][0][0].__setitem__(2, 5),
    "rows of nobody": lambda m: [part.__setitem__(slice(1, 3), [9, 9]) for part in m["held"][0]],
    "one table alone": lambda m: m["held"].__setitem__(0, [[0, 0, 8, 48]]),
    "another list": lambda m: m["tensors"]["x"].update(held=1),
    "no list": lambda m: m["tensors"]["x"].pop("held"),
    "a list too short": lambda m: m["held"][0][0].pop(),
    "a list too long": lambda m: m["held"][0][0].append(1),
    "no lists": lambda m: m.pop("held"),
    "no tables": lambda m: m.update(tables={}),
    "more files": lambda m: m["tables"][table_path(0)].update(files=2),
    "no files": lambda m: m["tables"][table_path(0)].update(files=0),
    "another hash": lambda m: m["tables"][table_path(0)].update(sha256="0" * 64),
    "a hash of no text": lambda m: m["tables"][table_path(0)].update(sha256=None),
    "another size": lambda m: m["tables"][table_path(0)].update(bytes=10),
    "more than is read": lambda m: m["tables"][table_path(0)].update(bytes=1 << 40),
    "a tensor of another table": lambda m: m["tensors"].update(y=m["tensors"]["x"]),
    "two tables with one file": lambda m: m["tables"].update({table_path(1): m["tables"][table_path(0)]}),
    "2^60 entries": lambda m: (m["tensors"]["x"].update(shape=[1 << 30, 1 << 30]),
                               m["held"].__setitem__(0, [[0, 0, 1 << 30, 1 << 60]])),
    "parts of nothing": lambda m: m["held"].append([[i, 0, 1, 1] for i in range(100_000)]),
}


@pytest.mark.parametrize("name", SAID)
def test_what_a_manifest_says_of_tables(newest: Path, name: str) -> None:
    change(newest, SAID[name])
    refused(newest)


@pytest.mark.parametrize("place", [("held", 0, 0, column) for column in range(4)] + [
    ("tensors", "x", "held"), ("tables", table_path(0), "bytes"), ("tables", table_path(0), "files")], ids=str)
def test_what_is_no_number_of_a_table(newest: Path, place: tuple[Any, ...]) -> None:
    true = json.loads((newest / MANIFEST).read_bytes())
    del true["sha256"]
    for value in NO_NUMBERS:
        manifest = copy.deepcopy(true)
        functools.reduce(operator.getitem, place[:-1], manifest)[place[-1]] = value
        (newest / MANIFEST).write_bytes(sealed_lines(manifest))
        refused(newest)


OTHER_THINGS = [
    b"", b"\n", b"{}", b"{}\n", b"{}\n[]", b"{}\nnull", b"{}\n" + b"[" * 100_000, b"{}\n" + b'{"x":' * 100_000,
    b"{}\n" + b" " * (17 << 20), b"\x80\x04cposix\nsystem\n.", b'{}\n{"a": 1, "a": 1}']


@pytest.mark.parametrize("data", OTHER_THINGS, ids=lambda data: repr(data[:9]))
def test_tables_of_other_things(newest: Path, data: bytes) -> None:
    put_table(newest, data)
    refused(newest)


def test_a_file_of_two_tables(newest: Path) -> None:
    put_table(newest, (newest / table_path(0)).read_bytes(), rank=1)
    change(newest, lambda m: m["held"].__setitem__(0, [[0, 0, 4, 24], [1, 0, 4, 24]]))
    assert "another table lists too" in refused(newest)


@pytest.mark.parametrize("path", [
    "../boxes/rank_00000.jsonl", "/dev/zero", "boxes/../boxes/rank_00000.jsonl", MANIFEST, FILES[0],
    "boxes/rank_00000.jsonl\n", "boxes/rank_٠٠٠٠٠.jsonl", "boxes//rank_00000.jsonl"])
def test_tables_elsewhere(newest: Path, path: str) -> None:
    change(newest, lambda m: m["tables"].update({path: m["tables"].pop(table_path(0))}))
    assert "names the file" in refused(newest)


@pytest.mark.timeout(30, method="thread")
@pytest.mark.parametrize("name", IN_PLACE)
def test_tables_that_are_no_file(newest: Path, name: str) -> None:
    (newest / table_path(1)).unlink()
    IN_PLACE[name](newest / table_path(1))
    refused(newest)


def test_a_newer_version_is_named(newest: Path) -> None:
    change(newest, lambda m: m.update(version=3))
    assert f"{newest / MANIFEST}: format version 3 is newer than 2, the newest that this program reads: update the " \
        "program" in refused(newest)
