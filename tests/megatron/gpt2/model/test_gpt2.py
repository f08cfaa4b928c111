"""The model equals GPT2LMHeadModel of transformers with equal random weights on 1, 2 and 4 ranks. Also test the fused
layers of a GPU, the numbers of parameters, and the initial weights."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import mpu
from megatron.gpt2.config import ModelConfig
from megatron.gpt2.formats.nanogpt_and_dcp import from_openai, openai_name
from megatron.gpt2.model.gpt2 import (
    GPT2Model,
    build_block_config,
    count_parameters,
    model_partition_specs,
    seeded_normal,
)
from mpu import kernels
from tests.distributed import run_ranks

SMALL = ModelConfig(
    num_layers=3,
    hidden_size=64,
    num_attention_heads=4,
    max_position_embeddings=24,
    vocab_size=101,
    attention_dropout=0.0,
    hidden_dropout=0.0,
)
SHAPE_345M = ModelConfig(
    num_layers=24, hidden_size=1024, num_attention_heads=16, max_position_embeddings=1024, vocab_size=50257
)


class Expected(NamedTuple):
    """A text [b, s + 1], and the results of transformers' model for this text, under our parameter names."""

    text: Tensor
    weights: dict[str, Tensor]
    logits: Tensor
    loss: Tensor
    grads: dict[str, Tensor]


@functools.cache
def huggingface_results(gelu: str) -> Expected:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    theirs = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=SMALL.vocab_size,
            n_positions=SMALL.max_position_embeddings,
            n_embd=SMALL.hidden_size,
            n_layer=SMALL.num_layers,
            n_head=SMALL.num_attention_heads,
            resid_pdrop=0,
            embd_pdrop=0,
            attn_pdrop=0,
            activation_function={"tanh": "gelu_new", "erf": "gelu"}[gelu],
        )
    ).train()
    with torch.no_grad():
        # Change the biases too, because zeros would hide a bias that each rank adds.
        for parameter in theirs.parameters():
            parameter.normal_(0, 0.15)
    text = torch.randint(0, 101, (3, 21))
    logits = theirs(text[:, :-1]).logits
    loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
    loss.backward()
    weights, grads = (
        {
            name: from_openai(tensors[f"transformer.{openai_name(name)}"].detach(), name, SMALL.num_attention_heads)
            for name in model_partition_specs(SMALL)
        }
        for tensors in (theirs.state_dict(), {name: p.grad for name, p in theirs.named_parameters()})
    )
    return Expected(text, weights, logits.detach(), loss.detach(), grads)


def compare(rank: int, world_size: int, gelu: str, expected: Expected) -> None:
    mpu.initialize_model_parallel(world_size)
    ours = GPT2Model(replace(SMALL, gelu=gelu)).train()
    specs = mpu.partition_specs(ours)
    assert expected.weights.keys() == specs.keys()
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.copy_(specs[name].split(expected.weights[name], rank, world_size))

    tokens, labels = expected.text[:, :-1], expected.text[:, 1:]
    whole = mpu.gather_from_model_parallel_region(ours(tokens)).transpose(0, 1)[..., :101]
    assert (whole - expected.logits).abs().max() <= 1e-5

    our_loss = ours(tokens, labels, torch.full(labels.shape, 1 / labels.numel()))
    assert our_loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
    our_loss.backward()
    for name, parameter in ours.named_parameters():
        whole_grad = expected.grads[name]
        error = (parameter.grad - specs[name].split(whole_grad, rank, world_size)).abs().max()
        assert error <= 1e-4 * whole_grad.abs().max()


@pytest.mark.parametrize("world_size, gelu", [(1, "tanh"), (2, "tanh"), (4, "tanh"), (1, "erf")])
def test_equals_huggingface(world_size: int, gelu: str):
    run_ranks(compare, world_size, gelu, huggingface_results(gelu))


@pytest.mark.parametrize("chunks", [[range(3)], [range(1), range(1, 3)]], ids=["a chunk", "two chunks"])
@pytest.mark.parametrize("layers_per_checkpoint", [0, 1, 2])
def test_the_layers_of_a_gpu_equal_those_of_a_cpu(layers_per_checkpoint: int, chunks: list[range]):
    """On a GPU, a layer returns terms of a sum, which the next layer or the end of a checkpoint or pipeline stage
    adds."""
    mpu.initialize_model_parallel(1)
    config, text = replace(SMALL, hidden_dropout=0.1), torch.randint(0, 101, (3, 21))
    recompute = {"recompute_granularity": "full", "recompute_num_layers": layers_per_checkpoint}
    block_config = build_block_config(config, **(recompute if layers_per_checkpoint else {}))
    found = []
    for is_fused in (False, True):
        model, x = GPT2Model(config, block_config, dropout_seed=5, layer_ranges=chunks).train(), None
        with mock.patch.object(kernels, "has_fused_layer", lambda x, is_fused=is_fused: is_fused):
            for chunk in chunks:
                weight = torch.ones(3, 20)
                ids = torch.arange(3)
                x = model(text[:, :-1], text[:, 1:], weight, sample_ids=ids, layer_range=chunk, hidden=x)
                assert isinstance(x, Tensor)
            x.backward()
        found.append({"loss": x.detach()} | {name: p.grad for name, p in model.named_parameters()})
    for name, expected in found[0].items():
        torch.testing.assert_close(found[1][name], expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())


def test_published_parameter_counts():
    config = SHAPE_345M
    assert count_parameters(config, 1) == (354_823_168, 354_871_296)
    assert count_parameters(config, 2)[1] == 178_034_688


def count_real(rank: int, world_size: int) -> int:
    mpu.initialize_model_parallel(world_size)
    model = GPT2Model(SMALL)
    mpu.destroy_model_parallel()  # Specs need no process group.
    specs = model_partition_specs(SMALL, world_size)
    assert list(mpu.partition_specs(model).items()) == list(specs.items())
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("world_size", [1, 2])
def test_specs_and_counts_are_those_of_the_real_model(world_size: int):
    assert run_ranks(count_real, world_size) == [count_parameters(SMALL, world_size)[1]] * world_size
    # The tensor-parallel size need not divide the model's dimensions.
    assert model_partition_specs(SMALL, 3)["word_embeddings.weight"].padded_size == 384


def test_initialisation():
    mpu.initialize_model_parallel(1)
    model = GPT2Model(SMALL)
    std = {name: p.std().item() for name, p in model.named_parameters() if p.dim() > 1}
    assert std["transformer.layers.0.attention.query_key_value.weight"] == pytest.approx(0.02, rel=0.05)
    for output in ("attention.dense", "mlp.dense_4h_to_h"):  # their standard deviation is 0.02 / sqrt(2 · 3)
        assert std[f"transformer.layers.2.{output}.weight"] == pytest.approx(0.02 / 6**0.5, rel=0.05)
    assert not any(p.any() for name, p in model.named_parameters() if name.endswith("bias"))
    assert model.word_embeddings.weight.shape[0] == 128 and not model.word_embeddings.weight[101:].any()
    weights = [torch.empty(4) for _ in range(3)]
    for weight, (seed, name) in zip(weights, [(1, "a"), (1, "b"), (2, "a")], strict=True):
        seeded_normal(seed, name, 1.0)(weight)
    assert len({tuple(w.tolist()) for w in weights}) == 3


def test_flops_per_token_is_megatrons_formula():
    h, s = SHAPE_345M.hidden_size, 1024
    assert SHAPE_345M.flops_per_token(s) == 72 * 24 * h * h * (1 + s / (6 * h)) + 6 * h * 50257
