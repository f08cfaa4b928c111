"""A web of 193 pages behind a proxy on loopback: good pages, and every kind of page that must be dropped."""

from __future__ import annotations

import gzip
import http.server
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

_ENGLISH = """the of and to in is was that for on with as it by at from his her they which or we an were been their has
would what will there if can all who more when no out said about time people into your could than first other after
water through world still between never under last might great house again river morning light garden music letter
winter summer people children mountain village market doctor teacher window kitchen journey story question answer
history science country language picture weather bridge island forest animal machine engine station library theatre
quietly slowly suddenly carefully brought thought looked walked wanted remembered followed carried finished opened
believed discovered explained travelled gathered promised listened wondered important beautiful different ancient
narrow golden silver distant hungry friendly strange careful terrible wooden northern southern"""
ENGLISH = _ENGLISH.split()
OTHERS = [
    "le la les une des et dans pour que qui sur avec pas plus son elle nous vous être avoir maison rivière toujours "
    "jamais enfant lumière matin jardin lettre hiver été montagne école fenêtre voyage histoire réponse pays langue",
    "der die das und ein eine nicht mit auf für von dem sich auch werden haben immer niemals Straße Fenster Garten "
    "Morgen Licht Winter Sommer Schule Reise Geschichte Antwort Sprache Brücke Insel Wald Maschine Bücherei langsam",
    "el la los las una y en para que con por no más su ella nosotros siempre nunca niño luz mañana jardín carta "
    "invierno verano montaña escuela ventana viaje historia respuesta país lengua puente isla bosque máquina",
]
SITE = "http://news{}.example.com"


def sentences(words: list[str], seed: str, count: int) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(words, k=draw.randint(8, 16))).capitalize() + "." for _ in range(count)]


def page(paragraphs: list[str], title: str = "A page") -> str:
    """Return the HTML of an article with navigation and a footer."""
    links = "".join(f'<li><a href="/section/{number}">Section {number}</a></li>' for number in range(12))
    text = "".join(f"<p>{paragraph}</p>" for paragraph in paragraphs)
    return (
        f"<!DOCTYPE html><html><head><title>{title}</title><script>var tracker = 1;</script></head><body>"
        f"<nav><ul>{links}</ul></nav><article><h1>{title}</h1>{text}</article>"
        "<footer>Copyright. All rights reserved. Subscribe to our newsletter.</footer></body></html>"
    )


def article(seed: str, words: list[str] = ENGLISH, extra: str = "") -> list[str]:
    found = sentences(words, seed, 28)
    return [" ".join(found[start : start + 4]) + (extra if start == 8 else "") for start in range(0, 28, 4)]


@dataclass
class HttpAnswer:
    body: bytes | str = b""
    status: int = 200
    headers: tuple[tuple[str, str], ...] = (("Content-Type", "text/html"),)


HTML = ("Content-Type", "text/html")
EVALUATION = "One evening the old lighthouse keeper counted seventeen green lanterns drifting past the broken harbour"


def build() -> tuple[dict[str, HttpAnswer], dict[str, str]]:
    """Return the pages by URL, and a part of the text of each page that must remain."""
    pages: dict[str, HttpAnswer] = {}
    good: dict[str, str] = {}

    def add(kind: str, number: int, answer: HttpAnswer, survives: str = "") -> str:
        url = f"{SITE.format(number % 7)}/{kind}/{number}"
        pages[url] = answer
        if survives:
            good[url] = survives
        return url

    def first(seed: str) -> str:
        return sentences(ENGLISH, seed, 1)[0]

    for number in range(70):
        add("article", number, HttpAnswer(page(article(f"good{number}"))), first(f"good{number}"))
    for number in range(5):  # the server sends the charset
        text = page(article(f"latin{number}", extra=" Café, naïve, façade, £5."))
        add(
            "latin",
            number,
            HttpAnswer(text.encode("cp1252"), headers=(("Content-Type", "text/html; charset=cp1252"),)),
            "Café, naïve, façade, £5.",
        )
    for number in range(5):  # UTF-8 that was once read as Latin-1
        text = page(article(f"mojibake{number}", extra=" The cafÃ© was schÃ¶n."))
        add("mojibake", number, HttpAnswer(text), "The café was schön.")
    for number in range(5):  # invalid in any encoding
        body = page(article(f"broken{number}")).encode().replace(b"</h1>", b"</h1><p>\xff\xfe\x81 broken \xc3</p>")
        add("broken", number, HttpAnswer(body), first(f"broken{number}"))
    for number in range(5):
        body = gzip.compress(page(article(f"packed{number}")).encode())
        add("packed", number, HttpAnswer(body, headers=(HTML, ("Content-Encoding", "gzip"))), first(f"packed{number}"))
    for number in range(4):
        target = f"{SITE.format(8)}/moved/{number}"
        pages[target] = HttpAnswer(page(article(f"moved{number}")))
        add("redirect", number, HttpAnswer(status=301, headers=(("Location", target),)), first(f"moved{number}"))
    for number in range(30):  # half are exact copies, half have one more word
        extra = "" if number % 2 else " Indeed."
        add("zcopy", number, HttpAnswer(page(article(f"good{number}", extra=extra), title="A page copied")))
    for number in range(20):
        add("foreign", number, HttpAnswer(page(article(f"foreign{number}", OTHERS[number % 3].split()))))
    for number in range(16):
        add("boilerplate", number, HttpAnswer(page([] if number % 2 else sentences(ENGLISH, f"short{number}", 2))))
    for number in range(6):
        add("quoted", number, HttpAnswer(page(article(f"quoted{number}", extra=f" {EVALUATION}."))))
    for number in range(10):
        add("gone", number, HttpAnswer(status=404))
    for number in range(5):
        add("failing", number, HttpAnswer(status=500))
    for number in range(6):
        add("binary", number, HttpAnswer(b"%PDF-1.7", headers=(("Content-Type", "application/pdf"),)))
    add("inside", 0, HttpAnswer(status=302, headers=(("Location", "http://169.254.169.254/secret"),)))
    add("large", 0, HttpAnswer(b"<p>" + bytes(1_500_000)))
    assert len(pages) == 193, len(pages)
    return pages, good


def address_lists(pages: dict[str, HttpAnswer]) -> dict[str, str]:
    """Return two files of URLs, including URLs without text."""
    urls = [url for url in sorted(pages) if "/moved/" not in url]
    more = [
        "http://www.youtube.com/watch?v=1",
        "https://i.imgur.com/a",
        f"{SITE.format(1)}/picture.JPG",
        "not an address",
        "ftp://news1.example.com/file",
        "http://",
        "http://localhost/admin",
        "http://10.0.0.1/admin",
        urls[0] + "#part",
        urls[1].replace("http://", "https://www."),
        urls[2] + "/",
    ]
    return {"a.txt": "\n".join(urls[:100]) + "\n", "b.txt": "\n".join([*urls[100:], *more]) + "\n"}


@contextmanager
def web(pages: dict[str, HttpAnswer], seen: Callable[[str], object] = lambda url: None) -> Iterator[str]:
    """Start a proxy that answers for all sites, and yield its URL. seen: called for each request."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen(self.path)
            answer = pages.get(self.path, HttpAnswer(status=404))
            body = answer.body.encode() if isinstance(answer.body, str) else answer.body
            self.send_response(answer.status)
            for name, value in (*answer.headers, ("Content-Length", str(len(body)))):
                self.send_header(name, value)
            self.end_headers()
            with suppress(OSError):  # the client closed the connection
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Server(http.server.ThreadingHTTPServer):
        request_queue_size = 128  # with the default, connections wait for a second

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
