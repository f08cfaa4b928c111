"""How fast samples are read and data sets opened, for `benchmarks/data.py`: one thread, from files that are in memory.

nanoGPT's way stands here afresh: a memory map made for every batch, a slice, a cast and a tensor for each input and for
each label, stacked. Ours is the loader of a training run, its thread left out, up to the tensor. The two alternate.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import mpu
from data_utils import (
    BatchLoader,
    BatchSchedule,
    BlendedDataset,
    IndexedDataset,
    SampleOrder,
    build_splits,
    build_tokenizer,
)
from data_utils.blending import block_counts
from data_utils.indexed_dataset import HEADER, MAGIC
from data_utils.samplers import Order, Samples

SEQUENCE = 1024
BATCH = 12  # nanoGPT's own
LARGE_BATCH = 480  # half a million tokens
REPEATS = 9


def measure(smoke: bool) -> dict[str, Any]:
    """{name: {"figure", "goal", "reached"}}; the unit is in the name. smoke: small files, to see that it runs."""
    tokenizer = build_tokenizer("bytes")
    with tempfile.TemporaryDirectory() as scratch:
        tokens = 2_000_000 if smoke else 50_000_000
        prefix = Path(scratch) / "tokens"
        rng = np.random.default_rng(0)
        write_pair(prefix, tokens // 1000, 1000, rng.integers(0, 257, tokens).astype("<u2"))
        dataset = build_splits(
            train_data=(), data_path=[str(prefix)], split="1", tokenizer=tokenizer, seq_length=SEQUENCE, log=print
        ).train
        assert not isinstance(dataset, BlendedDataset)
        blend = BlendedDataset([dataset] * 3, block_counts([5, 3, 2], ["a", "b", "c"], ""), wrap=True)
        order = SampleOrder(len(dataset), seed=1234)
        dataset.rows(np.arange(len(dataset)))  # every page is in memory

        nano, small = alternate(lambda: nanogpt_batches(prefix, BATCH), lambda: our_batches(dataset, order, BATCH))
        large, blended = alternate(
            lambda: our_batches(dataset, order, LARGE_BATCH), lambda: our_batches(blend, blend.order(1234), BATCH)
        )
        text = torch.from_numpy(dataset.rows(order(np.arange(BATCH))))
        documents, _ = alternate(lambda: lengths_of_documents(text, tokenizer.eod), lambda: 0.0)

        long, many = Path(scratch) / "long", Path(scratch) / "many"
        write_pair(long, 1000, 10_000 if smoke else 10_000_000)
        write_pair(many, 10_000 if smoke else 10_000_000, 100)
        opened, checked = alternate(lambda: seconds_to_open(long), lambda: seconds_to_open(many), repeats=3)
        ready, _ = alternate(lambda: seconds_to_split(many, tokenizer), lambda: 0.0, repeats=3)
    return {
        f"us_a_sample_batch_{BATCH}": at_most(small, 5.0),
        f"us_a_sample_batch_{LARGE_BATCH}": at_most(large, 5.0),
        f"us_a_sample_of_a_blend_of_3_batch_{BATCH}": at_most(blended, 5.0),
        f"us_a_sample_nanogpt_batch_{BATCH}": {"figure": nano, "goal": None, "reached": None},
        "times_nanogpt": {"figure": nano / small, "goal": 8.0, "reached": nano / small >= 8.0},
        "us_a_sample_for_the_lengths_of_documents": {"figure": documents, "goal": None, "reached": None},
        "seconds_to_open_10_billion_tokens": at_most(opened, 0.1),
        "seconds_to_open_and_check_10_million_documents": at_most(checked, 1.0),
        "seconds_until_10_million_documents_are_split_and_hashed": {"figure": ready, "goal": None, "reached": None},
    }


def at_most(figure: float, goal: float) -> dict[str, Any]:
    return {"figure": figure, "goal": goal, "reached": figure <= goal}


def alternate(first: Callable[[], float], second: Callable[[], float], repeats: int = REPEATS) -> tuple[float, float]:
    """The median of what each returns, run in turns."""
    pairs = [(first(), second()) for _ in range(repeats)]
    return statistics.median(pair[0] for pair in pairs), statistics.median(pair[1] for pair in pairs)


def write_pair(prefix: Path, documents: int, length: int, tokens: np.ndarray | None = None) -> None:
    """Documents of one length, of u16; without tokens a sparse file of zeros."""
    starts = np.arange(documents + 1, dtype="<i8")
    with open(f"{prefix}.idx", "wb") as index:
        index.write(HEADER.pack(MAGIC, 1, 8, documents, documents + 1))
        for array in (np.full(documents, length, "<i4"), starts[:-1] * (2 * length), starts):
            array.tofile(index)
    with open(f"{prefix}.bin", "wb") as file:
        if tokens is not None:
            tokens.tofile(file)
        file.truncate(2 * documents * length)


def nanogpt_batches(prefix: Path, batch: int, count: int = 100) -> float:
    """Microseconds a sample."""
    began = time.perf_counter()
    for _ in range(count):
        data = np.memmap(f"{prefix}.bin", dtype=np.uint16, mode="r")
        places = torch.randint(len(data) - SEQUENCE, (batch,))
        torch.stack([torch.from_numpy(data[i : i + SEQUENCE].astype(np.int64)) for i in places])
        torch.stack([torch.from_numpy(data[i + 1 : i + 1 + SEQUENCE].astype(np.int64)) for i in places])
    return 1e6 * (time.perf_counter() - began) / count / batch


def our_batches(samples: Samples, order: Order, batch: int) -> float:
    """Microseconds a sample, the order included."""
    loader = BatchLoader(
        samples,
        order,
        micro_batch_size=batch,
        schedule=BatchSchedule.constant(batch),
        data_parallel_rank=0,
        data_parallel_size=1,
        prefetch=0,
        finish=torch.from_numpy,
    )
    count = -(-12_000 // batch)
    began = time.perf_counter()
    for _ in range(count):
        next(loader)
    return 1e6 * (time.perf_counter() - began) / count / batch


def lengths_of_documents(text: torch.Tensor, eod: int, count: int = 100) -> float:
    """Microseconds a sample that --reset-attention-mask adds to a batch."""
    began = time.perf_counter()
    for _ in range(count):
        mpu.Documents(text[:, :-1], eod, "cpu")
    return 1e6 * (time.perf_counter() - began) / count / len(text)


def seconds_to_open(prefix: Path) -> float:
    began = time.perf_counter()
    IndexedDataset(prefix)
    return time.perf_counter() - began


def seconds_to_split(prefix: Path, tokenizer: Any) -> float:
    began = time.perf_counter()
    build_splits(
        train_data=(), data_path=[str(prefix)], split="949,50,1", tokenizer=tokenizer, seq_length=SEQUENCE, log=print
    )
    return time.perf_counter() - began
