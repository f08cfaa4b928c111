"""Test `convert --to gguf`: read tensors and tokens with the gguf package, and compare tokens and logits with those of
llama.cpp."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data_utils import Tokenizer, build_tokenizer
from data_utils.tokenizers.base import train_sentencepiece
from megatron.gpt2.config import ModelConfig
from megatron.gpt2.formats.gguf import GGUF_FILE, TYPES, write_gguf
from tests.conftest import needs
from tests.megatron.gpt2.formats.sample_checkpoints import (
    InMemoryCheckpoint,
    compute_logits,
    random_weights,
)

KINDS = ("builtin", "bytes", "SentencePieceTokenizer")
WORDS = "the children of a small town went home when it was late, and their 12 dogs didn't follow: «été» 日本".split()
# the largest error of a logit, by type of weights
ROUNDING = {"fp32": 2e-3, "fp16": 5e-3, "bf16": 5e-2, "q8_0": 2e-1}

pytestmark = needs("gguf", extra="gguf")


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Return a tokenizer of each kind. The SentencePiece tokenizer is trained on random texts of WORDS."""
    model = tmp_path_factory.mktemp("sentencepiece") / "model"
    if request.param == "SentencePieceTokenizer":
        draw = random.Random(0)
        train_sentencepiece((" ".join(draw.choices(WORDS, k=40)) for _ in range(50)), model, 400)
    return build_tokenizer(request.param, model_file=str(model))


def source_for(tokenizer: Tokenizer) -> InMemoryCheckpoint:
    """Return a checkpoint in memory with random weights, for the vocabulary of `tokenizer`."""
    shape = ModelConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        vocab_size=tokenizer.vocab_size,
        max_position_embeddings=64,
    )
    return InMemoryCheckpoint({f"model.{name}": x for name, x in random_weights(shape).items()}, shape)


@pytest.mark.parametrize("dtype", TYPES)
def test_tensors_and_tokens(tokenizer: Tokenizer, dtype: str, tmp_path: Path) -> None:
    import gguf

    source = source_for(tokenizer)
    path = write_gguf(source, tmp_path / "out", dtype=dtype, tokenizer=tokenizer, log=pytest.fail) / GGUF_FILE
    reader = gguf.GGUFReader(path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert len(tensors) == len(source.tensors)
    for ours, theirs in (
        ("word_embeddings.weight", "token_embd.weight"),
        ("transformer.final_layernorm.bias", "output_norm.bias"),
    ):
        held, exact = tensors[theirs], source.read(f"model.{ours}").numpy()
        assert held.tensor_type.name == ("F32" if exact.ndim == 1 else TYPES[dtype][0])
        found = gguf.dequantize(held.data, held.tensor_type).reshape(exact.shape)
        assert (
            np.abs(found - exact).max()
            <= {"fp32": 0, "fp16": 1e-3, "bf16": 8e-3, "q8_0": 1e-2}[dtype] * np.abs(exact).max()
        )
    assert reader.fields["tokenizer.ggml.eos_token_id"].contents() == tokenizer.eod
    assert len(reader.fields["tokenizer.ggml.tokens"].contents()) == tokenizer.vocab_size


@needs("llama_cpp", extra="gguf")
@pytest.mark.parametrize("dtype", TYPES)
def test_llama_cpp(tokenizer: Tokenizer, dtype: str, tmp_path: Path) -> None:
    from llama_cpp import Llama

    source = source_for(tokenizer)
    write_gguf(source, tmp_path / "out", dtype=dtype, tokenizer=tokenizer, log=pytest.fail)
    model: Any = Llama(str(tmp_path / "out" / GGUF_FILE), n_ctx=64, logits_all=True, verbose=False)
    for number in range(10):
        text = " ".join(random.Random(number).choices(WORDS, k=6))
        ids = [int(i) for i in tokenizer.encode(text)]
        assert model.tokenize(text.encode(), add_bos=False) == ids
        assert model.detokenize(ids) == text.encode()
        model.reset()
        model.eval(ids)
        ours = compute_logits(source, torch.tensor([ids]))[0, :, : tokenizer.vocab_size]
        theirs = torch.tensor(model.scores[: len(ids)])
        assert (ours - theirs).abs().max() < ROUNDING[dtype] * ours.abs().max()


def test_refusals(tmp_path: Path) -> None:
    tokenizer = build_tokenizer("bytes")
    source = source_for(tokenizer)
    erf = dataclasses.replace(ModelConfig(**source.metadata["config"]["model"]), gelu="erf")
    with pytest.raises(ValueError, match="its GELU is erf, and llama.cpp's is tanh"):
        write_gguf(InMemoryCheckpoint({f"model.{n}": x for n, x in random_weights(erf).items()}, erf), tmp_path / "out")
    lines: list[str] = []
    write_gguf(source, tmp_path / "without", log=lines.append)
    assert lines == ["WARNING: the file has no tokenizer: the source has none"]
