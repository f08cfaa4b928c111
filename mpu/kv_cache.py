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
    some rows, and `set_positions` adds one token to each of the first b rows. `move` copies a text to a different row.
    Texts can have different lengths: padding after a prompt is masked until new tokens overwrite the padding.
    """

    def __init__(
        self, num_layers: int, rows: int, n: int, capacity: int, d: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        # The cache begins with zeros: a masked position has weight 0, and 0 · NaN would be NaN.
        self._store = torch.zeros(num_layers, rows, n, 2, capacity, d, dtype=dtype, device=device)
        self._layers = self._store.unbind(0)
        self._all_rows = torch.arange(rows, device=device)
        self._positions: Tensor | None = None

    def set_prompts(self, rows: Sequence[int]) -> None:
        """Let the next forward pass read whole prompts into `rows`, whose former texts are discarded."""
        self._store[:, list(rows)] = 0  # A NaN of the former text would reach the new text.
        self._rows, self._positions = self._all_rows[list(rows)], None

    def set_positions(self, positions: Sequence[int]) -> Tensor:
        """Let the next forward pass compute one more token for each of the first b rows, at these positions, which are
        less than the capacity. Return the positions as int64 [b, 1]."""
        self._positions = torch.tensor(positions, device=self._store.device)
        self._rows, self._longest = self._all_rows[: len(positions)], max(positions) + 1
        self._mask: Tensor | None = None
        if min(positions) + 1 < self._longest:
            later = torch.arange(self._longest, device=self._store.device) > self._positions.unsqueeze(1)
            mask = torch.where(later, -torch.inf, 0.0).to(self._store.dtype)
            self._mask = mask[:, None, None]  # [b, longest] -> [b, 1, 1, longest]
        return self._positions.unsqueeze(1)

    def move(self, source: int, row: int) -> None:
        """Copy the text of row `source` to `row`."""
        self._store[:, row] = self._store[:, source]

    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        """Store the keys and values of the new tokens, and return their attention over all tokens up to themselves.

        [s, b, n, 3, d] -> [s, b, n·d]. The tokens are the prompts of `set_prompts` or, with s = 1, those of
        `set_positions`.
        """
        s, b, n, _, d = qkv.shape
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
