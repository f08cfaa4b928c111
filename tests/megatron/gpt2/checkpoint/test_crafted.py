"""Crafted checkpoints with correct hashes, as an attacker could make them. Each checkpoint must cause an error in one
line, quickly and with little memory, and must execute no code.

A manifest of version 1 contains the list of files and slices, which later versions have in tables. The reader parses
the list of both versions with the same function. The tests therefore change the list in a manifest of version 1.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import operator
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from data_utils.files import append_checksum, checksummed_lines
from megatron.gpt2.checkpoint.interface import check_metadata
from megatron.gpt2.checkpoint.reader import MANIFEST, NativeCheckpoint, table_path
from megatron.gpt2.checkpoint.save_folder import find_checkpoint
from megatron.gpt2.checkpoint.writer import ShardedTensor
from megatron.gpt2.config.arguments import parse
from megatron.gpt2.dist.ranks import RankInfo
from megatron.gpt2.generate.load_model import load_for_inference
from megatron.gpt2.train.setup import build_context
from tests.fuzz.fuzzing import refusal
from tests.megatron.gpt2.checkpoint.saved_states import write
from tests.megatron.gpt2.train.training_runs import finish, start, steps, write_text

FILES = [f"mp_rank_0{rank}/model.safetensors" for rank in (0, 1)]
FILE, TABLE = f"files {FILES[0]}", f"tables {table_path(0)}"
WHOLE = torch.arange(48.0).view(8, 6)
Change = tuple[str, Any]  # (path to a value: keys and indices in one text, new value)


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a --save folder with one iteration: a matrix of 8 x 6 in two files of two ranks, each with half of the
    rows."""
    save = tmp_path_factory.mktemp("written") / "save"
    for rank in (1, 0):
        shard = ShardedTensor(WHOLE[4 * rank : 4 * rank + 4], (8, 6), (4 * rank, 0))
        write(save, 1, {FILES[rank]: {"x": shard}}, rank=rank, world_size=2)
    return save


@pytest.fixture
def newest(written: Path, tmp_path: Path) -> Path:
    """Return a copy of the iteration that the test may change."""
    return shutil.copytree(written, tmp_path / "save") / "iter_0000001"


@pytest.fixture
def oldest(newest: Path) -> Path:
    """Return a copy of the iteration, converted to format version 1."""
    manifest = contents(newest)
    tables = [(newest / table).read_bytes() for table in manifest.pop("tables")]
    del manifest["table_ranges"], manifest["tensors"]["x"]["table_ranges"]
    files = {file: info for table in tables for file, info in json.loads(table.partition(b"\n")[2]).items()}
    for info in files.values():
        info["boxes"] = info.pop("slices")
    shutil.rmtree(newest / "tables")
    old = {"version": 1, "facts": manifest.pop("metadata"), "files": files}
    (newest / MANIFEST).write_bytes(checksummed_lines(manifest | old))
    return newest


def contents(folder: Path) -> dict[str, Any]:
    """Return the manifest without its hash."""
    manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_bytes())
    del manifest["sha256"]
    return manifest


def change(folder: Path, *changes: Change, base: dict[str, Any] | None = None) -> None:
    """Change the manifest (default: the one in the folder), and update its hash."""
    manifest: Any = copy.deepcopy(base) if base else contents(folder)
    for way, value in changes:
        *keys, last = (int(key) if key.isdigit() else key for key in way.split(" "))
        at: Any = functools.reduce(operator.getitem, keys, manifest)
        at[last] = value
    (folder / MANIFEST).write_bytes(checksummed_lines(manifest))


# The tables and the manifest that a program of version 2 wrote for the files of `written`.
OLD_TABLES = [
    '{"files": 1, "tensors": {"x": ["F32", [8, 6], 0, 4, 24]}}\n'
    '{"mp_rank_00/model.safetensors": {"bytes": 248, "sha256": "d4aec4a82d31a94a348022be5a5a07959834ebe49cbfd8aeeb1fa4'
    '19adae5965", "boxes": {"x": {"offset": [0, 0], "shape": [4, 6]}}}}\n',
    '{"files": 1, "tensors": {"x": ["F32", [8, 6], 4, 8, 24]}}\n'
    '{"mp_rank_01/model.safetensors": {"bytes": 248, "sha256": "e77ace22b31de50f564c129534ac8d4ef8adb3629bfd563386222c'
    '874c1bb4e1", "boxes": {"x": {"offset": [4, 0], "shape": [4, 6]}}}}\n',
]
OLD_MANIFEST = """{"version": 2,
"iteration": 1,
"facts": {"optimizer": {"good_steps": 1}},
"tensors": {"x": {"dtype": "F32", "shape": [8, 6], "held": 0}},
"held": [[[0, 0, 4, 24], [1, 4, 8, 24]]],
"tables": {"boxes/rank_00000.jsonl": {"bytes": 238, "sha256": \
"9d63a244eba964a1933f5c50c1db8972c23e37c1d367453823f9adaa295eeca6", "files": 1}, "boxes/rank_00001.jsonl": \
{"bytes": 238, "sha256": "c262b27b4f8cc26e444269a62e20bb5b12a5ed616537a1df83b18f58f5ee13cc", "files": 1}},
"sha256": "a57ce9d568dbff1f4fb252b1b6f5eb1bea9be91e5958bc515e73552b0996be82"}
"""


def test_version_2(newest: Path) -> None:
    shutil.rmtree(newest / "tables")
    (newest / "boxes").mkdir()
    for rank, table in enumerate(OLD_TABLES):
        (newest / f"boxes/rank_0000{rank}.jsonl").write_text(table)
    (newest / MANIFEST).write_text(OLD_MANIFEST)
    checkpoint = NativeCheckpoint(newest)
    assert torch.equal(checkpoint.read("x"), WHOLE) and checkpoint.verify() == ""
    assert checkpoint.metadata == {"optimizer": {"num_updates": 1}}


def refused(folder: Path, *changes: Change, base: dict[str, Any] | None = None) -> str:
    """Change the manifest if there are `changes`. Open, hash and read the checkpoint as a load does. Return the line of
    the error."""
    if changes:
        change(folder, *changes, base=base)

    def read() -> None:
        checkpoint = find_checkpoint(folder.parent, log=lambda line: None)
        for name in checkpoint.tensors:
            checkpoint.read(name)

    return refusal(read, 40_000_000, str(folder))


# ------------------------------------------------------------------------------------------- manifests as text


def text(tensors: str = "", more: str = "") -> str:
    return f'{{"version": 1, "iteration": 1, "facts": {{}}, "tensors": {{{tensors}}}, "files": {{}}, {more}"sha256": "'


TEXTS: list[Callable[[], str]] = [  # The texts are functions, because some have megabytes.
    lambda: text(more='"x": ' + "[" * 100_000),
    lambda: text('"\\ud800": 0'),  # a lone surrogate
    lambda: text().replace("1", "1" * 100_000, 1),
    lambda: text('"a\\nb\\rc": {"dtype": "F32", "shape": [1]}'),  # lines in a name
    lambda: text(f'"{"x" * 10_000_000}": {{"dtype": "F32", "shape": [1]}}'),
    lambda: text(f'"x": {{"dtype": "F32", "shape": [{f"{10**4000}," * 3000}1]}}'),
    lambda: " " * (17 << 20),
]


# ------------------------------------------------------------------------------------------- values and types


def slices(*found: tuple[list[int], list[int]]) -> Change:
    return f"{FILE} boxes", {f"x#{i}": {"offset": offset, "shape": size} for i, (offset, size) in enumerate(found)}


SLICES: list[list[Change]] = [
    [slices(([0, 0], [3, 6]))],  # a gap
    [slices(([1, 0], [4, 6]))],
    [slices(([0, 0], [3, 6]), ([2, 0], [1, 6]))],  # A gap and an overlap have the same size.
    [slices(([0, 0], [1 << 61, 1 << 61])), ("tensors x shape", [(1 << 61) + 4, 1 << 61])],
    [slices(([0, 0], [4, 6]), ([4, 0], [0, 6]))],  # empty
    [slices(*(([0, i], [1, 1]) for i in range(30_000))), ("tensors x shape", [1, 30_000])],
    [("tensors x shape", [1 << 60, 1 << 60])],
    [(f"{FILE} boxes y", {"offset": [0], "shape": [1]})],
    [("tensors y", {"dtype": "F32", "shape": [4]})],  # a tensor without a slice
    [("tensors y", {"dtype": "U8", "shape": [1000]}), (f"{FILE} boxes y", {"offset": [0], "shape": [1000]})],
    *([("version", number)] for number in (True, 0, -1, 1.0, "1", None, float("nan"), 10**4000)),
    [(f"{FILE} boxes x offset 0", 1 << 62)],
    [("iteration", 2)],
    [("facts", [{}] * 1_000_000)],
]


def test_texts_and_slices(oldest: Path) -> None:
    true = contents(oldest)
    change(oldest)
    assert torch.equal(NativeCheckpoint(oldest).read("x"), WHOLE), "accepted without a change"
    for changes in SLICES:
        refused(oldest, *changes, base=true)
    for text in TEXTS:
        (oldest / MANIFEST).write_bytes(append_checksum(text().encode()))
        refused(oldest)


PATHS = """/etc/passwd /dev/zero .. ../../secret ../iter_0000002/mp_rank_00/model.safetensors . manifest.json
    mp_rank_00/../../secret mp_rank_00/../mp_rank_00/model.safetensors mp_rank_00//model.safetensors
    ./mp_rank_00/model.safetensors mp_rank_00/model.safetensors/ mp_rank_00\\..\\x.safetensors
    mp_rank_٠٠/model.safetensors mp_rank_00/x.pt ~/x.safetensors $HOME/x.safetensors C:/x.safetensors
    file:///etc/passwd""".split()


def test_paths_elsewhere(oldest: Path) -> None:
    (oldest.parent / "secret").write_bytes((oldest / FILES[0]).read_bytes())
    true = contents(oldest)
    info = true["files"].pop(FILES[0])
    for path in (*PATHS, "", "mp_rank_00/model.safetensors\n", "mp_rank_00/mo\0del.safetensors"):
        assert "names the file" in refused(oldest, ("files", {path: info, **true["files"]}), base=true), path


# ------------------------------------------------------------------------------------------------------ tables


SAID: list[list[Change]] = [
    [("table_ranges 0 1 0", 0)],
    *([("table_ranges 0 0 2", number)] for number in (5, -1, True, "4", 1 << 62)),
    [("table_ranges 0", [[0, 0, 4, 23], [1, 4, 8, 25]])],
    [("table_ranges 0 0", [0, 0, 4])],
    [("tensors x table_ranges", 1)],
    [("tensors y", {"dtype": "F32", "shape": [8, 6], "table_ranges": 0})],
    [("tables", {})],
    [("tables", {"../tables/rank_00000.jsonl": {"bytes": 1, "sha256": "", "files": 1}})],
    [(f"{TABLE} sha256", "0" * 64)],
    [(f"{TABLE} bytes", 1 << 40)],
    [("table_ranges", [[[0, 0, 4, 24], [1, 4, 8, 24]], [[i, 0, 1, 1] for i in range(100_000)]])],
]


def test_what_a_manifest_says_of_tables(newest: Path) -> None:
    true = contents(newest)
    for changes in SAID:
        refused(newest, *changes, base=true)
    said = "format version 4 is newer than 3, the newest that this program reads: update the program"
    assert f"{newest / MANIFEST}: {said}" in refused(newest, ("version", 4), base=true)


# ------------------------------------------------------------------------------------------------------- files

IN_PLACE: list[Callable[[Path], Any]] = [
    os.mkfifo,
    Path.mkdir,
    *(lambda path, target=target: path.symlink_to(target) for target in ("/dev/zero", "nowhere", __file__)),
    lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 1 << 40),
]


@pytest.mark.timeout(120, method="thread")
@pytest.mark.parametrize("file", [MANIFEST, FILES[1], table_path(1)])
def test_what_is_no_file(newest: Path, file: str) -> None:
    (newest / file).unlink()
    for make in IN_PLACE:
        make(newest / file)
        refused(newest)
        (newest / file).rmdir() if make is Path.mkdir else (newest / file).unlink()


def test_headers_that_differ_from_the_table(oldest: Path) -> None:
    data = (oldest / FILES[0]).read_bytes()
    for old, new in ((b"F32", b"I32"), (b"[4,6]", b"[6,4]"), (b"mp_rank_00", b"mp_rank_01")):
        changed = data.replace(old, new, 1)
        (oldest / FILES[0]).write_bytes(changed)
        refused(oldest, (f"{FILE} sha256", hashlib.sha256(changed).hexdigest()))


# ------------------------------------------------------------------------------------------------------- metadata

GREAT, MODEL = 1 << 40, "config model"
# Invalid values by path in the metadata. The test also tries values of other types.
PLACES: dict[str, list[Any]] = {
    "config": [{}],
    MODEL: [{}],
    "config data train_data": [[1]],
    "config train seed": [1.0],
    **{f"{MODEL} {name}": [0, -1, GREAT, 10**400, 1.0] for name in ("num_layers", "make_vocab_size_divisible_by")},
    f"{MODEL} num_attention_heads": [0, 3, GREAT],
    f"{MODEL} gelu": [],
    "vocab_size": [0, 7, GREAT],
    "consumed_samples": [-1, 1.0, 1 << 62],
    "tokenizer fingerprint": [3],
    "optimizer adam_steps": [-1, 1.0, 1 << 62],
    "optimizer loss_scaler": [{"scale": "1"}],
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> NativeCheckpoint:
    folder = tmp_path_factory.mktemp("metadata")
    write_text(folder, 300)
    trainer = start(0, 1, folder, "--hidden-size 16 --num-attention-heads 2 --num-layers 1")
    steps(trainer, 1)
    path = trainer.checkpoints.save()
    finish(trainer)
    assert path is not None
    return NativeCheckpoint(path)


def with_metadata(trained: NativeCheckpoint, metadata: dict[str, Any]) -> Any:
    return SimpleNamespace(path=trained.path, tensors=trained.tensors, metadata=metadata)


@pytest.mark.parametrize("place", PLACES)
def test_invalid_metadata(trained: NativeCheckpoint, place: str) -> None:
    *keys, last = place.split()
    for value in ["a word", [[]], True, float("nan"), *PLACES[place]]:
        metadata = copy.deepcopy(trained.metadata)
        at = functools.reduce(operator.getitem, keys, metadata)
        if value not in PLACES[place] and type(value) is type(at[last]):
            continue
        at[last] = value
        refusal(lambda metadata=metadata: check_metadata(with_metadata(trained, metadata)), 0, str(trained.path))  # type: ignore[misc]


def test_training_and_generation_check_the_metadata(trained: NativeCheckpoint) -> None:
    change(trained.path, (f"metadata {MODEL} num_layers", GREAT))
    folder, message = trained.path.parent, f"has {GREAT:,} layers, but"
    with pytest.raises(ValueError, match=message):
        build_context(parse(["--save", str(folder), "--device", "cpu"]), RankInfo(0, 1, 0, 1), print)
    with pytest.raises(ValueError, match=message):
        load_for_inference(folder, torch.device("cpu"), torch.float32, log=print)
