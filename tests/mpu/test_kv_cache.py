"""What a cache of keys and values refuses. `tests/megatron/gpt2/text` compares what it computes."""

from __future__ import annotations

import pytest
import torch

import mpu
from mpu.kernels import causal_attention

LAYERS, ROWS, CAPACITY = 2, 3, 8


def new_cache() -> mpu.KeyValueCache:
    return mpu.KeyValueCache(LAYERS, ROWS, 2, CAPACITY, 4, dtype=torch.float32, device=torch.device("cpu"))


def attend(cache: mpu.KeyValueCache, qkv: torch.Tensor) -> list[torch.Tensor]:
    return [cache.attend(layer, qkv) for layer in range(LAYERS)]


@pytest.mark.parametrize("length", [1, 3])
def test_a_new_cache_takes_a_prompt_of_any_length(length: int) -> None:
    """Without set_positions. A further token needs its position, whatever the prompt was."""
    cache, qkv = new_cache(), torch.randn(length + 1, ROWS, 2, 3, 4)
    expected = causal_attention(qkv, 0.0)
    for y in attend(cache, qkv[:length]):
        torch.testing.assert_close(y, expected[:length])
    with pytest.raises(ValueError, match="call set_positions before"):
        attend(cache, qkv[length:])
    for _ in range(2):
        cache.set_positions([length] * ROWS)
        for y in attend(cache, qkv[length:]):
            torch.testing.assert_close(y, expected[length:])
    with pytest.raises(ValueError, match="a prompt begins at position 0"):
        attend(cache, qkv[:2])
    cache.set_positions([0] * ROWS)
    torch.testing.assert_close(attend(cache, qkv[:2])[0], expected[:2])


@pytest.mark.parametrize("positions", [[0, 0], [0, -1, 0], [0, 0, CAPACITY]])
def test_a_position_that_the_cache_does_not_have(positions: list[int]) -> None:
    with pytest.raises(ValueError, match="in a cache of 3 rows of 8 tokens each"):
        new_cache().set_positions(positions)
