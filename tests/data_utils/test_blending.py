"""Blends: how often each part is read, in what order, and what a command line says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_utils import MISSING, BlendedDataset, GPT2Dataset, SampleOrder, build_splits
from data_utils.blending import BLOCK, BlendedOrder, block_counts, parse_blend
from tests.data_utils.made import BYTES, global_batches, write_pair


@pytest.mark.parametrize(
    ("words", "prefixes", "weights"),
    [
        (["a"], ["a"], None),
        (["a", "b"], ["a", "b"], None),
        (["a", "b", "c"], ["a", "b", "c"], None),
        (["0.7", "a", "0.3", "b"], ["a", "b"], [0.7, 0.3]),
        (["30", "1", "70", "2"], ["1", "2"], [30, 70]),
        (["1", "a"], ["a"], [1.0]),
        (["1", "2", "3"], ["1", "2", "3"], None),
    ],
)
def test_a_blend_is_read_as_megatron_reads_it(words: list[str], prefixes: list[str], weights: Any) -> None:
    assert parse_blend(words, "--data-path") == (prefixes, weights)


@pytest.mark.parametrize(
    "words",
    [
        ["0.7", "a", "b", "c"],
        ["0", "a", "1", "b"],
        ["-1", "a", "1", "b"],
        ["nan", "a", "1", "b"],
        ["inf", "a", "1", "b"],
    ],
)
def test_weights_that_are_none_are_refused(words: list[str]) -> None:
    with pytest.raises(ValueError, match="--data-path .*a weight above 0 before each"):
        parse_blend(words, "--data-path")


def test_counts_of_a_block_are_within_one_of_the_weights() -> None:
    rng = np.random.default_rng(0)
    for parts in (1, 2, 3, 7, 40):
        for _ in range(20):
            weights = rng.random(parts) + 0.01
            counts = block_counts(list(weights), ["x"] * parts, "--data-path")
            assert counts.sum() == BLOCK and (abs(counts - BLOCK * weights / weights.sum()) < 1).all()
    assert block_counts([0.7, 0.3], ["a", "b"], "").tolist() == [7000, 3000]
    with pytest.raises(ValueError, match=r"--data-path: b has so small a part, 1e-05, that it gets none of 10,000"):
        block_counts([1.0, 1e-5], ["a", "b"], "--data-path")


def test_every_block_has_its_counts_and_every_part_its_own_epochs() -> None:
    sizes, counts = [900, 5000, 37], np.array([7000, 2990, 10])
    order = BlendedOrder(sizes, counts, seed=3)
    indices = order(np.arange(4 * BLOCK))
    which = np.searchsorted(np.cumsum(sizes), indices, "right")
    for block in which.reshape(4, BLOCK):
        assert np.bincount(block).tolist() == counts.tolist()
        assert all(abs(np.mean(tenth == 0) - 0.7) < 0.1 for tenth in block.reshape(10, -1))  # mixed, not in a row
    for number, size in enumerate(sizes):
        expected = SampleOrder(size, 3 + number)(np.arange(int(4 * counts[number])))
        assert (indices[which == number] - sum(sizes[:number]) == expected).all()
    other = BlendedOrder(sizes, counts, seed=4)(np.arange(BLOCK))
    assert not np.array_equal(other, indices[:BLOCK])
    for place in (0, 1, 777, BLOCK, 3 * BLOCK + 5):  # any number leads to its sample at once
        assert order(np.arange(place, place + 3)).tolist() == indices[place : place + 3].tolist()


def part(value: int, samples: int, *, wrap: bool) -> GPT2Dataset:
    """Samples whose first tokens are their numbers, followed by `value`."""
    tokens = np.full(samples * 4 + 1, value, dtype=np.uint16)
    tokens[:-1:4] = np.arange(samples) % 200
    return GPT2Dataset(tokens, 0, len(tokens), 4, BYTES, wrap=wrap)


def test_a_loader_reads_the_same_blend_under_every_layout_and_after_a_resume() -> None:
    blend = BlendedDataset([part(251, 60, wrap=True), part(252, 30, wrap=True)], np.array([7000, 3000]), wrap=True)
    assert (len(blend), blend.num_tokens, blend.seq_length) == (90, 362, 4)

    def load(size: int, micro: int, steps: int, consumed: int = 0) -> np.ndarray:
        given: dict[str, Any] = {"consumed_samples": consumed, "prefetch": 0}
        return global_batches(blend, blend.order(5), steps, size=size, micro=micro, **given)

    whole = load(1, 8, 1250)  # 10,000 samples: one block
    assert [(whole[:, 1] == value).sum() for value in (251, 252)] == [7000, 3000]
    assert (load(2, 4, 1250) == whole).all() and (load(4, 2, 1250) == whole).all()
    assert (load(1, 8, 10, consumed=7777) == whole[7777:7857]).all()
    first_epoch = whole[whole[:, 1] == 252][:30, 0]
    assert sorted(first_epoch.tolist()) == list(range(30)) and first_epoch.tolist() != list(range(30))


def test_evaluation_reads_by_the_weights_and_nothing_twice() -> None:
    parts = [part(251, 60, wrap=False), part(252, 5000, wrap=False)]
    blend = BlendedDataset(parts, np.array([5000, 5000]), wrap=False)
    rows = blend.rows(np.arange(len(blend)))
    assert (rows[rows[:, 1] == 251, 0] == np.arange(60)).all()  # all of the first, in order
    assert abs((rows[:, 1] == 252).sum() - 60) < 25 and (rows != MISSING).all()
    assert len({tuple(row) for row in rows}) == len(rows)


def pair(folder: Path, name: str, value: int, documents: int) -> str:
    return write_pair(folder / name, [[value] * 19 + [BYTES.eod]] * documents)


def splits(**more: Any) -> Any:
    return build_splits(
        **{"train_data": (), "split": "80,20", "tokenizer": BYTES, "seq_length": 8, "log": lambda line: None, **more}
    )


def test_the_command_line_of_a_blend(tmp_path: Path) -> None:
    a, b, c = pair(tmp_path, "a", 1, 50), pair(tmp_path, "b", 2, 100), pair(tmp_path, "c", 3, 10)
    made = splits(data_path=["0.7", a, "0.3", b])
    assert len(made.train) == 99 + 199 and made.train.num_tokens == 800 + 1600  # of each pair four fifths of documents
    assert made.description[0] == (
        f"train: 70.00 % of the samples out of 800 tokens, 99 samples, 80.00 % of {a} (asked: 80.00 %)"
    )
    dataset, order = made.training_samples(seed=1, num_samples=10)
    rows = dataset.rows(order(np.arange(BLOCK)))
    assert [(rows == value).any(axis=1).sum() for value in (1, 2)] == [7000, 3000]
    held = made.valid.rows(np.arange(len(made.valid)))
    assert (held == 1).any() and (held == 2).any()

    by_size = splits(data_path=[a, b])
    assert "33.22 % of the samples" in by_size.description[0]  # 99 of 298
    one = splits(data_path=[a])
    assert one.fingerprint == splits(data_path=["5", a]).fingerprint and isinstance(one.train, GPT2Dataset)
    others = [splits(data_path=[*words]) for words in (("0.3", a, "0.7", b), ("0.3", b, "0.7", a))]
    assert len({each.fingerprint for each in (one, made, by_size, *others)}) == 5

    separate = splits(data_path=[a], valid_data_path=["1", b, "1", c], test_data_path=[c], split="1")
    assert len(separate.train) == 124 and separate.test.num_tokens == 200 and len(separate.valid.components) == 2
    with pytest.raises(FileNotFoundError, match="--valid-data-path: no such file"):
        splits(data_path=[a], valid_data_path=[str(tmp_path / "none")])
    with pytest.raises(ValueError, match="--data-order megatron is that of one prefix"):
        splits(data_path=[a, b], data_order="megatron")
