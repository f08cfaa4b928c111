"""Find the layouts of a run that fit into a given memory, the cheapest first.

The layouts differ in micro-batch, recomputation, model parallelism, pipelines, sharding and offloading. All compute the
same training. They are sorted by their cost, an estimate of how much longer a step takes, which needs no description of
a cluster:

    recompute full       a second forward pass of the layers, from the model's FLOPs: 29 % at 345M
    recompute selective  2 %: -4 to 6 measured on CPUs (docs/explanation/performance.md)
    model parallel       1/0.95, 1/0.82 and 1/0.77 at 2, 4 and 8 ranks (arXiv:1909.08053, figure 5); beyond 8, 2 times
    pipeline             its bubble, and its messages at 100 GB/s
    half the micro-batch 3 %: smaller matrix products, and one more pass over the gradients
    distributed optimizer: nothing; it sends as many bytes as the all-reduce that it replaces
    sequence parallel    nothing, although a layer sends a quarter more bytes: norms and dropout are divided
    optimizer on the host: its bytes over PCIe and through host memory, relative to a step at 40 % of 989 TFLOP/s
    sharded gradients    one more reduction for each further micro-batch at 100 GB/s; half of it overlaps with backward
    partitioned inputs   1 %: an all-gather in backward; only useful if the sequence cannot be split
    inputs on the host   1 %, and the time by which their bytes over PCIe exceed the step
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
from megatron.gpt2.extensions.plan.memory import (
    MemoryEstimate,
    MemoryInputs,
    estimate_memory,
    in_mb,
    low_bytes,
    with_batch_size,
)
from megatron.gpt2.pipeline.analysis import timetable
from megatron.gpt2.pipeline.p2p_schedule import ActionCosts
from megatron.gpt2.pipeline.schedule import build_schedule

_SELECTIVE, _HALF_BATCH, _PARTITIONED, _OFFLOADED = 0.02, 0.03, 0.01, 0.01
_MODEL_PARALLEL = {1: 0.0, 2: 1 / 0.95 - 1, 4: 1 / 0.82 - 1, 8: 1 / 0.77 - 1}
RECOMPUTES = ("none", "selective", "full")
# The first three are bytes per second, the last one FLOP/s.
_PCIE, _HOST_MEMORY, _BETWEEN_GPUS, _FLOPS = 25e9, 50e9, 100e9, 0.4 * 989e12


@dataclass(frozen=True)
class Candidate:
    """A layout with its memory and its cost."""

    inputs: MemoryInputs
    batch: int  # the micro-batch size without extra cost
    flags: tuple[str, ...]  # These flags are added to the command line.
    least: float  # a low estimate of its memory, in bytes

    @functools.cached_property
    def cost(self) -> float:
        """See `cost`."""
        return cost(self.inputs, self.batch)

    @functools.cached_property
    def memory(self) -> MemoryEstimate:
        """The estimate of the rank that needs the most memory."""
        return estimate_memory(self.inputs)

    def fits(self, budget: float) -> bool:
        """Whether it needs at most `budget` bytes. The first stage often decides."""
        return estimate_memory(self.inputs, 0).total <= budget and self.memory.total <= budget


class Offer(NamedTuple):
    """A layout: the flags to add, the bytes of a rank, and the extra time of a step, compared with the asked layout
    (0.29: 29 %)."""

    flags: str
    bytes: int
    slower: float

    def __str__(self) -> str:
        return f"{self.flags or 'the flags as they are'} ({in_mb(self.bytes)} MB, {max(self.slower, 0.0):.0%} slower)"


def cost(inputs: MemoryInputs, batch: int) -> float:
    """Return the extra time of a step, compared with none of the techniques above (0.29: 29 %).

    batch: the micro-batch size without extra cost.
    """
    config, model, parallel, train = inputs.config, inputs.config.model, inputs.config.parallel, inputs.config.train
    assert model.vocab_size is not None
    tp, m, on_gpu = parallel.tensor_model_parallel_size, inputs.num_microbatches, inputs.device == "cuda"
    tokens, flops = train.micro_batch_size * config.data.seq_length, model.flops_per_token(config.data.seq_length)
    step = m * tokens * flops / (tp * inputs.stages) / _FLOPS  # seconds
    parameters = flops / 6 / (tp * inputs.stages)  # of a rank: each takes 6 FLOPs for a token
    # the bytes of a hidden state on a rank between two layers
    hidden = inputs.dtype.itemsize * tokens * model.hidden_size / (tp if parallel.sequence_parallel else 1)
    of_layers = 1 - 6 * model.hidden_size * model.vocab_size / flops
    extra = {"none": 0.0, "selective": _SELECTIVE, "full": of_layers / 3}[train.recompute_granularity]
    extra += _HALF_BATCH * math.log2(batch / train.micro_batch_size) + _MODEL_PARALLEL.get(tp, 1.0)
    if parallel.cpu_offload_optimizer and on_gpu:
        owned = parameters / (inputs.data_parallel_size if parallel.use_distributed_optimizer else 1)
        # An offloaded parameter sends 4 bytes to the host and 2 back over PCIe; AdamW reads 16 and writes 12 bytes in
        # host memory.
        extra += owned * (6 / _PCIE + 28 / _HOST_MEMORY) / step
    if parallel.shard_gradients:
        extra += (m - 1) * 4 * parameters / _BETWEEN_GPUS / 2 / step
    if parallel.partition_activations:
        extra += _PARTITIONED
    if parallel.checkpoint_in_cpu and on_gpu:
        saved = model.num_layers / inputs.stages / train.recompute_num_layers * hidden
        moved = 2 * m * saved / (tp if parallel.partition_activations else 1)
        extra += _OFFLOADED + max(0.0, moved / _PCIE / step - 1)
    if inputs.stages > 1:  # Each chunk sends hidden states forward and gradients back.
        extra += m * config.num_model_chunks * 2 * hidden / _BETWEEN_GPUS / step
        extra = (1 + extra) / (1 - bubble(config, m)) - 1
    return extra


def bubble(config: Config, num_microbatches: int) -> float:
    """Return the fraction of time in which the ranks wait, if F, B and W of each layer take the same time."""
    schedule, layers = config.pipeline_schedule(1), tuple(len(layers) for layers in config.layers_of_virtual_stages())
    return _bubble(schedule.name, schedule.num_ranks, schedule.num_model_chunks, num_microbatches, layers)


@functools.lru_cache(maxsize=256)
def _bubble(name: str, p: int, v: int, m: int, layers: tuple[int, ...]) -> float:
    of_layer = p / sum(layers)  # A rank with the mean number of layers takes 1 for each of F, B and W.
    costs = [ActionCosts(*[number * of_layer] * 3) for number in layers]
    fewer = m if m <= 3 * p else 2 * p + m % p  # The schedule repeats after this number.
    slowest = 3 * of_layer * max(sum(layers[rank::p]) for rank in range(p))
    length = timetable(build_schedule(name, p, v, fewer), costs).length + (m - fewer) * slowest
    return 1 - 3 * m / length


def layouts(inputs: MemoryInputs, *, batch: int | None = None, offload: bool = True) -> Iterator[Candidate]:
    """Yield all layouts of the run with the same number of ranks and the same global batch, and with at least as many
    ranks per model.

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
            except ValueError:  # The flags exclude each other, or the sizes of this layout do not divide each other.
                continue
            if b == requested.train.micro_batch_size and dp == inputs.data_parallel_size:
                del train["global_batch_size"]  # The flag would not change it.
            flags = (
                *changed_flags("parallel", requested.parallel, parallel),
                *changed_flags("train", requested.train, train),
            )
            yield Candidate(new_inputs, largest, flags, least_bytes)


def _model_splits(inputs: MemoryInputs) -> Iterator[dict[str, Any]]:
    """Yield the ways to split a model over ranks: tensor-parallel sizes, stages, and pipeline schedules."""
    requested, model = inputs.config.parallel, inputs.config.model
    tp, pp = requested.tensor_model_parallel_size, requested.pipeline_model_parallel_size
    divisors = {n for n in range(1, inputs.world_size + 1) if inputs.world_size % n == 0}
    own_schedule = requested.pipeline_schedule or inputs.config.num_model_chunks > 1
    for tensor, pipeline in itertools.product(sorted({tp, *divisors & set(_MODEL_PARALLEL)}), sorted({pp, *divisors})):
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

    Prefers layouts with different techniques, and then variants of them. A layout whose flags contain all flags of a
    cheaper one is left out."""

    order = [candidate for candidate in layouts(inputs) if candidate.least <= budget]
    order.sort(key=lambda c: (c.cost, len(c.flags), c.least))
    found: list[Candidate] = []
    for end in (1, None):  # compare the names of the flags, and then also their values

        def names(candidate: Candidate, end: int | None = end) -> set[tuple[str, ...]]:
            return {tuple(flag.split()[:end]) for flag in candidate.flags}

        for candidate in order:
            is_new = not any(names(other) <= names(candidate) for other in found)
            # Only layouts that can be returned are traced.
            if len(found) < 3 and is_new and candidate.fits(budget):
                found.append(candidate)
    found.sort(key=lambda c: (c.cost, len(c.flags), c.memory.total))
    return [_offer(inputs, candidate) for candidate in found]


def smallest_offer(inputs: MemoryInputs) -> Offer:
    """Return the layout that needs the least memory: of those with the lowest estimate, the one with the most flags."""

    def size(candidate: Candidate) -> tuple[float, int, int]:
        return candidate.least, -len(candidate.flags), candidate.inputs.config.train.micro_batch_size

    return _offer(inputs, min(layouts(inputs), key=size))


def _offer(inputs: MemoryInputs, candidate: Candidate) -> Offer:
    slower = (1 + candidate.cost) / (1 + cost(inputs, inputs.config.train.micro_batch_size)) - 1
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
    """Yield the flags for the values that differ from `asked`."""
    for name, value in values.items():
        if value != getattr(asked, name):
            yield flag_name(f"{section}.{name}") + ("" if value is True else f" {value}")
