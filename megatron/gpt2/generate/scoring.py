"""The probability that a model gives to a text: nats of each window, and whether its targets are the likeliest tokens.

Every rank calls `score` with the same windows and gets every score. Legend: b windows in a batch, s positions,
t targets, v padded vocabulary, p model-parallel size.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import mpu
from data_utils.command_line import progress_bar
from megatron.gpt2.model.attention_backend import inference
from megatron.gpt2.model.gpt2 import GPT2Model

ROWS = 1024  # of logits at a time: 200 MB in float32


@dataclass(frozen=True)
class Window:
    """`ids` [n] int32. The last `targets` of them, fewer than n, are scored; those before are their context."""

    ids: np.ndarray
    targets: int

    def __post_init__(self) -> None:
        assert 0 < self.targets < len(self.ids)


@dataclass(frozen=True)
class Scores:
    """Of each window: `nats` [w] float64, -Σ ln p(target); `greedy` [w] bool, whether every target is the arg-max."""

    nats: np.ndarray
    greedy: np.ndarray

    @property
    def total(self) -> float:
        """Nats of all windows together."""
        return math.fsum(self.nats)


def windows_over(ids: np.ndarray, length: int, stride: int) -> list[Window]:
    """Windows of up to `length` + 1 ids over `ids` [n], in which every id but the first is a target once.

    stride: targets of each window after the first, at most `length`; each of them has at least `length` - `stride` ids
    before it in its window (Megatron's --overlapping-eval).
    """
    shared = length - stride
    parts = ((start, ids[start : start + length + 1]) for start in range(0, max(len(ids) - 1 - shared, 1), stride))
    return [Window(part, len(part) - 1 - (shared if start else 0)) for start, part in parts if len(part) > 1]


@torch.no_grad()
def score(model: GPT2Model, windows: Sequence[Window], *, batch_size: int) -> Scores:
    """The scores of all windows, on every rank. batch_size: windows computed together.

    Each data-parallel rank computes every n-th batch. Neither the batches, nor the order of any sum, nor any score
    depends on the number of ranks.
    """
    device = next(model.parameters()).device
    order = sorted(range(len(windows)), key=lambda i: -len(windows[i].ids))  # little padding; the largest comes first
    own = range(mpu.get_data_parallel_rank() * batch_size, len(order), mpu.get_data_parallel_world_size() * batch_size)
    scores = torch.zeros(2, len(windows), dtype=torch.float64, device=device)
    first = not dist.is_initialized() or dist.get_rank() == 0
    with inference(model):
        for start in progress_bar(own, seen=first, desc="scoring", unit="batch", leave=False):
            batch = order[start : start + batch_size]
            texts = [torch.from_numpy(windows[i].ids).long() for i in batch]
            tokens = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True).to(
                device
            )  # padding is after all that counts
            counts = [windows[i].targets for i in batch]
            # Of each target [t]: its row, and the place of the token that it follows.
            last, at = torch.tensor([[len(text) - 1] for text in texts]), torch.arange(tokens.size(1) - 1)
            rows, places = ((at < last) & (at >= last - torch.tensor(counts)[:, None])).nonzero().t().to(device)
            hidden = model.hidden_states(tokens[:, :-1])
            if not model.has_head:
                continue
            nats, hits = _against(model, hidden[places, rows], tokens[rows, places + 1])
            scores[0, batch] = torch.stack([part.sum() for part in nats.split(counts)])
            scores[1, batch] = torch.stack([part.all() for part in hits.split(counts)]).double()
    for group in (mpu.get_data_parallel_group(), mpu.get_pipeline_model_parallel_group()):
        if group is not None and group.size() > 1:
            dist.all_reduce(scores, group=group)  # of each window all ranks but one have 0
    nats, greedy = scores.cpu().numpy()
    return Scores(nats, greedy == 1)


def _against(model: GPT2Model, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """hidden [t, h], targets [t] -> -ln p(target), float64 [t], and whether it is the arg-max, bool [t]."""
    nats, hits = [], []
    for x, target in zip(hidden.split(ROWS), targets.split(ROWS), strict=True):
        logits = model.logits(x).float()
        nats.append(mpu.vocab_parallel_cross_entropy(logits, target, vocab_size=model.vocab_size).double())
        hits.append(likeliest(logits, model.vocab_size) == target)
    return torch.cat(nats), torch.cat(hits)


def token_scores(model: GPT2Model, hidden: Tensor, targets: Tensor, alternatives: int) -> Tensor:
    """hidden [t, h], of `model.hidden_states`, targets [t] -> float64 [t, 1 + 2a], the same on every rank of the
    model-parallel group: ln p(target), the a = `alternatives` likeliest ids, and ln p of each."""
    scores = hidden.new_empty(len(hidden), 1 + 2 * alternatives, dtype=torch.float64)
    if model.has_head:
        for x, target, score_of in zip(hidden.split(ROWS), targets.split(ROWS), scores.split(ROWS), strict=True):
            logits = mpu.gather_from_model_parallel_region(model.logits(x))[:, : model.vocab_size].float()
            values, ids = logits.topk(alternatives)  # [t, a]
            known = torch.cat([logits.gather(1, target.unsqueeze(1)), values], dim=1)  # [t, 1 + a]
            known = (known - logits.logsumexp(1, keepdim=True)).double()
            score_of.copy_(torch.cat([known[:, :1], ids, known[:, 1:]], dim=1))
    return mpu.broadcast_from_last_stage(scores)


def likeliest(logits: Tensor, vocab_size: int) -> Tensor:
    """logits [t, v/p], this rank's columns -> the ids of the greatest, int64 [t]; of equal ones the lowest id."""
    first = mpu.get_tensor_model_parallel_rank() * logits.size(1)
    inside = torch.arange(first, first + logits.size(1), device=logits.device) < vocab_size
    best, where = logits.masked_fill(~inside, -torch.inf).max(dim=1, keepdim=True)  # [t, 1]
    best = mpu.gather_from_model_parallel_region(best)  # [t, p]
    where = mpu.gather_from_model_parallel_region(where + first)
    return where.gather(1, best.argmax(dim=1, keepdim=True)).squeeze(1)
