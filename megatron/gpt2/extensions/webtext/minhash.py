"""Signatures of documents: sets of character 5-grams, sketched so that equal values tell the Jaccard index.

J(A, B) = |A n B| / |A u B| of two sets. A sketch has t values, and each agrees between two documents with probability
J. One hash a shingle serves all t values (Dahlgaard, Knudsen, Thorup: Fast Similarity Sketching, 2017): it names a bin
and competes for that bin's minimum; bins that stay empty are filled in further rounds, with new hashes, so that a
short document has a full sketch as well. t permutations, the usual way, would cost t hashes a shingle.

d documents, n characters of all of them together, t values, b bands of r values.
"""

from collections.abc import Sequence

import numpy as np

SHINGLE = 5
VALUES = 100
BANDS = 20
BATCH_CHARACTERS = 1 << 15  # so many at once: the arrays stay in the processor's cache
EMPTY = np.uint64(2**64 - 1)

# Odd numbers of 64 random-looking bits.
FACTORS = tuple(np.uint64(factor) for factor in (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9))
MIXER = np.uint64(0xFF51AFD7ED558CCD)
HALF = np.uint64(32)
ROUNDS = np.arange(2 * VALUES, dtype=np.uint64) * FACTORS[1]  # what makes other hashes of the first ones


def mix(values: np.ndarray) -> np.ndarray:
    """uint64 -> uint64, one to one, in place: every bit of an input moves about half of the output's."""
    values ^= values >> HALF
    values *= MIXER
    values ^= values >> np.uint64(29)
    values *= FACTORS[0]
    values ^= values >> HALF
    return values


def characters(text: str) -> np.ndarray:
    """uint64 [n], the code points. A text shorter than a shingle is filled up, so that it has one."""
    padded = text.ljust(SHINGLE, "\0")
    if padded.isascii():
        return np.frombuffer(padded.encode("ascii"), np.uint8).astype(np.uint64)
    return np.frombuffer(padded.encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.uint64)


def hashes(codes: np.ndarray) -> np.ndarray:
    """uint64 [n] -> [n - 4]: a hash of each 5-gram; two of them share one with a probability of about 2^-64."""
    pairs = codes[1:] * FACTORS[0]
    pairs += codes[:-1]
    values = pairs[2:] * FACTORS[1]
    values += pairs[:-2]
    values = values[:-1]
    values += codes[4:] * FACTORS[2]
    return mix(values)


def shingles(text: str) -> np.ndarray:
    """The sorted hashes of a text's 5-grams, each once."""
    return np.unique(hashes(characters(text)))


def jaccard(first: np.ndarray, second: np.ndarray) -> float:
    """Of two such sets."""
    common = len(np.intersect1d(first, second, assume_unique=True))
    return common / (len(first) + len(second) - common)


def sketches(texts: Sequence[str]) -> np.ndarray:
    """uint64 [d, t]"""
    codes = [characters(text) for text in texts]
    values = hashes(np.concatenate(codes))  # [n - 4]
    # The 5-grams across a border between documents go to a row of their own, the last.
    rows = np.full(2 * len(codes), len(codes))
    rows[::2] = np.arange(len(codes))
    counts = np.full(2 * len(codes), SHINGLE - 1)
    counts[::2] = [len(code) - SHINGLE + 1 for code in codes]
    owners = np.repeat(rows, counts)[: len(values)]
    filled = np.full((len(texts) + 1, VALUES), EMPTY)
    fill(filled, values, owners, 0)
    for number in range(1, 2 * VALUES):
        lacking = (filled == EMPTY).any(axis=1)  # [d + 1]
        lacking[-1] = False
        if not lacking.any():
            break
        still = lacking[owners]
        values, owners = values[still], owners[still]
        fill(filled, mix(values + ROUNDS[number]), owners, number)
    return filled[:-1]


def fill(filled: np.ndarray, values: np.ndarray, owners: np.ndarray, number: int) -> None:
    """Round `number`: the bins that are empty take the least value that falls into them. In the first t rounds a
    value's upper bits name its bin; in the others all values fall into one, so that none stays empty."""
    places = owners * VALUES
    places += ((values >> HALF) * np.uint64(VALUES) >> HALF).view(np.int64) if number < VALUES else number - VALUES
    found = np.full(filled.size, EMPTY)
    np.minimum.at(found, places, values)
    np.copyto(filled, found.reshape(filled.shape), where=filled == EMPTY)


def band_keys(sketched: np.ndarray) -> np.ndarray:
    """uint64 [d, t] -> [d, b]: a hash of each band's r = t / b values. Documents that share one are candidates; at
    b = 20 and r = 5 that finds a pair of J = 0.8 with probability 1 - (1 - 0.8^5)^20 = 0.9996."""
    bands = sketched.reshape(len(sketched), BANDS, -1)  # [d, t] -> [d, b, r]
    keys = np.broadcast_to(np.arange(BANDS, dtype=np.uint64), bands.shape[:2]).copy()
    for value in range(bands.shape[2]):
        keys = mix(keys * FACTORS[2] + bands[:, :, value])
    return keys
