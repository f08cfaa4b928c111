"""A damaged checkpoint is never loaded. Instead, the newest valid checkpoint is loaded, with a warning that names the
damaged file. If there is no valid checkpoint, the load is refused. A damaged latest-iteration file is ignored."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.gpt2.checkpoint.save_folder import LATEST_FILE, find_checkpoint
from tests.megatron.gpt2.checkpoint.saved_states import find, save

# Iterations 1 and 3 differ in one bit, so a flipped bit in the latest-iteration file can name a wrong checkpoint.
OLDER, NEWER = 1, 3
FOLDERS = {iteration: f"iter_{iteration:07d}" for iteration in (OLDER, NEWER)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make a --save folder with two checkpoints of two ranks."""
    for iteration in FOLDERS:
        save(tmp_path / "save", iteration)
    return tmp_path / "save"


def flip(bit: int) -> Callable[[Path], object]:
    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)

    return damage


def swap(path: Path, other: Path) -> None:
    data = other.read_bytes()
    other.write_bytes(path.read_bytes())
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a bit": flip(1000),
    "last bit": flip(-1),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "deleted": Path.unlink,
    "folder deleted": lambda path: shutil.rmtree(path.parent),
    "of the other iteration": lambda path: swap(path, path.parents[2] / FOLDERS[OLDER] / path.parent.name / path.name),
    "of the other rank": lambda path: swap(path, path.parents[1] / "mp_rank_01" / path.name),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_no_damage_is_silent(folder: Path, name: str) -> None:
    good = folder.rename(folder.with_name("good"))
    files = sorted(path.relative_to(good) for path in (good / FOLDERS[NEWER]).rglob("*") if path.is_file())
    assert len(files) == 7
    for file in files:
        if name.startswith("of the other") and not file.name.endswith("safetensors"):
            continue
        if name == "of the other rank" and file.parent.name == "mp_rank_01":
            continue
        shutil.copytree(good, folder)
        DAMAGES[name](folder / file)
        if "iteration" not in name:
            iteration, logged = find(folder)  # `find` checks the values.
            assert iteration == OLDER and (str(file) in logged or str(file.parent) in logged), (file, logged)
        shutil.rmtree(folder / FOLDERS[OLDER])
        with pytest.raises(ValueError, match=f"{folder}: holds no valid checkpoint: .*({file}|{file.parent})"):
            find(folder)
        shutil.rmtree(folder)


# -------------------------------------------------------------------------------------------- latest-iteration files


# invalid contents of the latest-iteration file; iteration 700 does not exist
WORDS = b"abc release -3 +3 3.0 3e0 0x3 0_3 1,3 {} iter_0000003 ../iter_0000003 700".split()
GARBAGE = [*WORDS, b"", b"1\n3", b"\0\0\0\0", b"\xff\xfe3\0", b"9" * 70, b"9" * 5_000_000]
# digits of other writing systems, and a byte order mark
GARBAGE += [text.encode() for text in ("٣", "３", "\ufeff3")]
LINKS = [LATEST_FILE, "nowhere", "/dev/zero"]


MAKERS: list[Callable[[Path], object]] = [
    lambda path: None,  # The file is missing.
    *(lambda path, data=data: path.write_bytes(data) for data in GARBAGE),
    *(lambda path, target=target: path.symlink_to(target) for target in LINKS),
    os.mkfifo,
    Path.mkdir,
]


def test_garbage_latest_files_end_at_the_newest_valid_checkpoint(folder: Path) -> None:
    path = folder / LATEST_FILE
    path.unlink()
    for make in MAKERS:
        make(path)
        logged: list[str] = []
        assert find_checkpoint(folder, log=logged.append).iteration == NEWER
        assert len(logged) == 2 and all(line.startswith("WARNING: ") and len(line) < 500 for line in logged)
        assert LATEST_FILE in logged[0] and f"{FOLDERS[NEWER]} is loaded, the newest valid checkpoint" in logged[1]
        path.rmdir() if make is Path.mkdir else path.unlink(missing_ok=True)


def test_how_a_number_is_written_does_not_matter(folder: Path) -> None:
    for text in (b"1", b"1\n", b"1\r\n", b"\n 1 \n", b"0000001"):
        (folder / LATEST_FILE).write_bytes(text)
        iteration, logged = find(folder)
        assert iteration == OLDER and f"{FOLDERS[NEWER]} is newer than iteration 1" in logged and " | " not in logged
