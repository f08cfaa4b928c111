"""Find the layouts of a run that fit into a given memory, the fastest first.

The layouts differ in micro-batch, recomputation, model parallelism, pipelines, sharding and offloading, and give the
same losses. `quick_seconds`, which needs no trace, sorts the layouts. Then `memory.py` decides which layouts fit.
`cheapest_offers` proposes changes to a run that is out of memory. `search` compares layouts on a described cluster, and
`simulate.py` gives the time of their steps.
"""

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron.gpt2.config import Config, flag_name
from megatron.gpt2.extensions.plan.cluster import Cluster
from megatron.gpt2.extensions.plan.memory import (
    MemoryEstimate,
    MemoryInputs,
    estimate_memory,
    in_mb,
    low_bytes,
    with_batch_size,
)
from megatron.gpt2.extensions.plan.simulate import StepTime, simulate
from megatron.gpt2.pipeline.analysis import timetable
from megatron.gpt2.pipeline.p2p_schedule import ActionCosts

RECOMPUTES = ("none", "selective", "full")
MODEL_PARALLEL = (1, 2, 4, 8)  # the tensor-parallel sizes that `layouts` yields
LARGEST_MICRO_BATCH = 16
TRIES = 4  # `search` traces at most 4 layouts for each layout that it returns.
DAY = 86400.0
# `quick_seconds` uses the following constants.
# Hidden states that the element-wise kernels of a layer read and write: REPLICATED on each tensor-parallel rank, SPLIT
# divided over the ranks.
REPLICATED, SPLIT = 30, 32
KERNELS = 60  # kernels of a layer, forward and backward
GRADIENT_BYTES = 8  # bytes per parameter that a micro-batch reads and writes to sum its gradients
SUM_BYTES = 3  # An all-reduce of 3 bytes is as long as a reduce-scatter of float32 and an all-gather of 16 bits.
# --recompute-granularity selective, --partition-activations and --checkpoint-in-cpu lengthen a step by these shares.
SELECTIVE, PARTITIONED, OFFLOADED = 0.02, 0.01, 0.01
ZERO_BUBBLE = 1 / 3  # the share of the bubble that remains if F, B and W take equal times.
PCIE, HOST_MEMORY = 25e9, 50e9  # bytes per second
# The machines that `cheapest_offers` assumes, in round numbers: an H100, and a CPU with a few cores.
GPU = Cluster(
    gpus_per_node=8,
    memory=80e9,
    peak_flops=990e12,
    matmul_flops=700e12,
    half_m=120,
    half_n=90,
    half_k=75,
    memory_bandwidth=2e12,
    kernel=6e-6,
    launch=14e-6,
    launch_growth=0.07,
    hop=35e-6,
    link=400e9,
    data_link=400e9,
    network=20e9,
    network_hop=15e-6,
    send=40e9,
    send_latency=60e-6,
    network_send=40e9,
    step=1e-3,
    adam=1.2e-11,
)
CPU = dataclasses.replace(
    GPU,
    matmul_flops=1e11,
    half_m=12,
    half_n=12,
    half_k=12,
    memory_bandwidth=27e9,
    launch=1e-6,
    hop=4e-4,
    link=1.3e9,
    data_link=1.3e9,
    network=1.3e9,
    send=1.3e9,
    network_send=1.3e9,
    adam=1e-9,
)


def quick_seconds(inputs: MemoryInputs, cluster: Cluster) -> float:
    """Return the rough seconds of a step.

    The time of a layer is the time of its matrix products, of moving the bytes of its other kernels, and of its
    all-reduces. If the host needs longer to launch the kernels, this longer time counts. All stages wait for the stage
    that also computes the head.
    """
    config, model, parallel, train = inputs.config, inputs.config.model, inputs.config.parallel, inputs.config.train
    assert model.vocab_size is not None
    tp, p, chunks = parallel.tensor_model_parallel_size, inputs.stages, config.num_model_chunks
    dp, m, on_gpu = inputs.data_parallel_size, inputs.num_microbatches, inputs.device == "cuda"
    h, vocab = model.hidden_size, model.vocab_size
    layers, tokens = model.num_layers / p, train.micro_batch_size * config.data.seq_length
    flops, head_flops = tokens * model.flops_per_token(config.data.seq_length), 6 * h * vocab * tokens
    hidden = inputs.dtype.itemsize * tokens * h  # bytes of a hidden state between two layers
    shared = tp if parallel.sequence_parallel else 1
    rate = cluster.matmul_flops / math.prod(
        1 + half / size for half, size in ((cluster.half_m, tokens), (cluster.half_n, h / tp), (cluster.half_k, h / tp))
    )
    kernels = KERNELS * layers
    products = (flops - head_flops) / tp / p / rate
    moved = layers * hidden * (REPLICATED / shared + SPLIT / tp)
    reduced = layers * float(cluster.all_reduce(hidden, tp, link=cluster.link))  # one all-reduce in each layer
    again = {"none": 0.0, "selective": SELECTIVE * products, "full": products / 3 + 2 * reduced}
    parameters = (12 * layers * h + vocab) * h / tp
    moved += GRADIENT_BYTES * parameters
    stage = max(products + cluster.move(moved) + 4 * reduced + kernels * cluster.kernel, cluster.host(kernels, tp))
    stage += again[train.recompute_granularity]
    owned = parameters / (dp if parallel.use_distributed_optimizer else 1)
    send = float(cluster.point_to_point(hidden / shared, inputs.world_size > cluster.gpus_per_node)) if p > 1 else 0.0
    idle = (p - 1) * stage / chunks
    if parallel.pipeline_schedule == "zero-bubble":
        idle *= ZERO_BUBBLE
    elif chunks > 1:  # The interleaved schedule needs whole groups of p micro-batches.
        idle += -m % p * stage
    data_seconds = float(cluster.all_reduce(SUM_BYTES * parameters, dp, tp, link=cluster.data_link)) if dp > 1 else 0.0
    # The reduction of gradients overlaps with the backward pass of the last micro-batch.
    data_seconds = (
        data_seconds * m if parallel.shard_gradients else max(data_seconds - stage * 2 / 3, data_seconds / m / 10)
    )
    step = m * (stage + head_flops / tp / rate) + idle + 2 * send * (m * chunks + p - 1) + data_seconds + cluster.step
    step += cluster.adam * owned
    if parallel.partition_activations:
        step *= 1 + PARTITIONED
    if parallel.cpu_offload_optimizer and on_gpu:
        # A parameter sends 4 bytes to the host and 2 back over PCIe; AdamW reads 16 and writes 12 bytes in host memory.
        step += owned * (6 / PCIE + 28 / HOST_MEMORY)
    if parallel.checkpoint_in_cpu and on_gpu:
        saved = 2 * m * layers / train.recompute_num_layers * hidden / shared
        saved /= tp if parallel.partition_activations else 1
        step = max(step * (1 + OFFLOADED), saved / PCIE)
    return float(step)


@dataclass(frozen=True)
class Candidate:
    """A layout with its memory and the time of a step."""

    inputs: MemoryInputs
    flags: tuple[str, ...]  # the flags that change the command line to this layout
    least: float  # the result of `low_bytes`

    @functools.cached_property
    def cost(self) -> float:
        """The rough seconds of a step on a typical machine."""
        return typical_seconds(self.inputs)

    @functools.cached_property
    def memory(self) -> MemoryEstimate:
        """The memory estimate of the rank that needs the most memory."""
        return estimate_memory(self.inputs)

    def fits(self, budget: float) -> bool:
        """Return whether the layout needs at most `budget` bytes. The first stage often needs the most memory, so
        `fits` estimates this stage first."""
        return estimate_memory(self.inputs, 0).total <= budget and self.memory.total <= budget


class Offer(NamedTuple):
    """A proposed layout: the flags to add, the bytes of a rank, and the extra time of a step compared with the layout
    of the user's flags (0.29: 29 %)."""

    flags: str
    bytes: int
    slower: float

    def __str__(self) -> str:
        return f"{self.flags or 'the flags as they are'} ({in_mb(self.bytes)} MB, {max(self.slower, 0.0):.0%} slower)"


def typical_seconds(inputs: MemoryInputs) -> float:
    """Return the rough seconds of a step on a typical GPU or CPU."""
    return quick_seconds(inputs, GPU if inputs.device == "cuda" else CPU)


def bubble(config: Config, num_microbatches: int) -> float:
    """Return the fraction of time in which the ranks wait, if F, B and W of each layer take the same time."""
    costs = [ActionCosts(*[len(layers)] * 3) for layers in config.layers_of_virtual_stages()]
    return timetable(config.pipeline_schedule(num_microbatches), costs).bubble


def layouts(inputs: MemoryInputs, *, batch: int | None = None, offload: bool = True) -> Iterator[Candidate]:
    """Yield all layouts of the run that keep the number of ranks and the global batch, and that split a model over at
    least as many ranks.

    batch: the largest micro-batch size (default: that of `inputs`).
    offload: yield also layouts that use memory of the host.
    """
    requested = inputs.config
    largest = batch or requested.train.micro_batch_size
    global_batch_size = (
        requested.train.global_batch_size or largest * inputs.data_parallel_size * inputs.num_microbatches
    )
    sizes = [largest >> halved for halved in range(largest.bit_length()) if largest % (1 << halved) == 0]
    recomputes = RECOMPUTES[RECOMPUTES.index(requested.train.recompute_granularity) :]
    for split, b, recompute in itertools.product(_model_splits(inputs), sizes, recomputes):
        tp, pp = split["tensor_model_parallel_size"], split["pipeline_model_parallel_size"]
        dp = inputs.world_size // (tp * pp)
        if global_batch_size % (b * dp):
            continue
        if "pipeline_schedule" in split and global_batch_size < b * dp * pp:
            continue  # The zero-bubble schedule needs a micro-batch for each stage.
        on_gpu, full = offload and inputs.device == "cuda", recompute == "full"
        useful = {
            "sequence_parallel": tp > 1,
            "use_distributed_optimizer": dp > 1,
            "shard_gradients": dp > 1,
            "cpu_offload_optimizer": on_gpu,
            "partition_activations": full and requested.data.seq_length % tp > 0,
            "checkpoint_in_cpu": on_gpu and full,
        }
        choices = [
            (True,) if getattr(requested.parallel, name) else (False, True) if is_useful else (False,)
            for name, is_useful in useful.items()
        ]
        for choice in itertools.product(*choices):
            parallel: dict[str, Any] = {**split, **dict(zip(useful, choice, strict=True))}
            train: dict[str, Any] = {
                "micro_batch_size": b,
                "global_batch_size": global_batch_size,
                "recompute_granularity": recompute,
            }
            try:
                new_inputs = dataclasses.replace(
                    inputs,
                    config=dataclasses.replace(
                        requested,
                        train=dataclasses.replace(requested.train, gradient_accumulation_steps=None, **train),
                        parallel=dataclasses.replace(requested.parallel, **parallel),
                    ),
                )
                least_bytes = low_bytes(new_inputs)
            except ValueError:  # The layout's flags exclude each other, or its sizes do not divide each other.
                continue
            if b == requested.train.micro_batch_size and dp == inputs.data_parallel_size:
                del train["global_batch_size"]  # The run has the same global batch size without the flag.
            flags = (
                *changed_flags("parallel", requested.parallel, parallel),
                *changed_flags("train", requested.train, train),
            )
            yield Candidate(new_inputs, flags, least_bytes)


def _model_splits(inputs: MemoryInputs) -> Iterator[dict[str, Any]]:
    """Yield the ways to split a model over ranks: tensor-parallel sizes, stages, and pipeline schedules."""
    requested, model = inputs.config.parallel, inputs.config.model
    tp, pp = requested.tensor_model_parallel_size, requested.pipeline_model_parallel_size
    divisors = {n for n in range(1, inputs.world_size + 1) if inputs.world_size % n == 0}
    own_schedule = requested.pipeline_schedule or inputs.config.num_model_chunks > 1
    for tensor, pipeline in itertools.product(sorted({tp, *divisors & set(MODEL_PARALLEL)}), sorted({pp, *divisors})):
        split = tensor * pipeline
        if split < tp * pp or inputs.world_size % split or model.num_attention_heads % tensor:
            continue
        sizes = {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline}
        if not (own_schedule and pipeline == 1 < pp):
            yield sizes
        if own_schedule or pipeline == 1:
            continue
        yield {**sizes, "pipeline_schedule": "zero-bubble"}
        for chunks in (4, 3, 2):
            if model.num_layers % (pipeline * chunks) == 0:
                yield {**sizes, "num_layers_per_virtual_pipeline_stage": model.num_layers // (pipeline * chunks)}


def cheapest_offers(inputs: MemoryInputs, budget: int) -> list[Offer]:
    """Return up to three layouts that need at most `budget` bytes, the cheapest first.

    If possible, the layouts use different techniques, and otherwise different values of one technique. A layout is left
    out if its flags contain all flags of a cheaper one."""

    order = [candidate for candidate in layouts(inputs) if candidate.least <= budget]
    order.sort(key=lambda c: (c.cost, len(c.flags), c.least))
    found: list[Candidate] = []
    # With `end` 1, layouts are new if the names of their flags are. With `end` None, the values of flags count, too.
    for end in (1, None):

        def names(candidate: Candidate, end: int | None = end) -> set[tuple[str, ...]]:
            return {tuple(flag.split()[:end]) for flag in candidate.flags}

        for candidate in order:
            is_new = not any(names(other) <= names(candidate) for other in found)
            # `fits` traces a step, so `fits` is called last.
            if len(found) < 3 and is_new and candidate.fits(budget):
                found.append(candidate)
    found.sort(key=lambda c: (c.cost, len(c.flags), c.memory.total))
    return [_offer(inputs, candidate) for candidate in found]


def smallest_offer(inputs: MemoryInputs) -> Offer:
    """Return the layout that needs the least memory. If several layouts need equally little, return the one with the
    most flags."""

    def size(candidate: Candidate) -> tuple[float, int, int]:
        return candidate.least, -len(candidate.flags), candidate.inputs.config.train.micro_batch_size

    return _offer(inputs, min(layouts(inputs), key=size))


def _offer(inputs: MemoryInputs, candidate: Candidate) -> Offer:
    slower = candidate.cost / typical_seconds(inputs) - 1
    return Offer(" ".join(candidate.flags), candidate.memory.total, round(slower, 4))


def largest_micro_batch(inputs: MemoryInputs, budget: int) -> int:
    """Return the largest --micro-batch-size that needs at most `budget` bytes, without gradient accumulation and with
    all other flags unchanged; 0 if not even one sample fits."""

    def fits(b: int) -> bool:
        config = with_batch_size(inputs.config, b * inputs.data_parallel_size)
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, micro_batch_size=b))
        made = dataclasses.replace(inputs, config=config)
        return low_bytes(made) <= budget and estimate_memory(made).total <= budget

    high = 1
    while fits(high):
        high *= 2
    return bisect.bisect_left(range(high // 2 + 1, high), True, key=lambda b: not fits(b)) + high // 2


def changed_flags(section: str, asked: object, values: dict[str, Any]) -> Iterator[str]:
    """Yield the flags that set the `values` that differ from the fields of `asked`."""
    for name, value in values.items():
        if value != getattr(asked, name):
            yield flag_name(f"{section}.{name}") + ("" if value is True else f" {value}")


def search(inputs: MemoryInputs, cluster: Cluster, budget: int, count: int) -> list[tuple[Candidate, StepTime]]:
    """Return up to `count` layouts that need at most `budget` bytes, with the times of their steps, the fastest first.
    Layouts that differ only in recomputation, sharding and --sequence-parallel count as one. Raises ValueError if the
    global batch cannot be shared.

    inputs: the inputs of the layout that the flags name, with a global batch size.
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
        new_inputs, config, parallel = candidate.inputs, candidate.inputs.config, candidate.inputs.config.parallel
        sizes = parallel.tensor_model_parallel_size, new_inputs.stages, config.num_model_chunks
        key = *sizes, parallel.pipeline_schedule, config.train.micro_batch_size
        if key in best_by_layout:
            continue
        if len(best_by_layout) == count or tries == TRIES * count:
            break
        tries += 1
        if candidate.fits(budget):
            best_by_layout[key] = candidate, simulate(new_inputs, cluster)
    return sorted(best_by_layout.values(), key=lambda each: each[1].seconds)


class Cost(NamedTuple):
    """The result of `training_cost`.

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
    """Return the days and GPU hours of a training in which machines fail.

    tokens: number of training tokens.
    failures: number of failures per node and day.
    checkpoint: seconds that a checkpoint stops training.
    restart: seconds from a failure to the first new step.

    The interval is Young's √(2·C·M), with the mean time M between failures. After a failure, half of an interval is
    repeated."""
    mean = DAY / (failures * nodes)
    interval = math.sqrt(2 * checkpoint * mean)
    lost = checkpoint / interval + (interval / 2 + restart) / mean
    days = tokens / tokens_per_second / DAY * (1 + lost)
    return Cost(days, 24 * days * gpus, interval, lost / (1 + lost))
