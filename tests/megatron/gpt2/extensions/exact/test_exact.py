"""Bitwise-reproducible layouts: the layers, their sums, the reducer's order, and the flags that they exclude."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from torch import Tensor

import mpu
from megatron.gpt2.config import ModelConfig
from megatron.gpt2.config.arguments import parse
from megatron.gpt2.extensions.exact import exact_squared_norm, exact_submodules, tree_sum
from megatron.gpt2.extensions.exact.reducer import LeafRange, max_waiting_sums, merge_sums, odd_factor, sums_of_rank
from megatron.gpt2.extensions.exact.sums import VirtualRanks
from megatron.gpt2.model.gpt2 import GPT2Model, layer_config
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
    """Return for each case the loss, and for each parameter this rank's gradient and its split dimension."""
    mpu.initialize_model_parallel(world_size)
    submodules = exact_submodules(virtual_ranks) if virtual_ranks else mpu.DEFAULT_SUBMODULES
    draw, s = torch.Generator().manual_seed(3), shape.max_position_embeddings
    tokens, labels = (torch.randint(0, 500, (3, s), generator=draw) for _ in range(2))
    found = []
    for dtype, sequence_parallel, recompute, by_document in cases:
        layers = layer_config(shape, sequence_parallel=sequence_parallel, recompute_granularity=recompute)
        model = GPT2Model(shape, layers, dropout_seed=7, submodules=submodules).to(dtype).train()
        more: dict[str, Any] = {}
        if by_document:
            more = {
                "packed_seq_params": mpu.PackedSeqParams(tokens, int(tokens[0, 11]), "cpu"),
                "positions": torch.randint(0, s, (3, s), generator=torch.Generator().manual_seed(4)),
            }
        loss = model(tokens, labels, torch.full((3, s), 1 / (3 * s)), samples=torch.arange(3), **more)
        loss.backward()
        if not virtual_ranks:
            mpu.all_reduce_sequence_parallel_grads(model.parameters())
        specs, parameters = mpu.partition_specs(model), model.named_parameters()
        grads = {name: (x.grad.clone(), specs[name].dim) for name, x in parameters if x.grad is not None}
        found.append((loss.item(), grads))
    return found


@pytest.mark.parametrize(
    ("shape", "virtual_ranks", "cases", "world_sizes"),
    [(SHAPE, 4, CASES, (2,)), (SHAPE, 4, CASES[::5], (4,)), (SIX, 6, CASES[::5], (2, 3)), (SIX, 3, CASES[::6], (3,))],
    ids=["V 4", "V 4 on 4 ranks", "V 6", "V 3"],
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


def test_a_tree_sum_is_the_sum_of_its_subtrees() -> None:
    """2^j ranks with successive terms get the bits of one rank if 2^j divides the number of terms."""
    torch.manual_seed(0)
    for count in (1, 2, 3, 4, 6, 8, 12, 16):
        terms = [torch.randn(1000).mul_(10.0 ** random.Random(n).randint(-3, 3)) for n in range(count)]
        whole = tree_sum(terms)
        ranks = 1
        while count % ranks == 0:
            size = count // ranks
            parts = [tree_sum(terms[n * size : (n + 1) * size]) for n in range(ranks)]
            assert torch.equal(tree_sum(parts), whole), (count, ranks)
            ranks *= 2
        assert (whole - torch.stack(terms).double().sum(0)).norm() <= 1e-6 * torch.stack(terms).norm()
    for term in terms:
        assert tree_sum([term]) is term  # callers must not write into the result
    halves = [torch.tensor([1.0, 2**-9], dtype=torch.bfloat16)] * 2
    assert tree_sum(halves).dtype == torch.float32


def test_products_are_rounded_once_and_summed_in_float32() -> None:
    torch.manual_seed(0)
    xs = [torch.randn(1100, 8).bfloat16() for _ in range(4)]  # more rows than are summed at once
    weights = [torch.randn(8, 16).bfloat16() for _ in range(4)]
    expected = tree_sum([x @ weight for x, weight in zip(xs, weights, strict=True)])
    virtual = VirtualRanks(4, None)
    assert torch.equal(virtual.sum_of_products(xs, weights, torch.float32)[0], expected)
    assert torch.equal(virtual.sum_of_products(xs, weights, torch.bfloat16)[0], expected.bfloat16())


@pytest.mark.parametrize("block", [1, 16, 64])
def test_the_norm_does_not_depend_on_the_sharding(block: int) -> None:
    torch.manual_seed(0)
    mpu.initialize_model_parallel(1)
    cpu, draw = torch.device("cpu"), random.Random(0)
    for power in (0, 3, 8):  # elements of a gradient differ by factors of up to 10^8
        grads = torch.randn(64 * 500) * 10 ** (-power * torch.rand(64 * 500))
        one = exact_squared_norm([grads], [], cpu, block=block)
        assert one.dtype == torch.float64
        assert one.item() == pytest.approx(grads.double().square().sum().item(), rel=1e-6)
        for _ in range(5):
            cuts = sorted(draw.sample(range(1, 500), 6))
            parts = [grads[64 * a : 64 * b].clone() for a, b in zip([0, *cuts], [*cuts, 500], strict=True)]
            draw.shuffle(parts)
            assert torch.equal(exact_squared_norm(parts[:3], parts[3:], cpu, block=block), one)
    assert exact_squared_norm([torch.zeros(64)], [torch.zeros(0)], cpu, block=block) == 0
    assert exact_squared_norm([torch.full((64,), 1e30)], [], cpu).item() == pytest.approx(64e60)
    for bad in (torch.inf, -torch.inf, torch.nan):
        grads = torch.ones(128)
        grads[70] = bad
        assert exact_squared_norm([grads], [], cpu, block=block) == torch.inf


def merge_tensors(terms: list[Tensor], states: list[list[LeafRange]]) -> list[Tensor]:
    """Add adjacent terms where the tree does, and return the remaining sums. states: from `merge_sums`."""
    left: list[Tensor] = []
    for term, sums in zip(terms, states[1:], strict=True):
        while len(left) >= len(sums):
            term = left.pop() + term
        left.append(term)
    return left


def test_any_number_of_ranks_gives_the_bits_of_one_rank() -> None:
    torch.manual_seed(0)
    for count in (1, 2, 3, 5, 6, 8, 12, 16, 24, 30, 36):
        leaves = list(torch.randn(count, 500).mul_(torch.logspace(-3, 3, 500)).unbind())
        for ranks in (size for size in range(1, count + 1) if count % size == 0):
            size, states = count // ranks, [sums_of_rank(rank, count // ranks, ranks) for rank in range(ranks)]
            sent = [
                x for rank in range(ranks) for x in merge_tensors(leaves[rank * size : (rank + 1) * size], states[rank])
            ]
            everything = merge_sums([sums for state in states for sums in state[-1]], odd_factor(count))
            assert everything[-1] == [(0, count)]
            (whole,) = merge_tensors(sent, everything)
            assert torch.equal(whole, tree_sum(leaves)), (count, ranks)


def test_number_of_partial_sums_sent_and_stored() -> None:
    assert [len(sums_of_rank(rank, 4, 3)[-1]) for rank in range(3)] == [2, 3, 2]  # 12 leaves, in blocks of 3
    assert all(len(sums_of_rank(rank, 6, ranks)[-1]) == 1 for ranks in (1, 2, 4) for rank in range(ranks))
    assert [max_waiting_sums(count) for count in (1, 2, 3, 4, 6, 8, 12)] == [0, 1, 0, 2, 1, 3, 2]
    assert max_waiting_sums(4, 3) >= 2


FLAGS = "--num-attention-heads 8 --hidden-size 64 --ffn-hidden-size 256 --seq-length 64 --max-position-embeddings 96 "
REFUSED = {
    "--exact-layouts 0": "--exact-layouts must be positive, not 0",
    "--exact-layouts 6": "--num-attention-heads 8 is not divisible by --exact-layouts 6: change one of them",
    "--exact-layouts 2 --model-parallel-size 4": "--exact-layouts 2 is not divisible by --model-parallel-size 4",
    "--exact-layouts 4 --num-attention-heads "
    "2": "--num-attention-heads 2 is not divisible by --exact-layouts 4: change",
    "--exact-layouts 4 --make-vocab-size-divisible-by "
    "2": "--make-vocab-size-divisible-by 2 is not divisible by --exact",
    "--exact-layouts 4 --compile": "--exact-layouts and --compile: the compiler chooses the order of sums; leave one",
    "--exact-layouts 4 --DDP-impl torch": "--exact-layouts and --DDP-impl torch: torch's DDP sums in a different order",
    "--exact-layouts 4 --grad-reduce-in-bf16": "--exact-layouts and --grad-reduce-in-bf16: rounding to bf16 depends on",
    "--exact-layouts 4 --zero-stage 2": "--exact-layouts and --shard-gradients (--zero-stage 2): it sums over ranks ",
    "--exact-layouts 4 --dropout-rng torch": "--exact-layouts and --dropout-rng torch: its masks depend on the layout; "
    "leave one out, or give --hidden-dropout 0 --attention-dropout 0",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_unsupported_flags_end_in_one_line(flags: str) -> None:
    with pytest.raises(ValueError) as error:
        parse(f"{FLAGS}{flags}".split()).config.batch_schedule(3)
    assert str(error.value).startswith(REFUSED[flags]) and "\n" not in str(error.value)


def test_torchs_masks_are_accepted_without_dropout() -> None:
    parse(f"{FLAGS} --exact-layouts 4 --dropout-rng torch --hidden-dropout 0 --attention-dropout 0".split())
