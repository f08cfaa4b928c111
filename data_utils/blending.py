"""Several data sets mixed in proportion to weights: which one a global sample number reads, and which sample of it.

In every block of BLOCK samples a component has a fixed count, its weight's share by largest remainder. A Feistel
permutation chosen by the seed places them in the block, alike in every block. So a number leads to its sample in O(1),
and each component is read as if it were alone: a permutation of its own in each of its own epochs.
"""

import math
from collections.abc import Sequence

import numpy as np

from data_utils.gpt2_dataset import GPT2Dataset
from data_utils.samplers import SampleOrder, permute, seed_key

BLOCK = 10_000


def parse_blend(words: Sequence[str], flag: str) -> tuple[list[str], list[float] | None]:
    """Prefixes and their weights from the words of a flag: `0.7 a 0.3 b`, or `a b`, which has None for the weights.
    ValueError names `flag`."""
    weights: list[float | None] = []
    for word in words[::2]:
        try:
            weights.append(float(word))
        except ValueError:
            weights.append(None)
    # As Megatron reads it: an odd number of words, or none of the first of each pair a number.
    if len(words) % 2 or all(weight is None for weight in weights):
        return list(words), None
    found = [weight for weight in weights if weight is not None and math.isfinite(weight) and weight > 0]
    if len(found) < len(weights):
        raise ValueError(
            f"{flag} {' '.join(words)}: give prefixes alone, or a weight above 0 before each of them, "
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


class BlendedOrder:
    """Global sample number -> index in the components laid end to end, without an end.

    sizes: samples of each component. counts: int64 [components], from `block_counts`.
    """

    def __init__(self, sizes: Sequence[int], counts: np.ndarray, seed: int, shuffle: bool = True) -> None:
        self._sizes, self._counts = np.array(sizes), counts
        self._starts = np.cumsum(self._sizes) - self._sizes
        self._orders = [SampleOrder(size, seed + number, shuffle) for number, size in enumerate(sizes)]
        # For each place in a block: its component, and how many samples of the component come before it.
        self._component = np.searchsorted(np.cumsum(counts), permute(np.arange(BLOCK), BLOCK, seed_key(seed)), "right")
        self._before = np.empty(BLOCK, dtype=np.int64)
        for number, count in enumerate(counts):
            self._before[self._component == number] = np.arange(count)

    def __call__(self, numbers: np.ndarray) -> np.ndarray:
        blocks, places = np.divmod(numbers, BLOCK)
        component = self._component[places]
        number = blocks * self._counts[component] + self._before[places]  # of the component's own samples
        indices = np.empty_like(numbers)
        for which, order in enumerate(self._orders):
            own = component == which
            indices[own] = self._starts[which] + order(number[own])
        return indices

    def until_one_repeats(self) -> int:
        """How many samples there are before a component begins its second epoch."""
        blocks, left = np.divmod(self._sizes, self._counts)
        return min(
            int(block) * BLOCK + int(np.flatnonzero(self._component == which)[rest])
            for which, (block, rest) in enumerate(zip(blocks, left, strict=True))
        )


class BlendedDataset:
    """Several datasets laid end to end, for a `BlendedOrder` to choose from.

    For evaluation (`wrap` False) the samples are in such an order already, not shuffled within a component, and end
    before one of the components would repeat.
    """

    def __init__(self, components: Sequence[GPT2Dataset], counts: np.ndarray, *, wrap: bool) -> None:
        self.components = tuple(components)
        self.seq_length = components[0].seq_length
        self.num_tokens = sum(component.num_tokens for component in components)
        self._counts = counts
        self._ends = np.cumsum([len(component) for component in components])
        self._order = None if wrap else self.order(0, shuffle=False)
        self._len = int(self._ends[-1]) if self._order is None else self._order.until_one_repeats()

    def order(self, seed: int, shuffle: bool = True) -> BlendedOrder:
        """The order in which training reads the components; evaluation leaves `shuffle` off."""
        return BlendedOrder([len(component) for component in self.components], self._counts, seed, shuffle)

    def __len__(self) -> int:
        return self._len

    def rows(self, indices: np.ndarray) -> np.ndarray:
        """int64 [k] -> int64 [k, seq_length + 1]."""
        indices = indices if self._order is None else self._order(indices)
        which = np.searchsorted(self._ends, indices, "right")
        rows = np.empty((len(indices), self.seq_length + 1), dtype=np.int64)
        for number, component in enumerate(self.components):
            own = which == number
            rows[own] = component.rows(indices[own] - (self._ends[number] - len(component)))
        return rows
