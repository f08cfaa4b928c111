"""The flat buffer's own arithmetic, at the sizes of a large model."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from torch import nn

from megatron.gpt2.optimizer.flat_parameters import FlatParameters


def calls_of_a_step(parameters: int) -> int:
    """Python's calls in what a step and a save ask of a buffer with as many buckets and owned ranges as parameters."""
    calls = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    model = nn.ParameterList(nn.Parameter(torch.full((1,), float(i))) for i in range(parameters))
    sys.setprofile(count)
    try:
        flat = FlatParameters(model, torch.float32, bucket_size=1)
        grads = flat.owned_grads()
        parts = {name: flat.owned_part_of(name) for name in flat.ranges}
    finally:
        sys.setprofile(None)
    assert len(grads) == len(flat.owned) == len(flat.buckets) == parameters
    for name, (index, part, start) in parts.items():
        assert flat.masters[index][part].item() == float(name) and start == 0
    return calls


def test_a_step_is_linear_in_the_owned_ranges() -> None:
    assert calls_of_a_step(2_000) < 2.2 * calls_of_a_step(1_000)


def test_ten_thousand_owned_ranges() -> None:
    assert calls_of_a_step(10_000) < 100 * 10_000


def test_what_a_shard_owns_of_a_parameter() -> None:
    """All shards together own every element once."""
    model = nn.ParameterDict(
        {
            "a": nn.Parameter(torch.arange(300.0).view(30, 10)),
            "b": nn.Parameter(torch.arange(7.0)),
            "c": nn.Parameter(torch.arange(129.0).view(43, 3)),
        }
    )
    seen = {name: torch.zeros(parameter.numel()) for name, parameter in model.items()}
    for rank in range(4):
        flat = FlatParameters(
            nn.ParameterDict({name: nn.Parameter(p.detach().clone()) for name, p in model.items()}),
            torch.float32,
            bucket_size=350,
            ranks=(rank, 4),
            sharded=True,
        )
        for name, parameter in model.items():
            index, part, start = flat.owned_part_of(name)
            length = part.stop - part.start
            seen[name][start : start + length] += 1
            assert torch.equal(
                flat.masters[index][part] if length else torch.empty(0),
                parameter.detach().flatten()[start : start + length],
            )
    assert all((count == 1).all() for count in seen.values())
