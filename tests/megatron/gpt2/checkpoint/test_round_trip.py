"""Any layout to any layout: what is saved comes back, in boxes, flat ranges and random states."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

import mpu
from megatron.gpt2.checkpoint.folder import TRACKER, find_checkpoint
from megatron.gpt2.checkpoint.manifest import MANIFEST
from megatron.gpt2.checkpoint.reader import Checkpoint
from megatron.gpt2.checkpoint.state import load_rng, load_state, rng_pieces, state_pieces, whole_parameters
from megatron.gpt2.checkpoint.writer import Piece, write_checkpoint
from megatron.gpt2.optimizer.flat_state import FlatState
from mpu import PartitionSpec
from tests.megatron.gpt2.checkpoint.saved_states import (
    SPECS,
    assert_holds,
    full_state,
    save,
)


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
            local = [
                (kind, name, torch.full(SPECS[name].local_shape(size), 7.0, dtype=full.dtype))
                for (kind, name), full in state.items()
            ]
            states = [FlatState(kind, name, t.view(-1)) for kind, name, t in local if kind != "model"]
            load_state(
                whole_parameters((n, t) for k, n, t in local if k == "model"),
                SPECS,
                checkpoint,
                mp_rank=rank,
                mp_size=size,
            )
            load_state(states, SPECS, checkpoint, mp_rank=rank, mp_size=size)
            for kind, name, tensor in local:
                assert torch.equal(tensor, SPECS[name].split(state[kind, name], rank, size)), (kind, name, rank, size)


def test_what_is_on_the_disk(tmp_path: Path) -> None:
    save(tmp_path, 300)
    assert (tmp_path / TRACKER).read_text().strip() == "300"
    folder = tmp_path / "iter_0000300"
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()) == sorted(
        [TRACKER, "iter_0000300/manifest.json"]
        + [f"iter_0000300/boxes/rank_0000{r}.jsonl" for r in (0, 1)]
        + [f"iter_0000300/mp_rank_0{r}/{n}.safetensors" for r in (0, 1) for n in ("model", "optim_dp_00")]
    )
    # Others read the files, and the padding of the vocabulary is not in them.
    shards = [safetensors.torch.load_file(folder / f"mp_rank_0{r}/model.safetensors") for r in (0, 1)]
    assert "model.norm" not in shards[1], "what is replicated is saved once"
    assert torch.equal(torch.cat([s["model.embedding"] for s in shards]), full_state(300)["model", "embedding"])
    data = (folder / MANIFEST).read_bytes()
    assert json.loads(data)["sha256"] == hashlib.sha256(data[:-67]).hexdigest()
    table = (folder / "boxes/rank_00000.jsonl").read_bytes()
    assert hashlib.sha256(table).hexdigest() == json.loads(data)["tables"]["boxes/rank_00000.jsonl"]["sha256"]
    assert (
        hashlib.sha256((folder / "mp_rank_00/model.safetensors").read_bytes()).hexdigest()
        == json.loads(table.splitlines()[1])["mp_rank_00/model.safetensors"]["sha256"]
    )


def test_several_boxes_of_one_tensor_in_a_file(tmp_path: Path) -> None:
    """As a shard of a flat buffer has them: part of a row, whole rows, part of a row."""
    full = torch.arange(24.0).view(4, 6)
    for rank, boxes in ((1, [(2, 3, 3, 6), (3, 4, 0, 6)]), (0, [(0, 2, 0, 6), (2, 3, 0, 3)])):
        pieces = {f"x#{i}" if i else "x": Piece(full[a:b, c:d], (4, 6), (a, c)) for i, (a, b, c, d) in enumerate(boxes)}
        write_checkpoint(
            tmp_path,
            1,
            facts={},
            files={f"mp_rank_00/optim_dp_0{rank}.safetensors": pieces},
            rank=rank,
            world_size=2,
            attempt="a",
            timeout_s=5,
        )
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
                states = [
                    FlatState(
                        kind, name, SPECS[name].split(tensor, mp, 2).view(-1)[slice(*cuts[name][dp])], cuts[name][dp][0]
                    )
                    for (kind, name), tensor in full.items()
                ]
                pieces = state_pieces(states, SPECS, mp_rank=mp, mp_size=2)
                assert max(int(key.partition("#")[2] or 0) for key in pieces) <= 2, "at most three boxes"
                files[f"mp_rank_0{mp}/optim_dp_0{dp}.safetensors"] = pieces
        write_checkpoint(tmp_path, attempt, facts={}, files=files, rank=0, world_size=1, attempt="a", timeout_s=5)
        checkpoint = Checkpoint(tmp_path / f"iter_{attempt:07d}")
        for size in (1, 4):
            for rank in range(size):
                local = {name: torch.full(spec.local_shape(size), 7.0) for name, spec in SPECS.items()}
                for name, tensor in local.items():
                    parts = [
                        FlatState("master", name, tensor.view(-1)[start:stop], start)
                        for start, stop in ranges(tensor.shape, chance)
                    ]
                    others = [FlatState("master", other, torch.empty(0)) for other in SPECS]
                    load_state([*parts, *others], SPECS, checkpoint, mp_rank=rank, mp_size=size)
                    assert torch.equal(tensor, SPECS[name].split(full["master", name], rank, size)), (name, rank, size)


def test_another_model_is_refused_with_both_shapes(tmp_path: Path) -> None:
    save(tmp_path, 1, 1)
    checkpoint = Checkpoint(tmp_path / "iter_0000001")

    def load(specs: dict[str, PartitionSpec], kind: str = "model") -> None:
        load_state(
            [FlatState(kind, name, torch.zeros(spec.local_shape(1)).view(-1)) for name, spec in specs.items()],
            specs,
            checkpoint,
            mp_rank=0,
            mp_size=1,
        )

    with pytest.raises(ValueError, match=r"model.row has shape \(8, 16\) there and \(8, 32\)"):
        load({**SPECS, "row": PartitionSpec((8, 32), 1)})
    with pytest.raises(ValueError, match="holds no model.more"):
        load({**SPECS, "more": PartitionSpec((8,))})
    with pytest.raises(ValueError, match="holds model.scalar, which this run does not have"):
        load({name: spec for name, spec in SPECS.items() if name != "scalar"})
    with pytest.raises(ValueError, match="--no-load-optim"):
        load(SPECS, "exp_avg_cubed")


def place(mp_rank: int, mp_size: int, dp_size: int) -> mpu.ParallelState:
    return mpu.ParallelState(
        tensor_model_parallel_rank=mp_rank, tensor_model_parallel_size=mp_size, data_parallel_size=dp_size
    )


def test_random_generators_come_back(tmp_path: Path) -> None:
    cpu, tracker = torch.device("cpu"), mpu.get_cuda_rng_tracker()
    before = torch.get_rng_state(), tracker.get_states()
    try:
        tracker.reset()
        tracker.add("model-parallel-rng", 5)
        pieces = {mp: rng_pieces(place(mp, 2, 1), cpu) for mp in (0, 1)}

        def drawn() -> Tensor:
            with tracker.fork():
                own = torch.rand(3)
            return torch.cat([own, torch.rand(3)])

        first = drawn()
        assert not torch.equal(drawn(), first)
        for mp in (1, 0):
            write_checkpoint(
                tmp_path,
                1,
                facts={},
                files={f"mp_rank_0{mp}/rng_dp_00.safetensors": pieces[mp]},
                rank=mp,
                world_size=2,
                attempt="a",
                timeout_s=5,
            )
        checkpoint = Checkpoint(tmp_path / "iter_0000001")
        assert load_rng(checkpoint, place(1, 2, 1), cpu)
        assert torch.equal(drawn(), first)
        state = torch.get_rng_state()
        for mp_size, dp_size in ((1, 1), (1, 2), (2, 2)):
            assert not load_rng(checkpoint, place(0, mp_size, dp_size), cpu)
        assert not load_rng(checkpoint, place(0, 2, 1), torch.device("cuda"))
        assert torch.equal(torch.get_rng_state(), state)
    finally:
        torch.set_rng_state(before[0])
        tracker.set_states(before[1])


def test_it_is_a_source_as_other_formats_are(tmp_path: Path) -> None:
    from megatron.gpt2.checkpoint.source import Source

    save(tmp_path, 100)
    source: Source = Checkpoint(tmp_path / "iter_0000100")
    assert (source.format, list(source.left_out), source.iteration) == ("native", [], 100)
