"""Run the whole pipeline on a small web. The right documents remain, and a run with kills gives identical files."""

from __future__ import annotations

import gzip
import hashlib
import http.server
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.conftest import ROOT, needs

pytestmark = needs("trafilatura", "pebble", extra="curate")

ENGLISH = """the of and to in is was that for on with as it by at from his her they which or we an were been has would
what will there if can all who more when no out said about time people into your could than first other after water
through world still between never under last might great house again river morning light garden music letter winter
village doctor teacher window kitchen journey story question answer history science country language weather bridge
island forest animal machine engine station library quietly slowly suddenly brought thought looked walked
wanted""".split()
GERMAN = """der die das und ein eine nicht mit auf für von dem sich auch werden haben immer niemals Straße Fenster
Garten Morgen Licht Winter Sommer Schule Reise Geschichte Antwort Sprache Brücke Insel Wald Maschine
Bücherei langsam""".split()
EVALUATION = "One evening the old lighthouse keeper counted seventeen green lanterns drifting past the broken harbour"
FLAGS = {
    "URLS_FLAGS": "--urls-per-file 15",
    "SPLIT_FLAGS": "--split 60,20,20",
    "DOWNLOAD_FLAGS": "--max-bytes 1000000 --page-seconds 60 --extract-seconds 120 --threads 16 --per-host 8",
}

Answer = tuple[bytes, int, dict[str, str]]  # body, status and headers


def paragraphs(seed: str, words: list[str] = ENGLISH, count: int = 7) -> list[str]:
    draw = random.Random(seed)
    sentences = [" ".join(draw.choices(words, k=draw.randint(8, 16))).capitalize() + "." for _ in range(4 * count)]
    return [" ".join(sentences[first : first + 4]) for first in range(0, len(sentences), 4)]


def html(texts: list[str], title: str = "A page") -> bytes:
    """Return an article with navigation and a footer."""
    links = "".join(f'<li><a href="/section/{number}">Section {number}</a></li>' for number in range(12))
    return (
        f"<!DOCTYPE html><html><head><title>{title}</title><script>var tracker = 1;</script></head><body>"
        f"<nav><ul>{links}</ul></nav><article><h1>{title}</h1>{''.join(f'<p>{text}</p>' for text in texts)}</article>"
        "<footer>Copyright. All rights reserved. Subscribe to our newsletter.</footer></body></html>"
    ).encode()


def build() -> tuple[dict[str, Answer], dict[str, str]]:
    """Return every page by its URL, and a part of the text of each page that the corpus has."""
    pages: dict[str, Answer] = {}
    good: dict[str, str] = {}

    def add(
        kind: str, count: int, body: Callable[[str], bytes], text: str = "", status: int = 200, **headers: str
    ) -> None:
        """Add a page.

        text: a part of the corpus; "first" is the first paragraph.
        """
        for number in range(count):
            url, seed = f"http://news{number % 3}.example.com/{kind}/{number}", f"good{number}"
            seed = seed if kind in ("article", "zcopy") else f"{kind}{number}"
            pages[url] = (
                body(seed),
                status,
                {"Content-Type": "text/html", **{k.replace("_", "-"): v for k, v in headers.items()}},
            )
            if text:
                good[url] = paragraphs(seed)[0] if text == "first" else text

    def extended(text: str) -> Callable[[str], bytes]:
        return lambda seed: html([*paragraphs(seed), text])

    add("article", 16, lambda seed: html(paragraphs(seed)), "first")
    latin = "Café, naïve, façade, £5."
    add(
        "latin",
        1,
        lambda seed: extended(latin)(seed).decode().encode("cp1252"),
        latin,
        Content_Type="text/html; charset=cp1252",
    )
    # The text is UTF-8 that was once read as Latin-1.
    add("mojibake", 1, extended("The cafÃ© was schÃ¶n."), "The café was schön.")
    add("broken", 1, lambda seed: html(paragraphs(seed)).replace(b"</h1>", b"</h1><p>\xff\xfe\x81 \xc3</p>"), "first")
    add("packed", 1, lambda seed: gzip.compress(html(paragraphs(seed))), "first", Content_Encoding="gzip")
    add("redirect", 1, lambda seed: b"", "first", 301, Location="http://news8.example.com/moved/0")
    pages["http://news8.example.com/moved/0"] = html(paragraphs("redirect0")), 200, {"Content-Type": "text/html"}
    add("zcopy", 4, lambda seed: html([*paragraphs(seed), "Indeed."], "A page copied"))
    add("foreign", 3, lambda seed: html(paragraphs(seed, GERMAN)))
    add("short", 2, lambda seed: html(paragraphs(seed, count=1)[: seed.endswith("1")]))
    add("quoted", 2, extended(f"{EVALUATION}."))
    add("gone", 2, lambda seed: b"", status=404)
    add("binary", 1, lambda seed: b"%PDF-1.7", Content_Type="application/pdf")
    add("inside", 1, lambda seed: b"", status=302, Location="http://169.254.169.254/secret")
    add("large", 1, lambda seed: b"<p>" + bytes(1_500_000))
    return pages, good


PAGES, GOOD = build()
URLS = [url for url in sorted(PAGES) if "/moved/" not in url]
BAD_URLS = [
    "http://www.youtube.com/watch?v=1",
    "http://news1.example.com/picture.JPG",
    "not an address",
    "http://10.0.0.1/a",
]
# The added URLs are duplicates of others.
BAD_URLS += [URLS[0] + "#part", URLS[1].replace("http://", "https://www."), URLS[2] + "/"]


@contextmanager
def web(seen: Callable[[str], object] = lambda url: None) -> Iterator[str]:
    """Start a proxy that answers for all sites, and yield its URL.

    seen: is called for each request.
    """

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen(self.path)
            body, status, headers = PAGES.get(self.path, (b"", 404, {}))
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            with suppress(OSError):  # The client closed the connection.
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def start(folder: Path, output: str, proxy: str) -> subprocess.Popen[str]:
    """Start scripts/prepare_openwebtext.sh in a new process group."""
    environment = {**os.environ, **FLAGS, "OMP_NUM_THREADS": "1", "http_proxy": proxy, "no_proxy": ""}
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment.pop("HTTP_PROXY", None)
    flags = f"--urls urls.txt --output {output} --evaluation evaluation.jsonl --workers 1"
    command = ["bash", str(ROOT / "scripts/prepare_openwebtext.sh"), *flags.split()]
    out: dict[str, int] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, cwd=folder, env=environment, text=True, start_new_session=True, **out)  # type: ignore[call-overload, no-any-return]


def finish(process: subprocess.Popen[str]) -> str:
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 0, said
    return said


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Run the pipeline into once/; return the folder and the output."""
    folder = tmp_path_factory.mktemp("web")
    (folder / "urls.txt").write_text("\n".join([*URLS, *BAD_URLS]) + "\n")
    (folder / "evaluation.jsonl").write_text(json.dumps({"text": f"Before. {EVALUATION}, after."}) + "\n")
    with web() as proxy:
        return folder, finish(start(folder, "once", proxy))


def read_lines(*paths: Path) -> list[dict[str, str]]:
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def test_the_right_documents_survive(once: tuple[Path, str]):
    folder, said = once
    found = {document["url"]: document["text"] for document in read_lines(folder / "once/8-merged/corpus.jsonl")}
    assert set(found) == set(GOOD)
    for url, part in GOOD.items():
        assert part in found[url], url
        assert not any(word in found[url] for word in ("newsletter", "Section", "tracker"))
    records = read_lines(*(folder / "once/2-pages/records").iterdir())
    results = {record["url"].partition(".com/")[2]: record["result"] for record in records}
    assert len(results) == len(URLS)
    expected = {"large/0": "too large", "inside/0": "redirected: malformed", "gone/1": "status 404"}
    assert {name: results[name] for name in expected} == expected and results["binary/0"] == "no page of text"
    for line in ("  duplicate ", "  site without text ", "  status 404 ", "  not en ", "  in an evaluation set "):
        assert line in said
    names = {name: f"once/9-split/{name}.jsonl" for name in ("train", "valid", "test")}
    splits = [len(read_lines(folder / path)) for path in names.values()]
    assert sum(splits) == len(GOOD) and splits[0] > 8
    flags = " ".join(f"--{name}-data {path}" for name, path in names.items())
    assert said.rstrip().endswith(f"bash scripts/pretrain_gpt2.sh {flags}")


def file_hashes(folder: Path) -> dict[str, str]:
    """Return the sha256 of every file, including manifests, except the empty locks."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.wide
def test_it_goes_on_after_kills_to_the_same_result(once: tuple[Path, str]):
    folder, _ = once
    requests: list[str] = []
    again = folder / "again"

    def has(*names: str) -> Callable[[], bool]:
        return lambda: any((again / name).exists() for name in names)

    with web(requests.append) as proxy:
        for moment in (
            lambda: len(requests) > 5,  # The kill happens inside the first shard of the download.
            has("3-clean/.urls_00001.jsonl.tmp", "3-clean/urls_00001.jsonl"),  # The kill happens inside the cleanup.
            has("6-unique/urls_00001.jsonl"),  # The kill happens before the shard's manifest is written.
            has("8-merged/manifests/corpus.json"),  # The kill happens between two stages.
        ):
            process, deadline = start(folder, "again", proxy), time.monotonic() + 240
            while not moment():
                assert process.poll() is None, f"it ended too early:\n{process.communicate()[0]}"
                assert time.monotonic() < deadline
                time.sleep(0.001)
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        before = len(requests)
        finish(start(folder, "again", proxy))
    assert len(requests) == before, "a page was downloaded again"
    assert file_hashes(again) == file_hashes(folder / "once")
