"""Cleanup: the short way to ftfy's result, tokens, language."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_utils import build_tokenizer
from megatron.gpt2.extensions.webtext.cleanup import SUSPECT, at_least, language_of, mend

ftfy = pytest.importorskip("ftfy", reason="the extra [curate] is not installed")
pytest.importorskip("py3langid", reason="the extra [curate] is not installed")

TEXT = st.lists(
    st.one_of(
        st.text(max_size=20),
        st.sampled_from(
            [
                "&amp;",
                "<b>",
                "\n",
                "\r\n",
                "\r",
                "Ã©",
                "â€œ",
                "â€™",
                "\x1b[31m",
                "ﬁ",
                "“",
                "plain words ",
                "\u2028",
                "é",
            ]
        ),
    ),
    max_size=12,
).map("".join)


@settings(max_examples=500, deadline=None)
@given(TEXT)
def test_mend_is_ftfy(text: str):
    assert mend(text) == ftfy.fix_text(text)


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(max_codepoint=0x7E), max_size=60))
def test_plain_text_is_left_alone(text: str):
    if not SUSPECT.search(text):
        assert mend(text) is text and ftfy.fix_text(text) == text


def test_what_is_mended():
    assert mend("The cafÃ© &mdash; it\u2019s\r\nopen") == "The café — it's\nopen"


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=400), st.integers(1, 60))
def test_token_counts(text: str, tokens: int):
    tokenizer = build_tokenizer("builtin")
    assert at_least(tokenizer, tokens)(text) == (len(tokenizer.encode(text)) >= tokens)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("en", "The quick brown fox jumps over the lazy dog, and nobody knows why it does so every morning."),
        ("de", "Der Fuchs springt jeden Morgen über den faulen Hund, und niemand weiß, warum er das tut."),
        ("fr", "Le renard saute chaque matin par-dessus le chien paresseux et personne ne sait pourquoi."),
    ],
)
def test_languages(code: str, text: str):
    assert language_of(text) == code
