"""Megatron's `torch_dist` checkpoints: those that megatron-core wrote, and files `.metadata` that were made to do harm.

`torch_dist/README.md` says how the files were made.
"""

from __future__ import annotations

import os
import pickle
import resource
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp

import mpu
from megatron.gpt2.checkpoint.state import load_state
from megatron.gpt2.config import ModelConfig, OptimizerConfig
from megatron.gpt2.formats import Hints, Source, open_source, recognise
from megatron.gpt2.formats.dcp import check_cover
from megatron.gpt2.formats.dcp_metadata import METADATA, read_metadata
from megatron.gpt2.formats.megatron_files import name_of_2019
from megatron.gpt2.formats.megatron_layout import Layout
from megatron.gpt2.formats.native import write_native
from megatron.gpt2.formats.write_torch_dist import write_torch_dist
from megatron.gpt2.model.parameters import parameter_specs
from megatron.gpt2.optimizer.flat_parameters import FlatParameters
from megatron.gpt2.optimizer.learning_rates import LearningRate
from megatron.gpt2.optimizer.loss_scaler import LossScaler
from megatron.gpt2.optimizer.optimizer import AdamWOptimizer
from megatron.gpt2.optimizer.parameter_gatherer import ParameterGatherer
from megatron.gpt2.programs import checkpoint
from mpu.partition import Box
from tests.conftest import ROOT
from tests.megatron.gpt2.formats.crafted_metadata import CRAFTED
from tests.megatron.gpt2.formats.test_readers import TOLERANCE, gradient, logits_of, masters
from tests.megatron.gpt2.formats.test_readers import model_of as gpt2_of

FIXTURES = Path(__file__).parent / "torch_dist"
CASES = {path.name.removesuffix(".tar.xz"): path for path in sorted(FIXTURES.glob("*.tar.xz"))}
VOCABULARY, KINDS = 29, ("model", "master", "exp_avg", "exp_avg_sq")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every fixture, unpacked, by its name."""
    base = tmp_path_factory.mktemp("torch_dist")
    for name, path in CASES.items():
        with tarfile.open(path) as archive:
            archive.extractall(base / name, filter="data")
    return {name: base / name for name in CASES}


def opened(folder: Path) -> Source:
    return open_source(folder, Hints(vocab_size=VOCABULARY), log=lambda line: None)


def expected(kind: str) -> dict[str, Tensor]:
    """What megatron-core held in memory when it wrote, by our names."""
    with np.load(FIXTURES / "expected.npz") as held:
        return {name_of_2019(name.removeprefix(f"{kind}.")): torch.from_numpy(held[name])
                for name in held.files if name.startswith(f"{kind}.")}


def in_fp32(name: str) -> bool:
    return "fp32" in name


@pytest.mark.parametrize("name", CASES)
def test_tensors_are_those_that_megatron_core_held(folders: dict[str, Path], name: str):
    source = opened(folders[name])
    assert recognise(folders[name]) == ("torch_dist", folders[name] / "iter_0000003")
    assert source.iteration == 3 and source.facts["consumed_samples"] == 12
    without = name.startswith(("weights", "dp_reshardable"))
    for kind in KINDS[:1] if without else KINDS:
        held = expected("master" if kind == "model" and in_fp32(name) else kind)
        assert len(held) == len(parameter_specs(ModelConfig(**source.facts["config"]["model"])))
        for parameter, value in held.items():
            found = source.read(f"{kind}.{parameter}")
            assert found.dtype == (torch.bfloat16 if kind == "model" and not in_fp32(name) else torch.float32)
            rows = value[:VOCABULARY] if parameter == "word_embeddings.weight" else value
            assert torch.equal(found.float(), rows), f"{kind}.{parameter}"
    assert without == ("master.word_embeddings.weight" not in source.tensors)
    if not without:
        assert source.facts["optimizer"] == {"good_steps": 3, "skipped_steps": 0, "adam_steps": 1,
                                             "loss_scaler": {"scale": 1.0}}
        assert source.facts["config"]["optimizer"]["lr_decay_iters"] == 100


@pytest.mark.parametrize("name", [name for name in CASES if not in_fp32(name)])
def test_logits_are_megatron_cores_own(folders: dict[str, Path], name: str):
    with np.load(FIXTURES / "logits.npz") as held:
        tokens, logits = (torch.from_numpy(held[key]) for key in ("tokens", "logits"))
    assert (logits_of(opened(folders[name]), tokens) - logits[..., :VOCABULARY]).abs().max() < TOLERANCE


def test_flat_buckets_are_left_out_in_one_line_that_names_the_flag(folders: dict[str, Path]):
    lines = [line for line in opened(folders["dp_reshardable_dp2-0.16.1"]).left_out if "dp_reshardable" in line]
    assert len(lines) == 1 and "--dist-ckpt-optim-fully-reshardable" in lines[0]


def test_a_converted_checkpoint_holds_the_same(folders: dict[str, Path], tmp_path: Path):
    source = opened(folders["plain_tp2_pp2_per_layer-0.16.1"])
    write_native(source, tmp_path / "native", model_parallel_size=2, log=lambda line: None)
    back = open_source(tmp_path / "native", log=lambda line: None)
    assert set(source.names()) == set(back.names())
    for name in source.names():
        assert torch.equal(source.read(name), back.read(name)), name


def test_a_file_of_the_folder_opens_it(folders: dict[str, Path]):
    folder = folders["plain-0.16.1"] / "iter_0000003"
    for file in (".metadata", "common.pt", "metadata.json", "__0_0.distcp"):
        assert recognise(folder / file) == ("torch_dist", folder), file


def test_another_backend_and_a_lost_file_are_one_line(folders: dict[str, Path]):
    folder = folders["weights-0.16.1"] / "iter_0000003"
    config = (folder / "metadata.json").read_text()
    (folder / "metadata.json").write_text(config.replace("torch_dist", "zarr"))
    with pytest.raises(ValueError, match="sharded_backend is 'zarr', and torch_dist is read here"):
        opened(folder)
    (folder / "metadata.json").write_text(config)
    file = next(folder.glob("*.distcp"))
    data = file.read_bytes()
    file.write_bytes(data[:-100])
    with pytest.raises(ValueError, match=f"{file.name}: has .* bytes, and .metadata tells of"):
        opened(folder)
    file.unlink()
    with pytest.raises(ValueError, match=f"{file.name}: missing"):
        opened(folder)
    file.write_bytes(data)


@pytest.fixture(scope="module")
def genuine(folders: dict[str, Path]) -> tuple[Path, bytes]:
    folder = folders["plain-0.16.1"] / "iter_0000003"
    return folder, (folder / METADATA).read_bytes()


def test_there_are_two_hundred():
    assert len(CRAFTED) >= 200


@pytest.mark.parametrize("name", CRAFTED)
def test_crafted(genuine: tuple[Path, bytes], tmp_path: Path, name: str):
    folder, data = genuine
    marker = tmp_path / "executed"
    crafted = CRAFTED[name](data, marker)
    (folder / METADATA).write_bytes(crafted)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.process_time()  # of this process alone: other tests run beside it
    with pytest.raises(ValueError) as caught:
        source = opened(folder)
        for tensor in source.names():
            source.read(tensor)
    took = time.process_time() - begin
    message = str(caught.value)
    assert "\n" not in message and len(message) < 600 and str(folder) in message, message
    assert took < 2, f"{took:.2f} s: {message}"  # the longest takes 0.9 s, and more on a slower machine
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) << 10 < len(crafted) + (64 << 20)
    assert not marker.exists(), "executed"


def test_the_payloads_would_run(genuine: tuple[Path, bytes], tmp_path: Path):
    """A test that nothing was executed shows something only where it would have been."""
    pickle.loads(CRAFTED["os.system called"](genuine[1], tmp_path / "executed"))
    assert (tmp_path / "executed").exists()


def test_what_was_crafted_is_right_but_for_one_thing(genuine: tuple[Path, bytes]):
    folder, data = genuine
    (folder / METADATA).write_bytes(pickle.dumps(pickle.loads(data), 4))
    assert opened(folder).names()


def test_metadata_of_every_protocol(genuine: tuple[Path, bytes], tmp_path: Path):
    wanted = read_metadata_of(tmp_path, genuine[1])
    assert wanted.tensors and wanted.objects
    assert read_metadata_of(tmp_path, pickle.dumps(pickle.loads(genuine[1]), 5)) == wanted


def read_metadata_of(folder: Path, data: bytes) -> Any:
    (folder / METADATA).write_bytes(data)
    return read_metadata(folder / METADATA)


@pytest.mark.parametrize(("parts", "problem"), [
    ([((0, 0, 0), (1, 4, 3)), ((1, 0, 0), (1, 2, 3)), ((1, 2, 0), (1, 2, 3))], ""),
    ([((0, 0, 0), (2, 2, 3)), ((0, 2, 0), (2, 2, 3))], ""),
    ([((0, 0, 0), (1, 4, 3)), ((1, 0, 0), (1, 2, 3))], "hold 6 entries of 12"),
    ([((0, 0, 0), (2, 4, 3)), ((1, 0, 0), (1, 2, 3))], "hold 18 entries of 12"),
    ([((0, 0, 0), (1, 4, 3)), ((1, 0, 0), (1, 2, 3)), ((1, 1, 0), (1, 2, 3))], "overlap"),
    ([((0, 0, 0), (3, 4, 3))], "outside")])
def test_boxes_of_three_dimensions(parts: list[Any], problem: str):
    boxes = [Box(*part) for part in parts]
    if problem:
        with pytest.raises(ValueError, match=problem):
            check_cover("it", (2, 4, 3), boxes)
    else:
        check_cover("it", (2, 4, 3), boxes)


@pytest.mark.parametrize("name", ["plain-0.16.1", "plain_fp32_tp2_pp2-0.16.1"])
def test_what_is_written_is_what_megatron_core_writes(folders: dict[str, Path], tmp_path: Path, name: str,
                                                      capsys: pytest.CaptureFixture[str]):
    """The same names, shapes and types as in its own file, read by torch's own reader, and the same values."""
    command = ["convert", str(folders[name]), str(tmp_path / "native"), "--to", "native", "--check", "--vocab-size",
               str(VOCABULARY)]
    assert checkpoint.main(command) == 0
    command = ["convert", str(tmp_path / "native"), str(tmp_path / "back"), "--to", "torch_dist",
               "--model-parallel-size", "4", "--check"]
    assert checkpoint.main(command) == 0
    assert "left out: the optimizer's state, which is not written here" in capsys.readouterr().err
    back, theirs = opened(tmp_path / "back"), opened(folders[name])
    assert back.format == "torch_dist" and back.iteration == 3 and back.facts["layout"]["model_parallel_size"] == 4
    for tensor in back.names():
        assert torch.equal(back.read(tensor), theirs.read(tensor)), tensor
    ours, genuine = (read_metadata(folder / "iter_0000003" / METADATA) for folder in (tmp_path / "back", folders[name]))
    assert {name: info for name, (info, _) in ours.tensors.items()} == {
        name: info for name, (info, _) in genuine.tensors.items() if not name.startswith("optimizer.")}
    assert {name for name in genuine.objects if "_extra_state" in name} <= ours.objects.keys()
    table = torch.zeros(32, 8, dtype=back.tensors["model.word_embeddings.weight"].dtype)
    load_dcp({"embedding.word_embeddings.weight": table}, checkpoint_id=tmp_path / "back" / "iter_0000003",
             no_dist=True)
    assert torch.equal(table[:VOCABULARY], back.read("model.word_embeddings.weight"))
    assert torch.equal(table[VOCABULARY:], table[VOCABULARY - 1:VOCABULARY].expand(3, -1))


@pytest.mark.parametrize("name", ["fully_reshardable_tp4-0.16.1", "fully_sharded_model_space_tp2_dp2-0.15.0"])
def test_training_continues(folders: dict[str, Path], name: str):
    """A step of our optimizer from there is the step of torch's AdamW with the same state, gradients and rate."""
    source = opened(folders[name])
    config = OptimizerConfig(**{**source.facts["config"]["optimizer"], "clip_grad": 0.0})
    model = gpt2_of(source)
    flat = FlatParameters(model, torch.bfloat16, bucket_size=10_000)
    optimizer = AdamWOptimizer(flat, ParameterGatherer(flat, model, None), config, LossScaler(1.0),
                               torch.from_numpy(LearningRate(config, 100, 1).table(np.arange(101.0))))
    specs = mpu.partition_specs(model)
    load_state(optimizer.tensors(), specs, source, mp_rank=0, mp_size=1)
    optimizer.load_state_dict(source.facts["optimizer"])
    rate = optimizer.learning_rate.item()
    assert rate == pytest.approx(0.003), "which megatron-core had set for its next step"
    parameters = {parameter: torch.nn.Parameter(source.read(f"master.{parameter}")) for parameter in specs}
    theirs = torch.optim.AdamW([{"params": [x for x in parameters.values() if (x.dim() > 1) == decays],
                                 "weight_decay": 0.1 * decays} for decays in (True, False)],
                               lr=rate, betas=(0.9, 0.95), eps=1e-8)
    for parameter, x in parameters.items():
        x.grad = gradient(parameter, tuple(x.shape))
        theirs.state[x] = {"step": torch.tensor(1.0), **{kind: source.read(f"{kind}.{parameter}")
                                                         for kind in ("exp_avg", "exp_avg_sq")}}
        flat.grad(parameter).copy_(specs[parameter].split(x.grad, 0, 1))
    optimizer.step()
    theirs.step()
    for parameter, x in parameters.items():
        after = specs[parameter].true_part(flat.view(masters(flat), parameter), 0, 1)
        assert (after - x).abs().max() < 1e-6, parameter
        assert (after - source.read(f"master.{parameter}")).abs().max() > 1e-4, "the step moved it"


@pytest.mark.wide  # importing megatron-core takes 11 s
def test_megatron_cores_own_loader_reads_what_is_written(folders: dict[str, Path], tmp_path: Path):
    pytest.importorskip("megatron.core.dist_checkpointing", reason="megatron-core is not installed")
    write_torch_dist(opened(folders["fully_reshardable_tp4-0.16.1"]), tmp_path / "back", Layout(2, 2))
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    subprocess.run([sys.executable, str(FIXTURES / "make.py"), "logits", str(tmp_path / "back" / "iter_0000003"),
                    str(tmp_path / "logits.npz")], env={**os.environ, "PYTHONPATH": path}, check=True, timeout=240)
    with np.load(FIXTURES / "logits.npz") as held, np.load(tmp_path / "logits.npz") as found:
        assert np.array_equal(held["tokens"], found["tokens"])
        assert np.abs(held["logits"] - found["logits"])[..., :VOCABULARY].max() < TOLERANCE
