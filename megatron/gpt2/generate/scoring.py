"""Compute the probability that a model gives to a text.

Every rank calls `score_windows` with the same windows and gets all scores. Legend: b windows in a batch, s positions,
t targets.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

import mpu
from data_utils.command_line import progress_bar
from megatron.gpt2.device import inference
from megatron.gpt2.generate.model_runner import token_scores
from megatron.gpt2.model.gpt2 import GPT2Model


class Window(NamedTuple):
    """A part of a text: the model scores the last `num_targets` of `ids` [n], int32, after at least one id of
    context."""

    ids: np.ndarray
    num_targets: int


class Scores(NamedTuple):
    """The scores of w windows.

    nats: [w] float64, -Σ ln p(target).
    greedy: [w] bool, True if every target is the arg-max.
    """

    nats: np.ndarray
    greedy: np.ndarray


def sliding_windows(ids: np.ndarray, length: int, stride: int) -> list[Window]:
    """Cut `ids` [n] into windows of up to `length` + 1 ids. Every id except the first is a target in exactly one
    window.

    stride: the targets of each window after the first, at most `length`. Targets after the first window have at least
        `length` - `stride` ids of context (Megatron's --overlapping-eval).
    """
    shared = length - stride
    parts = ((start, ids[start : start + length + 1]) for start in range(0, max(len(ids) - 1 - shared, 1), stride))
    return [Window(part, len(part) - 1 - (shared if start else 0)) for start, part in parts if len(part) > 1]


@torch.no_grad()
def score_windows(model: GPT2Model, windows: Sequence[Window], *, batch_size: int) -> Scores:
    """Score all windows and return all scores on every rank.

    With n data-parallel ranks, each rank computes every n-th batch. The batches, the order of every sum and the scores
    do not depend on the number of ranks.

    batch_size: windows per forward pass.
    """
    device = next(model.parameters()).device
    # The windows of a batch have similar lengths, so they need little padding.
    order = sorted(range(len(windows)), key=lambda i: -len(windows[i].ids))
    starts = range(
        mpu.get_data_parallel_rank() * batch_size, len(order), mpu.get_data_parallel_world_size() * batch_size
    )
    scores = torch.zeros(2, len(windows), dtype=torch.float64, device=device)
    is_first_rank = not dist.is_initialized() or dist.get_rank() == 0
    with inference(model):
        for start in progress_bar(starts, visible=is_first_rank, desc="scoring", unit="batch", leave=False):
            batch = order[start : start + batch_size]
            texts = [torch.from_numpy(windows[i].ids).long() for i in batch]
            tokens = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True).to(device)
            lengths, counts = torch.tensor([[len(windows[i].ids), windows[i].num_targets] for i in batch]).t()
            hidden = model.hidden_states(tokens[:, :-1])
            found = token_scores(model, hidden, tokens, lengths, counts).split(counts.tolist())
            scores[:, batch] = torch.stack(
                [torch.stack([-part[:, 0].sum(), part[:, 1].min()]) for part in found], dim=1
            )
    group = mpu.get_data_parallel_group()
    if group is not None and group.size() > 1:
        dist.all_reduce(scores, group=group)  # A window has its score on one rank, and 0 on the others.
    nats, greedy = scores.cpu().numpy()
    return Scores(nats, greedy == 1)
