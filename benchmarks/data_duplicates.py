"""Near-duplicates, for `benchmarks/data.py`: the speed of signatures beside other ways to make them, what the search
finds of planted pairs, and its memory.

The usual way, one hash a permutation in numpy, stands here afresh; rensa is measured where it is installed. Ways
alternate, in one process and on one thread. Planted pairs are known by sets of strings, not by our own hashes.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from data_utils.corpora.builtin import builtin_documents
from megatron.gpt2.extensions.webtext.documents import Shard, as_line
from megatron.gpt2.extensions.webtext.minhash import (
    BATCH_CHARACTERS,
    SHINGLE,
    VALUES,
    band_keys,
    hashes,
    jaccard,
    shingles,
    sketches,
)
from megatron.gpt2.extensions.webtext.minhash import characters as code_points
from megatron.gpt2.extensions.webtext.near_duplicates import COLUMNS, joining_pairs, search, sign
from megatron.gpt2.extensions.webtext.shard_run import Stage, run_shard

REPEATS = 7
LEAST_JACCARD, MOST_JACCARD = 0.8, 0.95


def measure(smoke: bool) -> dict[str, Any]:
    """{name: {"figure", "goal", "reached"}}; the unit is in the name. smoke: few documents, to see that it runs."""
    texts = [text[:5000] for text in builtin_documents()][: 50 if smoke else None]
    ways: dict[str, Callable[[Sequence[str]], object]] = {"ours": our_keys, "a_hash_a_permutation": permuted}
    if find_spec("rensa"):
        ways["rensa"] = rensa_sketches
    speeds = alternate(ways, texts)
    found = planted(*(200, 20) if smoke else (20_000, 2_000))
    return {
        "signatures_mb_per_second": at_least(speeds["ours"], 20.0),
        **{f"signatures_mb_per_second_{name}": {"figure": speed} for name, speed in speeds.items() if name != "ours"},
        "recall_of_planted_pairs": at_least(found["recall"], 0.99),
        "false_pairs": at_most(found["false"], 0),
        "planted_pairs": {"figure": found["pairs"]},
        "documents": {"figure": found["documents"]},
        "seconds_to_sign": {"figure": found["sign"]},
        "seconds_to_search": {"figure": found["search"]},
        "search_mb_of_memory_per_million_documents": {"figure": memory(20_000 if smoke else 1_000_000)},
        "disk_mb_per_million_documents": {"figure": COLUMNS * 8.0},
    }


def at_least(figure: float, goal: float) -> dict[str, Any]:
    return {"figure": figure, "goal": goal, "reached": figure >= goal}


def at_most(figure: float, goal: float) -> dict[str, Any]:
    return {"figure": figure, "goal": goal, "reached": figure <= goal}


def alternate(ways: dict[str, Callable[[Sequence[str]], object]], texts: Sequence[str]) -> dict[str, float]:
    """Median MB/s of each way over the texts, in turns."""
    size = sum(len(text.encode()) for text in texts) / 1e6
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(REPEATS):
        for name, way in ways.items():
            began = time.perf_counter()
            way(texts)
            seconds[name].append(time.perf_counter() - began)
    return {name: size / statistics.median(times) for name, times in seconds.items()}


def our_keys(texts: Sequence[str]) -> None:
    batch, size = [], 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= BATCH_CHARACTERS:
            band_keys(sketches(batch))
            batch, size = [], 0
    if batch:
        band_keys(sketches(batch))


def permuted(texts: Sequence[str]) -> None:
    """Each value is the least of all hashes after a permutation of its own, x -> a x + b mod 2^64, upper bits."""
    draw = np.random.default_rng(0)
    factors, offsets = draw.integers(1, 2**63, (2, VALUES), dtype=np.uint64) | np.uint64(1)
    for text in texts:
        values = hashes(code_points(text))
        for factor, offset in zip(factors, offsets, strict=True):
            ((values * factor + offset) >> np.uint64(32)).min()


def rensa_sketches(texts: Sequence[str]) -> None:
    import rensa  # type: ignore[import-not-found]

    for text in texts:
        sketch = rensa.RMinHash(num_perm=VALUES, seed=42)
        sketch.update([text[start : start + SHINGLE] for start in range(len(text) - SHINGLE + 1)])
        sketch.digest()


def grams(text: str) -> set[str]:
    return {text[start : start + SHINGLE] for start in range(len(text) - SHINGLE + 1)}


def exact(first: str, second: str) -> float:
    one, other = grams(first), grams(second)
    return len(one & other) / len(one | other)


def planted(documents: int, pairs: int) -> dict[str, float]:
    """The pairs that signatures and search find among random texts, some of which are changed copies of others."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(5000)]
    originals = [" ".join(draw.choices(words, k=draw.randint(100, 400))) for _ in range(documents - pairs)]
    texts = list(originals)
    truth: list[tuple[int, int]] = []
    while len(truth) < pairs:
        copy = originals[len(truth)].split(" ")
        for _ in range(draw.randint(1, max(1, len(copy) // 12))):
            copy[draw.randrange(len(copy))] = draw.choice(words)
        if LEAST_JACCARD <= exact(originals[len(truth)], " ".join(copy)) <= MOST_JACCARD:
            truth.append((len(truth), len(texts)))
            texts.append(" ".join(copy))
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "documents.jsonl"
        path.write_bytes(b"".join(as_line({"text": text}) for text in texts))
        began = time.perf_counter()
        signed = run_shard(Stage("sign", sign), Shard("documents", (path,)), Path(scratch))
        signatures = Shard("pairs", (Path(scratch) / "documents.signatures",))
        table = [{"name": "documents", "documents": len(texts), "sha256": signed["input"]["sha256"]}]
        half = time.perf_counter()
        run_shard(
            Stage(
                "search",
                search,
                {"shards": table, "min_jaccard": LEAST_JACCARD},
                {"sources": [path], "text_key": "text"},
            ),
            signatures,
            Path(scratch),
        )
        ended = time.perf_counter()
        rows = np.fromfile(signatures.files[0], "<u8").reshape(-1, COLUMNS)
    found = [
        (first, second)
        for first, second, _ in joining_pairs([rows], lambda number: shingles(texts[number]), LEAST_JACCARD)
    ]
    assert all(
        jaccard(shingles(texts[one]), shingles(texts[other])) == exact(texts[one], texts[other]) for one, other in found
    )
    return {
        "documents": len(texts),
        "pairs": len(truth),
        "recall": len(set(truth) & set(found)) / len(truth),
        "false": sum(exact(texts[one], texts[other]) < LEAST_JACCARD for one, other in found),
        "sign": half - began,
        "search": ended - half,
    }


def memory(documents: int) -> float:
    """MB for each million documents at the peak of a search, besides the texts that are being compared."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "signatures"
        np.random.default_rng(0).integers(0, 2**63, (documents, COLUMNS), dtype=np.uint64).tofile(path)
        rows = np.memmap(path, "<u8", "r").reshape(-1, COLUMNS)
        tracemalloc.start()
        assert not list(joining_pairs([rows], lambda number: np.empty(0), LEAST_JACCARD))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak / documents
