"""Search for the fastest layouts of a training on a described cluster.

All layouts are sorted by the formulas of `step_time.py`, and those that a quick estimate of the memory excludes are
left out. From the fastest on, `memory.py` decides which layouts fit, and `simulate.py` gives the time of a step.
"""

import dataclasses
import math
from typing import Any, NamedTuple

from megatron.gpt2.extensions.plan.cluster import Cluster
from megatron.gpt2.extensions.plan.fit import Candidate, layouts
from megatron.gpt2.extensions.plan.memory import MemoryInputs
from megatron.gpt2.extensions.plan.simulate import StepTime, simulate
from megatron.gpt2.extensions.plan.step_time import Layouts, Software, step_parts

# This entry describes this project for the formulas. It sums gradients in float32 with a reduce-scatter, and gathers
# parameters in 16 bits; together these are as many bytes as an all-reduce of 3 bytes.
THIS_PROGRAM = Software(kernels=20, traffic=1.0, loss_bytes=20.0, fused_attention=True, overlap=True, sum_bytes=3)
LARGEST_MICRO_BATCH = 16
ZERO_BUBBLE = 1 / 3  # This share of the bubble remains, if F, B and W take the same time.
TRIES = 4  # At most this number of layouts is tried for each one that is returned.
DAY = 86400.0


def quick_seconds(inputs: MemoryInputs, cluster: Cluster) -> float:
    """Return the time of a step, computed with the formulas."""
    config, parallel, m = inputs.config, inputs.config.parallel, inputs.num_microbatches
    software = dataclasses.replace(
        THIS_PROGRAM,
        recompute=config.train.recompute_granularity,
        sequence_parallel=parallel.sequence_parallel,
        sharded_optimizer=parallel.use_distributed_optimizer,
    )
    layout = Layouts(
        global_batch=m * config.train.micro_batch_size * inputs.data_parallel_size,
        micro_batch=config.train.micro_batch_size,
        hidden_size=config.model.hidden_size,
        attention_heads=config.model.num_attention_heads,
        layers=config.model.num_layers,
        sequence_length=config.data.seq_length,
        tensor_parallel=parallel.tensor_model_parallel_size,
        data_parallel=inputs.data_parallel_size,
        pipeline_parallel=inputs.stages,
        num_model_chunks=config.num_model_chunks,
    )
    parts = step_parts(cluster, software, layout)
    if parallel.pipeline_schedule == "zero-bubble":
        parts["bubble"] *= ZERO_BUBBLE
    elif config.num_model_chunks > 1:  # Chunks wait for whole groups of micro-batches.
        parts["bubble"] += -m % inputs.stages / m * (parts["layers"] + parts["tensor_parallel"])
    if parallel.shard_gradients:
        parts["data_parallel"] *= m
    return float(sum(parts.values()))


def search(inputs: MemoryInputs, cluster: Cluster, budget: int, count: int) -> list[tuple[Candidate, StepTime]]:
    """Return up to `count` layouts that need at most `budget` bytes, with their steps, the fastest first. Layouts that
    differ only in recomputation, sharding and --sequence-parallel count as one. Raises ValueError if the global batch
    cannot be shared.

    inputs: those of the layout that the flags name, with a global batch size.
    """
    candidates = [x for x in layouts(inputs, batch=LARGEST_MICRO_BATCH, offload=False) if x.least <= budget]
    if not candidates:
        raise ValueError(
            f"no layout on {inputs.world_size} ranks fits: use more ranks (--ranks), or a --global-batch-size that they"
            " can share"
        )
    best_by_layout: dict[tuple[Any, ...], tuple[Candidate, StepTime]] = {}
    tries = 0
    for candidate in sorted(candidates, key=lambda each: quick_seconds(each.inputs, cluster)):
        new_inputs = candidate.inputs
        tp, schedule = (
            new_inputs.config.parallel.tensor_model_parallel_size,
            new_inputs.config.parallel.pipeline_schedule,
        )
        key = (
            tp,
            new_inputs.stages,
            new_inputs.config.num_model_chunks,
            schedule,
            new_inputs.config.train.micro_batch_size,
        )
        if key in best_by_layout:
            continue
        if len(best_by_layout) == count or tries == TRIES * count:
            break
        tries += 1
        if candidate.fits(budget):
            best_by_layout[key] = candidate, simulate(new_inputs, cluster)
    return sorted(best_by_layout.values(), key=lambda each: each[1].seconds)


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
