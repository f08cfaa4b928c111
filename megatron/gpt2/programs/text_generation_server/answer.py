"""What a client gets: OpenAI's JSON for the pieces of a text as they come."""

from __future__ import annotations

import codecs
import math
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

from data_utils import Tokenizer
from megatron.gpt2.text.generation import Piece

REASONS = {"end": "stop", "stop": "stop", "length": "length"}
LEAST = -9999.0  # for the logarithm of 0, as OpenAI has it


class _Token(NamedTuple):
    start: int  # the character of the text at which it begins
    piece: Piece


class Choice:
    """One text of an answer. `add` gives what a piece adds to it."""

    def __init__(self, index: int, tokenizer: Tokenizer, *, logprobs: bool) -> None:
        self.index, self.logprobs = index, logprobs
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoded = self._certain = 0  # characters: of all tokens, and of the text that was given
        self._held: deque[_Token] = deque()

    def echo(self, prompt: str) -> dict[str, Any]:
        """The choice that begins with its prompt."""
        return {"text": prompt, "index": self.index, "logprobs": None, "finish_reason": None}

    def add(self, piece: Piece, finish: str) -> dict[str, Any]:
        """A choice of a chunk. A token comes with the text that begins with it, and none with a stop string."""
        self._certain += len(piece.text)
        if piece.token != self._tokenizer.eod:
            self._held.append(_Token(self._decoded, piece))
            self._decoded += len(self._decoder.decode(self._tokenizer.pieces[piece.token]))
        ready = []
        while self._held and self._held[0].start < self._certain:
            ready.append(self._held.popleft())
        return {"text": piece.text, "index": self.index, "logprobs": self._logprobs(ready) if self.logprobs else None,
                "finish_reason": REASONS.get(finish)}

    def _logprobs(self, tokens: list[_Token]) -> dict[str, list[Any]]:
        names = [token_name(self._tokenizer, token.piece.token) for token in tokens]
        own = [_log(token.piece.probability) for token in tokens]
        likeliest = [{token_name(self._tokenizer, i): _log(probability) for i, probability in token.piece.likeliest}
                     for token in tokens]
        return {"tokens": names, "token_logprobs": own,
                "top_logprobs": [{**others, name: value} if others else {}
                                 for others, name, value in zip(likeliest, names, own, strict=True)],
                "text_offset": [token.start for token in tokens]}


def token_name(tokenizer: Tokenizer, token: int) -> str:
    """Its text; OpenAI's "bytes:\\xe2\\x80" for a part of a character."""
    if token == tokenizer.eod:
        return "<|endoftext|>"
    data = tokenizer.pieces[token]
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _log(probability: float) -> float:
    return math.log(probability) if probability > 0 else LEAST


def joined(chunks: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The choices that came of one text, as one."""
    first, *rest = chunks
    whole = {**first, "logprobs": first["logprobs"] and {name: list(of) for name, of in first["logprobs"].items()}}
    for chunk in rest:
        whole["text"] += chunk["text"]
        whole["finish_reason"] = chunk["finish_reason"]
        for name, values in (chunk["logprobs"] or {}).items():
            whole["logprobs"][name] += values
    return whole
