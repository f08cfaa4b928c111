"""Test that continuations join and leave a running batch. Each starts soon, and its text is that of a batch of one."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import mpu
from megatron.gpt2.generate.generation import Continuation, ContinuousBatch, Finished, Generator, generate
from megatron.gpt2.generate.sampling import Sampling
from megatron.gpt2.model.gpt2 import GPT2Model
from tests.megatron.gpt2.generate.test_generation import CONFIG, SETTINGS, TOKENIZER

ROWS = 5


@pytest.fixture
def model() -> Iterator[GPT2Model]:
    mpu.initialize_model_parallel(1)
    yield endless(GPT2Model(CONFIG))
    mpu.destroy_model_parallel()


def endless(model: GPT2Model) -> GPT2Model:
    """Change `model` so that it never generates the end-of-document token."""
    with torch.no_grad():
        model.word_embeddings.weight[TOKENIZER.eod] = 0
    return model.eval()


class CountingGenerator:
    """Counts the token steps of a generator, and records the contexts that it reads."""

    def __init__(self, generator: Generator) -> None:
        self.generator, self.steps = generator, 0
        self.reads: list[tuple[int, int]] = []  # (steps before the read, tokens with padding)
        self.cache_bytes = set[int]()
        model, read, step = generator.model, generator.model.prefill, generator.model.decode

        def watched_read(contexts: Any, *others: Any) -> Any:
            self.reads.append((self.steps, len(contexts) * max(map(len, contexts))))
            return read(contexts, *others)

        def watched_step(*arguments: Any) -> Any:
            self.steps += 1
            if model.cache is not None:
                self.cache_bytes.add(model.cache._store.nbytes)
            return step(*arguments)

        model.prefill, model.decode = watched_read, watched_step  # type: ignore[method-assign, assignment]


def requests(count: int) -> list[tuple[int, Continuation]]:
    """Return random requests, each with the number of events before its arrival. Some prompts and texts are longer than
    the context, and some requests want no text."""
    dice = random.Random(3)
    found = [
        (
            dice.randrange(12 * count),
            Continuation(
                [dice.randrange(256) for _ in range(dice.choice([0, 1, 3, 9, 20, 32, 40]))],
                dataclasses.replace(
                    dice.choice([Sampling(temperature=0), *SETTINGS]),
                    seed=i,
                    max_new_tokens=dice.choice([0, 1, 2, 10, 30, 60]),
                ),
            ),
        )
        for i in range(count)
    ]
    return sorted(found, key=lambda request: request[0])


def served(batch: ContinuousBatch, arriving: list[tuple[int, Continuation]]) -> list[list[int]]:
    """Run the requests. Return the ids of each one, collected from the events."""
    waiting, ids, now = [*arriving], [list[int]() for _ in arriving], 0
    while waiting:
        batch.add(waiting.pop(0)[1])
        for event in batch.events():
            now += 1
            if not isinstance(event, Finished) and event.id != TOKENIZER.eod:
                ids[event.number].append(event.id)
            assert event.finish == arriving[event.number][1].finish
            while waiting and waiting[0][0] <= now:
                batch.add(waiting.pop(0)[1])
    assert all(c.finish and c.ids == mine for (_, c), mine in zip(arriving, ids, strict=True))
    return ids


def alone(model: GPT2Model, count: int) -> list[list[int]]:
    made = [c for _, c in requests(count)]
    for c in made:
        generate(model, TOKENIZER, [c])
    return [c.ids for c in made]


def test_each_text_equals_that_of_a_single_request(model: GPT2Model) -> None:
    watched = CountingGenerator(Generator(model, TOKENIZER))
    with watched.generator.batch(ROWS) as batch:
        found = served(batch, requests(60))
    assert found == alone(model, 60) and {len(ids) for ids in found} >= {0, 1, 2, 10, 30, 60}
    assert watched.steps < 0.5 * sum(map(len, found)), "they ran concurrently"
    assert all(tokens <= CONFIG.max_position_embeddings for _, tokens in watched.reads)
    steps = [step for step, _ in watched.reads if step < watched.steps]
    assert len(set(steps)) > 0.9 * len(steps), "one read between two steps, except when no text runs"
    assert watched.cache_bytes == {2 * ROWS * 2 * 32 * 32 * 4}  # The cache has l · rows · 2 · S · h numbers of 4 bytes.
    with Generator(model, TOKENIZER, recompute=True).batch(ROWS) as batch:
        assert served(batch, requests(60)) == found


def test_a_request_next_to_a_long_text_begins_within_two_steps() -> None:
    mpu.initialize_model_parallel(1)
    config = dataclasses.replace(CONFIG, max_position_embeddings=640)
    try:
        watched = CountingGenerator(Generator(endless(GPT2Model(config)), TOKENIZER))
        greedy = Sampling(temperature=0, max_new_tokens=500)
        asked: dict[int, int] = {}  # the step after which the request of each number arrived
        begun: dict[int, int] = {}
        with watched.generator.batch(8) as batch:
            batch.add(Continuation([1, 2, 3], greedy))
            for event in batch.events():
                begun.setdefault(event.number, watched.steps)
                if event.number == 0 and watched.steps in (3, 100, 321) and watched.steps not in asked.values():
                    for size in (600, 1, 20) if watched.steps == 100 else (200,) * 3:
                        number = batch.add(Continuation([7] * size, dataclasses.replace(greedy, max_new_tokens=30)))
                        asked[number] = watched.steps
    finally:
        mpu.destroy_model_parallel()
    assert watched.steps == 499 and len(asked) == 9
    assert all(begun[number] - step <= 2 for number, step in asked.items())


def test_ends_without_a_token(model: GPT2Model) -> None:
    """A continuation can be cancelled while it waits and while it runs; the next one takes its row."""
    with Generator(model, TOKENIZER).batch(1) as batch:
        made = [Continuation([65], Sampling(max_new_tokens=n)) for n in (9, 9, 0, 2)]
        for c in made:
            batch.add(c)
        seen = []
        for event in batch.events():
            seen.append((event.number, event.finish))
            if len(seen) == 3:
                made[0].cancel()
                made[1].cancel()
    assert seen == [(0, "")] * 3 + [(1, "cancelled"), (0, "cancelled"), (2, "length"), (3, ""), (3, "length")]
