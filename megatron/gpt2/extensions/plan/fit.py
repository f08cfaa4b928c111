"""Find the layouts of a run that fit into a given memory, the cheapest first.

The layouts differ in micro-batch, recomputation, model parallelism, pipelines, sharding and offloading. All compute the
same training. They are sorted by their cost, an estimate of how much longer a step takes:

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

Legend: N parameters per rank.
"""

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megatron.gpt2.config import Config, flag_name
from megatron.gpt2.extensions.plan.memory import (
    MemoryEstimate,
    MemoryInputs,
    estimate_memory,
    low_bytes,
    with_batch_size,
)
from megatron.gpt2.model.gpt2 import count_parameters
from megatron.gpt2.pipeline.analysis import timetable
from megatron.gpt2.pipeline.p2p_schedule import ActionCosts
from megatron.gpt2.pipeline.schedule import build_schedule
from mpu.partition import padded_vocab_size

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
        """The extra time of a step, compared with none of these techniques (0.29: 29 %)."""
        return cost(self.inputs, batch=self.batch)

    @functools.cached_property
    def memory(self) -> MemoryEstimate:
        """The estimate of the rank that needs the most memory."""
        return estimate_memory(self.inputs)

    def fits(self, budget: float) -> bool:
        """Whether it needs at most `budget` bytes. The first stage often decides."""
        return estimate_memory(self.inputs, 0).total <= budget and self.memory.total <= budget

    def relative_cost(self, other: float) -> float:
        """Return the extra time of a step compared with a layout whose cost is `other`."""
        return (1 + self.cost) / (1 + other) - 1


def cost(inputs: MemoryInputs, *, batch: int) -> float:
    """Return the estimated time of a step, divided by the time of its matrix products, minus 1."""
    config, model = inputs.config, inputs.config.model
    whole = model.flops_per_token(config.data.seq_length)
    assert model.vocab_size is not None
    layers = whole - 6 * model.hidden_size * model.vocab_size
    parallel, p = config.parallel, config.parallel.tensor_model_parallel_size
    parameters, on_gpu = stage_parameters(config), inputs.device == "cuda"
    hidden = inputs.dtype.itemsize * config.train.micro_batch_size * config.data.seq_length * model.hidden_size
    # the width of a hidden state on a rank between two layers
    own = hidden // p if parallel.sequence_parallel else hidden
    more = {"none": 0.0, "selective": _SELECTIVE, "full": layers / 3 / whole}[config.train.recompute_granularity]
    size = config.train.micro_batch_size
    while size < batch:
        more, size = more + _HALF_BATCH, 2 * size
    more += _MODEL_PARALLEL.get(p, 1.0)
    tokens = inputs.num_microbatches * config.train.micro_batch_size * config.data.seq_length
    step = tokens * whole / (p * inputs.stages) / _FLOPS
    if parallel.cpu_offload_optimizer and on_gpu:
        owned = parameters / (inputs.data_parallel_size if parallel.use_distributed_optimizer else 1)
        # An offloaded parameter sends 4 bytes to the host and 2 back over PCIe; AdamW reads 16 and writes 12 bytes in
        # host memory.
        more += (6 * owned / _PCIE + 28 * owned / _HOST_MEMORY) / step
    if parallel.shard_gradients and inputs.data_parallel_size > 1:
        more += (inputs.num_microbatches - 1) * 4 * parameters / _BETWEEN_GPUS / 2 / step
    if parallel.partition_activations:
        more += _PARTITIONED
    layers_here = -(-model.num_layers // inputs.stages)
    offloaded = min(parallel.cpu_offloading_num_layers, layers_here) * 16 * own  # A layer offloads 16 hidden states.
    if parallel.checkpoint_in_cpu:
        offloaded = (
            -(-layers_here // config.train.recompute_num_layers) * own // (p if parallel.partition_activations else 1)
        )
    if offloaded and on_gpu:
        more += _OFFLOADED + max(0.0, inputs.num_microbatches * 2 * offloaded / _PCIE / step - 1)
    if inputs.stages > 1:  # Each chunk sends hidden states forward and gradients back.
        more += inputs.num_microbatches * config.num_model_chunks * 2 * own / _BETWEEN_GPUS / step
        more = (1 + more) / (1 - bubble(config, inputs.num_microbatches)) - 1
    return more


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


def stage_parameters(config: Config) -> int:
    """Return the number of parameters of a rank of the first stage."""
    model, p, stages = (
        config.model,
        config.parallel.tensor_model_parallel_size,
        config.parallel.pipeline_model_parallel_size,
    )
    assert model.vocab_size is not None
    rows = padded_vocab_size(model.vocab_size, model.make_vocab_size_divisible_by, p) // p
    whole = _count_parameters(model, p)[1]
    of_layers = whole - (rows + model.max_position_embeddings + 2) * model.hidden_size
    layers = sum(map(len, config.layers_of_virtual_stages()[::stages]))
    return whole - of_layers + of_layers * layers // model.num_layers


_count_parameters = functools.lru_cache(maxsize=64)(count_parameters)


def layouts(inputs: MemoryInputs, *, batch: int | None = None, offload: bool = True) -> Iterator[Candidate]:
    """Yield all layouts of the run with the same number of ranks and the same global batch, and with at least as many
    ranks per model.

    batch: the largest micro-batch size (default: that of `inputs`).
    offload: yield also layouts that use memory of the host.
    """
    asked = inputs.config
    largest = batch or asked.train.micro_batch_size
    global_batch_size = asked.train.global_batch_size or largest * inputs.data_parallel_size * inputs.num_microbatches
    sizes = [largest >> shift for shift in range(largest.bit_length()) if (largest >> shift) << shift == largest]
    recomputes = RECOMPUTES[RECOMPUTES.index(asked.train.recompute_granularity) :]
    for split, b, recompute in itertools.product(_model_splits(inputs), sizes, recomputes):
        p, stages = split["tensor_model_parallel_size"], split["pipeline_model_parallel_size"]
        data_parallel = inputs.world_size // (p * stages)
        if global_batch_size % (b * data_parallel):
            continue
        if "pipeline_schedule" in split and global_batch_size < b * data_parallel * stages:
            continue  # The zero-bubble schedule needs a micro-batch for each stage.
        on_gpu, full = offload and inputs.device == "cuda", recompute == "full"
        useful = {
            "sequence_parallel": p > 1,
            "use_distributed_optimizer": data_parallel > 1,
            "shard_gradients": data_parallel > 1 and stages == 1,
            "cpu_offload_optimizer": on_gpu,
            "partition_activations": full and asked.data.seq_length % p > 0,
            "checkpoint_in_cpu": on_gpu and full,
        }
        choices = [
            (True,) if getattr(asked.parallel, name) else (False, True) if is_useful else (False,)
            for name, is_useful in useful.items()
        ]
        for flags in itertools.product(*choices):
            changed: dict[str, Any] = dict(zip(useful, flags, strict=True))
            if changed["shard_gradients"] and not (
                changed["use_distributed_optimizer"] or asked.parallel.shard_gradients
            ):
                continue
            train: dict[str, Any] = {
                "micro_batch_size": b,
                "global_batch_size": global_batch_size,
                "recompute_granularity": recompute,
            }
            try:
                candidate = dataclasses.replace(
                    inputs,
                    config=dataclasses.replace(
                        asked,
                        train=dataclasses.replace(asked.train, gradient_accumulation_steps=None, **train),
                        parallel=dataclasses.replace(asked.parallel, **split, **changed),
                    ),
                )
                least = low_bytes(candidate)
            except ValueError:  # The sizes of this layout do not divide each other.
                continue
            if b == asked.train.micro_batch_size and data_parallel == inputs.data_parallel_size:
                del train["global_batch_size"]  # The flag would not change it.
            yield Candidate(
                candidate,
                largest,
                (
                    *changed_flags("parallel", asked.parallel, {**split, **changed}),
                    *changed_flags("train", asked.train, train),
                ),
                least,
            )


def _model_splits(inputs: MemoryInputs) -> Iterator[dict[str, Any]]:
    """Yield the ways to split a model over ranks: tensor-parallel sizes, stages, and pipeline schedules."""
    asked, model = inputs.config.parallel, inputs.config.model
    p, stages = asked.tensor_model_parallel_size, asked.pipeline_model_parallel_size
    divisors = {n for n in range(1, inputs.world_size + 1) if inputs.world_size % n == 0}
    own_schedule = asked.pipeline_schedule or inputs.config.num_model_chunks > 1
    for tensor, pipeline in itertools.product(
        sorted({p, *divisors & set(_MODEL_PARALLEL)}), sorted({stages, *divisors})
    ):
        if (
            tensor * pipeline < p * stages
            or inputs.world_size % (tensor * pipeline)
            or (model.num_attention_heads % tensor or model.ffn_size % tensor or pipeline > model.num_layers)
        ):
            continue
        sizes = {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline}
        if not (own_schedule and pipeline == 1 < stages):
            yield sizes
        if own_schedule or pipeline == 1:
            continue
        if not inputs.config.train.compile:
            yield {**sizes, "pipeline_schedule": "zero-bubble"}
        for chunks in (4, 3, 2):
            if model.num_layers % (pipeline * chunks) == 0:
                yield {**sizes, "num_layers_per_virtual_pipeline_stage": model.num_layers // (pipeline * chunks)}


def cheapest(inputs: MemoryInputs, budget: int, count: int) -> list[Candidate]:
    """Return up to `count` layouts that need at most `budget` bytes, the cheapest first.

    Prefers layouts with different techniques, and then variants of them. A layout whose flags contain all flags of a
    cheaper one is left out."""

    def sort_key(candidate: Candidate) -> tuple[float, int]:
        return candidate.cost, len(candidate.flags)

    order = [candidate for candidate in sorted(layouts(inputs), key=sort_key) if candidate.least <= budget]
    found: list[Candidate] = []
    for flags_of in (_techniques, _flags_of):

        def is_new(candidate: Candidate, flags_of: Callable[[Candidate], set[str]] = flags_of) -> bool:
            return len(found) < count and not any(flags_of(other) <= flags_of(candidate) for other in found)

        for _, equal_cost in itertools.groupby(order, sort_key):
            # Only layouts that can be returned are traced.
            for candidate in sorted(equal_cost, key=lambda c: c.least):
                if is_new(candidate) and candidate.fits(budget):
                    found.append(candidate)
    return sorted(found, key=lambda c: (*sort_key(c), c.memory.total))


def _flags_of(candidate: Candidate) -> set[str]:
    return set(candidate.flags)


def _techniques(candidate: Candidate) -> set[str]:
    return {flag.split()[0] for flag in candidate.flags}


def smallest(inputs: MemoryInputs) -> Candidate:
    """Return the layout that needs the least memory. For each way to split the model, it has all techniques that save
    memory."""
    most: dict[tuple[Any, ...], tuple[tuple[int, int], Candidate]] = {}
    for candidate in layouts(inputs):
        config = candidate.inputs.config
        split, batch = config.parallel, config.train.micro_batch_size
        key = split.tensor_model_parallel_size, split.pipeline_model_parallel_size, config.pipeline_schedule(1).name
        if key not in most or (len(candidate.flags), -batch) > most[key][0]:
            most[key] = (len(candidate.flags), -batch), candidate
    order = sorted((candidate for _, candidate in most.values()), key=lambda c: c.least)
    least = order[0]
    for candidate in order:
        if candidate.least <= least.memory.total:
            least = min(least, candidate, key=lambda c: (c.memory.total, c.cost))
    return least


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
