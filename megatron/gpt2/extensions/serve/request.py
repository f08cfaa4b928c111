"""The request of a client, in OpenAI's form or Megatron-LM's: pydantic checks the fields one by one.

Megatron's form is that of its class `MegatronGenerate` (`PUT /api`). Its newest version (core 0.19) checks many fields
and uses few; here each is used as core 0.8 used it, or refused.
"""

import dataclasses
import json
import random
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from data_utils import Tokenizer
from megatron.gpt2.extensions.serve.answer import END_NAME, Text, choice_of, log
from megatron.gpt2.generate.generation import Continuation, GeneratedToken
from megatron.gpt2.generate.sampling import Sampling

MOST_STOPS = 16  # OpenAI has 4, and some tasks of lm-eval have more


class ApiError(Exception):
    """A request that is answered with an error. param: the field that is wrong. status: the code of HTTP."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.code, self.status = param, code, status

    def json(self) -> dict[str, Any]:
        """The body of the answer, in OpenAI's form; `message` is for Megatron's client."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {"message": str(self), "type": kind, "param": self.param, "code": self.code},
            "message": str(self),
        }


class Body(BaseModel):
    """The JSON object of a request."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


Int = Annotated[int, Field(strict=True)]
Text1 = Annotated[str, Field(min_length=1)]


class StreamOptions(Body):
    """OpenAI's stream_options."""

    include_usage: bool = False


class CompletionBody(Body):
    """The fields of `POST /v1/completions`. Some clients always send fields that are not supported, with a value that
    asks for nothing."""

    model: str | None = None
    prompt: str | list[Any] = ""
    n: Int = Field(1, ge=1)
    seed: Int | None = Field(None, ge=-(2**63), lt=2**63)
    logprobs: Int | None = Field(None, ge=0, le=5)
    echo: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: Text1 | Annotated[list[Text1], Field(max_length=MOST_STOPS)] = []
    max_tokens: Int | None = Field(None, ge=0)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, ge=0, le=1)
    top_k: Int = Field(0, ge=0)
    repetition_penalty: float = Field(1.0, ge=0.1, le=10)
    user: str = ""
    best_of: Literal[1] = 1
    frequency_penalty: Literal[0] = 0
    presence_penalty: Literal[0] = 0
    logit_bias: Annotated[dict[str, Any], Field(max_length=0)] = {}
    suffix: Literal[""] = ""


class MegatronBody(Body):
    """The fields of `PUT /api`. The unsupported ones have the values with which Megatron does nothing either: without a
    decay the bound of the decay is never reached; only beam search has a length penalty."""

    prompts: list[str]
    tokens_to_generate: Int | None = Field(None, ge=0)
    logprobs: bool = False
    top_k: Int = Field(0, ge=0, le=1000)
    top_p: float = Field(0.0, ge=0, le=1)
    top_p_bound: float = Field(0.0, ge=0)
    random_seed: Int | None = Field(None, ge=0, lt=2**63)
    stop_on_double_eol: bool = False
    stop_on_eol: bool = False
    temperature: float = Field(1.0, ge=1e-5, le=100)
    add_BOS: bool = False
    stop_token: Int | None = None
    no_log: bool = False  # no text is ever logged
    beam_width: Literal[None] = None
    top_p_decay: Literal[0, 1] = 0
    prevent_newline_after_colon: Literal[False] = False
    length_penalty: Literal[1] = 1


B = TypeVar("B", bound=Body)


def parse(kind: type[B], body: bytes) -> B:
    """The fields of a body. ApiError, which names the field that is wrong, if it cannot be so."""
    try:
        given = json.loads(body.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not JSON in UTF-8: {error}") from None
    if not isinstance(given, dict):
        raise ApiError("the body is not a JSON object")
    given = {name: value for name, value in given.items() if value is not None}
    if unknown := given.keys() - kind.model_fields:
        name = min(unknown)
        renamed = {"max_len": ": it is tokens_to_generate now", "sentences": ": it is prompts now"}.get(name, "")
        raise ApiError(f"unrecognized request argument: {reprlib.repr(name)}{renamed}", param=name)
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0])
        message = f"{name}: {first['msg']}, not {reprlib.repr(given.get(name))}"
        raise ApiError(message, param=name) from None


@dataclass(frozen=True)
class Limits:
    """The most that one request may ask for: tokens per text, texts, and bytes of its body."""

    max_tokens: int
    texts: int
    body_bytes: int

    def length(self, name: str, asked: int | None, default: int) -> int:
        """New tokens of a text. ApiError, of the field `name`, if more are asked for."""
        if asked is not None and asked > self.max_tokens:
            raise ApiError(f"{name} must be at most {self.max_tokens}, not {reprlib.repr(asked)}", param=name)
        return min(default, self.max_tokens) if asked is None else asked

    def check_texts(self, name: str, count: int, most: int) -> None:
        """ApiError, of the field `name`, unless a request asks for 1 to `most` prompts."""
        if not 1 <= count <= most:
            raise ApiError(f"{name}: a request may ask for 1 to {most} prompts, not {count}", param=name)


@dataclass(frozen=True)
class Prompt:
    """The ids of a prompt, and the text that they stand for."""

    ids: list[int]
    text: str


@dataclass(frozen=True)
class CompletionRequest:
    """A request that can be served: `n` continuations of each prompt, in this order.

    echo: the answer repeats the prompts. logprobs: the log-probability of each token, of an echo's tokens too.
    """

    prompts: list[Prompt]
    sampling: Sampling
    seeded: bool
    n: int = 1
    echo: bool = False
    logprobs: bool = False
    stream: bool = False
    include_usage: bool = False

    def continuations(self) -> list[Continuation]:
        """The texts to generate. Continuation j of a prompt has the seed `seed` + j, whatever else the server writes.

        Without a seed in the request each continuation has a random one.
        """
        return [
            Continuation(
                prompt.ids,
                dataclasses.replace(
                    self.sampling,
                    seed=(self.sampling.seed + j + 2**63) % 2**64 - 2**63 if self.seeded else random.getrandbits(63),
                ),
                score_prompt=self.echo and self.logprobs,
            )
            for prompt in self.prompts
            for j in range(self.n)
        ]

    def answer(self, texts: Sequence[Text], tokenizer: Tokenizer, head: dict[str, Any]) -> dict[str, Any]:
        """The whole answer, in the form in which the request came. head: identifies it."""
        prompts = [self.prompts[index // self.n].text if self.echo else None for index in range(len(texts))]
        choices = [
            choice_of(index, text, prompts[index], tokenizer, logprobs=self.logprobs)
            for index, text in enumerate(texts)
        ]
        return {**head, "choices": choices, "usage": usage(self, texts)}


@dataclass(frozen=True)
class MegatronRequest(CompletionRequest):
    """A request in Megatron's form. Its answer has the prompts with their texts."""

    def answer(self, texts: Sequence[Text], tokenizer: Tokenizer, head: dict[str, Any]) -> dict[str, Any]:
        """For each prompt with its new text: `text`, the ids `tokens`, their texts `segments`, and `logprobs`, the
        log-probabilities of all tokens but the first, if they were asked for. A newline that ended it belongs to it."""

        def segment(token: int) -> str:
            return END_NAME if token == tokenizer.eod else tokenizer.decode([token])

        def logprobs(text: Text) -> list[float]:
            new = [event for event in text.events if isinstance(event, GeneratedToken)][: len(text.c.ids)]
            return [log(token.probability) for token in (*text.c.prompt_tokens, *new)]

        tokens = [[*text.c.prompt, *text.c.ids] for text in texts]
        pairs = zip(self.prompts, texts, strict=True)
        return {
            "text": [prompt.text + tokenizer.decode(text.c.ids) for prompt, text in pairs],
            "tokens": tokens,
            "segments": [[segment(token) for token in ids] for ids in tokens],
            "logprobs": [logprobs(text) for text in texts] if self.logprobs else None,
        }


def usage(request: CompletionRequest, texts: Sequence[Text]) -> dict[str, int]:
    """The numbers of tokens, as OpenAI counts them: each prompt once."""
    read, written = sum(len(prompt.ids) for prompt in request.prompts), sum(len(text.c.ids) for text in texts)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def check_model(asked: str, model: str) -> None:
    """ApiError if a client asks for a different model than the one that is served."""
    if asked != model:
        message = f"the model {reprlib.repr(asked)} does not exist: the one here is {model!r}"
        raise ApiError(message, param="model", code="model_not_found", status=404)


def read_request(body: bytes, *, model: str, tokenizer: Tokenizer, context: int, limits: Limits) -> CompletionRequest:
    """The request in OpenAI's form that `body` holds, for the model of this name.

    context: tokens that the model reads. Raises ApiError, with the field that is wrong, if it cannot be served.
    """
    asked = parse(CompletionBody, body)
    check_model(model if asked.model is None else asked.model, model)
    if asked.n > limits.texts:
        raise ApiError(f"n must be at most {limits.texts}, not {reprlib.repr(asked.n)}", param="n")
    if 0 < asked.temperature < 1e-5:
        raise ApiError("temperature must be 0, or at least 0.00001", param="temperature")
    if asked.stream_options and not asked.stream:
        raise ApiError("stream_options is for stream: true", param="stream_options")
    sampling = Sampling(
        repetition_penalty=asked.repetition_penalty,
        temperature=asked.temperature,
        # The fewest tokens that hold a probability of 0 are the likeliest one; Sampling has 0 for all of them.
        top_k=asked.top_k if asked.top_p else 1,
        top_p=asked.top_p,
        max_new_tokens=limits.length("max_tokens", asked.max_tokens, 16),
        stop=(asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop),
        seed=asked.seed or 0,
        alternatives=asked.logprobs or 0,
    )
    prompt = asked.prompt
    is_ids = isinstance(prompt, list) and bool(prompt) and all(type(i) is int for i in prompt)
    found = prompt if isinstance(prompt, list) and not is_ids else [prompt]
    limits.check_texts("prompt", len(found), limits.texts // asked.n)
    return CompletionRequest(
        [read_prompt(one, tokenizer, context) for one in found],
        sampling,
        asked.seed is not None,
        asked.n,
        asked.echo,
        asked.logprobs is not None,
        asked.stream,
        asked.stream_options is not None and asked.stream_options.include_usage,
    )


def read_megatron_request(
    body: bytes, *, model: str, tokenizer: Tokenizer, context: int, limits: Limits
) -> MegatronRequest:
    """The request in Megatron's form that `body` holds, as `read_request` reads OpenAI's; this one names no model."""
    asked = parse(MegatronBody, body)
    limits.check_texts("prompts", len(asked.prompts), limits.texts)
    length = limits.length("tokens_to_generate", asked.tokens_to_generate, 64)
    for name, wrong, message in (
        ("tokens_to_generate", not length and not asked.logprobs, "0 asks for nothing without logprobs: true"),
        ("top_p", asked.top_k and asked.top_p, "it cannot be used with top_k"),
        ("top_p_bound", asked.top_p_bound > asked.top_p, "it is above top_p"),
        ("prompts", "" in asked.prompts and not asked.add_BOS, "an empty one needs add_BOS: true"),
        ("stop_token", asked.stop_token not in (None, tokenizer.eod), f"only {tokenizer.eod} ends a document"),
    ):
        if wrong:
            raise ApiError(f"{name}: {message}", param=name)
    start = [tokenizer.start] if asked.add_BOS else []
    return MegatronRequest(
        [read_prompt(text, tokenizer, context, name="prompts", start=start) for text in asked.prompts],
        Sampling(
            temperature=asked.temperature,
            top_k=asked.top_k,
            top_p=asked.top_p,
            max_new_tokens=length,
            seed=asked.random_seed or 0,
            stop=("\n\n",) if asked.stop_on_double_eol else ("\n",) if asked.stop_on_eol else (),
        ),
        asked.random_seed is not None,
        echo=True,
        logprobs=asked.logprobs,
    )


def read_prompt(
    prompt: Any, tokenizer: Tokenizer, context: int, *, name: str = "prompt", start: Sequence[int] = ()
) -> Prompt:
    """A text, empty for a new document, or token ids. ApiError, of the field `name`, if the model cannot read it.

    start: ids before it.
    """
    too_long = ApiError(
        f"the prompt is longer than the {context} tokens that the model reads",
        param=name,
        code="context_length_exceeded",
    )
    if isinstance(prompt, str):
        # No token stands for more characters than it has bytes: a text that cannot fit is not worth encoding.
        if len(prompt) > context * int(tokenizer.byte_lengths.max()):
            raise too_long
        try:
            ids, text = [int(i) for i in tokenizer.encode(prompt)], prompt
        except ValueError as error:
            raise ApiError(f"the prompt is not a text: {error}", param=name) from None
    elif isinstance(prompt, list) and all(type(i) is int and 0 <= i < tokenizer.vocab_size for i in prompt):
        ids, text = prompt, tokenizer.decode(prompt)
    else:
        raise ApiError(
            "prompt must be a string, a list of strings, a list of token ids from 0 to "
            f"{tokenizer.vocab_size - 1}, or a list of those",
            param=name,
        )
    if len(start) + len(ids) > context:
        raise too_long
    return Prompt([*start, *ids], text)
