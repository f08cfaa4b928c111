"""Search for the fastest layouts of a training on a described cluster.

All layouts are sorted by the formulas of `step_time.py`, and those that a quick estimate of the memory excludes are
left out. From the fastest on, `memory.py` decides which layouts fit, and `simulate.py` gives the time of a step.
"""

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from megatron.gpt2.config import Config
from megatron.gpt2.extensions.plan.cluster import Cluster
from megatron.gpt2.extensions.plan.fit import RECOMPUTES, changed_flags
from megatron.gpt2.extensions.plan.memory import MemoryEstimate, MemoryInputs, estimate_memory
from megatron.gpt2.extensions.plan.simulate import StepTime, simulate
from megatron.gpt2.extensions.plan.step_time import Layouts, Software, step_parts

# This entry describes this project for the formulas. It sums gradients in float32 with a reduce-scatter, and gathers
# parameters in 16 bits; together these are as many bytes as an all-reduce of 3 bytes.
PROGRAM = Software(kernels=20, traffic=1.0, loss_bytes=20.0, fused_attention=True, overlap=True, sum_bytes=3)
MICRO_BATCHES, CHUNKS = (1, 2, 4, 8, 16), (1, 2, 3, 4)
ZERO_BUBBLE = 1 / 3  # This share of the bubble remains, if F, B and W take the same time.
TRIES = 4  # At most this number of memory estimates is made for each layout that is returned.
DAY = 86400.0


class Layout(NamedTuple):
    """How a training is distributed.

    chunks: virtual stages of a rank.
    sharding: 0 for none, 1 for the optimizer, 2 for gradients, too.
    """

    tensor: int
    pipeline: int
    chunks: int
    zero_bubble: bool
    data: int
    micro_batch: int
    recompute: str
    sequence_parallel: bool
    sharding: int


@dataclass(frozen=True)
class Found:
    """A layout that fits.

    flags: the flags to add to the command line.
    """

    layout: Layout
    flags: tuple[str, ...]
    inputs: MemoryInputs
    memory: MemoryEstimate
    step: StepTime


def layouts(config: Config, ranks: int) -> Iterator[Layout]:
    """Yield all layouts of a training on `ranks` ranks. Tensor-parallel groups have at most 8 ranks."""
    model, batch = config.model, config.train.global_batch_size
    assert batch is not None
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    for t, p in itertools.product([1, 2, 4, 8], divisors):
        if ranks % (t * p) or model.num_attention_heads % t or model.ffn_size % t or model.num_layers % p:
            continue
        d = ranks // (t * p)
        pipelines = [(v, False) for v in CHUNKS if v == 1 or (p > 1 and (model.num_layers // p) % v == 0)]
        for (v, zero), b, recompute, sequence, sharding in itertools.product(
            [*pipelines, *[(1, True)] * (p > 1)], MICRO_BATCHES, RECOMPUTES, (True, False), (1, 0, 2)
        ):
            is_useful = (t > 1 or not sequence) and (d > 1 or not sharding) and (p == 1 or sharding < 2)
            is_useful = is_useful and (not zero or batch >= b * d * p)
            if batch % (b * d) == 0 and is_useful and not (config.data.seq_length % t and sequence):
                yield Layout(t, p, v, zero, d, b, recompute, sequence, sharding)


def quick_seconds(config: Config, cluster: Cluster, candidates: Sequence[Layout]) -> np.ndarray:
    """Return the time of a step of each layout, computed with the formulas."""
    seconds = np.zeros(len(candidates))
    for (recompute, sequence, sharding), chosen in _grouped(candidates, lambda x: x[-3:]).items():
        of = [candidates[number] for number in chosen]
        columns = {name: np.array([getattr(x, name) for x in of]) for name in Layout._fields}
        software = dataclasses.replace(
            PROGRAM, recompute=recompute, sequence_parallel=sequence, sharded_optimizer=sharding > 0
        )
        model, batch = config.model, config.train.global_batch_size
        parts = step_parts(
            cluster,
            software,
            Layouts(
                global_batch=batch,
                micro_batch=columns["micro_batch"],
                hidden_size=model.hidden_size,
                attention_heads=model.num_attention_heads,
                layers=model.num_layers,
                sequence_length=config.data.seq_length,
                tensor_parallel=columns["tensor"],
                data_parallel=columns["data"],
                pipeline_parallel=columns["pipeline"],
                virtual_stages=columns["chunks"],
            ),
        )
        parts["bubble"] = parts["bubble"] * np.where(columns["zero_bubble"], ZERO_BUBBLE, 1)
        micro_batches = batch // columns["data"] // columns["micro_batch"]
        # Interleaved chunks wait for whole groups of micro-batches.
        missing = -micro_batches % columns["pipeline"] / micro_batches
        parts["bubble"] += np.where(columns["chunks"] > 1, missing * (parts["layers"] + parts["tensor_parallel"]), 0)
        if sharding == 2:
            parts["data_parallel"] = parts["data_parallel"] * micro_batches
        seconds[chosen] = np.sum(list(parts.values()), axis=0)
    return seconds


def _grouped(items: Sequence[Any], key: Callable[[Any], Any]) -> dict[Any, list[int]]:
    groups = defaultdict[Any, list[int]](list)
    for number, item in enumerate(items):
        groups[key(item)].append(number)
    return groups


def quick_bytes(config: Config, x: Layout) -> float:
    """Return a low estimate of the memory of the first stage: the table in docs/explanation/memory.md."""
    model, tokens = config.model, x.micro_batch * config.data.seq_length
    assert model.vocab_size is not None
    h, layers = model.hidden_size, model.num_layers / x.pipeline
    parameters = (layers * (4 * h + 2 * model.ffn_size) + model.vocab_size) * h / x.tensor
    split = x.tensor if x.sequence_parallel else 1
    whole, divided = {"none": (8, 24), "selective": (4, 16), "full": (2, 0)}[x.recompute]  # bytes per token and h
    in_flight = min(x.pipeline + (x.pipeline - 1) * (x.chunks > 1) / x.chunks, config_micro_batches(config, x))
    activations = tokens * h * layers * in_flight * (whole / split + divided / x.tensor)
    state = 2 + 4 / (x.data if x.sharding == 2 else 1) + 12 / (x.data if x.sharding else 1)
    return state * parameters + activations


def config_micro_batches(config: Config, x: Layout) -> int:
    """Return the number of micro-batches of a step."""
    assert config.train.global_batch_size is not None
    return config.train.global_batch_size // (x.data * x.micro_batch)


def changes(config: Config, x: Layout) -> dict[str, dict[str, Any]]:
    """Return the values of the configuration that make this layout, by section."""
    of_chunk = config.model.num_layers // (x.pipeline * x.chunks) if x.chunks > 1 else None
    return {
        "parallel": {
            "tensor_model_parallel_size": x.tensor,
            "pipeline_model_parallel_size": x.pipeline,
            "num_layers_per_virtual_pipeline_stage": of_chunk,
            "pipeline_schedule": "zero-bubble" if x.zero_bubble else None,
            "sequence_parallel": x.sequence_parallel,
            "use_distributed_optimizer": x.sharding > 0,
            "shard_gradients": x.sharding == 2,
        },
        "train": {"micro_batch_size": x.micro_batch, "recompute_granularity": x.recompute},
    }


def search(
    inputs_of: Callable[[Config], MemoryInputs], config: Config, ranks: int, cluster: Cluster, budget: int, count: int
) -> list[Found]:
    """Return up to `count` layouts that need at most `budget` bytes, the fastest first. Raises ValueError if the global
    batch cannot be shared.

    inputs_of: makes the inputs of an estimate from a configuration. Layouts that differ only in recomputation, sharding
        and --sequence-parallel count as one.
    """
    candidates = [x for x in layouts(config, ranks) if quick_bytes(config, x) <= budget]
    if not candidates:
        raise ValueError(
            f"no layout on {ranks} ranks fits: use more ranks (--ranks), or a --global-batch-size that they can share"
        )
    order = np.argsort(quick_seconds(config, cluster, candidates), kind="stable")
    found: dict[tuple[Any, ...], Found] = {}
    tries = 0
    for x in (candidates[number] for number in order):
        key = x[:-3]
        if key in found:
            continue
        if len(found) == count or tries == TRIES * count:
            break
        tries += 1
        values = changes(config, x)
        made = dataclasses.replace(
            config,
            parallel=dataclasses.replace(config.parallel, **values["parallel"]),
            train=dataclasses.replace(config.train, gradient_accumulation_steps=None, **values["train"]),
        )
        inputs = inputs_of(made)
        memory = estimate_memory(inputs, 0)
        if memory.total <= budget:
            memory = max(memory, estimate_memory(inputs, x.pipeline - 1), key=lambda estimate: estimate.total)
        if memory.total > budget:
            continue
        flags = [changed_flags(section, getattr(config, section), values[section]) for section in values]
        found[key] = Found(x, tuple(itertools.chain(*flags)), inputs, memory, simulate(inputs, cluster))
    return sorted(found.values(), key=lambda each: each.step.seconds)


class Cost(NamedTuple):
    """The cost of a training in which machines fail.

    interval: seconds between checkpoints.
    lost: the share of the time that checkpoints, repeated steps and restarts take.
    """

    days: float
    gpu_hours: float
    interval: float
    lost: float


def training_cost(
    tokens: float, tokens_per_second: float, gpus: int, nodes: int, failures: float, checkpoint: float, restart: float
) -> Cost:
    """Return the cost of a training.

    failures: number of failures of a node per day.
    checkpoint: seconds that a checkpoint stops training.
    restart: seconds from a failure to the first new step.

    The interval is Young's √(2·C·M), with the mean time M between failures. After a failure, half of an interval is
    repeated."""
    mean = DAY / (failures * nodes)
    interval = math.sqrt(2 * checkpoint * mean)
    lost = checkpoint / interval + (interval / 2 + restart) / mean
    days = tokens / tokens_per_second / DAY * (1 + lost)
    return Cost(days, 24 * days * gpus, interval, lost / (1 + lost))
