"""Divide work among processes that end when their parent ends, even if it is killed."""

import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

POLL_SECONDS = 0.2
REPORTED_AT_ONCE = 1 << 20  # taking the lock for every small amount would cost more than the work

Result = TypeVar("Result")

_done: Any = None  # in a worker: an int64 in shared memory, which the parent reads
_unreported = 0


def report_progress(amount: int) -> None:
    """Report an amount of finished work to the parent. Only a worker process calls this."""
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


def exit_with_parent(done: Any = None) -> None:
    """Initialise a worker: start a thread that ends it with its parent. Otherwise a worker of a killed parent would
    wait for work forever and hold the parent's locks. done: the shared counter of `report_progress`."""
    global _done
    _done = done
    parent = multiprocessing.parent_process()
    assert parent is not None

    def exit_after_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=exit_after_parent, daemon=True).start()


def map_in_processes(
    work: Callable[..., Result],
    items: Sequence[tuple[Any, ...]],
    *,
    workers: int,
    progress: Callable[[int], object],
    start: str | None = None,
) -> list[Result]:
    """Return `work(*item)` for every item, in order, with at most `workers` processes.

    progress: is called with the work that workers reported since its last call. start: the start method of
    `multiprocessing`. After an error, no further item is started, and the error is raised when the running items have
    ended. Raises OSError if a worker dies.
    """
    context = multiprocessing.get_context(start)
    done, shown = context.Value("q", 0), 0
    with ProcessPoolExecutor(min(workers, len(items)), context, exit_with_parent, (done,)) as pool:
        try:
            futures = [pool.submit(_in_worker, work, item) for item in items]
            left = set(futures)
            while left:
                ended, left = wait(left, POLL_SECONDS, FIRST_COMPLETED)
                now = done.value
                progress(now - shown)
                shown = now
                for future in ended:
                    future.result()  # raises the worker's error
            return [future.result() for future in futures]
        except BrokenProcessPool:
            raise OSError(
                "a worker process died, probably because memory was full: run the same command with fewer "
                "--workers to continue after the finished shards"
            ) from None
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
