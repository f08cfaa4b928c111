"""How the next token is chosen from the logits. Legend: v vocabulary without padding."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.gpt2.config import require

# Candidates that are sorted first for top-p: of a model's 50,000 tokens these nearly always hold p.
_FIRST_CANDIDATES = 1024


@dataclass(frozen=True)
class Sampling:
    """How the tokens of a continuation are chosen. They apply in the order of the fields: penalty, temperature, top-k,
    top-p.

    ValueError, which names the flag, if a value cannot be.
    """

    repetition_penalty: float = 1.0  # of tokens in the text; above 1 they become less likely
    temperature: float = 1.0  # 0 takes the likeliest token
    top_k: int = 0  # the k likeliest; 0: all
    top_p: float = 0.0  # the fewest tokens that hold p together; 0: all
    max_new_tokens: int = 200
    stop: tuple[str, ...] = ()  # texts before which a continuation ends
    seed: int = 1234
    alternatives: int = 0  # likeliest tokens that come with each one that is drawn

    def __post_init__(self) -> None:
        t = self.temperature
        for name, good, meant in (
            ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "above 0"),
            ("temperature", t == 0 or 1e-5 <= t < math.inf, "0, or at least 0.00001"),
            ("top_k", self.top_k >= 0, "at least 0"),
            ("top_p", 0 <= self.top_p <= 1, "from 0 to 1"),
            ("max_new_tokens", self.max_new_tokens >= 0, "at least 0"),
            ("seed", -(2**63) <= self.seed < 2**63, "below 2^63"),
        ):
            require(good, f"--{name.replace('_', '-')} must be {meant}, not {getattr(self, name)}")
        require(all(self.stop), "--stop must not be empty")

    @property
    def is_full(self) -> bool:
        """Whether every token can be drawn, however unlikely it is."""
        return self.temperature > 0 and self.top_k == 0 and self.top_p in (0, 1)


class Sampler:
    """Draws the tokens of one continuation. The draws depend only on the logits, the seed and the tokens so far."""

    def __init__(self, sampling: Sampling, context: Sequence[int], vocab_size: int, device: torch.device) -> None:
        self.sampling = sampling
        self._noise = torch.Generator().manual_seed(sampling.seed)
        self._seen: Tensor | None = None
        if sampling.repetition_penalty != 1:
            self._seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self._seen[torch.tensor(context, dtype=torch.int64, device=device)] = True

    def draw(self, logits: Tensor, total: Tensor) -> tuple[int, float]:
        """logits [v] float32, total: their logsumexp -> a token id, and its probability by the model itself."""
        filtered = filter_logits(logits, self.sampling, self._seen)
        if self.sampling.temperature > 0:
            # The largest of ln p - ln E, with exponential E, is a draw from p. A sum over p, the other way, would let
            # rounding change more draws, and with it the number of ranks.
            noise = torch.empty(logits.shape).exponential_(generator=self._noise)
            filtered = filtered - noise.log_().to(logits.device)
        token = filtered.argmax().view(1)
        if self._seen is not None:
            self._seen.index_fill_(0, token, True)  # to index with a tensor of no dimension would read it on the host
        drawn = logits.index_select(0, token) - total
        chosen, log_probability = torch.cat([token.double(), drawn.double()]).tolist()  # the one wait for the device
        return int(chosen), math.exp(log_probability)

    def likeliest(self, logits: Tensor) -> tuple[tuple[int, float], ...]:
        """logits [v] float32 -> the `alternatives` likeliest ids, each with its probability by the model itself."""
        if not self.sampling.alternatives:
            return ()
        values, tokens = (logits - logits.logsumexp(0)).topk(min(self.sampling.alternatives, logits.numel()))
        return tuple(zip(tokens.tolist(), values.double().exp().tolist(), strict=True))


def filter_logits(logits: Tensor, sampling: Sampling, seen: Tensor | None = None) -> Tensor:
    """logits [v] float32, seen [v] bool -> logits of the distribution to draw from; -inf for tokens that are left out.

    seen: the tokens that are in the text already, for the repetition penalty (arXiv:1909.05858).
    """
    penalty = sampling.repetition_penalty
    if seen is not None and penalty != 1:
        logits = torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
    if sampling.temperature == 0:
        return logits
    logits = (logits - logits.max()) / sampling.temperature
    if 0 < sampling.top_k < logits.numel():
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[-1], -torch.inf)
    if 0 < sampling.top_p < 1:
        logits = logits.masked_fill(logits < _least_of_nucleus(logits, sampling.top_p), -torch.inf)
    return logits


def _least_of_nucleus(logits: Tensor, p: float) -> Tensor:
    """The logit of the last token, by falling probability, before which the others hold less than p."""
    total = logits.logsumexp(0)
    for count in (min(_FIRST_CANDIDATES, logits.numel()), logits.numel()):
        largest = logits.topk(count).values
        probabilities = (largest - total).exp()
        before = probabilities.cumsum(0) - probabilities
        if before[-1] >= p:
            break
    return largest[before < p][-1]
