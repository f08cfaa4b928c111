"""Hugging Face's and nanoGPT's GPT-2, read to the last bit; logits against transformers, and nanoGPT's own model."""

from __future__ import annotations

import importlib.util
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron.gpt2.config import OptimizerConfig
from megatron.gpt2.formats import Hints, Source, open_source, recognise
from tests.megatron.gpt2.formats.made import SHAPE, random_weights
from tests.megatron.gpt2.formats.test_readers import logits_of, refused, silent

NAMES = {
    "input_layernorm": "ln_1",
    "attention.query_key_value": "attn.c_attn",
    "attention.dense": "attn.c_proj",
    "post_attention_layernorm": "ln_2",
    "mlp.dense_h_to_4h": "mlp.c_fc",
    "mlp.dense_4h_to_h": "mlp.c_proj",
}


def openai_state(weights: dict[str, Tensor], *, transposed: bool) -> dict[str, Tensor]:
    """`weights`, ours, under OpenAI's names, QKV as [3, n, d]."""
    state = {}
    for name, value in weights.items():
        theirs = (
            name.replace("word_embeddings", "wte")
            .replace("position_embeddings", "wpe")
            .replace("transformer.final_layernorm", "ln_f")
            .replace("transformer.layers", "h")
        )
        for ours, other in NAMES.items():
            theirs = theirs.replace(f".{ours}.", f".{other}.")
        if ".c_attn." in theirs:
            value = value.view(SHAPE.num_attention_heads, 3, -1, *value.shape[1:]).transpose(0, 1).reshape(value.shape)
        if transposed and value.dim() == 2 and theirs.startswith("h."):
            value = value.t()
        state[f"transformer.{theirs}"] = value.contiguous()
    return state


def same(source: Source, weights: dict[str, Tensor], kind: str = "model") -> bool:
    return all(torch.equal(source.read(f"{kind}.{name}"), value) for name, value in weights.items())


def huggingface_model(activation: str = "gelu_new") -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=101,
            n_positions=24,
            n_embd=48,
            n_layer=4,
            n_head=4,
            n_inner=80,
            activation_function=activation,
            bos_token_id=100,
            eos_token_id=100,
            attn_implementation="eager",
        )
    ).eval()
    model.load_state_dict(
        {
            **openai_state(random_weights(), transposed=True),
            "lm_head.weight": random_weights()["word_embeddings.weight"],
        }
    )
    return model


def write_huggingface(folder: Path, **config: Any) -> Path:
    """By hand, so that it can be wrong."""
    folder.mkdir(exist_ok=True)
    save_file(openai_state(random_weights(), transposed=True), folder / "model.safetensors", metadata={"format": "pt"})
    known = {
        "model_type": "gpt2",
        "vocab_size": 101,
        "n_positions": 24,
        "n_embd": 48,
        "n_layer": 4,
        "n_head": 4,
        "n_inner": 80,
    }
    (folder / "config.json").write_text(json.dumps({**known, **config}))
    return folder


@pytest.mark.parametrize("activation", ["gelu_new", "gelu"])
@pytest.mark.parametrize("shard_size", ["5GB", "60KB"])
def test_huggingface(tmp_path: Path, activation: str, shard_size: str):
    model, weights = huggingface_model(activation), random_weights()
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard_size == "60KB")
    assert recognise(tmp_path) == ("huggingface", tmp_path)
    source = open_source(tmp_path)
    assert source.names() == [f"model.{name}" for name in weights]
    assert same(source, weights)
    assert source.facts["config"]["model"]["gelu"] == {"gelu_new": "tanh", "gelu": "erf"}[activation]
    tokens = torch.randint(101, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert (logits_of(source, tokens) - model(tokens).logits).abs().max() < 1e-5
    assert open_source(tmp_path / "config.json").path == tmp_path
    assert torch.equal(
        source.read("model.transformer.layers.2.mlp.dense_4h_to_h.weight", (3, 4), (5, 6)),
        weights["transformer.layers.2.mlp.dense_4h_to_h.weight"][3:8, 4:10],
    )


def test_huggingface_without_a_head_in_half_precision_and_as_pickle(tmp_path: Path):
    weights = {name: value.half() for name, value in random_weights().items()}
    write_huggingface(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    state = {name.removeprefix("transformer."): value for name, value in openai_state(weights, transposed=True).items()}
    state["h.0.attn.bias"] = torch.ones(1, 1, 24, 24, dtype=torch.bool)
    state["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    for legacy in (False, True):
        torch.save(state, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
        source = open_source(tmp_path)
        assert same(source, weights) and {info.dtype for info in source.tensors.values()} == {torch.float16}


def test_huggingface_tokenizer_and_padding(tmp_path: Path):
    write_huggingface(tmp_path)
    (tmp_path / "vocab.json").write_text("{}")
    assert "tokenizer_files" not in open_source(tmp_path).facts
    (tmp_path / "merges.txt").write_text("")
    (tmp_path / "tokenizer.json").write_text("")
    source = open_source(tmp_path, Hints(vocab_size=99))
    assert source.facts["tokenizer_files"] == {
        "vocab.json": str(tmp_path / "vocab.json"),
        "merges.txt": str(tmp_path / "merges.txt"),
    }
    assert torch.equal(source.read("model.word_embeddings.weight"), random_weights()["word_embeddings.weight"][:99])
    refused(tmp_path, "--vocab-size 102", vocab_size=102)
    refused(tmp_path, "--num-attention-heads 8", num_attention_heads=8)


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"activation_function": "relu"}, "relu"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse"),
        ({"scale_attn_weights": False}, "scale_attn_weights"),
        ({"add_cross_attention": True}, "add_cross_attention"),
        ({"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn"),
        ({"model_type": "gpt_neo"}, "gpt_neo"),
        ({"tie_word_embeddings": False}, "lm_head.weight"),
        ({"n_head": 5}, "--num-attention-heads"),
    ],
)
def test_another_model_is_refused(tmp_path: Path, config: dict[str, Any], word: str):
    refused(write_huggingface(tmp_path, **config), word)


def test_a_head_of_its_own_is_refused(tmp_path: Path):
    write_huggingface(tmp_path, tie_word_embeddings=False)
    state = load_file(tmp_path / "model.safetensors")
    state["lm_head.weight"] = state["transformer.wte.weight"].clone()
    save_file(state, tmp_path / "model.safetensors")
    assert same(open_source(tmp_path), random_weights()), "not tied, but the same"
    state["lm_head.weight"][5, 5] += 1e-3
    save_file(state, tmp_path / "model.safetensors")
    refused(tmp_path, "lm_head.weight")


def nanogpt_checkpoint(*, bias: bool = True, prefix: str = "_orig_mod.") -> tuple[dict[str, Any], dict[str, Tensor]]:
    """As train.py writes it, and our weights; its MLP is 4h wide."""
    weights = random_weights(replace(SHAPE, ffn_hidden_size=None), seed=3)
    if not bias:
        weights = {
            name: torch.zeros_like(value) if name.endswith(".bias") else value for name, value in weights.items()
        }
    state = openai_state(
        {name: value for name, value in weights.items() if bias or not name.endswith(".bias")}, transposed=False
    )
    matrices, vectors = ([name for name in state if (state[name].dim() == 2) == wanted] for wanted in (True, False))
    adam = {
        "state": {
            number: {"step": torch.tensor(9.0), "exp_avg": state[name] + 1, "exp_avg_sq": state[name] ** 2}
            for number, name in enumerate([*matrices, *vectors])
        },
        "param_groups": [
            {"params": list(range(len(matrices))), "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "lr": 1e-3},
            {
                "params": list(range(len(matrices), len(state))),
                "weight_decay": 0.0,
                "betas": (0.9, 0.95),
                "eps": 1e-8,
                "lr": 1e-3,
            },
        ],
    }
    state["lm_head.weight"] = state["transformer.wte.weight"]
    return {
        "model": {prefix + name: value for name, value in state.items()},
        "optimizer": adam,
        "model_args": {
            "n_layer": 4,
            "n_head": 4,
            "n_embd": 48,
            "block_size": 24,
            "bias": bias,
            "vocab_size": 101,
            "dropout": 0.2,
        },
        "iter_num": 9,
        "best_val_loss": torch.tensor(1.0),
        "config": {"out_dir": "out"},
    }, weights


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("prefix", ["_orig_mod.", ""])
def test_nanogpt(tmp_path: Path, bias: bool, prefix: str):
    checkpoint, weights = nanogpt_checkpoint(bias=bias, prefix=prefix)
    torch.save(checkpoint, tmp_path / "ckpt.pt")
    assert recognise(tmp_path) == ("nanogpt", tmp_path / "ckpt.pt")
    source = open_source(tmp_path)
    assert source.iteration == 9 and source.facts["config"]["model"]["gelu"] == "erf"
    assert same(source, weights) and same(source, weights, "master") and not source.left_out
    moments = {
        name: torch.zeros_like(value) if name.endswith("bias") and not bias else value + 1
        for name, value in weights.items()
    }
    # Moments come in QKV's order too.
    assert same(source, moments, "exp_avg") and same(source, {k: v**2 for k, v in weights.items()}, "exp_avg_sq")
    assert source.facts["optimizer"]["adam_steps"] == 9
    assert OptimizerConfig(**source.facts["config"]["optimizer"]).adam_beta2 == 0.95


def test_nanogpt_leaves_out_what_is_not_certain(tmp_path: Path):
    checkpoint, weights = nanogpt_checkpoint()
    checkpoint["optimizer"]["param_groups"][0]["params"][:2] = [1, 0]
    torch.save(checkpoint, tmp_path / "ckpt.pt")
    source = open_source(tmp_path)
    assert same(source, weights) and "optimizer" in source.left_out[0]
    assert not any(name.startswith(("master", "exp_avg")) for name in source.names())
    assert "optimizer" not in source.facts


def test_nanogpt_vocabulary(tmp_path: Path):
    checkpoint, weights = nanogpt_checkpoint()
    table = torch.randn(50304, 48)
    checkpoint["model"]["_orig_mod.transformer.wte.weight"] = table
    checkpoint["model"]["_orig_mod.lm_head.weight"] = table
    checkpoint["model_args"]["vocab_size"] = 50304
    del checkpoint["optimizer"]
    torch.save(checkpoint, tmp_path / "ckpt.pt")
    lines: list[str] = []
    assert open_source(tmp_path, log=lines.append).facts["vocab_size"] == 50304
    assert "--vocab-size 50257" in lines[0]
    source = open_source(tmp_path, Hints(vocab_size=50257), log=silent)
    assert torch.equal(source.read("model.word_embeddings.weight"), table[:50257])
    refused(tmp_path, "50305", vocab_size=50305)


@pytest.mark.parametrize("bias", [True, False])
def test_the_real_nanogpt(tmp_path: Path, bias: bool):
    """NANOGPT names a checkout: its own model, optimizer and compiled names."""
    if "NANOGPT" not in os.environ:
        pytest.skip("NANOGPT names no checkout of nanoGPT")
    spec = importlib.util.spec_from_file_location("nanogpt_model", Path(os.environ["NANOGPT"]) / "model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    arguments = {
        "n_layer": 3,
        "n_head": 4,
        "n_embd": 48,
        "block_size": 24,
        "bias": bias,
        "vocab_size": 101,
        "dropout": 0.0,
    }
    torch.manual_seed(5)
    model = module.GPT(module.GPTConfig(**arguments))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), "cpu")
    tokens = torch.randint(101, (2, 24))
    for _ in range(2):
        model(tokens, tokens)[1].backward()
        optimizer.step()
    state = {f"_orig_mod.{name}": value for name, value in model.state_dict().items()}
    torch.save(
        {
            "model": state,
            "optimizer": optimizer.state_dict(),
            "model_args": arguments,
            "iter_num": 2,
            "best_val_loss": torch.tensor(1e9),
            "config": {},
        },
        tmp_path / "ckpt.pt",
    )
    source = open_source(tmp_path)
    with torch.no_grad():
        theirs = model.eval()(tokens, tokens)[0]
    assert (logits_of(source, tokens) - theirs).abs().max() < 5e-6
    parameters = dict(model.named_parameters())
    for ours, other in (("word_embeddings", "wte"), ("transformer.layers.1.mlp.dense_4h_to_h", "h.1.mlp.c_proj")):
        moment = optimizer.state[parameters[f"transformer.{other}.weight"]]["exp_avg_sq"]
        assert torch.equal(source.read(f"exp_avg_sq.{ours}.weight"), moment)
