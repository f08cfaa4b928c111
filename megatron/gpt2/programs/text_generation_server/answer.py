"""The answer of the server: OpenAI's JSON, made of the tokens of a text as they are generated."""

import codecs
import math
from collections import deque
from collections.abc import Iterable
from typing import Any

from data_utils import Tokenizer
from megatron.gpt2.text.generation import GeneratedToken

REASONS = {"end": "stop", "stop": "stop", "length": "length"}
LEAST = -9999.0  # for the logarithm of 0, as OpenAI has it


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

    def echo(self, prompt: str) -> dict[str, Any]:
        """The part of an answer that repeats the prompt, which a client asks for with `echo`."""
        return {"text": prompt, "index": self.index, "logprobs": None, "finish_reason": None}

    def add(self, generated: GeneratedToken, finish: str) -> dict[str, Any]:
        """What the next token adds to the text, as a choice of one chunk of a streamed answer.

        finish: why the continuation ended, "" while it goes on. A token is listed in the chunk that holds its first
        character; the tokens of a stop string are never listed.
        """
        self._certain += len(generated.text)
        if generated.id != self._tokenizer.eod:
            self._held.append((self._decoded, generated))
            self._decoded += len(self._decoder.decode(self._tokenizer.token_bytes[generated.id]))
        ready = []
        while self._held and self._held[0][0] < self._certain:
            ready.append(self._held.popleft())
        return {"text": generated.text, "index": self.index, "finish_reason": REASONS.get(finish),
                "logprobs": self._logprobs(ready) if self.logprobs else None}

    def _logprobs(self, tokens: list[tuple[int, GeneratedToken]]) -> dict[str, list[Any]]:
        names = [token_name(self._tokenizer, token.id) for _, token in tokens]
        own = [_log(token.probability) for _, token in tokens]
        likeliest = [{token_name(self._tokenizer, i): _log(probability) for i, probability in token.likeliest}
                     for _, token in tokens]
        return {"tokens": names, "token_logprobs": own,
                "top_logprobs": [{**others, name: value} if others else {}
                                 for others, name, value in zip(likeliest, names, own, strict=True)],
                "text_offset": [start for start, _ in tokens]}


def token_name(tokenizer: Tokenizer, token: int) -> str:
    """The text of a token; OpenAI's form "bytes:\\xe2\\x80" where it is a part of a character."""
    if token == tokenizer.eod:
        return "<|endoftext|>"
    data = tokenizer.token_bytes[token]
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _log(probability: float) -> float:
    return math.log(probability) if probability > 0 else LEAST


def joined(chunks: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The chunks of one text joined into one choice, for an answer that is not streamed."""
    first, *rest = chunks
    whole = {**first, "logprobs": first["logprobs"] and {name: list(of) for name, of in first["logprobs"].items()}}
    for chunk in rest:
        whole["text"] += chunk["text"]
        whole["finish_reason"] = chunk["finish_reason"]
        for name, values in (chunk["logprobs"] or {}).items():
            whole["logprobs"][name] += values
    return whole
