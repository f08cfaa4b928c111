"""The request of a client: the JSON of a completion in OpenAI's form, checked field by field."""

import dataclasses
import json
import random
import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeGuard

from data_utils import Tokenizer
from megatron.gpt2.text.generation import Continuation
from megatron.gpt2.text.sampling import Sampling

# OpenAI's fields that are accepted with a value that asks for nothing, since some clients always send them.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,), "frequency_penalty": (0,), "presence_penalty": (0,), "logit_bias": ({},), "suffix": ("",)}


class ApiError(Exception):
    """A request that is answered with an error. param: the field that is wrong. status: the code of HTTP."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.code, self.status = param, code, status

    def json(self) -> dict[str, Any]:
        """The body of the answer, in OpenAI's form."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class Limits:
    """The most that one request may ask for: tokens per text, texts, and bytes of its body."""

    max_tokens: int
    texts: int
    body_bytes: int


@dataclass(frozen=True)
class CompletionRequest:
    """A request that can be served: `n` continuations of each prompt, in this order."""

    prompts: list[list[int]]
    echoed: list[str]  # for each prompt the text that the answer begins with: itself, or ""
    n: int
    sampling: Sampling
    seeded: bool
    logprobs: bool
    stream: bool
    include_usage: bool

    def continuations(self) -> list[Continuation]:
        """What to generate. Continuation j of a prompt has the seed `seed` + j, whatever stands beside it.

        Without a seed in the request each continuation has a random one.
        """
        return [Continuation(prompt, dataclasses.replace(self.sampling, seed=_wrapped(self.sampling.seed + j)
                                                         if self.seeded else random.getrandbits(63)))
                for prompt in self.prompts for j in range(self.n)]


def _wrapped(seed: int) -> int:
    return (seed + 2**63) % 2**64 - 2**63


def _whole(value: Any, least: float, most: float) -> TypeGuard[int]:
    return type(value) is int and least <= value <= most


def _number(value: Any, least: float, most: float) -> TypeGuard[float]:
    return type(value) in (int, float) and least <= value <= most


def read_request(body: bytes, *, model: str, tokenizer: Tokenizer, context: int, limits: Limits) -> CompletionRequest:
    """The request that `body` holds, for the model of this name.

    context: tokens that the model reads. Raises ApiError, with the field that is wrong, where it cannot be served.
    """
    given = _fields(body)

    def take(name: str, default: Any, must_be: str, good: Callable[[Any], bool]) -> Any:
        value = given.pop(name, None)
        if value is None:
            return default
        if not good(value):
            raise ApiError(f"{name} must be {must_be}, not {reprlib.repr(value)}", param=name)
        return value

    def switch(name: str) -> bool:
        return bool(take(name, False, "true or false", lambda value: isinstance(value, bool)))

    asked_model = take("model", model, "a string", lambda value: isinstance(value, str))
    if asked_model != model:
        raise ApiError(f"the model {reprlib.repr(asked_model)} does not exist: the one here is {model!r}",
                       param="model", code="model_not_found", status=404)
    n = take("n", 1, f"a whole number from 1 to {limits.texts}", lambda value: _whole(value, 1, limits.texts))
    seed = take("seed", None, "a whole number of 64 bits", lambda value: _whole(value, -2**63, 2**63 - 1))
    logprobs = take("logprobs", None, "a whole number from 0 to 5", lambda value: _whole(value, 0, 5))
    echo, stream = switch("echo"), switch("stream")
    stop = take("stop", [], "a string or up to 4 of them, none empty", _is_stop)
    max_tokens = take("max_tokens", 16, f"a whole number from 1 to {limits.max_tokens}",
                      lambda value: _whole(value, 1, limits.max_tokens))
    top_p = take("top_p", 1.0, "a number from 0 to 1", lambda value: _number(value, 0, 1))
    top_k = take("top_k", 0, "a whole number, at least 0", lambda value: _whole(value, 0, 2**63))
    sampling = Sampling(
        repetition_penalty=take("repetition_penalty", 1.0, "a number from 0.1 to 10",
                                lambda value: _number(value, 0.1, 10)),
        temperature=take("temperature", 1.0, "0, or a number from 0.00001 to 2",
                         lambda value: _number(value, 0, 2) and (value == 0 or value >= 1e-5)),
        # The fewest tokens that hold a probability of 0 are the likeliest one; Sampling has 0 for all of them.
        top_k=top_k if top_p else 1, top_p=top_p, max_new_tokens=max_tokens,
        stop=(stop,) if isinstance(stop, str) else tuple(stop), seed=seed or 0, alternatives=logprobs or 0)
    options = take("stream_options", {}, "an object with include_usage, true or false", _is_options)
    if options and not stream:
        raise ApiError("stream_options is for stream: true", param="stream_options")
    if echo and logprobs is not None:
        raise ApiError("echo with logprobs is not supported: those of the prompt are not computed", param="echo")
    take("user", "", "a string", lambda value: isinstance(value, str))
    for name, neutral in NEUTRAL.items():
        if given.pop(name, None) not in (None, *neutral):
            raise ApiError(f"{name} is not supported: leave it out", param=name)
    prompts = _prompts(given.pop("prompt", None), tokenizer, context, limits.texts // n)
    if given:
        raise ApiError(f"unrecognized request argument: {reprlib.repr(min(given))}", param=min(given))
    return CompletionRequest([ids for ids, _ in prompts], [text if echo else "" for _, text in prompts], n, sampling,
                 seed is not None, logprobs is not None, stream, bool(options.get("include_usage")))


def _fields(body: bytes) -> dict[str, Any]:
    try:
        given = json.loads(body.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ApiError(f"the body is not UTF-8: byte {error.start + 1} is 0x{body[error.start]:02x}") from None
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise ApiError("the body is not a JSON object")
    return given


def _is_stop(value: Any) -> bool:
    texts = [value] if isinstance(value, str) else value
    return isinstance(texts, list) and len(texts) <= 4 and all(isinstance(text, str) and text for text in texts)


def _is_options(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() <= {"include_usage"} and all(
        isinstance(flag, bool) for flag in value.values())


def _prompts(prompt: Any, tokenizer: Tokenizer, context: int, most: int) -> list[tuple[list[int], str]]:
    """Of each prompt its ids and its text. Nothing: a new document."""
    is_ids = isinstance(prompt, list) and bool(prompt) and all(type(i) is int for i in prompt)
    found = prompt if isinstance(prompt, list) and not is_ids else ["" if prompt is None else prompt]
    if not 1 <= len(found) <= most:
        raise ApiError(f"a request may ask for {most} prompts with this n, and at least 1, not {len(found)}",
                       param="prompt")
    return [_prompt(one, tokenizer, context) for one in found]


def _prompt(prompt: Any, tokenizer: Tokenizer, context: int) -> tuple[list[int], str]:
    too_long = ApiError(f"the prompt is longer than the {context} tokens that the model reads", param="prompt",
                        code="context_length_exceeded")
    if isinstance(prompt, str):
        # No token stands for more characters than it has bytes: what cannot fit is not worth encoding.
        if len(prompt) > context * int(tokenizer.byte_lengths.max()):
            raise too_long
        try:
            ids, text = [int(i) for i in tokenizer.encode(prompt)], prompt
        except ValueError as error:
            raise ApiError(f"the prompt is no text: {error}", param="prompt") from None
    elif isinstance(prompt, list) and all(_whole(i, 0, tokenizer.vocab_size - 1) for i in prompt):
        ids, text = prompt, tokenizer.decode(prompt)
    else:
        raise ApiError("prompt must be a string, a list of strings, a list of token ids from 0 to "
                       f"{tokenizer.vocab_size - 1}, or a list of those", param="prompt")
    if len(ids) > context:
        raise too_long
    return ids, text
