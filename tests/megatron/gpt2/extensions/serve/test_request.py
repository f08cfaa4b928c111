"""Test parsing of requests (valid fields, and errors that name the invalid field), and answers in OpenAI's form."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from data_utils import build_tokenizer
from megatron.gpt2.extensions.serve.request import (
    ApiError,
    CompletionRequest,
    ServedModel,
    read_megatron_request,
    read_request,
)
from megatron.gpt2.generate.sampling import Sampling

TOKENIZER = build_tokenizer("bytes")
SERVED = ServedModel("tiny", TOKENIZER, context=32, max_tokens=100_000, max_texts=32, max_body_bytes=1 << 16)
# The first field of each request is invalid, and the error must name it. pydantic checks types and ranges; one of each
# is here.
BAD = [
    {"max_tokens": 10**9},
    {"max_tokens": 1.5},
    {"n": 33},
    {"temperature": math.nan},
    {"temperature": 1e-9},
    {"top_p": 1.01},
    {"stop": ""},
    {"stop": ["a"] * 17},
    {"echo": 1},
    {"stream_options": {"include_usage": True}},
    {"stream_options": {"x": 1}, "stream": True},
    {"best_of": 2},
    {"logit_bias": {"50256": -100}},
    {"functions": []},
    {"\ud800": 1},
    {"prompt": 0},
    {"prompt": []},
    {"prompt": [257]},
    {"prompt": [True]},
    {"prompt": ["a", 1]},
    {"prompt": "\ud800"},
    {"prompt": ["a"] * 17, "n": 2},
    {"prompt": "x" * 33},
    {"prompt": [[1] * 33]},
    {"prompt": "x" * 10**6},
    {"model": "gpt-4"},
]
BAD_FOR_MEGATRON = [
    {"prompts": None},
    {"prompts": "a"},
    {"prompts": ["a"] * 33},
    {"prompts": [""]},
    {"prompts": ["x" * 32], "add_BOS": True},
    {"max_len": 9},
    {"beam_width": 2},
    {"tokens_to_generate": 0},
    {"tokens_to_generate": 10**9},
    {"temperature": 0},
    {"top_p": 0.5, "top_k": 2},
    {"top_p_decay": 0.9, "top_p": 0.5},
    {"top_p_bound": 0.6, "top_p": 0.5},
    {"stop_token": 10},
    {"n": 2},
]


def read(fields: dict[str, Any]) -> CompletionRequest:
    return read_request(json.dumps(fields).encode(), SERVED)


def read_megatron(fields: dict[str, Any]) -> CompletionRequest:
    return read_megatron_request(json.dumps(fields).encode(), SERVED)


@pytest.mark.parametrize(
    "read, good, bad",
    [
        *((read, {"prompt": "Once"}, bad) for bad in BAD),
        *((read_megatron, {"prompts": ["Once"]}, bad) for bad in BAD_FOR_MEGATRON),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)[:40]),
)
def test_a_bad_field_is_named(
    read: Callable[[Any], CompletionRequest], good: dict[str, Any], bad: dict[str, Any]
) -> None:
    with pytest.raises(ApiError) as refused:
        read({**good, **bad})
    param = next(iter(bad))
    assert refused.value.param == param and 10 < len(str(refused.value)) < 300
    assert refused.value.status == (404 if param == "model" else 400)


@pytest.mark.parametrize("body", [b"", b"[]", b"[" * 60_000, b'{"prompt": "\xff"}', b'{"n": 1' + b"0" * 5000 + b"}"])
def test_a_body_that_is_not_a_json_object(body: bytes) -> None:
    with pytest.raises(ApiError):
        read_request(body, SERVED)


def prompts(request: CompletionRequest) -> list[tuple[list[int], str]]:
    return [(text.c.prompt, text.prompt) for text in request.texts]


def seeds(request: CompletionRequest) -> list[int]:
    return [text.c.sampling.seed for text in request.texts]


def sampling(request: CompletionRequest) -> Sampling:
    return request.texts[0].c.sampling


def test_prompts_and_seeds() -> None:
    assert prompts(read({})) == [([], "")] == prompts(read({"prompt": ""}))
    assert prompts(read({"prompt": "N\0"})) == [([78, 0], "N\0")] == prompts(read({"prompt": [78, 0]}))
    made = read({"prompt": ["a", "a"], "n": 2, "seed": 2**63 - 1, "user": "me", "best_of": 1, "suffix": None})
    assert seeds(made) == [2**63 - 1, -(2**63)] * 2
    assert len(set(seeds(read({"prompt": ["a", "a"], "n": 2})))) == 4
    assert sampling(read({"top_p": 0, "top_k": 9})).top_k == 1, "only the likeliest"
    least = read_request(b"{}", dataclasses.replace(SERVED, max_tokens=8))
    assert sampling(least).max_new_tokens == 8, "the default must be within the limits"
