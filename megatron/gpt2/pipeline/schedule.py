"""Pipeline schedules: a table of the actions of each rank, in order. The module also distributes the layers over the
stages.

A rank has v model chunks. Chunk c of rank r is stage c·p + r of the p·v stages, so a micro-batch passes all ranks once
for each chunk. Stage 0 has the embedding, the last stage has the loss.

Every schedule works with any number of micro-batches. On every rank the backwards of a chunk are in the order of the
micro-batches, as in a run without a pipeline, so gradients are always summed in the same order.

Layers are distributed as evenly as possible. If the number of stages divides the number of layers, all stages get the
same number, as in Megatron. Otherwise some stages get one more, starting with the second-to-last stage and going back
to the first. The last stage is the last to get one, because it also has the head.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from typing import Literal

SCHEDULES = ("1f1b", "interleaved", "zero-bubble")
FIRST_LAYERS_FLAG, LAST_LAYERS_FLAG = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"

Kind = Literal["F", "B", "W"]


@dataclass(frozen=True)
class Action:
    """The forward, the backward or the weight gradient of one micro-batch in one chunk of a rank.

    kind: F is forward. B is backward: the gradient of the chunk's input and, in a schedule without W, of its weights. W
    is the gradient of the weights.
    """

    kind: Kind
    model_chunk: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind} of micro-batch {self.micro_batch} in chunk {self.model_chunk}"


@dataclass(frozen=True)
class PipelineSchedule:
    """The actions of each rank: ranks[r] are those of rank r of the pipeline, in order."""

    name: str
    ranks: tuple[tuple[Action, ...], ...]
    num_model_chunks: int
    num_microbatches: int

    @property
    def num_ranks(self) -> int:
        """The number of ranks of the pipeline, p."""
        return len(self.ranks)

    @property
    def num_stages(self) -> int:
        """The number of stages of the model, p·v (Megatron's virtual stages)."""
        return self.num_ranks * self.num_model_chunks

    @cached_property
    def splits_backward(self) -> bool:
        """Whether W is a separate action."""
        return any(action.kind == "W" for action in self.ranks[0])

    def stage(self, rank: int, model_chunk: int) -> int:
        """Return the stage number of a chunk of a rank."""
        return model_chunk * self.num_ranks + rank


def one_forward_one_backward(p: int, m: int) -> PipelineSchedule:
    """1F1B, also called PipeDream-flush (arXiv:2104.04473). Rank r starts with p − 1 − r forwards and then alternates
    forward and backward. The rank keeps the activations of at most p − r micro-batches. With p = 1: F0 B0 F1 B1 ..."""
    return PipelineSchedule(
        "1f1b", tuple(_alternate(_forwards(p, 1, m), _backwards(p, 1, m), p - 1 - rank) for rank in range(p)), 1, m
    )


def interleaved(p: int, v: int, m: int) -> PipelineSchedule:
    """1F1B with v chunks per rank (arXiv:2104.04473): p micro-batches pass chunk 0, then the same ones pass chunk 1,
    ...

    The order is built for whole groups of p micro-batches. Then the micro-batches with numbers from m on are removed.
    The order stays valid, because actions of different micro-batches do not depend on each other.
    """
    whole = -(-m // p) * p
    ranks = []
    for rank in range(p):
        order = _alternate(_forwards(p, v, whole), _backwards(p, v, whole), 2 * (p - 1 - rank) + (v - 1) * p)
        ranks.append(tuple(action for action in order if action.micro_batch < m))
    return PipelineSchedule("interleaved", tuple(ranks), v, m)


def zero_bubble(p: int, m: int) -> PipelineSchedule:
    """ZB-H1 (arXiv:2401.10241): 1F1B in which rank r delays the W of a micro-batch by r backwards.

    Later ranks therefore send the gradients of inputs sooner, and run their W's at the end, when they would otherwise
    wait. Every rank keeps at most p micro-batches, as rank 0 does under 1F1B: p − r between F and B, and r between B
    and W.
    """
    ranks = []
    for rank in range(p):
        order: list[Action] = []
        for action in _alternate(_forwards(p, 1, m), _backwards(p, 1, m), p - 1 - rank):
            order.append(action)
            if action.kind == "B" and action.micro_batch >= rank:
                order.append(Action("W", 0, action.micro_batch - rank))
        ranks.append((*order, *(Action("W", 0, late) for late in range(max(m - rank, 0), m))))
    return PipelineSchedule("zero-bubble", tuple(ranks), 1, m)


@lru_cache(maxsize=64)
def build_schedule(name: str, p: int, v: int, m: int) -> PipelineSchedule:
    """Build the schedule `name` (--pipeline-schedule). Raises ValueError with the name of the flag if this is
    impossible."""
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
    """Yield forwards. Each group of p micro-batches passes chunk after chunk."""
    return (
        Action("F", chunk, micro_batch)
        for first in range(0, m, p)
        for chunk in range(v)
        for micro_batch in range(first, min(first + p, m))
    )


def _backwards(p: int, v: int, m: int) -> Iterator[Action]:
    """Yield backwards in the order of the forwards, but from the last chunk to the first."""
    return (Action("B", v - 1 - action.model_chunk, action.micro_batch) for action in _forwards(p, v, m))


def _alternate(forwards: Iterable[Action], backwards: Iterable[Action], ahead: int) -> tuple[Action, ...]:
    """Return `ahead` forwards, then forwards and backwards alternately, then the remaining backwards."""
    first, second = list(forwards), list(backwards)
    pairs = zip(first[ahead:], second, strict=False)
    return (*first[:ahead], *chain.from_iterable(pairs), *second[max(len(first) - ahead, 0) :])


def layers_of_stages(
    num_layers: int, p: int, v: int = 1, first: int | None = None, last: int | None = None
) -> list[range]:
    """Return the layers of each of the p·v stages. Stage c·p + r is chunk c of rank r.

    first, last: the number of layers of the first and the last rank, over all their chunks. Raises ValueError with the
    name of the flag if a stage would have no layer, or if layers would remain.
    """
    if num_layers < p * v:
        chunks = f" with {v} virtual stages each (--num-layers-per-virtual-pipeline-stage)" if v > 1 else ""
        raise ValueError(
            f"--pipeline-model-parallel-size {p}{chunks} needs at least {p * v} layers, one per stage, "
            f"and --num-layers is {num_layers}"
        )
    given: dict[int, int] = {}
    for flag, rank, count in ((FIRST_LAYERS_FLAG, 0, first), (LAST_LAYERS_FLAG, p - 1, last)):
        if count is None:
            continue
        if p == 1:
            raise ValueError(f"{flag} needs --pipeline-model-parallel-size of at least 2")
        if count < v:
            raise ValueError(f"{flag} must be at least {v}, one layer per stage of this rank, not {count}")
        given[rank] = count
    left, others = num_layers - sum(given.values()), [rank for rank in range(p) if rank not in given]
    if left < len(others) * v or (left and not others):
        flags = " and ".join(
            flag for flag, rank in ((FIRST_LAYERS_FLAG, 0), (LAST_LAYERS_FLAG, p - 1)) if rank in given
        )
        raise ValueError(
            f"{flags} leave {left} of {num_layers} layers for the other {len(others) * v} stages: "
            f"{'each of them needs one' if others else 'they must add up to --num-layers'}"
        )
    sizes = [0] * (p * v)
    _distribute_evenly(sizes, [stage for stage in range(p * v) if stage % p in others], left)
    for rank, count in given.items():
        _distribute_evenly(sizes, range(rank, p * v, p), count)
    ends = [sum(sizes[: stage + 1]) for stage in range(p * v)]
    return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def virtual_stages(num_layers: int, p: int, layers_per_stage: int) -> int:
    """Return the number of virtual stages per rank, with at most `layers_per_stage` layers each. Raises ValueError with
    the name of the flag."""
    if layers_per_stage < 1:
        raise ValueError(f"--num-layers-per-virtual-pipeline-stage must be positive, not {layers_per_stage}")
    return max(1, -(-num_layers // (p * layers_per_stage)))


def _distribute_evenly(sizes: list[int], stages: Sequence[int], layers: int) -> None:
    """Distribute `layers` over `stages` as evenly as possible, and write the numbers into `sizes`."""
    for index, stage in enumerate(stages):
        sizes[stage] = layers // len(stages)
        # The second-to-last stage has 0 and gets a left-over layer first; the last stage has the largest number.
        from_behind = (len(stages) - 2 - index) % len(stages)
        sizes[stage] += from_behind < layers % len(stages)
