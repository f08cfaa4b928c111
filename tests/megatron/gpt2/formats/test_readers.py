"""Megatron's files: the genuine ones against the logits of the code that wrote them, the others against the weights
that they were made of. Nothing here is close: merged weights are the same to the last bit.
"""

from __future__ import annotations

import functools
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import mpu
from megatron.gpt2.checkpoint.state import load_state, whole_parameters
from megatron.gpt2.config import ModelConfig, OptimizerConfig
from megatron.gpt2.formats import Hints, Source, open_source, recognise
from megatron.gpt2.formats.torch_files import load_pickle
from megatron.gpt2.model.gpt2 import GPT2Model
from megatron.gpt2.model.parameters import parameter_specs
from megatron.gpt2.optimizer.flat_parameters import FlatParameters
from megatron.gpt2.optimizer.learning_rates import LearningRate
from megatron.gpt2.optimizer.loss_scaler import DynamicLossScaler
from megatron.gpt2.optimizer.optimizer import AdamWOptimizer
from megatron.gpt2.optimizer.parameter_gatherer import ParameterGatherer
from tests.conftest import TEST_DATA
from tests.distributed import run_ranks

GENUINE = ("megatron-2019/tp1", "megatron-2019/tp2", "megatron-2019/tp4", "megatron-v2.6/tp1", "megatron-v2.6/tp2")
TRUE_VOCABULARY = 130
TOLERANCE = 5e-6
genuine = pytest.mark.skipif(not (TEST_DATA / GENUINE[0]).is_dir(), reason=f"{TEST_DATA} has no genuine checkpoints")


def silent(line: str) -> None:
    pass


def hints_for(name: str, **more: Any) -> Hints:
    """The files of 2019 do not say how many heads there are."""
    return Hints(num_attention_heads=4 if "2019" in name else None, vocab_size=TRUE_VOCABULARY, **more)


def open_genuine(name: str, **more: Any) -> Source:
    return open_source(TEST_DATA / name / "checkpoint", hints_for(name, **more), log=silent)


def model_of(source: Source) -> GPT2Model:
    """In fp32, on this rank of the default model-parallel group."""
    model = GPT2Model(ModelConfig(**source.facts["config"]["model"])).eval()
    load_state(
        whole_parameters(model.named_parameters()),
        mpu.partition_specs(model),
        source,
        mp_rank=mpu.get_model_parallel_rank(),
        mp_size=mpu.get_model_parallel_world_size(),
    )
    return model


@torch.no_grad()
def logits_of(source: Source, tokens: Tensor) -> Tensor:
    """[b, s, true vocabulary]."""
    logits = mpu.gather_from_model_parallel_region(model_of(source)(tokens))  # [s, b, padded vocabulary]
    return logits[..., : source.facts["vocab_size"]].transpose(0, 1)


def differences(rank: int, world_size: int, gelu: str | None = None) -> list[float]:
    """Of each genuine checkpoint's logits, from those of the code that wrote it."""
    mpu.initialize_model_parallel(world_size)
    found = []
    for name in GENUINE:
        tokens = torch.from_numpy(np.load(TEST_DATA / name / "tokens.npy"))
        theirs = torch.from_numpy(np.load(TEST_DATA / name / "logits.npy"))[..., :TRUE_VOCABULARY]
        found.append((logits_of(open_genuine(name, gelu=gelu), tokens) - theirs).abs().max().item())
    return found


@genuine
@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.wide)])
def test_logits_of_genuine_files(world_size: int):
    for found in run_ranks(differences, world_size):
        assert len(found) == len(GENUINE)
        assert max(found) < TOLERANCE, dict(zip(GENUINE, found, strict=True))


@genuine
def test_the_inferred_gelu_is_the_right_one():
    assert {open_genuine(name).facts["config"]["model"]["gelu"] for name in GENUINE} == {"tanh"}
    (wrong,) = run_ranks(differences, 1, "erf")
    assert min(wrong) > 2 * TOLERANCE, "the tolerance tells the two forms apart"


@genuine
@pytest.mark.parametrize("name", GENUINE)
def test_merges_are_bit_identical(name: str):
    merged, single = open_genuine(name), open_genuine(f"{name.split('/')[0]}/tp1")
    assert merged.iteration == 18
    names = [name for name in merged.names() if name.startswith("model.")]
    assert names == single.names() and len(names) == 40
    for tensor in names:
        assert merged.tensors[tensor].dtype == merged.read(tensor).dtype == torch.float16
        assert torch.equal(merged.read(tensor), single.read(tensor)), tensor


@genuine
def test_without_a_flag_the_vocabulary_is_the_padded_size():
    lines: list[str] = []
    for name, padded in (("megatron-2019/tp4", 160), ("megatron-v2.6/tp2", 144)):
        source = open_source(
            TEST_DATA / name / "checkpoint", replace(hints_for(name), vocab_size=None), log=lines.append
        )
        assert source.facts["vocab_size"] == padded == source.global_shape("model.word_embeddings.weight")[0]
        assert "--vocab-size" in lines[-1] and str(padded) in lines[-1]
        cut = open_genuine(name)
        assert cut.global_shape("model.word_embeddings.weight") == (TRUE_VOCABULARY, 64)
        assert torch.equal(
            source.read("model.word_embeddings.weight", (0, 0), (TRUE_VOCABULARY, 64)),
            cut.read("model.word_embeddings.weight"),
        )


@genuine
def test_formats_and_facts():
    assert [recognise(TEST_DATA / name / "checkpoint")[0] for name in GENUINE] == ["megatron-2019"] * 3 + [
        "megatron-v2"
    ] * 2
    newer = open_genuine("megatron-v2.6/tp1")
    assert newer.facts["consumed_samples"] == 72
    assert newer.facts["config"]["model"]["num_attention_heads"] == 4
    assert any("random" in line for line in newer.left_out)


@functools.cache
def two_ranks() -> list[dict[str, Any]]:
    folder = TEST_DATA / "megatron-2019/tp2/checkpoint/iter_0000018"
    return [load_pickle(folder / f"mp_rank_{rank:02d}/model_optim_rng.pt") for rank in range(2)]


def joined(kind: str, name: str) -> Tensor:
    """What the two files of 2019 hold of one parameter's optimizer state, put together by hand."""
    shards = []
    for top in two_ranks():
        names = list(top["model"])
        decays = top["model"][name].dim() == 2
        index = [other for other in names if (top["model"][other].dim() == 2) == decays].index(name)
        held, group = top["optimizer"], 0 if decays else 1
        if kind == "master":
            shards.append(held["fp32_from_fp16"][group][index])
        else:
            number = held["optimizer_state_dict"]["param_groups"][group]["params"][index]
            shards.append(held["optimizer_state_dict"]["state"][number][kind])
    if "query_key_value" in name:  # [3, n/p, d] of each rank
        d = 16
        q, k, v = (torch.cat([shard.view(3, 2, d, -1)[part] for shard in shards]) for part in range(3))
        return torch.stack([q, k, v], 1).reshape(-1, *shards[0].shape[1:])
    if "dense.weight" in name or "4h_to_h.weight" in name:
        return torch.cat(shards, 1)
    if "word_embeddings" in name:
        return torch.cat(shards)[:TRUE_VOCABULARY]
    if "dense_h_to_4h" in name:
        return torch.cat(shards)
    return shards[0]


def step_once(rank: int, world_size: int) -> tuple[dict[str, Tensor], dict[str, Any], float]:
    """Restore the optimizer of 2019's two ranks, and take a step of known gradients: the masters after it."""
    mpu.initialize_model_parallel(world_size)
    source = open_genuine("megatron-2019/tp2")
    config = OptimizerConfig(**{**source.facts["config"]["optimizer"], "clip_grad": 0.0})
    model = model_of(source)
    specs = mpu.partition_specs(model)
    flat = FlatParameters(model, torch.float16, bucket_size=10_000)
    optimizer = AdamWOptimizer(
        flat,
        ParameterGatherer(flat, model, None),
        config,
        DynamicLossScaler(),
        torch.from_numpy(LearningRate(config, 100, 1).table(np.arange(101.0))),
    )
    load_state(optimizer.tensors(), specs, source, mp_rank=rank, mp_size=world_size)
    optimizer.load_state_dict(source.facts["optimizer"])
    restored = optimizer.state_dict()
    rate = optimizer.learning_rate.item()
    for name, spec in specs.items():
        flat.grad(name).copy_(spec.split(gradient(name, spec.global_shape), rank, world_size) * optimizer.scaler.scale)
    optimizer.step()
    after = {
        name: specs[name].true_part(flat.view(masters(flat), name), rank, world_size).clone() for name in flat.ranges
    }
    return after, restored, rate


def masters(flat: FlatParameters) -> Tensor:
    """As one buffer, laid out as the parameters are."""
    whole = torch.zeros(flat.params.numel())
    for segment, master in zip(flat.owned, flat.masters, strict=True):
        whole[segment.range] = master
    return whole


def gradient(name: str, shape: tuple[int, ...]) -> Tensor:
    return 1e-3 * torch.randn(shape, generator=torch.Generator().manual_seed(len(name) + sum(map(ord, name))))


@genuine
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_optimizer_of_2019_goes_on(world_size: int):
    source = open_genuine("megatron-2019/tp2")
    names = [name.removeprefix("model.") for name in source.names() if name.startswith("model.")]
    for kind in ("master", "exp_avg", "exp_avg_sq"):
        for name in names:
            assert torch.equal(source.read(f"{kind}.{name}"), joined(kind, name)), (kind, name)
    results = run_ranks(step_once, world_size)
    rate = results[0][2]
    assert rate == pytest.approx(0.03 * (1 - 2 / 99))
    expected, step = {}, 4  # three were taken
    for name in names:
        gradients = gradient(name, source.global_shape(f"model.{name}"))
        first = 0.9 * joined("exp_avg", name) + 0.1 * gradients
        second = 0.999 * joined("exp_avg_sq", name) + 0.001 * gradients**2
        update = (first / (1 - 0.9**step)) / ((second / (1 - 0.999**step)).sqrt() + 1e-8)
        decay = 0.01 if gradients.dim() == 2 else 0.0
        expected[name] = joined("master", name) * (1 - rate * decay) - rate * update
    for number, (after, restored, _) in enumerate(results):
        assert restored == {
            "good_steps": 3,
            "skipped_steps": 15,
            "adam_steps": 3,
            "loss_scaler": {"scale": 2.0**18, "clean_steps": 3.0, "hysteresis_left": 1.0},
        }
        for name, spec in parameter_specs(ModelConfig(**source.facts["config"]["model"])).items():
            part = spec.box(number, world_size).slices()
            assert (after[name] - expected[name][part]).abs().max() < 1e-6, name
            assert (after[name] - joined("master", name)[part]).abs().max() > 1e-3, "the step moved it"


def copy_genuine(name: str, to: Path) -> Path:
    shutil.copytree(TEST_DATA / name / "checkpoint", to)
    for path in [to, *to.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    return to / "iter_0000018"


def refused(path: Path, *words: str, **hints: Any) -> None:
    with pytest.raises(ValueError) as caught:
        open_source(path, Hints(**hints), log=silent)
    message = str(caught.value)
    assert "\n" not in message and all(word in message for word in (str(path), *words)), message


@genuine
def test_heads_that_are_missing_or_do_not_divide():
    path = TEST_DATA / "megatron-2019/tp2/checkpoint"
    refused(path, "--num-attention-heads", "2, 4, 8")
    refused(path, "--num-attention-heads", "2, 4, 8", num_attention_heads=5)
    refused(path, "--num-attention-heads", num_attention_heads=1)  # divides the hidden size, but not over 2 ranks
    refused(TEST_DATA / "megatron-v2.6/tp1/checkpoint", "--num-attention-heads", num_attention_heads=8)


@genuine
def test_a_vocabulary_or_iteration_that_is_not_there():
    path = TEST_DATA / "megatron-2019/tp1/checkpoint"
    refused(path, "--vocab-size 137", "136", num_attention_heads=4, vocab_size=137)
    refused(path, "iteration 20", num_attention_heads=4, iteration=20)
    assert open_source(path, Hints(num_attention_heads=4, iteration=18), log=silent).iteration == 18


@genuine
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_missing_rank(tmp_path: Path, rank: int):
    folder = copy_genuine("megatron-2019/tp4", tmp_path / "there")
    shutil.rmtree(folder / f"mp_rank_{rank:02d}")
    refused(tmp_path / "there", "missing", num_attention_heads=4)


@genuine
def test_ranks_of_two_iterations_or_two_runs(tmp_path: Path):
    folder = copy_genuine("megatron-v2.6/tp2", tmp_path / "there")
    file = folder / "mp_rank_01/model_optim_rng.pt"
    top = torch.load(file, weights_only=False)
    torch.save({**top, "iteration": 19}, file)
    refused(tmp_path / "there", "two iterations", "18", "19")
    top["model"]["language_model"]["embedding"]["position_embeddings"]["weight"][3, 3] += 1
    torch.save(top, file)
    refused(tmp_path / "there", "position_embeddings.weight", "mp_rank_01", "mixed")
