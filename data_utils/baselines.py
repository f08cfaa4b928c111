"""Two figures that a trained model has to beat, in bits per byte of held-out text."""

import lzma
from concurrent.futures import ThreadPoolExecutor

import numpy as np


def unigram_bits_per_byte(
    train_tokens: np.ndarray, valid_tokens: np.ndarray, byte_lengths: np.ndarray, vocab_size: int
) -> float:
    """The cost of the held-out tokens under the frequencies of the training tokens, in bits per byte of their text.

    train_tokens, valid_tokens: integers [tokens]. byte_lengths: int64 [vocab_size], of each id's text. Every id is
    counted once more than it occurs, so that none is impossible.
    """
    counts = np.bincount(train_tokens, minlength=vocab_size).astype(np.float64) + 1.0
    found = np.bincount(valid_tokens, minlength=vocab_size)
    bits = float(found @ -np.log2(counts / counts.sum()))
    return bits / max(float(found @ byte_lengths), 1.0)


def xz_bits_per_byte(train_text: bytes, valid_text: bytes) -> float:
    """The cost of the held-out text, in bits per byte, to `xz -9` that has compressed the training text before:
    |xz(train + held)| - |xz(train)|."""
    # The preset's window of 64 MiB, but no larger than the text: the same output for a tenth of the memory.
    window = min(64 << 20, max(1 << 16, 1 << (len(train_text) + len(valid_text)).bit_length()))
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": window}]
    with ThreadPoolExecutor(2) as threads:  # lzma lets other threads run
        with_held, without = threads.map(
            lambda text: len(lzma.compress(text, filters=filters)), (train_text + valid_text, train_text)
        )
    return (with_held - without) * 8 / max(len(valid_text), 1)
