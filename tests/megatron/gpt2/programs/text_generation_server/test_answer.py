"""Answers to clients: the tokens of a text in OpenAI's form."""

from __future__ import annotations

import math

from data_utils import build_tokenizer
from megatron.gpt2.programs.text_generation_server.answer import Choice, joined, token_name
from megatron.gpt2.text.generation import GeneratedToken

TOKENIZER = build_tokenizer("bytes")


def test_a_token_comes_with_its_text() -> None:
    """Parts of a character wait for the last, and tokens that only a stop string has are left out."""
    choice = Choice(0, TOKENIZER, logprobs=True)
    text = [(b"a", ""), (b"\xc3", "a"), (b"\xa9", "é"), (b"S", ""), (b"T", "")]
    chunks = [choice.add(GeneratedToken(0, data[0], 0.5, certain, ((data[0], 0.5),)), "") for data, certain in text]
    last = choice.add(GeneratedToken(0, ord("O"), 0.0, "", ()), "stop")
    assert [chunk["text"] for chunk in (*chunks, last)] == ["", "a", "é", "", "", ""]
    whole = joined([*chunks, last])
    assert whole["text"] == "aé" and whole["finish_reason"] == "stop"
    assert whole["logprobs"]["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9"]
    assert whole["logprobs"]["text_offset"] == [0, 1, 1]
    assert whole["logprobs"]["top_logprobs"][0] == {"a": math.log(0.5)}
    assert token_name(TOKENIZER, TOKENIZER.eod) == "<|endoftext|>"
