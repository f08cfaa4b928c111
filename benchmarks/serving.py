#!/usr/bin/env python3
"""Requests that arrive at random: texts that join and leave a running batch, beside batches that end as a whole.

    OMP_NUM_THREADS=2 python benchmarks/serving.py    # GPT-2 124M on a CPU, 10 minutes
    python benchmarks/serving.py --smoke              # a tiny model: does it run?

Both arms are the server's own `Batcher` with the same model, cache and requests; the static one takes requests only
when its batch is over, and computes texts that have ended along with the others, as this server did before. Requests
arrive faster than either serves them (Poisson); the lengths of prompts and texts are exponential. The arms take turns.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import random
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works in a clone that is not installed

import torch

import mpu
from benchmarks import report
from benchmarks.generation import GPT2, TINY, Ids
from megatron.gpt2.device import PRECISIONS
from megatron.gpt2.extensions.serve.batching import Batcher, Job
from megatron.gpt2.generate.generation import Batch, Continuation, EventStream, Generator
from megatron.gpt2.generate.load_model import store_by_column
from megatron.gpt2.generate.sampling import Sampling
from megatron.gpt2.model.gpt2 import GPT2Model

GOAL = 2.0  # times the tokens a second of static batches


@dataclasses.dataclass(frozen=True)
class Load:
    """requests: how many arrive, `seconds` apart on average. prompt, text: mean and most tokens. rows: at once."""

    requests: int
    seconds: float
    prompt: tuple[int, int]
    text: tuple[int, int]
    rows: int

    def draw(self, vocab_size: int) -> list[tuple[float, Continuation]]:
        """Of each request when it arrives, and what it asks for: the same at each call."""
        dice = random.Random(0)

        def length(mean: int, most: int) -> int:
            return min(1 + int(dice.expovariate(1 / mean)), most)

        found, now = [], 0.0
        for _ in range(self.requests):
            now += dice.expovariate(1 / self.seconds)
            prompt = [dice.randrange(vocab_size) for _ in range(length(*self.prompt))]
            found.append((now, Continuation(prompt, Sampling(temperature=0, max_new_tokens=length(*self.text)))))
        return found


class StaticBatch(Batch):
    """Takes those that wait when all its texts have ended."""

    def events(self) -> EventStream:
        while self._waiting:
            texts = [self._waiting.popleft() for _ in range(min(self._size, len(self._waiting)))]
            rows = range(len(texts))
            logits, _ = self._model.read([text.context for text in texts], rows, [False for _ in rows], 0)
            while True:
                totals = logits.logsumexp(1)
                for text, row, total in zip(texts, logits, totals, strict=True):
                    if not text.c.finish:
                        yield text.next(row, total)
                    if text.c.finish:
                        del text.context[1:]  # computed along with the others, as cheaply as possible
                if all(text.c.finish for text in texts):
                    break
                logits = self._model.step(
                    [text.context[-1] for text in texts], [len(text.context) - 1 for text in texts], rows
                )


class StaticGenerator(Generator):
    @contextlib.contextmanager
    def batch(self, rows: int, longest: int | None = None) -> Iterator[Batch]:
        with super().batch(rows, longest):
            yield StaticBatch(self, rows)


ARMS = {"static": StaticGenerator, "continuous": Generator}


def serve(generator: Generator, load: Load) -> tuple[dict[str, Any], list[list[int]]]:
    """What one run took, and the texts."""
    requests, batcher = load.draw(generator.tokenizer.vocab_size), Batcher(load.rows)
    began, steps, cache_bytes = time.perf_counter(), 0, 0
    arrived: dict[int, float] = {}
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    step = generator.model.step

    def counted(*arguments: Any) -> torch.Tensor:
        nonlocal steps, cache_bytes
        steps += 1
        assert generator.model.cache is not None
        cache_bytes = max(cache_bytes, generator.model.cache.num_bytes)
        return step(*arguments)

    def arrive() -> None:
        for number, (at, c) in enumerate(requests):
            time.sleep(max(0.0, began + at - time.perf_counter()))
            arrived[number] = time.perf_counter() - began

            def deliver(_: int, event: Any, number: int = number) -> None:
                now = time.perf_counter() - began
                first.setdefault(number, now)
                if event.finish:
                    last[number] = now
                    if len(last) == len(requests):
                        batcher.stop()

            batcher.submit(Job([c], deliver))

    clients = threading.Thread(target=arrive)
    clients.start()
    generator.model.step = counted  # type: ignore[method-assign, assignment]
    batcher.run(generator)
    generator.model.step = step  # type: ignore[method-assign]
    clients.join()
    texts = [c.ids for _, c in requests]
    assert all(len(ids) == c.sampling.max_new_tokens for ids, (_, c) in zip(texts, requests, strict=True))
    tokens, seconds = sum(map(len, texts)), max(last.values())
    return {
        "tokens_per_second": tokens / seconds,
        "seconds": seconds,
        "tokens": tokens,
        "token_steps": steps,
        "texts_per_step": (tokens - len(texts)) / steps,
        "cache_bytes": cache_bytes,
        "seconds_to_first_token": report.spread([first[i] - arrived[i] for i in first]),
        "seconds_to_last_token": report.spread([last[i] - arrived[i] for i in last]),
    }, texts


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a tiny model; writes nothing unless --output is given")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rows", type=int, default=16, help="texts at once (default: 16)")
    parser.add_argument("--precision", choices=PRECISIONS.values(), default="bf16", help="default: bf16")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/serving.json")
    args = parser.parse_args(argv)
    output = args.output or (None if args.smoke else report.RESULTS / "serving.json")
    config, load = (
        (TINY, Load(12, 0.001, (6, 30), (8, 30), 4))
        if args.smoke
        else (GPT2, Load(args.requests, 0.1, (32, 256), (64, 512), args.rows))
    )
    mpu.initialize_model_parallel(1)
    model = GPT2Model(config).eval().to({name: dtype for dtype, name in PRECISIONS.items()}[args.precision])
    store_by_column(model)
    result: dict[str, Any] = {
        **report.header("serving"),
        "threads": torch.get_num_threads(),
        "goal": GOAL,
        "model": dataclasses.asdict(config),
        "precision": args.precision,
        "load": dataclasses.asdict(load),
        "runs": [],
    }
    texts: dict[str, list[list[int]]] = {}
    for number in range(args.rounds):
        for arm in (list(ARMS), list(ARMS)[::-1])[number % 2]:
            row, texts[arm] = serve(ARMS[arm](model, Ids(model.vocab_size)), load)  # type: ignore[arg-type]
            result["runs"].append({"arm": arm, **row})
            waits = [row[f"seconds_to_{end}_token"]["median"] for end in ("first", "last")]
            print(
                f"{arm:11}{row['tokens_per_second']:8.1f} tokens/s, {row['texts_per_step']:5.2f} texts a step; "
                f"seconds to the first token {waits[0]:.2f}, to the last {waits[1]:.2f} (medians)",
                flush=True,
            )
        speeds = {arm: [run["tokens_per_second"] for run in result["runs"] if run["arm"] == arm] for arm in ARMS}
        equal = sum(map(list.__eq__, *texts.values()))
        result |= {
            "tokens_per_second": {arm: statistics.median(found) for arm, found in speeds.items()},
            "ratio": statistics.median(b / a for a, b in zip(*speeds.values(), strict=True)),  # of each round
            "equal_texts": f"{equal} of {load.requests}",
        }
        if output:
            report.write(output, result)
    print(f"continuous / static: {result['ratio']:.2f} (goal {GOAL}); equal texts: {result['equal_texts']}")


if __name__ == "__main__":
    main()
