"""The answer of the server: OpenAI's JSON, made of the tokens of a text as they are generated."""

import codecs
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from data_utils import Tokenizer
from megatron.gpt2.generate.generation import Continuation, Event, GeneratedToken

REASONS = {"end": "stop", "stop": "stop", "length": "length"}
LEAST = -9999.0  # for the logarithm of 0, as OpenAI has it
END_NAME = "<|endoftext|>"


@dataclass(frozen=True)
class Text:
    """A continuation, and what came of it: its tokens, with the one that ended its document, or that it asked for none."""

    c: Continuation
    events: list[Event] = field(default_factory=list)


class Choice:
    """One text of an answer, built token by token.

    index: its number within the answer. logprobs: whether the client wants the logarithms of the probabilities.
    """

    def __init__(self, index: int, tokenizer: Tokenizer, *, logprobs: bool) -> None:
        self.index, self.logprobs = index, logprobs
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoded = self._certain = 0  # characters: of all tokens, and of the text that was given
        self._held: deque[tuple[int, GeneratedToken]] = deque()  # with the character at which each begins

    def echo(self, prompt: str, c: Continuation) -> dict[str, Any]:
        """The part of an answer that repeats the prompt, which a client asks for with `echo`. It comes first.

        The log-probabilities are those of the continuation's `prompt_tokens`, with null for the first token.
        """
        logprobs = None
        if self.logprobs:
            first = [GeneratedToken(0, token, 0.0, "") for token in c.prompt[:1]]
            logprobs = self._logprobs([self._placed(token) for token in first + c.prompt_tokens])
            for name in ("token_logprobs", "top_logprobs"):
                logprobs[name][:1] = [None] * len(first)
        self._decoder.reset()
        self._decoded = self._certain = len(prompt)
        return {"text": prompt, "index": self.index, "logprobs": logprobs, "finish_reason": None}

    def add(self, event: Event) -> dict[str, Any]:
        """What the next token adds to the text, as a choice of one chunk of a streamed answer.

        A token is listed in the chunk that holds its first character, and the token that ends a document in the last;
        the tokens of a stop string are never listed.
        """
        self._certain += len(event.text)
        if isinstance(event, GeneratedToken):
            self._held.append(self._placed(event))
        ready = []
        while self._held and (self._held[0][0] < self._certain or event.finish in ("end", "length")):
            ready.append(self._held.popleft())
        return {
            "text": event.text,
            "index": self.index,
            "finish_reason": REASONS.get(event.finish),
            "logprobs": self._logprobs(ready) if self.logprobs else None,
        }

    def _placed(self, token: GeneratedToken) -> tuple[int, GeneratedToken]:
        start = self._decoded
        self._decoded += len(self._decoder.decode(self._tokenizer.token_bytes[token.id]))
        return start, token

    def _logprobs(self, tokens: list[tuple[int, GeneratedToken]]) -> dict[str, list[Any]]:
        names = [token_name(self._tokenizer, token.id) for _, token in tokens]
        own = [log(token.probability) for _, token in tokens]
        likeliest = [
            {token_name(self._tokenizer, i): log(probability) for i, probability in token.likeliest}
            for _, token in tokens
        ]
        return {
            "tokens": names,
            "token_logprobs": own,
            "top_logprobs": [
                {**others, name: value} if others else {}
                for others, name, value in zip(likeliest, names, own, strict=True)
            ],
            "text_offset": [start for start, _ in tokens],
        }


def token_name(tokenizer: Tokenizer, token: int) -> str:
    """The text of a token; OpenAI's form "bytes:\\xe2\\x80" where it is a part of a character."""
    if token == tokenizer.eod:
        return END_NAME
    data = tokenizer.token_bytes[token]
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def log(probability: float) -> float:
    """The natural logarithm."""
    return math.log(probability) if probability > 0 else LEAST


def choice_of(index: int, text: Text, prompt: str | None, tokenizer: Tokenizer, *, logprobs: bool) -> dict[str, Any]:
    """A text that has ended as one choice, for an answer that is not streamed. prompt: what to repeat, if anything."""
    choice = Choice(index, tokenizer, logprobs=logprobs)
    echoed = [] if prompt is None else [choice.echo(prompt, text.c)]
    return joined([*echoed, *map(choice.add, text.events)])


def joined(chunks: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The chunks of one text joined into one choice."""
    first, *rest = chunks
    whole = {**first, "logprobs": first["logprobs"] and {name: list(of) for name, of in first["logprobs"].items()}}
    for chunk in rest:
        whole["text"] += chunk["text"]
        whole["finish_reason"] = chunk["finish_reason"]
        for name, values in (chunk["logprobs"] or {}).items():
            whole["logprobs"][name] += values
    return whole
