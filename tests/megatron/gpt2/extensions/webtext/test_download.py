"""Fetch a page from servers that misbehave, and extract text from pages with errors."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import socket
import threading
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("aiohttp", reason="the extra [curate] is not installed")
pytest.importorskip("pebble", reason="the extra [curate] is not installed")
from megatron.gpt2.extensions.webtext.download import (
    Page,
    PageError,
    extract,
    extract_text,
    fetch,
    http_session,
    text_extractors,
)

DRIP = b"a byte now and then, without end"
OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=latin-1\r\n"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, list[bytes]]]:
    """Return an address, and a list of raw answers to its next connections. After the last one, the server is
    silent."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    answers: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))
    held = []

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            connection.recv(65536)
            if answers:
                body, drips, _ = answers.pop(0).partition(DRIP)
                connection.sendall(body)
                with contextlib.suppress(OSError):
                    while drips:
                        time.sleep(0.02)
                        connection.sendall(b"x")
                connection.close()
            else:
                held.append(connection)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}", answers
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()
    for connection in held:
        connection.close()


def refusal(url: str) -> str | None:
    return "site without text" if "facebook" in url else None


def get(url: str, max_bytes: int = 100_000, seconds: float = 60.0) -> Page:
    async def with_client() -> Page:
        async with http_session() as client:
            return await fetch(client, url, max_bytes, seconds, refusal)

    return asyncio.run(with_client())


def test_a_page_and_redirects(server: tuple[str, list[bytes]]):
    address, answers = server
    answers += [
        b"HTTP/1.1 301 Moved\r\nLocation: ../there?x=%20#end\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nd\xe9\r\n0\r\n\r\n",
    ]
    assert get(f"{address}/here/it is") == Page(f"{address}/there?x=%20#end", b"abcd\xe9", "latin-1")


@pytest.mark.parametrize(
    "answer, reason",
    [
        (b"HTTP/1.1 404 Not Found\r\n\r\n", "status 404"),
        (b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\n\r\nx", "no page of text"),
        (OK + b"Content-Length: 100001\r\n\r\n", "too large"),
        (OK + b"\r\n" + 100_001 * b"x", "too large"),
        (OK + b"Content-Encoding: gzip\r\n\r\n" + gzip.compress(bytes(1_000_000)), "too large"),
        (OK + b"Content-Length: 10\r\n\r\nabc", "broken answer"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n30\r\nabc", "broken answer"),
        (OK + b"Content-Encoding: gzip\r\n\r\nabc", "broken answer"),
        (OK + b"Content-Encoding: br\r\n\r\nabc", "broken answer"),
        (OK + b"Content-Length: many\r\n\r\nabc", "broken answer"),
        (b"hello", "broken answer"),
        (b"HTTP/1.1 200 OK\r\n" + b"X: " + 70_000 * b"y" + b"\r\n\r\n", "broken answer"),
        (b"", "connection failed"),
        (b"HTTP/1.1 302 Found\r\nLocation: http://[\r\n\r\n", "malformed address"),
        (b"HTTP/1.1 302 Found\r\nLocation: http://www.facebook.com/\r\n\r\n", "redirected: site without text"),
        (b"HTTP/1.1 302 Found\r\nLocation: /\r\n\r\n", "more than 5 redirects"),
    ],
)
def test_reasons(server: tuple[str, list[bytes]], answer: bytes, reason: str):
    address, answers = server
    answers += [answer] * 6  # for redirects, and because aiohttp repeats a request after a lost connection
    with pytest.raises(PageError) as refused:
        get(address)
    assert str(refused.value) == reason


@pytest.mark.parametrize("answer", [None, OK + b"\r\n" + DRIP, OK + b"X-More: " + DRIP])
def test_a_server_that_takes_too_long(server: tuple[str, list[bytes]], answer: bytes | None):
    address, answers = server
    answers += [answer] if answer else []
    with pytest.raises(PageError, match="too slow"):
        get(address, seconds=0.3)


def test_missing_hosts(server: tuple[str, list[bytes]]):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(PageError, match="connection failed"):
        get(f"http://127.0.0.1:{port}/")
    with pytest.raises(PageError, match="no such host"):
        get("http://no-such-host.invalid/")


def test_text_and_its_encoding():
    html = "<html><body><article><p>" + "Wörter über Wörter, schön gesetzt. " * 20 + "</p></article></body></html>"
    for charset, said in (("utf-8", None), ("latin-1", "latin-1"), ("utf-8", "latin-9x"), ("utf-8", "ascii")):
        assert "Wörter über Wörter" in str(extract_text(Page("http://example.com", html.encode(charset), said))[0])


def test_a_slow_extraction_kills_its_process():
    page = Page("u", b"<html><body><p>" + b"Some words of a text. " * 30 + b"</p></body></html>", None)
    # Extracting the text of this page takes seconds.
    many = b"".join(b"<p>Some words of paragraph %d.</p>" % number for number in range(60_000))
    long = Page("u", b"<html><body>" + many + b"</body></html>", None)

    async def extract_all() -> None:
        assert (await extract(pool, page, 20.0)).startswith("Some words")
        with pytest.raises(PageError, match="page without text"):
            await extract(pool, Page("u", b"", None), 20.0)
        with pytest.raises(PageError, match="text not found in time"):
            await extract(pool, long, 0.2)
        assert (await extract(pool, page, 20.0)).startswith("Some words")

    with text_extractors(1) as pool:
        asyncio.run(extract_all())
