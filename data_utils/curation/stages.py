"""A stage over all its shards: in several processes, with a progress bar, and a closing report of what it dropped."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

from data_utils.corpora.files import MANIFESTS
from data_utils.curation.documents import Shard
from data_utils.curation.shard_run import Stage, run_shard
from data_utils.files.locks import file_lock
from data_utils.progress import progress_bar
from data_utils.worker_processes import end_with_parent

UNREADABLE = "unreadable"
MAX_BAD_FRACTION = 0.001
POLL_SECONDS = 0.2

Log = Callable[[str], None]


def run_stage(stage: Stage, shards: Sequence[Shard], output: Path, *, limit: int | None = None, workers: int = 1,
              max_bad_fraction: float = MAX_BAD_FRACTION, alone: bool = True, log: Log) -> list[dict[str, Any]]:
    """Every shard's manifest, in order; `log` gets the lines of the closing report.

    ValueError where nothing came in or nothing went out, where too much was unreadable, and where `output`, if it is
    to be read as a whole and so for these shards `alone`, holds something else. With a limit the shards are done one
    after the other until it is reached.
    """
    stage.recorded(limit)  # names a library that is missing before anything else
    output.mkdir(parents=True, exist_ok=True)
    with file_lock(output / ".lock", lambda: log(f"{output}: another process is writing there: waiting for it")):
        strangers = {path.stem for path in (output / MANIFESTS).glob("*.json")} - {shard.name for shard in shards}
        if strangers and alone and limit is None:
            raise ValueError(f"{output} holds {min(strangers)}, which is not in the input now: delete the folder, or "
                             "name another")
        size = sum(shard.bytes for shard in shards)
        with progress_bar(total=size, unit="B", unit_scale=True, desc=stage.name, leave=False) as bar:
            if limit is None and workers > 1 and len(shards) > 1:
                manifests = _parallel(stage, shards, output, min(workers, len(shards)), bar.update)
            else:
                manifests = []
                for shard in shards:
                    left = None if limit is None else limit - sum(manifest["entered"] for manifest in manifests)
                    if left is None or left > 0:
                        manifests.append(run_shard(stage, shard, output, left, bar.update))
        named = {entry["name"] for manifest in manifests for entry in manifest["outputs"]}
        for path in sorted(output.iterdir()):
            if alone and path.is_file() and not path.name.startswith(".") and path.name not in named:
                raise ValueError(f"{path} is not of this run: remove it, lest the next stage read it")
    for line in report(stage.name, manifests):
        log(line)
    check(manifests, max_bad_fraction)
    return manifests


def check(manifests: Sequence[dict[str, Any]], max_bad_fraction: float) -> None:
    """ValueError where a stage's result is no good to go on with."""
    entered, left = total(manifests, "entered"), total(manifests, "left")
    if not entered:
        raise ValueError("the input holds nothing: name files that do")
    bad = [manifest["dropped"][UNREADABLE] for manifest in manifests if UNREADABLE in manifest["dropped"]]
    count = sum(entry["count"] for entry in bad)
    if count > max_bad_fraction * entered:
        raise ValueError(f"{bad[0]['samples'][0]}; {count} of {entered} entries are unreadable, more than "
                         f"--max-bad-fraction {max_bad_fraction:g}: mend the files, or allow more")
    if not left:
        raise ValueError(f"all of {entered} entries were dropped and nothing is left: see the reasons above")


def total(manifests: Sequence[dict[str, Any]], key: str) -> int:
    """The sum of one count over all manifests."""
    return sum(manifest[key] for manifest in manifests)


def report(name: str, manifests: Sequence[dict[str, Any]]) -> Iterator[str]:
    """What a stage did, and a table of what it dropped: reason, count, share of the input, a sample."""
    entered, left = total(manifests, "entered"), total(manifests, "left")
    share = f" ({left / entered:.1%})" if entered else ""
    size = sum(entry["bytes"] for manifest in manifests for entry in manifest["outputs"])
    shards = f"{len(manifests)} shard{'s' * (len(manifests) != 1)}"
    yield f"{name}: {entered:,} in, {left:,} out{share}; {shards}, {size / 1e6:,.1f} MB"
    reasons: dict[str, tuple[int, str]] = {}
    for manifest in manifests:
        for reason, entry in manifest["dropped"].items():
            count, sample = reasons.get(reason, (0, entry["samples"][0]))
            reasons[reason] = count + entry["count"], sample
    if reasons:
        width = max(len(reason) for reason in reasons)
        yield f"  {'dropped':<{width}}  {'count':>10}  {'share':>6}  for example"
        for reason, (count, sample) in sorted(reasons.items(), key=lambda item: (-item[1][0], item[0])):
            yield f"  {reason:<{width}}  {count:>10,}  {count / entered:>6.1%}  {sample}"


_read_bytes: Any = None  # of a worker: a counter that its parent looks at


def _start_worker(counter: Any) -> None:
    global _read_bytes
    _read_bytes = counter
    end_with_parent()


def _count(read: int) -> None:
    with _read_bytes.get_lock():
        _read_bytes.value += read


def _work(stage: Stage, shard: Shard, output: Path) -> dict[str, Any]:
    unseen = 0

    def read(count: int) -> None:  # a lock for every line would cost more than the line
        nonlocal unseen
        unseen += count
        if unseen > 1 << 20:
            _count(unseen)
            unseen = 0

    try:
        return run_shard(stage, shard, output, read=read)
    finally:
        _count(unseen)


def _parallel(stage: Stage, shards: Sequence[Shard], output: Path, workers: int, bar: Callable[[int], object]
              ) -> list[dict[str, Any]]:
    """After an error no further shard is begun; what is done stays done."""
    counter = multiprocessing.Value("q", 0)
    shown = 0
    with ProcessPoolExecutor(workers, initializer=_start_worker, initargs=(counter,)) as pool:
        futures = [pool.submit(_work, stage, shard, output) for shard in shards]
        waiting = set(futures)
        while waiting:
            done, waiting = wait(waiting, POLL_SECONDS, FIRST_COMPLETED)
            if any(future.exception() for future in done):
                pool.shutdown(cancel_futures=True)  # and wait for those that run
            now = counter.value
            bar(now - shown)
            shown = now
            for future in done:
                future.result()
    return [future.result() for future in futures]
