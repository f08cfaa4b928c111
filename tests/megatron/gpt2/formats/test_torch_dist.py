"""Megatron's `torch_dist` checkpoints: those that megatron-core wrote, and ours, read by torch, by megatron-core and by
ourselves, and trained on.

`torch_dist/README.md` says how the files were made.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

import mpu
from megatron.gpt2.checkpoint.source import check_cover
from megatron.gpt2.checkpoint.state import load_state
from megatron.gpt2.commands import checkpoint, pretrain_gpt2
from megatron.gpt2.config import ModelConfig, OptimizerConfig
from megatron.gpt2.formats import Source, open_source, recognise
from megatron.gpt2.formats.dcp import METADATA, DcpFolder, read_metadata
from megatron.gpt2.formats.foreign import ForeignSource, LazyTensor
from megatron.gpt2.formats.megatron_model import Layout
from megatron.gpt2.formats.native import write_native
from megatron.gpt2.formats.torch_dist import GROUP, ORDERS, write_torch_dist
from megatron.gpt2.model.gpt2 import parameter_specs
from megatron.gpt2.optimizer.flat_parameters import FlatParameters
from megatron.gpt2.optimizer.gradient_reducer import ParameterGatherer
from megatron.gpt2.optimizer.learning_rates import LearningRate
from megatron.gpt2.optimizer.optimizer import AdamWOptimizer, LossScaler
from mpu.partition import Box
from tests.conftest import ROOT
from tests.megatron.gpt2.formats.made import CASES, FIXTURES, KINDS, VOCABULARY, expected, in_fp32, opened
from tests.megatron.gpt2.formats.test_megatron import TOLERANCE, gradient, logits_of, masters
from tests.megatron.gpt2.formats.test_megatron import model_of as gpt2_of
from tests.megatron.gpt2.train.training_runs import write_text
from tests.test_command_line import FLAGS, metrics


@pytest.mark.parametrize("name", CASES)
def test_tensors_are_those_that_megatron_core_held(folders: dict[str, Path], name: str):
    source = opened(folders[name])
    assert recognise(folders[name]) == ("torch_dist", folders[name] / "iter_0000003")
    assert source.iteration == 3 and source.facts["consumed_samples"] == 12
    without = name.startswith("weights")
    for kind in KINDS[:1] if without else KINDS:
        held = expected("master" if kind == "model" and in_fp32(name) else kind)
        assert len(held) == len(parameter_specs(ModelConfig(**source.facts["config"]["model"])))
        for parameter, value in held.items():
            found = source.read(f"{kind}.{parameter}")
            assert found.dtype == (torch.bfloat16 if kind == "model" and not in_fp32(name) else torch.float32)
            rows = value[:VOCABULARY] if parameter == "word_embeddings.weight" else value
            found = found[:12] if parameter == "position_embeddings.weight" else found  # some fixtures have 16
            assert torch.equal(found.float(), rows), f"{kind}.{parameter}"
    assert without == ("master.word_embeddings.weight" not in source.tensors)
    if not without:
        assert source.facts["optimizer"] == {
            "good_steps": 3,
            "skipped_steps": 0,
            "adam_steps": 1,
            "loss_scaler": {"scale": 1.0},
        }
        assert source.facts["config"]["optimizer"]["lr_decay_iters"] == 100


@pytest.mark.parametrize("name", [name for name in CASES if not in_fp32(name)])
def test_logits_are_megatron_cores_own(folders: dict[str, Path], name: str):
    with np.load(FIXTURES / "logits.npz") as held:
        tokens, logits = (torch.from_numpy(held[key]) for key in ("tokens", "logits"))
    assert (logits_of(opened(folders[name]), tokens) - logits[..., :VOCABULARY]).abs().max() < TOLERANCE


def flat_buckets(folder: Path, out: Path, modules: tuple[str, ...], exchanged: dict[str, str]) -> Path:
    """The checkpoint in `folder` with the state in two buckets, as a rank lays it out whose layers have their `modules`
    in that order; with that of one parameter in the place of another's."""
    held, last = DcpFolder(folder), "transformer.final_layernorm"
    names = [
        "word_embeddings.weight",
        "position_embeddings.weight",
        *(f"transformer.layers.{n}.{module}.{x}" for n in range(2) for module in modules for x in ("weight", "bias")),
        f"{last}.weight",
        f"{last}.bias",
    ]
    state: dict[str, Any] = {name: held.read(name) for name in held.tensors if not name.startswith(GROUP)}
    state |= {name: held.object(name) for name in held.objects if name == f"{GROUP}0.optimizer/shard_0_1"}
    for kind, theirs in (("master", "param"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
        values = expected(kind)
        for number, part in enumerate((names[:0:-1][:7], names[:0:-1][7:] + names[:1])):
            bucket = torch.full((4096,), float("nan"))
            at = end = 0
            for name in part:
                value = values[exchanged.get(name, name)]
                bucket[at : at + value.numel()] = value.flatten()
                end = at + value.numel()
                at = -(-end // 64) * 64
            state[f"{GROUP}0.gbuf_idx_0.dtype_param_bf16.bucket_idx_{number}.{theirs}"] = bucket[:end].clone()
    return resaved(folder, out, state)


def resaved(folder: Path, out: Path, state: dict[str, Any]) -> Path:
    """The checkpoint in `folder` with `state` in the place of its tensors and objects."""
    iteration = out / folder.name
    save_dcp(state, checkpoint_id=iteration, planner=DefaultSavePlanner(flatten_state_dict=False), no_dist=True)
    for file in ("common.pt", "metadata.json"):
        shutil.copy(folder / file, iteration)
    return iteration


@pytest.mark.parametrize("order", ORDERS)
def test_flat_buckets_in_the_order_of_the_modules(folders: dict[str, Path], tmp_path: Path, order: tuple[str, ...]):
    folder = folders["dp_reshardable_dp2-0.16.1"] / "iter_0000003"
    source = opened(flat_buckets(folder, tmp_path, order, {}))
    for kind in KINDS[1:]:
        for parameter, value in expected(kind).items():
            found = source.read(f"{kind}.{parameter}")
            assert torch.equal(found, value[: len(found)]), f"{kind}.{parameter}"


def test_flat_buckets_in_another_order_are_left_out_in_one_line(folders: dict[str, Path], tmp_path: Path):
    folder = folders["dp_reshardable_dp2-0.16.1"] / "iter_0000003"
    layer = "transformer.layers.1."
    norms = {
        f"{layer}{one}_layernorm.bias": f"{layer}{other}_layernorm.bias"
        for one, other in (("input", "post_attention"), ("post_attention", "input"))
    }
    for number, (order, exchanged, problem) in enumerate(
        (
            (ORDERS[0][::-1], {}, "does not fit into bucket 0"),
            (ORDERS[0], norms, "the master of .*layernorm.bias, rounded, is not the weight"),
        )
    ):
        source = opened(flat_buckets(folder, tmp_path / str(number), order, exchanged))
        assert {name.partition(".")[0] for name in source.names()} == {"model"}
        (line,) = (line for line in source.left_out if "dp_reshardable" in line)
        assert "--dist-ckpt-optim-fully-reshardable" in line and re.search(problem, line), line


def test_masters_that_are_not_the_weights_are_left_out(folders: dict[str, Path], tmp_path: Path):
    """Megatron Core 0.16 wrote such a row of zeros where it had padded a bucket."""
    folder = folders["fully_reshardable_dp2-0.16.1"] / "iter_0000003"
    held = DcpFolder(folder)
    state = {name: held.read(name) for name in held.tensors}
    state["optimizer.state.param.embedding.word_embeddings.weight"][20] = 0
    source = opened(resaved(folder, tmp_path, state))
    assert {name.partition(".")[0] for name in source.names()} == {"model"}
    assert "the master of word_embeddings.weight, rounded, is not the weight" in source.left_out[-1]


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


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ([((0, 0, 0), (1, 4, 3)), ((1, 0, 0), (1, 2, 3)), ((1, 2, 0), (1, 2, 3))], ""),
        ([((0, 0, 0), (2, 2, 3)), ((0, 2, 0), (2, 2, 3))], ""),
        ([((0, 0, 0), (1, 4, 3)), ((1, 0, 0), (1, 2, 3))], "hold 18 entries of 24"),
        ([((0, 0, 0), (2, 4, 3)), ((1, 0, 0), (1, 2, 3))], "hold 30 entries of 24"),
        ([((0, 0, 0), (1, 4, 3)), ((1, 0, 0), (1, 2, 3)), ((1, 1, 0), (1, 2, 3))], "overlap"),
        ([((0, 0, 0), (3, 4, 3))], "outside"),
    ],
)
def test_boxes_of_three_dimensions(parts: list[Any], problem: str):
    boxes = [Box(*part) for part in parts]
    if problem:
        with pytest.raises(ValueError, match=problem):
            check_cover("it", (2, 4, 3), boxes)
    else:
        check_cover("it", (2, 4, 3), boxes)


@pytest.mark.parametrize("name", ["fully_reshardable_tp4-0.16.1", "fully_sharded_model_space_tp2_dp2-0.15.0"])
def test_training_continues(folders: dict[str, Path], name: str):
    """A step of our optimizer from there is the step of torch's AdamW with the same state, gradients and rate."""
    source = opened(folders[name])
    config = OptimizerConfig(**{**source.facts["config"]["optimizer"], "clip_grad": 0.0})
    model = gpt2_of(source)
    flat = FlatParameters(model, torch.bfloat16, bucket_size=10_000)
    optimizer = AdamWOptimizer(
        flat,
        ParameterGatherer(flat, model, None),
        config,
        LossScaler(1.0),
        torch.from_numpy(LearningRate(config, 100, 1).table(np.arange(101.0))),
    )
    specs = mpu.partition_specs(model)
    load_state(optimizer.tensors(), specs, source, mp_rank=0, mp_size=1)
    optimizer.load_state_dict(source.facts["optimizer"])
    rate = optimizer.learning_rate.item()
    assert rate == pytest.approx(0.003), "which megatron-core had set for its next step"
    parameters = {parameter: torch.nn.Parameter(source.read(f"master.{parameter}")) for parameter in specs}
    theirs = torch.optim.AdamW(
        [
            {"params": [x for x in parameters.values() if (x.dim() > 1) == decays], "weight_decay": 0.1 * decays}
            for decays in (True, False)
        ],
        lr=rate,
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    for parameter, x in parameters.items():
        x.grad = gradient(parameter, tuple(x.shape))
        theirs.state[x] = {
            "step": torch.tensor(1.0),
            **{kind: source.read(f"{kind}.{parameter}") for kind in ("exp_avg", "exp_avg_sq")},
        }
        flat.grad(parameter).copy_(specs[parameter].split(x.grad, 0, 1))
    optimizer.step()
    theirs.step()
    for parameter, x in parameters.items():
        after = specs[parameter].true_part(flat.view(masters(flat), parameter), 0, 1)
        assert (after - x).abs().max() < 1e-6, parameter
        assert (after - source.read(f"master.{parameter}")).abs().max() > 1e-4, "the step moved it"


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
