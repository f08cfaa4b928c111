"""Which addresses are worth a download."""

from __future__ import annotations

import pytest

from megatron.gpt2.extensions.webtext.urls import normal, page_key, refusal
from tests.conftest import needs

pytestmark = needs("tldextract", extra="curate")


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("https://www.bbc.co.uk/news/article-1", None),
        ("http://blog.example.com/2019/01/a-post.html?page=2", None),
        ("https://example.org/café", None),
        ("https://de.wikipedia.org/wiki/C.H._Beck", None),
        ("http://[2001:db8::1]/page", "malformed"),
        ("http://a.b", "malformed"),
        ("http://x.", "malformed"),
        ("https://m.youtube.com/watch?v=1", "site without text"),
        ("https://youtu.be/1", "site without text"),
        ("https://cdn.example.com/a/photo.JPEG?width=3", "file that is no page"),
        ("https://example.com/paper.pdf", "file that is no page"),
        ("ftp://example.com/a", "neither http nor https"),
        ("javascript:alert(1)", "malformed"),
        ("http://example.com:99999/", "malformed"),
        ("http://exa mple.com/", "malformed"),
        ("http://127.0.0.1:8000/", "malformed"),
        ("http://intranet/page", "malformed"),
        ("http://a", "too short"),
        ("http://example.com/" + "a" * 2100, "too long"),
    ],
)
def test_reasons(url: str, reason: str | None):
    assert refusal()(url) == reason


def test_one_page_under_many_addresses():
    assert normal("HTTP://User@Example.COM:80#top") == "http://example.com/"
    assert normal("https://example.com:8443/A?b#c") == "https://example.com:8443/A?b"
    same = ["http://example.com/a", "https://www.example.com/a/", "http://example.com:80/a#b"]
    assert len({page_key(normal(url)) for url in same}) == 1
    other = ["http://example.com/a", "http://example.com/A", "http://example.com/a?b", "http://news.example.com/a"]
    assert len({page_key(normal(url)) for url in other}) == 4
