"""Tables made to do harm, and what a manifest says of them, with right hashes."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_utils.files import sealed_lines
from megatron.gpt2.checkpoint.manifest import MANIFEST, table_path
from tests.megatron.gpt2.checkpoint.crafted import FILES, IN_PLACE, NO_NUMBERS, Manifest, change, refused


def put_table(folder: Path, data: bytes, rank: int = 0) -> None:
    """A table of any bytes, of which the manifest says the right size and hash."""
    (folder / table_path(rank)).write_bytes(data)
    change(
        folder,
        lambda m: (
            m["tables"]
            .setdefault(table_path(rank), {"files": 1})
            .update(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
        ),
    )


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
    "2^60 entries": lambda m: (
        m["tensors"]["x"].update(shape=[1 << 30, 1 << 30]),
        m["held"].__setitem__(0, [[0, 0, 1 << 30, 1 << 60]]),
    ),
    "parts of nothing": lambda m: m["held"].append([[i, 0, 1, 1] for i in range(100_000)]),
}


@pytest.mark.parametrize("name", SAID)
def test_what_a_manifest_says_of_tables(newest: Path, name: str) -> None:
    change(newest, SAID[name])
    refused(newest)


@pytest.mark.parametrize(
    "place",
    [("held", 0, 0, column) for column in range(4)]
    + [("tensors", "x", "held"), ("tables", table_path(0), "bytes"), ("tables", table_path(0), "files")],
    ids=str,
)
def test_what_is_no_number_of_a_table(newest: Path, place: tuple[Any, ...]) -> None:
    true = json.loads((newest / MANIFEST).read_bytes())
    del true["sha256"]
    for value in NO_NUMBERS:
        manifest = copy.deepcopy(true)
        functools.reduce(operator.getitem, place[:-1], manifest)[place[-1]] = value
        (newest / MANIFEST).write_bytes(sealed_lines(manifest))
        refused(newest)


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
    change(newest, lambda m: m["held"].__setitem__(0, [[0, 0, 4, 24], [1, 0, 4, 24]]))
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
    change(newest, lambda m: m["tables"].update({path: m["tables"].pop(table_path(0))}))
    assert "names the file" in refused(newest)


@pytest.mark.timeout(120, method="thread")
@pytest.mark.parametrize("name", IN_PLACE)
def test_tables_that_are_no_file(newest: Path, name: str) -> None:
    (newest / table_path(1)).unlink()
    IN_PLACE[name](newest / table_path(1))
    refused(newest)


def test_a_newer_version_is_named(newest: Path) -> None:
    change(newest, lambda m: m.update(version=3))
    assert (
        f"{newest / MANIFEST}: format version 3 is newer than 2, the newest that this program reads: update the "
        "program" in refused(newest)
    )
