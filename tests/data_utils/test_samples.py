"""Test datasets of samples, their order, blends, batch schedules and loaders."""

from __future__ import annotations

import itertools
import os
import shutil
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from data_utils import (
    MISSING,
    BatchLoader,
    BatchSchedule,
    BlendedDataset,
    DamagedData,
    GPT2Dataset,
    SampleOrder,
    build_splits,
    evaluation_batches,
)
from data_utils.gpt2_dataset import BLEND_BLOCK, MegatronOrderDataset, parse_blend
from data_utils.indexed_dataset import IndexedDataset
from tests.data_utils.data_files import BYTES, write_pair

# --- the order


@pytest.mark.parametrize(
    "size, crc32",
    [
        (3, 0xA13A7AC2),
        (17, 0x3DE96D9F),
        (1000, 0x7F8F24C6),
        (10**15, 0xEF843CD7),
    ],
)
def test_the_order_never_changes(size: int, crc32: int) -> None:
    """Checkpoints only store the number of consumed samples, so a resumed run needs the same order."""
    numbers = np.concatenate([np.arange(500), np.arange(max(0, size - 10), size + 10), [2 * size, 7 * size + 1]])
    found = [SampleOrder(size, seed)(numbers).astype("<i8").tobytes() for seed in (0, 1234, 2**31 - 1)]
    assert zlib.crc32(b"".join(found)) == crc32


@pytest.mark.parametrize("size", [1, 2, 3, 16, 17, 1023, 1025, 20_000])
def test_every_epoch_is_a_new_permutation(size: int) -> None:
    epochs = [SampleOrder(size, seed)(np.arange(size) + start) for seed, start in ((3, 0), (3, size), (4, 0))]
    assert (np.sort(epochs) == np.arange(size)).all()
    assert size < 10 or len({tuple(epoch) for epoch in [*epochs, np.arange(size)]}) == 4
    assert SampleOrder(size, 4, shuffle=False)(np.arange(2 * size)).tolist() == [*range(size)] * 2


# --- batch schedules, compared with Megatron's

# (start, increment, samples, final). In the second case, Megatron's rounding delays the increase of the batch size
# after 4017 samples by one sample.
RAMPS = [(4, 2, 50, 12), (1, 1, 4223, 124), (8, 8, 5, 64)]


@pytest.mark.parametrize("ramp", RAMPS, ids=str)
def test_rampup_equals_megatron_core(ramp: tuple[int, int, int, int]) -> None:
    start, increment, samples, final = ramp
    calculator = pytest.importorskip("megatron.core.num_microbatches_calculator")
    theirs = calculator.RampupBatchsizeNumMicroBatchesCalculator(final, 1, 1, False, 1, start, increment, samples)
    ours = BatchSchedule.rampup(*ramp)
    for consumed in (first + more for first, _ in ours.milestones for more in (-1, 0, 1)):
        theirs.update(max(0, consumed), False)
        assert ours.size(max(0, consumed)) == theirs.get_current_global_batch_size(), consumed
    for schedule in (BatchSchedule.rampup(1, 1, 0, final), BatchSchedule.rampup(final, 3, 7, final)):
        # For these schedules, in which the batch size never changes, Megatron's class divides by zero.
        assert schedule.size(0) == schedule.final == final


GROWING = BatchSchedule(((0, 7), (2, 9), (5, 11), (100, 64)))


@pytest.mark.parametrize(
    "schedule",
    [BatchSchedule.constant(5), BatchSchedule.rampup(4, 2, 50, 12), BatchSchedule.rampup(1, 1, 4, 9), GROWING],
    ids=str,
)
def test_schedule_methods_equal_single_steps(schedule: BatchSchedule) -> None:
    for begin in (0, 3, 60, 1000):
        consumed, passed = begin, []
        for steps in range(40):
            passed.append(consumed)
            assert schedule.samples_after_steps(steps, begin) == consumed
            assert schedule.steps_until(consumed, begin) == steps and schedule.steps_until(consumed + 1, begin) > steps
            consumed += schedule.size(consumed)
        assert [*itertools.islice(itertools.chain.from_iterable(schedule.spans(begin)), 40)] == passed
        for steps in (0, 39) if begin == 0 else ():
            assert schedule.samples_before_steps(steps).tolist() == passed[: steps + 1]


# --- loaders


class Numbered:
    """A dataset whose samples are their indices."""

    seq_length = 0

    def __len__(self) -> int:
        return 3000

    def rows(self, indices: np.ndarray) -> np.ndarray:
        return indices[:, None]


IN_ORDER = SampleOrder(3000, 0, shuffle=False)
ONE_RANK: dict[str, Any] = {"data_parallel_rank": 0, "data_parallel_size": 1}


def test_errors_of_the_thread_reach_the_caller() -> None:
    loader = BatchLoader(
        Numbered(),
        IN_ORDER,
        micro_batch_size=2,
        schedule=BatchSchedule.constant(2),
        collate_fn=lambda batch, numbers: batch if numbers[0] < 4 else batch[9],
        **ONE_RANK,
    )
    assert [next(loader).ravel().tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    for _ in range(2):
        with pytest.raises(IndexError):
            next(loader)
    loader.close()


@pytest.mark.parametrize("max_samples", [None, 1, 9])
@pytest.mark.parametrize("ranks, micro", [(1, 4), (2, 4), (4, 1), (3, 5)])
def test_evaluation_reads_each_sample_once(max_samples: int | None, ranks: int, micro: int) -> None:
    count = max_samples or 3000
    given: dict[str, Any] = {"micro_batch_size": micro, "data_parallel_size": ranks, "max_samples": max_samples}
    batches = [[*evaluation_batches(Numbered(), data_parallel_rank=rank, **given)] for rank in range(ranks)]
    rows = np.stack(batches, axis=1).ravel()
    assert (rows[:count] == np.arange(count)).all() and (rows[count:] == MISSING).all()
    assert len(rows) < count + ranks * micro


# --- samples of one text


@pytest.mark.parametrize("count", [2, 8, 9, 10, 17, 18, 100])
def test_windows_of_training_and_evaluation(count: int) -> None:
    tokens = np.arange(count, dtype=np.uint16)
    train, held = (GPT2Dataset(tokens, 0, count, 8, BYTES, training=training) for training in (True, False))
    assert len(train) == max(1, (count - 1) // 8)
    for index, row in enumerate(train.rows(np.arange(len(train)))):
        assert list(row) == [(index * 8 + column) % count for column in range(9)]
    assert held.text(count) == bytes(range(count)) and held.text(count - 1) is None
    labels = held.rows(np.arange(len(held)))[:, 1:].ravel()
    assert list(labels[labels != MISSING]) == list(range(1, count)) and len(labels) == len(held) * 8 < count + 7


@pytest.mark.parametrize("training, dtype, bad", [(True, "u2", 257), (False, "i4", -1)])
def test_an_id_outside_the_vocabulary_is_an_error(training: bool, dtype: str, bad: int) -> None:
    tokens = np.arange(8 * 20 + 1).astype(dtype)
    tokens[83] = bad
    damaged = GPT2Dataset(tokens, 0, len(tokens), 8, BYTES, training=training, source="a/b.bin")
    damaged.rows(np.delete(np.arange(20), 10))
    with pytest.raises(DamagedData, match=f"a/b.bin holds the token id {bad}, but the vocabulary has 257"):
        damaged.rows(np.arange(20))


@pytest.mark.parametrize("suffix, other", [(".bin", ".idx"), (".idx", ".bin")])
def test_a_file_that_changes_while_it_is_read(tmp_path: Path, suffix: str, other: str) -> None:
    prefix = write_pair(tmp_path / "a", [range(200)])
    file = IndexedDataset(prefix)
    dataset = GPT2Dataset(file.tokens, 0, 200, 8, BYTES, training=True, changed_file=file.changed_file)
    ordered = MegatronOrderDataset(dataset, file.document_starts, seed=1, num_samples=3)
    # A file that is replaced by a rename does not count as changed.
    os.replace(shutil.copy(f"{prefix}{other}", tmp_path / "copy"), f"{prefix}{other}")
    ordered.rows(np.arange(3))
    os.truncate(f"{prefix}{suffix}", 0)  # Reading the mapped file would end the process by SIGBUS.
    for read in (lambda: dataset.rows(np.arange(3)), lambda: ordered.rows(np.arange(3)), dataset.text):
        with pytest.raises(DamagedData, match=f"{prefix}{suffix} was changed while this run reads it: restore it"):
            read()


# --- blends


def test_parse_blend_like_megatron() -> None:
    for line in ("a", "0.7 a b c", "1 2 3"):
        assert parse_blend(line.split(), "--data-path") == (line.split(), None)
    assert parse_blend("30 1 70 2".split(), "--data-path") == (["1", "2"], [30, 70])
    for bad in ("0", "-1", "nan", "inf"):
        with pytest.raises(ValueError, match="--data-path .*a weight above 0 before each"):
            parse_blend([bad, "a", "1", "b"], "--data-path")


class Component(Numbered):
    """A component of a blend. A sample consists of its index and the component's size."""

    seq_length = 1

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def rows(self, indices: np.ndarray) -> np.ndarray:
        return np.column_stack([indices, np.full(len(indices), self.size)])


def blend(sizes: list[int], counts: list[int], *, training: bool) -> BlendedDataset:
    components: Any = list(map(Component, sizes))
    return BlendedDataset(components, np.array(counts), training=training)


def test_blocks_and_epochs_of_a_blend() -> None:
    sizes, counts = [900, 5000, 37], [7000, 2990, 10]
    made = blend(sizes, counts, training=True)
    rows = made.shuffled(3).rows(np.arange(4 * BLEND_BLOCK))
    for block in rows[:, 1].reshape(4, BLEND_BLOCK):
        assert [(block == size).sum() for size in sizes] == counts
        # The components are mixed evenly.
        assert all(abs(np.mean(tenth == 900) - 0.7) < 0.1 for tenth in block.reshape(10, -1))
    for number, (size, count) in enumerate(zip(sizes, counts, strict=True)):
        assert (rows[rows[:, 1] == size, 0] == SampleOrder(size, 3 + number)(np.arange(4 * count))).all()
    assert not np.array_equal(made.shuffled(4).rows(np.arange(BLEND_BLOCK)), rows[:BLEND_BLOCK])
    assert (made.shuffled(3).rows(np.arange(777, 780)) == rows[777:780]).all()  # Samples can be read in any order.


def test_evaluation_of_a_blend_repeats_nothing() -> None:
    made = blend([60, 5000], [5000, 5000], training=False)
    rows = made.rows(np.arange(len(made)))
    assert (rows[rows[:, 1] == 60, 0] == np.arange(60)).all()  # The first component gives all its samples, in order.
    others = rows[rows[:, 1] == 5000, 0]
    assert abs(len(others) - 60) < 25 and (others == np.arange(len(others))).all()


def splits(**more: Any) -> Any:
    given = {"train_data": (), "split": "80,20", "tokenizer": BYTES, "seq_length": 8, "log": lambda line: None}
    return build_splits(**{**given, **more})


def test_the_command_line_of_a_blend(tmp_path: Path) -> None:
    a, b = (
        write_pair(tmp_path / name, [[value] * 19 + [BYTES.eod]] * documents)
        for name, value, documents in (("a", 1, 50), ("b", 2, 100))
    )
    made = splits(data_path=["0.7", a, "0.3", b])
    assert made.description[0] == (
        f"train: 70.00 % of the samples out of 800 tokens, 99 samples, 80.00 % of {a} (asked: 80.00 %)"
    )
    assert made.train.components[1].num_tokens == 1600 and len(made.train) == 99 + 199
    dataset, order = made.training_samples(seed=1, num_samples=10)
    rows = dataset.rows(order(np.arange(BLEND_BLOCK)))
    assert [(rows == value).any(axis=1).sum() for value in (1, 2)] == [7000, 3000]

    by_size = splits(data_path=[a, b])
    assert "33.22 % of the samples" in by_size.description[0]  # 99 of 298 samples
    others = [splits(data_path=line.split()) for line in (a, f"5 {a}", f"0.3 {a} 0.7 {b}")]
    others.append(splits(data_path=[a], data_order="megatron"))
    # The weight of a single component is ignored.
    assert len({each.fingerprint for each in (made, by_size, *others)}) == 5

    separate = splits(data_path=[a], valid_data_path=["1", a, "1", b], test_data_path=[b], split="1")
    assert len(separate.train) == 124 and separate.test.num_tokens == 2000 and len(separate.valid.components) == 2
    with pytest.raises(ValueError, match="--data-order megatron supports only one prefix"):
        splits(data_path=[a, b], data_order="megatron")


# --- --data-order megatron against megatron-core's own GPTDataset


def of_lengths(folder: Path, documents: int, longest: int) -> str:
    """Write documents of 1 to `longest` tokens. Every tenth document is empty."""
    rng = np.random.default_rng(documents)
    texts = [[*rng.integers(0, 256, rng.integers(0, longest)), BYTES.eod] for _ in range(documents)]
    return write_pair(folder / "pair", [text * (number % 10 != 4) for number, text in enumerate(texts)])


def theirs(prefix: str, seq_length: int, seed: int, split: str, sizes: list[int]) -> list[Any]:
    builder = pytest.importorskip("megatron.core.datasets.blended_megatron_dataset_builder")
    gpt = pytest.importorskip("megatron.core.datasets.gpt_dataset")
    config = gpt.GPTDatasetConfig(
        random_seed=seed,
        sequence_length=seq_length,
        blend=([prefix], None),
        split=split,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        tokenizer=SimpleNamespace(vocab_size=257, eod=256, pad=300, unique_identifiers={"class": "bytes"}),
    )
    return list(builder.BlendedMegatronDatasetBuilder(gpt.GPTDataset, sizes, lambda: True, config).build())


# Below 80 % of an epoch, Megatron shuffles the last epoch separately, so cases are above and below 1.8 epochs. In the
# fourth case, a document spans many samples. In the fifth case, an epoch is shorter than a sample.
@pytest.mark.parametrize(
    "documents, longest, seq_length, split, epochs",
    [
        *((200, 60, 16, "80,15,5", epochs) for epochs in (1.85, 1.75, 0.3)),
        (12, 4000, 64, "0.7,0.2,0.1", 6.3),
        (9, 4, 64, "90,10", 9.0),
    ],
)
def test_samples_equal_megatron_core(
    tmp_path: Path, documents: int, longest: int, seq_length: int, split: str, epochs: float
) -> None:
    prefix, held_out = of_lengths(tmp_path, documents, longest), documents > 9
    more = {"data_order": "megatron", "need_valid": held_out, "need_test": held_out}
    ours = splits(data_path=[prefix], split=split, seq_length=seq_length, **more)
    samples = int(epochs * ours.train.num_tokens / seq_length)
    expected = theirs(prefix, seq_length, 1234, split, [samples, 3, 3])
    dataset, order = ours.training_samples(1234, samples)
    assert len(dataset) == len(expected[0]) >= samples > 0
    found = dataset.rows(order(np.arange(len(dataset))))
    for number, row in enumerate(found.tolist()):
        sample = expected[0][number]
        assert row == [*sample["tokens"].tolist(), int(sample["labels"][-1])]
    for name, their in zip(("valid", "test"), expected[1:], strict=True):  # Compare the number of tokens in each split.
        if held_out:
            lengths = their.dataset.sequence_lengths[their.indices]
            assert getattr(ours, name).num_tokens == lengths.sum() > 0
