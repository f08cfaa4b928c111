"""Draw the next token from the logits. Legend: v vocabulary without padding."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from data_utils.command_line import require

# Top-p first sorts this number of likely tokens, whose total probability is nearly always at least p.
_FIRST_CANDIDATES = 1024


@dataclass(frozen=True)
class SamplingParams:
    """The sampling parameters of a request, applied in the order of the fields: penalty, temperature, top-k, top-p.

    Raises ValueError, which names the flag, for an impossible value.
    """

    repetition_penalty: float = 1.0  # Above 1, tokens that are already in the text become less likely.
    temperature: float = 1.0  # With temperature 0, each draw is the most likely token.
    top_k: int = 0  # Draw only from the k most likely tokens, or from all tokens if k is 0.
    top_p: float = 0.0  # Draw only from the fewest tokens whose probabilities sum to p, or from all if p is 0.
    max_new_tokens: int = 200
    stop: tuple[str, ...] = ()  # The text ends before the first of these stop strings.
    seed: int = 1234
    alternatives: int = 0  # The number of most likely tokens to report with each drawn token.

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
        """True if every token can be drawn, even the least likely one."""
        return self.temperature > 0 and self.top_k == 0 and self.top_p in (0, 1)


Sampling = SamplingParams  # the name of SamplingParams before version 0.3


class Sampler:
    """Draws the tokens of one continuation. A draw depends only on the logits, the seed and the earlier tokens."""

    def __init__(self, sampling: SamplingParams, context: Sequence[int], vocab_size: int, device: torch.device) -> None:
        self.sampling = sampling
        self._noise = torch.Generator().manual_seed(sampling.seed)
        self._seen: Tensor | None = None
        if sampling.repetition_penalty != 1:
            self._seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self._seen[torch.tensor(context, dtype=torch.int64, device=device)] = True

    def draw(self, logits: Tensor, total: Tensor) -> tuple[int, float]:
        """Draw a token. Return its id and the probability that the model gives to it.

        logits: [v] float32.
        total: logsumexp of the logits.
        """
        filtered = filter_logits(logits, self.sampling, self._seen)
        if self.sampling.temperature > 0:
            # If E is exponentially distributed, the arg-max of ln p - ln E is a draw from p. Inverse transform sampling
            # would need a cumulative sum, whose rounding depends on the number of ranks and would change more draws.
            noise = torch.empty(logits.shape).exponential_(generator=self._noise)
            filtered = filtered - noise.log_().to(logits.device)
        token = filtered.argmax().view(1)
        if self._seen is not None:
            self._seen.index_fill_(0, token, True)  # Indexing with a 0-dimensional tensor would wait for the device.
        drawn = logits.index_select(0, token) - total
        # Both numbers are copied at once, because each copy waits for the device.
        token_id, log_probability = torch.cat([token.double(), drawn.double()]).tolist()
        return int(token_id), math.exp(log_probability)

    def likeliest(self, logits: Tensor) -> tuple[tuple[int, float], ...]:
        """Return the `alternatives` most likely ids, each with the model's probability.

        logits: [v] float32.
        """
        if not self.sampling.alternatives:
            return ()
        values, tokens = (logits - logits.logsumexp(0)).topk(min(self.sampling.alternatives, logits.numel()))
        return tuple(zip(tokens.tolist(), values.double().exp().tolist(), strict=True))


def filter_logits(logits: Tensor, sampling: SamplingParams, seen: Tensor | None = None) -> Tensor:
    """Return the logits of the distribution to draw from. Tokens that cannot be drawn get -inf.

    seen: [v] bool, the tokens that the text already has, for the repetition penalty (arXiv:1909.05858).
    logits: [v] float32.
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
        logits = logits.masked_fill(logits < _nucleus_threshold(logits, sampling.top_p), -torch.inf)
    return logits


def _nucleus_threshold(logits: Tensor, p: float) -> Tensor:
    """Return the smallest logit of the top-p nucleus: the fewest most likely tokens whose probabilities sum to p."""
    total = logits.logsumexp(0)
    for count in (min(_FIRST_CANDIDATES, logits.numel()), logits.numel()):
        largest = logits.topk(count).values
        probabilities = (largest - total).exp()
        before = probabilities.cumsum(0) - probabilities
        if before[-1] >= p:
            break
    return largest[before < p][-1]
