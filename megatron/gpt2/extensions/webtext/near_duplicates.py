"""Remove near-duplicates in four steps: signatures of every input, pairs, groups, removal.

A document is treated as the set of its character 5-grams. The similarity of two documents is the Jaccard index J(A, B)
= |A n B| / |A u B|. A sketch of t = 100 values estimates J: each value is equal in two sketches with probability J. A
sketch needs only one hash per 5-gram (Dahlgaard, Knudsen, Thorup: Fast Similarity Sketching, 2017). MinHash would need
t hashes. The hash selects a bin, and the minimum of each bin is a value. Empty bins are filled in further rounds with
new hashes, so that a short document also has a full sketch.

Documents are numbered through all inputs, in order. The first line of the files of pairs and groups is a table of the
inputs (name, number of documents, sha256). remove_duplicates refuses an input that is not in the table.
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
from megatron.gpt2.extensions.webtext.step import Document, StepInput, StepRun, document_label, json_line, read_at

SHINGLE = 5
VALUES = 100
BANDS = 20
# number of uint64 values of a signature: the keys of its bands, and the offset of the document in its file
COLUMNS = BANDS + 1
SHINGLE_CACHE = 4096  # number of documents whose 5-grams stay in memory
SIGN_BATCH = 64  # number of documents whose band keys are computed together
EMPTY = np.uint64(2**64 - 1)
# The factors are odd constants with random-looking bits.
FACTORS = tuple(np.uint64(factor) for factor in (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9))
MIXER = np.uint64(0xFF51AFD7ED558CCD)
HALF = np.uint64(32)
# The hashes of round i are the first hashes plus ROUNDS[i].
ROUNDS = np.arange(2 * VALUES, dtype=np.uint64) * FACTORS[1]

InputTable = list[dict[str, Any]]  # Each input has "name", "documents" and "sha256".


def mix(values: np.ndarray) -> np.ndarray:
    """Permute uint64 values in place. A change of one bit of a value changes about half of the bits of its result."""
    values ^= values >> HALF
    values *= MIXER
    values ^= values >> np.uint64(29)
    values *= FACTORS[0]
    values ^= values >> HALF
    return values


def shingle_hashes(text: str) -> np.ndarray:
    """Return a hash of each 5-gram, uint64 [characters - 4]. Two 5-grams have equal hashes with probability 2^-64. A
    text of fewer than 5 characters is padded to one 5-gram."""
    padded = text.ljust(SHINGLE, "\0").encode("utf-32-le", "surrogatepass")
    codes = np.frombuffer(padded, np.uint32).astype(np.uint64)
    pairs = codes[1:] * FACTORS[0] + codes[:-1]
    return mix((pairs[2:] * FACTORS[1] + pairs[:-2])[:-1] + codes[4:] * FACTORS[2])


def sketch(text: str) -> np.ndarray:
    """Return the sketch of a text, uint64 [t]. In each round, an empty bin takes the minimum of the hashes that fall
    into it. In the first t rounds, the upper bits of a hash select its bin. In round t + i, all hashes fall into bin i,
    so that no bin stays empty."""
    hashes = shingle_hashes(text)
    filled = np.full(VALUES, EMPTY)
    for index in range(2 * VALUES):
        values = mix(hashes + ROUNDS[index]) if index else hashes
        found = np.full(VALUES, EMPTY)
        if index < VALUES:
            np.minimum.at(found, ((values >> HALF) * np.uint64(VALUES) >> HALF).view(np.int64), values)
        else:
            found[index - VALUES] = values.min()
        np.copyto(filled, found, where=filled == EMPTY)
        if not (filled == EMPTY).any():
            break
    return filled


def band_keys(sketched: np.ndarray) -> np.ndarray:
    """Hash each of the b bands of t / b sketch values, uint64 [d, t] -> [d, b] for d documents. Documents with an equal
    hash are candidates. With 20 bands of 5 values, a pair with a Jaccard index of 0.8 is found with probability 1 - (1
    - 0.8^5)^20 = 0.9996."""
    bands = sketched.reshape(len(sketched), BANDS, -1)  # [d, t] -> [d, b, r]
    keys = np.broadcast_to(np.arange(BANDS, dtype=np.uint64), bands.shape[:2])
    for values in np.moveaxis(bands, 2, 0):  # r iterations over [d, b]
        keys = mix(keys * FACTORS[2] + values)
    return keys


def is_seekable(source: StepInput) -> bool:
    """Return True if `read_at` can read the input, which must be one uncompressed JSON file."""
    return len(source.files) == 1 and source.files[0].name.endswith(JSON_SUFFIXES)


def write_signatures(run: StepRun) -> None:
    """Write the signatures [documents, 21] of an input, and a copy of its documents if the input is not seekable."""
    signatures = run.file(f"{run.source.name}.signatures")
    copies = None if is_seekable(run.source) else run.file(f"{run.source.name}.jsonl")

    def texts_with_offsets() -> Iterator[tuple[int, str]]:
        copied = 0
        for document in run.documents():
            yield run.offset if copies is None else copied, document["text"]
            if copies is not None:
                line = json_line(document)
                copies.write(line)
                copied += len(line)

    texts = texts_with_offsets()
    while batch := list(itertools.islice(texts, SIGN_BATCH)):
        keys = band_keys(np.stack([sketch(text) for _, text in batch]))
        offsets = np.array([offset for offset, _ in batch], np.uint64)
        signatures.write(np.column_stack([keys, offsets]).astype("<u8").tobytes())
        run.left += len(batch)


def buckets(keys: np.ndarray) -> Iterator[list[int]]:
    """Yield a list for each key that occurs at least twice: the indices of the key in `keys`, in ascending order."""
    _, inverse, counts = np.unique(keys, return_inverse=True, return_counts=True)
    repeated = np.flatnonzero(counts[inverse] > 1)
    order = repeated[np.argsort(keys[repeated], kind="stable")]
    for bucket in np.split(order, np.flatnonzero(np.diff(keys[order])) + 1):
        yield bucket.tolist()


def duplicate_pairs(
    signatures: Sequence[np.ndarray], shingles_of: Callable[[int], np.ndarray], min_jaccard: float
) -> Iterator[tuple[int, int, float]]:
    """Yield (number, number, Jaccard index) of each pair of documents that share a band and have an index of at least
    `min_jaccard`. A pair is skipped if earlier pairs already connect its documents, so the pairs are the edges of a
    forest."""
    from networkx.utils import UnionFind

    @functools.cache  # A pair may share several bands.
    def jaccard_index(a: int, b: int) -> float:
        shingles, others = shingles_of(a), shingles_of(b)
        common = len(np.intersect1d(shingles, others, assume_unique=True))
        return common / (len(shingles) + len(others) - common)

    joined = UnionFind()
    for band in range(BANDS):
        for bucket in buckets(np.concatenate([part[:, band] for part in signatures])):
            leaders: list[int] = []  # the first document of each group in this bucket
            for number in bucket:
                for leader in leaders:
                    if joined[leader] == joined[number]:
                        break
                    if (index := jaccard_index(leader, number)) >= min_jaccard:
                        joined.union(leader, number)
                        yield leader, number, index
                        break
                else:
                    leaders.append(number)


def find_pairs(run: StepRun) -> None:
    """Find pairs of similar documents from the signatures of all inputs. For each input, `args.document_files` has the
    file to which offsets refer."""
    args = run.args
    signatures = [
        np.memmap(path, "<u8", "r").reshape(-1, COLUMNS) if path.stat().st_size else np.empty((0, COLUMNS), "<u8")
        for path in run.source.files
    ]
    firsts = first_numbers(args.shards)

    def document(number: int) -> Document:
        source = bisect.bisect_right(firsts, number) - 1
        offset = int(signatures[source][number - firsts[source], BANDS])
        return read_at(args.document_files[source], offset, args.text_key)

    @functools.lru_cache(SHINGLE_CACHE)
    def shingles_of(number: int) -> np.ndarray:
        """Return the distinct hashes of the 5-grams of a document, sorted."""
        return np.unique(shingle_hashes(document(number)["text"]))

    file = run.file("pairs.jsonl")
    file.write(json_line({"shards": args.shards}))
    run.entered = run.left = sum(map(len, signatures))
    for first, second, index in duplicate_pairs(signatures, shingles_of, args.min_jaccard):
        names = [document_label(document(first)), document_label(document(second))]
        file.write(json_line({"pair": [first, second], "jaccard": round(index, 4), "names": names}))
        run.left -= 1
        run.drop("like an earlier document", f"{index:.2f}: {names[0]} | {names[1]}")


def first_numbers(sources: InputTable) -> list[int]:
    """Return the number of each input's first document."""
    return [0, *itertools.accumulate(source["documents"] for source in sources)][:-1]


@functools.lru_cache(1)  # cached, because a process works on many inputs
def read_table(path: Path) -> tuple[InputTable, list[Any]]:
    """Return the table of inputs and the other lines of a file of pairs or groups. Raises ValueError for a file of
    another format."""
    try:
        with open(path, "rb") as file:
            return json.loads(file.readline())["shards"], [json.loads(line) for line in file]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is not a file of pairs or groups: its first line does not list inputs") from None


def group_pairs(run: StepRun) -> None:
    """Group the documents that pairs connect. The groups and the numbers of their documents are in ascending order."""
    from networkx.utils import UnionFind

    table, pairs = read_table(run.source.files[0])
    joined = UnionFind()
    for line in pairs:
        joined.union(*line["pair"])
    file = run.file("groups.jsonl")
    file.write(json_line({"shards": table}))
    run.entered = run.left = sum(source["documents"] for source in table)
    for first, *others in sorted(map(sorted, joined.to_sets())):
        file.write(json_line([first, *others]))
        for number in others:
            run.left -= 1
            run.drop("in a group with an earlier one", f"document {number} with {first}, {1 + len(others)} in all")


@functools.lru_cache(1)
def duplicates_to_remove(path: Path) -> set[int]:
    """Return all documents of a file of groups except the first one of each group."""
    return {number for numbers in read_table(path)[1] for number in numbers[1:]}


def remove_duplicates(run: StepRun) -> None:
    """Write the documents of an input that have no earlier document in their group."""
    path = run.args.groups_file
    table, file, found = read_table(path)[0], run.source.files[0], run.source.metadata()
    matches = [
        index for index, source in enumerate(table) if all(source[key] == found[key] for key in ("name", "sha256"))
    ]
    if not matches:
        raise ValueError(f"{path} was not made from the present {file}: search it for duplicates first")
    first, count = first_numbers(table)[matches[0]], table[matches[0]]["documents"]
    for number, document in enumerate(run.documents()):
        if number >= count:
            raise ValueError(f"{file} was searched for duplicates only up to document {count}: give the same --limit")
        if first + number in duplicates_to_remove(path):
            run.drop("near-duplicate of an earlier document", document)
        else:
            run.write(document)
