"""Made for the tests of data: pairs, and what loaders of all ranks read together."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from data_utils import BatchLoader, BatchSchedule, IndexedDatasetBuilder, build_tokenizer

BYTES = build_tokenizer("bytes")


def write_pair(prefix: str | Path, documents: Iterable[Any], dtype: Any = "<u2") -> str:
    builder = IndexedDatasetBuilder(prefix, np.dtype(dtype))
    for document in documents:
        builder.add(document)
        builder.end_document()
    builder.finish()
    return str(prefix)


def global_batches(
    dataset: Any,
    order: Any,
    steps: int,
    *,
    size: int = 1,
    accumulation: int = 1,
    micro: int,
    schedule: BatchSchedule | None = None,
    **more: Any,
) -> np.ndarray:
    """The samples that `size` data-parallel ranks read in so many steps, in the global order."""
    schedule = schedule or BatchSchedule.constant(size * accumulation * micro)
    loaders = [
        BatchLoader(
            dataset,
            order,
            micro_batch_size=micro,
            schedule=schedule,
            data_parallel_rank=rank,
            data_parallel_size=size,
            **more,
        )
        for rank in range(size)
    ]
    found = []
    for _ in range(steps):
        parts = [next(loader) for loader in loaders]  # [micro-batches * micro, seq_length + 1] of each rank
        found.append(np.stack([part.reshape(-1, micro, part.shape[-1]) for part in parts], axis=1))
    for loader in loaders:
        loader.close()
    return np.concatenate([step.reshape(-1, step.shape[-1]) for step in found])
