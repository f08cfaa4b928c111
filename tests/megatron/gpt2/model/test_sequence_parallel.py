"""Sequence parallelism computes what model-parallel size 1 does, and keeps less."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mpu
from megatron.gpt2.model.gpt2 import GPT2Model, layer_config
from tests.distributed import run_ranks
from tests.megatron.gpt2.train.training_runs import SHAPE, finish, merged, start, steps, write_text

STEPS = 30


def first_step_then_train(
    rank: int, world_size: int, folder: str, model_parallel: int, flags: list[str]
) -> dict[str, Any]:
    """Loss and summed gradients of the first step, then the losses of STEPS steps."""
    run = start(
        rank,
        world_size,
        folder,
        [
            "--model-parallel-size",
            str(model_parallel),
            "--clip-grad",
            "0",
            "--micro-batch-size",
            str(8 * model_parallel // world_size),
            "--save",
            f"{folder}/{model_parallel}_{world_size}_{len(flags)}",
            *flags,
        ],
    )
    gradients: dict[str, Tensor] = {}
    step = run.engine.optimizer.step

    def step_and_look() -> None:
        if not gradients:
            own = {name: run.engine.flat.grad(name).clone() for name in run.engine.flat.parameters}
            gradients.update(merged(own, mpu.partition_specs(run.engine.model), run.parallel))
        step()

    run.engine.optimizer.step = step_and_look  # type: ignore[method-assign]
    seen = steps(run, STEPS)
    finish(run)
    return {"gradients": gradients, **seen}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sequence_parallel")
    write_text(folder)
    return folder


@pytest.fixture(scope="module")
def reference(folder: Path) -> dict[str, Any]:
    (alone,) = run_ranks(first_step_then_train, 1, str(folder), 1, [])
    return alone


@pytest.mark.parametrize(
    ("ranks", "model_parallel", "flags"),
    [
        (2, 2, []),
        pytest.param(4, 2, [], marks=pytest.mark.wide),
        pytest.param(4, 4, [], marks=pytest.mark.wide),
        pytest.param(4, 2, ["--use-distributed-optimizer"], marks=pytest.mark.wide),
    ],
)
def test_first_step_and_the_layout(
    folder: Path, reference: dict[str, Any], ranks: int, model_parallel: int, flags: list[str]
):
    for result in run_ranks(first_step_then_train, ranks, str(folder), model_parallel, ["--sequence-parallel", *flags]):
        assert result["loss"][0] == pytest.approx(reference["loss"][0], rel=1e-6)
        if not flags:  # where they are sharded, a rank has a part of them alone
            assert result["gradients"].keys() == reference["gradients"].keys()
            for name, grad in reference["gradients"].items():
                difference = (result["gradients"][name] - grad).abs().max() / grad.abs().max()
                assert difference < 1e-5, f"{name} differs by {difference:.1e} of its maximum"
        assert result["loss"] == pytest.approx(reference["loss"], rel=1e-5)


def partial_and_complete(rank: int, world_size: int) -> dict[str, list[bool]]:
    """With a plain backward: for each replicated parameter whether its gradient is that of whole sequences, as autograd
    leaves it, after mpu's sum in fp32 and in bf16, and by a hook on the parameter."""
    mpu.initialize_model_parallel(world_size)
    tokens = torch.arange(4 * 32).view(4, 32) % 97

    def model_after_backward(dtype: torch.dtype = torch.float32, hook: bool = False, **how: Any) -> GPT2Model:
        model = GPT2Model(SHAPE, layer_config(SHAPE, **how)).to(dtype)
        for parameter in model.parameters():
            if hook and getattr(parameter, "sequence_parallel", False):
                parameter.register_hook(mpu.reduce_from_model_parallel_region)
        model(tokens, tokens, torch.full((4, 32), 1 / 128)).backward()
        return model

    whole = model_after_backward()
    assert not any(hasattr(p, "sequence_parallel") for p in whole.parameters()), "nothing is partial without it"
    expected = {name: p.grad for name, p in whole.named_parameters() if not hasattr(p, "model_parallel")}

    def is_complete(model: GPT2Model, tolerance: float) -> list[bool]:
        marked = {name: p for name, p in model.named_parameters() if getattr(p, "sequence_parallel", False)}
        assert marked.keys() == expected.keys()
        return [
            bool((p.grad.float() - expected[name]).norm() < tolerance * expected[name].norm())
            for name, p in marked.items()
        ]

    plain = model_after_backward(sequence_parallel=True)
    seen = {"autograd": is_complete(plain, 1e-2)}
    mpu.sum_sequence_parallel_grads(plain.parameters())
    seen["summed"] = is_complete(plain, 1e-5)
    in_bf16 = model_after_backward(torch.bfloat16, sequence_parallel=True)
    mpu.sum_sequence_parallel_grads(in_bf16.parameters())
    seen["bf16"] = is_complete(in_bf16, 3e-2)
    seen["hook"] = is_complete(model_after_backward(hook=True, sequence_parallel=True), 1e-5)
    return seen


def test_another_trainer_completes_the_gradients():
    for seen in run_ranks(partial_and_complete, 2):
        assert not any(seen["autograd"]) and len(seen["autograd"]) == 3 + 6 * SHAPE.num_layers
        assert all(seen["summed"]) and all(seen["bf16"]) and all(seen["hook"])


def saved_bytes(rank: int, world_size: int, sequence_parallel: bool) -> int:
    """Bytes that one forward keeps for its backward, weights left out, each storage once."""
    mpu.initialize_model_parallel(world_size)
    mpu.model_parallel_cuda_manual_seed(1)
    model = GPT2Model(SHAPE, layer_config(SHAPE, sequence_parallel=sequence_parallel)).train()
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    tokens = torch.arange(4 * 32).view(4, 32) % 97
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        hidden = mpu.hidden_dropout(model.word_embeddings(tokens.t()), 0.1, sequence_parallel)
        out = model.transformer(hidden)
    assert out.requires_grad
    return sum(kept.values())


def masks(rank: int, world_size: int, sequence_parallel: bool) -> Tensor:
    mpu.initialize_model_parallel(world_size)
    mpu.model_parallel_cuda_manual_seed(1)
    return mpu.hidden_dropout(torch.ones(64), 0.5, sequence_parallel)


def test_masks_differ_between_shards_alone():
    split, whole = (run_ranks(masks, 2, sequence_parallel) for sequence_parallel in (True, False))
    assert torch.equal(whole[0], whole[1]) and not torch.equal(split[0], split[1])


def test_activations_take_less_memory():
    """Layer norms' inputs and outputs, dropout's masks and the residual stream are halved at 2 ranks: of 34·s·b·h
    bytes a layer in 16 bits about 10 are replicated without it (arXiv:2205.05198, table 2)."""
    without, with_it = (run_ranks(saved_bytes, 2, sequence_parallel)[0] for sequence_parallel in (False, True))
    assert with_it < 0.85 * without, (with_it, without)
    print(f"kept by a rank of 2: {without:,} bytes, with sequence parallelism {with_it:,}")
