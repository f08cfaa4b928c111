"""Texts that start, move and end in the rows of a KeyValueCache, and invalid calls. `tests/megatron/gpt2/generate`
compares whole models with and without a cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mpu

LAYERS, ROWS, CAPACITY = 2, 3, 8


def new_cache() -> mpu.KeyValueCache:
    return mpu.KeyValueCache(LAYERS, ROWS, 2, CAPACITY, 4, dtype=torch.float32, device=torch.device("cpu"))


def attend(cache: mpu.KeyValueCache, qkv: torch.Tensor) -> list[torch.Tensor]:
    return [cache.attend(layer, qkv) for layer in range(LAYERS)]


def test_the_positions_of_tokens_must_be_set() -> None:
    cache, qkv = new_cache(), torch.randn(3, ROWS, 2, 3, 4)
    unknown = pytest.raises(ValueError, match="call set_prompts or set_positions before")
    with unknown:
        attend(cache, qkv)
    cache.set_prompts([0, 1, 2], 3)
    attend(cache, qkv)
    for wrong in (qkv[:1], qkv):
        with unknown:
            attend(cache, wrong)
    cache.set_positions([3, 3, 3])
    for wrong in (qkv, qkv[:1, :2]):
        with unknown:
            attend(cache, wrong)


@pytest.mark.parametrize(
    "method, arguments",
    [
        *(("set_positions", [positions]) for positions in ([], [0] * (ROWS + 1), [0, -1, 0], [0, 0, CAPACITY])),
        *(("set_prompts", arguments) for arguments in ([[ROWS], 1], [[0], CAPACITY + 1], [[-1], 1], [[0], 0])),
    ],
)
def test_what_does_not_fit_into_the_cache(method: str, arguments: list[Any]) -> None:
    with pytest.raises(ValueError, match="in a cache of 3 rows of 8 tokens each"):
        getattr(new_cache(), method)(*arguments)
