"""Samples of `seq_length + 1` tokens, inputs and labels in one: of one text, of a blend of texts, and in Megatron's
order.

A blend has a fixed count of samples of each component in every block of BLOCK samples: its weight's share by largest
remainder. A Feistel permutation chosen by the seed places them in the block, alike in every block. So a number leads to
its sample in O(1), and each component is read as if it were the only one: a permutation of its own in each of its
epochs.

The order of today's Megatron (`megatron.core.datasets.gpt_dataset.GPTDataset`) is for those who compare with it. All
documents of all epochs are shuffled together and laid end to end. A sample begins every seq_length tokens of that, and
the samples are shuffled once more. A last epoch of which the run needs less than four fifths is shuffled by itself. So
the order depends on the length of the run, and its arrays are made again at every start.
"""

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from data_utils.command_line import how_to_call
from data_utils.samplers import MISSING, SampleOrder, permute, seed_key
from data_utils.tokenizers.base import Tokenizer

BLOCK = 10_000
SEPARATE_BELOW = 0.80  # of an epoch


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
        self.seq_length, self.tokenizer, self.source = seq_length, tokenizer, source
        self.tokens = tokens[start:stop]  # the split's own, in the dtype of the file
        self.num_tokens = stop - start
        own = tokens[start if wrap else max(start - 1, 0) : stop]
        assert len(own) > 1, "a split of fewer than two tokens has no labels"
        if wrap and len(own) <= seq_length:
            own = np.resize(own, seq_length + 1)
        # A view with a row for each window: numpy copies the rows that an array of indices picks, without Python.
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
            return self.checked(self._windows[indices])
        rows = np.full((len(indices), self.seq_length + 1), MISSING, dtype=np.int64)
        rows[~last] = self.rows(indices[~last])
        rows[last, : len(self._rest)] = self.checked(self._rest[None])
        return rows

    def checked(self, rows: np.ndarray) -> np.ndarray:
        """`rows` of the file, of any integers, as int64. DamagedData, which names the file, if an id is outside the
        vocabulary."""
        size = self.tokenizer.vocab_size
        # Seen as unsigned a negative id is a large one, so that one pass finds both.
        if rows.size and int(rows.view(f"u{rows.dtype.itemsize}").max()) >= size:
            wrong = rows[(rows < 0) | (rows >= size)][0]
            raise DamagedData(
                f"{self.source} holds the token id {wrong}, but the vocabulary has {size:,}: the file is "
                f"damaged, or of another tokenizer ({how_to_call('inspect_data')} --verify tells)"
            )
        return rows.astype(np.int64)

    def text(self, max_bytes: int = 64 << 20) -> bytes | None:
        """The split as text, without EODs; None if it is longer than `max_bytes`."""
        if self.num_tokens > max_bytes:  # an id other than EOD is at least a byte
            return None
        text = self.tokenizer.decode_bytes(self.tokens)
        return text if len(text) <= max_bytes else None


# --- blends


def parse_blend(words: Sequence[str], flag: str) -> tuple[list[str], list[float] | None]:
    """Prefixes and their weights from the words of a flag: `0.7 a 0.3 b`, or `a b`, which has None for the weights.
    ValueError names `flag`."""

    def number(word: str) -> float | None:
        try:
            return float(word)
        except ValueError:
            return None

    weights = [number(word) for word in words[::2]]
    # As Megatron reads it: an odd number of words, or none of the first of each pair a number.
    if len(words) % 2 or all(weight is None for weight in weights):
        return list(words), None
    found = [weight for weight in weights if weight is not None and 0 < weight < math.inf]
    if len(found) < len(weights):
        raise ValueError(
            f"{flag} {' '.join(words)}: give only prefixes, or a weight above 0 before each of them, "
            "such as 0.7 a 0.3 b"
        )
    return list(words[1::2]), found


def block_counts(weights: Sequence[float], names: Sequence[str], flag: str) -> np.ndarray:
    """int64 [components]: how many samples of a block each component has. A count differs by less than 1 from the
    weight's share of BLOCK. ValueError names a component whose count is 0."""
    shares = np.array(weights, dtype=np.float64)
    shares *= BLOCK / shares.sum()
    counts = np.floor(shares).astype(np.int64)
    most_left = np.argsort(counts - shares, kind="stable")
    counts[most_left[: BLOCK - counts.sum()]] += 1
    for name, weight, count in zip(names, weights, counts, strict=True):
        if count == 0:
            raise ValueError(
                f"{flag}: {name} has so small a part, {weight:g}, that it gets none of {BLOCK:,} samples: "
                "leave it out or give it more"
            )
    return counts


class BlendedDataset:
    """Several datasets mixed: sample number -> row, in an order that `seed` chooses. A loader needs no other order.

    For training (`wrap`) it has no end. For evaluation no component is shuffled, and it ends before one would repeat.

    counts: int64 [components], from `block_counts`.
    """

    def __init__(self, components: Sequence[GPT2Dataset], counts: np.ndarray, *, wrap: bool, seed: int = 0) -> None:
        self.components, self._counts = tuple(components), counts
        self.seq_length = components[0].seq_length
        self.num_tokens = sum(component.num_tokens for component in components)
        sizes = np.array(list(map(len, components)))
        self._orders = [SampleOrder(int(size), seed + number, wrap) for number, size in enumerate(sizes)]
        # For each place in a block: its component, and how many samples of the component come before it.
        self._component = np.searchsorted(np.cumsum(counts), permute(np.arange(BLOCK), BLOCK, seed_key(seed)), "right")
        self._before = np.empty(BLOCK, dtype=np.int64)
        for number, count in enumerate(counts):
            self._before[self._component == number] = np.arange(count)
        self._len = int(sizes.sum())
        if not wrap:  # where each component's second epoch would begin
            blocks, left = np.divmod(sizes, counts)
            places = [np.flatnonzero(self._component == number)[rest] for number, rest in enumerate(left)]
            self._len = int((blocks * BLOCK + places).min())

    def shuffled(self, seed: int) -> "BlendedDataset":
        """The same components for training, in the order of another seed."""
        return BlendedDataset(self.components, self._counts, wrap=True, seed=seed)

    def __len__(self) -> int:
        return self._len

    def rows(self, numbers: np.ndarray) -> np.ndarray:
        """int64 [k] -> int64 [k, seq_length + 1]."""
        blocks, places = np.divmod(numbers, BLOCK)
        which = self._component[places]
        own_numbers = blocks * self._counts[which] + self._before[places]  # of the component's own samples
        rows = np.empty((len(numbers), self.seq_length + 1), dtype=np.int64)
        for number, (component, order) in enumerate(zip(self.components, self._orders, strict=True)):
            own = which == number
            rows[own] = component.rows(order(own_numbers[own]))
        return rows


# --- Megatron's order


def megatron_cut(documents: int, shares: Sequence[Fraction]) -> list[int]:
    """Borders, in documents, of the splits: len(shares) + 1 of them, by Megatron's own rounding."""
    proportions = np.array([float(share) for share in shares])
    ends = itertools.accumulate((proportions / proportions.sum()).tolist(), initial=0.0)
    return [round(end * documents) for end in ends]


class MegatronSamples:
    """Sample number -> row, in Megatron's order. A loader needs no other order.

    dataset: the training split. document_starts: int64 [documents + 1], where its documents begin in `dataset.tokens`,
    and the end. num_samples: of the whole run. A loader may prepare samples beyond them: these begin again.
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

    def rows(self, numbers: np.ndarray) -> np.ndarray:
        """int64 [k] -> int64 [k, seq_length + 1]."""
        tokens, size = self._dataset.tokens, self.seq_length + 1
        rows = np.empty((len(numbers), size), dtype=tokens.dtype)
        for row, sample in zip(rows, self._shuffle[numbers % len(self)].tolist(), strict=True):
            begin, filled = sample * self.seq_length, 0
            place = int(np.searchsorted(self._ends, begin, "right"))
            while filled < size:
                stop = int(self._starts[self._documents[place] + 1])
                first = stop - (int(self._ends[place]) - begin - filled)
                part = tokens[first : min(stop, first + size - filled)]
                row[filled : filled + len(part)] = part
                filled += len(part)
                place += 1
        return self._dataset.checked(rows)
