"""A bit that flips in memory is found, and named by rank and tensor: --check-replicas-interval.

Only the optimizer's step changes what a rank holds for training (weights, masters, moments). So it is hashed after an
update and again before the next one; and what several ranks hold alike has one hash on all of them: everything on
data-parallel ranks, unless the optimizer is sharded, and what tensor parallelism does not split on its ranks.

A hash is a sum of integers, the bits of 8 bytes each, modulo 2^64, in which each row of 64 elements has an odd factor
of its own. A single flipped bit always changes it, on any device in any order of adding.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megatron.gpt2.config import Config
from megatron.gpt2.dist.gathering import gather_over_ranks, gather_rows, gather_texts
from megatron.gpt2.dist.ranks import named
from megatron.gpt2.hooks import Hook, StopRun
from megatron.gpt2.optimizer.optimizer import AdamWOptimizer
from megatron.gpt2.train.run import Run

ROW = 64  # elements: every parameter and every owned range starts at a multiple of it

Parts = Sequence[tuple[int, int]]  # from an element to another one


class StateChanged(StopRun):
    """What a rank holds for training is not what its last update has left; in one line."""

    cause = "replica drift"


class ReplicaCheck(Hook):
    """Hashes every --check-replicas-interval steps."""

    def __init__(self, config: Config) -> None:
        assert config.train.check_replicas_interval is not None
        self._interval = config.train.check_replicas_interval

    def begin(self, run: Run) -> None:
        """The state has changed on purpose: a new model's, or a checkpoint's."""
        self._optimizer, self._parallel, self._hosts = run.engine.optimizer, run.parallel, run.hosts
        self._buffers = list(buffers_of(self._optimizer))
        # (kind, name) of each hash, and the ranks that hold the same.
        self._tensors = [(kind, name) for kind, _, _ in self._buffers for name in self._optimizer.flat.ranges]
        self._replicas = [self._replicas_of(kind, name) for kind, name in self._tensors]
        self._most = max(gather_over_ranks(len(self._tensors), run.device))  # hashes of a rank
        self._after: Tensor | None = None  # the hashes after the last update, if it was their turn
        self._iteration = run.progress.iteration  # of the last update
        self._alike_at = f"iteration {self._iteration}, the start"  # when the replicas were last known to be alike

    def after_step(self, run: Run) -> None:
        """Hash what the update has left, if it is its turn."""
        self._iteration = run.progress.iteration
        if self._iteration % self._interval == 0:
            self._optimizer.gatherer.wait()
            self._after = self.hashes()

    def before_update(self, run: Run) -> None:
        """StateChanged, on every rank, if a hash was taken after the last update and the state has changed since then
        on any rank, or differs from its replicas'. It then waits for the device."""
        if self._after is not None:
            self._verify()
            self._after = None

    def before_save(self, run: Run) -> None:
        """The same before any save: what is wrong is not saved."""
        self._optimizer.gatherer.wait()
        self._verify()

    def hashes(self) -> Tensor:
        """[tensors] int64: the hash of what this rank holds of each kind (weight, master, moments) and parameter."""
        device = self._optimizer.flat.params.device  # masters may be on the host
        return torch.cat([hash_of_parts(buffer, parts).to(device) for _, buffer, parts in self._buffers])

    def _verify(self) -> None:
        now = self.hashes()
        changed = now != (now if self._after is None else self._after)
        row = torch.zeros(1 + self._most, dtype=torch.int64, device=now.device)
        row[0], row[1 : 1 + len(now)] = changed.any(), now
        everyone = gather_rows(row)
        if everyone[:, 0].any():
            own = itertools.compress(self._tensors, changed.tolist())
            text = self._describe_change(list(own))
        else:
            text = "; ".join(self._describe_differences(everyone[:, 1:]))
        if any(texts := gather_texts(text)):
            raise StateChanged(
                "; ".join(filter(None, dict.fromkeys(texts))) + ": the memory of a rank has changed by "
                "itself. The run ends before that is used or saved; the same command continues from the "
                "last checkpoint. If it is the same rank again, replace its machine"
            )
        self._alike_at = f"iteration {self._iteration}, the last clean hash"

    def _replicas_of(self, kind: str, name: str) -> list[int]:
        """The ranks that hold the same tensor as this one."""
        flat, parallel = self._optimizer.flat, self._parallel
        is_split = getattr(flat.parameters[name], "model_parallel", False)
        is_sharded = flat.is_sharded and kind != "weight"
        t, d = parallel.tensor_model_parallel_size, parallel.data_parallel_size

        def held(rank: int) -> tuple[int, int, int]:
            return rank // (t * d), rank % t if is_split else 0, rank // t % d if is_sharded else 0

        return [rank for rank in range(parallel.world_size) if held(rank) == held(parallel.rank)]

    def _describe_change(self, tensors: Sequence[tuple[str, str]]) -> str:
        """What of this rank has changed since its last update."""
        if not tensors:
            return ""
        return (
            f"{named([self._parallel.rank], self._hosts)} holds another {and_more(tensors)} than the update of "
            f"iteration {self._iteration} left, the last clean hash"
        )

    def _describe_differences(self, everyone: Tensor) -> Iterator[str]:
        """What of this rank is not as on its replicas. everyone: the hashes of each rank, [ranks, tensors and more]."""
        found: dict[tuple[int, ...], list[tuple[str, str]]] = {}
        for number, (tensor, ranks) in enumerate(zip(self._tensors, self._replicas, strict=True)):
            if odd := minority(everyone[ranks, number].tolist()):
                found.setdefault(tuple(ranks[place] for place in odd), []).append(tensor)
        for ranks_of_odd, tensors in found.items():
            hold, others = ("hold", "each other") if len(ranks_of_odd) > 1 else ("holds", "the other replicas")
            who = named(ranks_of_odd, self._hosts)
            yield f"{who} {hold} another {and_more(tensors)} than {others}, since {self._alike_at}"


def buffers_of(optimizer: AdamWOptimizer) -> Iterator[tuple[str, Tensor, Parts]]:
    """The kind of each buffer of this rank, the buffer, 1-D, and the elements of each parameter in it."""
    flat = optimizer.flat
    yield "weight", flat.params, [(elements.start, elements.stop) for elements in flat.ranges.values()]
    starts = [0, *itertools.accumulate(segment.range.stop - segment.range.start for segment in flat.owned)]
    owned = [
        (starts[index] + part.start, starts[index] + part.stop)
        for index, part, _ in map(flat.owned_part_of, flat.ranges)
    ]
    has_masters = flat.params.dtype != torch.float32 or flat.offloaded
    for kind, parts in (*([("master", flat.masters)] if has_masters else []), *optimizer.moments.items()):
        yield kind, parts[0].as_strided((starts[-1],), (1,)), owned  # `FlatParameters.room` makes them neighbours


def hash_of_parts(buffer: Tensor, parts: Parts) -> Tensor:
    """[parts] int64, on the buffer's device. buffer: [a multiple of ROW] of 2 or 4 bytes each. parts: from a multiple
    of ROW on; what follows a part up to the next multiple belongs to it."""
    rows = buffer.view(-1, ROW).view(torch.int64).sum(dim=1)
    rows *= torch.arange(1, 2 * len(rows), 2, device=buffer.device)
    ends = torch.zeros(len(rows) + 1, dtype=torch.int64, device=buffer.device)
    torch.cumsum(rows, 0, out=ends[1:])
    places = torch.tensor([(start // ROW, -(-stop // ROW)) for start, stop in parts], device=buffer.device)
    return ends[places[:, 1]] - ends[places[:, 0]]


def minority(values: Sequence[int]) -> list[int]:
    """The places of the values that differ from the one that more than half of them have; all if there is no such
    value."""
    value, count = Counter(values).most_common(1)[0]
    if 2 * count <= len(values):
        return list(range(len(values)))
    return [place for place, other in enumerate(values) if other != value]


def and_more(tensors: Sequence[tuple[str, str]]) -> str:
    """ "exp_avg of transformer.layers.0.mlp.up.weight and 3 others"."""
    (kind, name), *others = tensors
    return f"{kind} of {name}" + (f" and {len(others)} other{'s' * (len(others) > 1)}" if others else "")
