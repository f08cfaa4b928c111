"""Download: every address of a shard by threads, its text by processes, both in the order of the addresses.

trafilatura finds the text of a page, in processes of its own. A page that takes too long costs a process, which is
killed and replaced.
"""

import contextlib
import multiprocessing
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any
from urllib.parse import urlsplit

from megatron.gpt2.extensions.webtext import urls
from megatron.gpt2.extensions.webtext.documents import as_line
from megatron.gpt2.extensions.webtext.fetching import CONNECTION_FAILED, NO_HOST, Page, Refused, fetch
from megatron.gpt2.extensions.webtext.shard_run import ShardRun

STARTING_SECONDS = 60.0
TOO_LATE, ENDED = "text not found in time", "its reading ended a process"

Result = tuple[dict[str, Any], str | None]  # the record of an address, and its text


def download(
    run: ShardRun,
    *,
    max_bytes: int,
    page_seconds: float,
    extract_seconds: float,
    threads: int,
    per_host: int,
    processes: int,
    blacklist: str,
) -> None:
    """The stage: the pages that have a text, as {"url", "text"}; and records/<shard>.jsonl with what became of each
    address. blacklist: its sha256, recorded in the manifest."""
    refusal = urls.refusal()
    hosts: dict[str, threading.Semaphore] = {}
    records = run.file(f"records/{run.shard.name}.jsonl")

    def get(url: str) -> Result:
        record: dict[str, Any] = {"url": url}
        try:
            with hosts.setdefault(urlsplit(url).netloc, threading.Semaphore(per_host)):
                page = fetch(url, max_bytes, page_seconds, refusal)
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


def in_order(
    pool: ThreadPoolExecutor, function: Callable[[str], Result], items: Iterator[str], ahead: int
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


def text_of(body: bytes, charset: str | None, url: str) -> str | None:
    """The main text of an HTML page; None where it has none. Bytes are decoded by the charset that the server names,
    else as UTF-8, else as trafilatura guesses."""
    import trafilatura

    content: bytes | str = body
    with contextlib.suppress(LookupError, ValueError):
        content = body.decode(charset or "utf-8")
    return trafilatura.extract(content, url=url, include_comments=False, include_tables=False, deduplicate=False)


def _serve(pipe: Connection) -> None:
    """Answer pages with their texts until the other end is closed, be it by a kill."""
    import logging

    logging.disable(logging.CRITICAL)  # trafilatura's remarks on each page
    import trafilatura  # noqa: F401 - not in the time of the first page

    pipe.send("ready")
    with contextlib.suppress(EOFError, KeyboardInterrupt, BrokenPipeError):
        while True:
            body, charset, url = pipe.recv()
            try:
                pipe.send((text_of(body, charset, url), None))
            except Exception as error:  # whatever a library makes of a hostile page
                pipe.send((None, type(error).__name__))


class Extractor:
    """A process that extracts texts. Called with a page it returns the text; Refused says why there is none."""

    def __init__(self) -> None:
        # A fresh interpreter: a copy of this one would take its threads' locks along.
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other,), daemon=True)
        self._process.start()
        other.close()
        self._ready = False

    def __call__(self, page: Page, seconds: float) -> str:
        """The text; Refused where there is none. After TOO_LATE and ENDED it is of no further use."""
        if not self._ready:
            if not self._pipe.poll(STARTING_SECONDS) or not self._process.is_alive():
                raise RuntimeError("a process that reads pages did not start")
            self._pipe.recv()
            self._ready = True
        try:
            self._pipe.send((page.body, page.charset, page.url))
            if not self._pipe.poll(seconds):
                raise Refused(TOO_LATE)
            text, error = self._pipe.recv()
        except (EOFError, OSError):  # a fault in a library, or memory
            raise Refused(ENDED) from None
        if error:
            raise Refused(f"not readable ({error})")
        if not text or not text.strip():
            raise Refused("page without text")
        return text

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.kill()
        self._process.join()


class Extractors:
    """Several processes, each used by one thread at a time. Called with a page they return its text, as an Extractor
    does."""

    def __init__(self, count: int, seconds: float) -> None:
        self._seconds = seconds
        self._free: queue.Queue[Extractor] = queue.Queue()
        for _ in range(count):
            self._free.put(Extractor())
        self._count = count

    def __call__(self, page: Page) -> str:
        extractor = self._free.get()
        try:
            return extractor(page, self._seconds)
        except Refused as refused:
            if str(refused) in (TOO_LATE, ENDED):
                extractor.close()
                extractor = Extractor()
            raise
        finally:
            self._free.put(extractor)

    def close(self) -> None:
        """End all processes, once no thread uses them."""
        for _ in range(self._count):
            self._free.get().close()
