"""Requests of clients: what is read from them, and how each error names the field that is wrong."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from data_utils import build_tokenizer
from megatron.gpt2.extensions.serve.request import (
    ApiError,
    CompletionRequest,
    Limits,
    Prompt,
    read_megatron_request,
    read_request,
)

TOKENIZER = build_tokenizer("bytes")
LIMITS = Limits(max_tokens=100_000, texts=32, body_bytes=1 << 16)
# Each is answered with an error that names the field that is wrong.
BAD = [
    ({"max_tokens": 10**9}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"n": -3}, "n"),
    ({"n": 33}, "n"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": math.nan}, "temperature"),
    ({"temperature": 1e-9}, "temperature"),
    ({"temperature": False}, "temperature"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_p": "1"}, "top_p"),
    ({"top_k": -1}, "top_k"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"seed": 2**63}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"logprobs": 6}, "logprobs"),
    ({"echo": 1}, "echo"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream_options": {"x": 1}, "stream": True}, "stream_options"),
    ({"best_of": 2}, "best_of"),
    ({"frequency_penalty": 0.5}, "frequency_penalty"),
    ({"logit_bias": {"50256": -100}}, "logit_bias"),
    ({"suffix": "end"}, "suffix"),
    ({"functions": []}, "functions"),
    ({"\ud800": 1}, "\ud800"),
    ({"user": 1}, "user"),
    ({"prompt": -1}, "prompt"),
    ({"prompt": 0}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": {}}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [257]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": ["a"] * 33}, "prompt"),
    ({"prompt": "\ud800"}, "prompt"),
    ({"prompt": ["a"] * 17, "n": 2}, "prompt"),
    ({"prompt": "x" * 33}, "prompt"),
    ({"prompt": [[1] * 33]}, "prompt"),
    ({"prompt": "x" * 10**6}, "prompt"),
    ({"model": "gpt-4"}, "model"),
]
BAD_FOR_MEGATRON = [
    ({"prompts": None}, "prompts"),
    ({"prompts": []}, "prompts"),
    ({"prompts": "a"}, "prompts"),
    ({"prompts": [1]}, "prompts"),
    ({"prompts": ["a"] * 33}, "prompts"),
    ({"prompts": [""]}, "prompts"),
    ({"prompts": ["x" * 33]}, "prompts"),
    ({"prompts": ["x" * 32], "add_BOS": True}, "prompts"),
    ({"max_len": 9}, "max_len"),
    ({"sentences": ["a"]}, "sentences"),
    ({"beam_width": 2}, "beam_width"),
    ({"tokens_to_generate": -1}, "tokens_to_generate"),
    ({"tokens_to_generate": 0}, "tokens_to_generate"),
    ({"tokens_to_generate": 10**9}, "tokens_to_generate"),
    ({"logprobs": 1}, "logprobs"),
    ({"temperature": 0}, "temperature"),
    ({"temperature": 101}, "temperature"),
    ({"top_k": 1001}, "top_k"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_p": 0.5, "top_k": 2}, "top_p"),
    ({"top_p": 0.5, "top_p_decay": 0.9}, "top_p_decay"),
    ({"top_p": 0.5, "top_p_bound": 0.6}, "top_p_bound"),
    ({"add_BOS": 1}, "add_BOS"),
    ({"stop_on_eol": "\n"}, "stop_on_eol"),
    ({"random_seed": -1}, "random_seed"),
    ({"prevent_newline_after_colon": True}, "prevent_newline_after_colon"),
    ({"stop_token": 10}, "stop_token"),
    ({"length_penalty": 2}, "length_penalty"),
    ({"no_log": 1}, "no_log"),
    ({"n": 2}, "n"),
]


def read(fields: dict[str, Any]) -> CompletionRequest:
    return read_request(json.dumps(fields).encode(), model="tiny", tokenizer=TOKENIZER, context=32, limits=LIMITS)


def read_megatron(fields: dict[str, Any]) -> CompletionRequest:
    return read_megatron_request(
        json.dumps(fields).encode(), model="tiny", tokenizer=TOKENIZER, context=32, limits=LIMITS
    )


@pytest.mark.parametrize(("fields", "param"), BAD, ids=lambda value: str(value)[:40])
def test_a_bad_field_is_named(fields: dict[str, Any], param: str) -> None:
    refused(read, {"prompt": "Once", **fields}, param)


@pytest.mark.parametrize(("fields", "param"), BAD_FOR_MEGATRON, ids=lambda value: str(value)[:40])
def test_a_bad_field_of_megatrons_is_named(fields: dict[str, Any], param: str) -> None:
    refused(read_megatron, {"prompts": ["Once"], **fields}, param)


def refused(read: Callable[[dict[str, Any]], CompletionRequest], fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        read(fields)
    assert refused.value.param == param and 10 < len(str(refused.value)) < 300
    assert refused.value.status == (404 if param == "model" else 400)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"a"',
        b"[" * 60_000,
        b'{"prompt": "\xff"}',
        b"\0",
        b'{"n": 1' + b"0" * 5000 + b"}",
        b'{"n":' + b"[" * 900 + b"]" * 900 + b"}",
    ],
)
def test_what_is_no_json_object(body: bytes) -> None:
    with pytest.raises(ApiError):
        read_request(body, model="tiny", tokenizer=TOKENIZER, context=32, limits=LIMITS)


def test_prompts_and_seeds() -> None:
    assert read({}).prompts == [Prompt([], "")] == read({"prompt": ""}).prompts
    assert read({"prompt": "N\0"}).prompts == [Prompt([78, 0], "N\0")] == read({"prompt": [78, 0]}).prompts
    assert [prompt.ids for prompt in read({"prompt": [[1], [2, 3]]}).prompts] == [[1], [2, 3]]
    assert [c.score_prompt for c in read({"prompt": ["a", "é"], "echo": True, "logprobs": 0}).continuations()] == [
        True,
        True,
    ]
    made = read({"prompt": ["a", "a"], "n": 2, "seed": 2**63 - 1, "user": "me", "best_of": 1, "suffix": None})
    assert [c.sampling.seed for c in made.continuations()] == [2**63 - 1, -(2**63)] * 2
    assert len({c.sampling.seed for c in read({"prompt": ["a", "a"], "n": 2}).continuations()}) == 4
    assert read({"top_p": 0, "top_k": 9}).sampling.top_k == 1, "the likeliest alone"
    least = read_request(b"{}", model="tiny", tokenizer=TOKENIZER, context=32, limits=Limits(8, 1, 99))
    assert least.sampling.max_new_tokens == 8, "what is not asked for is within the limits"


def test_megatrons_fields() -> None:
    nothing = {
        "beam_width": None,
        "top_p_decay": 0.0,
        "length_penalty": 1.0,
        "prevent_newline_after_colon": False,
        "stop_token": 256,
        "no_log": True,
        "stop_on_eol": False,
    }
    asked = read_megatron({"prompts": ["ab", ""], "add_BOS": True, "top_p": 0.5, "top_p_bound": 0.5, **nothing})
    assert asked.prompts == [Prompt([256, 97, 98], "ab"), Prompt([256], "")] and not asked.logprobs
    assert (asked.sampling.top_p, asked.sampling.max_new_tokens, asked.sampling.stop) == (0.5, 64, ())
    assert read_megatron({"prompts": ["a"], "stop_on_eol": True}).sampling.stop == ("\n",)
    asked = read_megatron({"prompts": ["a"], "stop_on_eol": True, "stop_on_double_eol": True, "random_seed": 3})
    assert asked.sampling.stop == ("\n\n",) and [c.sampling.seed for c in asked.continuations()] == [3]
    asked = read_megatron({"prompts": ["a"], "tokens_to_generate": 0, "logprobs": True, "top_k": 7})
    assert asked.continuations()[0].score_prompt and asked.sampling.top_k == 7
