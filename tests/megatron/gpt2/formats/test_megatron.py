"""Megatron's files: the genuine ones against the logits of the code that wrote them, the others, of which there is no
genuine file here, against the weights that they were made of. Nothing here is close: merged weights are the same to the
last bit.
"""

from __future__ import annotations

import functools
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import mpu
from megatron.gpt2.checkpoint.state import load_state, whole_parameters
from megatron.gpt2.config import ModelConfig, OptimizerConfig
from megatron.gpt2.formats import Hints, Source, open_source, recognise
from megatron.gpt2.formats.megatron_optimizer import schedule
from megatron.gpt2.formats.torch_files import load_pickle
from megatron.gpt2.model.gpt2 import GPT2Model, parameter_specs
from megatron.gpt2.optimizer.flat_parameters import FlatParameters
from megatron.gpt2.optimizer.gradient_reducer import ParameterGatherer
from megatron.gpt2.optimizer.learning_rates import LearningRate
from megatron.gpt2.optimizer.optimizer import AdamWOptimizer, DynamicLossScaler
from tests.conftest import TEST_DATA
from tests.distributed import run_ranks
from tests.megatron.gpt2.formats.made import SHAPE, arguments, random_weights, write_megatron

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
        assert source.facts["vocab_size"] == padded == source.tensors["model.word_embeddings.weight"].shape[0]
        assert "--vocab-size" in lines[-1] and str(padded) in lines[-1]
        cut = open_genuine(name)
        assert cut.tensors["model.word_embeddings.weight"].shape == (TRUE_VOCABULARY, 64)
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
        gradients = gradient(name, source.tensors[f"model.{name}"].shape)
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


# form, checkpoint_version, model-parallel size, pipeline stages, legacy stream
MADE = [
    ("flat", 0, 1, 1, True),
    ("flat", 0, 2, 1, True),
    ("flat", 0, 4, 1, False),
    ("v1", 0, 2, 1, True),
    ("v1", 0, 2, 2, False),
    ("v1", 1, 1, 1, False),
    ("v1", 1, 2, 2, False),
    ("v1", 2, 4, 1, False),
    ("v2", 3, 1, 1, False),
    ("v2", 3, 2, 4, False),
    ("core", 3, 1, 1, False),
    ("core", 3, 2, 2, False),
    ("fused", 3, 1, 1, False),
    ("fused", 3, 4, 2, False),
]


@pytest.mark.parametrize(("form", "version", "tp", "pp", "legacy"), MADE)
def test_every_version_is_read_to_the_last_bit(tmp_path: Path, form: str, version: int, tp: int, pp: int, legacy: bool):
    weights = random_weights()
    write_megatron(tmp_path, weights, form, version=version, tp=tp, pp=pp, legacy=legacy)
    source = open_source(tmp_path, Hints(vocab_size=101))
    assert source.format == (
        "megatron-2019"
        if form == "flat"
        else "megatron-core"
        if form in ("core", "fused")
        else "megatron-v2"
        if version >= 2
        else "megatron-v1"
    )
    assert source.names() == [f"model.{name}" for name in weights]
    for name, value in weights.items():
        assert source.tensors[f"model.{name}"].shape == tuple(value.shape)
        assert torch.equal(source.read(f"model.{name}"), value), name
    assert ModelConfig(**source.facts["config"]["model"]) == replace(SHAPE, gelu="tanh")


def test_a_release_holds_weights_alone(tmp_path: Path):
    """NVIDIA's form: a folder named release, no arguments, no optimizer."""
    weights = random_weights()
    write_megatron(tmp_path, weights, "flat", tp=2, legacy=True, args=False)
    (tmp_path / "iter_0000007").rename(tmp_path / "release")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    source = open_source(tmp_path, Hints(num_attention_heads=4, vocab_size=101))
    assert (source.path, source.format) == (tmp_path / "release", "megatron-2019") and not source.left_out
    assert all(torch.equal(source.read(f"model.{name}"), value) for name, value in weights.items())
    refused(tmp_path, "--num-attention-heads")


def test_interleaved_pipelining(tmp_path: Path):
    """Two stages of two runs each: layer 0 and 2 on the first, 1 and 3 on the second."""
    weights = random_weights()
    write_megatron(tmp_path / "plain", weights, "v2", version=3, pp=4)
    runs = [
        torch.load(tmp_path / f"plain/iter_0000007/mp_rank_00_{number:03d}/model_optim_rng.pt", weights_only=False)
        for number in range(4)
    ]
    for number in range(2):
        file = tmp_path / f"interleaved/iter_0000007/mp_rank_00_{number:03d}/model_optim_rng.pt"
        file.parent.mkdir(parents=True)
        top = {
            **runs[number],
            "model0": runs[number]["model"],
            "model1": runs[number + 2]["model"],
            "args": arguments(1, 2, virtual_pipeline_model_parallel_size=2),
        }
        del top["model"]
        torch.save(top, file)
    source = open_source(tmp_path / "interleaved", Hints(vocab_size=101))
    assert all(torch.equal(source.read(f"model.{name}"), value) for name, value in weights.items())


def test_deepspeed(tmp_path: Path):
    weights = random_weights()
    write_megatron(tmp_path / "plain", weights, "flat", tp=2, args=False)
    folder = tmp_path / "run/global_step7"
    folder.mkdir(parents=True)
    for rank in range(2):
        top = torch.load(tmp_path / f"plain/iter_0000007/mp_rank_{rank:02d}/model_optim_rng.pt", weights_only=False)
        torch.save(
            {
                "module": top["model"],
                "optimizer": None,
                "lr_scheduler": {"num_iters": 7},
                "global_steps": 7,
                "csr_tensor_module_names": set(),
                "skipped_steps": 0,
                "dp_world_size": 1,
                "mp_world_size": 2,
                "iteration": 7,
            },
            folder / f"mp_rank_{rank:02d}_model_states.pt",
        )
    (folder / "zero_pp_rank_0_mp_rank_00optim_states.pt").write_bytes(b"x")
    (tmp_path / "run/latest").write_text("global_step7")
    for path in (tmp_path / "run", folder, folder / "mp_rank_01_model_states.pt"):
        source = open_source(path, Hints(num_attention_heads=4, vocab_size=101))
        assert (source.format, source.iteration) == ("deepspeed", 7)
    assert all(torch.equal(source.read(f"model.{name}"), value) for name, value in weights.items())
    assert "zero_pp_rank" in " ".join(source.left_out)


def test_boxes(tmp_path: Path):
    weights = random_weights()
    source = open_source(write_megatron(tmp_path, weights, "v1", tp=2), Hints(vocab_size=101))
    name = "transformer.layers.1.attention.query_key_value.weight"
    part = source.read(f"model.{name}", (5, 3), (40, 7))
    assert torch.equal(part, weights[name][5:45, 3:10]) and part.is_contiguous()
    part.zero_()
    assert torch.equal(source.read(f"model.{name}"), weights[name]), "a new tensor, not the file's"
    with pytest.raises(ValueError, match="does not contain"):
        source.read(f"model.{name}", (140, 0), (5, 1))
    with pytest.raises(ValueError, match="holds no tensor"):
        source.read("model.nothing")


def adam_of(weights: dict[str, Tensor], step: int) -> dict[str, Any]:
    """The state of v2's mixed-precision optimizer for the parameters of `weights` (a rank's, by our names)."""
    order = [[name for name in weights if (weights[name].dim() == 2) == decays] for decays in (True, False)]
    numbers = {name: number for number, name in enumerate([*order[0], *order[1]])}
    groups = [
        {
            "params": [numbers[name] for name in names],
            "step": step,
            "lr": 0.1,
            "betas": (0.9, 0.95),
            "eps": 1e-8,
            "weight_decay": 0.1 if names is order[0] else 0.0,
        }
        for names in order
    ]
    state = {numbers[name]: {"exp_avg": value + 1, "exp_avg_sq": value**2} for name, value in weights.items()}
    return {
        "optimizer": {"state": state, "param_groups": groups},
        "grad_scaler": {"scale": torch.tensor([8.0]), "growth_tracker": 5, "hysteresis_tracker": -1},
        "fp32_from_fp16_params": [[weights[name] for name in names] for names in order],
    }


def test_optimizer_of_v2(tmp_path: Path):
    """Of a made file: v2's names, and what is left out where the order does not fit."""
    weights = random_weights()
    held = {**weights, "word_embeddings.weight": torch.cat([weights["word_embeddings.weight"], torch.zeros(11, 48)])}
    for problem in ("", "order", "count"):
        adam = adam_of(held, 3)
        if problem == "order":
            biases = adam["fp32_from_fp16_params"][1]
            biases[0], biases[1] = biases[1], biases[0]  # of the same shape
        elif problem == "count":
            adam["fp32_from_fp16_params"][0].pop()
        folder = tmp_path / (problem or "right")
        write_megatron(
            folder,
            weights,
            "v2",
            version=3,
            optimizer=adam,
            args=False,
            lr_scheduler={
                "max_lr": 0.2,
                "min_lr": 0.1,
                "warmup_steps": 40,
                "num_steps": 12,
                "decay_style": "cosine",
                "decay_steps": 400,
            },
        )
        file = folder / "iter_0000007/mp_rank_00/model_optim_rng.pt"
        top = torch.load(file, weights_only=False)
        top["args"] = arguments(1, global_batch_size=4, clip_grad=0.5)
        torch.save(top, file)
        source = open_source(folder, Hints(vocab_size=101))
        if problem:
            assert "optimizer" in source.left_out[0] and not any("exp_avg" in name for name in source.names())
            continue
        for name, value in weights.items():
            assert torch.equal(source.read(f"master.{name}"), value)
            assert torch.equal(source.read(f"exp_avg.{name}"), value + 1)
            assert torch.equal(source.read(f"exp_avg_sq.{name}"), value**2)
        assert source.facts["optimizer"] == {
            "good_steps": 3,
            "skipped_steps": 4,
            "adam_steps": 3,
            "loss_scaler": {"scale": 8.0, "clean_steps": 5.0, "hysteresis_left": 1.0},
        }
        assert OptimizerConfig(**source.facts["config"]["optimizer"]) == OptimizerConfig(
            lr=0.2,
            min_lr=0.1,
            lr_decay_style="cosine",
            lr_decay_iters=100,
            warmup=0.1,
            weight_decay=0.1,
            adam_beta1=0.9,
            adam_beta2=0.95,
            clip_grad=0.5,
        )
        # Where the batch has grown, 12 samples are not 3 steps of 4.
        top["args"] = arguments(1, global_batch_size=2, rampup_batch_size=[1, 1, 3], consumed_train_samples=5)
        torch.save(top, file)
        facts = open_source(folder, Hints(vocab_size=101)).facts
        assert facts["optimizer"]["good_steps"] == 3 and facts["config"]["optimizer"]["lr_decay_iters"] == 200
        facts = {**facts, "config": {**facts["config"], "train": {"rampup_batch_size": [1, 1, 3]}}}
        grown: Any = SimpleNamespace(facts=facts, iteration=3)
        again = schedule(grown, "megatron-v2", print)
        assert again is not None and (again["num_steps"], again["decay_steps"], again["warmup_steps"]) == (5, 400, 40)


def test_missing_stages_and_other_models(tmp_path: Path):
    weights = random_weights()
    for name, gone in (("first", 0), ("middle", 1), ("last", 2)):
        folder = write_megatron(tmp_path / name, weights, "v2", version=3, pp=4 if name != "last" else 2, args=False)
        shutil.rmtree(folder / f"iter_0000007/mp_rank_00_{min(gone, 1):03d}")
        refused(folder, "missing", num_attention_heads=4)
    folder = write_megatron(tmp_path / "swiglu", weights, "core", version=3)
    file = folder / "iter_0000007/mp_rank_00/model_optim_rng.pt"
    top = torch.load(file, weights_only=False)
    top["args"].swiglu = True
    torch.save(top, file)
    refused(folder, "swiglu")
    del top["args"]
    top["model"]["decoder.layers.3.self_attention.q_norm.weight"] = torch.ones(12)
    torch.save(top, file)
    refused(folder, "q_norm", num_attention_heads=4)


def test_a_head_of_its_own_is_refused(tmp_path: Path):
    folder = write_megatron(tmp_path, random_weights(), "core", version=3, tp=2, pp=2)
    file = folder / "iter_0000007/mp_rank_01_001/model_optim_rng.pt"
    top = torch.load(file, weights_only=False)
    top["model"]["output_layer.weight"] = top["model"]["output_layer.weight"] + 1
    torch.save(top, file)
    refused(folder, "word_embeddings_for_head", "mp_rank_01_001")


def test_gelu_by_version(tmp_path: Path):
    cases = [
        ({}, "tanh"),
        ({"bias_gelu_fusion": False}, "erf"),
        ({"bias_gelu_fusion": False, "openai_gelu": True}, "tanh"),
    ]
    for number, (said, gelu) in enumerate(cases):
        folder = write_megatron(tmp_path / str(number), random_weights(), "v2", version=3, args=False)
        file = folder / "iter_0000007/mp_rank_00/model_optim_rng.pt"
        top = torch.load(file, weights_only=False)
        torch.save({**top, "args": arguments(1, **said)}, file)
        assert open_source(folder, log=silent).facts["config"]["model"]["gelu"] == gelu
        assert open_source(folder, Hints(gelu="erf"), log=silent).facts["config"]["model"]["gelu"] == "erf"


def test_what_is_no_checkpoint(tmp_path: Path):
    refused(tmp_path, "holds no checkpoint")
    refused(tmp_path / "nowhere", "does not exist")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("../../etc")
    refused(tmp_path, "holds no checkpoint")
