"""A bit that flips in memory is found, and named by rank and tensor: --check-replicas-interval.

What a rank holds for training (weights, masters, moments) changes in the optimizer's step alone. So it is hashed after
an update and again before the next one; and what several ranks hold alike has one hash on all of them: everything on
data-parallel ranks, unless the optimizer is sharded, and what tensor parallelism does not split on its ranks.

A hash is a sum of integers, the bits of 8 bytes each, modulo 2^64, in which each row of 64 elements has an odd factor
of its own. A single flipped bit always changes it, on any device in any order of adding.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megatron.gpt2.config import Config
from megatron.gpt2.dist.gathering import gather_over_ranks, gather_rows, gather_texts
from megatron.gpt2.dist.ranks import named
from megatron.gpt2.hooks import Hook, StopRun
from megatron.gpt2.train.run import Run

ROW = 64  # elements: every parameter and every owned range starts at a multiple of it


class StateChanged(StopRun):
    """What a rank holds for training is not what its last update has left; in one line."""

    cause = "replica drift"


class ReplicaCheck(Hook):
    """Hashes every --check-replicas-interval steps."""

    def __init__(self, config: Config) -> None:
        assert config.train.check_replicas_interval is not None
        self._interval = config.train.check_replicas_interval

    def begin(self, run: Run) -> None:
        """The state is another one on purpose: a new model's, or a checkpoint's."""
        self._optimizer, self._parallel, self._hosts = run.engine.optimizer, run.parallel, run.hosts
        flat = self._optimizer.flat
        self._names = list(flat.ranges)
        self._is_split = [getattr(flat.parameters[name], "model_parallel", False) for name in self._names]
        self._most = max(gather_over_ranks(len(self.kinds) * len(self._names), run.device))  # hashes of a rank
        self._after: Tensor | None = None  # the hashes after the last update, if it was their turn
        self._iteration = run.progress.iteration  # of the last update
        self._alike_at = f"iteration {self._iteration}, the start"  # when the replicas were last known to be alike

    def after_step(self, run: Run) -> None:
        """Hash what the update has left, where it is its turn."""
        self._iteration = run.progress.iteration
        if self._iteration % self._interval == 0:
            self._optimizer.gatherer.wait()
            self._after = self.hashes()

    def before_update(self, run: Run) -> None:
        """StateChanged, on every rank, where a hash was taken after the last update, and on any rank that is not the
        state now. It then waits for the device."""
        if self._after is not None:
            self._verify()
            self._after = None

    def before_save(self, run: Run) -> None:
        """The same before any save: what is wrong is not saved."""
        self._optimizer.gatherer.wait()
        self._verify()

    def _verify(self) -> None:
        now = self.hashes()
        before = now if self._after is None else self._after
        row = torch.zeros(1 + self._most, dtype=torch.int64, device=now.device)
        row[0], row[1 : 1 + now.numel()] = (now != before).any(), now.view(-1)
        everyone = gather_rows(row)
        has_changed = bool(everyone[:, 0].any())
        text = self._changed(before, now) if has_changed else self._differs(everyone[:, 1:])
        if any(texts := gather_texts(text)):
            raise StateChanged(
                "; ".join(filter(None, dict.fromkeys(texts))) + ": the memory of a rank has changed by "
                "itself. The run ends before that is used or saved; the same command continues from the "
                "last checkpoint. If it is the same rank again, replace its machine"
            )
        self._alike_at = f"iteration {self._iteration}, the last clean hash"

    def hashes(self) -> Tensor:
        """[kinds, parameters] int64: of what this rank holds of each parameter, of each kind (weight, master, moments)."""
        device = self._optimizer.flat.params.device  # masters may be on the host
        return torch.stack([hash_of_parts(buffer, parts).to(device) for _, buffer, parts in self._buffers()])

    @property
    def kinds(self) -> list[str]:
        """What is hashed, in the order of `hashes`."""
        return [kind for kind, _, _ in self._buffers()]

    def _buffers(self) -> Iterator[tuple[str, Tensor, list[tuple[int, int]]]]:
        """Each buffer, 1-D, with the elements of each parameter in it."""
        optimizer, flat = self._optimizer, self._optimizer.flat
        yield "weight", flat.params, [(flat.ranges[name].start, flat.ranges[name].stop) for name in self._names]
        starts = [0]
        for segment in flat.owned:
            starts.append(starts[-1] + segment.range.stop - segment.range.start)
        owned = []
        for name in self._names:
            index, part, _ = flat.owned_part_of(name)
            owned.append((starts[index] + part.start, starts[index] + part.stop))
        has_masters = flat.params.dtype != torch.float32 or flat.offloaded
        for kind, parts in (*([("master", flat.masters)] if has_masters else []), *optimizer.moments.items()):
            yield kind, parts[0].as_strided((starts[-1],), (1,)), owned  # `FlatParameters.room` makes them neighbours

    def _replicas(self, split: bool, kind: int) -> list[int]:
        """The ranks that hold the same split parameters as this one, or the same others."""
        is_sharded = self._optimizer.flat.is_sharded and kind > 0
        t, d = self._parallel.tensor_model_parallel_size, self._parallel.data_parallel_size

        def held(rank: int) -> tuple[int, int, int]:
            return rank // (t * d), rank % t if split else 0, rank // t % d if is_sharded else 0

        own = held(self._parallel.rank)
        return [rank for rank in range(self._parallel.world_size) if held(rank) == own]

    def _changed(self, before: Tensor, now: Tensor) -> str:
        """What of this rank has changed since its last update."""
        places = [
            (kind, name)
            for kind, row in zip(self.kinds, (before != now).tolist(), strict=True)
            for name, changed in zip(self._names, row, strict=True)
            if changed
        ]
        return (
            f"{named([self._parallel.rank], self._hosts)} holds another {and_more(places)} than the update of "
            f"iteration {self._iteration} left, the last clean hash"
            if places
            else ""
        )

    def _differs(self, everyone: Tensor) -> str:
        """What of this rank is not as on its replicas. everyone: the hashes of each rank, [ranks, kinds · parameters
        and more]."""
        found: dict[tuple[int, ...], list[tuple[str, str]]] = {}
        for index, kind in enumerate(self.kinds):
            for number, name in enumerate(self._names):
                ranks = self._replicas(self._is_split[number], index)
                values = everyone[ranks, index * len(self._names) + number].tolist()
                if odd := minority(values):
                    found.setdefault(tuple(ranks[place] for place in odd), []).append((kind, name))
        return "; ".join(
            f"{named(ranks, self._hosts)} hold{'s' * (len(ranks) == 1)} another {and_more(places)} than "
            f"{'each other' if len(ranks) > 1 else 'the other replicas'}, since {self._alike_at}"
            for ranks, places in found.items()
        )


def hash_of_parts(buffer: Tensor, parts: Sequence[tuple[int, int]]) -> Tensor:
    """[parts] int64, on the buffer's device. buffer: [a multiple of ROW] of 2 or 4 bytes each. parts: from a multiple
    of ROW on; what follows a part up to the next multiple belongs to it."""
    rows = buffer.view(-1, ROW).view(torch.int64).sum(dim=1)
    rows *= torch.arange(1, 2 * len(rows), 2, device=buffer.device)
    ends = torch.zeros(len(rows) + 1, dtype=torch.int64, device=buffer.device)
    torch.cumsum(rows, 0, out=ends[1:])
    places = torch.tensor([(start // ROW, -(-stop // ROW)) for start, stop in parts], device=buffer.device)
    return ends[places[:, 1]] - ends[places[:, 0]]


def minority(values: Sequence[int]) -> list[int]:
    """The places of the values that differ from what more than half of them are; all where there is no such value."""
    value, count = Counter(values).most_common(1)[0]
    if 2 * count <= len(values):
        return list(range(len(values)))
    return [place for place, other in enumerate(values) if other != value]


def and_more(places: Sequence[tuple[str, str]]) -> str:
    """ "exp_avg of transformer.layers.0.mlp.up.weight and 3 others"."""
    (kind, name), *others = places
    return f"{kind} of {name}" + (f" and {len(others)} other{'s' * (len(others) > 1)}" if others else "")
