"""The request of a client: the JSON of a completion in OpenAI's form, checked field by field."""

import dataclasses
import random
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from data_utils import Tokenizer
from megatron.gpt2.extensions.serve.answer import Text, choice_of
from megatron.gpt2.extensions.serve.fields import ApiError, Fields, number, whole
from megatron.gpt2.generate.generation import Continuation
from megatron.gpt2.generate.sampling import Sampling

# OpenAI's fields that are accepted with a value that asks for nothing, since some clients always send them.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "suffix": ("",),
}
DEFAULT_TOKENS = 16
MOST_STOPS = 16  # OpenAI has 4, and some tasks of lm-eval have more


@dataclass(frozen=True)
class Limits:
    """The most that one request may ask for: tokens per text, texts, and bytes of its body."""

    max_tokens: int
    texts: int
    body_bytes: int


@dataclass(frozen=True)
class Prompt:
    """A prompt's ids, and its text, which is what they stand for."""

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
        """What to generate. Continuation j of a prompt has the seed `seed` + j, whatever stands beside it.

        Without a seed in the request each continuation has a random one.
        """
        return [
            Continuation(
                prompt.ids,
                dataclasses.replace(
                    self.sampling, seed=_wrapped(self.sampling.seed + j) if self.seeded else random.getrandbits(63)
                ),
                score_prompt=self.echo and self.logprobs,
            )
            for prompt in self.prompts
            for j in range(self.n)
        ]

    def answer(self, texts: Sequence[Text], tokenizer: Tokenizer, head: dict[str, Any]) -> dict[str, Any]:
        """The answer at once, in the form in which the request came. head: what identifies it."""
        choices = [
            choice_of(
                index,
                text,
                self.prompts[index // self.n].text if self.echo else None,
                tokenizer,
                logprobs=self.logprobs,
            )
            for index, text in enumerate(texts)
        ]
        return {**head, "choices": choices, "usage": usage(self, texts)}


def usage(request: CompletionRequest, texts: Sequence[Text]) -> dict[str, int]:
    """The numbers of tokens, as OpenAI counts them: each prompt once."""
    read, written = sum(len(prompt.ids) for prompt in request.prompts), sum(len(text.c.ids) for text in texts)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def _wrapped(seed: int) -> int:
    return (seed + 2**63) % 2**64 - 2**63


def check_model(asked: str, model: str) -> None:
    """ApiError where a client asks for another model than the one that is served."""
    if asked != model:
        raise ApiError(
            f"the model {reprlib.repr(asked)} does not exist: the one here is {model!r}",
            param="model",
            code="model_not_found",
            status=404,
        )


def read_request(body: bytes, *, model: str, tokenizer: Tokenizer, context: int, limits: Limits) -> CompletionRequest:
    """The request that `body` holds, for the model of this name.

    context: tokens that the model reads. Raises ApiError, with the field that is wrong, where it cannot be served.
    """
    fields = Fields(body)
    take = fields.take
    check_model(take("model", model, "a string", lambda value: isinstance(value, str)), model)
    n = take("n", 1, f"a whole number from 1 to {limits.texts}", lambda value: whole(value, 1, limits.texts))
    seed = take("seed", None, "a whole number of 64 bits", lambda value: whole(value, -(2**63), 2**63 - 1))
    logprobs = take("logprobs", None, "a whole number from 0 to 5", lambda value: whole(value, 0, 5))
    echo, stream = fields.switch("echo"), fields.switch("stream")
    stop = take("stop", [], f"a string or up to {MOST_STOPS} of them, none empty", _is_stop)
    max_tokens = take(
        "max_tokens",
        min(DEFAULT_TOKENS, limits.max_tokens),
        f"a whole number from 0 to {limits.max_tokens}",
        lambda value: whole(value, 0, limits.max_tokens),
    )
    top_p = take("top_p", 1.0, "a number from 0 to 1", lambda value: number(value, 0, 1))
    top_k = take("top_k", 0, "a whole number, at least 0", lambda value: whole(value, 0, 2**63))
    sampling = Sampling(
        repetition_penalty=take(
            "repetition_penalty", 1.0, "a number from 0.1 to 10", lambda value: number(value, 0.1, 10)
        ),
        temperature=take(
            "temperature",
            1.0,
            "0, or a number from 0.00001 to 2",
            lambda value: number(value, 0, 2) and (value == 0 or value >= 1e-5),
        ),
        # The fewest tokens that hold a probability of 0 are the likeliest one; Sampling has 0 for all of them.
        top_k=top_k if top_p else 1,
        top_p=top_p,
        max_new_tokens=max_tokens,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        seed=seed or 0,
        alternatives=logprobs or 0,
    )
    options = take("stream_options", {}, "an object with include_usage, true or false", _is_options)
    if options and not stream:
        raise ApiError("stream_options is for stream: true", param="stream_options")
    take("user", "", "a string", lambda value: isinstance(value, str))
    fields.refuse(NEUTRAL)
    prompts = _prompts(take("prompt", ""), tokenizer, context, limits.texts // n)
    fields.end()
    return CompletionRequest(
        prompts, sampling, seed is not None, n, echo, logprobs is not None, stream, bool(options.get("include_usage"))
    )


def _is_stop(value: Any) -> bool:
    texts = [value] if isinstance(value, str) else value
    return (
        isinstance(texts, list) and len(texts) <= MOST_STOPS and all(isinstance(text, str) and text for text in texts)
    )


def _is_options(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() <= {"include_usage"}
        and all(isinstance(flag, bool) for flag in value.values())
    )


def _prompts(prompt: Any, tokenizer: Tokenizer, context: int, most: int) -> list[Prompt]:
    is_ids = isinstance(prompt, list) and bool(prompt) and all(type(i) is int for i in prompt)
    found = prompt if isinstance(prompt, list) and not is_ids else [prompt]
    if not 1 <= len(found) <= most:
        raise ApiError(
            f"a request may ask for {most} prompts with this n, and at least 1, not {len(found)}", param="prompt"
        )
    return [read_prompt(one, tokenizer, context) for one in found]


def read_prompt(
    prompt: Any, tokenizer: Tokenizer, context: int, *, name: str = "prompt", start: Sequence[int] = ()
) -> Prompt:
    """A text, empty for a new document, or token ids. ApiError, of the field `name`, where the model cannot read it.

    start: ids that come before it.
    """
    too_long = ApiError(
        f"the prompt is longer than the {context} tokens that the model reads",
        param=name,
        code="context_length_exceeded",
    )
    if isinstance(prompt, str):
        # No token stands for more characters than it has bytes: what cannot fit is not worth encoding.
        if len(prompt) > context * int(tokenizer.byte_lengths.max()):
            raise too_long
        try:
            ids, text = [int(i) for i in tokenizer.encode(prompt)], prompt
        except ValueError as error:
            raise ApiError(f"the prompt is no text: {error}", param=name) from None
    elif isinstance(prompt, list) and all(whole(i, 0, tokenizer.vocab_size - 1) for i in prompt):
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
