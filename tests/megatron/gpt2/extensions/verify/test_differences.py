"""Differences in units of roundoff, and how those of several parts come together."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.gpt2.extensions.verify.differences import Difference, difference, roundoff

U = roundoff(torch.float32)


def measured(reference: torch.Tensor, own: torch.Tensor, **more: float) -> Difference:
    return difference(reference, own, (5, 0), **{"roundoff": U, "rms": 1.0, "bound": 100.0, **more})


def test_units_are_of_the_tensors_scale_and_of_large_elements() -> None:
    assert (roundoff(torch.float32), roundoff(torch.float16), roundoff(torch.bfloat16)) == (2**-24, 2**-11, 2**-8)
    a = torch.tensor([[0.0, 1.0], [8.0, 0.5]])
    b = a + torch.tensor([[3 * U, 0.0], [16 * U, 0.0]])  # 3 units of the mean size, 2 units of 8
    found = measured(a, b)
    assert (found.count, found.equal, found.greatest) == (4, 2, 3.0)
    assert found.at == (5, 0) and found.reference == 0 and found.own == pytest.approx(3 * U)
    assert [found.quantile(q) for q in (0.5, 0.75, 1.0)] == [0.0, 3.0, 3.0]
    assert found.factor is None and found.squares == (0.0, 0.0, 0.0), "rounding explains it"


def test_quantiles_are_upper_edges_of_half_octaves() -> None:
    a = torch.ones(1000, 1)
    b = a + U * torch.arange(0, 2000, 2).view(-1, 1)
    found = measured(a, b, bound=1e9)
    assert found.equal == 1 and found.greatest == 1998
    for q in (0.25, 0.5, 0.9):
        assert q * 2000 * (1 - 1e-2) <= found.quantile(q) <= 1.5 * q * 2000


def test_what_is_no_number_differs_unless_it_is_in_both() -> None:
    a = torch.tensor([[math.inf], [math.nan], [-math.inf], [1.0]])
    assert measured(a, a.clone()).greatest == 0
    for at, value in ((0, 1.0), (1, 1.0), (2, math.inf), (3, math.nan)):
        b = a.clone()
        b[at] = value
        found = measured(a, b)
        assert found.excess == found.greatest == math.inf and found.at[0] == 5 + at and found.equal == 3


def test_ids_differ_or_not() -> None:
    found = measured(torch.tensor([[1, 2]]), torch.tensor([[1, 3]]), bound=0.0)
    assert (found.excess, found.at, found.reference, found.own) == (math.inf, (5, 1), 2.0, 3.0)


def test_a_multiple_is_told_and_parts_come_together() -> None:
    a = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    together = measured(a[:32], 2 * a[:32])
    together.add(measured(a[32:], 2 * a[32:]))
    whole = measured(a, 2 * a)
    assert together.count == whole.count == 512 and together.histogram == whole.histogram
    assert together.factor == pytest.approx(2.0) and together.greatest == whole.greatest
    together.add(measured(a, torch.randn(64, 8, generator=torch.Generator().manual_seed(1))))
    assert together.factor is None


def test_what_is_allowed_needs_no_explanation() -> None:
    a = torch.zeros(4)
    b = torch.tensor([0.0, 0.1, 0.2, 0.3])
    found = difference(a, b, (0,), roundoff=U, rms=1.0, bound=100.0, allowed=torch.full((4,), 0.25))
    assert found.at == (3,) and found.excess == pytest.approx(0.05 / U, rel=1e-5)
    assert found.greatest == pytest.approx(0.3 / U, rel=1e-5)
