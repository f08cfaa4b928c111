"""Samples of `seq_length + 1` tokens, inputs and labels in one, out of one range of tokens."""

import numpy as np

from data_utils.command_line import how_to_call
from data_utils.tokenizers.base import Tokenizer

MISSING = -1  # fills a window after the split's last token; as a label it counts for nothing


class DamagedData(ValueError):
    """A file holds a token id that no tokenizer of this vocabulary has."""

    cause = "damaged data"


class GPT2Dataset:
    """Windows over `tokens[start:stop]`, one every `seq_length` tokens; each shares one token with the next.

    For training (`wrap`) only whole windows count, and a range shorter than one window is repeated until it fills one.
    For evaluation the last window is kept and filled with MISSING, and the first begins one token before `start` if
    there is one: every token of the split is then the label of exactly one window. source: the file's name in errors.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        start: int,
        stop: int,
        seq_length: int,
        tokenizer: Tokenizer,
        *,
        wrap: bool,
        source: str = "the data",
    ) -> None:
        assert 0 <= start < stop <= len(tokens) and seq_length > 0
        self.seq_length = seq_length
        self.num_tokens = stop - start
        self.source = source
        self.tokenizer = tokenizer
        first = start if wrap else max(start - 1, 0)
        own = tokens[first:stop]
        self.tokens = tokens[start:stop]  # the split's own, in the dtype of the file
        assert len(own) > 1, "a split of fewer than two tokens has no labels"
        if wrap and len(own) <= seq_length:
            own = np.resize(own, seq_length + 1)
        # A view of one row a window: picked by an array of indices, numpy copies row by row without Python.
        whole, step = (len(own) - 1) // seq_length, own.strides[0]
        self._windows = np.lib.stride_tricks.as_strided(
            own, (whole, seq_length + 1), (seq_length * step, step), writeable=False
        )
        self._rest = own[whole * seq_length :]  # an input without a label, or evaluation's last window
        self._len = whole + (not wrap and len(self._rest) > 1)

    def __len__(self) -> int:
        return self._len

    def rows(self, indices: np.ndarray) -> np.ndarray:
        """int64 [k], in range(len(self)) -> int64 [k, seq_length + 1]. DamagedData if an id is outside the
        vocabulary."""
        last = indices >= len(self._windows)
        if not last.any():
            return checked(self._windows[indices], self.tokenizer.vocab_size, self.source)
        assert self._len > len(self._windows), "training has only whole windows"
        rows = np.full((len(indices), self.seq_length + 1), MISSING, dtype=np.int64)
        rows[~last] = self.rows(indices[~last])
        rows[last, : len(self._rest)] = checked(self._rest[None], self.tokenizer.vocab_size, self.source)
        return rows

    def __getitem__(self, index: int) -> np.ndarray:
        """int64 [seq_length + 1]."""
        if not 0 <= index < self._len:
            raise IndexError(f"sample {index} of {self._len}")
        row: np.ndarray = self.rows(np.array([index]))[0]
        return row

    def text(self, max_bytes: int = 64 << 20) -> bytes | None:
        """The split as text, without EODs; None if it is longer than `max_bytes`."""
        if self.num_tokens > max_bytes:  # an id other than EOD is at least a byte
            return None
        text = self.tokenizer.decode_bytes(self.tokens)
        return text if len(text) <= max_bytes else None


def checked(rows: np.ndarray, vocab_size: int, source: str) -> np.ndarray:
    """`rows`, of any integers, as int64, contiguous. DamagedData, which names `source`, if an id is outside the
    vocabulary."""
    # Seen as unsigned a negative id is a large one, so that one pass finds both.
    if rows.size and int(rows.view(f"u{rows.dtype.itemsize}").max()) >= vocab_size:
        wrong = rows[(rows < 0) | (rows >= vocab_size)][0]
        raise DamagedData(
            f"{source} holds the token id {wrong}, but the vocabulary has {vocab_size:,}: the file is "
            f"damaged, or of another tokenizer ({how_to_call('inspect_data')} --verify tells)"
        )
    return rows.astype(np.int64)
