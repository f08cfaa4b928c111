"""`torch_dist` as it is written here: read by torch, by megatron-core and by ourselves, and trained on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp

import mpu
from megatron.gpt2.commands import checkpoint, pretrain_gpt2
from megatron.gpt2.config import ModelConfig
from megatron.gpt2.formats import Source
from megatron.gpt2.formats.dcp import METADATA, read_metadata
from megatron.gpt2.formats.foreign import ForeignSource, LazyTensor
from megatron.gpt2.formats.megatron_model import Layout
from megatron.gpt2.formats.torch_dist import write_torch_dist
from tests.conftest import ROOT
from tests.megatron.gpt2.formats.test_readers import TOLERANCE
from tests.megatron.gpt2.formats.torch_dist_files import FIXTURES, VOCABULARY, opened
from tests.megatron.gpt2.train.training_runs import write_text
from tests.test_command_line import FLAGS, metrics


@pytest.mark.parametrize("name", ["fully_reshardable_dp2-0.16.1", "plain_fp32_tp2_pp2-0.16.1"])
def test_what_is_written_is_what_megatron_core_writes(
    folders: dict[str, Path], tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
):
    """The same names, shapes and types as in its own file, read by torch's own reader, and the same values."""
    command = [
        "convert",
        str(folders[name]),
        str(tmp_path / "native"),
        "--to",
        "native",
        "--check",
        "--vocab-size",
        str(VOCABULARY),
    ]
    assert checkpoint.main(command) == 0
    command = [
        "convert",
        str(tmp_path / "native"),
        str(tmp_path / "back"),
        "--to",
        "torch_dist",
        "--model-parallel-size",
        "4",
        "--check",
    ]
    assert checkpoint.main(command) == 0
    assert "optimizer" not in capsys.readouterr().err
    back, theirs = opened(tmp_path / "back"), opened(folders[name])
    assert back.format == "torch_dist" and back.iteration == 3 and back.facts["layout"]["model_parallel_size"] == 4
    assert set(back.names()) == set(theirs.names()) and len(back.names()) == 4 * 28
    for tensor in back.names():
        assert torch.equal(back.read(tensor), theirs.read(tensor)), tensor
    for facts in ("optimizer", "consumed_samples", "global_batch_size", "train_iters"):
        assert back.facts[facts] == theirs.facts[facts]
    assert back.facts["config"]["optimizer"] == theirs.facts["config"]["optimizer"]
    (ours, _, our_objects), (genuine, _, objects) = (
        read_metadata(folder / "iter_0000003" / METADATA) for folder in (tmp_path / "back", folders[name])
    )
    same = "" if name.startswith("fully_reshardable") else "optimizer."  # each rank's own Adam has other names
    assert {name: info for name, info in ours.items() if not same or not name.startswith(same)} == {
        name: info for name, info in genuine.items() if not same or not name.startswith(same)
    }
    assert {name for name in objects if "_extra_state" in name} <= our_objects.keys()
    table = torch.zeros(32, 8, dtype=back.tensors["model.word_embeddings.weight"].dtype)
    load_dcp(
        {"embedding.word_embeddings.weight": table}, checkpoint_id=tmp_path / "back" / "iter_0000003", no_dist=True
    )
    assert torch.equal(table[:VOCABULARY], back.read("model.word_embeddings.weight"))
    assert torch.equal(table[VOCABULARY:], table[VOCABULARY - 1 : VOCABULARY].expand(3, -1))


def test_the_loop_goes_on_from_torch_dist_as_from_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Four steps, a checkpoint, four more: the same losses where the checkpoint was torch_dist for a while."""
    mpu.destroy_model_parallel()  # the program makes its own groups
    write_text(tmp_path, 1000)
    monkeypatch.chdir(tmp_path)
    flags = [
        *FLAGS,
        "--train-data",
        "text.txt",
        "--precision",
        "bf16",
        "--lr-decay-iters",
        "8",
        "--log-interval",
        "1",
        "--eval-iters",
        "0",
    ]
    assert pretrain_gpt2.main([*flags, "--save", "own", "--train-iters", "4"]) == 0
    assert checkpoint.main(["convert", "own", "dist", "--to", "torch_dist", "--model-parallel-size", "2"]) == 0
    assert checkpoint.main(["convert", "dist", "back", "--to", "native"]) == 0
    seen = {}
    for name in ("own", "back"):
        assert pretrain_gpt2.main([*flags, "--load", name, "--save", f"{name}_on", "--train-iters", "8"]) == 0
        seen[name] = [
            (step["iteration"], step["lm_loss"], step["learning_rate"], step["grad_norm"])
            for step in metrics(tmp_path / f"{name}_on")
        ]
    assert [step[0] for step in seen["own"]] == [5, 6, 7, 8] and seen["back"] == seen["own"]


class Moved(ForeignSource):
    """`source` with masters that bf16 does not hold, and the same weights in bf16."""

    def __init__(self, source: Source) -> None:
        lazy = {name: LazyTensor.of(source.read(name)) for name in source.names()}
        for name, tensor in lazy.items():
            if name.startswith("master."):
                x = tensor.make()
                lazy[name] = LazyTensor.of(x * (1 + 2**-10 * torch.rand(x.shape)))
        super().__init__(
            source.path,
            source.format,
            source.iteration,
            ModelConfig(**source.facts["config"]["model"]),
            source.facts,
            lazy,
        )


@pytest.mark.wide  # importing megatron-core takes 11 s, twice
def test_megatron_cores_own_loader_reads_what_is_written(folders: dict[str, Path], tmp_path: Path):
    """Weights, by the logits; Adam's state under three layouts, by what megatron-core writes of it; the schedule."""
    pytest.importorskip("megatron.core.dist_checkpointing", reason="megatron-core is not installed")
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])

    def make(*args: str | Path) -> None:
        subprocess.run(
            [sys.executable, str(FIXTURES / "make.py"), *map(str, args)],
            env={**os.environ, "PYTHONPATH": path},
            check=True,
            timeout=240,
        )

    written = write_torch_dist(opened(folders["fully_reshardable_tp4-0.16.1"]), tmp_path / "back", Layout(2, 2))
    make("logits", written, tmp_path / "logits.npz")
    with np.load(FIXTURES / "logits.npz") as held, np.load(tmp_path / "logits.npz") as found:
        assert np.array_equal(held["tokens"], found["tokens"])
        assert np.abs(held["logits"] - found["logits"])[..., :VOCABULARY].max() < TOLERANCE
    source = Moved(opened(folders["dp_reshardable_tp2_pp2_16-0.16.1"]))
    assert not torch.equal(
        source.read("master.word_embeddings.weight"), source.read("master.word_embeddings.weight").bfloat16().float()
    )
    cases = ("dp_reshardable_dp2", "dp_reshardable_tp2_pp2_16", "fully_reshardable_tp4")
    make("rewrite", write_torch_dist(source, tmp_path / "moved", Layout(1)), tmp_path / "theirs", *cases)
    for case in cases:
        theirs = opened(tmp_path / "theirs" / case)
        assert theirs.names() == source.names() and theirs.facts["optimizer"] == source.facts["optimizer"]
        assert theirs.facts["config"]["optimizer"] == source.facts["config"]["optimizer"]
        for name in source.names():
            assert torch.equal(theirs.read(name), source.read(name)), f"{case}: {name}"
