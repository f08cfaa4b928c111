"""Keys and values of what was read, so that a further token costs one query a layer.

Legend: b batch, s sequence, n heads of this rank, d head size, S capacity.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from mpu.attention import causal_attention


class KeyValueCache:
    """For every layer [b, n, 2, S, d], made once and written in place.

    Rows begin at place 0 and may differ in length. The prompts come together, filled up behind their ends: what stands
    there is masked until the row's own tokens take its place.
    """

    def __init__(self, num_layers: int, b: int, n: int, capacity: int, d: int, *, dtype: torch.dtype,
                 device: torch.device) -> None:
        # Zeros: a place that is masked counts 0 times what it holds, which must not be NaN.
        self._layers = torch.zeros(num_layers, b, n, 2, capacity, d, dtype=dtype, device=device).unbind(0)
        self._rows = torch.arange(b, device=device)
        self._places = self._rows
        self._longest = 0
        self._mask: Tensor | None = None

    def go_to(self, places: Sequence[int]) -> Tensor:
        """The next call's tokens, one a row, stand at `places`; returns them, int64 [b, 1]."""
        store = self._layers[0]
        self._places = torch.tensor(places, device=store.device)
        self._longest = max(places) + 1
        self._mask = None
        if min(places) + 1 < self._longest:
            later = torch.arange(self._longest, device=store.device) > self._places.unsqueeze(1)
            self._mask = torch.zeros(later.shape, dtype=store.dtype, device=store.device).masked_fill_(
                later, -torch.inf)[:, None, None]  # [b, 1, 1, longest]
        return self._places.unsqueeze(1)

    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        """Attention of new tokens to themselves and all before, which are kept: [s, b, n, 3, d] -> [s, b, n·d].

        s = 1: the tokens of `go_to`. Else whole prompts, from place 0 on.
        """
        s, b, n, _, d = qkv.shape
        store = self._layers[layer]
        if s > 1:
            store[:, :, :, :s] = qkv[:, :, :, 1:].permute(1, 2, 3, 0, 4)  # [s, b, n, 2, d] -> [b, n, 2, s, d]
            return causal_attention(qkv, 0.0)
        if self._mask is None:
            store[:, :, :, self._longest - 1] = qkv[0, :, :, 1:]  # [b, n, 2, d]; faster than by index
        else:
            store[self._rows, :, :, self._places] = qkv[0, :, :, 1:]
        k, v = store[:, :, :, :self._longest].unbind(2)
        y = F.scaled_dot_product_attention(qkv[0, :, :, :1], k, v, attn_mask=self._mask)  # [b, n, 1, d]
        return y.reshape(1, b, n * d)
