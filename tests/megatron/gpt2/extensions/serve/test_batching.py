"""Many clients at once: texts begin in the order of the requests and wait only for earlier ones, in a cache of constant
size."""

from __future__ import annotations

from typing import Any

import pytest

import mpu
from megatron.gpt2.extensions.serve.batching import Batcher, ServerStopping
from megatron.gpt2.generate.generation import Continuation, Event, Generator
from megatron.gpt2.generate.sampling import Sampling
from megatron.gpt2.model.gpt2 import GPT2Model
from tests.megatron.gpt2.generate.test_continuous_batch import CountingGenerator, endless
from tests.megatron.gpt2.generate.test_generation import CONFIG, TOKENIZER

ROWS = 8


@pytest.fixture
def watched() -> Any:
    mpu.initialize_model_parallel(1)
    yield CountingGenerator(Generator(endless(GPT2Model(CONFIG)), TOKENIZER))
    mpu.destroy_model_parallel()


def test_64_clients(watched: CountingGenerator) -> None:
    batcher = Batcher(ROWS)
    lengths: list[int] = []  # lengths of the texts, in the order of the requests
    begun: dict[int, int] = {}
    over: dict[int, str] = {}

    def ask(client: int) -> None:
        made = [
            Continuation([client] * (1 + client % 4), Sampling(max_new_tokens=1 + (7 * client + 5 * i) % 28))
            for i in range(1 + client % 3)
        ]
        start = len(lengths)
        lengths.extend(c.sampling.max_new_tokens for c in made)

        def deliver(number: int, event: Event | ServerStopping) -> None:
            begun.setdefault(start + number, watched.steps)
            assert not isinstance(event, ServerStopping)
            if event.finish:
                over[start + number] = event.finish
                if len(over) == len(lengths):
                    batcher.stop()

        batcher.submit(made, deliver)

    for client in range(64):
        ask(client)
    batcher.run(watched.generator)
    assert list(over.values()) == ["length"] * len(lengths) and len(lengths) == 127
    assert list(begun) == sorted(begun), "in the order of the requests"
    for number, step in begun.items():  # While a text waits, earlier texts fill all rows.
        assert step * ROWS <= sum(max(1, length - 1) for length in lengths[:number]), number
    assert watched.cache_bytes == {2 * ROWS * 2 * 32 * 32 * 4}  # The cache has l · rows · 2 · S · h numbers of 4 bytes.
