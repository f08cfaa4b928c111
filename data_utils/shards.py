"""Divide work into shards. A process makes a shard completely or not at all, and no shard is made twice.

A shard has output files and a manifest, which is written last. The manifest describes the shard's input and all
parameters that affect its outputs, and contains the hashes of the outputs. After a kill, a crash or a full disk, the
same command continues.
"""

import contextlib
import errno
import json
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, TypeVar

from data_utils.files import find_damaged_chunks, read_checksummed_json, write_checksummed_json

Manifest = dict[str, Any]
Result = TypeVar("Result")


def make_shard(path: Path, folder: Path, expected: Mapping[str, Any], write: Callable[[], Manifest]) -> Manifest:
    """Make a shard if it is not complete, and return its manifest.

    path: the path of the manifest.
    expected: the entries of the manifest that describe the input and the parameters.
    write: a function that writes the outputs into `folder` and returns the other entries of the manifest. The entry
        "outputs" has the chunk hashes of each output file.
    """
    expected = json.loads(json.dumps(expected))
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        found = read_checksummed_json(path) or {}
        outputs: dict[str, Any] = found["outputs"]
        damaged = any(find_damaged_chunks(folder / name, parts) for name, parts in outputs.items())
        if expected.items() <= found.items() and not damaged:
            return found
        # Remove the files that other input or parameters gave, because the new files may have other names.
        for name in outputs:
            if folder.resolve() in (folder / name).resolve().parents:  # A manifest from someone else may name any file.
                (folder / name).unlink(missing_ok=True)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    manifest = {**expected, **write()}
    write_checksummed_json(path, manifest)
    return manifest


@contextlib.contextmanager
def disk_full_errors(output: object) -> Iterator[None]:
    """If the disk is full in the block, raise an OSError that says how to continue."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OSError(
            f"no room left on the disk of {output}: free some, and run the same command again; it continues with the "
            "finished shards"
        ) from None


def exit_with_parent() -> None:
    """Start a thread that ends this process with its parent, even if the parent is killed. Otherwise a worker would
    wait for work forever and hold the parent's locks."""
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
    finished: Callable[..., object],
    start: str | None = None,
) -> list[Result]:
    """Return `work(*item)` for every item, in order, with at most `workers` processes. With one worker or one item,
    this process does the work.

    finished: a function that is called as `finished(*item)` after each item.
    start: the start method of `multiprocessing`.

    After an error, no further item is started, and the error is raised when the running items have ended. Raises
    OSError if a worker dies.
    """
    workers = min(workers, len(items))
    if workers < 2:
        results = []
        for item in items:
            results.append(work(*item))
            finished(*item)
        return results
    with ProcessPoolExecutor(workers, multiprocessing.get_context(start), exit_with_parent) as pool:
        try:
            futures = {pool.submit(work, *item): item for item in items}
            for future in as_completed(futures):
                future.result()  # raises the error of the worker
                finished(*futures[future])
            return [future.result() for future in futures]
        except BrokenProcessPool:
            raise OSError(
                "a worker process died, probably because memory was full: run the same command with fewer "
                "--workers to continue after the finished shards"
            ) from None
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
