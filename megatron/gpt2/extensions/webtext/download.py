"""Download the pages of a list of URLs with aiohttp, and extract their text with trafilatura, in the order of the
URLs.

The time of a page is limited from the connection to the last byte. HTTP_PROXY, HTTPS_PROXY and NO_PROXY are used.
trafilatura runs in the processes of a pebble pool. If the extraction of a page takes too long, its process is killed
and replaced.
"""

import asyncio
import contextlib
import itertools
import logging
import multiprocessing
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pebble

from data_utils.shards import exit_with_parent
from megatron.gpt2.extensions.webtext.filters import make_url_filter
from megatron.gpt2.extensions.webtext.step import StepRun, json_line

REDIRECTS = 5
HEADERS = {
    "User-Agent": "gpt2-model-parallel/0.1 (text corpus builder)",
    "Accept": "text/html, text/plain;q=0.5",
    "Accept-Encoding": "gzip",
}
KINDS = ("text/html", "application/xhtml+xml", "text/plain")
NO_HOST, CONNECTION_FAILED = "no such host", "connection failed"


Result = tuple[dict[str, Any], str | None]  # the record of a URL, and its text


class PageError(Exception):
    """Raised when a page is dropped. The message is the reason; the report counts pages by this message."""


@dataclass(frozen=True)
class Page:
    """The response of a server."""

    url: str  # the URL after redirects
    body: bytes
    charset: str | None  # the encoding that the server states


def http_session() -> aiohttp.ClientSession:
    """Make a client without a limit on connections and without cookies."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    cookies = aiohttp.DummyCookieJar()
    return aiohttp.ClientSession(connector=connector, headers=HEADERS, cookie_jar=cookies, trust_env=True)


async def fetch(
    client: aiohttp.ClientSession, url: str, max_bytes: int, seconds: float, refusal: Callable[[str], str | None]
) -> Page:
    """Fetch a page of at most `max_bytes` within `seconds`. Raises PageError, with the reason, if the page cannot be
    fetched.

    refusal: called with the target of every redirect; returns the reason not to fetch this URL, or None.
    """
    requests = itertools.count()

    async def check_redirect(request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
        if next(requests) and (why := refusal(str(request.url))):
            raise PageError(f"redirected: {why}")
        return await send(request)

    limits: Any = {"timeout": aiohttp.ClientTimeout(total=seconds), "max_redirects": REDIRECTS + 1}
    try:
        async with client.get(url, middlewares=[check_redirect], **limits) as response:
            if response.status != 200:
                raise PageError(f"status {response.status}")
            if response.content_type not in KINDS:
                raise PageError("no page of text")
            if (response.content_length or 0) > max_bytes:
                raise PageError("too large")
            body = bytearray()
            async for block in response.content.iter_any():
                body += block
                if len(body) > max_bytes:
                    raise PageError("too large")
            return Page(str(response.real_url) if response.history else url, bytes(body), response.charset)
    except (asyncio.TimeoutError, TimeoutError):
        raise PageError("too slow") from None
    except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError, ValueError):
        raise PageError("malformed address") from None
    except aiohttp.ClientConnectorDNSError:
        raise PageError(NO_HOST) from None
    except aiohttp.ClientSSLError:
        raise PageError("no valid certificate") from None
    except aiohttp.TooManyRedirects:
        raise PageError(f"more than {REDIRECTS} redirects") from None
    except (aiohttp.ClientResponseError, aiohttp.ClientPayloadError):
        raise PageError("broken answer") from None
    except (aiohttp.ClientError, OSError):
        raise PageError(CONNECTION_FAILED) from None


def extract_text(page: Page) -> str | None:
    """Return the main text of a page, or None. The bytes are decoded with the server's charset, otherwise as UTF-8. If
    decoding fails, trafilatura guesses the charset."""
    import trafilatura

    content: bytes | str = page.body
    with contextlib.suppress(LookupError, ValueError):
        content = page.body.decode(page.charset or "utf-8")
    options = {"include_comments": False, "include_tables": False, "deduplicate": False}
    return trafilatura.extract(content, url=page.url, **options)


def _start_extractor() -> None:
    import trafilatura  # noqa: F401  so that the time of the first page does not include loading the library

    logging.disable(logging.CRITICAL)  # trafilatura logs lines for each page.
    exit_with_parent()


def text_extractors(count: int) -> pebble.ProcessPool:
    """Return a pool of `count` processes for `extract`."""
    # Start new interpreters, because a fork would copy locks that threads of this process hold.
    return pebble.ProcessPool(count, initializer=_start_extractor, context=multiprocessing.get_context("spawn"))


async def extract(pool: pebble.ProcessPool, page: Page, seconds: float) -> str:
    """Return the main text of a page. Raises PageError with the reason if no text is found. A process that takes longer
    than `seconds` is killed."""
    try:
        text = await asyncio.wrap_future(pool.schedule(extract_text, args=[page], timeout=seconds))
    except (asyncio.TimeoutError, TimeoutError):
        raise PageError("text not found in time") from None
    except pebble.ProcessExpired:
        raise PageError("its extraction ended a process") from None
    except Exception as error:  # A hostile page may cause any error in the extraction.
        raise PageError(f"not readable ({type(error).__name__})") from None
    if not text or not text.strip():
        raise PageError("page without text")
    return text


async def fetch_records(run: StepRun) -> AsyncIterator[Result]:
    """Yield the record and the text of each URL, in order. At most 4 · --threads URLs are in progress, which limits
    memory."""
    args, refused = run.args, make_url_filter()
    pool = text_extractors(args.processes)
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
            return record, await extract(pool, page, args.extract_seconds)
        except PageError as why:
            return {**record, "result": str(why)}, None

    waiting: deque[asyncio.Task[Result]] = deque()
    try:
        async with http_session() as client:
            for url in run.lines():
                waiting.append(asyncio.create_task(result(client, url)))
                if len(waiting) == 4 * args.threads:
                    yield await waiting.popleft()
            while waiting:
                yield await waiting.popleft()
    finally:
        pool.stop()
        pool.join()


def download(run: StepRun) -> None:
    """Write the pages with text as {"url", "text"}, and the result of each URL to records/<input>.jsonl."""

    async def write() -> None:
        async for record, text in fetch_records(run):
            records.write(json_line(record))
            if text is None:
                run.drop(record["result"], record["url"])
            else:
                run.write({"url": record["url"], "text": text})

    records = run.file(f"records/{run.source.name}.jsonl")
    asyncio.run(write())
    # If no server answered, the network may be down. An error leaves no records, so the URLs are tried again later.
    if run.dropped.keys() <= {NO_HOST, CONNECTION_FAILED} and not run.left and run.entered > 1:
        raise OSError(f"no URL of {run.source.files[0]} could be reached: is there a network?")
