"""Which layers each stage of a pipeline holds.

Layers are dealt out as evenly as they can be. Where the stages divide their number, all get the same, as in Megatron.
Where not, some stages get one more than the others: from the last stage but one to the first. The last stage comes
last of all, since it has the head too. The first has the embedding, and it keeps the most micro-batches.
"""

from collections.abc import Sequence

FIRST, LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"


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
