"""Megatron's versions of which there is no genuine file here: written from known weights, read to the last bit."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.gpt2.config import ModelConfig, OptimizerConfig
from megatron.gpt2.formats import Hints, open_source
from megatron.gpt2.formats.megatron_optimizer import schedule
from tests.megatron.gpt2.formats.made import SHAPE, arguments, random_weights, write_megatron
from tests.megatron.gpt2.formats.test_readers import refused, silent

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
        assert source.global_shape(f"model.{name}") == tuple(value.shape)
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
