"""From the data flags to the three datasets: which files, and which part of their tokens, each split reads."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np

from data_utils.corpora import BUILTIN, Log, check_exists
from data_utils.gpt2_dataset import GPT2Dataset
from data_utils.indexed_dataset import IndexedDataset
from data_utils.token_cache import tokenise
from data_utils.tokenization import Tokenizer, fingerprint_of

NAMES = ("train", "valid", "test")
LEAST_TOKENS = 2  # of a split: an input and its label
CHECKED_TOKENS = 1 << 24  # of a foreign file, so that opening one of terabytes takes no minute
HASHED_BYTES = 1 << 20  # at either end of a foreign .bin, for the same reason


@dataclass(frozen=True)
class Splits:
    """The datasets, None where a split is not wanted or has no share. `fingerprint` hashes the training text,
    the tokenizer and the cuts."""

    train: GPT2Dataset
    valid: GPT2Dataset | None
    test: GPT2Dataset | None
    fingerprint: str
    description: tuple[str, ...]


def parse_split(split: str) -> tuple[Fraction, Fraction, Fraction]:
    """Shares of training, validation and test, which add up to 1; missing ones are 0. ValueError names --split."""
    try:
        parts = [Fraction(part.strip()) for part in split.split(",")]
    except (ValueError, ZeroDivisionError):
        parts = []
    if not 1 <= len(parts) <= 3 or min(parts) < 0 or not parts[0]:
        raise ValueError(f"--split {split!r}: give up to three proportions of training, validation and test, such as "
                         "969,30,1, the first above 0")
    parts += [Fraction(0)] * (3 - len(parts))
    total = sum(parts)
    return parts[0] / total, parts[1] / total, parts[2] / total


def cut(document_starts: np.ndarray, shares: Sequence[Fraction], closed: bool) -> list[int]:
    """Borders, in tokens, of parts in proportion to `shares`: len(shares) + 1 of them, from 0 to the end.

    Between documents, nearest to the proportion, with at least one document in each part that has a share. Where there
    are fewer documents than such parts, or a part would miss its share by more than a tenth of it and more than 1 % of
    all, anywhere; but between documents all the same where a part would have fewer than the two tokens it needs.
    `closed`: the last token is an EOD, which does not count in cuts anywhere.
    """
    total = int(document_starts[-1])
    ends = [sum(shares[:number + 1], Fraction(0)) for number in range(len(shares) - 1)]
    anywhere = [0, *(int(end * (total - closed)) if end < 1 else total for end in ends), total]
    if len(document_starts) - 1 < sum(share > 0 for share in shares):
        return anywhere
    between = _cut_between(document_starts, shares, ends)
    close = all(abs(stop - start - share * total) <= max(share / 10, Fraction(1, 100)) * total
                for share, start, stop in zip(shares, between, between[1:], strict=False))
    filled = all(stop - start >= LEAST_TOKENS
                 for share, start, stop in zip(shares, anywhere, anywhere[1:], strict=False) if share)
    return between if close or not filled else anywhere


def _cut_between(document_starts: np.ndarray, shares: Sequence[Fraction], ends: Sequence[Fraction]) -> list[int]:
    total, count = int(document_starts[-1]), len(document_starts) - 1
    wanted = [share > 0 for share in shares]
    borders = [0]
    for number, end in enumerate(ends):
        if not wanted[number]:
            borders.append(borders[-1])
            continue
        least, most = borders[-1] + 1, count - sum(wanted[number + 1:])
        after = int(np.searchsorted(document_starts, int(end * total)))
        nearest = min((border for border in (after - 1, after) if border >= 0),
                      key=lambda border: abs(int(document_starts[border]) - end * total))
        borders.append(min(max(nearest, least), most))
    return [int(document_starts[border]) for border in [*borders, count]]


def build_splits(*, train_data: Sequence[str], valid_data: Sequence[str] = (), test_data: Sequence[str] = (),
                 data_path: Sequence[str] = (), split: str, text_key: str | None = None, tokenizer: Tokenizer,
                 seq_length: int, cache_path: str | None = None, need_valid: bool = True, need_test: bool = True,
                 log: Log) -> Splits:
    """Tokenise where that was not done before, and open the splits. No data at all means the built-in corpus.

    Files in `valid_data` and `test_data` are those splits, and `split` divides the rest. A split that is needed and
    has a share is never empty: ValueError names --split or the file instead.
    """
    shares = list(parse_split(split))
    own: dict[str, Sequence[str]] = {"valid": valid_data, "test": test_data}
    for number, name in enumerate(NAMES):
        for path in own.get(name, train_data):
            check_exists(path, f"--{name}-data")
        if own.get(name):
            shares[number] = Fraction(0)
    shares = [share / sum(shares) for share in shares]
    if data_path:
        dataset, key = _open_prefix(data_path, tokenizer)
        source = data_path[0]
    else:
        files = list(train_data) or [BUILTIN]
        dataset, key = tokenise(files, text_key=text_key, tokenizer=tokenizer, cache_path=cache_path, log=log)
        source = ", ".join(files)
    closed = len(dataset.tokens) > 0 and int(dataset.tokens[-1]) == tokenizer.eod
    borders = cut(dataset.document_starts, shares, closed)
    by_position = "" if np.isin(borders, dataset.document_starts).all() else ", cut by position, not between documents"
    made: dict[str, GPT2Dataset] = {}
    description = []
    for number, name in enumerate(NAMES):
        asked = f" (asked: {100 * float(shares[number]):.2f} %{by_position})"
        where, data, start, stop = source, dataset, borders[number], borders[number + 1]
        if not {"valid": need_valid, "test": need_test}.get(name, True):
            continue
        if own.get(name):
            where = ", ".join(own[name])
            data, _ = tokenise(own[name], text_key=text_key, tokenizer=tokenizer, cache_path=cache_path, log=log)
            start, stop, asked = 0, len(data.tokens), ""
        elif not shares[number]:
            continue
        if stop - start < LEAST_TOKENS:
            raise ValueError(f"--split {split}: {where} has only {stop - start} tokens for the {name} split: give it "
                             "a greater share, more text, or a share of 0")
        made[name] = GPT2Dataset(data.tokens, start, stop, seq_length, tokenizer, wrap=name == "train")
        share = 100 * (stop - start) / len(data.tokens)
        description.append(f"{name}: {stop - start:,} tokens, {len(made[name]):,} samples, {share:.2f} % of {where}"
                           f"{asked}")
    fingerprint = fingerprint_of(key, *map(str, borders))
    description.append(f"fingerprint of the training data: {fingerprint[:16]}")
    return Splits(made["train"], made.get("valid"), made.get("test"), fingerprint, tuple(description))


def _open_prefix(data_path: Sequence[str], tokenizer: Tokenizer) -> tuple[IndexedDataset, str]:
    """A pair that somebody prepared, and a hash of its index and of the size and both ends of its tokens.
    ValueError where its ids are another tokenizer's."""
    if len(data_path) != 1:
        raise ValueError(f"--data-path takes one prefix of a .bin/.idx pair, not {len(data_path)}")
    prefix = data_path[0].removesuffix(".bin").removesuffix(".idx")
    try:
        dataset = IndexedDataset(prefix)
    except (FileNotFoundError, ValueError) as error:
        raise type(error)(f"--data-path: {error}") from None
    part = dataset.tokens[:CHECKED_TOKENS]
    if len(part) and not 0 <= int(part.min()) <= int(part.max()) < tokenizer.vocab_size:
        raise ValueError(f"--data-path {prefix} holds ids from {part.min()} to {part.max()}, but the tokenizer "
                         f"{tokenizer.kind} has {tokenizer.vocab_size}: see --tokenizer-type")
    with open(f"{prefix}.bin", "rb") as file:
        first = file.read(HASHED_BYTES)
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - HASHED_BYTES))
        last = file.read()
    return dataset, fingerprint_of(Path(f"{prefix}.idx").read_bytes(), str(size), first, last)
