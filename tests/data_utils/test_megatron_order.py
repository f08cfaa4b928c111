"""--data-order megatron against megatron-core's own GPTDataset."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from data_utils import build_splits
from tests.data_utils.made import BYTES, global_batches, write_pair


def write(folder: Path, documents: int, longest: int, seed: int) -> str:
    """Documents of 1 to `longest` tokens, every tenth of them empty."""
    rng = np.random.default_rng(seed)
    lengths = [rng.integers(0, longest) for _ in range(documents)]
    texts = [[*rng.integers(0, 256, length), BYTES.eod] for length in lengths]
    return write_pair(folder / "pair", [[] if number % 10 == 4 else text for number, text in enumerate(texts)])


def splits(prefix: str, split: str, seq_length: int, **more: Any) -> Any:
    given = {"data_path": [prefix], "split": split, "seq_length": seq_length, "tokenizer": BYTES, "log": print}
    return build_splits(train_data=(), **given, **more)  # type: ignore[arg-type]


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
    built = builder.BlendedMegatronDatasetBuilder(gpt.GPTDataset, sizes, lambda: True, config).build()
    return list(built)


def row(sample: dict[str, Any]) -> list[int]:
    return [*sample["tokens"].tolist(), int(sample["labels"][-1])]


# Two epochs, of which the second is shuffled with the first where the run needs four fifths of it; documents that span
# many samples; and an epoch shorter than a sample.
@pytest.mark.parametrize(
    ("documents", "longest", "seq_length", "split", "epochs"),
    [
        (200, 60, 16, "80,15,5", 2.0),
        (200, 60, 16, "80,15,5", 1.85),
        (200, 60, 16, "80,15,5", 1.75),
        (200, 60, 16, "80,15,5", 1.2),
        (200, 60, 16, "80,15,5", 0.3),
        (12, 4000, 64, "0.7,0.2,0.1", 6.3),
        (9, 4, 64, "90,10", 9.0),
    ],
)
def test_samples_are_those_of_megatron_core(
    tmp_path: Path, documents: int, longest: int, seq_length: int, split: str, epochs: float
) -> None:
    prefix = write(tmp_path, documents, longest, seed=documents)
    held_out = documents > 9
    needed = {"need_valid": held_out, "need_test": held_out}
    ours = splits(prefix, split, seq_length, data_order="megatron", **needed)
    samples = int(epochs * ours.train.num_tokens / seq_length)
    expected = theirs(prefix, seq_length, 1234, split, [samples, 3, 3])
    dataset, order = ours.training_samples(1234, samples)
    assert len(dataset) == len(expected[0]) >= samples > 0
    found = dataset.rows(order(np.arange(len(dataset))))
    assert found.tolist() == [row(expected[0][number]) for number in range(len(dataset))]
    for name, their in zip(("valid", "test"), expected[1:], strict=True):  # the same documents
        if held_out:
            lengths = their.dataset.sequence_lengths[their.indices]
            assert getattr(ours, name).num_tokens == lengths.sum() > 0


def test_a_loader_reads_it_under_every_layout(tmp_path: Path) -> None:
    prefix = write(tmp_path, 200, 60, seed=1)
    made = splits(prefix, "80,15,5", 16, data_order="megatron")
    assert made.fingerprint != splits(prefix, "80,15,5", 16).fingerprint
    dataset, order = made.training_samples(7, 520)
    whole = dataset.rows(np.arange(520))
    for size, micro in ((1, 8), (2, 4), (4, 2)):
        found = global_batches(dataset, order, 60, size=size, micro=micro, consumed_samples=40)
        assert (found == whole[40:]).all()
