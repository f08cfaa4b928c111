"""Requests of clients: what is read from them, and how each error names the field that is wrong."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from data_utils import build_tokenizer
from megatron.gpt2.programs.text_generation_server.request import (
    ApiError,
    CompletionRequest,
    Limits,
    read_request,
)

TOKENIZER = build_tokenizer("bytes")
LIMITS = Limits(max_tokens=100_000, texts=32, body_bytes=1 << 16)
# Each is answered with an error that names the field that is wrong.
BAD = [
    ({"max_tokens": 10**9}, "max_tokens"), ({"max_tokens": -1}, "max_tokens"), ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"), ({"max_tokens": True}, "max_tokens"), ({"n": -3}, "n"), ({"n": 33}, "n"),
    ({"temperature": -0.1}, "temperature"), ({"temperature": math.nan}, "temperature"),
    ({"temperature": 1e-9}, "temperature"), ({"temperature": False}, "temperature"), ({"top_p": 1.01}, "top_p"),
    ({"top_p": "1"}, "top_p"), ({"top_k": -1}, "top_k"), ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"seed": 2**63}, "seed"), ({"stop": ""}, "stop"), ({"stop": ["a"] * 5}, "stop"), ({"stop": [1]}, "stop"),
    ({"logprobs": 6}, "logprobs"), ({"logprobs": 1, "echo": True}, "echo"), ({"echo": 1}, "echo"),
    ({"stream": "yes"}, "stream"), ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream_options": {"x": 1}, "stream": True}, "stream_options"), ({"best_of": 2}, "best_of"),
    ({"frequency_penalty": 0.5}, "frequency_penalty"), ({"logit_bias": {"50256": -100}}, "logit_bias"),
    ({"suffix": "end"}, "suffix"), ({"functions": []}, "functions"), ({"\ud800": 1}, "\ud800"), ({"user": 1}, "user"),
    ({"prompt": -1}, "prompt"), ({"prompt": 0}, "prompt"), ({"prompt": []}, "prompt"), ({"prompt": {}}, "prompt"),
    ({"prompt": [-1]}, "prompt"), ({"prompt": [257]}, "prompt"), ({"prompt": [True]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"), ({"prompt": ["a"] * 33}, "prompt"), ({"prompt": "\ud800"}, "prompt"),
    ({"prompt": ["a"] * 17, "n": 2}, "prompt"), ({"prompt": "x" * 33}, "prompt"), ({"prompt": [[1] * 33]}, "prompt"),
    ({"prompt": "x" * 10**6}, "prompt"), ({"model": "gpt-4"}, "model")]


def read(fields: dict[str, Any]) -> CompletionRequest:
    return read_request(json.dumps(fields).encode(), model="tiny", tokenizer=TOKENIZER, context=32, limits=LIMITS)


@pytest.mark.parametrize(("fields", "param"), BAD, ids=lambda value: str(value)[:40])
def test_a_bad_field_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        read({"prompt": "Once", **fields})
    assert refused.value.param == param and 10 < len(str(refused.value)) < 300
    assert refused.value.status == (404 if param == "model" else 400)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'"a"', b"[" * 60_000, b'{"prompt": "\xff"}', b"\0",
                                  b'{"n": 1' + b"0" * 5000 + b"}", b'{"n":' + b"[" * 900 + b"]" * 900 + b"}"])
def test_what_is_no_json_object(body: bytes) -> None:
    with pytest.raises(ApiError):
        read_request(body, model="tiny", tokenizer=TOKENIZER, context=32, limits=LIMITS)


def test_prompts_and_seeds() -> None:
    assert read({}).prompts == [[]] and read({"prompt": ""}).prompts == [[]]
    assert read({"prompt": "N\0"}).prompts == [[78, 0]] == read({"prompt": [78, 0]}).prompts
    assert read({"prompt": [[1], [2, 3]]}).prompts == [[1], [2, 3]]
    assert read({"prompt": ["a", "é"], "echo": True}).echoed == ["a", "é"]
    made = read({"prompt": ["a", "a"], "n": 2, "seed": 2**63 - 1, "user": "me", "best_of": 1, "suffix": None})
    assert [c.sampling.seed for c in made.continuations()] == [2**63 - 1, -2**63] * 2
    assert len({c.sampling.seed for c in read({"prompt": ["a", "a"], "n": 2}).continuations()}) == 4
    assert read({"top_p": 0, "top_k": 9}).sampling.top_k == 1, "the likeliest alone"
