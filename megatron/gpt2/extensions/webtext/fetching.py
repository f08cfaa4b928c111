"""One page over HTTP or HTTPS, within a number of bytes and of seconds, whatever the server does.

The standard library's client times each read of a socket; a server that sends a byte now and then would hold it for
ever. Here a timer shuts the socket at the page's deadline. HTTP_PROXY, HTTPS_PROXY and NO_PROXY are followed.
"""

import contextlib
import http.client
import socket
import ssl
import threading
import time
import urllib.request
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from email.message import Message
from urllib.parse import quote, urljoin, urlsplit

REDIRECTS = 5
REDIRECT_CODES = (301, 302, 303, 307, 308)
AGENT = "gpt2-model-parallel/0.1 (text corpus builder)"
KINDS = ("text/html", "application/xhtml+xml", "text/plain")
NO_HOST, CONNECTION_FAILED = "no such host", "connection failed"


class Refused(Exception):
    """Why a page was not taken, in a few words that are the same for all such pages."""


@dataclass(frozen=True)
class Page:
    """What a server sent."""

    url: str  # after redirects
    body: bytes
    charset: str | None  # that the server names


def fetch(url: str, max_bytes: int, seconds: float, refusal: Callable[[str], str | None]) -> Page:
    """The page, of `max_bytes` at most, for which the server may take so many seconds. Refused says why there is none.
    refusal: is called with every address that a server redirects to, and returns why it is not to be fetched, or None.
    """
    deadline = time.monotonic() + seconds
    for _ in range(REDIRECTS + 1):
        left = deadline - time.monotonic()
        if left <= 0:
            raise Refused("too slow")
        found = _get(url, max_bytes, left)
        if isinstance(found, Page):
            return found
        try:
            url = urljoin(url, found)
        except ValueError:
            raise Refused("malformed address") from None
        if why := refusal(url):
            raise Refused(f"redirected: {why}")
    raise Refused(f"more than {REDIRECTS} redirects")


def _get(url: str, max_bytes: int, seconds: float) -> Page | str:
    """The page, or the address that the server redirects to."""
    try:
        connection, target = _connection(url, seconds)
    except (ValueError, UnicodeError):
        raise Refused("malformed address") from None
    late = threading.Event()
    sockets: list[socket.socket] = []  # the client forgets its own as soon as the headers are there

    def shut() -> None:
        late.set()
        with contextlib.suppress(OSError, AttributeError):
            (sockets or [connection.sock])[0].shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(seconds, shut)
    timer.daemon = True
    timer.start()
    try:
        connection.connect()
        sockets.append(connection.sock)
        connection.request(
            "GET",
            target,
            headers={
                "User-Agent": AGENT,
                "Accept": "text/html, text/plain;q=0.5",
                "Accept-Encoding": "gzip",
                "Connection": "close",
            },
        )
        response = connection.getresponse()
        if response.status in REDIRECT_CODES and (location := response.headers.get("Location")):
            return location
        if response.status != 200:
            raise Refused(f"status {response.status}")
        if response.headers.get_content_type() not in KINDS:
            raise Refused("no page of text")
        if int(response.headers.get("Content-Length") or 0) > max_bytes:
            raise Refused("too large")
        body = _body(response, max_bytes)
        if late.is_set():
            raise Refused("too slow")
        return Page(url, body, _charset(response.headers))
    except Refused:
        raise
    except (OSError, http.client.HTTPException, ValueError, zlib.error) as error:
        raise Refused("too slow" if late.is_set() or isinstance(error, TimeoutError) else failure(error)) from None
    finally:
        timer.cancel()
        connection.close()


def failure(error: Exception) -> str:
    """The words for an error of the network or of the server's answer."""
    if isinstance(error, socket.gaierror):
        return NO_HOST
    if isinstance(error, ssl.SSLError):
        return "no valid certificate"
    return CONNECTION_FAILED if isinstance(error, OSError) else "broken answer"


def _connection(url: str, seconds: float) -> tuple[http.client.HTTPConnection, str]:
    """A connection to the host, or to its proxy, and what to ask there for."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    path = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._") + (
        "?" + quote(parts.query, safe="/?%:@!$&'()*+,;=~-._") if parts.query else ""
    )
    proxy = None if urllib.request.proxy_bypass(host) else urllib.request.getproxies().get(parts.scheme)
    if not proxy:
        return kind(host, parts.port, timeout=seconds), path
    through = urlsplit(proxy if "//" in proxy else f"//{proxy}")
    connection = kind(through.hostname or "", through.port, timeout=seconds)
    if parts.scheme == "https":
        connection.set_tunnel(host, parts.port)
        return connection, path
    return connection, f"http://{parts.netloc}{path}"


def _body(response: http.client.HTTPResponse, limit: int) -> bytes:
    """The content, decompressed, of not more than `limit` bytes."""
    packed = response.headers.get("Content-Encoding", "identity").lower()
    if packed not in ("identity", "gzip"):
        raise Refused("packed in an unknown way")
    unpacker = zlib.decompressobj(wbits=31) if packed == "gzip" else None
    body = bytearray()
    while block := response.read1(1 << 16):
        body += unpacker.decompress(block, limit + 1 - len(body)) if unpacker else block
        if len(body) > limit:
            raise Refused("too large")
    if response.length or (unpacker and not unpacker.eof):
        raise Refused("broken answer")
    return bytes(body)


def _charset(headers: Message) -> str | None:
    with contextlib.suppress(LookupError, TypeError):
        return headers.get_content_charset()
    return None
