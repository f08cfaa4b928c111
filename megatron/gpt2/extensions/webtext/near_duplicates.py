"""Near-duplicates in four steps: signatures of every shard, pairs, groups, removal.

Documents are numbered through all shards, in their order. A table of the shards (name, number of documents, sha256 of
the input) is the first line of the files of pairs and groups, so that a removal from other files is refused.
"""

import bisect
import functools
import itertools
import json
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron.gpt2.extensions.webtext.documents import Document, as_line, is_seekable, label, read_at
from megatron.gpt2.extensions.webtext.minhash import BANDS, BATCH_CHARACTERS, band_keys, jaccard, shingles, sketches
from megatron.gpt2.extensions.webtext.shard_run import ShardRun

COLUMNS = BANDS + 1  # of a signature: the keys of its bands, and the document's offset; uint64
SHINGLES_KEPT = 4096  # documents
Table = list[dict[str, Any]]  # "name", "documents", "sha256" of each shard


def sign(run: ShardRun) -> None:
    """Signatures [d, 21] of a shard's documents; and the documents, where theirs cannot be read at an offset."""
    signatures = run.file(f"{run.shard.name}.signatures")

    def copied() -> Iterator[tuple[int, Document]]:
        for _, document in run.located():
            copies = run.file(f"{run.shard.name}.jsonl")
            place = copies.tell()
            copies.write(as_line(document))
            yield place, document

    for batch in batches(run.located() if is_seekable(run.shard) else copied()):
        rows = np.empty((len(batch), COLUMNS), "<u8")
        rows[:, :BANDS] = band_keys(sketches([document["text"] for _, document in batch]))
        rows[:, BANDS] = [place for place, _ in batch]
        signatures.write(rows.tobytes())
        run.left += len(batch)


def batches(located: Iterator[tuple[int, Document]]) -> Iterator[list[tuple[int, Document]]]:
    """The items in lists of at least BATCH_CHARACTERS characters of text each; the last one may have fewer."""
    batch, size = [], 0
    for item in located:
        batch.append(item)
        size += len(item[1]["text"])
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class Forest:
    """Union-find over numbers; the root of a set is its least."""

    def __init__(self, count: int) -> None:
        self.parent = array("q", range(count))

    def root(self, number: int) -> int:
        """The least number of the set that holds `number`."""
        parent = self.parent
        while parent[number] != number:
            parent[number] = number = parent[parent[number]]
        return number

    def join(self, first: int, second: int) -> None:
        """Make one set of the sets of two numbers."""
        first, second = self.root(first), self.root(second)
        self.parent[max(first, second)] = min(first, second)


def buckets(keys: np.ndarray) -> Iterator[list[int]]:
    """The numbers that share a key, ascending, of each key that at least two share."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    stops = np.append(starts[1:], len(keys))
    for bucket in np.flatnonzero(stops - starts > 1):
        yield order[starts[bucket] : stops[bucket]].tolist()


def joining_pairs(
    signatures: Sequence[np.ndarray], shingles_of: Callable[[int], np.ndarray], min_jaccard: float
) -> Iterator[tuple[int, int, float]]:
    """(number, number, Jaccard index) of pairs that share a band and whose 5-grams are compared in full.

    A pair of a set that others have joined already is not looked at: what is found are the edges of a forest.
    """
    count = sum(map(len, signatures))
    forest = Forest(count)
    refused: set[int] = set()
    for band in range(BANDS):
        for bucket in buckets(np.concatenate([part[:, band] for part in signatures])):
            leaders: list[int] = []  # of the sets in this bucket
            for number in bucket:
                for leader in leaders:
                    if forest.root(leader) == forest.root(number):
                        break
                    if leader * count + number in refused:
                        continue
                    one, other = shingles_of(leader), shingles_of(number)
                    index = 0.0
                    if min(len(one), len(other)) >= min_jaccard * max(len(one), len(other)):
                        index = jaccard(one, other)
                    if index >= min_jaccard:
                        forest.join(leader, number)
                        yield leader, number, index
                        break
                    refused.add(leader * count + number)
                else:
                    leaders.append(number)


def search(run: ShardRun, *, shards: Table, min_jaccard: float, sources: Sequence[Path], text_key: str) -> None:
    """Pairs out of all signatures. `sources` are the files that the signatures' offsets are of, one a shard."""
    signatures = [
        np.memmap(path, "<u8", "r").reshape(-1, COLUMNS) if path.stat().st_size else np.empty((0, COLUMNS), "<u8")
        for path in run.shard.files
    ]
    firsts = first_numbers(shards)

    def document(number: int) -> Document:
        shard = bisect.bisect_right(firsts, number) - 1
        offset = int(signatures[shard][number - firsts[shard], BANDS])
        return read_at(sources[shard], offset, text_key)

    shingles_of = functools.lru_cache(SHINGLES_KEPT)(lambda number: shingles(document(number)["text"]))
    file = run.file("pairs.jsonl")
    file.write(as_line({"shards": shards}))
    run.entered = run.left = sum(map(len, signatures))
    for first, second, index in joining_pairs(signatures, shingles_of, min_jaccard):
        one, other = document(first), document(second)
        file.write(as_line({"pair": [first, second], "jaccard": round(index, 4), "names": [label(one), label(other)]}))
        run.left -= 1
        run.drop("like an earlier document", f"{index:.2f}: {label(one)} | {label(other)}")


def first_numbers(shards: Table) -> list[int]:
    """The number of each shard's first document."""
    return [0, *itertools.accumulate(shard["documents"] for shard in shards)][:-1]


def read_table(path: Path) -> Table:
    """The first line of a file of pairs or groups; ValueError where it is none."""
    try:
        with open(path, "rb") as file:
            return json.loads(file.readline())["shards"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is no file of pairs or groups: it does not begin with its shards") from None


def group(run: ShardRun) -> None:
    """Groups out of pairs: documents that a chain of pairs connects, the one with the least number first."""
    (path,) = run.shard.files
    table = read_table(path)
    forest = Forest(sum(shard["documents"] for shard in table))
    members: dict[int, list[int]] = {}
    pairs = [json.loads(line)["pair"] for line in itertools.islice(run.lines(), 1, None)]
    for first, second in pairs:
        forest.join(first, second)
    for number in sorted({number for pair in pairs for number in pair}):
        members.setdefault(forest.root(number), []).append(number)
    file = run.file("groups.jsonl")
    file.write(as_line({"shards": table}))
    run.entered = run.left = len(forest.parent)
    for _, numbers in sorted(members.items()):
        file.write(json.dumps(numbers, separators=(",", ":")).encode() + b"\n")
        for number in numbers[1:]:
            run.left -= 1
            run.drop("in a group with an earlier one", f"document {number} with {numbers[0]}, {len(numbers)} in all")


@functools.lru_cache(1)  # a process removes from many shards
def to_remove(path: Path) -> tuple[Table, dict[int, int]]:
    """The shards of a file of groups, and for each document but the first of its group the number of that one."""
    table, kept = read_table(path), {}
    with open(path, "rb") as file:
        file.readline()
        for line in file:
            first, *others = json.loads(line)
            kept.update(dict.fromkeys(others, first))
    return table, kept


def remove(run: ShardRun, *, groups: str, path: Path) -> None:
    """The documents of a shard but those that a group holds an earlier one of. `groups` is the sha256 of `path`."""
    table, kept = to_remove(path)
    facts = run.shard.facts()
    place = next(
        (
            number
            for number, shard in enumerate(table)
            if (shard["name"], shard["sha256"]) == (facts["name"], facts["sha256"])
        ),
        None,
    )
    if place is None:
        raise ValueError(f"{path} is not of {run.shard.files[0]}, as it is now: search it for duplicates first")
    first, count = first_numbers(table)[place], table[place]["documents"]
    for number, document in enumerate(run.documents()):
        if number >= count:
            raise ValueError(
                f"{run.shard.files[0]} was searched for duplicates up to document {count} alone: give the same --limit"
            )
        if first + number in kept:
            run.drop("near-duplicate of an earlier document", document)
        else:
            run.write(document)
