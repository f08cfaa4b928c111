"""From the data flags to the three datasets: which files and which part of their tokens each split reads, and the order
of training."""

import itertools
import lzma
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np

from data_utils.corpora import BUILTIN, MOST_BAD_LINES, Log, files_of
from data_utils.files import fingerprint_of
from data_utils.gpt2_dataset import (
    BLOCK,
    BlendedDataset,
    GPT2Dataset,
    MegatronSamples,
    block_counts,
    megatron_cut,
    parse_blend,
)
from data_utils.indexed_dataset import ForeignBin, TokenFile, open_tokens
from data_utils.samplers import Order, SampleOrder, Samples
from data_utils.token_cache import tokenise
from data_utils.tokenizers.base import Tokenizer

NAMES = ("train", "valid", "test")
LEAST_TOKENS = 2  # of a split: an input and its label
CHECKED_TOKENS = 1 << 24  # of a foreign file, so that opening one of terabytes takes no minute
HASHED_BYTES = 1 << 20  # at either end of a foreign .bin, for the same reason

Dataset = GPT2Dataset | BlendedDataset


@dataclass(frozen=True)
class Splits:
    """The datasets; None if a split is not wanted or has no share.

    fingerprint: a hash of the training text, the tokenizer, the cuts, the weights of a blend, and of an order that is
    not ours. description: lines for the log. train_documents: for Megatron's order, int64 [documents + 1], where the
    training documents begin in `train.tokens`, and the end.
    """

    train: Dataset
    valid: Dataset | None
    test: Dataset | None
    fingerprint: str
    description: tuple[str, ...]
    train_documents: np.ndarray | None = None

    def training_samples(self, seed: int, num_samples: int) -> tuple[Samples, Order]:
        """The dataset and the order that a `BatchLoader` takes to train on `num_samples` samples in all."""
        if isinstance(self.train, BlendedDataset):
            return self.train.shuffled(seed), np.asarray
        if self.train_documents is not None:
            return MegatronSamples(self.train, self.train_documents, seed=seed, num_samples=num_samples), np.asarray
        return self.train, SampleOrder(len(self.train), seed)


@dataclass(frozen=True)
class _Tokens:
    """Open tokens, their name in messages, and a hash of their content."""

    name: str
    data: TokenFile
    key: str


_Part = tuple[_Tokens, int, int]  # from one token to another


def parse_split(split: str) -> tuple[Fraction, Fraction, Fraction]:
    """The proportions of training, validation and test that --split gives; a missing one is 0. ValueError names
    --split."""
    try:
        parts = [Fraction(part.strip()) for part in split.split(",")]
    except (ValueError, ZeroDivisionError):
        parts = []
    if not 1 <= len(parts) <= 3 or min(parts) < 0 or not parts[0]:
        raise ValueError(
            f"--split {split!r}: give up to three proportions of training, validation and test, such as "
            "969,30,1, the first above 0"
        )
    train, valid, test = parts + [Fraction(0)] * (3 - len(parts))
    return train, valid, test


def cut(document_starts: np.ndarray, shares: Sequence[Fraction], closed: bool) -> list[int]:
    """The borders, in tokens, of parts in proportion to `shares`: len(shares) + 1 of them, from 0 to the end.

    document_starts: int64 [documents + 1]. Borders lie between documents, as near to the proportion as can be, and each
    part with a share has a document. They lie anywhere if there are fewer documents than such parts, or if a part would
    miss its share by more than a tenth of it and more than 1 % of all; but not if a part would then have fewer than the
    two tokens that it needs. closed: the last token is an EOD, which does not count if borders lie anywhere.
    """
    total, count = int(document_starts[-1]), len(document_starts) - 1
    ends = list(itertools.accumulate(shares))[:-1]
    anywhere = [0, *(int(end * (total - closed)) if end < 1 else total for end in ends), total]
    parts_left = sum(share > 0 for share in shares)
    if count < parts_left:
        return anywhere
    borders = [0]  # in documents
    for share, end in zip(shares, ends, strict=False):
        border = borders[-1]
        if share:
            parts_left -= 1
            after = int(np.searchsorted(document_starts, int(end * total)))
            nearest = min(after - 1, after, key=lambda border: abs(int(document_starts[border]) - end * total))
            border = min(max(nearest, border + 1), count - parts_left)
        borders.append(border)
    between = document_starts[[*borders, count]].tolist()
    close = all(
        abs(stop - start - share * total) <= max(share / 10, Fraction(1, 100)) * total
        for share, (start, stop) in zip(shares, itertools.pairwise(between), strict=True)
    )
    filled = all(
        not share or stop - start >= LEAST_TOKENS
        for share, (start, stop) in zip(shares, itertools.pairwise(anywhere), strict=True)
    )
    return between if close or not filled else anywhere


def build_splits(
    *,
    train_data: Sequence[str],
    valid_data: Sequence[str] = (),
    test_data: Sequence[str] = (),
    data_path: Sequence[str] = (),
    valid_data_path: Sequence[str] = (),
    test_data_path: Sequence[str] = (),
    data_order: str = "shuffled",
    split: str,
    text_key: str | None = None,
    max_bad_fraction: float = MOST_BAD_LINES,
    tokenizer: Tokenizer,
    seq_length: int,
    cache_path: str | None = None,
    need_valid: bool = True,
    need_test: bool = True,
    log: Log,
) -> Splits:
    """Tokenise the files that are not tokenised yet, and open the splits. No data at all means the built-in corpus.

    Files in `valid_data` and `test_data`, or prefixes in `valid_data_path` and `test_data_path`, are those splits;
    `split` divides the rest, each pair of a blend by itself. A split that is needed and has a share is never empty:
    ValueError names --split or the file instead. log: gets a line at a time.
    """
    files = {
        name: files_of(paths, f"--{name}-data")
        for name, paths in zip(NAMES, (train_data, valid_data, test_data), strict=True)
    }
    prefixes = dict(zip(NAMES, (data_path, valid_data_path, test_data_path), strict=True))
    own = {name for name in NAMES[1:] if files[name] or prefixes[name]}
    asked = [Fraction(0) if name in own else share for name, share in zip(NAMES, parse_split(split), strict=True)]
    shares = [share / sum(asked) for share in asked]

    def open_all(name: str, flag: str) -> tuple[list[_Tokens], list[float] | None]:
        if prefixes[name]:
            found, weights = parse_blend(prefixes[name], flag)
            return [_open_prefix(prefix, flag, tokenizer) for prefix in found], weights
        paths = files[name] or [BUILTIN]
        data, key = tokenise(
            paths,
            text_key=text_key,
            max_bad_fraction=max_bad_fraction,
            tokenizer=tokenizer,
            cache_path=cache_path,
            log=log,
        )
        return [_Tokens(", ".join(paths), data, key)], None

    def dataset(name: str, flag: str, parts: Sequence[_Part], weights: Sequence[float] | None, share: str) -> Dataset:
        """The dataset of a split, of which `description` gets a line for each part. share: what --split asks for, empty
        if the files are the split."""
        components = []
        for part, start, stop in parts:
            if stop - start < LEAST_TOKENS:
                raise ValueError(
                    f"--split {split}: {part.name} has only {stop - start} tokens for the {name} split: give "
                    "it a greater share, more text, or a share of 0"
                )
            tokens, wrap = part.data.tokens, name == "train"
            components.append(GPT2Dataset(tokens, start, stop, seq_length, tokenizer, wrap=wrap, source=part.name))
        names = [part.name for part, *_ in parts]
        counts = block_counts(weights or list(map(len, components)), names, flag)
        for (part, start, stop), component, count in zip(parts, components, counts, strict=True):
            mixed = f"{100 * count / BLOCK:.2f} % of the samples out of " if len(parts) > 1 else ""
            starts, line = part.data.document_starts, f"{stop - start:,} tokens, {len(component):,} samples, "
            line += f"{100 * (stop - start) / len(part.data.tokens):.2f} % of {part.name}"
            if share:
                between = (starts[np.searchsorted(starts, (start, stop))] == (start, stop)).all()
                line += f" (asked: {share} %{'' if between else ', cut by position, not between documents'})"
            description.append(f"{name}: {mixed}{line}")
        return components[0] if len(parts) == 1 else BlendedDataset(components, counts, wrap=name == "train")

    opened, weights = open_all("train", "--data-path")
    documents = None
    if data_order == "megatron":
        if len(opened) > 1:
            raise ValueError("--data-order megatron is that of one prefix: leave it out, or give --data-path one")
        starts = opened[0].data.document_starts
        between = megatron_cut(len(starts) - 1, shares)
        borders, documents = [starts[between].tolist()], starts[: between[1] + 1]
    else:
        borders = [cut(part.data.document_starts, shares, tokenizer.eod in part.data.tokens[-1:]) for part in opened]
    made: dict[str, Dataset] = {}
    description: list[str] = []
    for number, (name, needed) in enumerate(zip(NAMES, (True, need_valid, need_test), strict=True)):
        if not needed:
            continue
        if name in own:
            flag = f"--{name}-data-path"
            parts, part_weights = open_all(name, flag)
            made[name] = dataset(name, flag, [(part, 0, len(part.data.tokens)) for part in parts], part_weights, "")
        elif shares[number]:
            ranges = [(part, *border[number : number + 2]) for part, border in zip(opened, borders, strict=True)]
            made[name] = dataset(name, "--data-path", ranges, weights, f"{100 * float(shares[number]):.2f}")
    fingerprints = [fingerprint_of(part.key, *map(str, cuts)) for part, cuts in zip(opened, borders, strict=True)]
    if weights is not None and len(opened) > 1:
        fingerprints += map(str, weights)
    if documents is not None:
        fingerprints.append(data_order)
    fingerprint = fingerprints[0] if len(fingerprints) == 1 else fingerprint_of(*fingerprints)
    description.append(f"fingerprint of the training data: {fingerprint[:16]}")
    return Splits(made["train"], made.get("valid"), made.get("test"), fingerprint, tuple(description), documents)


def _open_prefix(path: str, flag: str, tokenizer: Tokenizer) -> _Tokens:
    """Tokens that somebody prepared, and a hash of the index and of the size and both ends of the tokens. ValueError
    if their ids are another tokenizer's."""
    try:
        dataset = open_tokens(path, tokenizer.eod)
        manifest = dataset.manifest()
    except (FileNotFoundError, ValueError) as error:
        raise type(error)(f"{flag}: {error}") from None
    prefix, made_by = dataset.prefix, (manifest or {}).get("tokenizer")
    if made_by and made_by["fingerprint"] != tokenizer.fingerprint:
        raise ValueError(
            f"{flag} {prefix} was made by another tokenizer, {made_by['kind']} of "
            f"{made_by['vocab_size']:,} tokens, than {tokenizer.kind} of {tokenizer.vocab_size:,}: give "
            "its --tokenizer-type and files"
        )
    part = dataset.tokens[:CHECKED_TOKENS]
    if len(part) and not 0 <= int(part.min()) <= int(part.max()) < tokenizer.vocab_size:
        raise ValueError(
            f"{flag} {prefix} holds ids from {part.min()} to {part.max()}, but the tokenizer "
            f"{tokenizer.kind} has {tokenizer.vocab_size}: see --tokenizer-type"
        )
    with open(f"{prefix}.bin", "rb") as file:
        first = file.read(HASHED_BYTES)
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - HASHED_BYTES))
        last = file.read()
    index = b"" if isinstance(dataset, ForeignBin) else Path(f"{prefix}.idx").read_bytes()
    return _Tokens(path, dataset, fingerprint_of(index, str(size), first, last))


def unigram_bits_per_byte(
    train_tokens: np.ndarray, valid_tokens: np.ndarray, byte_lengths: np.ndarray, vocab_size: int
) -> float:
    """The cost of the held-out tokens under the frequencies of the training tokens, in bits per byte of their text.

    train_tokens, valid_tokens: integers [tokens]. byte_lengths: int64 [vocab_size], of each id's text. Every id is
    counted once more than it occurs, so that none is impossible.
    """
    counts = np.bincount(train_tokens, minlength=vocab_size).astype(np.float64) + 1.0
    found = np.bincount(valid_tokens, minlength=vocab_size)
    bits = float(found @ -np.log2(counts / counts.sum()))
    return bits / max(float(found @ byte_lengths), 1.0)


def xz_bits_per_byte(train_text: bytes, valid_text: bytes) -> float:
    """The cost of the held-out text, in bits per byte, to `xz -9` that has compressed the training text before:
    |xz(train + held)| - |xz(train)|."""
    # The preset's window of 64 MiB, but no larger than the text: the same output for a tenth of the memory.
    window = min(64 << 20, max(1 << 16, 1 << (len(train_text) + len(valid_text)).bit_length()))
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": window}]
    with ThreadPoolExecutor(2) as threads:  # lzma lets other threads run
        with_held, without = threads.map(
            lambda text: len(lzma.compress(text, filters=filters)), (train_text + valid_text, train_text)
        )
    return (with_held - without) * 8 / max(len(valid_text), 1)
