"""Many shards by several processes, each with a tokenizer of its own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any

from data_utils.preprocessing.plan import Shard
from data_utils.preprocessing.shards import Progress, Recipe, make_shard
from data_utils.tokenizers.base import Tokenizer
from data_utils.tokenizers.build import build_tokenizer
from data_utils.worker_processes import end_with_parent

POLL_SECONDS = 0.2

# What a worker process has: set once, when it starts.
_work: Callable[[int, Shard], dict[str, Any]]


def _start_worker(folder: Path, recipe: Recipe, arguments: Mapping[str, Any], counters: Any) -> None:
    """`counters`: int64 [2] in shared memory, bytes of input and tokens."""
    end_with_parent()

    def count(read: int, tokens: int) -> None:
        with counters.get_lock():
            counters[0] += read
            counters[1] += tokens

    global _work
    _work = partial(make_shard, folder, recipe=recipe, tokenizer=build_tokenizer(**arguments), progress=count)


def _work_on(number: int, spans: Shard) -> dict[str, Any]:
    return _work(number, spans)


def make_shards(folder: Path, shards: Sequence[Shard], recipe: Recipe, tokenizer: Tokenizer,
                arguments: Mapping[str, Any], *, workers: int, progress: Progress, finished: Callable[[int], object]
                ) -> list[dict[str, Any]]:
    """The manifests of all shards. One process makes them itself; each of several builds its own tokenizer from
    `arguments`.

    progress: is called with the bytes of input and the tokens since its last call. finished: is called with the number
    of each shard in order, once it is made. Raises what `make_shard` raises, and OSError where a worker dies.
    """
    facts: list[dict[str, Any]] = []
    if min(workers, len(shards)) == 1:
        for number, spans in enumerate(shards):
            facts.append(make_shard(folder, number, spans, recipe, tokenizer, progress))
            finished(number)
        return facts
    # Spawned, not forked: the libraries below start threads.
    context = multiprocessing.get_context("spawn")
    counters = context.Array("q", 2)
    reported = [0, 0]
    with ProcessPoolExecutor(min(workers, len(shards)), context, _start_worker,
                             (folder, recipe, arguments, counters)) as pool:
        try:
            futures = [pool.submit(_work_on, number, spans) for number, spans in enumerate(shards)]
            left = set(futures)
            while left:
                done, left = wait(left, POLL_SECONDS, FIRST_COMPLETED)
                now = counters[:]
                progress(now[0] - reported[0], now[1] - reported[1])
                reported = now
                for future in done:
                    future.result()  # raises what the worker raised
                while len(facts) < len(futures) and futures[len(facts)].done():
                    facts.append(futures[len(facts)].result())
                    finished(len(facts) - 1)
        except BrokenProcessPool:
            raise OSError("a worker process died, most likely for want of memory: the same command with fewer "
                          "--workers goes on with the shards that are finished") from None
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return facts
