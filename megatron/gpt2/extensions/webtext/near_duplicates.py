"""Near-duplicates in four steps: signatures of every shard, pairs, groups, removal.

Documents are sets of character 5-grams, sketched so that equal values tell the Jaccard index J(A, B) = |A n B| / |A u B|.
A sketch has t = 100 values, and each agrees between two documents with probability J. One hash a 5-gram serves all t
values (Dahlgaard, Knudsen, Thorup: Fast Similarity Sketching, 2017): it names a bin and competes for that bin's
minimum; bins that stay empty are filled in further rounds, with new hashes, so that a short document has a full sketch
as well. t permutations, the usual way, would cost t hashes a 5-gram.

Documents are numbered through all shards, in their order. A table of the shards (name, number of documents, sha256 of
the input) is the first line of the files of pairs and groups, so that a removal from other files is refused.
"""

import bisect
import functools
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data_utils.corpora import JSON_SUFFIXES
from megatron.gpt2.extensions.webtext.shards import Document, Shard, ShardRun, as_line, label, read_at

SHINGLE = 5
VALUES = 100
BANDS = 20
COLUMNS = BANDS + 1  # of a signature: the keys of its bands, and the document's offset; uint64
SHINGLES_KEPT = 4096  # documents
SIGNED_AT_ONCE = 64  # documents: their band keys are made by the same calls of numpy
EMPTY = np.uint64(2**64 - 1)
# Odd numbers of 64 random-looking bits.
FACTORS = tuple(np.uint64(factor) for factor in (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9))
MIXER = np.uint64(0xFF51AFD7ED558CCD)
HALF = np.uint64(32)
ROUNDS = np.arange(2 * VALUES, dtype=np.uint64) * FACTORS[1]  # what makes other hashes of the first ones

Table = list[dict[str, Any]]  # "name", "documents", "sha256" of each shard


def mix(values: np.ndarray) -> np.ndarray:
    """uint64 -> uint64, one to one, in place: every bit of an input moves about half of the output's."""
    values ^= values >> HALF
    values *= MIXER
    values ^= values >> np.uint64(29)
    values *= FACTORS[0]
    values ^= values >> HALF
    return values


def hashes(text: str) -> np.ndarray:
    """uint64 [characters - 4]: a hash of each 5-gram; two of them share one with a probability of about 2^-64. A text
    shorter than a 5-gram is filled up, so that it has one."""
    padded = text.ljust(SHINGLE, "\0").encode("utf-32-le", "surrogatepass")
    codes = np.frombuffer(padded, np.uint32).astype(np.uint64)
    pairs = codes[1:] * FACTORS[0] + codes[:-1]
    return mix((pairs[2:] * FACTORS[1] + pairs[:-2])[:-1] + codes[4:] * FACTORS[2])


def shingles(text: str) -> np.ndarray:
    """The sorted hashes of a text's 5-grams, each once."""
    return np.unique(hashes(text))


def jaccard(first: np.ndarray, second: np.ndarray) -> float:
    """The Jaccard index of two such sets."""
    common = len(np.intersect1d(first, second, assume_unique=True))
    return common / (len(first) + len(second) - common)


def sketch(text: str) -> np.ndarray:
    """uint64 [t]: the bins that are empty before a round take the least value that falls into them. In the first t
    rounds a value's upper bits name its bin; in round t + i all values fall into bin i, so that none stays empty."""
    first = hashes(text)
    filled = np.full(VALUES, EMPTY)
    for number in range(2 * VALUES):
        values = mix(first + ROUNDS[number]) if number else first
        found = np.full(VALUES, EMPTY)
        if number < VALUES:
            np.minimum.at(found, ((values >> HALF) * np.uint64(VALUES) >> HALF).view(np.int64), values)
        else:
            found[number - VALUES] = values.min()
        np.copyto(filled, found, where=filled == EMPTY)
        if not (filled == EMPTY).any():
            break
    return filled


def band_keys(sketched: np.ndarray) -> np.ndarray:
    """uint64 [d, t] -> [d, b]: a hash of each band's r = t / b values. Documents that share one are candidates; at b = 20
    and r = 5 that finds a pair of J = 0.8 with probability 1 - (1 - 0.8^5)^20 = 0.9996."""
    bands = sketched.reshape(len(sketched), BANDS, -1)  # [d, t] -> [d, b, r]
    keys = np.broadcast_to(np.arange(BANDS, dtype=np.uint64), bands.shape[:2])
    for values in np.moveaxis(bands, 2, 0):  # r times [d, b]
        keys = mix(keys * FACTORS[2] + values)
    return keys


def is_seekable(shard: Shard) -> bool:
    """Whether `read_at` can read the shard: it is one file of JSON that is not compressed."""
    return len(shard.files) == 1 and shard.files[0].name.endswith(JSON_SUFFIXES)


def sign(run: ShardRun) -> None:
    """Signatures [documents, 21] of a shard; and its documents, if they cannot be read there at an offset."""
    signatures = run.file(f"{run.shard.name}.signatures")
    located = run.located()
    while batch := list(itertools.islice(located, SIGNED_AT_ONCE)):
        places = []
        for place, document in batch:
            if not is_seekable(run.shard):
                copies = run.file(f"{run.shard.name}.jsonl")
                place = copies.tell()
                copies.write(as_line(document))
            places.append(place)
        keys = band_keys(np.stack([sketch(document["text"]) for _, document in batch]))
        signatures.write(np.column_stack([keys, np.array(places, np.uint64)]).astype("<u8").tobytes())
        run.left += len(batch)


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

    A pair of a set that others have joined already is not looked at: the pairs are the edges of a forest.
    """
    from networkx.utils import UnionFind

    @functools.cache  # a pair may share several bands
    def index_of(first: int, second: int) -> float:
        one, other = shingles_of(first), shingles_of(second)
        if min(len(one), len(other)) < min_jaccard * max(len(one), len(other)):
            return 0.0
        return jaccard(one, other)

    joined = UnionFind()
    for band in range(BANDS):
        for bucket in buckets(np.concatenate([part[:, band] for part in signatures])):
            leaders: list[int] = []  # of the sets in this bucket
            for number in bucket:
                for leader in leaders:
                    if joined[leader] == joined[number]:
                        break
                    if (index := index_of(leader, number)) >= min_jaccard:
                        joined.union(leader, number)
                        yield leader, number, index
                        break
                else:
                    leaders.append(number)


def search(run: ShardRun) -> None:
    """Pairs out of the signatures of all shards. --sources are the files that the offsets are of, one a shard."""
    args = run.args
    signatures = [
        np.memmap(path, "<u8", "r").reshape(-1, COLUMNS) if path.stat().st_size else np.empty((0, COLUMNS), "<u8")
        for path in run.shard.files
    ]
    firsts = first_numbers(args.shards)

    def document(number: int) -> Document:
        shard = bisect.bisect_right(firsts, number) - 1
        offset = int(signatures[shard][number - firsts[shard], BANDS])
        return read_at(args.sources[shard], offset, args.text_key)

    shingles_of = functools.lru_cache(SHINGLES_KEPT)(lambda number: shingles(document(number)["text"]))
    file = run.file("pairs.jsonl")
    file.write(as_line({"shards": args.shards}))
    run.entered = run.left = sum(map(len, signatures))
    for first, second, index in joining_pairs(signatures, shingles_of, args.min_jaccard):
        names = [label(document(first)), label(document(second))]
        file.write(as_line({"pair": [first, second], "jaccard": round(index, 4), "names": names}))
        run.left -= 1
        run.drop("like an earlier document", f"{index:.2f}: {names[0]} | {names[1]}")


def first_numbers(shards: Table) -> list[int]:
    """The number of each shard's first document."""
    return [0, *itertools.accumulate(shard["documents"] for shard in shards)][:-1]


@functools.lru_cache(1)  # a process removes from many shards
def read_table(path: Path) -> tuple[Table, list[Any]]:
    """The shards and the other lines of a file of pairs or groups; ValueError if it is another file."""
    try:
        with open(path, "rb") as file:
            return json.loads(file.readline())["shards"], [json.loads(line) for line in file]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is no file of pairs or groups: it does not begin with its shards") from None


def group(run: ShardRun) -> None:
    """Groups out of pairs: documents that a chain of pairs connects, the one with the least number first."""
    from networkx.utils import UnionFind

    table, pairs = read_table(run.shard.files[0])
    joined = UnionFind()
    for line in pairs:
        joined.union(*line["pair"])
    file = run.file("groups.jsonl")
    file.write(as_line({"shards": table}))
    run.entered = run.left = sum(shard["documents"] for shard in table)
    for first, *others in sorted(map(sorted, joined.to_sets())):
        file.write(as_line([first, *others]))
        for number in others:
            run.left -= 1
            run.drop("in a group with an earlier one", f"document {number} with {first}, {1 + len(others)} in all")


@functools.lru_cache(1)
def to_remove(path: Path) -> set[int]:
    """The documents of a file of groups that are not the first of their group."""
    return {number for numbers in read_table(path)[1] for number in numbers[1:]}


def remove(run: ShardRun) -> None:
    """The documents of a shard, without those that have an earlier document in their group."""
    path = run.args.groups_file
    table, (file, *_) = read_table(path)[0], run.shard.files
    facts = run.shard.facts()
    places = [place for place, shard in enumerate(table) if all(shard[key] == facts[key] for key in ("name", "sha256"))]
    if not places:
        raise ValueError(f"{path} is not of {file}, as it is now: search it for duplicates first")
    first, count = first_numbers(table)[places[0]], table[places[0]]["documents"]
    for number, document in enumerate(run.documents()):
        if number >= count:
            raise ValueError(f"{file} was searched for duplicates only up to document {count}: give the same --limit")
        if first + number in to_remove(path):
            run.drop("near-duplicate of an earlier document", document)
        else:
            run.write(document)
