"""Megatron-LM's own form of a request, `PUT /api` or `PUT /generate`, and of its answer.

The fields are those of its class `MegatronGenerate`. Its newest version (core 0.19) checks many of them and uses few;
here each is used as core 0.8 used it, or refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from data_utils import Tokenizer
from megatron.gpt2.extensions.serve.answer import END_NAME, Text, log
from megatron.gpt2.extensions.serve.fields import ApiError, Fields, number, whole
from megatron.gpt2.extensions.serve.request import CompletionRequest, Limits, read_prompt
from megatron.gpt2.generate.generation import GeneratedToken
from megatron.gpt2.generate.sampling import Sampling

DEFAULT_TOKENS = 64
RENAMED = {"max_len": "tokens_to_generate", "sentences": "prompts"}
# The values with which Megatron does nothing either. Without a decay the bound of the decay is never reached; only
# beam search has a length penalty.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "beam_width": (),
    "top_p_decay": (0, 1),
    "prevent_newline_after_colon": (False,),
    "length_penalty": (1,),
}


@dataclass(frozen=True)
class MegatronRequest(CompletionRequest):
    """A request in Megatron's form, which gets the prompts with their texts, at once."""

    def answer(self, texts: Sequence[Text], tokenizer: Tokenizer, head: dict[str, Any]) -> dict[str, Any]:
        """Of each prompt with its new text: `text`, the ids `tokens`, their texts `segments`, and `logprobs`, the
        log-probabilities of all tokens but the first, where they were asked for. A newline that ended it belongs to it.
        """
        tokens = [[*text.c.prompt, *text.c.ids] for text in texts]
        return {
            "text": [
                prompt.text + tokenizer.decode(text.c.ids) for prompt, text in zip(self.prompts, texts, strict=True)
            ],
            "tokens": tokens,
            "segments": [[_segment(tokenizer, token) for token in ids] for ids in tokens],
            "logprobs": [_logprobs(text) for text in texts] if self.logprobs else None,
        }


def _segment(tokenizer: Tokenizer, token: int) -> str:
    return END_NAME if token == tokenizer.eod else tokenizer.decode([token])


def _logprobs(text: Text) -> list[float]:
    new = [event for event in text.events if isinstance(event, GeneratedToken)][: len(text.c.ids)]
    return [log(token.probability) for token in (*text.c.prompt_tokens, *new)]


def read_megatron_request(
    body: bytes, *, model: str, tokenizer: Tokenizer, context: int, limits: Limits
) -> MegatronRequest:
    """The request that `body` holds, as `read_request` does it for OpenAI's form; this one names no model."""
    fields = Fields(body)
    take = fields.take
    for old, new in RENAMED.items():
        take(old, None, f"left out: it is {new} now", lambda value: False)
    texts = take(
        "prompts",
        [],
        "a list of texts",
        lambda value: isinstance(value, list) and all(isinstance(text, str) for text in value),
    )
    if not 1 <= len(texts) <= limits.texts:
        raise ApiError(f"prompts must be 1 to {limits.texts} texts, not {len(texts)}", param="prompts")
    length = take(
        "tokens_to_generate",
        min(DEFAULT_TOKENS, limits.max_tokens),
        f"a whole number from 0 to {limits.max_tokens}",
        lambda value: whole(value, 0, limits.max_tokens),
    )
    logprobs = fields.switch("logprobs")
    if not length and not logprobs:
        raise ApiError("tokens_to_generate: 0 asks for nothing without logprobs: true", param="tokens_to_generate")
    top_k = take("top_k", 0, "a whole number from 0 to 1000", lambda value: whole(value, 0, 1000))
    top_p = take("top_p", 0.0, "a number from 0 to 1", lambda value: number(value, 0, 1))
    if top_k and top_p:
        raise ApiError("top_p cannot be used with top_k", param="top_p")
    take("top_p_bound", 0.0, "a number from 0 to top_p", lambda value: number(value, 0, top_p))
    seed = take("random_seed", None, "a whole number from 0", lambda value: whole(value, 0, 2**63 - 1))
    double_eol, eol = fields.switch("stop_on_double_eol"), fields.switch("stop_on_eol")
    temperature = take("temperature", 1.0, "a number from 0.00001 to 100", lambda value: number(value, 1e-5, 100))
    begins = fields.switch("add_BOS")
    if "" in texts and not begins:
        raise ApiError("an empty prompt needs add_BOS: true", param="prompts")
    take(
        "stop_token",
        None,
        f"{tokenizer.eod}, which ends a document",
        lambda value: whole(value, tokenizer.eod, tokenizer.eod),
    )
    fields.switch("no_log")  # no text is ever logged
    fields.refuse(NEUTRAL)
    fields.end()
    start = [tokenizer.start] if begins else []
    return MegatronRequest(
        [read_prompt(text, tokenizer, context, name="prompts", start=start) for text in texts],
        Sampling(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            max_new_tokens=length,
            seed=seed or 0,
            stop=("\n\n",) if double_eol else ("\n",) if eol else (),
        ),
        seed is not None,
        echo=True,
        logprobs=logprobs,
    )
