"""Test bitwise-reproducible layouts: the layers, their sums, the reducer's order, and the flags that they exclude."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import mpu
from megatron.gpt2.config import ModelConfig
from megatron.gpt2.config.arguments import parse
from megatron.gpt2.extensions.exact import exact_squared_norm, exact_submodules
from megatron.gpt2.model.gpt2 import GPT2Model, build_block_config
from tests.conftest import error_line
from tests.distributed import run_ranks

SHAPE = ModelConfig(
    num_layers=2,
    hidden_size=64,
    num_attention_heads=4,
    max_position_embeddings=32,
    vocab_size=500,
    hidden_dropout=0.1,
    attention_dropout=0.1,
    gelu="erf",
)
SIX = dataclasses.replace(
    SHAPE, hidden_size=48, num_attention_heads=6, max_position_embeddings=24, make_vocab_size_divisible_by=96
)
CASES = [
    (dtype, sequence_parallel, recompute, by_document)
    for dtype in (torch.float32, torch.bfloat16)
    for sequence_parallel in (False, True)
    for recompute, by_document in (("none", True), ("selective", False), ("full", True))
]
Cases = list[tuple[torch.dtype, bool, str, bool]]


def gradients(
    rank: int, world_size: int, shape: ModelConfig, cases: Cases, virtual_ranks: int | None
) -> list[tuple[float, dict[str, tuple[Tensor, int | None]]]]:
    """Return for each case the loss, and a dictionary {parameter: (this rank's gradient, split dimension)}."""
    mpu.initialize_model_parallel(world_size)
    submodules = exact_submodules(virtual_ranks) if virtual_ranks else mpu.DEFAULT_SUBMODULES
    draw, s = torch.Generator().manual_seed(3), shape.max_position_embeddings
    tokens, labels = (torch.randint(0, 500, (3, s), generator=draw) for _ in range(2))
    found = []
    for dtype, sequence_parallel, recompute, by_document in cases:
        layers = build_block_config(shape, sequence_parallel=sequence_parallel, recompute_granularity=recompute)
        model = GPT2Model(shape, layers, dropout_seed=7, submodules=submodules).to(dtype).train()
        more: dict[str, Any] = {}
        if by_document:
            more = {
                "packed_seq_params": mpu.PackedSeqParams.from_tokens(tokens, int(tokens[0, 11]), "cpu"),
                "positions": torch.randint(0, s, (3, s), generator=torch.Generator().manual_seed(4)),
            }
        loss = model(tokens, labels, torch.full((3, s), 1 / (3 * s)), sample_ids=torch.arange(3), **more)
        loss.backward()
        if not virtual_ranks:
            mpu.all_reduce_sequence_parallel_grads(model.parameters())
        specs, parameters = mpu.partition_specs(model), model.named_parameters()
        grads = {name: (x.grad.clone(), specs[name].dim) for name, x in parameters if x.grad is not None}
        found.append((loss.item(), grads))
    return found


@pytest.mark.parametrize(
    "shape, virtual_ranks, cases, world_sizes",
    [
        (SHAPE, 4, CASES[::5], (2, 4)),
        (SIX, 6, CASES[::5], (3,)),
        pytest.param(SHAPE, 4, CASES, (2,), marks=pytest.mark.wide),
        pytest.param(SIX, 3, CASES[::6], (3,), marks=pytest.mark.wide),
    ],
    ids=["V 4", "V 6", "V 4 in all cases", "V 3"],
)
def test_no_bit_depends_on_the_tensor_parallel_size(
    shape: ModelConfig, virtual_ranks: int, cases: Cases, world_sizes: tuple[int, ...]
) -> None:
    one = gradients(0, 1, shape, cases, virtual_ranks)
    plain = gradients(0, 1, shape, cases, None)
    for (dtype, *_), (loss, grads), (plain_loss, plain_grads) in zip(cases, one, plain, strict=True):
        bound = 1e-6 if dtype == torch.float32 else 1e-2
        assert loss == pytest.approx(plain_loss, rel=bound)
        for name, (grad, _) in grads.items():
            assert (grad - plain_grads[name][0]).norm() <= 5 * bound * grad.norm(), name
    for world_size in world_sizes:
        by_rank = run_ranks(gradients, world_size, shape, cases, virtual_ranks)
        for case, (loss, grads), *of_ranks in zip(cases, one, *by_rank, strict=True):
            assert all(theirs == loss for theirs, _ in of_ranks), case
            for name, (grad, dim) in grads.items():
                shards = [theirs[name][0] for _, theirs in of_ranks]
                whole = shards if dim is None else [torch.cat(shards, dim)]
                assert all(torch.equal(each, grad) for each in whole), f"{world_size} ranks, {case}: {name}"


def test_the_norm_of_large_and_invalid_gradients() -> None:
    mpu.initialize_model_parallel(1)
    cpu, grads = torch.device("cpu"), torch.randn(64 * 50) * 10 ** (-8 * torch.rand(64 * 50))
    one = exact_squared_norm([grads], [], cpu, block=16)
    assert one.item() == pytest.approx(grads.double().square().sum().item(), rel=1e-6)
    assert torch.equal(exact_squared_norm([grads[64:]], [grads[:64]], cpu, block=16), one)
    assert exact_squared_norm([torch.full((64,), 1e30)], [], cpu).item() == pytest.approx(64e60)
    for bad in (torch.inf, -torch.inf, torch.nan):
        grads[70] = bad
        assert exact_squared_norm([grads], [], cpu, block=16) == torch.inf


FLAGS = "--num-attention-heads 8 --hidden-size 64 --ffn-hidden-size 256 --seq-length 64 --max-position-embeddings 96 "
REFUSED = {
    "--exact-layouts 0": "--exact-layouts must be positive, not 0",
    "--exact-layouts 6": "--num-attention-heads 8 is not divisible by --exact-layouts 6: change one of them",
    "--exact-layouts 2 --model-parallel-size 4": "--exact-layouts 2 is not divisible by --tensor-model-parallel-size 4",
    "--exact-layouts 4 --num-attention-heads "
    "2": "--num-attention-heads 2 is not divisible by --exact-layouts 4: change",
    "--exact-layouts 4 --make-vocab-size-divisible-by "
    "2": "--make-vocab-size-divisible-by 2 is not divisible by --exact",
    "--exact-layouts 4 --compile": "--exact-layouts and --compile: the compiler chooses the order of sums; leave one",
    "--exact-layouts 4 --grad-reduce-in-bf16": "--exact-layouts and --grad-reduce-in-bf16: rounding to bf16 depends on",
    "--exact-layouts 4 --zero-stage 2": "--exact-layouts and --shard-gradients (--zero-stage 2): it sums over ranks ",
    "--exact-layouts 4 --dropout-rng torch": "--exact-layouts and --dropout-rng torch: its masks depend on the layout; "
    "leave one out, or give --hidden-dropout 0 --attention-dropout 0",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_unsupported_flags_end_in_one_line(flags: str) -> None:
    said = error_line(lambda: parse(f"{FLAGS}{flags}".split()).config.build_batch_schedule(3))
    assert said.startswith(REFUSED[flags])


def test_torchs_masks_are_accepted_without_dropout() -> None:
    parse(f"{FLAGS} --exact-layouts 4 --dropout-rng torch --hidden-dropout 0 --attention-dropout 0".split())
