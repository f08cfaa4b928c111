"""Build the training, validation and test datasets from the data flags."""

import itertools
import lzma
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np

from data_utils.command_line import Log, plural
from data_utils.corpora import BUILTIN, MAX_BAD_FRACTION, expand_paths
from data_utils.files import fingerprint_of
from data_utils.gpt2_dataset import (
    BLEND_BLOCK,
    BlendedDataset,
    GPT2Dataset,
    MegatronOrderDataset,
    block_counts,
    megatron_split_borders,
    parse_blend,
)
from data_utils.indexed_dataset import RawTokenFile, TokenFile, open_token_file
from data_utils.samplers import Order, SampleDataset, SampleOrder
from data_utils.token_cache import tokenise
from data_utils.tokenizers.base import Tokenizer

SPLIT_NAMES = ("train", "valid", "test")
MIN_TOKENS = 2  # A split needs at least an input token and the next token, its label.
# A .bin file may have terabytes, so only its first tokens are checked, and only its first and last bytes are hashed.
CHECKED_TOKENS = 1 << 24
HASHED_BYTES = 1 << 20

Dataset = GPT2Dataset | BlendedDataset


@dataclass(frozen=True)
class Splits:
    """The datasets of the three splits; None for a split that is not needed or has no share.

    fingerprint: a hash of the training text, the tokenizer, the borders, the weights of a blend, and Megatron's order
        if it is used.
    description: lines for the log.
    train_documents: only for Megatron's order: int64 [documents + 1], the index in `train.tokens` at which each
        training document begins, and then the length of `train.tokens`.
    held_out_fingerprint: a hash of the separate validation and test files, and of the weights of their blends.
    """

    train: Dataset
    valid: Dataset | None
    test: Dataset | None
    fingerprint: str
    description: tuple[str, ...]
    train_documents: np.ndarray | None = None
    held_out_fingerprint: str = ""

    def training_samples(self, seed: int, num_samples: int) -> tuple[SampleDataset, Order]:
        """Return the dataset and the order for a `BatchLoader` that trains on `num_samples` samples in total."""
        if isinstance(self.train, BlendedDataset):
            return self.train.shuffled(seed), np.asarray
        if self.train_documents is not None:
            return MegatronOrderDataset(
                self.train, self.train_documents, seed=seed, num_samples=num_samples
            ), np.asarray
        return self.train, SampleOrder(len(self.train), seed)


@dataclass(frozen=True)
class _TokenSource:
    """An open token file.

    name: used in messages.
    key: a hash of the content.
    """

    name: str
    data: TokenFile
    key: str


_TokenRange = tuple[_TokenSource, int, int]  # a file, the first token, and one past the last token


def parse_split(split: str) -> tuple[Fraction, Fraction, Fraction]:
    """Parse --split into the proportions of training, validation and test. A missing proportion is 0. A ValueError
    names --split."""
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


def split_borders(document_starts: np.ndarray, shares: Sequence[Fraction], closed: bool) -> list[int]:
    """Divide tokens in proportion to `shares`. Return len(shares) + 1 borders, in tokens, from 0 to the end.

    Normally borders are between documents, as close to the shares as possible, and each part with a share gets at least
    one document. Borders are by position instead if there are fewer documents than parts, or if a part would differ
    from its share by more than 10 % of the share and more than 1 % of all tokens. Borders stay between documents if a
    part by position would have fewer than MIN_TOKENS tokens.

    document_starts: int64 [documents + 1].
    closed: whether the last token is an EOD. Borders by position do not count the last EOD.
    """
    total, count = int(document_starts[-1]), len(document_starts) - 1
    ends = list(itertools.accumulate(shares))[:-1]
    anywhere = [0, *(int(end * (total - closed)) if end < 1 else total for end in ends), total]
    parts_left = sum(share > 0 for share in shares)
    if count < parts_left:
        return anywhere
    borders = [0]  # The borders are counted in documents.
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
        not share or stop - start >= MIN_TOKENS
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
    max_bad_fraction: float = MAX_BAD_FRACTION,
    tokenizer: Tokenizer,
    seq_length: int,
    cache_path: str | None = None,
    need_valid: bool = True,
    need_test: bool = True,
    log: Log,
) -> Splits:
    """Tokenise files that are not in the cache, and open the splits. Without data, the built-in corpus is used.

    `valid_data` or `valid_data_path`, if given, is the validation split; `test_data` or `test_data_path` is the test
    split. `split` divides the training data into the remaining splits, each pair of a blend separately. Raises
    ValueError, which names --split or the file, if a split that is needed and has a share would be empty.

    train_data, valid_data, test_data: files of text or JSON, folders, or patterns.
    data_path, valid_data_path, test_data_path: prefixes of `.bin/.idx` pairs, with weights.
    data_order: "shuffled" or "megatron" (--data-order).
    split: the shares of the three splits, e.g. "969,30,1".
    text_key: the field of a JSON line that holds the text.
    max_bad_fraction: the share of lines that may be unusable.
    cache_path: the folder of tokenised files (default: in the cache folder of the user).
    need_valid, need_test: False leaves the split out.
    log: receives one line at a time.
    """
    files = {
        name: expand_paths(paths, f"--{name}-data")
        for name, paths in zip(SPLIT_NAMES, (train_data, valid_data, test_data), strict=True)
    }
    prefixes = dict(zip(SPLIT_NAMES, (data_path, valid_data_path, test_data_path), strict=True))
    separate = {name for name in SPLIT_NAMES[1:] if files[name] or prefixes[name]}
    requested = [
        Fraction(0) if name in separate else share for name, share in zip(SPLIT_NAMES, parse_split(split), strict=True)
    ]
    shares = [share / sum(requested) for share in requested]

    def open_all(name: str, flag: str) -> tuple[list[_TokenSource], list[float] | None]:
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
        return [_TokenSource(", ".join(paths), data, key)], None

    def dataset(
        name: str, flag: str, parts: Sequence[_TokenRange], weights: Sequence[float] | None, share: str
    ) -> Dataset:
        """Make the dataset of a split and add a line for each part to `description`.

        share: the share in --split, or "" if the split has separate files.
        """
        components = []
        for part, start, stop in parts:
            if stop - start < MIN_TOKENS:
                raise ValueError(
                    f"--split {split}: {part.name} has only {stop - start} tokens for the {name} split: give "
                    "it a larger share, more text, or a share of 0"
                )
            tokens, training = part.data.tokens, name == "train"
            components.append(
                GPT2Dataset(
                    tokens,
                    start,
                    stop,
                    seq_length,
                    tokenizer,
                    training=training,
                    source=part.name,
                    changed_file=part.data.changed_file,
                )
            )
        names = [part.name for part, *_ in parts]
        counts = block_counts(weights or list(map(len, components)), names, flag)
        for (part, start, stop), component, count in zip(parts, components, counts, strict=True):
            mixed = f"{100 * count / BLEND_BLOCK:.2f} % of the samples out of " if len(parts) > 1 else ""
            starts, line = part.data.document_starts, f"{stop - start:,} tokens, {plural(len(component), 'sample')}, "
            line += f"{100 * (stop - start) / len(part.data.tokens):.2f} % of {part.name}"
            if share:
                between = (starts[np.searchsorted(starts, (start, stop))] == (start, stop)).all()
                line += f" (asked: {share} %{'' if between else ', cut by position, not between documents'})"
            description.append(f"{name}: {mixed}{line}")
        return components[0] if len(parts) == 1 else BlendedDataset(components, counts, training=name == "train")

    opened, weights = open_all("train", "--data-path")
    documents = None
    if data_order == "megatron":
        if len(opened) > 1:
            raise ValueError("--data-order megatron supports only one prefix: leave it out, or give --data-path one")
        starts = opened[0].data.document_starts
        between = megatron_split_borders(len(starts) - 1, shares)
        borders, documents = [starts[between].tolist()], starts[: between[1] + 1]
    else:
        borders = [
            split_borders(part.data.document_starts, shares, tokenizer.eod in part.data.tokens[-1:]) for part in opened
        ]
    datasets: dict[str, Dataset] = {}
    description: list[str] = []
    held_out: list[str] = []
    for number, (name, needed) in enumerate(zip(SPLIT_NAMES, (True, need_valid, need_test), strict=True)):
        if not needed:
            continue
        if name in separate:
            flag = f"--{name}-data-path"
            parts, part_weights = open_all(name, flag)
            held_out += [name, *(part.key for part in parts), str(part_weights)]
            datasets[name] = dataset(name, flag, [(part, 0, len(part.data.tokens)) for part in parts], part_weights, "")
        elif shares[number]:
            ranges = [(part, *border[number : number + 2]) for part, border in zip(opened, borders, strict=True)]
            datasets[name] = dataset(name, "--data-path", ranges, weights, f"{100 * float(shares[number]):.2f}")
    fingerprints = [fingerprint_of(part.key, *map(str, cuts)) for part, cuts in zip(opened, borders, strict=True)]
    if weights is not None and len(opened) > 1:
        fingerprints += map(str, weights)
    if documents is not None:
        fingerprints.append(data_order)
    fingerprint = fingerprints[0] if len(fingerprints) == 1 else fingerprint_of(*fingerprints)
    description.append(f"fingerprint of the training data: {fingerprint[:16]}")
    return Splits(
        datasets["train"],
        datasets.get("valid"),
        datasets.get("test"),
        fingerprint,
        tuple(description),
        documents,
        fingerprint_of(*held_out),
    )


def _open_prefix(path: str, flag: str, tokenizer: Tokenizer) -> _TokenSource:
    """Open a token file. The source's key is a hash of the index, the size, and the first and last tokens. Raises
    ValueError if a different tokenizer made the file."""
    try:
        dataset = open_token_file(path, tokenizer.eod)
        dataset.check_tokenizer(tokenizer)
    except (FileNotFoundError, ValueError) as error:
        raise type(error)(f"{flag}: {error}") from None
    prefix = dataset.prefix
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
    index = b"" if isinstance(dataset, RawTokenFile) else Path(f"{prefix}.idx").read_bytes()
    return _TokenSource(path, dataset, fingerprint_of(index, str(size), first, last))


def unigram_bits_per_byte(
    train_tokens: np.ndarray, valid_tokens: np.ndarray, byte_lengths: np.ndarray, vocab_size: int
) -> float:
    """Return the cross-entropy of the validation tokens under the frequencies of the training tokens, in bits per byte.

    train_tokens, valid_tokens: integers [tokens].
    byte_lengths: int64 [vocab_size], the bytes of each id's text.

    Each count of a training token is increased by 1, so that no id has probability 0.
    """
    counts = np.bincount(train_tokens, minlength=vocab_size).astype(np.float64) + 1.0
    found = np.bincount(valid_tokens, minlength=vocab_size)
    bits = float(found @ -np.log2(counts / counts.sum()))
    return bits / max(float(found @ byte_lengths), 1.0)


def xz_bits_per_byte(train_text: bytes, valid_text: bytes) -> float:
    """Return how many bits `xz -9` needs per byte of the validation text after it has read the training text:
    |xz(train + valid)| - |xz(train)|."""
    # The window of xz's preset 9 is 64 MiB. A window as large as the text gives the same output and needs a tenth of
    # the memory.
    window = min(64 << 20, max(1 << 16, 1 << (len(train_text) + len(valid_text)).bit_length()))
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": window}]
    with ThreadPoolExecutor(2) as threads:  # lzma releases the GIL, so threads run at the same time.
        with_held, without = threads.map(
            lambda text: len(lzma.compress(text, filters=filters)), (train_text + valid_text, train_text)
        )
    return (with_held - without) * 8 / max(len(valid_text), 1)
