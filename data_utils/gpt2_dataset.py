"""Datasets of samples with `seq_length + 1` tokens, from which inputs and labels are cut: a text, a blend, and
Megatron's order.

A blend mixes several texts, its components, in blocks of `BLEND_BLOCK` samples. In every block, a component has the
same number of samples, in proportion to its weight (rounded by largest remainder), and at the same positions. A Feistel
permutation, which depends on the seed, gives the positions. Any sample is found in O(1). Each component is read in the
same order as without a blend, with a new permutation in each of its epochs.

Megatron's order (`megatron.core.datasets.gpt_dataset.GPTDataset`) allows comparisons with Megatron. The documents of
all epochs are shuffled together and concatenated. A sample begins every seq_length tokens, and the samples are shuffled
again. If the run needs less than 80 % of the last epoch, that epoch is shuffled separately. Megatron's order depends on
the length of the run, so the arrays of the order are computed at every start.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np

from data_utils.command_line import how_to_call
from data_utils.samplers import MISSING, SampleOrder, permutation_key, permute
from data_utils.tokenizers.base import Tokenizer

BLEND_BLOCK = 10_000
SEPARATE_BELOW = 0.80  # If the run needs a smaller share of the last epoch, that epoch is shuffled separately.


class DamagedData(ValueError):
    """Raised if a file contains a token id outside the vocabulary, or was changed while the run reads it."""

    cause = "damaged data"


class GPT2Dataset:
    """Windows over `tokens[start:stop]`, one every `seq_length` tokens. Consecutive windows share one token.

    For training, an incomplete last window is dropped, and a range shorter than one window is repeated to fill it. For
    evaluation, the last window is padded with MISSING, and the first window begins one token before `start` if there is
    one, so that every token of the split is the label of exactly one window.

    source: the name of the token file in error messages.
    changed_file: a function that returns the name of a file that was changed, or "", as `TokenFile.changed_file`.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        start: int,
        stop: int,
        seq_length: int,
        tokenizer: Tokenizer,
        *,
        training: bool,
        source: str = "the data",
        changed_file: Callable[[], str] = str,
    ) -> None:
        self.changed_file = changed_file
        self.seq_length, self.tokenizer, self.source = seq_length, tokenizer, source
        self._tokens = tokens[start:stop]
        self.num_tokens = stop - start
        readable = tokens[start if training else max(start - 1, 0) : stop]
        assert len(readable) > 1, "a split of fewer than two tokens has no labels"
        if training and len(readable) <= seq_length:
            readable = np.resize(readable, seq_length + 1)
        # `_windows` is a view with a row for each window. Indexing the view with an array copies rows without a loop.
        num_windows, step = (len(readable) - 1) // seq_length, readable.strides[0]
        self._windows = np.lib.stride_tricks.as_strided(
            readable, (num_windows, seq_length + 1), (seq_length * step, step), writeable=False
        )
        self._rest = readable[num_windows * seq_length :]  # `_rest` is the last token, or the incomplete last window.
        self._len = num_windows + (not training and len(self._rest) > 1)

    def __len__(self) -> int:
        return self._len

    @property
    def tokens(self) -> np.ndarray:
        """The tokens of the split, in the dtype of the file. Raises DamagedData if the file was changed."""
        self.check_unchanged()
        return self._tokens

    def rows(self, indices: np.ndarray) -> np.ndarray:
        """Return the windows of `indices` [k] as int64 [k, seq_length + 1]. Raises DamagedData if an id is outside the
        vocabulary or the file was changed."""
        self.check_unchanged()
        incomplete = indices >= len(self._windows)
        if not incomplete.any():
            return self.check_ids(self._windows[indices])
        rows = np.full((len(indices), self.seq_length + 1), MISSING, dtype=np.int64)
        rows[~incomplete] = self.rows(indices[~incomplete])
        rows[incomplete, : len(self._rest)] = self.check_ids(self._rest[None])
        return rows

    def check_unchanged(self) -> None:
        """Raise DamagedData if the file was changed. Reading a memory map behind the end of a shortened file would kill
        the process."""
        if name := self.changed_file():
            raise DamagedData(
                f"{name} was changed while this run reads it: restore it; the same command continues from the last "
                "checkpoint"
            )

    def check_ids(self, rows: np.ndarray) -> np.ndarray:
        """Convert integer `rows` to int64. Raises DamagedData, which names the file, if an id is outside the
        vocabulary."""
        size = self.tokenizer.vocab_size
        # As an unsigned integer, a negative id is large, so one maximum finds negative ids and too large ids.
        if rows.size and int(rows.view(f"u{rows.dtype.itemsize}").max()) >= size:
            wrong = rows[(rows < 0) | (rows >= size)][0]
            raise DamagedData(
                f"{self.source} holds the token id {wrong}, but the vocabulary has {size:,}: the file is "
                f"damaged, or was made by a different tokenizer: check it with {how_to_call('inspect_data')} --verify"
            )
        return rows.astype(np.int64)

    def text(self, max_bytes: int = 64 << 20) -> bytes | None:
        """Return the text of the split without EODs, or None if the text is longer than `max_bytes`."""
        if self.num_tokens > max_bytes:  # Each id except EOD stands for at least one byte.
            return None
        text = self.tokenizer.decode_bytes(self.tokens)
        return text if len(text) <= max_bytes else None


# --- blends


def parse_blend(words: Sequence[str], flag: str) -> tuple[list[str], list[float] | None]:
    """Parse the words of a flag, `0.7 a 0.3 b` or `a b`, into prefixes and weights (None for `a b`). A ValueError names
    `flag`."""

    try:
        weights = [float(word) for word in words[::2]]
    except ValueError:
        return list(words), None
    if len(words) % 2:  # As in Megatron, the names of an odd number of prefixes may be numbers.
        return list(words), None
    if not all(0 < weight < math.inf for weight in weights):
        raise ValueError(f"{flag} {' '.join(words)}: give only prefixes, or a weight above 0 before each of them")
    return list(words[1::2]), weights


def block_counts(weights: Sequence[float], names: Sequence[str], flag: str) -> np.ndarray:
    """Return each component's number of samples in a block, int64 [components]. A count differs by less than 1 from the
    weight's share of BLEND_BLOCK. A ValueError names a component whose count is 0."""
    shares = np.array(weights, dtype=np.float64)
    shares *= BLEND_BLOCK / shares.sum()
    counts = np.floor(shares).astype(np.int64)
    by_remainder = np.argsort(counts - shares, kind="stable")
    counts[by_remainder[: BLEND_BLOCK - counts.sum()]] += 1
    for name, weight, count in zip(names, weights, counts, strict=True):
        if count == 0:
            raise ValueError(
                f"{flag}: the weight {weight:g} of {name} is too small: it gets none of {BLEND_BLOCK:,} samples; "
                "leave it out or give it a larger weight"
            )
    return counts


class BlendedDataset:
    """Mixes several datasets in an order that depends on `seed`. A loader does not shuffle the blend again.

    A training blend repeats its components without end. For evaluation no component is shuffled, and the blend ends
    before a component would repeat.

    counts: int64 [components], from `block_counts`.
    """

    def __init__(self, components: Sequence[GPT2Dataset], counts: np.ndarray, *, training: bool, seed: int = 0) -> None:
        self.components, self._counts = tuple(components), counts
        self.seq_length = components[0].seq_length
        sizes = np.array(list(map(len, components)))
        self._orders = [SampleOrder(int(size), seed + index, training) for index, size in enumerate(sizes)]
        # For each position in a block, `_component` is its component, and `_before` counts the earlier samples of this
        # component in the block.
        self._component = np.searchsorted(
            np.cumsum(counts), permute(np.arange(BLEND_BLOCK), BLEND_BLOCK, permutation_key(seed)), "right"
        )
        self._before = np.empty(BLEND_BLOCK, dtype=np.int64)
        for index, count in enumerate(counts):
            self._before[self._component == index] = np.arange(count)
        self._len = int(sizes.sum())
        if not training:  # Find the positions at which each component's second epoch would begin.
            blocks, remainders = np.divmod(sizes, counts)
            ends = [np.flatnonzero(self._component == index)[remainder] for index, remainder in enumerate(remainders)]
            self._len = int((blocks * BLEND_BLOCK + ends).min())

    def shuffled(self, seed: int) -> "BlendedDataset":
        """Return a training blend of the same components in the order of `seed`."""
        return BlendedDataset(self.components, self._counts, training=True, seed=seed)

    def __len__(self) -> int:
        return self._len

    def rows(self, indices: np.ndarray) -> np.ndarray:
        """Return the samples of `indices` [k] as int64 [k, seq_length + 1]."""
        blocks, positions = np.divmod(indices, BLEND_BLOCK)
        components = self._component[positions]
        component_sample_ids = blocks * self._counts[components] + self._before[positions]
        rows = np.empty((len(indices), self.seq_length + 1), dtype=np.int64)
        for index, (component, order) in enumerate(zip(self.components, self._orders, strict=True)):
            from_component = components == index
            rows[from_component] = component.rows(order(component_sample_ids[from_component]))
        return rows


# --- Megatron's order


def megatron_split_borders(documents: int, shares: Sequence[Fraction]) -> list[int]:
    """Return the borders of the splits, in documents, with Megatron's rounding. There are len(shares) + 1 borders."""
    proportions = np.array([float(share) for share in shares])
    ends = itertools.accumulate((proportions / proportions.sum()).tolist(), initial=0.0)
    return [round(end * documents) for end in ends]


class MegatronOrderDataset:
    """The samples of a training split in Megatron's order. A loader does not shuffle these samples again.

    dataset: the training split.
    document_starts: int64 [documents + 1], the index in `dataset.tokens` at which each document begins, and then the
        number of tokens.
    num_samples: the number of samples of the whole run. A loader that reads ahead beyond the end of the run gets the
        first samples again.
    """

    def __init__(self, dataset: GPT2Dataset, document_starts: np.ndarray, *, seed: int, num_samples: int) -> None:
        self.seq_length = s = dataset.seq_length
        self._dataset, self._starts = dataset, document_starts
        lengths = np.diff(document_starts)
        per_epoch = int(document_starts[-1] - document_starts[0])
        epochs = max(1, -(-(num_samples * s + 1) // per_epoch))
        samples, before_last = (epochs * per_epoch - 1) // s, ((epochs - 1) * per_epoch - 1) // s
        separate = epochs > 1 and num_samples - before_last < int(SEPARATE_BELOW * ((per_epoch - 1) // s))
        random = np.random.RandomState(seed)

        def shuffled(*parts: np.ndarray) -> np.ndarray:
            for part in parts:
                random.shuffle(part)
            return np.concatenate(parts)

        together = (epochs - 1, 1) if separate else (epochs,)
        self._documents = shuffled(*(np.tile(np.arange(len(lengths)), times) for times in together))
        self._ends = np.cumsum(lengths[self._documents])
        border = before_last if separate else samples
        self._shuffle = shuffled(np.arange(border), np.arange(border, samples))

    def __len__(self) -> int:
        return len(self._shuffle)

    def rows(self, indices: np.ndarray) -> np.ndarray:
        """Return the samples of `indices` [k] as int64 [k, seq_length + 1]."""
        tokens, size = self._dataset.tokens, self.seq_length + 1
        rows = np.empty((len(indices), size), dtype=tokens.dtype)
        for row, sample in zip(rows, self._shuffle[indices % len(self)].tolist(), strict=True):
            start, filled = sample * self.seq_length, 0
            position = int(np.searchsorted(self._ends, start, "right"))
            while filled < size:
                document_end = int(self._starts[self._documents[position] + 1])
                token = document_end - (int(self._ends[position]) - start - filled)
                part = tokens[token : min(document_end, token + size - filled)]
                row[filled : filled + len(part)] = part
                filled += len(part)
                position += 1
        return self._dataset.check_ids(rows)
