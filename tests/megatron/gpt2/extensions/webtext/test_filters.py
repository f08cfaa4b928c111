"""Test the steps for web text: the URL filter, cleanup, decontamination, splits, near-duplicates, and the download from
servers that misbehave."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("aiohttp", reason="the extra [curate] is not installed")
pytest.importorskip("pebble", reason="the extra [curate] is not installed")
from megatron.gpt2.extensions.webtext import commands
from megatron.gpt2.extensions.webtext.download import (
    Page,
    PageError,
    extract,
    fetch,
    http_session,
    text_extractors,
)
from megatron.gpt2.extensions.webtext.filters import (
    SUSPECT,
    fix_text,
    make_url_filter,
)
from megatron.gpt2.extensions.webtext.step import json_line
from tests.conftest import needs

pytestmark = needs("tldextract", extra="curate")
PIECES = ["&amp;", "<b>", "\n", "\r\n", "\r", "Ã©", "â€œ", "â€™", "\x1b[31m", "ﬁ", "“", "plain words ", "\u2028", "é"]
TEXT = st.lists(st.one_of(st.text(max_size=20), st.sampled_from(PIECES)), max_size=12).map("".join)


@pytest.mark.parametrize(
    "url, reason",
    [
        ("https://www.bbc.co.uk/news/article-1", None),
        ("http://blog.example.com/2019/01/a-post.html?page=2", None),
        ("http://[2001:db8::1]/page", "malformed"),
        ("https://m.youtube.com/watch?v=1", "site without text"),
        ("https://cdn.example.com/a/photo.JPEG?width=3", "file that is no page"),
        ("ftp://example.com/a", "neither http nor https"),
        ("http://example.com:99999/", "malformed"),
        ("http://a", "too short"),
        ("http://example.com/" + "a" * 2100, "too long"),
    ],
)
def test_url_filter(url: str, reason: str | None):
    assert make_url_filter()(url) == reason


@settings(max_examples=200, deadline=None)
@given(st.one_of(TEXT, st.text(st.characters(max_codepoint=0x7E), max_size=60)))
def test_fixed_text_is_ftfys(text: str):
    import ftfy

    assert fix_text(text) == ftfy.fix_text(text)
    assert SUSPECT.search(text) or fix_text(text) is text


def test_the_split_is_stable_and_near_its_shares(tmp_path: Path):
    def split(count: int) -> dict[str, str]:
        """Return the split of each document."""
        path, output = tmp_path / f"{count}.jsonl", tmp_path / f"{count}"
        path.write_bytes(b"".join(json_line({"text": f"document {number}"}) for number in reversed(range(count))))
        program("split_dataset", path, output, "--split", "90,8,2")
        return {json.loads(line)["text"]: part.stem for part in output.glob("*.jsonl") for line in part.open()}

    grown = split(2000)
    assert grown.items() > split(1000).items()
    for name, count in (("train", 1800), ("valid", 160), ("test", 40)):
        assert abs([*grown.values()].count(name) - count) < 40


def five_grams(text: str) -> set[str]:
    return {text[start : start + 5] for start in range(len(text) - 4)}


def program(name: str, *arguments: Path | str) -> None:
    getattr(commands, name)([*map(str, arguments), "--workers", "1"])


def test_search_group_and_removal(tmp_path: Path):
    """A family is a text, two changed copies and an equal copy. The text and the second changed copy differ too much to
    be a pair."""
    draw, other = random.Random(0), ["other"] * 12
    documents = []  # (text, family); the texts of family 99 have no duplicates
    for family in (*range(20), *[99] * 40):
        words = ["".join(draw.choices("abcdefghijklmnop", k=6)) for _ in range(150)]
        copies = [other + words[12:], [*other, *words[12:60], *other, *words[72:]], words] if family < 99 else []
        documents += [(" ".join(member), family) for member in (words, *copies)]
    draw.shuffle(documents)
    (tmp_path / "in").mkdir()
    # Documents of a compressed file are copied, so that they can be read again at their offsets.
    for name, pack, part in (("a.jsonl", bytes, documents[:50]), ("b.jsonl.gz", gzip.compress, documents[50:])):
        (tmp_path / "in" / name).write_bytes(pack(b"".join(json_line({"text": text}) for text, _ in part)))

    program("find_duplicates", tmp_path / "in", tmp_path / "found", "--min-jaccard", "0.85")
    program("group_duplicate_url", tmp_path / "found/pairs.jsonl", tmp_path / "groups")
    groups = tmp_path / "groups/groups.jsonl"
    program("remove_group_duplicates", groups, tmp_path / "in", tmp_path / "out")
    for line in (tmp_path / "found/pairs.jsonl").read_text().splitlines()[1:]:
        one, two = (five_grams(documents[number][0]) for number in json.loads(line)["pair"])
        index = len(one & two) / len(one | two)
        assert index >= 0.85 and json.loads(line)["jaccard"] == pytest.approx(index, abs=1e-4)
    left = [json.loads(line)["text"] for name in "ab" for line in (tmp_path / f"out/{name}.jsonl").open()]
    families = [family for _, family in documents]  # The first document of each family stays, in order.
    assert left == [text for n, (text, family) in enumerate(documents) if family == 99 or families.index(family) == n]

    with pytest.raises(ValueError, match="search it for duplicates first"):
        program("remove_group_duplicates", groups, tmp_path / "out", tmp_path / "out2")


# --- pages

OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=latin-1\r\n"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, list[bytes]]]:
    """Yield the address of a server, and a list of its raw answers to the next connections. After the last answer, the
    server stays silent."""
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
                connection.sendall(answers.pop(0))
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


@pytest.mark.parametrize(
    "answer, reason",
    [
        (b"HTTP/1.1 404 Not Found\r\n\r\n", "status 404"),
        (b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\n\r\nx", "no page of text"),
        (OK + b"\r\n" + 100_001 * b"x", "too large"),
        (OK + b"Content-Encoding: gzip\r\n\r\n" + gzip.compress(bytes(1_000_000)), "too large"),
        (b"hello", "broken answer"),
        (b"", "connection failed"),
        (b"HTTP/1.1 302 Found\r\nLocation: http://[\r\n\r\n", "malformed address"),
        (b"HTTP/1.1 302 Found\r\nLocation: http://www.facebook.com/\r\n\r\n", "redirected: site without text"),
        (b"HTTP/1.1 302 Found\r\nLocation: /\r\n\r\n", "more than 5 redirects"),
    ],
)
def test_reasons(server: tuple[str, list[bytes]], answer: bytes, reason: str):
    address, answers = server
    answers += [answer] * 6  # aiohttp repeats a request for a redirect and after a lost connection.
    with pytest.raises(PageError) as refused:
        get(address)
    assert str(refused.value) == reason


def test_a_server_that_takes_too_long(server: tuple[str, list[bytes]]):
    with pytest.raises(PageError, match="too slow"):
        get(server[0], seconds=0.3)


def test_a_slow_extraction_kills_its_process():
    """Extracting the text of 60,000 paragraphs takes seconds."""
    page, slow = (
        Page(
            "u",
            b"<html><body>%b</body></html>" % (b"<p>Some words of a paragraph, %b.</p>" % (b"x" * 60) * count),
            None,
        )
        for count in (10, 60_000)
    )

    async def extract_all() -> None:
        with pytest.raises(PageError, match="text not found in time"):
            await extract(pool, slow, 0.2)
        assert (await extract(pool, page, 20.0)).startswith("Some words")

    with text_extractors(1) as pool:
        asyncio.run(extract_all())
