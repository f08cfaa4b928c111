"""Fuzz every target with a few fixed seeds, and test the defects that other seeds once found."""

from __future__ import annotations

import functools
import mmap
import re
from collections.abc import Callable

import pytest

from data_utils.tokenizers.gpt2 import BUILTIN_FILE
from tests.fuzz import targets
from tests.fuzz.fuzzing import Input, attempt

TARGETS = {target.name: target for target in targets.TARGETS}
# The number of changed inputs of a target. Targets that read a whole model or draw a report take longest.
INPUTS, MODEL_INPUTS = 40, 8


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Input]:
    """Return a function that makes the `Input` of a target, given its name, at most once."""
    return functools.cache(lambda name: Input(TARGETS[name], tmp_path_factory.mktemp("input")))


@pytest.mark.parametrize("name", TARGETS)
def test_inputs_are_taken_or_refused(inputs: Callable[[str], Input], name: str) -> None:
    given = inputs(name)
    changes = [given.changed(seed) for seed in range(MODEL_INPUTS if TARGETS[name].model else INPUTS)]
    outcomes = {given.attempt(changed) for changed in changes}
    assert {outcome for outcome in outcomes if outcome[0] not in ("accepted", "refused")} == set()
    assert len({data for changed in changes for data in changed.values()}) > len(changes) // 3


def refuse(words: str, error: type[Exception] = ValueError) -> None:
    raise error(words)


USED_MEMORY: list[mmap.mmap] = []


def use_memory() -> None:
    """Use 100 MiB of new memory. The allocator could give memory that an earlier test has freed."""
    USED_MEMORY.append(mmap.mmap(-1, 100 << 20))
    USED_MEMORY[-1].write(bytes(100 << 20))


BAD_READERS: dict[str, Callable[[], object]] = {
    "exception": lambda: refuse("missing", KeyError),
    "invariant": lambda: refuse("another length", AssertionError),
    "slow": lambda: sum(range(5_000_000)),
    "memory": use_memory,
    "no line": lambda: refuse("FOLDER/x: two\nlines"),
    "names nothing": lambda: refuse("somewhere"),
}


@pytest.mark.parametrize("name", BAD_READERS)
def test_a_defect_is_found(name: str) -> None:
    outcome, _ = attempt(BAD_READERS[name], 10, "FOLDER", most=0.01 if name == "slow" else 10)
    assert outcome.partition(":")[0] == name


# --- defects that changed inputs have shown --------------------------------------------------------------------------

NESTED = b"[" * 100_000
PAIR, REPORT, TOKENIZER = "pair's manifest behind its seal", "config.json of a report", "tokenizer of a checkpoint"
# Each case has the target, the end of a file's name, a pattern in the valid content, the replacement of the match, and
# words of the error. If the words are empty, the input must be accepted.
ALL = rb"(?s).*"
DEFECTS: list[tuple[str, str, bytes, bytes, str]] = [
    *(
        (PAIR, ".json", rb'"%s": (\{[^}]*}|[^,\n]+|\[.*?\n \])' % key, b'"%s": %s' % (key, value), "json: ")
        for key, value in (
            (rb".bin", b"null"),
            (rb".idx", b'[{"bytes": "3", "sha256": ""}]'),
            (rb"inputs", b'[{"file": "\\ud800"}]'),
            (rb"tokenizer", b'{"kind": "bytes"}'),
            (rb"tokenizer", b"7"),
            (rb"tokens", b"-1"),
            (rb"text_bytes", b'"many"'),
        )
    ),
    *((PAIR, ".json", ALL, body, "json") for body in (b'{"a": %b' % NESTED, b'["a"', b'{"a": 1, "a": 2')),
    *(
        (TOKENIZER, "facts.json", ALL, content, "tokenizer_facts.json")
        for content in (NESTED, b'{"kind": "' + b"x" * 5000 + b'", "fingerprint": ""}', b'\xff{"' + b"a" * 9000)
    ),
    # All 20 tokens are ends of documents, so the file has no text.
    (PAIR, ".json", rb'"tokens": \d+', b'"tokens": 20', ""),
    ("builtin_bpe.json", BUILTIN_FILE, ALL, NESTED, "builtin_bpe.json"),
    ("vocabulary and merges", "merges.txt", ALL, b"x" * 9000 + b" y\n", "lacks its token"),
    ("SentencePiece model", "sp.model", "\u2581c".encode(), b"\xff\xff\xffc", "is not a SentencePiece model"),
    *(
        (target, "config.json", ALL, content, "config")
        for target in (REPORT, "config.json")
        for content in (
            b"{",
            NESTED,
            b'{"config": {"parallel": {"x": 1}}}',
            b'{"config": {"train": 7}}',
            b'{"config": {"train": {"train_iters": "9"}}}',
            b'{"environment": 7}',
            b'{"train_iters": []}',
            b'{"config": {"%b": 1}}' % (b"x" * 9000),
        )
    ),
    ("DeepSpeed's file", "ds.json", ALL, b'{"a\\n\\ud800": 1}', ""),
    # A flipped bit in metrics.jsonl once stopped a run that was resumed.
    ("records of a run", "metrics.jsonl", rb'"lm_loss"', b'"lm_\xff"', ""),
    ("records of a run", "metrics.jsonl", rb'"lm_loss": 5.0', b'"lm_loss": 1e300', ""),
    ("records of a run", "metrics.jsonl", rb"\n", b"\n" + NESTED + b'\n{"iteration": 6}\n{"iteration": 7', ""),
    ("records of a run", "metrics.jsonl", rb'"lm_loss": 5.0', b'"lm_loss": "x"', ""),
    ("records of a run", "history.jsonl", rb"^", b'{"iteration": 1}\n', ""),
    ("records of a run", "samples.jsonl", ALL, b'{"iteration": 1}\n', ""),
]


@pytest.mark.parametrize("number", range(len(DEFECTS)))
def test_a_defect_that_was_found_stays_fixed(inputs: Callable[[str], Input], number: int) -> None:
    target, end, old, new, words = DEFECTS[number]
    given = inputs(target)
    (name,) = (name for name in given.changeable if name.endswith(end))
    content, count = re.subn(old, lambda _: new, given.valid[name], count=1)
    assert count
    outcome, line = given.attempt(given.repaired({name: content}))
    assert outcome == ("refused" if words else "accepted") and words in line, line
