"""Work divided among processes, which end with the program that started them, however that ends."""

import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

POLL_SECONDS = 0.2
REPORTED_AT_ONCE = 1 << 20  # a lock for every small amount would cost more than the work

Result = TypeVar("Result")

_done: Any = None  # of a worker: an int64 in shared memory, at which its parent looks
_unreported = 0


def count_work(amount: int) -> None:
    """Report an amount of work to the parent. Only for a worker process."""
    global _unreported
    _unreported += amount
    if _unreported > REPORTED_AT_ONCE:
        _report()


def _report() -> None:
    global _unreported
    with _done.get_lock():
        _done.value += _unreported
    _unreported = 0


def _in_worker(work: Callable[..., Result], item: tuple[Any, ...]) -> Result:
    try:
        return work(*item)
    finally:
        _report()


def end_with_parent(done: Any = None) -> None:
    """Start a worker. Without the thread a worker whose parent was killed would wait for work for ever, and hold its
    parent's locks."""
    global _done
    _done = done
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
    progress: Callable[[int], object],
    start: str | None = None,
) -> list[Result]:
    """`work(*item)` of every item, in order, by `workers` processes at most.

    progress: is called with the amount that workers gave to `count_work` since its last call. start: how a process
    starts, as in `multiprocessing`.
    After an error no further item is begun, and it is raised when those that were begun have ended. OSError if a
    worker dies.
    """
    context = multiprocessing.get_context(start)
    done, shown = context.Value("q", 0), 0
    with ProcessPoolExecutor(min(workers, len(items)), context, end_with_parent, (done,)) as pool:
        try:
            futures = [pool.submit(_in_worker, work, item) for item in items]
            left = set(futures)
            while left:
                ended, left = wait(left, POLL_SECONDS, FIRST_COMPLETED)
                now = done.value
                progress(now - shown)
                shown = now
                for future in ended:
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
