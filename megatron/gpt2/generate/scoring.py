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

import mpu
from data_utils.command_line import progress_bar
from megatron.gpt2.generate.orders import token_scores
from megatron.gpt2.model.attention_backend import inference
from megatron.gpt2.model.gpt2 import GPT2Model


@dataclass(frozen=True)
class Window:
    """`ids` [n] int32. The last `targets` of them, fewer than n, are scored; those before are their context."""

    ids: np.ndarray
    targets: int

    def __post_init__(self) -> None:
        assert 0 < self.targets < len(self.ids)


@dataclass(frozen=True)
class Scores:
    """The scores of windows: `nats` [w] float64, -Σ ln p(target); `greedy` [w] bool, whether every target is the
    arg-max."""

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
            padded = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)  # padding is after all that counts
            tokens = padded.to(device)
            counts = [windows[i].targets for i in batch]
            # The row of each target [t], and the place of the token that it follows.
            last, at = torch.tensor([[len(text) - 1] for text in texts]), torch.arange(tokens.size(1) - 1)
            rows, places = ((at < last) & (at >= last - torch.tensor(counts)[:, None])).nonzero().t().to(device)
            hidden = model.hidden_states(tokens[:, :-1])
            found = token_scores(model, hidden[places, rows], tokens[rows, places + 1]).split(counts)
            scores[:, batch] = torch.stack(
                [torch.stack([-part[:, 0].sum(), part[:, 1].min()]) for part in found], dim=1
            )
    group = mpu.get_data_parallel_group()
    if group is not None and group.size() > 1:
        dist.all_reduce(scores, group=group)  # of each window all ranks but one have 0
    nats, greedy = scores.cpu().numpy()
    return Scores(nats, greedy == 1)
