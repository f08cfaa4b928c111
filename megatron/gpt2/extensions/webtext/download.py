"""Download: the pages of a shard of addresses by aiohttp, their text by trafilatura, both in the order of the addresses.

aiohttp bounds the time of a whole page, whatever the server does; HTTP_PROXY, HTTPS_PROXY and NO_PROXY are followed.
trafilatura finds the text in processes of its own. A page that takes too long costs a process, which is killed and
replaced.
"""

import asyncio
import contextlib
import logging
import multiprocessing
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any
from urllib.parse import urljoin, urlsplit

import aiohttp

from data_utils.worker_processes import end_with_parent
from megatron.gpt2.extensions.webtext.filters import refusal
from megatron.gpt2.extensions.webtext.shards import ShardRun, as_line

REDIRECTS = 5
REDIRECT_CODES = (301, 302, 303, 307, 308)
HEADERS = {
    "User-Agent": "gpt2-model-parallel/0.1 (text corpus builder)",
    "Accept": "text/html, text/plain;q=0.5",
    "Accept-Encoding": "gzip",
}
KINDS = ("text/html", "application/xhtml+xml", "text/plain")
NO_HOST, CONNECTION_FAILED = "no such host", "connection failed"

Result = tuple[dict[str, Any], str | None]  # the record of an address, and its text


class Refused(Exception):
    """Why a page was not taken, in a few words that are the same for all such pages."""


@dataclass(frozen=True)
class Page:
    """The answer of a server."""

    url: str  # after redirects
    body: bytes
    charset: str | None  # that the server names


def session() -> aiohttp.ClientSession:
    """A client without limits of its own: those of the flags count from the first connection to a page."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=None),
        headers=HEADERS,
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=True,
    )


async def fetch(
    client: aiohttp.ClientSession, url: str, max_bytes: int, seconds: float, refusal: Callable[[str], str | None]
) -> Page:
    """The page, of `max_bytes` at most, for which the server may take so many seconds. Refused says why there is none.
    refusal: is called with every address that a server redirects to, and returns why it is not to be fetched, or None.
    """
    try:
        return await asyncio.wait_for(_follow(client, url, max_bytes, refusal), seconds)
    except (asyncio.TimeoutError, TimeoutError):
        raise Refused("too slow") from None
    except (aiohttp.InvalidURL, ValueError):
        raise Refused("malformed address") from None
    except aiohttp.ClientConnectorDNSError:
        raise Refused(NO_HOST) from None
    except aiohttp.ClientSSLError:
        raise Refused("no valid certificate") from None
    except (aiohttp.ClientResponseError, aiohttp.ClientPayloadError):
        raise Refused("broken answer") from None
    except (aiohttp.ClientError, OSError):
        raise Refused(CONNECTION_FAILED) from None


async def _follow(
    client: aiohttp.ClientSession, url: str, max_bytes: int, refusal: Callable[[str], str | None]
) -> Page:
    for _ in range(REDIRECTS + 1):
        async with client.get(url, allow_redirects=False) as response:
            location = response.headers.get("Location")
            if response.status in REDIRECT_CODES and location:
                url = urljoin(url, location)
                if why := refusal(url):
                    raise Refused(f"redirected: {why}")
                continue
            if response.status != 200:
                raise Refused(f"status {response.status}")
            if response.content_type not in KINDS:
                raise Refused("no page of text")
            if (response.content_length or 0) > max_bytes:
                raise Refused("too large")
            body = bytearray()
            async for block in response.content.iter_any():
                body += block
                if len(body) > max_bytes:
                    raise Refused("too large")
            return Page(url, bytes(body), response.charset)
    raise Refused(f"more than {REDIRECTS} redirects")


def text_of(page: Page) -> tuple[str | None, str]:
    """The main text of a page, None if it has none; and the name of an error. Bytes are decoded by the charset that the
    server names, else as UTF-8, else as trafilatura guesses."""
    import trafilatura

    content: bytes | str = page.body
    with contextlib.suppress(LookupError, ValueError):
        content = page.body.decode(page.charset or "utf-8")
    try:
        options = {"include_comments": False, "include_tables": False, "deduplicate": False}
        return trafilatura.extract(content, url=page.url, **options), ""
    except Exception as error:  # whatever a library makes of a hostile page
        return None, type(error).__name__


def _start_extractor() -> None:
    logging.disable(logging.CRITICAL)  # trafilatura's remarks on each page
    end_with_parent()


class Extractors:
    """Several processes, each for one page at a time. Called with a page it returns its text; Refused says why there is
    none."""

    def __init__(self, count: int, seconds: float) -> None:
        self.seconds = seconds
        self._free: asyncio.Queue[tuple[ProcessPoolExecutor, Future[Any]]] = asyncio.Queue()
        for _ in range(count):
            self._free.put_nowait(self._start())

    def _start(self) -> tuple[ProcessPoolExecutor, Future[Any]]:
        """A process, and the extraction of no page: it loads the library, which is not in the time of the first page."""
        # A fresh interpreter: a copy of this one would take its threads' locks along.
        pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _start_extractor)
        return pool, pool.submit(text_of, Page("", b"", None))

    async def __call__(self, page: Page) -> str:
        pool, ready = await self._free.get()
        try:
            await asyncio.wrap_future(ready)
            text, error = await asyncio.wait_for(asyncio.wrap_future(pool.submit(text_of, page)), self.seconds)
        except (asyncio.TimeoutError, TimeoutError, BrokenProcessPool) as failure:
            kill(pool)
            pool, ready = self._start()
            died = isinstance(failure, BrokenProcessPool)
            raise Refused("its reading ended a process" if died else "text not found in time") from None
        finally:
            self._free.put_nowait((pool, ready))
        if error:
            raise Refused(f"not readable ({error})")
        if not text or not text.strip():
            raise Refused("page without text")
        return text

    def close(self) -> None:
        """End all processes that are free."""
        while not self._free.empty():
            kill(self._free.get_nowait()[0])


def kill(pool: ProcessPoolExecutor) -> None:
    """End a pool's process at once."""
    for process in list((pool._processes or {}).values()):
        process.kill()
    pool.shutdown(wait=False, cancel_futures=True)


async def results(run: ShardRun) -> AsyncIterator[Result]:
    """The record and the text of each address, in order. At most four times --threads addresses are begun before their
    turn: memory stays small, and the progress bar follows."""
    args, refused = run.args, refusal()
    extract = Extractors(args.processes, args.extract_seconds)
    connections = asyncio.Semaphore(args.threads)
    hosts: dict[str, asyncio.Semaphore] = {}

    async def result(client: aiohttp.ClientSession, url: str) -> Result:
        record: dict[str, Any] = {"url": url}
        try:
            async with hosts.setdefault(urlsplit(url).netloc, asyncio.Semaphore(args.per_host)), connections:
                page = await fetch(client, url, args.max_bytes, args.page_seconds, refused)
            record.update({"result": "text", "bytes": len(page.body)})
            if page.url != url:
                record["redirected"] = page.url
            return record, await extract(page)
        except Refused as why:
            return {**record, "result": str(why)}, None

    waiting: deque[asyncio.Task[Result]] = deque()
    try:
        async with session() as client:
            for url in run.lines():
                waiting.append(asyncio.create_task(result(client, url)))
                if len(waiting) == 4 * args.threads:
                    yield await waiting.popleft()
            while waiting:
                yield await waiting.popleft()
    finally:
        extract.close()


def download(run: ShardRun) -> None:
    """The pages that have a text, as {"url", "text"}; and records/<shard>.jsonl with the result of each address."""

    async def write() -> None:
        async for record, text in results(run):
            records.write(as_line(record))
            unreachable.append(record["result"] in (NO_HOST, CONNECTION_FAILED))
            if text is None:
                run.drop(record["result"], record["url"])
            else:
                run.write({"url": record["url"], "text": text})

    records = run.file(f"records/{run.shard.name}.jsonl")
    unreachable: list[bool] = []
    asyncio.run(write())
    if sum(unreachable) == run.entered > 1:  # not to be remembered as the result of these addresses
        raise OSError(f"no address of {run.shard.files[0]} could be reached: is there a network?")
