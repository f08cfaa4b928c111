"""Dropout of 16 bits for each element has the statistics of the formula."""

from __future__ import annotations

import pytest
import torch

from mpu import kernels


def test_dropout_drops_what_it_should_and_keeps_the_mean():
    torch.manual_seed(0)
    for p in (0.1, 0.5):
        x = torch.ones(1001, 1003, requires_grad=True)
        y = kernels.dropout(x, p)
        assert (y == 0).float().mean().item() == pytest.approx(p, abs=0.002)
        assert y[y != 0].unique().tolist() == pytest.approx([1 / (1 - p)], rel=1e-4)
        y.sum().backward()
        assert torch.equal(x.grad, y.detach())
        # No pattern along the elements that share a random number.
        lanes = (y.detach().view(-1)[:1_000_000].view(-1, 4) == 0).float()
        assert lanes.mean(0).tolist() == pytest.approx([p] * 4, abs=0.004)
        assert torch.corrcoef(lanes.t()).fill_diagonal_(0).abs().max().item() < 0.01
    assert torch.equal(kernels.dropout(x, 0.0), x)
