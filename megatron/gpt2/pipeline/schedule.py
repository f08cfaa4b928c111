"""Schedules: the table of what each rank of a pipeline does, in order; and which layers each stage holds.

A rank holds v chunks of the model. Chunk c of rank r is stage c·p + r of the p·v stages: a micro-batch passes all ranks
once for each chunk. Stage 0 embeds tokens, the last stage has the loss.

Two rules hold for every schedule. It takes any number of micro-batches from 1 on. And the backwards of a chunk come in
the order of the micro-batches on every rank, as in a run without a pipeline: sums of gradients are added in one order.

Layers are dealt out as evenly as they can be. If the stages divide their number, all get the same, as in Megatron. If
not, some stages get one more than the others: from the last stage but one to the first. The last stage comes last of
all, since it has the head too. The first has the embedding, and it keeps the most micro-batches.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from typing import Literal

SCHEDULES = ("1f1b", "interleaved", "zero-bubble")
FIRST, LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"

Kind = Literal["F", "B", "W"]


@dataclass(frozen=True)
class Action:
    """One piece of work of one rank for one micro-batch in one of its chunks.

    kind: F is forward. B is backward: the gradient of the chunk's input, and, where the schedule has no W, those of its
    weights too. W is the gradients of its weights.
    """

    kind: Kind
    chunk: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind} of micro-batch {self.micro_batch} in chunk {self.chunk}"


@dataclass(frozen=True)
class Schedule:
    """What each rank does: ranks[r] is what rank r of the pipeline does, in its order."""

    name: str
    ranks: tuple[tuple[Action, ...], ...]
    chunks: int
    micro_batches: int

    @property
    def p(self) -> int:
        """Ranks of the pipeline."""
        return len(self.ranks)

    @property
    def stages(self) -> int:
        """Stages of the model: p·v, Megatron's virtual stages."""
        return self.p * self.chunks

    @cached_property
    def splits_backward(self) -> bool:
        """Whether the gradients of weights are an action of their own."""
        return any(action.kind == "W" for action in self.ranks[0])

    def stage(self, rank: int, chunk: int) -> int:
        """The stage that is this chunk of this rank."""
        return chunk * self.p + rank


def one_forward_one_backward(p: int, m: int) -> Schedule:
    """1F1B, also called PipeDream-flush (arXiv:2104.04473): rank r begins with p − 1 − r forwards and then does one
    forward and one backward in turn, so that it keeps at most p − r micro-batches. With p = 1: F0 B0 F1 B1 ..."""
    return Schedule(
        "1f1b", tuple(_in_turn(_forwards(p, 1, m), _backwards(p, 1, m), p - 1 - rank) for rank in range(p)), 1, m
    )


def interleaved(p: int, v: int, m: int) -> Schedule:
    """1F1B over v chunks per rank (arXiv:2104.04473): p micro-batches pass chunk 0, then the same ones chunk 1, ...

    It is made for whole groups of p micro-batches, and the micro-batches from m on are left out. What is left stays in
    order: no action waits for one of another micro-batch but by its place on its rank.
    """
    whole = -(-m // p) * p
    ranks = []
    for rank in range(p):
        order = _in_turn(_forwards(p, v, whole), _backwards(p, v, whole), 2 * (p - 1 - rank) + (v - 1) * p)
        ranks.append(tuple(action for action in order if action.micro_batch < m))
    return Schedule("interleaved", tuple(ranks), v, m)


def zero_bubble(p: int, m: int) -> Schedule:
    """ZB-H1 (arXiv:2401.10241): 1F1B in which rank r does the W of a micro-batch r backwards later.

    A later rank so sends its gradients of inputs sooner, and does its W's when it would wait at the end. Every rank
    keeps at most p micro-batches, as rank 0 does under 1F1B: p − r between F and B, and r between B and W.
    """
    ranks = []
    for rank in range(p):
        order: list[Action] = []
        for action in _in_turn(_forwards(p, 1, m), _backwards(p, 1, m), p - 1 - rank):
            order.append(action)
            if action.kind == "B" and action.micro_batch >= rank:
                order.append(Action("W", 0, action.micro_batch - rank))
        ranks.append((*order, *(Action("W", 0, late) for late in range(max(m - rank, 0), m))))
    return Schedule("zero-bubble", tuple(ranks), 1, m)


@lru_cache(maxsize=64)
def build_schedule(name: str, p: int, v: int, m: int) -> Schedule:
    """The schedule called `name` in --pipeline-schedule. ValueError, which names the flag, where there is none."""
    if name not in SCHEDULES:
        raise ValueError(f"--pipeline-schedule must be one of {', '.join(SCHEDULES)}, not {name}")
    if p < 1:
        raise ValueError(f"--pipeline-model-parallel-size must be positive, not {p}")
    if m < 1:
        raise ValueError(f"a pipeline needs at least one micro-batch per step, not {m}: raise --global-batch-size")
    if v > 1 and name != "interleaved":
        raise ValueError(
            f"--num-layers-per-virtual-pipeline-stage gives each rank {v} virtual stages, and "
            f"--pipeline-schedule {name} runs one: use --pipeline-schedule interleaved"
        )
    if v < 2 and name == "interleaved":
        raise ValueError(
            "--pipeline-schedule interleaved needs two or more virtual stages per rank: lower "
            "--num-layers-per-virtual-pipeline-stage, or use --pipeline-schedule 1f1b"
        )
    if name == "interleaved":
        return interleaved(p, v, m)
    return one_forward_one_backward(p, m) if name == "1f1b" else zero_bubble(p, m)


def _forwards(p: int, v: int, m: int) -> Iterator[Action]:
    """Each group of p micro-batches passes chunk by chunk."""
    return (
        Action("F", chunk, micro_batch)
        for first in range(0, m, p)
        for chunk in range(v)
        for micro_batch in range(first, min(first + p, m))
    )


def _backwards(p: int, v: int, m: int) -> Iterator[Action]:
    """As the forwards, from the last chunk to the first."""
    return (Action("B", v - 1 - action.chunk, action.micro_batch) for action in _forwards(p, v, m))


def _in_turn(forwards: Iterable[Action], backwards: Iterable[Action], ahead: int) -> tuple[Action, ...]:
    """`ahead` forwards, then one forward and one backward in turn, then the backwards that are left."""
    first, second = list(forwards), list(backwards)
    pairs = zip(first[ahead:], second, strict=False)
    return (*first[:ahead], *chain.from_iterable(pairs), *second[max(len(first) - ahead, 0) :])


def layers_of_stages(
    num_layers: int, p: int, v: int = 1, first: int | None = None, last: int | None = None
) -> list[range]:
    """The layers of each of the p·v stages; stage c·p + r is chunk c of rank r.

    first, last: how many layers the first and the last rank of the pipeline hold, in all their chunks together.
    ValueError, which names the flag, where a stage would hold no layer, or where layers are left over.
    """
    if num_layers < p * v:
        chunks = f" with {v} virtual stages each (--num-layers-per-virtual-pipeline-stage)" if v > 1 else ""
        raise ValueError(
            f"--pipeline-model-parallel-size {p}{chunks} needs at least {p * v} layers, one per stage, "
            f"and --num-layers is {num_layers}"
        )
    given: dict[int, int] = {}
    for flag, rank, count in ((FIRST, 0, first), (LAST, p - 1, last)):
        if count is None:
            continue
        if p == 1:
            raise ValueError(f"{flag} needs --pipeline-model-parallel-size of at least 2")
        if count < v:
            raise ValueError(f"{flag} must be at least {v}, one layer per stage of this rank, not {count}")
        given[rank] = count
    left, others = num_layers - sum(given.values()), [rank for rank in range(p) if rank not in given]
    if left < len(others) * v or (left and not others):
        flags = " and ".join(flag for flag, rank in ((FIRST, 0), (LAST, p - 1)) if rank in given)
        raise ValueError(
            f"{flags} leave {left} of {num_layers} layers for the other {len(others) * v} stages: "
            f"{'each of them needs one' if others else 'they must add up to --num-layers'}"
        )
    sizes = [0] * (p * v)
    _deal(sizes, [stage for stage in range(p * v) if stage % p in others], left)
    for rank, count in given.items():
        _deal(sizes, range(rank, p * v, p), count)
    ends = [sum(sizes[: stage + 1]) for stage in range(p * v)]
    return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def virtual_stages(num_layers: int, p: int, layers_per_stage: int) -> int:
    """Virtual stages per rank, where each holds at most `layers_per_stage` layers. ValueError, which names the flag."""
    if layers_per_stage < 1:
        raise ValueError(f"--num-layers-per-virtual-pipeline-stage must be positive, not {layers_per_stage}")
    return max(1, -(-num_layers // (p * layers_per_stage)))


def _deal(sizes: list[int], stages: Sequence[int], layers: int) -> None:
    """Give `layers` to `stages`, as evenly as they can be."""
    for place, stage in enumerate(stages):
        sizes[stage] = layers // len(stages)
        from_behind = (len(stages) - 2 - place) % len(stages)  # the last but one is 0, and the last of the model last
        sizes[stage] += from_behind < layers % len(stages)
