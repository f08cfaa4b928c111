"""Two transformer layers of a GPU, with the PyTorch references of their kernels, have the outputs and gradients of two
plain layers, on one rank and on two. Each layer compiles to one graph."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import mpu
from mpu import kernels
from mpu.transformer import FusedTransformerLayer
from tests.distributed import run_ranks

S, B, H = 6, 3, 40


@contextlib.contextmanager
def fused_on_a_cpu() -> Iterator[None]:
    with mock.patch.object(kernels, "has_fused_layer", lambda x: True):
        yield


class Layers(torch.nn.ModuleList):
    def forward(self, x: Any, dropout_seeds: Tensor | None) -> Tensor:
        for layer, seeds in zip(self, (None, None) if dropout_seeds is None else dropout_seeds, strict=True):
            x = layer(x, dropout_seeds=seeds)
        return kernels.sum_terms(x)


def build_layers(config: mpu.TransformerConfig) -> tuple[Layers, Layers]:
    """Return two plain and two fused layers with the same random parameters, also for biases and norms."""

    def fill(weight: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(weight.numel())
        return torch.nn.init.normal_(weight, std=weight.size(-1) ** -0.5, generator=generator)

    plain, fused = (
        Layers(layer_class(config, init_method_for=lambda name: fill) for _ in range(2))
        for layer_class in (mpu.ParallelTransformerLayer, FusedTransformerLayer)
    )
    for layers in (plain, fused):
        for parameter in layers.parameters():
            if parameter.dim() == 1:
                with torch.no_grad():
                    parameter.add_(fill(torch.empty_like(parameter)))
    return plain, fused


def results(layers: Layers, x: Tensor, seeds: Tensor | None) -> dict[str, Tensor]:
    """Return the output, and the gradients of the input and the parameters."""
    x = x.clone().requires_grad_()
    y = layers(x, seeds)
    y.backward(torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y).sin())
    assert x.grad is not None
    gradients = {name: p.grad for name, p in layers.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "x": x.grad, **gradients}


def greatest_difference(expected: dict[str, Tensor], found: dict[str, Tensor]) -> float:
    """Return the greatest difference between two results of `results`, relative to the largest value of the tensor."""
    assert expected.keys() == found.keys() and len(expected) == 2 + 2 * 12
    return max(
        ((found[name].double() - value.double()).abs().max() / value.double().abs().max()).item()
        for name, value in expected.items()
    )


def difference(rank: int, world_size: int, dropout: float, gelu: str, sequence_parallel: bool) -> float:
    mpu.initialize_model_parallel(world_size)
    config = mpu.TransformerConfig(H, 4, 72, hidden_dropout=dropout, gelu=gelu, sequence_parallel=sequence_parallel)
    plain, fused = build_layers(config)
    x = torch.randn(S, B, H, generator=torch.Generator().manual_seed(1))
    x = x.chunk(world_size)[rank] if sequence_parallel else x
    seeds = mpu.make_dropout_seeds(5, torch.arange(B), 2) if dropout else None
    expected = results(plain, x, seeds)
    with fused_on_a_cpu():
        return greatest_difference(expected, results(fused, x, seeds))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(
    "world_size, sequence_parallel", [(1, False), pytest.param(2, False, marks=pytest.mark.wide), (2, True)]
)
def test_fused_layers_equal_plain_layers(world_size: int, sequence_parallel: bool, dropout: float):
    gelu = "tanh" if dropout else "erf"
    for found in run_ranks(difference, world_size, dropout, gelu, sequence_parallel):
        assert found < 1e-5


HOOKS = {
    "input_layernorm": "register_forward_hook",
    "post_attention_layernorm": "register_forward_pre_hook",
    "attention": "register_full_backward_hook",
    "mlp": "register_full_backward_pre_hook",
    "mlp.dense_4h_to_h": "register_forward_hook",
}


@pytest.mark.parametrize("case", [*HOOKS, "selective", "attention_fn", "generator"])
def test_it_is_the_plain_layer_for_what_the_kernels_do_not_support(case: str):
    mpu.initialize_model_parallel(1)
    recompute, p = "selective" if case == "selective" else "none", 0.1 if case == "generator" else 0.0
    config = mpu.TransformerConfig(H, 4, 72, hidden_dropout=p, recompute_granularity=recompute)
    plain, fused = build_layers(config)
    x, found, calls = torch.randn(S, B, H), [], list[str]()
    arguments: dict[str, Any] = (
        {"attention_fn": lambda qkv: qkv[:, :, :, 2].flatten(2)} if case == "attention_fn" else {}
    )
    if case in HOOKS:
        getattr(fused[0].get_submodule(case), HOOKS[case])(lambda *_: calls.append(case))
    for layers in (plain, fused):
        torch.manual_seed(3)
        with fused_on_a_cpu(), mock.patch.object(kernels, "add_norm", side_effect=AssertionError):
            found.append(layers[0](x, **arguments))
    assert torch.equal(*found)
    found[1].sum().backward()
    assert calls == [case] * (case in HOOKS)


def test_a_frozen_weight_gets_no_gradient():
    mpu.initialize_model_parallel(1)
    _, fused = build_layers(mpu.TransformerConfig(H, 4, 72))
    frozen: Any = fused[1].get_submodule("mlp.dense_4h_to_h")
    frozen.weight.requires_grad_(False)
    frozen.weight_grad_fn = mock.Mock(side_effect=AssertionError)
    with fused_on_a_cpu():
        found = results(fused, torch.randn(S, B, H), None)
    assert len(found) == 2 + 2 * 12 - 1


def test_it_compiles_to_one_graph():
    mpu.initialize_model_parallel(1)
    plain, fused = build_layers(mpu.TransformerConfig(H, 4, 72))
    x = torch.randn(S, B, H)
    expected = results(plain, x, None)
    torch._dynamo.reset()
    with fused_on_a_cpu():
        for layer in fused:
            layer.compile(fullgraph=True, backend="aot_eager")
        assert greatest_difference(expected, results(fused, x, None)) < 1e-5
