"""The samples of today's Megatron (`megatron.core.datasets.gpt_dataset.GPTDataset`), for those who compare with it.

All documents of all epochs are shuffled together and laid end to end. A sample begins every seq_length tokens of that,
and the samples are shuffled once more. A last epoch of which the run needs less than four fifths is shuffled by itself.
So the order depends on the length of the run, and its arrays are made again at every start.
"""

import itertools
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from data_utils.gpt2_dataset import GPT2Dataset, checked

SEPARATE_BELOW = 0.80  # of an epoch


def megatron_cut(documents: int, shares: Sequence[Fraction]) -> list[int]:
    """Borders, in documents, of the splits: len(shares) + 1 of them, by Megatron's own rounding."""
    proportions = np.array([float(share) for share in shares])
    ends = itertools.accumulate((proportions / proportions.sum()).tolist(), initial=0.0)
    return [int(round(end * float(documents))) for end in ends]


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

        def shuffled(values: np.ndarray) -> np.ndarray:
            random.shuffle(values)
            return values

        together = (epochs - 1, 1) if separate else (epochs,)
        self._documents = np.concatenate([shuffled(np.tile(np.arange(len(lengths)), times)) for times in together])
        self._ends = np.cumsum(lengths[self._documents])
        border = before_last if separate else samples
        self._shuffle = np.concatenate([shuffled(np.arange(border)), shuffled(np.arange(border, samples))])

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
        return checked(rows, self._dataset.tokenizer.vocab_size, self._dataset.source)
