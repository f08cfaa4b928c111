from __future__ import annotations

import lzma
import random

import numpy as np
import pytest

from data_utils import unigram_bits_per_byte, xz_bits_per_byte
from data_utils.corpora.builtin import builtin_documents


def test_unigram_entropy() -> None:
    train = np.array([0] * 7 + [1] * 3 + [2] * 1)  # and one of each more, and id 3 once: 8, 4, 2, 1 of 15
    valid = np.array([0, 1, 2, 3], dtype=np.uint16)
    expected = -np.log2(np.array([8, 4, 2, 1]) / 15).sum() / (1 + 2 + 3 + 0)
    assert unigram_bits_per_byte(train, valid, np.array([1, 2, 3, 0]), 4) == pytest.approx(expected)


def test_xz_is_that_of_the_command_and_knows_the_training_text() -> None:
    train, held = ("".join(part).encode() for part in (builtin_documents()[:60], builtin_documents()[60:70]))
    command = len(lzma.compress(train + held, preset=9)) - len(lzma.compress(train, preset=9))
    assert xz_bits_per_byte(train, held) == pytest.approx(command * 8 / len(held), rel=0.01)
    assert xz_bits_per_byte(train, train[:50_000]) < 0.1 < 1 < xz_bits_per_byte(train, held) < 4
    noise = random.Random(1).randbytes(20_000)
    assert xz_bits_per_byte(train, noise) == pytest.approx(8, rel=0.03)
