"""Seeded dropout always draws the same numbers. The masks are equal in every part of a batch, and independent of each
other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import mpu
from mpu.kernels import seeded_dropout
from mpu.kernels.dropout import drop_threshold, keep_scale, random_draws, zero_dropped
from mpu.random import POST_ATTENTION_DROPOUT, POST_MLP_DROPOUT


def test_the_draws_of_three_blocks_never_change():
    """tests/fake_cuda/interpreted.py compares these draws with a Triton kernel that implements Philox4x64-10."""
    words = random_draws((1234, 7, 5 << 8 | 2, 1 << 32 | 3), 40, 3).view(torch.int64)
    assert words.tolist() == [
        *(4289027515643221729, -9007558207789683471, -8134218896505496836, -935279685475301272),
        *(-1822875877516502048, 4799146459834856730, 1243339896105674658, -741320335210908502),
        *(-581794090984724157, -14464946284642469, -1583832990608053231, 822624407972848439),
    ]


def test_dropped_elements_are_zero_in_every_dtype():
    limit = drop_threshold(0.3) - 32768
    drawn = torch.tensor([limit, limit - 1, 32767, -32768], dtype=torch.int16)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        x = torch.tensor([1.5, -2.5, -torch.inf, torch.nan], dtype=dtype)
        zero_dropped(x, drawn, drop_threshold(0.3), out=(out := torch.empty_like(x)))
        assert out.tolist() == [1.5, 0.0, -torch.inf, 0.0]
        zero_dropped(x, drawn, drop_threshold(1e-6), out=(out := torch.empty_like(x)))
        assert torch.equal(out.nan_to_num(5.0), x.nan_to_num(5.0)), "a probability that is rounded to 0"
    assert keep_scale(drop_threshold(0.25)) == 4 / 3 and drop_threshold(0.9999999) == 65535


def seeds_of(samples: list[int], *, seed: int = 1, layer: int = 0) -> Tensor:
    return mpu.make_dropout_seeds(seed, torch.tensor(samples), layer + 1)[layer]


def mask(
    seeds: Tensor, shape: tuple[int, int] = (64, 96), p: float = 0.5, location: int = POST_MLP_DROPOUT, first: int = 0
) -> Tensor:
    """Return bool [s, b, h]: True if an element is dropped. first: the position of the first row."""
    ones = torch.ones(shape[0], len(seeds), shape[1])
    return seeded_dropout(ones, p, seeds, location, first) == 0


@pytest.mark.parametrize("h", [96, 100])
def test_any_part_of_a_batch_has_the_same_mask(h: int):
    seeds = seeds_of([5, 9, 2])
    whole = mask(seeds, (64, h))
    assert torch.equal(mask(seeds[[2, 0]], (64, h)), whole[:, [2, 0]])
    assert torch.equal(mask(seeds, (20, h), first=30), whole[30:50])


def test_the_gradient_has_the_same_mask():
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(33, 2, 40, dtype=dtype).requires_grad_()
        y = seeded_dropout(x, 0.25, seeds_of([3, 4]), POST_MLP_DROPOUT)
        (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
        assert torch.equal(dx == 0, y == 0) and 0.2 < (dx == 0).float().mean() < 0.3
        assert torch.equal(y, x.detach() * (4 / 3) * (dx != 0))


def test_masks_have_the_right_rate_and_are_independent():
    """The masks of different neighbours, samples, layers, locations and seeds have a correlation below 5 standard
    deviations, for 614,400 elements."""
    shape, seeds = (400, 768), seeds_of([0, 1])
    first = mask(seeds, shape)
    for p in (0.1, 0.5):
        dropped = mask(seeds, shape, p).float().mean().item()
        assert abs(dropped - p) < 5 * (p * (1 - p) / first.numel()) ** 0.5
    others = {
        "sample": mask(seeds_of([2, 3]), shape),
        "layer": mask(seeds_of([0, 1], layer=1), shape),
        "location": mask(seeds, shape, location=POST_ATTENTION_DROPOUT),
        "seed": mask(seeds_of([0, 1], seed=2), shape),
        "neighbouring channel": first.roll(1, 2),
        "neighbouring position": first.roll(1, 0),
        "the other sample": first.flip(1),
        "the word's neighbour": first.roll(4, 2),
    }
    for name, other in others.items():
        correlation = torch.corrcoef(torch.stack([first.flatten(), other.flatten()]).float())[0, 1].item()
        assert abs(correlation) < 5 * first.numel() ** -0.5, (name, correlation)
