"""Download: every address of a shard by threads, its text by processes, both in the order of the addresses."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from data_utils.curation import urls
from data_utils.curation.documents import as_line
from data_utils.curation.extraction import Extractors
from data_utils.curation.fetching import CONNECTION_FAILED, NO_HOST, Limits, Refused, fetch
from data_utils.curation.shard_run import ShardRun

Result = tuple[dict[str, Any], str | None]  # the record of an address, and its text


def download(run: ShardRun, *, max_bytes: int, page_seconds: float, extract_seconds: float, threads: int, per_host: int,
             processes: int, blacklist: str) -> None:
    """The stage: the pages that have a text, as {"url", "text"}; and records/<shard>.jsonl with what became of each
    address. blacklist: its sha256, recorded in the manifest."""
    limits = Limits(max_bytes, page_seconds)
    refusal = urls.refusal()
    hosts: dict[str, threading.Semaphore] = {}
    records = run.file(f"records/{run.shard.name}.jsonl")

    def get(url: str) -> Result:
        record: dict[str, Any] = {"url": url}
        try:
            with hosts.setdefault(urlsplit(url).netloc, threading.Semaphore(per_host)):
                page = fetch(url, limits, refusal)
            record.update({"result": "text", "bytes": len(page.body)})
            if page.url != url:
                record["redirected"] = page.url
            return record, extractors(page)
        except Refused as refused:
            return {**record, "result": str(refused)}, None

    extractors = Extractors(processes, extract_seconds)
    pool = ThreadPoolExecutor(threads)
    unreachable = 0
    try:
        for record, text in in_order(pool, get, run.lines(), 4 * threads):
            records.write(as_line(record))
            unreachable += record["result"] in (NO_HOST, CONNECTION_FAILED)
            if text is None:
                run.drop(record["result"], record["url"])
            else:
                run.write({"url": record["url"], "text": text})
    finally:
        pool.shutdown(cancel_futures=True)
        extractors.close()
    if unreachable == run.entered > 1:  # not to be remembered as what became of them
        raise OSError(f"no address of {run.shard.files[0]} could be reached: is there a network?")


def in_order(pool: ThreadPoolExecutor, function: Callable[[str], Result], items: Iterator[str], ahead: int
             ) -> Iterator[Result]:
    """pool.map, except that at most `ahead` items are taken before their turn: memory stays small, and the progress bar
    follows."""
    waiting: deque[Future[Result]] = deque()
    for item in items:
        waiting.append(pool.submit(function, item))
        if len(waiting) == ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()
