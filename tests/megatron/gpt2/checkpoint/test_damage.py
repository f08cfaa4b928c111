"""A damaged checkpoint is refused with its name, or a different one is loaded with a warning, or the damage is in
unused bytes. A load never returns wrong values. Also tests damaged trackers."""

from __future__ import annotations

import contextlib
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import mpu
from data_utils.tokenizers.gpt2 import END_OF_TEXT, bytes_to_unicode
from megatron.gpt2.checkpoint.folder import TRACKER, find_checkpoint
from megatron.gpt2.checkpoint.reader import Checkpoint
from megatron.gpt2.generate.load_model import load_for_inference
from tests.distributed import run_ranks
from tests.megatron.gpt2.train.training_runs import finish, start, steps, write_text

OLDER, NEWER = 1, 3  # a flipped bit in the tracker changes one into the other
FOLDERS = {iteration: f"iter_{iteration:07d}" for iteration in (OLDER, NEWER)}
Files = dict[str, bytes]  # by path in the --save folder


def train(rank: int, world_size: int, folder: str) -> None:
    shape = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --max-position-embeddings 8 --seq-length 8"
    layout = "--model-parallel-size 2 --use-distributed-optimizer --ddp-bucket-size 2000"
    words = f"--tokenizer-type GPT2BPETokenizer --vocab-file {folder}/vocab.json --merge-file {folder}/merges.txt"
    trainer = start(rank, world_size, folder, f"{shape} {layout} {words}".split())
    for count in (OLDER, NEWER - OLDER):
        steps(trainer, count)
        assert trainer.save() is not None
    finish(trainer)


@pytest.fixture(scope="module")
def save(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The --save folder of a run on 2 x 2 ranks with a sharded optimizer, with two checkpoints."""
    folder = tmp_path_factory.mktemp("damage")
    write_text(folder, 300)
    (folder / "vocab.json").write_text(
        json.dumps(
            {token: number for number, token in enumerate([*bytes_to_unicode(), "th", "the", END_OF_TEXT])},
            ensure_ascii=False,
        )
    )
    (folder / "merges.txt").write_text("#version: 0.2\nt h\nth e\n")
    run_ranks(train, 4, str(folder))
    (folder / "save" / "lock").unlink(missing_ok=True)  # not part of a checkpoint, and neither are the logs
    for record in ("metrics.jsonl", "samples.jsonl", "history.jsonl", "report.html", "loss.png"):
        (folder / "save" / record).unlink(missing_ok=True)
    return folder / "save"


def read_files(folder: Path) -> Files:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


class Loader:
    """Loads a folder as generation does, then every tensor, and compares them with the saved values."""

    def __init__(self, folder: Path) -> None:
        mpu.initialize_model_parallel(1)
        self.folder, self.present = folder, read_files(folder)
        self.true = {}
        for iteration, name in FOLDERS.items():
            opened = Checkpoint(folder / name)
            self.true[iteration] = (opened.metadata, {name: opened.read(name) for name in opened.tensors})
        loaded = load_for_inference(folder, torch.device("cpu"), torch.float32, log=print)
        self.fingerprint = loaded.tokenizer.fingerprint

    def put(self, files: Files) -> None:
        """Make the folder hold exactly `files`."""
        for path in self.present.keys() - files.keys():
            (self.folder / path).unlink()
            with contextlib.suppress(OSError):
                os.removedirs((self.folder / path).parent)  # removes folders that are now empty
        for path, data in files.items():
            if self.present.get(path) != data:
                (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
                (self.folder / path).write_bytes(data)
        self.present = files

    def load(self) -> tuple[int | None, list[str]]:
        """Return the iteration, or None if the load was refused, and the messages. AssertionError if a value is
        wrong."""
        logged: list[str] = []
        try:
            loaded = load_for_inference(self.folder, torch.device("cpu"), torch.float32, log=logged.append)
        except (ValueError, FileNotFoundError) as error:
            return None, one_line_each([*logged, str(error)])
        model, tokenizer, checkpoint = loaded.model, loaded.tokenizer, loaded.checkpoint
        metadata, tensors = self.true[checkpoint.iteration]
        assert checkpoint.metadata == metadata
        assert set(checkpoint.tensors) == set(tensors)
        for name, tensor in tensors.items():
            assert same_bits(checkpoint.read(name), tensor), name
        assert tokenizer.fingerprint == self.fingerprint and tokenizer.decode(tokenizer.encode("the hen")) == "the hen"
        specs = mpu.partition_specs(model)
        for name, parameter in model.named_parameters():
            assert same_bits(parameter, specs[name].split(tensors[f"model.{name}"], 0, 1)), name
        return checkpoint.iteration, one_line_each(logged)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.detach().reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def one_line_each(logged: list[str]) -> list[str]:
    assert not any("\n" in line for line in logged), logged
    return logged


# ------------------------------------------------------------------------------------------------------------ damage


def flip(files: Files, path: str, bit: int) -> Files:
    data = bytearray(files[path])
    data[bit // 8] ^= 1 << bit % 8
    return files | {path: bytes(data)}


def swap(files: Files, a: str, b: str) -> Files:
    """Exchange two files, or the contents of two folders."""

    def other(path: str) -> str:
        for old, new in ((a, b), (b, a)):
            if path == old or path.startswith(f"{old}/"):
                return new + path[len(old) :]
        return path

    return {other(path): data for path, data in files.items()}


def delete(files: Files, path: str) -> Files:
    return {other: data for other, data in files.items() if other != path and not other.startswith(f"{path}/")}


def damages(files: Files, chance: random.Random) -> Iterator[tuple[str, Files]]:
    """Yield 1,000 damaged folders, each kind of damage for each file: a description, and the files."""
    folders = sorted({str(parent) for path in files for parent in Path(path).parents} - {"."})
    done = 0
    for path, data in files.items():
        bits = range(8 * len(data)) if path == TRACKER else [chance.randrange(8 * len(data)) for _ in range(12)]
        for bit in bits:
            yield f"flip {path} {bit}", flip(files, path, bit)
        lengths = {0, len(data) - 1, chance.randrange(len(data)), chance.randrange(len(data))}
        for length in sorted(lengths):
            yield f"cut {path} {length}", files | {path: data[:length]}
        yield f"grow {path}", files | {path: data + b"\0"}
        done += len(bits) + len(lengths) + 1
    for path in [*files, *folders]:
        yield f"delete {path}", delete(files, path)
    pairs = [(f"{folder}/mp_rank_00", f"{folder}/mp_rank_01") for folder in FOLDERS.values()]
    pairs += [(FOLDERS[OLDER], FOLDERS[NEWER])]
    in_both = [path for path in files if path.startswith(FOLDERS[OLDER])]
    pairs += [(path, path.replace(FOLDERS[OLDER], FOLDERS[NEWER])) for path in in_both]
    pairs += [(path, path.replace("mp_rank_00", "mp_rank_01")) for path in files if "mp_rank_00" in path]
    done += len(files) + len(folders) + len(pairs)
    while done < 1000:
        a, b = chance.sample(sorted(files), 2)
        if files[a] != files[b]:
            pairs.append((a, b))
            done += 1
    for a, b in pairs:
        yield f"swap {a} {b}", swap(files, a, b)


@pytest.mark.parametrize(
    "share", [0.06, pytest.param(0.35, marks=pytest.mark.wide), pytest.param(1.0, marks=pytest.mark.slow)]
)
def test_no_damage_is_silent(save: Path, share: float) -> None:
    files, chance, loader = read_files(save), random.Random(0), Loader(save)
    assert len(files) > 40 and max(map(len, files.values())) < 30_000
    assert {str(Path(path).parent) for path in files} > {".", "tokenizer", *FOLDERS.values()}
    assert loader.load() == (NEWER, [])
    outcomes: dict[str, list[str]] = {name: [] for name in ("refused", "fell back", "same values", "SILENT")}
    tried, chosen = 0, random.Random(1)
    for what, damaged in damages(files, chance):
        if chosen.random() >= share:
            continue
        tried += 1
        victims = {path for path in files.keys() | damaged.keys() if files.get(path) != damaged.get(path)}
        asked = OLDER if any(path.startswith(FOLDERS[OLDER]) for path in victims) else NEWER
        if TRACKER not in victims:
            damaged = damaged | {TRACKER: f"{asked}\n".encode()}
        if chance.random() < 0.3:  # without an earlier checkpoint
            damaged = {
                path: data
                for path, data in damaged.items()
                if path.startswith(FOLDERS[asked]) or not path.startswith("iter_")
            }
        loader.put(damaged)
        try:
            iteration, logged = loader.load()
        except AssertionError as error:
            outcomes["SILENT"].append(f"{what}: {error}")
            continue
        if asked == OLDER and iteration == OLDER:
            logged = [line for line in logged if "is newer than iteration" not in line]
        if iteration == asked and not logged:
            outcomes["same values"].append(what)
        elif not any(named(path, line, save) for path in victims for line in logged):
            outcomes["SILENT"].append(f"{what}: {logged}")
        else:
            outcomes["refused" if iteration is None else "fell back"].append(what)
    loader.put(files)
    assert outcomes["SILENT"] == []
    counts = {name: len(found) for name, found in outcomes.items()}
    assert sum(counts.values()) == tried >= 900 * share, counts
    assert counts["refused"] > 0.2 * tried and counts["fell back"] > 0.4 * tried, counts
    # A load takes the shape from the manifest and ignores config.json. The other unused bytes are white space.
    carries_nothing = [what for what in outcomes["same values"] if "config.json" not in what]
    assert len(carries_nothing) < 20 and all(TRACKER in what or "tokenizer/" in what for what in carries_nothing)


def named(path: str, line: str, folder: Path) -> bool:
    """True if the message names the file or one of its folders."""
    parents = [str(folder / parent) for parent in Path(path).parents if str(parent) != "."]
    return any(name in line for name in [path, *parents])


# ---------------------------------------------------------------------------------------------------------- trackers


WORDS = b"abc release None -3 +3 3.0 3e0 0x3 0_3 1,3 {} iter_0000003 ../iter_0000003 700".split()  # 700: does not exist
GARBAGE = [*WORDS, b"", b"\n", b" ", b"1\n3", b"\0\0\0\0", b"\xff\xfe3\0", b"9" * 70, b"9" * 5_000_000]
GARBAGE += [text.encode() for text in ("٣", "３", "\ufeff3")]  # digits of other scripts, a byte order mark
LINKS = [TRACKER, "nowhere", FOLDERS[OLDER], "/dev/zero", "/dev/null"]


@pytest.fixture
def tracker(save: Path) -> Iterator[Path]:
    path = save / TRACKER
    text = path.read_bytes()
    path.unlink()
    yield path
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    path.unlink(missing_ok=True)
    path.write_bytes(text)


def end_at_the_newest(save: Path) -> None:
    logged: list[str] = []
    checkpoint = find_checkpoint(save, log=logged.append)
    assert checkpoint is not None and checkpoint.iteration == NEWER
    assert len(logged) == 2 and all(line.startswith("WARNING: ") and len(line) < 500 for line in logged)
    assert TRACKER in logged[0] and f"{FOLDERS[NEWER]} is loaded, the newest valid checkpoint" in logged[1]


def test_garbage_trackers_end_at_the_newest_valid_one(save: Path, tracker: Path) -> None:
    end_at_the_newest(save)  # the newest iteration is missing
    for data in GARBAGE:
        tracker.write_bytes(data)
        end_at_the_newest(save)
    for target in LINKS:
        tracker.unlink()
        tracker.symlink_to(target)
        end_at_the_newest(save)
    for make in (os.mkfifo, Path.mkdir):
        tracker.unlink()
        make(tracker)
        end_at_the_newest(save)


@pytest.mark.skipif(os.getuid() == 0, reason="root may read everything")
def test_an_unreadable_tracker(save: Path, tracker: Path) -> None:
    tracker.touch(mode=0)
    end_at_the_newest(save)


def test_how_a_number_is_written_does_not_matter(save: Path, tracker: Path) -> None:
    for text in (b"1", b"1\n", b"1\r\n", b"\n 1 \n", b"0000001"):
        tracker.write_bytes(text)
        logged: list[str] = []
        checkpoint = find_checkpoint(save, log=logged.append)
        assert checkpoint is not None and checkpoint.iteration == OLDER
        assert len(logged) == 1 and f"{FOLDERS[NEWER]} is newer than iteration 1" in logged[0]
