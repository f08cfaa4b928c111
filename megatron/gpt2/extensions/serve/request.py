"""Requests of clients, in the form of OpenAI or Megatron-LM, and their answers. pydantic checks the fields.

A request in Megatron's form has the fields of Megatron's class `MegatronGenerate` (`PUT /api`). Megatron's newest
version (core 0.19) checks many fields but uses few. This server gives each field the effect that the field had in core
0.8, or refuses the field.
"""

import codecs
import dataclasses
import math
import random
import reprlib
from collections import deque
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, ValidationError, model_validator

from data_utils import Tokenizer
from megatron.gpt2.generate.generation import GeneratedToken, GenerationRequest
from megatron.gpt2.generate.sampling import SamplingParams

FINISH_REASONS = {"end": "stop", "stop": "stop", "length": "length"}
MIN_LOGPROB = -9999.0  # OpenAI's answers contain -9999 instead of the logarithm of 0.
END_NAME = "<|endoftext|>"
MAX_STOPS = 16  # limit of stop strings: OpenAI allows 4, but some tasks of lm-eval need more


class ApiError(Exception):
    """The error with which a request is answered.

    param: the invalid field.
    status: the HTTP status.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.code, self.status = param, code, status

    def json(self) -> dict[str, Any]:
        """Return the body of the answer, in OpenAI's form. Megatron's client reads `message`."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {"message": str(self), "type": kind, "param": self.param, "code": self.code},
            "message": str(self),
        }


class RequestBody(BaseModel):
    """The JSON object of a request."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def drop_nulls(cls, given: Any) -> Any:
        """Remove fields with null. Some clients send null for fields that they do not set."""
        return {name: x for name, x in given.items() if x is not None} if isinstance(given, dict) else given


NonEmptyStr = Annotated[str, Field(min_length=1)]


class StreamOptions(RequestBody):
    """OpenAI's stream_options."""

    include_usage: bool = False


class CompletionRequestBody(RequestBody):
    """The fields of `POST /v1/completions`. Some clients always send unsupported fields, so these are accepted with a
    value that has no effect."""

    model: str | None = None
    prompt: str | list[Any] = ""
    n: int = Field(1, ge=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    logprobs: int | None = Field(None, ge=0, le=5)
    echo: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: NonEmptyStr | Annotated[list[NonEmptyStr], Field(max_length=MAX_STOPS)] = []
    max_tokens: NonNegativeInt | None = None
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, ge=0, le=1)
    top_k: NonNegativeInt = 0
    repetition_penalty: float = Field(1.0, ge=0.1, le=10)
    user: str = ""
    best_of: Literal[1] = 1
    frequency_penalty: Literal[0] = 0
    presence_penalty: Literal[0] = 0
    logit_bias: Annotated[dict[str, Any], Field(max_length=0)] = {}
    suffix: Literal[""] = ""


class MegatronRequestBody(RequestBody):
    """The fields of `PUT /api`. An unsupported field is accepted if its value has no effect in Megatron either. For
    example, Megatron ignores the length penalty without beam search."""

    prompts: list[str]
    tokens_to_generate: NonNegativeInt | None = None
    logprobs: bool = False
    top_k: int = Field(0, ge=0, le=1000)
    top_p: float = Field(0.0, ge=0, le=1)
    top_p_bound: NonNegativeFloat = 0.0
    random_seed: int | None = Field(None, ge=0, lt=2**63)
    stop_on_double_eol: bool = False
    stop_on_eol: bool = False
    temperature: float = Field(1.0, ge=1e-5, le=100)
    add_BOS: bool = False
    stop_token: int | None = None
    no_log: bool = False  # accepted, because texts are never logged
    beam_width: Literal[None] = None
    top_p_decay: Literal[0, 1] = 0
    prevent_newline_after_colon: Literal[False] = False
    length_penalty: Literal[1] = 1


B = TypeVar("B", bound=RequestBody)


def parse_body(kind: type[B], body: bytes) -> B:
    """Parse a body. Raises ApiError, which names the invalid field."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str([*first["loc"], "the body"][0])
        raise ApiError(f"{name[:99]}: {first['msg']}, not {reprlib.repr(first['input'])}", param=name) from None


def check_rules(*rules: tuple[str, object, str]) -> None:
    """Raise ApiError for the first broken rule. A rule is (name of a field, whether it is invalid, the reason)."""
    for name, is_wrong, message in rules:
        if is_wrong:
            raise ApiError(f"{name}: {message}", param=name)


class GeneratedText:
    """A continuation as an entry of `choices` in a response, built token by token.

    index: the continuation's number within the answer.
    prompt: the text of the prompt of `c`.
    echo: begin with the prompt.
    logprobs: add the log-probabilities.
    events: the new tokens so far.
    chunks: the entry so far, in the form of streamed chunks.
    """

    def __init__(
        self, index: int, c: GenerationRequest, prompt: str, tokenizer: Tokenizer, *, echo: bool, logprobs: bool
    ) -> None:
        self.index, self.c, self.prompt, self.echo, self.logprobs = index, c, prompt, echo, logprobs
        self.events: list[GeneratedToken] = []
        self.chunks: list[dict[str, Any]] = []
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoded = self._certain = 0  # number of characters of all tokens, and of the text that was returned
        self._held: deque[tuple[int, GeneratedToken]] = deque()  # pairs of a token and the index of its first character

    def add(self, event: GeneratedToken) -> list[dict[str, Any]]:
        """Add the next token. Return the new entries of `chunks`.

        `logprobs` lists a token in the chunk with the token's first character, and an end-of-document token in the last
        chunk. The tokens of a stop string are never listed.
        """
        added = [self._echo()] if self.echo and not self.events else []
        self.events.append(event)
        self._certain += len(event.text)
        if event.id >= 0:
            self._held.append(self._with_offset(event))
        ready = []
        while self._held and (self._held[0][0] < self._certain or event.finish in ("end", "length")):
            ready.append(self._held.popleft())
        added.append(self._chunk(event.text, ready, event.finish))
        self.chunks += added
        return added

    def _echo(self) -> dict[str, Any]:
        """Return the first chunk of an answer with `echo`. The chunk has the log-probabilities of the continuation's
        `prompt_tokens`, with null for the first token."""
        first = [GeneratedToken(0, token) for token in self.c.prompt[:1]]
        chunk = self._chunk(self.prompt, [self._with_offset(token) for token in first + self.c.prompt_tokens])
        for name in ("token_logprobs", "top_logprobs") if self.logprobs else ():
            chunk["logprobs"][name][:1] = [None] * len(first)
        self._decoder.reset()
        self._decoded = self._certain = len(self.prompt)
        return chunk

    def _with_offset(self, token: GeneratedToken) -> tuple[int, GeneratedToken]:
        start = self._decoded
        self._decoded += len(self._decoder.decode(self._tokenizer.token_bytes[token.id]))
        return start, token

    def _chunk(self, text: str, tokens: list[tuple[int, GeneratedToken]], finish: str = "") -> dict[str, Any]:
        rows: list[tuple[Any, ...]] = []
        for start, token in tokens:
            name, logprob = token_name(self._tokenizer, token.id), log_probability(token.probability)
            likeliest = {token_name(self._tokenizer, i): log_probability(p) for i, p in token.likeliest}
            rows.append((name, logprob, {**likeliest, name: logprob} if likeliest else {}, start))
        columns = "tokens", "token_logprobs", "top_logprobs", "text_offset"
        logprobs = {column: [row[number] for row in rows] for number, column in enumerate(columns)}
        return {
            "text": text,
            "index": self.index,
            "finish_reason": FINISH_REASONS.get(finish),
            "logprobs": logprobs if self.logprobs else None,
        }

    def whole(self) -> dict[str, Any]:
        """Return the whole entry of `choices`, merged from the streamed chunks."""
        texts, parts = ([chunk[key] for chunk in self.chunks] for key in ("text", "logprobs"))
        logprobs = {name: [x for part in parts for x in part[name]] for name in parts[0]} if self.logprobs else None
        return {**self.chunks[-1], "text": "".join(texts), "logprobs": logprobs}


class ServedModel(NamedTuple):
    """The name and the tokenizer of the served model, and the limits of a request.

    context: tokens that the model can read.
    max_tokens: new tokens of a text.
    max_texts: texts of a request.
    """

    model: str
    tokenizer: Tokenizer
    context: int
    max_tokens: int
    max_texts: int
    max_body_bytes: int

    def check_model(self, name: str) -> None:
        """Raise ApiError if a client asks for a different model."""
        if name != self.model:
            message = f"the model {reprlib.repr(name)} does not exist: this server has {self.model!r}"
            raise ApiError(message, param="model", code="model_not_found", status=404)

    def length(self, name: str, asked: int | None, default: int) -> int:
        """Return the number of new tokens of a text. Raises ApiError for the field `name` if the number is above the
        limit."""
        number = min(default, self.max_tokens) if asked is None else asked
        wrong = f"it must be at most {self.max_tokens}, not {reprlib.repr(number)}"
        check_rules((name, number > self.max_tokens, wrong))
        return number

    def texts(
        self,
        name: str,
        prompts: Sequence[Any],
        sampling: SamplingParams,
        seed: int | None,
        *,
        n: int = 1,
        echo: bool,
        logprobs: bool,
        start: Sequence[int] = (),
    ) -> list[GeneratedText]:
        """Return the texts to generate, n for each prompt. A prompt is a text or a list of token ids; an empty one
        begins a new document.

        Text j of a prompt has the seed `seed` + j, or without a seed a random one. A text does not depend on other
        requests. Raises ApiError for the field `name` if the model cannot read a prompt, or for too many texts.

        start: ids to prepend.
        """
        most = self.max_texts // n
        wrong = f"a request may ask for 1 to {most} prompts, not {len(prompts)}"
        check_rules((name, not 1 <= len(prompts) <= most, wrong))
        texts: list[GeneratedText] = []
        for prompt in prompts:
            ids, text = self._read_prompt(name, prompt)
            for j in range(n):
                own = dataclasses.replace(
                    sampling, seed=random.getrandbits(63) if seed is None else (seed + j + 2**63) % 2**64 - 2**63
                )
                c = GenerationRequest([*start, *ids], own, score_prompt=echo and logprobs)
                if len(c.prompt) > self.context:
                    raise self._too_long(name)
                texts.append(GeneratedText(len(texts), c, text, self.tokenizer, echo=echo, logprobs=logprobs))
        return texts

    def _read_prompt(self, name: str, prompt: Any) -> tuple[Sequence[int], str]:
        """Return the ids and the text of a prompt."""
        tokenizer = self.tokenizer
        if isinstance(prompt, str):
            # A token has at most as many characters as bytes, so a text that is too long need not be encoded.
            if len(prompt) > self.context * int(tokenizer.byte_lengths.max()):
                raise self._too_long(name)
            return list(tokenizer.encode(prompt)), prompt
        if isinstance(prompt, list) and all(type(i) is int and 0 <= i < tokenizer.vocab_size for i in prompt):
            return prompt, tokenizer.decode(prompt)
        ids = f"token ids from 0 to {tokenizer.vocab_size - 1}"
        message = f"prompt must be a string, a list of strings, a list of {ids}, or a list of those"
        raise ApiError(message, param=name)

    def _too_long(self, name: str) -> ApiError:
        message = f"the prompt is longer than the {self.context} tokens that the model reads"
        return ApiError(message, param=name, code="context_length_exceeded")


def token_name(tokenizer: Tokenizer, token: int) -> str:
    """Return the text of a token. A token that is a part of a character gets OpenAI's form "bytes:\xe2\x80"."""
    if token == tokenizer.eod:
        return END_NAME
    token_bytes = tokenizer.token_bytes[token]
    try:
        return token_bytes.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)


def log_probability(probability: float) -> float:
    """Return ln p, or MIN_LOGPROB for p = 0."""
    return math.log(probability) if probability > 0 else MIN_LOGPROB


class CompletionRequest(NamedTuple):
    """A valid request. `texts` has n texts for each prompt, in the order of the prompts."""

    texts: list[GeneratedText]
    n: int = 1
    stream: bool = False
    include_usage: bool = False

    def answer(self, tokenizer: Tokenizer, head: dict[str, Any]) -> dict[str, Any]:
        """Return the whole answer, in the form of the request.

        head: the answer's id, model and time.
        """
        return {**head, "choices": [text.whole() for text in self.texts], "usage": self.usage()}

    def usage(self) -> dict[str, int]:
        """Count the tokens as OpenAI does: each prompt counts once."""
        read = sum(len(text.c.prompt) for text in self.texts[:: self.n])
        written = sum(len(text.c.ids) for text in self.texts)
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


class MegatronRequest(CompletionRequest):
    """A request in Megatron's form. The answer includes the prompts."""

    def answer(self, tokenizer: Tokenizer, head: dict[str, Any]) -> dict[str, Any]:
        """Return, for each prompt with its new text: `text`, the ids `tokens`, their texts `segments`, and, if
        requested, `logprobs`, the log-probabilities of all tokens but the first. `text` includes a newline that ended
        the generation."""

        def segment(token: int) -> str:
            return END_NAME if token == tokenizer.eod else tokenizer.decode([token])

        def logprobs(text: GeneratedText) -> list[float]:
            tokens = [*text.c.prompt_tokens, *text.events[: len(text.c.ids)]]
            return [log_probability(token.probability) for token in tokens]

        tokens = [[*text.c.prompt, *text.c.ids] for text in self.texts]
        return {
            "text": [text.prompt + tokenizer.decode(text.c.ids) for text in self.texts],
            "tokens": tokens,
            "segments": [[segment(token) for token in ids] for ids in tokens],
            "logprobs": [logprobs(text) for text in self.texts] if self.texts[0].logprobs else None,
        }


def read_request(body: bytes, served: ServedModel) -> CompletionRequest:
    """Parse a request in OpenAI's form. Raises ApiError, which names the invalid field."""
    asked = parse_body(CompletionRequestBody, body)
    served.check_model(served.model if asked.model is None else asked.model)
    check_rules(
        ("n", asked.n > served.max_texts, f"it must be at most {served.max_texts}, not {reprlib.repr(asked.n)}"),
        ("temperature", 0 < asked.temperature < 1e-5, "it must be 0, or at least 0.00001"),
        ("stream_options", asked.stream_options and not asked.stream, "it needs stream: true"),
    )
    sampling = SamplingParams(
        repetition_penalty=asked.repetition_penalty,
        temperature=asked.temperature,
        # If top_p is 0, OpenAI takes the likeliest token, and `SamplingParams` takes all tokens.
        top_k=asked.top_k if asked.top_p else 1,
        top_p=asked.top_p,
        max_new_tokens=served.length("max_tokens", asked.max_tokens, 16),
        stop=(asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop),
        alternatives=asked.logprobs or 0,
    )
    prompt, usage = asked.prompt, asked.stream_options is not None and asked.stream_options.include_usage
    is_ids = isinstance(prompt, list) and bool(prompt) and all(type(i) is int for i in prompt)
    prompts = prompt if isinstance(prompt, list) and not is_ids else [prompt]
    logprobs = asked.logprobs is not None
    texts = served.texts("prompt", prompts, sampling, asked.seed, n=asked.n, echo=asked.echo, logprobs=logprobs)
    return CompletionRequest(texts, asked.n, asked.stream, usage)


def read_megatron_request(body: bytes, served: ServedModel) -> MegatronRequest:
    """Parse a request in Megatron's form, like `read_request`. Megatron's requests do not name a model."""
    asked, end = parse_body(MegatronRequestBody, body), served.tokenizer.eod
    length = served.length("tokens_to_generate", asked.tokens_to_generate, 64)
    check_rules(
        (
            "tokens_to_generate",
            not length and not asked.logprobs,
            "0 needs logprobs: true, otherwise there is nothing to answer",
        ),
        ("top_p", asked.top_k and asked.top_p, "it cannot be used with top_k"),
        ("top_p_bound", asked.top_p_bound > asked.top_p, "it is above top_p"),
        ("prompts", "" in asked.prompts and not asked.add_BOS, "an empty prompt needs add_BOS: true"),
        ("stop_token", asked.stop_token not in (None, end), f"only {end} ends a document"),
    )
    sampling = SamplingParams(
        temperature=asked.temperature,
        top_k=asked.top_k,
        top_p=asked.top_p,
        max_new_tokens=length,
        stop=("\n\n",) if asked.stop_on_double_eol else ("\n",) if asked.stop_on_eol else (),
    )
    return MegatronRequest(
        served.texts(
            "prompts",
            asked.prompts,
            sampling,
            asked.random_seed,
            echo=True,
            logprobs=asked.logprobs,
            start=[served.tokenizer.bos] if asked.add_BOS else [],
        )
    )
