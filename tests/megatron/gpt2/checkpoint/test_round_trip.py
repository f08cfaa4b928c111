"""Test the files of a checkpoint, the tables that a load reads, the refusal of other models, and format version 1."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch

import mpu
from megatron.gpt2.checkpoint import reader
from megatron.gpt2.checkpoint.reader import MANIFEST, NativeCheckpoint
from megatron.gpt2.checkpoint.save_folder import LATEST_FILE, find_checkpoint
from megatron.gpt2.checkpoint.sharded_state import load_sharded_state_dict
from megatron.gpt2.checkpoint.writer import ShardedTensor
from megatron.gpt2.generate.load_model import load_for_inference
from megatron.gpt2.optimizer.param_and_grad_buffer import ParamShard
from mpu import PartitionSpec
from tests.megatron.gpt2.checkpoint.saved_states import (
    SPECS,
    full_state,
    save,
    write,
)


def test_what_is_on_the_disk(tmp_path: Path) -> None:
    save(tmp_path, 300)
    assert (tmp_path / LATEST_FILE).read_text().strip() == "300"
    folder = tmp_path / "iter_0000300"
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert files == [
        "manifest.json",
        *(f"mp_rank_0{r}/{n}.safetensors" for r in (0, 1) for n in ("model", "optim_dp_00")),
        *(f"tables/rank_0000{r}.jsonl" for r in (0, 1)),
    ]
    # Other programs can read the files, which do not contain the padding of the vocabulary.
    shards = [safetensors.torch.load_file(folder / f"mp_rank_0{r}/model.safetensors") for r in (0, 1)]
    assert "model.norm" not in shards[1], "what is replicated is saved once"
    assert torch.equal(torch.cat([s["model.embedding"] for s in shards]), full_state(300)["model", "embedding"])


def test_another_model_is_refused_with_both_shapes(tmp_path: Path) -> None:
    save(tmp_path, 1, 1)
    checkpoint = NativeCheckpoint(tmp_path / "iter_0000001")
    for specs, kind, said in (
        ({**SPECS, "row": PartitionSpec((8, 32), 1)}, "model", r"row has shape \(8, 16\) in the .* and \(8, 32\)"),
        ({**SPECS, "more": PartitionSpec((8,))}, "model", "holds no model.more"),
        ({"row": SPECS["row"]}, "model", "holds model.embedding, which this run does not have"),
        (SPECS, "exp_avg_cubed", "--no-load-optim"),
    ):
        shards = [ParamShard(kind, name, torch.zeros(spec.local_shape(1)).view(-1)) for name, spec in specs.items()]
        with pytest.raises(ValueError, match=said):
            load_sharded_state_dict(shards, specs, checkpoint, tp_rank=0, tp_size=1)


def test_a_load_opens_no_table_that_it_does_not_need(tmp_path: Path) -> None:
    whole = torch.arange(32.0).view(8, 4)
    for rank in (3, 2, 1, 0):
        shard = ShardedTensor(whole[2 * rank : 2 * rank + 2], (8, 4), (2 * rank, 0))
        write(tmp_path, 1, {f"mp_rank_00/x_dp_{rank:02d}.safetensors": {"x": shard}}, rank=rank, world_size=4)
    checkpoint = NativeCheckpoint(tmp_path / "iter_0000001")
    assert torch.equal(checkpoint.read("x", (3, 1), (2, 2)), whole[3:5, 1:3])
    (checkpoint.path / "tables/rank_00003.jsonl").write_bytes(b"")
    assert torch.equal(checkpoint.read("x", (0, 0), (6, 4)), whole[:6])
    with pytest.raises(ValueError, match=r"rank_00003.jsonl: has 0 bytes instead of"):
        checkpoint.read("x")


def test_slices_of_more_than_one_manifest_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables of 16 ranks exceed a lowered limit, as those of a thousand ranks exceed the real one. Masters and
    moments have the same slices, so they share one list in the manifest."""
    limit, kinds = 20_000, ("master", "exp_avg", "exp_avg_sq")
    monkeypatch.setattr(reader, "MAX_MANIFEST_BYTES", limit)
    for rank in reversed(range(16)):
        shard = ShardedTensor(torch.full((1, 2), float(rank)), (16, 2), (rank, 0))
        shards = {f"{kind}.{number}": shard for kind in kinds for number in range(30)}
        write(tmp_path, 1, {f"mp_rank_00/all_dp_{rank:02d}.safetensors": shards}, rank=rank, world_size=16)
    checkpoint = NativeCheckpoint(tmp_path / "iter_0000001")
    assert not checkpoint.find_damage(check_hashes=False) and len(checkpoint.tensors) == 90
    logged = (checkpoint.path / MANIFEST).read_bytes()
    assert len(logged) < limit < sum(table.stat().st_size for table in (checkpoint.path / "tables").iterdir())
    assert json.loads(logged)["table_ranges"] == [[[rank, rank, rank + 1, 2] for rank in range(16)]]
    assert torch.equal(checkpoint.read("exp_avg.7", (5, 0), (2, 2)), torch.tensor([[5.0, 5.0], [6.0, 6.0]]))


# ---------------------------------------------------------------------------------------------------- version 1

# the sha256 of all names and values, which the program of version 1 computed
VALUES = "51a1e16ca887702a72ed94f9af38b9afabe8aa1833a34a7c5d594fceb6b8aea4"


def test_version_1_has_every_value_that_it_had(tmp_path: Path) -> None:
    """The program of version 1 has written this --save folder: 2 x 2 ranks with a sharded optimizer."""
    version_1 = tmp_path / "version_1"
    shutil.unpack_archive(Path(__file__).parent / "version_1.tar.gz", version_1, filter="data")
    assert json.loads((version_1 / "iter_0000003" / MANIFEST).read_bytes())["version"] == 1
    checkpoint = find_checkpoint(version_1, log=pytest.fail)
    assert checkpoint.iteration == 3 and checkpoint.verify() == ""
    values = hashlib.sha256()
    for name in sorted(list(checkpoint.tensors)):
        values.update(name.encode() + checkpoint.read(name).view(-1).view(torch.uint8).numpy().tobytes())
    assert values.hexdigest() == VALUES and len(checkpoint.tensors) == 4 * 16
    mpu.initialize_model_parallel(1)
    tokenizer = load_for_inference(version_1, torch.device("cpu"), torch.float32, log=pytest.fail).tokenizer
    assert tokenizer.kind == "bytes" and (version_1 / "tokenizer/tokenizer.json").exists(), "as it was called then"
    victim = checkpoint.path / "mp_rank_01/master_dp_00.safetensors"
    data = victim.read_bytes()
    victim.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert NativeCheckpoint(checkpoint.path).find_damage() == f"{victim}: damaged: its sha256 differs from {MANIFEST}"
