"""The two ends of the pipeline: all shards in one file, and its split into training, validation and test."""

import hashlib
from collections.abc import Sequence
from fractions import Fraction

from megatron.gpt2.extensions.webtext.shard_run import ShardRun

NAMES = ("train", "valid", "test")


def merge(run: ShardRun, *, name: str) -> None:
    """Every document of every file, in their order, in one file of this name."""
    for document in run.documents():
        run.write(document, name)


def split(run: ShardRun, *, shares: Sequence[str], seed: int) -> None:
    """Each document goes where the hash of its text and the seed says: it stays there when the corpus grows, and equal
    texts stay together."""
    ends = [sum(map(Fraction, shares[: number + 1])) for number in range(len(shares))]  # the last is their sum
    for document in run.documents():
        digest = hashlib.blake2b(document["text"].encode("utf-8"), digest_size=8, key=str(seed).encode()).digest()
        place = Fraction(int.from_bytes(digest, "little"), 2**64) * ends[-1]
        name = next(name for name, end in zip(NAMES, ends, strict=True) if place < end)
        run.write(document, f"{name}.jsonl")
