"""What a layer's description refuses."""

from __future__ import annotations

from typing import Any

import pytest

from mpu import TransformerConfig


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_attention_heads": 3}, "64 is not divisible by 3"),
        ({"gelu": "relu"}, "'relu' is none of tanh, erf"),
        ({"recompute_granularity": "some"}, "'some' is none of none, selective, full"),
    ],
)
def test_wrong_descriptions_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TransformerConfig(**{"hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 256, **fields})


def test_the_size_of_a_head() -> None:
    assert TransformerConfig(64, 4, 256).head_size == 16
