"""Checkpoints of many ranks: the manifest stays small, and a load opens the tables that it needs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import mpu
from megatron.gpt2.checkpoint import manifest, reader
from megatron.gpt2.checkpoint.manifest import MANIFEST
from megatron.gpt2.checkpoint.reader import Checkpoint
from megatron.gpt2.checkpoint.writer import Piece, write_checkpoint
from megatron.gpt2.config import ModelConfig
from megatron.gpt2.model.gpt2 import GPT2Model, layer_config
from megatron.gpt2.optimizer.flat_parameters import FlatParameters
from tests.megatron.gpt2.checkpoint.simulated_ranks import KINDS, Layout, SimulatedRanks, simulate

SHAPE = ModelConfig(num_layers=2, hidden_size=64, num_attention_heads=4, max_position_embeddings=32, vocab_size=257)
BUCKET = 20_000


def test_boxes_of_more_than_one_manifest_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a limit that this many boxes exceed, as those of a thousand ranks exceed the true one."""
    limit = 30_000
    monkeypatch.setattr(manifest, "MAX_BYTES", limit)
    monkeypatch.setattr(reader, "MAX_BYTES", limit)
    found = simulate(tmp_path / "save", SHAPE, Layout(2, 8), Layout(4, 3), BUCKET)
    assert found["manifest_bytes"] < limit < found["tables_bytes"]
    assert found["tables_read"] <= 4 and found["tables_read_otherwise"] < 16


def test_the_simulated_ranks_own_what_real_ones_do() -> None:
    mpu.initialize_model_parallel(1)
    simulated = SimulatedRanks(SHAPE, Layout(1, 3), BUCKET)
    for dp_rank in range(3):
        real = FlatParameters(
            GPT2Model(SHAPE, layer_config(SHAPE, device="meta")),
            torch.bfloat16,
            bucket_size=BUCKET,
            ranks=(dp_rank, 3),
            sharded=True,
        )
        own = {
            name: (start, part.stop - part.start)
            for name in real.ranges
            for _, part, start in [real.owned_part_of(name)]
            if part.stop > part.start
        }
        states = [state for state in simulated.states(dp_rank) if state.values.numel()]
        assert {state.name: (state.start, state.values.numel()) for state in states} == own
        assert len(states) == len(KINDS) * len(own)


def test_a_load_opens_no_table_that_it_does_not_need(tmp_path: Path) -> None:
    """A table of other rows is not even looked at."""
    whole = torch.arange(32.0).view(8, 4)
    for rank in (3, 2, 1, 0):
        piece = Piece(whole[2 * rank : 2 * rank + 2], (8, 4), (2 * rank, 0))
        write_checkpoint(
            tmp_path,
            1,
            facts={},
            files={f"mp_rank_00/x_dp_{rank:02d}.safetensors": {"x": piece}},
            rank=rank,
            world_size=4,
            attempt="a",
            timeout_s=5,
        )
    checkpoint = Checkpoint(tmp_path / "iter_0000001")
    assert torch.equal(checkpoint.read("x", (3, 1), (2, 2)), whole[3:5, 1:3])
    assert checkpoint.tables_read == ["boxes/rank_00001.jsonl", "boxes/rank_00002.jsonl"]
    (checkpoint.path / "boxes/rank_00003.jsonl").write_bytes(b"")
    assert torch.equal(checkpoint.read("x", (0, 0), (6, 4)), whole[:6])
    with pytest.raises(ValueError, match=r"rank_00003.jsonl: has 0 bytes instead of"):
        checkpoint.read("x")


def test_masters_and_moments_share_what_is_said_of_them(tmp_path: Path) -> None:
    pieces = {f"{kind}.x": Piece(torch.ones(4), (4,), (0,)) for kind in KINDS}
    write_checkpoint(
        tmp_path,
        1,
        facts={},
        files={"mp_rank_00/all.safetensors": pieces},
        rank=0,
        world_size=1,
        attempt="a",
        timeout_s=5,
    )
    manifest = json.loads((tmp_path / "iter_0000001" / MANIFEST).read_bytes())
    assert manifest["held"] == [[[0, 0, 4, 4]]] and {info["held"] for info in manifest["tensors"].values()} == {0}
