"""Pipeline schedules. A schedule is a list of actions for each rank. An action is the forward, the backward or the
weight gradient of one micro-batch in one model chunk. The module also distributes the layers over the virtual stages.

Each of the pp ranks has vpp model chunks. Chunk c of rank r is virtual stage c·pp + r of the pp·vpp virtual
stages, as in Megatron, so a micro-batch passes all ranks once for each chunk. Virtual stage 0 has the embedding, the
last one has the loss. With one chunk per rank, the virtual stages are the pipeline stages.

Every schedule works with any number of micro-batches. On every rank the backwards of a chunk are in the order of the
micro-batches, as in a run without a pipeline, so gradients are always summed in the same order.

Layers are distributed as evenly as possible. If the number of virtual stages divides the number of layers, all virtual
stages get the same number of layers, as in Megatron. Otherwise the left-over layers go to the second-to-last virtual
stage, the one before it, and so on. The last virtual stage gets no left-over layer, because it also has the head.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, chain
from typing import Literal

SCHEDULES = ("1f1b", "interleaved", "zero-bubble")
FIRST_LAYERS_FLAG, LAST_LAYERS_FLAG = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"

Kind = Literal["F", "B", "W"]


@dataclass(frozen=True)
class Action:
    """The forward, the backward or the weight gradient of one micro-batch in one chunk of a rank.

    kind: "F" is forward. "W" computes the gradient of the chunk's weights. "B" computes the gradient of the chunk's
        input, and also of its weights in a schedule without "W".
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
        """The number of ranks of the pipeline, pp."""
        return len(self.ranks)

    @property
    def num_virtual_stages(self) -> int:
        """The number of virtual stages of the model, pp·vpp."""
        return self.num_ranks * self.num_model_chunks

    @cached_property
    def splits_backward(self) -> bool:
        """Whether W is a separate action."""
        return any(action.kind == "W" for action in self.ranks[0])

    def virtual_stage(self, rank: int, model_chunk: int) -> int:
        """Return the number of the virtual stage that is `model_chunk` of a rank."""
        return model_chunk * self.num_ranks + rank


def one_forward_one_backward(pp: int, m: int) -> PipelineSchedule:
    """1F1B, also called PipeDream-flush (arXiv:2104.04473). Rank r starts with pp − 1 − r forwards and then alternates
    forward and backward. Rank r keeps the activations of at most pp − r micro-batches. With pp = 1: F0 B0 F1 B1 ..."""
    return PipelineSchedule(
        "1f1b", tuple(_alternate(_forwards(pp, 1, m), _backwards(pp, 1, m), pp - 1 - rank) for rank in range(pp)), 1, m
    )


def interleaved(pp: int, vpp: int, m: int) -> PipelineSchedule:
    """1F1B with vpp chunks per rank (arXiv:2104.04473): a group of pp micro-batches passes chunk 0, then the same group
    passes chunk 1, and so on.

    The order is built for whole groups of pp micro-batches. Then micro-batch m and all later ones are removed. The
    order stays valid, because actions of different micro-batches do not depend on each other.
    """
    padded = -(-m // pp) * pp
    ranks = []
    for rank in range(pp):
        order = _alternate(
            _forwards(pp, vpp, padded), _backwards(pp, vpp, padded), 2 * (pp - 1 - rank) + (vpp - 1) * pp
        )
        ranks.append(tuple(action for action in order if action.micro_batch < m))
    return PipelineSchedule("interleaved", tuple(ranks), vpp, m)


def zero_bubble(pp: int, m: int) -> PipelineSchedule:
    """ZB-H1 (arXiv:2401.10241): 1F1B in which rank r delays the W of a micro-batch by r backwards.

    Later ranks therefore send the gradients of inputs sooner, and compute their W actions at the end, when they would
    otherwise wait. Every rank keeps activations of at most pp micro-batches, as rank 0 does under 1F1B: pp − r between
    F and B, and r between B and W.
    """
    ranks = []
    for rank in range(pp):
        order: list[Action] = []
        for action in _alternate(_forwards(pp, 1, m), _backwards(pp, 1, m), pp - 1 - rank):
            order.append(action)
            if action.kind == "B" and action.micro_batch >= rank:
                order.append(Action("W", 0, action.micro_batch - rank))
        ranks.append((*order, *(Action("W", 0, micro_batch) for micro_batch in range(max(m - rank, 0), m))))
    return PipelineSchedule("zero-bubble", tuple(ranks), 1, m)


@lru_cache(maxsize=64)
def build_schedule(name: str, pp: int, vpp: int, m: int) -> PipelineSchedule:
    """Build the schedule `name` (--pipeline-schedule). Raises ValueError with the name of the flag if the schedule is
    impossible."""
    if pp < 1:
        raise ValueError(f"--pipeline-model-parallel-size must be positive, not {pp}")
    if m < 1:
        raise ValueError(f"a pipeline needs at least one micro-batch per step, not {m}: raise --global-batch-size")
    if vpp > 1 and name != "interleaved":
        raise ValueError(
            f"--num-layers-per-virtual-pipeline-stage gives each rank {vpp} virtual stages, and "
            f"--pipeline-schedule {name} runs one: use --pipeline-schedule interleaved"
        )
    if vpp < 2 and name == "interleaved":
        raise ValueError(
            "--pipeline-schedule interleaved needs two or more virtual stages per rank: lower "
            "--num-layers-per-virtual-pipeline-stage, or use --pipeline-schedule 1f1b"
        )
    if name == "interleaved":
        return interleaved(pp, vpp, m)
    return one_forward_one_backward(pp, m) if name == "1f1b" else zero_bubble(pp, m)


def _forwards(pp: int, vpp: int, m: int) -> Iterator[Action]:
    """Yield the forward actions: each group of pp micro-batches passes one chunk after the other."""
    return (
        Action("F", chunk, micro_batch)
        for start in range(0, m, pp)
        for chunk in range(vpp)
        for micro_batch in range(start, min(start + pp, m))
    )


def _backwards(pp: int, vpp: int, m: int) -> Iterator[Action]:
    """Yield the backward actions in the order of `_forwards`, but from the last chunk to the first."""
    return (Action("B", vpp - 1 - action.model_chunk, action.micro_batch) for action in _forwards(pp, vpp, m))


def _alternate(forwards: Iterable[Action], backwards: Iterable[Action], ahead: int) -> tuple[Action, ...]:
    """Return `ahead` forwards, then forwards and backwards alternately, then the remaining backwards."""
    forwards, backwards = list(forwards), list(backwards)
    pairs = zip(forwards[ahead:], backwards, strict=False)
    return (*forwards[:ahead], *chain.from_iterable(pairs), *backwards[max(len(forwards) - ahead, 0) :])


def layers_of_virtual_stages(
    num_layers: int, pp: int, vpp: int = 1, first: int | None = None, last: int | None = None
) -> list[range]:
    """Return the layers of each of the pp·vpp virtual stages. Virtual stage c·pp + r is model chunk c of rank r.

    first, last: the number of layers of the first and the last rank, over all their chunks.

    Raises ValueError with the name of the flag if a virtual stage would have no layer, or if layers would remain.
    """
    if num_layers < pp * vpp:
        chunks = f" with {vpp} virtual stages each (--num-layers-per-virtual-pipeline-stage)" if vpp > 1 else ""
        raise ValueError(
            f"--pipeline-model-parallel-size {pp}{chunks} needs at least {pp * vpp} layers, one per stage, "
            f"and --num-layers is {num_layers}"
        )
    layers_of_rank: dict[int, int] = {}  # the ranks whose number of layers a flag sets
    flags = []
    for flag, rank, count in ((FIRST_LAYERS_FLAG, 0, first), (LAST_LAYERS_FLAG, pp - 1, last)):
        if count is None:
            continue
        if pp == 1:
            raise ValueError(f"{flag} needs --pipeline-model-parallel-size of at least 2")
        if count < vpp:
            raise ValueError(f"{flag} must be at least {vpp}, one layer per stage of this rank, not {count}")
        layers_of_rank[rank] = count
        flags.append(flag)
    other_ranks = [rank for rank in range(pp) if rank not in layers_of_rank]
    remaining = num_layers - sum(layers_of_rank.values())
    if remaining < len(other_ranks) * vpp or (remaining and not other_ranks):
        raise ValueError(
            f"{' and '.join(flags)} leave {remaining} of {num_layers} layers for the other "
            f"{len(other_ranks) * vpp} stages: "
            f"{'each of them needs one' if other_ranks else 'they must add up to --num-layers'}"
        )
    sizes = [0] * (pp * vpp)
    _distribute_evenly(sizes, [number for number in range(pp * vpp) if number % pp in other_ranks], remaining)
    for rank, count in layers_of_rank.items():
        _distribute_evenly(sizes, range(rank, pp * vpp, pp), count)
    return [range(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True)]


def num_model_chunks(num_layers: int, pp: int, layers_per_chunk: int) -> int:
    """Return the number of model chunks per rank, with at most `layers_per_chunk` layers each. Raises ValueError with
    the name of the flag."""
    if layers_per_chunk < 1:
        raise ValueError(f"--num-layers-per-virtual-pipeline-stage must be positive, not {layers_per_chunk}")
    return max(1, -(-num_layers // (pp * layers_per_chunk)))


def _distribute_evenly(sizes: list[int], virtual_stages: Sequence[int], layers: int) -> None:
    """Distribute `layers` over `virtual_stages` as evenly as possible, and write the numbers into `sizes`."""
    count = len(virtual_stages)
    for index, virtual_stage in enumerate(virtual_stages):
        # The second-to-last virtual stage has turn 0 and gets the first left-over layer. The last virtual stage has the
        # last turn.
        turn = (count - 2 - index) % count
        sizes[virtual_stage] = layers // count + (turn < layers % count)
