"""Work divided among processes, which end with the program that started them, however that ends."""

import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

POLL_SECONDS = 0.2

Result = TypeVar("Result")

_counters: Any = None  # of a worker: int64s in shared memory, at which its parent looks


def count_work(*amounts: int) -> None:
    """Report amounts of work to the parent. Only for a worker process."""
    with _counters.get_lock():
        for number, amount in enumerate(amounts):
            _counters[number] += amount


def _start_worker(counters: Any) -> None:
    """Without the thread a worker whose parent was killed would wait for work for ever, and hold its parent's locks."""
    global _counters
    _counters = counters
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def by_processes(
    work: Callable[..., Result],
    items: Sequence[tuple[Any, ...]],
    *,
    workers: int,
    counted: int,
    progress: Callable[..., object],
    start: str | None = None,
) -> list[Result]:
    """`work(*item)` of every item, in order, by `workers` processes at most.

    progress: is called with the `counted` amounts that workers gave to `count_work` since its last call. start: how a
    process starts, as in `multiprocessing`.
    After an error no further item is begun, and it is raised when those that were begun have ended. OSError if a
    worker dies.
    """
    context = multiprocessing.get_context(start)
    counters = context.Array("q", counted)
    shown = [0] * counted
    with ProcessPoolExecutor(min(workers, len(items)), context, _start_worker, (counters,)) as pool:
        try:
            futures = [pool.submit(work, *item) for item in items]
            left = set(futures)
            while left:
                done, left = wait(left, POLL_SECONDS, FIRST_COMPLETED)
                now = counters[:]
                progress(*(new - old for new, old in zip(now, shown, strict=True)))
                shown = now
                for future in done:
                    future.result()  # raises what the worker raised
            return [future.result() for future in futures]
        except BrokenProcessPool:
            raise OSError(
                "a worker process died, most likely for want of memory: the same command with fewer "
                "--workers goes on with the shards that are finished"
            ) from None
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
