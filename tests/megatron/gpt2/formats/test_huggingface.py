"""Hugging Face's GPT-2, read to the last bit; logits against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron.gpt2.formats import Hints, Source, open_source, recognise
from tests.megatron.gpt2.formats.made import openai_state, random_weights, write_huggingface
from tests.megatron.gpt2.formats.test_megatron import logits_of, refused


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
