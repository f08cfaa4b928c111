"""Decontamination: drop every document that shares 13 words in a row with an evaluation set."""

import functools
import re
from collections.abc import Iterator, Sequence
from itertools import repeat
from pathlib import Path

import numpy as np

from megatron.gpt2.extensions.webtext.documents import read_documents
from megatron.gpt2.extensions.webtext.shard_run import ShardRun

WORDS = 13
WORD = re.compile(r"\w+")
FACTOR = np.uint64(0x9E3779B97F4A7C15)


def words_of(text: str) -> list[str]:
    """The words of `text`, letters and digits alone, in lower case: punctuation and white space make no difference."""
    return WORD.findall(text.lower())


class Index:
    """Every run of 13 words of `texts`. `too_short` counts the texts of fewer words, which are not looked for.
    ValueError where there is no longer one."""

    def __init__(self, texts: Iterator[str]) -> None:
        self.ids: dict[str, int] = {}  # from 1
        self.runs: set[bytes] = set()
        self.too_short = 0
        found = []
        for text in texts:
            words = words_of(text)
            ids = np.array([self.ids.setdefault(word, len(self.ids) + 1) for word in words], np.uint64)
            if len(ids) < WORDS:
                self.too_short += 1
                continue
            self.runs.update(ids[start : start + WORDS].tobytes() for start in range(len(ids) - WORDS + 1))
            found.append(hashes(ids))
        if not found:
            raise ValueError(f"the evaluation sets hold no text of {WORDS} words")
        self.hashes = np.unique(np.concatenate(found))

    def match(self, text: str) -> str | None:
        """The first run of 13 words of `text` that is in the index, or None."""
        words = words_of(text)
        if len(words) < WORDS:
            return None
        ids = np.fromiter(map(self.ids.get, words, repeat(0)), np.uint64, len(words))
        found = hashes(ids)
        places = np.searchsorted(self.hashes, found)
        places[places == len(self.hashes)] = 0
        for start in np.flatnonzero(self.hashes[places] == found).tolist():
            if ids[start : start + WORDS].tobytes() in self.runs:  # no matter what the hash says
                return " ".join(words[start : start + WORDS])
        return None


def hashes(ids: np.ndarray) -> np.ndarray:
    """uint64 [n] -> [n - 12]: a hash of every 13 ids in a row."""
    count = len(ids) - WORDS + 1
    values = np.zeros(count, np.uint64)
    for start in range(WORDS):
        values = values * FACTOR + ids[start : start + count]
    return values


@functools.lru_cache(1)  # a process does many shards
def index_of(paths: Sequence[Path], text_key: str) -> Index:
    """The index of the evaluation sets at `paths`. ValueError names a line that holds no text under `text_key`."""

    def skip(reason: str, sample: str) -> None:
        if reason != "empty":
            raise ValueError(sample)

    return Index(document["text"] for _, document in read_documents(paths, text_key, skip, lambda count: None))


def decontaminate(run: ShardRun, *, evaluation: dict[str, str], paths: Sequence[Path], evaluation_key: str) -> None:
    """The stage: drop each document that shares a run of 13 words with a text of the files at `paths`. evaluation:
    their names and sha256, recorded in the manifest."""
    index = index_of(tuple(paths), evaluation_key)
    for document in run.documents():
        found = index.match(document["text"])
        if found is None:
            run.write(document)
        else:
            run.drop("in an evaluation set", found)
