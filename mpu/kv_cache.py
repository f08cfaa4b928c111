"""A cache of attention's keys and values for generation: each new token costs one query per layer.

Legend: r rows of the cache, b rows that compute, s sequence, n heads of this rank, d head size, S capacity.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from mpu import kernels


class KeyValueCache:
    """Keys and values of all layers, in a tensor [r, n, 2, S, d] for each layer, allocated once.

    A row holds one text, starting at position 0. Texts can start and end at any time: `set_prompts` starts new texts in
    some rows, and `set_positions` adds one token to each of the first b rows; use `move` to bring unfinished texts into
    these rows. Rows can have different lengths: padding after a prompt is masked until the row's own tokens overwrite
    it.
    """

    def __init__(
        self, num_layers: int, rows: int, n: int, capacity: int, d: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        # The cache begins with zeros: a masked position has weight 0, and 0 · NaN would be NaN.
        self._store = torch.zeros(num_layers, rows, n, 2, capacity, d, dtype=dtype, device=device)
        self._layers = self._store.unbind(0)
        self._all_rows = torch.arange(rows, device=device)
        self._next_layer = num_layers

    def set_prompts(self, rows: Sequence[int], s: int) -> None:
        """Let the next forward pass read whole prompts, padded to s tokens, into these rows. The rows' former texts are
        discarded. Raises ValueError if the cache does not have these rows or s positions."""
        if not 0 < s <= self._store.size(4) or not set(rows) <= set(range(len(self._all_rows))):
            raise ValueError(f"prompts of {s} tokens for the rows {list(rows)} in a cache of {self._size}")
        self._store[:, list(rows)] = 0  # Without this, NaN of an earlier text would reach the new one.
        self._positions: Tensor | None = None
        self._rows, self._longest, self._next_layer = self._all_rows[list(rows)], s, 0

    def set_positions(self, positions: Sequence[int]) -> Tensor:
        """Let the next forward pass compute one more token for each of the first b rows, at these positions. Return the
        positions as int64 [b, 1]. Raises ValueError if the cache does not have such a row or position."""
        b = len(positions)
        if not 0 < b <= len(self._all_rows) or min(positions) < 0 or max(positions) >= self._store.size(4):
            raise ValueError(f"positions {list(positions)} in a cache of {self._size}")
        self._positions = torch.tensor(positions, device=self._store.device)
        self._rows, self._longest, self._next_layer = self._all_rows[:b], max(positions) + 1, 0
        self._mask: Tensor | None = None
        if min(positions) + 1 < self._longest:
            later = torch.arange(self._longest, device=self._store.device) > self._positions.unsqueeze(1)
            self._mask = torch.zeros(later.shape, dtype=self._store.dtype, device=self._store.device).masked_fill_(
                later, -torch.inf
            )[:, None, None]  # [b, longest] -> [b, 1, 1, longest]
        return self._positions.unsqueeze(1)

    def move(self, source: int, row: int) -> None:
        """Copy the text of row `source` to `row`."""
        self._store[:, row] = self._store[:, source]

    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        """Store the keys and values of the new tokens, and return their attention over all tokens up to themselves.

        [s, b, n, 3, d] -> [s, b, n·d]: the prompts of `set_prompts`, or the tokens of `set_positions` with s = 1. Call
        the layers in order. Raises ValueError if neither method was called for these tokens.
        """
        s, b, n, _, d = qkv.shape
        if layer < self._next_layer or b != len(self._rows) or s != (self._longest if self._positions is None else 1):
            raise ValueError("the positions of these tokens are unknown: call set_prompts or set_positions before")
        self._next_layer = layer + 1
        store = self._layers[layer]
        if self._positions is None:
            store[self._rows, :, :, :s] = qkv[:, :, :, 1:].permute(1, 2, 3, 0, 4)  # [s, b, n, 2, d] -> [b, n, 2, s, d]
            return kernels.causal_attention(qkv, 0.0)
        if self._mask is None:
            store[:b, :, :, self._longest - 1] = qkv[0, :, :, 1:]  # [b, n, 2, d]; faster than an index tensor
        else:
            store[self._rows, :, :, self._positions] = qkv[0, :, :, 1:]
        k, v = store[:b, :, :, : self._longest].unbind(2)  # [b, n, 2, longest, d] -> two of [b, n, longest, d]
        y = F.scaled_dot_product_attention(qkv[0, :, :, :1], k, v, attn_mask=self._mask)  # [b, n, 1, d]
        return y.reshape(1, b, n * d)  # [b, n, 1, d] -> [1, b, n·d]

    @property
    def _size(self) -> str:
        return f"{len(self._all_rows)} rows of {self._store.size(4)} tokens each"
