"""The whole model compared with GPT2LMHeadModel of transformers (equal random weights; 1, 2 and 4 ranks), the choice of
attention kernels, the collectives of a micro-batch, and the partial gradients of sequence parallelism."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, NamedTuple
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
from tests.megatron.gpt2.train.training_runs import SHAPE
from tests.mpu.test_cross_entropy import MemoryCounter

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
    # A size need not divide the model's dimensions.
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


def replicated_gradients(
    rank: int, world_size: int, sequence_parallel: bool, completion: str
) -> tuple[dict[str, Tensor], set[str]]:
    """Return the gradients of replicated parameters after a backward pass, and the names of marked parameters.

    completion: "sum" calls mpu's function, "hook" registers a hook on each marked parameter.
    """
    mpu.initialize_model_parallel(world_size)
    model = GPT2Model(SHAPE, build_block_config(SHAPE, sequence_parallel=sequence_parallel))
    marked = {name: p for name, p in model.named_parameters() if getattr(p, "sequence_parallel", False)}
    if completion == "hook":
        for parameter in marked.values():
            parameter.register_hook(mpu.reduce_from_model_parallel_region)
    tokens = torch.arange(4 * 32).view(4, 32) % 97
    model(tokens, tokens, torch.full((4, 32), 1 / 128)).backward()
    if completion == "sum":
        mpu.all_reduce_sequence_parallel_grads(model.parameters())
    return {name: p.grad for name, p in model.named_parameters() if not hasattr(p, "model_parallel")}, set(marked)


def test_other_trainers_can_complete_the_gradients():
    expected, marked = run_ranks(replicated_gradients, 2, False, "")[0]
    assert not marked and len(expected) == 3 + 6 * SHAPE.num_layers
    for completion in ("", "sum", "hook"):
        for found, marked in run_ranks(replicated_gradients, 2, True, completion):
            assert marked == found.keys() == expected.keys()
            errors = [((found[name] - grad).norm() / grad.norm()).item() for name, grad in expected.items()]
            assert max(errors) < 1e-5 if completion else min(errors) > 1e-2


LAYERS = SHAPE.num_layers


def count(rank: int, world_size: int, dropout: float, how: dict[str, Any]) -> dict[str, int]:
    """Return the number of calls of each collective of torch.distributed in a micro-batch."""
    mpu.initialize_model_parallel(world_size)
    mpu.model_parallel_cuda_manual_seed(1)
    shape = replace(SHAPE, attention_dropout=dropout, hidden_dropout=dropout)
    model = GPT2Model(shape, build_block_config(shape, **how)).train()
    tokens = torch.arange(4 * 32).view(4, 32) % 97
    with MemoryCounter() as counter:
        model(tokens, tokens, torch.full((4, 32), 1 / 128)).backward()
    calls = {name.strip("_"): calls for name, calls in counter.calls.items()}
    return {name: n for name, n in calls.items() if name.startswith(("allreduce", "allgather", "reduce_scatter"))}


ALL_REDUCES = 4 * LAYERS + 2
FULL = {"recompute_granularity": "full"}


@pytest.mark.parametrize(
    "world_size, dropout, how, expected",
    [
        # All-reduces: two in forward and two in backward of each layer, one in the embedding, one for the gradient of
        # the head's input. The loss is computed in one chunk, with one all-gather.
        (2, 0.0, {}, {"allreduce": ALL_REDUCES, "allgather": 1}),
        (2, 0.0, {"recompute_granularity": "selective"}, {"allreduce": ALL_REDUCES, "allgather": 1}),
        # Recomputation stops at the last tensor that backward needs: before the layer's last all-reduce, unless dropout
        # follows it.
        (2, 0.0, FULL, {"allreduce": ALL_REDUCES + LAYERS, "allgather": 1}),
        (2, 0.1, FULL, {"allreduce": ALL_REDUCES + 2 * LAYERS, "allgather": 1}),
        # Each all-reduce becomes a reduce-scatter and an all-gather. In addition, backward gathers the inputs of both
        # column-parallel layers again. torch counts the loss's all-gather of a list separately.
        (
            2,
            0.0,
            {"sequence_parallel": True},
            {"reduce_scatter_base": ALL_REDUCES, "allgather_base": ALL_REDUCES + 2 * LAYERS, "allgather": 1},
        ),
    ],
)
def test_the_collectives_of_a_micro_batch(world_size: int, dropout: float, how: dict[str, Any], expected: Any):
    assert run_ranks(count, world_size, dropout, how) == [expected] * world_size
