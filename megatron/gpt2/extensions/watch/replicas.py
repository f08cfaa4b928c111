"""`--check-replicas-interval`: detects bits that flip in memory, and names the rank and the tensor.

Only the optimizer's step changes the training state of a rank (weights, masters, moments). The state is therefore
hashed after an update and again before the next update. In addition, all replicas of a tensor must have equal hashes.
All tensors have replicas on the data-parallel ranks, except masters and moments of a sharded optimizer. Tensors that
tensor parallelism does not split also have replicas on the tensor-parallel ranks.

The hash of a tensor is a sum of 64-bit integers modulo 2^64. Each integer is 8 bytes of the tensor, and the integers of
each row of 64 elements are multiplied by a different odd factor. A single flipped bit always changes the hash. The hash
does not depend on the order of the sum.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megatron.gpt2.config import Config
from megatron.gpt2.dist.gathering import gather_ints, gather_rows, gather_strings
from megatron.gpt2.dist.ranks import format_ranks
from megatron.gpt2.hooks import Hook, StopRun
from megatron.gpt2.optimizer.optimizer import MixedPrecisionOptimizer
from megatron.gpt2.train.trainer import Trainer

ROW = 64  # Parameters, and the parts that a rank's optimizer updates, start at multiples of 64 elements.

ElementRanges = Sequence[tuple[int, int]]  # the (start, stop) of each range of elements


class StateCorrupted(StopRun):
    """Raised if the training state of a rank has changed between two updates. The message is one line."""

    cause = "replica drift"


class ReplicaCheck(Hook):
    """Hashes the training state every --check-replicas-interval steps."""

    def __init__(self, config: Config) -> None:
        assert config.train.check_replicas_interval is not None
        self._interval = config.train.check_replicas_interval

    def on_train_begin(self, trainer: Trainer) -> None:
        """Start from the state of a new model or of a checkpoint."""
        self._optimizer, self._parallel, self._hosts = trainer.state.optimizer, trainer.parallel, trainer.hosts
        self._buffers = list(state_buffers(self._optimizer))
        # The (kind, name) of the tensor of each hash, and the ranks that have a replica of the tensor.
        self._tensors = [(kind, name) for kind, _, _ in self._buffers for name in self._optimizer.buffer.ranges]
        self._replicas = [self._replicas_of(kind, name) for kind, name in self._tensors]
        # The largest number of hashes on any rank.
        self._max_tensors = max(gather_ints(len(self._tensors), trainer.device))
        self._hashes_after_update: Tensor | None = None  # None means that the last update was not hashed.
        self._iteration = trainer.progress.iteration  # the iteration of the last update
        self._last_match = f"iteration {self._iteration}, the start"  # the last time that all replicas were equal

    def on_step_end(self, trainer: Trainer) -> None:
        """Hash the updated state every --check-replicas-interval steps."""
        self._iteration = trainer.progress.iteration
        if self._iteration % self._interval == 0:
            self._optimizer.param_gather.finish_param_sync()
            self._hashes_after_update = self.hashes()

    def on_pre_optimizer_step(self, trainer: Trainer) -> None:
        """Compare the state with its hashes after the last update, if these exist. The method waits for the device.
        Raises StateCorrupted on every rank if the state of any rank has changed or differs from its replicas."""
        if self._hashes_after_update is not None:
            self._verify()
            self._hashes_after_update = None

    def on_save(self, trainer: Trainer) -> None:
        """Compare the state with its replicas, so that no corrupted state is saved."""
        self._optimizer.param_gather.finish_param_sync()
        self._verify()

    def hashes(self) -> Tensor:
        """Return the hashes of the rank's tensors, [number of tensors] int64. For each parameter there is a hash of its
        weight, its master and each of its moments."""
        device = self._optimizer.buffer.params.device  # Masters may be in host memory.
        return torch.cat([hash_ranges(buffer, parts).to(device) for _, buffer, parts in self._buffers])

    def _verify(self) -> None:
        now = self.hashes()
        changed = now != (now if self._hashes_after_update is None else self._hashes_after_update)
        row = torch.zeros(1 + self._max_tensors, dtype=torch.int64, device=now.device)
        row[0], row[1 : 1 + len(now)] = changed.any(), now
        all_hashes = gather_rows(row)
        if not all_hashes[:, 0].any():
            text = "; ".join(self._describe_differences(all_hashes[:, 1:]))
        elif tensors := list(itertools.compress(self._tensors, changed.tolist())):
            own_rank = format_ranks([self._parallel.rank], self._hosts)
            text = (
                f"{own_rank} holds a different {describe_tensors(tensors)} than the update of iteration "
                f"{self._iteration} left, the last clean hash"
            )
        else:
            text = ""
        if any(texts := gather_strings(text)):
            raise StateCorrupted(
                "; ".join(filter(None, dict.fromkeys(texts))) + ": the memory of a rank has changed by "
                "itself. The run ends before the wrong state is used or saved; the same command continues from the "
                "last checkpoint. If the same rank fails again, replace its machine"
            )
        self._last_match = f"iteration {self._iteration}, the last clean hash"

    def _replicas_of(self, kind: str, name: str) -> list[int]:
        """Return the ranks that have a replica of a tensor, including the current rank."""
        buffer, parallel = self._optimizer.buffer, self._parallel
        is_split = getattr(buffer.parameters[name], "model_parallel", False)
        is_sharded = buffer.is_sharded and kind != "weight"
        tp, dp = parallel.tensor_model_parallel_size, parallel.data_parallel_size

        def position(rank: int) -> tuple[int, int, int]:
            return rank // (tp * dp), rank % tp if is_split else 0, rank // tp % dp if is_sharded else 0

        return [rank for rank in range(parallel.world_size) if position(rank) == position(parallel.rank)]

    def _describe_differences(self, all_hashes: Tensor) -> Iterator[str]:
        """Describe the rank's tensors that differ from their replicas.

        all_hashes: [number of ranks, the largest number of tensors of a rank].
        """
        tensors_by_ranks: dict[tuple[int, ...], list[tuple[str, str]]] = {}
        for index, (tensor, ranks) in enumerate(zip(self._tensors, self._replicas, strict=True)):
            hashes = all_hashes[ranks, index].tolist()
            value, count = Counter(hashes).most_common(1)[0]
            has_majority = 2 * count > len(ranks)
            differing = [rank for rank, h in zip(ranks, hashes, strict=True) if h != value or not has_majority]
            if differing:
                tensors_by_ranks.setdefault(tuple(differing), []).append(tensor)
        for differing_ranks, tensors in tensors_by_ranks.items():
            rank_names = format_ranks(differing_ranks, self._hosts)
            hold, others = ("hold", "each other") if len(differing_ranks) > 1 else ("holds", "the other replicas")
            yield f"{rank_names} {hold} a different {describe_tensors(tensors)} than {others}, since {self._last_match}"


def state_buffers(optimizer: MixedPrecisionOptimizer) -> Iterator[tuple[str, Tensor, ElementRanges]]:
    """Yield (kind, buffer, ranges) of each one-dimensional state buffer of the rank. There is a range of elements for
    each parameter."""
    buffer = optimizer.buffer
    yield "weight", buffer.params, [(elements.start, elements.stop) for elements in buffer.ranges.values()]
    has_masters = buffer.params.dtype != torch.float32 or buffer.is_offloaded
    for kind, parts in (*([("master", buffer.masters)] if has_masters else []), *optimizer.moments.items()):
        starts = [0, *itertools.accumulate(part.numel() for part in parts)]
        owned = [
            # Muon's matrices have no second moment.
            (starts[index] + part.start, starts[index] + part.stop) if parts[index].numel() else (0, 0)
            for index, part, _ in map(buffer.owned_part, buffer.ranges)
        ]
        # `ParamAndGradBuffer.zeros_like_owned_ranges` allocates all parts in one piece.
        yield kind, parts[0].as_strided((starts[-1],), (1,)), owned


def hash_ranges(buffer: Tensor, ranges: ElementRanges) -> Tensor:
    """Return the hash of each range, [number of ranges] int64, on the device of `buffer`.

    buffer: [multiple of ROW], with elements of 2 or 4 bytes.
    ranges: (start, stop) of elements. Each start is a multiple of ROW, and a range is hashed up to the next multiple of
        ROW after its end.
    """
    rows = buffer.view(-1, ROW).view(torch.int64).sum(dim=1)
    rows *= torch.arange(1, 2 * len(rows), 2, device=buffer.device)
    ends = torch.zeros(len(rows) + 1, dtype=torch.int64, device=buffer.device)
    torch.cumsum(rows, 0, out=ends[1:])
    bounds = torch.tensor([(start // ROW, -(-stop // ROW)) for start, stop in ranges], device=buffer.device)
    return ends[bounds[:, 1]] - ends[bounds[:, 0]]


def describe_tensors(tensors: Sequence[tuple[str, str]]) -> str:
    """Return a text such as "exp_avg of transformer.layers.0.mlp.dense_h_to_4h.weight and 3 others"."""
    (kind, name), *others = tensors
    return f"{kind} of {name}" + (f" and {len(others)} other{'s' * (len(others) > 1)}" if others else "")
