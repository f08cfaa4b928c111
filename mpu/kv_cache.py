"""The keys and values of the tokens so far, so that a further token costs one query for each layer.

Legend: b batch, s sequence, n heads of this rank, d head size, S capacity.
"""

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
        self.set_positions([0] * b)

    def set_positions(self, positions: Sequence[int]) -> Tensor:
        """Set the positions of the next call's tokens, one for each row, and return them as int64 [b, 1]. In a new
        cache they are 0. Raises ValueError where the cache has no such row or position."""
        store = self._layers[0]
        b, capacity = store.size(0), store.size(3)
        if len(positions) != b or min(positions) < 0 or max(positions) >= capacity:
            raise ValueError(f"positions {list(positions)} in a cache of {b} rows of {capacity} tokens each")
        self._positions = torch.tensor(positions, device=store.device)
        self._longest = max(positions) + 1
        self._next_layer = 0
        self._mask: Tensor | None = None
        if min(positions) + 1 < self._longest:
            later = torch.arange(self._longest, device=store.device) > self._positions.unsqueeze(1)  # [b, longest]
            self._mask = torch.zeros(later.shape, dtype=store.dtype, device=store.device).masked_fill_(
                later, -torch.inf)[:, None, None]  # [b, longest] -> [b, 1, 1, longest]
        return self._positions.unsqueeze(1)

    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        """Keep the keys and values of the new tokens, and let them attend to all tokens so far and to themselves.

        [s, b, n, 3, d] -> [s, b, n·d]. s = 1: the tokens of `set_positions`. Otherwise whole prompts, from position 0.
        The layers come in their order. Raises ValueError for a further token without `set_positions`, and for a prompt
        after other positions than 0.
        """
        s, b, n, _, d = qkv.shape
        store = self._layers[layer]
        if s == 1 and layer < self._next_layer:
            raise ValueError("the position of a further token is not known: call set_positions before")
        self._next_layer = layer + 1 if s == 1 else len(self._layers)
        if s > 1:
            if self._longest > 1:
                raise ValueError("a prompt begins at position 0: call set_positions with zeros before a new one")
            store[:, :, :, :s] = qkv[:, :, :, 1:].permute(1, 2, 3, 0, 4)  # [s, b, n, 2, d] -> [b, n, 2, s, d]
            return kernels.causal_attention(qkv, 0.0)
        if self._mask is None:
            store[:, :, :, self._longest - 1] = qkv[0, :, :, 1:]  # [b, n, 2, d]; faster than by index
        else:
            store[self._rows, :, :, self._positions] = qkv[0, :, :, 1:]
        k, v = store[:, :, :, :self._longest].unbind(2)  # [b, n, 2, longest, d] -> two of [b, n, longest, d]
        y = F.scaled_dot_product_attention(qkv[0, :, :, :1], k, v, attn_mask=self._mask)  # [b, n, 1, d]
        return y.reshape(1, b, n * d)  # [b, n, 1, d] -> [1, b, n·d]
