"""Test that outputs, input gradients and weight gradients of parallel layers equal those of plain torch.nn, in float64
and under torch.autocast in bf16. Invalid configurations are refused."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mpu
from mpu import TransformerConfig
from tests.distributed import run_ranks
from tests.mpu.kernels.test_attention import formula

IN, OUT, VOCAB, HEADS = 8, 24, 17, 4


def close(actual: Tensor, expected: Tensor, what: str) -> None:
    """Compare float64 to the last digits, and bf16 (with a rounding error of 0.4 %) by its norm within 3 %."""
    if actual.dtype == torch.float64:
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12, msg=lambda m: f"{what}: {m}")
    else:
        assert actual.dtype == expected.dtype, f"{what}: {actual.dtype}, not {expected.dtype}"
        error, size = (actual.double() - expected.double()).norm(), expected.double().norm()
        assert error <= 0.03 * size, f"{what}: {error} of {size}"


def compare(parallel: nn.Module, plain: nn.Module, inputs: Tensor) -> None:
    """Load the plain module's weights into the parallel module, whose parameters have the same order. Run both modules
    and compare outputs and gradients, in float64 or, if torch.autocast is enabled, in bf16. Backward runs outside
    autocast, as torch recommends."""
    rank, size = mpu.get_model_parallel_rank(), mpu.get_model_parallel_world_size()
    if not torch.is_autocast_enabled("cpu"):
        parallel, plain = parallel.double(), plain.double()
        inputs = inputs.double() if inputs.is_floating_point() else inputs
    specs = mpu.partition_specs(parallel)
    pairs = list(zip(parallel.named_parameters(), plain.parameters(), strict=True))
    with torch.no_grad():
        for (name, parameter), whole in pairs:
            nn.init.normal_(whole, generator=torch.Generator().manual_seed(len(name)))
            parameter.copy_(specs[name].split(whole, rank, size))

    def run(module: nn.Module) -> tuple[Tensor, Tensor | None]:
        x = inputs.clone().requires_grad_(inputs.is_floating_point())
        y = module(x)
        with torch.autocast("cpu", enabled=False):
            (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)).sum().backward()
        return y.detach(), x.grad

    (y, dx), (y_ref, dx_ref) = run(parallel), run(plain)
    close(y, y_ref, "output")
    if dx_ref is not None:
        assert dx is not None
        close(dx, dx_ref, "input gradient")
    for (name, parameter), whole in pairs:
        assert parameter.grad is not None and whole.grad is not None
        close(parameter.grad, specs[name].split(whole.grad, rank, size), f"gradient of {name}")


class PlainAttention(nn.Module):
    """Causal attention by its formula. The rows of the fused weight are [n, 3, d], as in mpu."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(IN, 3 * IN), nn.Linear(IN, IN)

    def forward(self, x: Tensor) -> Tensor:
        s, b, h = x.shape
        return self.out(formula(self.qkv(x).view(s, b, HEADS, 3, h // HEADS), 1.0))


def check_layers(rank: int, world_size: int) -> None:
    torch.manual_seed(7)
    x = torch.randn(5, 3, IN)
    for layer in (mpu.ColumnParallelLinear, mpu.RowParallelLinear):
        for bias in (True, False):
            compare(layer(IN, OUT, bias=bias), nn.Linear(IN, OUT, bias=bias), x)
    ids = torch.randint(0, VOCAB, (4, 6))
    ids[0, :2] = torch.tensor([0, VOCAB - 1])
    padded = mpu.padded_vocab_size(VOCAB, 8, world_size)
    compare(mpu.VocabParallelEmbedding(VOCAB, IN, padded_size=padded), nn.Embedding(VOCAB, IN), ids)
    compare(mpu.ParallelEmbedding(VOCAB, IN), nn.Embedding(VOCAB, IN), ids)
    config = mpu.TransformerConfig(IN, HEADS, 4 * IN)
    init: dict[str, Any] = dict.fromkeys(("init_method", "output_init_method"), nn.init.normal_)
    compare(mpu.ParallelSelfAttention(config, **init), PlainAttention(), x)
    plain = nn.Sequential(nn.Linear(IN, 4 * IN), nn.GELU(approximate="tanh"), nn.Linear(4 * IN, IN))
    compare(mpu.ParallelMLP(config, **init), plain, x)


def check_autocast(rank: int, world_size: int) -> None:
    """Check float32 weights and bf16 products, with each processor's kernels."""
    for amx in (True, False):
        with torch.autocast("cpu", torch.bfloat16), mock.patch("mpu.kernels.cpu_features.HAS_AMX", amx):
            check_layers(rank, world_size)


def check_ids(rank: int, world_size: int) -> None:
    """Check that an id outside the vocabulary is an error on every rank, as with torch's embedding, and not a row of
    zeros."""
    words = mpu.VocabParallelEmbedding(VOCAB, IN, padded_size=mpu.padded_vocab_size(VOCAB, 8, world_size))
    with pytest.raises(IndexError, match=f"^the token id {VOCAB} is not in the vocabulary, 0 to {VOCAB - 1}; to "):
        words(torch.tensor([[0, VOCAB]]))


def check_initial_weights(rank: int, world_size: int) -> None:
    """Check that a parallel layer that is built after manual_seed(s) has the weights that `init_method` draws for a
    whole tensor."""
    for layer_class in (mpu.ColumnParallelLinear, mpu.RowParallelLinear, mpu.ParallelEmbedding):
        torch.manual_seed(3)
        layer = layer_class(IN, OUT)
        torch.manual_seed(3)
        spec = mpu.partition_specs(layer)["weight"]
        full = nn.init.xavier_normal_(torch.empty(spec.global_shape))
        assert torch.equal(layer.weight, spec.split(full, rank, world_size))
        assert getattr(layer.weight, "model_parallel", False)
    assert not hasattr(mpu.RowParallelLinear(IN, OUT).bias, "model_parallel"), "the bias must count once in the norm"


def check_2019s_arguments(rank: int, world_size: int) -> None:
    """Check that positional arguments have the meaning that they have in Megatron-LM 72c5f666b9, mpu/layers.py."""
    ones, two = nn.init.ones_, 2 * world_size
    column = mpu.ColumnParallelLinear(3, two, False, False, ones, 1, True)
    assert column.bias is None and column(torch.ones(1, 3)).tolist() == [[3.0, 3.0]]
    assert torch.equal(column.master_weight, torch.ones(two, 3))
    row = mpu.RowParallelLinear(two, 3, False, True, ones, 1, True)
    assert row.bias is None and row(torch.ones(1, 2)).tolist() == [[float(two)] * 3]
    assert torch.equal(row.master_weight, torch.ones(3, two))
    words = mpu.VocabParallelEmbedding(two, 5, ones)
    assert (words.vocab_start_index, words.vocab_end_index) == (2 * rank, 2 * rank + 2)
    columns = mpu.ParallelEmbedding(5, two, ones, True)
    assert torch.equal(columns.master_weight, torch.ones(5, two))
    assert words(torch.tensor([0])).sum() == 5 and columns(torch.tensor([0])).sum() == two
    norm = mpu.LayerNorm(4, 1e-3)
    assert torch.equal(norm(torch.arange(4.0)), F.layer_norm(torch.arange(4.0), (4,), eps=1e-3))
    for layer in (mpu.ColumnParallelLinear, mpu.RowParallelLinear):
        with pytest.raises(ValueError, match="^stride=3: .* must be 1; order a fused query-key-value weight"):
            layer(two, two, stride=3)


def check_all(rank: int, world_size: int) -> None:
    mpu.initialize_model_parallel(world_size)
    for check in (check_layers, check_autocast, check_ids, check_initial_weights, check_2019s_arguments):
        check(rank, world_size)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_layers_equal_plain_torch(world_size: int):
    run_ranks(check_all, world_size)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"num_attention_heads": 3}, "64 is not divisible by 3"),
        ({"gelu": "relu"}, "'relu' is not one of tanh, erf"),
        ({"recompute_granularity": "some"}, "'some' is not one of none, selective, full"),
    ],
)
def test_wrong_configs_are_refused(fields: dict[str, Any], message: str) -> None:
    TransformerConfig(64, 4, 256, recompute_granularity=None)  # megatron.core's default
    with pytest.raises(ValueError, match=message):
        TransformerConfig(**{"hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 256, **fields})
