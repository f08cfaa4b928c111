"""Checkpoints: any layout to any layout, no damage unnoticed, a crash at any moment survived."""

from __future__ import annotations

import hashlib
import json
import random
import re
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

import mpu
from megatron.gpt2.checkpoint.boxes import check_cover
from megatron.gpt2.checkpoint.files import file_header, write_tensors
from megatron.gpt2.checkpoint.folder import (
    TRACKER,
    Checkpoint,
    Piece,
    find_checkpoint,
    load_model,
    load_rng,
    load_state,
    model_pieces,
    rng_pieces,
    state_pieces,
    write_checkpoint,
)
from megatron.gpt2.checkpoint.manifest import MANIFEST
from megatron.gpt2.optimizer.flat_state import FlatState
from mpu import Box, PartitionSpec
from tests.megatron.gpt2.checkpoint.versions import reseal

REPOSITORY = Path(__file__).parents[4]
VOCAB = 130  # padded to 256: at model-parallel size 4 the last rank has padding alone
SPECS = {
    "embedding": PartitionSpec((VOCAB, 8), 0, 256),
    "column": PartitionSpec((24, 8), 0),
    "bias": PartitionSpec((24,), 0),
    "row": PartitionSpec((8, 16), 1),
    "norm": PartitionSpec((8,)),
    "scalar": PartitionSpec(()),
}
KINDS = ("model", "master", "exp_avg", "exp_avg_sq")


def full_state(seed: int) -> dict[tuple[str, str], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {(kind, name): torch.randn(spec.global_shape, generator=generator).to(
        torch.bfloat16 if kind == "model" else torch.float32) for kind in KINDS for name, spec in SPECS.items()}


def rank_files(state: dict[tuple[str, str], Tensor], mp_rank: int, mp_size: int) -> dict[str, dict[str, Piece]]:
    local = [(kind, name, SPECS[name].split(full, mp_rank, mp_size)) for (kind, name), full in state.items()]
    folder = f"mp_rank_{mp_rank:02d}"
    return {f"{folder}/model.safetensors": model_pieces([(n, t) for k, n, t in local if k == "model"], SPECS,
                                                        mp_rank=mp_rank, mp_size=mp_size),
            f"{folder}/optim_dp_00.safetensors": state_pieces(
                [FlatState(k, n, t.view(-1)) for k, n, t in local if k != "model"], SPECS, mp_rank=mp_rank,
                mp_size=mp_size)}


def save(folder: Path, iteration: int, mp_size: int = 2, seed: int | None = None, **options: Any) -> list[str]:
    """A checkpoint written by `mp_size` ranks, here threads. What it logged."""
    state = full_state(iteration if seed is None else seed)
    said: list[str] = []

    def write(rank: int) -> Path:
        return write_checkpoint(folder, iteration, **{
            "facts": {"consumed_samples": iteration}, "files": rank_files(state, rank, mp_size), "rank": rank,
            "world_size": mp_size, "attempt": "a", "timeout_s": 60.0, "log": said.append, **options})

    with ThreadPoolExecutor(mp_size) as ranks:
        assert set(ranks.map(write, range(mp_size))) == {folder / f"iter_{iteration:07d}"}
    return said


def assert_holds(checkpoint: Checkpoint, seed: int) -> None:
    for (kind, name), full in full_state(seed).items():
        assert torch.equal(checkpoint.read(f"{kind}.{name}"), full), (kind, name)


def find(folder: Path, **options: Any) -> tuple[int | None, str]:
    """The iteration that a load finds and what it says."""
    said: list[str] = []
    checkpoint = find_checkpoint(folder, log=said.append, **options)
    if checkpoint is not None:
        assert_holds(checkpoint, checkpoint.iteration)
    assert all("\n" not in line for line in said)
    return checkpoint.iteration if checkpoint else None, " | ".join(said)


# ------------------------------------------------------------------------------------------------------ round trip


@pytest.mark.parametrize("saved", [1, 2, 4])
def test_every_layout_opens_in_every_other(saved: int, tmp_path: Path) -> None:
    save(tmp_path, 300, saved)
    checkpoint = find_checkpoint(tmp_path, log=pytest.fail)
    assert checkpoint is not None
    assert (checkpoint.iteration, checkpoint.facts) == (300, {"consumed_samples": 300})
    assert_holds(checkpoint, 300)
    state = full_state(300)
    for size in (1, 2, 4, 8):
        for rank in range(size):
            local = [(kind, name, torch.full(SPECS[name].local_shape(size), 7.0, dtype=full.dtype))
                     for (kind, name), full in state.items()]
            states = [FlatState(kind, name, t.view(-1)) for kind, name, t in local if kind != "model"]
            load_model([(n, t) for k, n, t in local if k == "model"], SPECS, checkpoint, mp_rank=rank, mp_size=size)
            load_state(states, SPECS, checkpoint, mp_rank=rank, mp_size=size)
            for kind, name, tensor in local:
                assert torch.equal(tensor, SPECS[name].split(state[kind, name], rank, size)), (kind, name, rank, size)


def test_what_is_on_the_disk(tmp_path: Path) -> None:
    save(tmp_path, 300)
    assert (tmp_path / TRACKER).read_text().strip() == "300"
    folder = tmp_path / "iter_0000300"
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()) == sorted(
        [TRACKER, "iter_0000300/manifest.json"] + [f"iter_0000300/boxes/rank_0000{r}.jsonl" for r in (0, 1)] +
        [f"iter_0000300/mp_rank_0{r}/{n}.safetensors" for r in (0, 1) for n in ("model", "optim_dp_00")])
    # Others read the files, and the padding of the vocabulary is not in them.
    shards = [safetensors.torch.load_file(folder / f"mp_rank_0{r}/model.safetensors") for r in (0, 1)]
    assert "model.norm" not in shards[1], "what is replicated is saved once"
    assert torch.equal(torch.cat([s["model.embedding"] for s in shards]), full_state(300)["model", "embedding"])
    data = (folder / MANIFEST).read_bytes()
    assert json.loads(data)["sha256"] == hashlib.sha256(data[:-67]).hexdigest()
    table = (folder / "boxes/rank_00000.jsonl").read_bytes()
    assert hashlib.sha256(table).hexdigest() == json.loads(data)["tables"]["boxes/rank_00000.jsonl"]["sha256"]
    assert hashlib.sha256((folder / "mp_rank_00/model.safetensors").read_bytes()).hexdigest() == \
        json.loads(table.splitlines()[1])["mp_rank_00/model.safetensors"]["sha256"]


def test_several_boxes_of_one_tensor_in_a_file(tmp_path: Path) -> None:
    """As a shard of a flat buffer has them: part of a row, whole rows, part of a row."""
    full = torch.arange(24.0).view(4, 6)
    for rank, boxes in ((1, [(2, 3, 3, 6), (3, 4, 0, 6)]), (0, [(0, 2, 0, 6), (2, 3, 0, 3)])):
        pieces = {f"x#{i}" if i else "x": Piece(full[a:b, c:d], (4, 6), (a, c)) for i, (a, b, c, d) in enumerate(boxes)}
        write_checkpoint(tmp_path, 1, facts={}, files={f"mp_rank_00/optim_dp_0{rank}.safetensors": pieces}, rank=rank,
                         world_size=2, attempt="a", timeout_s=5)
    checkpoint = Checkpoint(tmp_path / "iter_0000001")
    assert checkpoint.names() == ["x"]
    assert checkpoint.global_shape("x") == (4, 6)
    assert torch.equal(checkpoint.read("x"), full)
    assert torch.equal(checkpoint.read("x", (1, 2), (2, 3)), full[1:3, 2:5])
    with pytest.raises(ValueError, match="does not contain"):
        checkpoint.read("x", (3, 0), (2, 6))
    with pytest.raises(ValueError, match="holds no tensor y"):
        checkpoint.read("y")


def ranges(shape: tuple[int, ...], chance: random.Random, count: int = 3) -> list[tuple[int, int]]:
    """The elements of a flat tensor in `count` parts, some of which may be empty."""
    numel = torch.Size(shape).numel()
    cuts = [0, *sorted(chance.randint(0, numel) for _ in range(count - 1)), numel]
    return list(zip(cuts, cuts[1:], strict=False))


def test_flat_ranges_open_in_other_flat_ranges(tmp_path: Path) -> None:
    """As sharded optimizers have them: parts of a rank's tensor that respect no row and reach into the padding."""
    full = {(kind, name): tensor for (kind, name), tensor in full_state(5).items() if kind == "master"}
    for attempt in range(10):
        chance, files = random.Random(attempt), {}
        for mp in range(2):
            cuts = {name: ranges(spec.local_shape(2), chance) for name, spec in SPECS.items()}
            for dp in range(3):
                states = [FlatState(kind, name, SPECS[name].split(tensor, mp, 2).view(-1)[slice(*cuts[name][dp])],
                                    cuts[name][dp][0]) for (kind, name), tensor in full.items()]
                pieces = state_pieces(states, SPECS, mp_rank=mp, mp_size=2)
                assert max(int(key.partition("#")[2] or 0) for key in pieces) <= 2, "at most three boxes"
                files[f"mp_rank_0{mp}/optim_dp_0{dp}.safetensors"] = pieces
        write_checkpoint(tmp_path, attempt, facts={}, files=files, rank=0, world_size=1, attempt="a", timeout_s=5)
        checkpoint = Checkpoint(tmp_path / f"iter_{attempt:07d}")
        for size in (1, 4):
            for rank in range(size):
                local = {name: torch.full(spec.local_shape(size), 7.0) for name, spec in SPECS.items()}
                for name, tensor in local.items():
                    parts = [FlatState("master", name, tensor.view(-1)[start:stop], start)
                             for start, stop in ranges(tensor.shape, chance)]
                    others = [FlatState("master", other, torch.empty(0)) for other in SPECS]
                    load_state([*parts, *others], SPECS, checkpoint, mp_rank=rank, mp_size=size)
                    assert torch.equal(tensor, SPECS[name].split(full["master", name], rank, size)), (name, rank, size)


def test_another_model_is_refused_with_both_shapes(tmp_path: Path) -> None:
    save(tmp_path, 1, 1)
    checkpoint = Checkpoint(tmp_path / "iter_0000001")

    def load(specs: dict[str, PartitionSpec], kind: str = "model") -> None:
        load_state([FlatState(kind, name, torch.zeros(spec.local_shape(1)).view(-1)) for name, spec in specs.items()],
                   specs, checkpoint, mp_rank=0, mp_size=1)

    with pytest.raises(ValueError, match=r"model.row has shape \(8, 16\) there and \(8, 32\)"):
        load({**SPECS, "row": PartitionSpec((8, 32), 1)})
    with pytest.raises(ValueError, match="holds no model.more"):
        load({**SPECS, "more": PartitionSpec((8,))})
    with pytest.raises(ValueError, match="holds model.scalar, which this run does not have"):
        load({name: spec for name, spec in SPECS.items() if name != "scalar"})
    with pytest.raises(ValueError, match="--no-load-optim"):
        load(SPECS, "exp_avg_cubed")


def test_random_generators_come_back(tmp_path: Path) -> None:
    cpu, tracker = torch.device("cpu"), mpu.get_cuda_rng_tracker()
    before = torch.get_rng_state(), tracker.get_states()
    try:
        tracker.reset()
        tracker.add("model-parallel-rng", 5)
        pieces = {mp: rng_pieces(mp_rank=mp, dp_rank=0, device=cpu) for mp in (0, 1)}

        def drawn() -> Tensor:
            with tracker.fork():
                own = torch.rand(3)
            return torch.cat([own, torch.rand(3)])

        first = drawn()
        assert not torch.equal(drawn(), first)
        for mp in (1, 0):
            write_checkpoint(tmp_path, 1, facts={}, files={f"mp_rank_0{mp}/rng_dp_00.safetensors": pieces[mp]}, rank=mp,
                             world_size=2, attempt="a", timeout_s=5)
        checkpoint = Checkpoint(tmp_path / "iter_0000001")
        assert load_rng(checkpoint, mp_rank=1, dp_rank=0, mp_size=2, dp_size=1, device=cpu)
        assert torch.equal(drawn(), first)
        state = torch.get_rng_state()
        for mp_size, dp_size in ((1, 1), (1, 2), (2, 2)):
            assert not load_rng(checkpoint, mp_rank=0, dp_rank=0, mp_size=mp_size, dp_size=dp_size, device=cpu)
        assert not load_rng(checkpoint, mp_rank=0, dp_rank=0, mp_size=2, dp_size=1, device=torch.device("cuda"))
        assert torch.equal(torch.get_rng_state(), state)
    finally:
        torch.set_rng_state(before[0])
        tracker.set_states(before[1])


# --------------------------------------------------------------------------------------------- which one is loaded


def test_nothing_there(tmp_path: Path) -> None:
    assert find(tmp_path / "missing") == (None, "")
    (tmp_path / "iter_0000100.tmp-1f").mkdir()
    (tmp_path / "metrics.jsonl").touch()
    assert find(tmp_path) == (None, "")


def test_the_tracker_decides_and_a_newer_one_is_reported(tmp_path: Path) -> None:
    save(tmp_path, 100)
    save(tmp_path, 200)
    assert find(tmp_path) == (200, "")
    (tmp_path / TRACKER).write_text("100")
    iteration, said = find(tmp_path)
    assert iteration == 100
    assert "iter_0000200 is newer" in said
    assert "the existing one is now" in "".join(save(tmp_path, 200, seed=5))
    assert_holds(Checkpoint(tmp_path / "iter_0000200"), 5)
    assert_holds(Checkpoint(tmp_path / "iter_0000200.old-1"), 200)


def test_falls_back_to_the_newest_valid_one(tmp_path: Path) -> None:
    for iteration in (100, 200, 300):
        save(tmp_path, iteration)
    victim = tmp_path / "iter_0000300" / "mp_rank_01" / "model.safetensors"
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    iteration, said = find(tmp_path)
    assert iteration == 200
    assert f"{victim}: damaged" in said
    (tmp_path / "iter_0000200" / MANIFEST).unlink()
    assert find(tmp_path)[0] == 100
    # One that was renamed aside is the last resort: a crash between the two renames of a commit loses nothing.
    (tmp_path / "iter_0000100").rename(tmp_path / "iter_0000100.old-1")
    assert find(tmp_path)[0] == 100
    shutil.rmtree(tmp_path / "iter_0000100.old-1")
    with pytest.raises(ValueError, match="holds no valid checkpoint: .*iter_0000300.*damaged.*--load"):
        find(tmp_path)


def test_tracker_that_names_a_missing_iteration(tmp_path: Path) -> None:
    (tmp_path / TRACKER).write_text("700")
    with pytest.raises(ValueError, match=f"iter_0000700: missing, though {TRACKER} names it"):
        find(tmp_path)
    save(tmp_path, 100)
    (tmp_path / TRACKER).write_text("700")
    iteration, said = find(tmp_path)
    assert iteration == 100
    assert "iter_0000700: missing" in said


GARBAGE = [b"", b"\n", b" ", b"abc", b"-100", b"+100", b"1e2", b"100.0", b"0x64", b"release", b"100\n200", b"\0\0\0\0",
           b"\xff\xfe", "١٠٠".encode(), b"9" * 70, b"9" * 5000, b"../iter_0000100", b"iter_0000100", b"None", b"{}"]


@pytest.mark.parametrize("text", GARBAGE + [None, "folder"], ids=lambda text: repr(text)[:20])
def test_garbage_tracker(text: bytes | str | None, tmp_path: Path) -> None:
    save(tmp_path, 100, 1)
    tracker = tmp_path / TRACKER
    tracker.unlink()
    if text == "folder":
        tracker.mkdir()
    elif isinstance(text, bytes):
        tracker.write_bytes(text)
    iteration, said = find(tmp_path)
    assert iteration == 100
    assert TRACKER in said
    assert "iter_0000100 is loaded" in said
    shutil.rmtree(tmp_path / "iter_0000100")
    if tracker.exists():
        with pytest.raises(ValueError, match=TRACKER):
            find(tmp_path)
    else:
        assert find(tmp_path) == (None, "")


class Ranks:
    """`greatest` for ranks that are threads."""

    def __init__(self, size: int) -> None:
        self.values, self.barrier = [0] * size, threading.Barrier(size, timeout=10)

    def run(self, work: Callable[[int, Callable[[int], int]], Any]) -> list[Any]:
        results: list[Any] = [None] * len(self.values)

        def rank(i: int) -> None:
            try:
                results[i] = work(i, lambda n: self.greatest(i, n))
            except Exception as error:
                results[i] = error

        threads = [threading.Thread(target=rank, args=(i,)) for i in range(len(results))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    def greatest(self, i: int, n: int) -> int:
        self.values[i] = n
        self.barrier.wait()
        result = max(self.values)
        self.barrier.wait()
        return result


def test_all_ranks_come_to_the_same_answer(tmp_path: Path) -> None:
    save(tmp_path, 100)
    save(tmp_path, 200)
    (tmp_path / TRACKER).write_text("garbage")

    def load(rank: int, greatest: Callable[[int], int], folder: Path = tmp_path) -> Any:
        return find(folder, share=(rank, 3), greatest=greatest)

    assert [found[0] for found in Ranks(3).run(load)] == [200] * 3
    # Damage that one rank's share of the files holds, whichever: all hear of it, by name.
    tables = [f"boxes/rank_0000{rank}.jsonl" for rank in (0, 1)]
    for file in [*sorted(Checkpoint(tmp_path / "iter_0000200").files), *tables]:
        victim = tmp_path / "iter_0000200" / file
        data = victim.read_bytes()
        victim.write_bytes(data[:-1] + bytes([data[-1] ^ 4]))
        found = Ranks(3).run(load)
        assert [iteration for iteration, _ in found] == [100] * 3
        assert all(f"{file}: damaged" in said for _, said in found)
        victim.write_bytes(data)
    # A folder that not all nodes share: an error everywhere, and nobody waits for the others.
    elsewhere = tmp_path / "elsewhere"
    found = Ranks(3).run(lambda rank, greatest: load(rank, greatest, elsewhere if rank == 2 else tmp_path))
    assert all(isinstance(error, ValueError) for error in found)
    assert "rank 2 does not see the same" in "".join(map(str, found[:2]))
    save(elsewhere, 200, seed=1)
    shutil.rmtree(tmp_path / "iter_0000100")
    found = Ranks(3).run(lambda rank, greatest: load(rank, greatest, elsewhere if rank == 2 else tmp_path))
    assert all(isinstance(error, ValueError) for error in found)


# ---------------------------------------------------------------------------------------------------------- damage


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
            del data[chance.randrange(len(data)):]
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


def craft(folder: Path, version: int, header: bytes | None = None, file: str = "mp_rank_00/model.safetensors",
          **changes: Any) -> Path:
    """A checkpoint whose hashes are all right, whatever else is changed in its manifest."""
    folder = folder / "iter_0000001"
    (folder / "mp_rank_00").mkdir(parents=True)
    made = write_tensors(folder, "mp_rank_00/model.safetensors", 1, {"x": Piece(torch.ones(4), (4,), (0,))})
    info = made["files"].pop("mp_rank_00/model.safetensors")
    if header is not None:
        path = folder / "mp_rank_00/model.safetensors"
        data = len(header).to_bytes(8, "little") + header + torch.ones(4).numpy().tobytes()
        path.write_bytes(data)
        info.update(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    info.update(changes.pop("info", {}))
    parts = {"iteration": 1, "facts": {}, "tensors": made["tensors"], "files": {file: info}, **changes}
    if version > 1:
        (folder / "boxes").mkdir()
    reseal(folder, {"version": version, **parts})
    return folder


def sealed_lines(body: str) -> bytes:
    """A manifest of any text that ends in its own sha256."""
    return body.encode() + hashlib.sha256(body.encode()).hexdigest().encode() + b'"}\n'


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
        f"path {file!r}": {"file": file} for file in (
            "/etc/passwd", "../iter_0000002/mp_rank_00/model.safetensors", "mp_rank_00/../../x.safetensors", "..",
            "mp_rank_00//model.safetensors", "manifest.json", "mp_rank_00\\..\\x.safetensors", "", "mp_rank_00/a.pt",
            "mp_rank_00/model.safetensors\n", "mp_rank_00/\x00.safetensors")}
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
        "many boxes": {"tensors": {"x": {"dtype": "F32", "shape": [1, 30_000]}},
                       "info": {"boxes": {f"x#{i}": {"offset": [0, i], "shape": [1, 1]} for i in range(30_000)}}},
        "many dimensions": {"tensors": {"x": {"dtype": "F32", "shape": [1] * 1000}}},
        "dtype": {"tensors": {"x": {"dtype": "F33", "shape": [4]}}},
        "other dtype": {"tensors": {"x": {"dtype": "I32", "shape": [4]}}},
        "unhashable": {"tensors": {"x": {"dtype": ["F32"], "shape": [4]}}},
        "no shape": {"tensors": {"x": {"dtype": "F32"}}},
        "iteration": {"iteration": 2},
        "iteration 2": {"iteration": "1"},
    }
    texts = {"twice": f'{{{ONE}, "iteration": 1, "sha256": "', "deep": f'{{{ONE}, "x": {"[" * 100_000}"sha256": "',
             "digits": f'{{{ONE}, "x": {"9" * 100_000}, "sha256": "',
             "version": f'{{{ONE[15:]}, "version": 3, "sha256": "',
             "none": '{"sha256": "', "array": '["', "surrogate": f'{{{ONE}, "\\ud800": 1, "\\ud800": 1, "sha256": "'}
    for name, changes in crafted.items():
        folder = craft(tmp_path / hashlib.sha256(name.encode()).hexdigest()[:8], version, **changes)
        refused(folder, name)
    for name, text in texts.items():
        (good / MANIFEST).write_bytes(sealed_lines(text))
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
    tensors = {"b": torch.rand(3, 5), "a": torch.arange(7, dtype=torch.uint8), "c": torch.rand(2).half(),
               "d": torch.tensor(2.0, dtype=torch.float64)}
    (tmp_path / "mp_rank_00").mkdir()
    write_tensors(tmp_path, "mp_rank_00/x.safetensors", 1,
                  {name: Piece(t, tuple(t.shape), (0,) * t.dim()) for name, t in tensors.items()})
    loaded = safetensors.torch.load_file(tmp_path / "mp_rank_00/x.safetensors")
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], t) for name, t in tensors.items())
    header, starts, size = file_header("mp_rank_00/x.safetensors", 1, {n: Box((0,) * t.dim(), tuple(t.shape))
                                                                        for n, t in tensors.items()},
                                       {n: t.dtype for n, t in tensors.items()})
    assert size == (tmp_path / "mp_rank_00/x.safetensors").stat().st_size
    assert all(start % tensors[name].itemsize == 0 for name, start in starts.items())


# --------------------------------------------------------------------------------------------------------- failures


def test_rank_0_names_the_rank_that_is_missing(tmp_path: Path) -> None:
    save(tmp_path, 100)
    with pytest.raises(TimeoutError, match="rank 1 within 0.2 s"):
        write_checkpoint(tmp_path, 200, facts={}, files=rank_files(full_state(200), 0, 2), rank=0, world_size=2,
                         attempt="b", timeout_s=0.2)
    assert [path.name for path in tmp_path.glob("iter_*")] == ["iter_0000100"]
    assert find(tmp_path) == (100, "")


def test_what_a_crashed_attempt_left_takes_no_part(tmp_path: Path) -> None:
    """Rank 1 had finished its part before the crash; its report must not stand for the new attempt."""
    save(tmp_path, 100)
    write_checkpoint(tmp_path, 200, facts={}, files=rank_files(full_state(666), 1, 2), rank=1, world_size=2,
                     attempt="crashed", timeout_s=5)
    with pytest.raises(TimeoutError, match="rank 1"):
        write_checkpoint(tmp_path, 200, facts={}, files=rank_files(full_state(200), 0, 2), rank=0, world_size=2,
                         attempt="second", timeout_s=0.1)
    save(tmp_path, 200, attempt="third")
    assert find(tmp_path) == (200, "")
    assert not list(tmp_path.glob("*.tmp*"))


@pytest.mark.parametrize("rank", [0, 1])
def test_disk_full(rank: int, tmp_path: Path) -> None:
    """In the place of a full disk, a limit on the size of files: the same error in the same place."""
    save(tmp_path, 100)

    other: dict[str, Any] = {"facts": {}, "world_size": 2, "attempt": "b", "timeout_s": 5}
    if rank == 0:
        write_checkpoint(tmp_path, 200, files=rank_files(full_state(200), 1, 2), rank=1, **other)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, hard))  # of rank 1 the model fits, the optimizer does not
    try:
        with pytest.raises(OSError, match=r"safetensors: cannot write its [\d,]+ bytes: .*bytes are free"):
            write_checkpoint(tmp_path, 200, files=rank_files(full_state(200), rank, 2), rank=rank, **other)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    if rank == 1:  # rank 0 hears of it at once
        with pytest.raises(OSError, match="rank 1 could not write its part of .*mp_rank_01/optim"):
            write_checkpoint(tmp_path, 200, files=rank_files(full_state(200), 0, 2), rank=0, **other)
    assert [path.name for path in tmp_path.glob("iter_*")] == ["iter_0000100"]
    assert find(tmp_path) == (100, "")


WRITER = """
import sys
from pathlib import Path
from tests.megatron.gpt2.checkpoint.test_folder import save
for iteration in range(1, 10_000):
    save(Path(sys.argv[1]), iteration % 7 + 1, 1, attempt=f"{sys.argv[2]}-{iteration}")
    print(iteration % 7 + 1, flush=True)
"""


def test_kill_9_leaves_the_last_one_loadable(tmp_path: Path) -> None:
    """Numbers are saved again on purpose: renaming aside is part of what is interrupted."""
    chance = random.Random(1)
    for kill in range(3):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), str(kill)], cwd=REPOSITORY,
                                  stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(chance.uniform(0.0, 0.2))
        writer.kill()
        committed = [line for line in writer.stdout.read().splitlines() if line.isdigit()]
        writer.wait()
        iteration, _ = find(tmp_path)
        assert iteration is not None
        # The one that was being committed may have made it.
        if committed:
            assert iteration in (int(committed[-1]), int(committed[-1]) % 7 + 1)


# ------------------------------------------------------------------------------------------------- what is kept


def iterations(folder: Path) -> list[str]:
    return sorted(path.name.removeprefix("iter_").lstrip("0") for path in folder.glob("iter_*"))


def test_keep_last(tmp_path: Path) -> None:
    for iteration in (100, 200, 300):
        save(tmp_path, iteration, keep_last=5)
    assert iterations(tmp_path) == ["100", "200", "300"]
    save(tmp_path, 400, keep_last=2)
    assert iterations(tmp_path) == ["300", "400"]
    # Back to 300: what is newer, or was renamed aside, is another course of the run and not touched.
    (tmp_path / TRACKER).write_text("300")
    shutil.rmtree(tmp_path / "iter_0000300" / "mp_rank_01")
    assert "now" in "".join(save(tmp_path, 300, keep_last=1, seed=5))
    assert iterations(tmp_path) == ["300", "300.old-1", "400"]
    assert (tmp_path / TRACKER).read_text() == "300\n"
    save(tmp_path, 350, keep_last=1)
    assert iterations(tmp_path) == ["300.old-1", "350", "400"]
    iteration, said = find(tmp_path)
    assert iteration == 350
    assert "iter_0000400 is newer" in said


def test_a_save_that_fails_removes_nothing(tmp_path: Path) -> None:
    save(tmp_path, 100)
    with pytest.raises(TimeoutError):
        write_checkpoint(tmp_path, 200, facts={}, files=rank_files(full_state(200), 0, 2), rank=0, world_size=2,
                         attempt="b", timeout_s=0.1, keep_last=1)
    assert find(tmp_path) == (100, "")


def test_a_crash_or_an_error_while_older_ones_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for iteration in (100, 200, 300):
        save(tmp_path, iteration)

    def crash(path: Path, **options: Any) -> None:
        (path / MANIFEST).unlink()
        raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr(shutil, "rmtree", crash)
    said = save(tmp_path, 400, keep_last=1)
    assert [line for line in said if "WARNING: --keep-last 1: " in line and "iter_0000100" in line]
    monkeypatch.undo()
    assert iterations(tmp_path) == ["100.tmp-removed", "200", "300", "400"]
    assert find(tmp_path) == (400, "")
    save(tmp_path, 500, keep_last=1)
    assert iterations(tmp_path) == ["500"]


def test_without_hashing_the_structure_is_checked_all_the_same(tmp_path: Path) -> None:
    save(tmp_path, 100)
    victim = tmp_path / "iter_0000100" / "mp_rank_01" / "model.safetensors"
    data = victim.read_bytes()
    victim.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    checkpoint = find_checkpoint(tmp_path, log=pytest.fail, verify=False)
    assert checkpoint is not None
    for damaged, problem in ((data[:-1], "bytes instead of"), (b"\0" + data[1:], "header is not the one")):
        victim.write_bytes(damaged)
        with pytest.raises(ValueError, match=problem):
            found = find_checkpoint(tmp_path, log=lambda line: None, verify=False)
            assert found is not None
            found.read("model.row")


def test_it_is_a_source_as_other_formats_are(tmp_path: Path) -> None:
    from megatron.gpt2.checkpoint.source import Source

    save(tmp_path, 100)
    source: Source = Checkpoint(tmp_path / "iter_0000100")
    assert (source.format, list(source.left_out), source.iteration) == ("native", [], 100)
