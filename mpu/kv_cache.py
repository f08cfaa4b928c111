"""The keys and values of the tokens so far, so that a further token costs one query for each layer.

Legend: b batch, s sequence, n heads of this rank, d head size, S capacity.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from mpu import kernels


class KeyValueCache:
    """For every layer a tensor [b, n, 2, S, d], which is made once and written in place.

    Each row begins at position 0. Rows may differ in length. The prompts are given together, padded behind their ends;
    the padding is masked until the row's own tokens are written over it.
    """

    def __init__(self, num_layers: int, b: int, n: int, capacity: int, d: int, *, dtype: torch.dtype,
                 device: torch.device) -> None:
        # Zeros: a position that is masked counts 0 times what it holds, which must not be NaN.
        self._layers = torch.zeros(num_layers, b, n, 2, capacity, d, dtype=dtype, device=device).unbind(0)
        self._rows = torch.arange(b, device=device)
        self._positions = self._rows
        self._longest = 0
        self._mask: Tensor | None = None

    def set_positions(self, positions: Sequence[int]) -> Tensor:
        """Set the positions of the next call's tokens, one for each row, and return them as int64 [b, 1]."""
        store = self._layers[0]
        self._positions = torch.tensor(positions, device=store.device)
        self._longest = max(positions) + 1
        self._mask = None
        if min(positions) + 1 < self._longest:
            later = torch.arange(self._longest, device=store.device) > self._positions.unsqueeze(1)  # [b, longest]
            self._mask = torch.zeros(later.shape, dtype=store.dtype, device=store.device).masked_fill_(
                later, -torch.inf)[:, None, None]  # [b, longest] -> [b, 1, 1, longest]
        return self._positions.unsqueeze(1)

    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        """Keep the keys and values of the new tokens, and let them attend to all tokens so far and to themselves.

        [s, b, n, 3, d] -> [s, b, n·d]. s = 1: the tokens of `set_positions`. Otherwise whole prompts, from position 0.
        """
        s, b, n, _, d = qkv.shape
        store = self._layers[layer]
        if s > 1:
            store[:, :, :, :s] = qkv[:, :, :, 1:].permute(1, 2, 3, 0, 4)  # [s, b, n, 2, d] -> [b, n, 2, s, d]
            return kernels.causal_attention(qkv, 0.0)
        if self._mask is None:
            store[:, :, :, self._longest - 1] = qkv[0, :, :, 1:]  # [b, n, 2, d]; faster than by index
        else:
            store[self._rows, :, :, self._positions] = qkv[0, :, :, 1:]
        k, v = store[:, :, :, :self._longest].unbind(2)  # [b, n, 2, longest, d] -> two of [b, n, longest, d]
        y = F.scaled_dot_product_attention(qkv[0, :, :, :1], k, v, attn_mask=self._mask)  # [b, n, 1, d]
        return y.reshape(1, b, n * d)  # [b, n, 1, d] -> [1, b, n·d]
