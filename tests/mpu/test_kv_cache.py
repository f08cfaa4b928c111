"""Texts that start, move and end in the rows of a KeyValueCache, and invalid calls. `tests/megatron/gpt2/generate`
compares whole models with and without a cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mpu
from mpu.kernels import causal_attention

LAYERS, ROWS, CAPACITY = 2, 3, 8


def new_cache() -> mpu.KeyValueCache:
    return mpu.KeyValueCache(LAYERS, ROWS, 2, CAPACITY, 4, dtype=torch.float32, device=torch.device("cpu"))


def attend(cache: mpu.KeyValueCache, qkv: torch.Tensor) -> list[torch.Tensor]:
    return [cache.attend(layer, qkv) for layer in range(LAYERS)]


def test_texts_start_move_and_end() -> None:
    """Each output equals that of its text computed without a cache, after moves and in a row that held NaN."""
    texts = torch.randn(CAPACITY, 6, 2, 3, 4)
    whole = causal_attention(texts, 0.0)  # [s, text, n·d]
    cache = new_cache()
    now: dict[int, list[int]] = {}  # for each row: its text and the number of tokens read so far

    def read(rows: list[int], numbers: list[int], length: int) -> None:
        cache.set_prompts(rows, length)
        for y in attend(cache, texts[:length, numbers]):
            torch.testing.assert_close(y, whole[:length, numbers])
        now.update({row: [number, length] for row, number in zip(rows, numbers, strict=True)})

    def step() -> None:
        numbers, lengths = zip(*(now[row] for row in range(len(now))), strict=True)
        cache.set_positions(lengths)
        for y in attend(cache, texts[lengths, numbers].unsqueeze(0)):
            torch.testing.assert_close(y[0], whole[lengths, numbers])
        for row in now:
            now[row][1] += 1

    read([0, 1, 2], [0, 1, 2], 2)
    step()
    del now[0]
    cache.move(2, 0)
    now[0] = now.pop(2)
    step()
    cache.set_prompts([2], CAPACITY)
    attend(cache, torch.full((CAPACITY, 1, 2, 3, 4), torch.nan))
    read([2], [3], 1)
    step()
    read([1, 0], [4, 5], 3)
    step()
    cache.set_prompts([0], CAPACITY)
    attend(cache, torch.full((CAPACITY, 1, 2, 3, 4), torch.nan))
    cache.move(2, 0)
    now = {0: now[2]}
    step()
    assert now == {0: [3, 4]}
    assert cache.num_bytes == LAYERS * ROWS * 2 * 2 * CAPACITY * 4 * 4


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
    ("method", "arguments"),
    [
        *(("set_positions", [positions]) for positions in ([], [0] * (ROWS + 1), [0, -1, 0], [0, 0, CAPACITY])),
        *(("set_prompts", arguments) for arguments in ([[ROWS], 1], [[0], CAPACITY + 1], [[-1], 1], [[0], 0])),
    ],
)
def test_what_does_not_fit_into_the_cache(method: str, arguments: list[Any]) -> None:
    with pytest.raises(ValueError, match="in a cache of 3 rows of 8 tokens each"):
        getattr(new_cache(), method)(*arguments)
