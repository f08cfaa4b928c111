"""Answers to clients: the tokens of a text in OpenAI's form."""

from __future__ import annotations

import math

from data_utils import build_tokenizer
from megatron.gpt2.extensions.serve.answer import Choice, joined
from megatron.gpt2.generate.generation import Continuation, GeneratedToken
from megatron.gpt2.generate.sampling import Sampling

TOKENIZER = build_tokenizer("bytes")


def test_a_token_comes_with_its_text() -> None:
    """Parts of a character wait for the last, and tokens that only a stop string has are left out."""
    choice = Choice(0, TOKENIZER, logprobs=True)
    text = [(b"a", ""), (b"\xc3", "a"), (b"\xa9", "é"), (b"S", ""), (b"T", "")]
    chunks = [choice.add(GeneratedToken(0, data[0], 0.5, certain, ((data[0], 0.5),))) for data, certain in text]
    last = choice.add(GeneratedToken(0, ord("O"), 0.0, "", (), "stop"))
    assert [chunk["text"] for chunk in (*chunks, last)] == ["", "a", "é", "", "", ""]
    whole = joined([*chunks, last])
    assert whole["text"] == "aé" and whole["finish_reason"] == "stop"
    assert whole["logprobs"]["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9"]
    assert whole["logprobs"]["text_offset"] == [0, 1, 1]
    assert whole["logprobs"]["top_logprobs"][0] == {"a": math.log(0.5)}


def test_no_token_is_missing_without_a_stop_string() -> None:
    """Clients count on as many log-probabilities as tokens, the end of a document among them."""
    choice = Choice(0, TOKENIZER, logprobs=True)
    c = Continuation([TOKENIZER.eod, *"é".encode()], Sampling(), score_prompt=True)
    c.prompt_tokens = [GeneratedToken(0, i, 0.5, "", ((97, 0.25),)) for i in c.prompt[1:]]
    ended = GeneratedToken(0, TOKENIZER.eod, 0.5, "", (), "end")
    whole = joined([choice.echo("é", c), choice.add(GeneratedToken(0, 97, 0.5, "a")), choice.add(ended)])
    assert whole["text"] == "éa" and whole["finish_reason"] == "stop"
    assert whole["logprobs"]["tokens"] == ["<|endoftext|>", "bytes:\\xc3", "bytes:\\xa9", "a", "<|endoftext|>"]
    assert whole["logprobs"]["text_offset"] == [0, 0, 0, 1, 2]
    assert whole["logprobs"]["token_logprobs"] == [None, *[math.log(0.5)] * 4]
    assert whole["logprobs"]["top_logprobs"][:2] == [None, {"a": math.log(0.25), "bytes:\\xc3": math.log(0.5)}]
