"""Samples of `seq_length + 1` tokens, inputs and labels in one, out of one range of tokens."""

from __future__ import annotations

import numpy as np

from data_utils.tokenization import Tokenizer

MISSING = -1  # fills a window after the split's last token; as a label it counts for nothing


class GPT2Dataset:
    """Windows over `tokens[start:stop]`, one every `seq_length` tokens; each shares one token with the next.

    For training (`wrap`) only whole windows count, and a range shorter than one window is repeated until it fills it.
    For evaluation the last window is kept and filled with MISSING, and `start` begins one token earlier where there
    is one: then every token of the split is the label of exactly one window.
    """

    def __init__(self, tokens: np.ndarray, start: int, stop: int, seq_length: int, tokenizer: Tokenizer, *,
                 wrap: bool) -> None:
        assert 0 <= start < stop <= len(tokens) and seq_length > 0
        self.seq_length = seq_length
        self.num_tokens = stop - start
        self.start, self.stop = start, stop
        self._tokenizer = tokenizer
        self.eod = tokenizer.eod
        first = start if wrap else max(start - 1, 0)
        self._tokens = tokens[first:stop]
        self._split_tokens = tokens[start:stop]
        assert len(self._tokens) > 1, "a split of fewer than two tokens has no labels"
        if wrap and len(self._tokens) <= seq_length:
            self._tokens = np.resize(self._tokens, seq_length + 1)
        labels = len(self._tokens) - 1
        self._len = labels // seq_length if wrap else -(-labels // seq_length)

    def __len__(self) -> int:
        return self._len

    def __getitem__(self, index: int) -> np.ndarray:
        """int64 [seq_length + 1]."""
        if not 0 <= index < self._len:
            raise IndexError(f"sample {index} of {self._len}")
        begin = index * self.seq_length
        window = self._tokens[begin:begin + self.seq_length + 1]
        if len(window) <= self.seq_length:
            full = np.full(self.seq_length + 1, MISSING, dtype=np.int64)
            full[:len(window)] = window
            return full
        return window.astype(np.int64)

    @property
    def tokens(self) -> np.ndarray:
        """The split's own tokens, in the dtype of the file."""
        return self._split_tokens

    def text(self, max_bytes: int = 64 << 20) -> bytes | None:
        """The split as text, or None where it is longer than `max_bytes`; no EOD is in it."""
        if self.num_tokens > max_bytes:  # an id other than EOD is at least a byte
            return None
        text = self._tokenizer.decode_bytes(self._split_tokens)
        return text if len(text) <= max_bytes else None
