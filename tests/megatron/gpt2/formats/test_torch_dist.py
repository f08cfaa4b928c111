"""Megatron's `torch_dist` checkpoints: megatron-core's files and our exports, read by torch and by this program.
megatron-core's own loader read our exports in `31b8a41:tests/megatron/gpt2/formats/test_torch_dist.py`.

megatron-core 0.15 to 0.19 wrote the files, in `7c1f71a:tests/megatron/gpt2/formats/torch_dist/make.py`. Every
checkpoint has the same model of two layers after a step of Adam. `expected.npz` contains the model's tensors, and
`logits.npz` contains tokens and megatron-core's logits.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp

from megatron.gpt2.commands import checkpoint
from megatron.gpt2.config import ModelConfig
from megatron.gpt2.formats import detect_format, torch_dist
from megatron.gpt2.formats.compare import compare_tensors
from megatron.gpt2.formats.torch_dist import MODULE_ORDERS
from megatron.gpt2.formats.torch_files import DCP_METADATA, DcpCheckpoint, read_dcp_metadata, save_dcp
from megatron.gpt2.model.gpt2 import model_partition_specs
from tests.conftest import error_line
from tests.megatron.gpt2.formats.sample_checkpoints import (
    CASES,
    FIXTURES,
    KINDS,
    TOLERANCE,
    VOCABULARY,
    compute_logits,
    expected,
    next_learning_rate,
    opened,
)

ITERATION = "iter_0000003"
WORD_EMBEDDINGS = "embedding.word_embeddings.weight"


@pytest.mark.parametrize("name", CASES)
def test_tensors_are_those_that_megatron_core_held(folders: dict[str, Path], name: str):
    source, fp32 = opened(folders[name]), "fp32" in name
    for file in ("", ITERATION, f"{ITERATION}/.metadata"):
        assert detect_format(folders[name] / file) == ("torch_dist", folders[name] / ITERATION), file
    assert source.iteration == 3 and source.metadata["consumed_samples"] == 12
    without = name.startswith("weights")
    for kind in KINDS[:1] if without else KINDS:
        held = expected("master" if kind == "model" and fp32 else kind)
        assert len(held) == len(model_partition_specs(ModelConfig(**source.metadata["config"]["model"])))
        for parameter, value in held.items():
            found = source.read(f"{kind}.{parameter}")
            assert found.dtype == (torch.bfloat16 if kind == "model" and not fp32 else torch.float32)
            rows = value[:VOCABULARY] if parameter == "word_embeddings.weight" else value
            # Some checkpoints have 16 positions, and the expected tensors have 12.
            found = found[:12] if parameter == "position_embeddings.weight" else found
            assert torch.equal(found.float(), rows), f"{kind}.{parameter}"
    assert without == ("master.word_embeddings.weight" not in source.tensors)
    if not without:
        progress = {"num_updates": 3, "skipped_steps": 0, "adam_steps": 1, "loss_scaler": {"scale": 1.0}}
        assert source.metadata["optimizer"] == progress
        assert next_learning_rate(source) == pytest.approx(0.003), "which megatron-core had set for its next step"
        # In the files the decay is as long as the run, 100 steps. A continued run then uses its own length.
        assert "lr_decay_iters" not in source.metadata["config"]["optimizer"]


@pytest.mark.parametrize("name", [name for name in CASES if "fp32" not in name])
def test_logits_are_megatron_cores_own(folders: dict[str, Path], name: str):
    with np.load(FIXTURES / "logits.npz") as held:
        tokens, logits = (torch.from_numpy(held[key]) for key in ("tokens", "logits"))
    assert (compute_logits(opened(folders[name]), tokens) - logits[..., :VOCABULARY]).abs().max() < TOLERANCE


FIRST_ORDER, SECOND_ORDER = MODULE_ORDERS
# The layer norms have equal shapes, so that only a comparison with the weights finds the wrong order.
EXCHANGED = tuple(FIRST_ORDER[position] for position in (3, 1, 2, 0, 4, 5))


@pytest.mark.parametrize("orders", [(SECOND_ORDER, EXCHANGED, FIRST_ORDER), (SECOND_ORDER,), (EXCHANGED,)])
def test_flat_buckets_in_an_unknown_order_are_left_out(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, orders: tuple[tuple[str, ...], ...]
):
    """orders: the orders of modules that the reader tries. The checkpoint has `FIRST_ORDER`."""
    monkeypatch.setattr(torch_dist, "MODULE_ORDERS", orders)
    source = opened(folders["dp_reshardable_dp2-0.16.1"])
    lines = [line for line in source.left_out if "dp_reshardable" in line]
    if FIRST_ORDER not in orders:
        assert {name.partition(".")[0] for name in source.tensors} == {"model"}
        assert len(lines) == 1 and "--dist-ckpt-optim-fully-reshardable" in lines[0]
        return
    assert not lines
    for kind in KINDS[1:]:
        for parameter, value in expected(kind).items():
            found = source.read(f"{kind}.{parameter}")
            assert torch.equal(found, value[: len(found)]), f"{kind}.{parameter}"


def test_masters_that_are_not_the_weights_are_left_out(folders: dict[str, Path], tmp_path: Path):
    """Megatron Core 0.16 wrote a row of zeros like this one after a padded bucket."""
    folder, iteration = folders["fully_reshardable_dp2-0.16.1"] / ITERATION, tmp_path / ITERATION
    held = DcpCheckpoint(folder)
    state = {name: held.read(name) for name in held.tensors}
    state[f"optimizer.state.param.{WORD_EMBEDDINGS}"][20] = 0
    save_dcp(iteration, state)
    for file in ("common.pt", "metadata.json"):
        shutil.copy(folder / file, iteration)
    source = opened(iteration)
    assert {name.partition(".")[0] for name in source.tensors} == {"model"}
    assert "the master of word_embeddings.weight, rounded, is not the weight" in source.left_out[-1]


def test_another_backend_and_a_lost_file_are_one_line(folders: dict[str, Path]):
    folder = folders["weights-0.16.1"] / ITERATION
    config, file = folder / "metadata.json", next(folder.glob("*.distcp"))

    (folder / "common.pt").unlink()
    said = error_line(lambda: opened(folder))
    assert "holds neither common.pt, " in said and " nor common_state" in said
    file.write_bytes(file.read_bytes()[:-100])
    assert f"{file.name}: has " in error_line(lambda: opened(folder))
    file.unlink()
    assert f"{file.name}: missing" in error_line(lambda: opened(folder))
    config.write_text(config.read_text().replace("torch_dist", "zarr"))
    assert "sharded_backend is 'zarr', but must be torch_dist" in error_line(lambda: opened(folder))


@pytest.mark.parametrize("name", ["fully_reshardable_dp2-0.16.1", "plain_fp32_tp2_pp2-0.16.1"])
def test_what_is_written_is_what_megatron_core_writes(
    folders: dict[str, Path], tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
):
    """Our export has the names, shapes, dtypes and values of megatron-core's file, read by torch's DCP reader."""
    genuine, native, out = str(folders[name]), str(tmp_path / "native"), str(tmp_path / "back")
    to_native = ["convert", genuine, native, "--to", "native", "--check", "--vocab-size", str(VOCABULARY)]
    assert checkpoint.main(to_native) == 0
    assert checkpoint.main(["convert", native, out, *"--to torch_dist --model-parallel-size 4 --check".split()]) == 0
    assert "optimizer" not in capsys.readouterr().err
    back, theirs = opened(tmp_path / "back"), opened(folders[name])
    assert back.iteration == 3 and back.metadata["layout"]["tensor_model_parallel_size"] == 4
    assert len(back.tensors) == 4 * 28 and compare_tensors(back, theirs).equal
    for metadata in ("optimizer", "consumed_samples", "global_batch_size", "train_iters"):
        assert back.metadata[metadata] == theirs.metadata[metadata]
    assert back.metadata["config"]["optimizer"] == theirs.metadata["config"]["optimizer"]
    (ours, _, our_objects), (infos, _, objects) = (
        read_dcp_metadata(folder / ITERATION / DCP_METADATA) for folder in (tmp_path / "back", folders[name])
    )
    if not name.startswith("fully_reshardable"):  # Other forms of Adam's state have different names.
        ours, infos = ({n: info for n, info in held.items() if not n.startswith("optim")} for held in (ours, infos))
    assert ours == infos
    assert {name for name in objects if "_extra_state" in name} <= our_objects.keys()
    table = torch.zeros(32, 8, dtype=back.tensors["model.word_embeddings.weight"].dtype)
    load_dcp({WORD_EMBEDDINGS: table}, checkpoint_id=tmp_path / "back" / ITERATION, no_dist=True)
    assert torch.equal(table[:VOCABULARY], back.read("model.word_embeddings.weight"))
    assert torch.equal(table[VOCABULARY:], table[VOCABULARY - 1 : VOCABULARY].expand(3, -1))
