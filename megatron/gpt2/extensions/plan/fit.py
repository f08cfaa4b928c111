"""Which layouts of a run fit a given memory, the cheapest first: micro-batch, recomputation, model parallelism,
pipelines, and where the optimizer's state, gradients and kept inputs are. All of them compute the same.

What a change costs is an estimate of how much longer a step takes, to put the changes in order:

    recompute full       the layers' forward once more, from the model's FLOPs: 29 % at 345M
    recompute selective  2 %: 1 to 2 measured on a CPU (docs/explanation/performance.md)
    model parallel       1/0.95, 1/0.82 and 1/0.77 at 2, 4 and 8 ranks (arXiv:1909.08053, figure 5); beyond, twice
    pipeline             its bubble, and its messages at 100 GB/s
    half the micro-batch 3 %: smaller products, and one more pass over the gradients
    distributed optimizer, sequence parallel: nothing, they move as many bytes as what they replace
    optimizer on the host: its bytes over PCIe and through the host's memory, beside a step at 40 % of 989 TFLOP/s
    sharded gradients    they are sent once more for each further micro-batch, at 100 GB/s, half of it beside backward
    partitioned inputs   1 %: an all-gather in backward; it serves where the sequence cannot be split
    inputs on the host   1 %, and what their bytes over PCIe take longer than the step

Legend: N parameters per rank.
"""

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megatron.gpt2.config import flag
from megatron.gpt2.extensions.plan.pipelines import bubble
from megatron.gpt2.extensions.plan.sizes import Setting, Sizes
from megatron.gpt2.extensions.plan.step import Memory, at_rest, expected

_SELECTIVE, _HALF_BATCH, _PARTITIONED, _PARKED = 0.02, 0.03, 0.01, 0.01
_MODEL_PARALLEL = {1: 0.0, 2: 1 / 0.95 - 1, 4: 1 / 0.82 - 1, 8: 1 / 0.77 - 1}
RECOMPUTES = ("none", "selective", "full")
_PCIE, _HOST_MEMORY, _BETWEEN_GPUS, _FLOPS = 25e9, 50e9, 100e9, 0.4 * 989e12  # bytes a second, FLOP/s


@dataclass(frozen=True)
class Candidate:
    """A layout, what it needs, and how much longer its step takes than without any of these means (0.29: 29 %)."""

    setting: Setting
    cost: float
    flags: tuple[str, ...]  # that change the run which was asked for
    at_least: int  # bytes that it needs whatever its activations are

    @functools.cached_property
    def memory(self) -> Memory:
        """Of the fullest rank."""
        return expected(self.setting)

    def than(self, other: float) -> float:
        """How much longer its step is than one of cost `other`."""
        return (1 + self.cost) / (1 + other) - 1


def cost(setting: Setting, *, batch: int) -> float:
    """How much longer a step is than without any of these means. batch: the micro-batch that counts as whole."""
    config, model = setting.config, setting.config.model
    whole = model.flops_per_token(config.data.seq_length)
    assert model.vocab_size is not None
    layers = whole - 6 * model.hidden_size * model.vocab_size
    parallel, sizes = config.parallel, Sizes(setting)
    p = parallel.model_parallel_size
    more = {"none": 0.0, "selective": _SELECTIVE, "full": layers / 3 / whole}[config.train.recompute_granularity]
    size = config.train.micro_batch_size
    while size < batch:
        more, size = more + _HALF_BATCH, 2 * size
    more += _MODEL_PARALLEL.get(p, 1.0)
    tokens = setting.micro_batches * config.train.micro_batch_size * config.data.seq_length
    step = tokens * whole / (p * setting.stages) / _FLOPS
    if parallel.cpu_offload_optimizer and sizes.on_gpu:
        owned = sizes.parameters / (setting.data_parallel_size if parallel.use_distributed_optimizer else 1)
        # Down 4 and up 2; AdamW reads 16 and writes 12.
        more += (6 * owned / _PCIE + 28 * owned / _HOST_MEMORY) / step
    if parallel.shard_gradients and setting.data_parallel_size > 1:
        more += (setting.micro_batches - 1) * 4 * sizes.parameters / _BETWEEN_GPUS / 2 / step
    if parallel.partition_activations:
        more += _PARTITIONED
    if parked := sum(chunk.parked for chunk in sizes.chunks):
        more += _PARKED + max(0.0, setting.micro_batches * 2 * parked / _PCIE / step - 1)
    if setting.stages > 1:  # of each chunk the hidden states one way, and their gradient the other way
        more += setting.micro_batches * len(sizes.chunks) * 2 * sizes.residual / _BETWEEN_GPUS / step
        more = (1 + more) / (1 - bubble(config, setting.micro_batches)) - 1
    return more


def layouts(setting: Setting) -> Iterator[Candidate]:
    """Every layout of the run on the same number of ranks and with the same global batch, also the one of `setting`: of
    as many ranks per model as it has, or of more."""
    asked = setting.config
    batch = asked.train.micro_batch_size
    together = batch * setting.data_parallel_size * setting.micro_batches
    sizes = [batch >> shift for shift in range(batch.bit_length()) if (batch >> shift) << shift == batch]
    recomputes = RECOMPUTES[RECOMPUTES.index(asked.train.recompute_granularity) :]
    for shared, b, recompute in itertools.product(_shared(setting), sizes, recomputes):
        p, stages = shared["model_parallel_size"], shared["pipeline_model_parallel_size"]
        data_parallel = setting.world_size // (p * stages)
        if together % (b * data_parallel):
            continue
        on_gpu, full = setting.device == "cuda", recompute == "full"
        can_shard = asked.parallel.DDP_impl == "local" and data_parallel > 1
        helps = {
            "sequence_parallel": p > 1,
            "use_distributed_optimizer": can_shard,
            "shard_gradients": can_shard and stages == 1,
            "cpu_offload_optimizer": on_gpu,
            "partition_activations": full and asked.data.seq_length % p > 0,
            "checkpoint_in_cpu": on_gpu and full,
        }
        choices = [
            (True,) if getattr(asked.parallel, name) else (False, True) if useful else (False,)
            for name, useful in helps.items()
        ]
        for flags in itertools.product(*choices):
            changed: dict[str, Any] = dict(zip(helps, flags, strict=True))
            if changed["shard_gradients"] and not (
                changed["use_distributed_optimizer"] or asked.parallel.shard_gradients
            ):
                continue
            train: dict[str, Any] = {
                "micro_batch_size": b,
                "global_batch_size": together,
                "recompute_granularity": recompute,
            }
            try:
                candidate = dataclasses.replace(
                    setting,
                    config=dataclasses.replace(
                        asked,
                        train=dataclasses.replace(asked.train, gradient_accumulation_steps=None, **train),
                        parallel=dataclasses.replace(asked.parallel, **shared, **changed),
                    ),
                )
            except ValueError:  # what does not divide
                continue
            if b == batch and data_parallel == setting.data_parallel_size:
                del train["global_batch_size"]  # it is the same without the flag
            yield Candidate(
                candidate,
                cost(candidate, batch=batch),
                (*_flags("parallel", asked.parallel, {**shared, **changed}), *_flags("train", asked.train, train)),
                at_rest(candidate),
            )


def _shared(setting: Setting) -> Iterator[dict[str, Any]]:
    """How a model can lie on several ranks: split layers, stages, and schedules of the stages."""
    asked, model = setting.config.parallel, setting.config.model
    p, stages = asked.model_parallel_size, asked.pipeline_model_parallel_size
    powers = {1 << n for n in range(setting.world_size.bit_length())}
    own_schedule = asked.pipeline_schedule or setting.config.virtual_stages > 1
    for shared, further in itertools.product(sorted({p, *powers & set(_MODEL_PARALLEL)}), sorted({stages, *powers})):
        if (
            shared * further < p * stages
            or setting.world_size % (shared * further)
            or (model.num_attention_heads % shared or model.ffn_size % shared or further > model.num_layers)
        ):
            continue
        sizes = {"model_parallel_size": shared, "pipeline_model_parallel_size": further}
        if not (own_schedule and further == 1 < stages):
            yield sizes
        if own_schedule or further == 1:
            continue
        if not setting.config.train.compile:
            yield {**sizes, "pipeline_schedule": "zero-bubble"}
        for chunks in (4, 2):
            if model.num_layers % (further * chunks) == 0:
                yield {**sizes, "num_layers_per_virtual_pipeline_stage": model.num_layers // (further * chunks)}
                break


def cheapest(setting: Setting, budget: int, count: int) -> list[Candidate]:
    """Up to `count` layouts that need at most `budget` bytes, the cheapest first. First those that use other means than
    the ones before them, then those that use other values of the same means. None only adds a flag to another."""

    def place(candidate: Candidate) -> tuple[float, int]:
        return candidate.cost, len(candidate.flags)

    order = sorted(layouts(setting), key=place)
    found: list[Candidate] = []
    for part in (_means, _flags_of):

        def is_new(candidate: Candidate, part: Callable[[Candidate], set[str]] = part) -> bool:
            return (
                len(found) < count
                and candidate.at_least <= budget
                and not any(part(other) <= part(candidate) for other in found)
            )

        for _, alike in itertools.groupby(order, place):
            # Memory is computed of those alone that may be offered.
            for candidate in sorted(filter(is_new, alike), key=lambda c: c.memory.total):
                if candidate.memory.total <= budget and is_new(candidate):
                    found.append(candidate)
    return sorted(found, key=lambda c: (*place(c), c.memory.total))


def _flags_of(candidate: Candidate) -> set[str]:
    return set(candidate.flags)


def _means(candidate: Candidate) -> set[str]:
    return {flag.split()[0] for flag in candidate.flags}


def smallest(setting: Setting) -> Candidate:
    """The layout that needs the least memory, for a run that cannot fit."""
    order = sorted(layouts(setting), key=lambda c: c.at_least)
    least = order[0]
    for candidate in order:
        if candidate.at_least <= least.memory.total and (candidate.memory.total, candidate.cost) < (
            least.memory.total,
            least.cost,
        ):
            least = candidate
    return least


def largest_micro_batch(setting: Setting, budget: int) -> int:
    """The largest --micro-batch-size that needs at most `budget` bytes, with all other flags as they are and without
    accumulation; 0 where not even one sample fits."""

    def fits(b: int) -> bool:
        train = dataclasses.replace(
            setting.config.train,
            micro_batch_size=b,
            global_batch_size=None,
            gradient_accumulation_steps=None,
            rampup_batch_size=(),
            step_batch_size_schedule=(),
        )
        return (
            expected(dataclasses.replace(setting, config=dataclasses.replace(setting.config, train=train))).total
            <= budget
        )

    return bisect.bisect_left(range(1, 1 << 20), True, key=lambda b: not fits(b))


def _flags(section: str, asked: object, values: dict[str, Any]) -> Iterator[str]:
    """What to add to the command line."""
    for name, value in values.items():
        if value != getattr(asked, name):
            yield flag(f"{section}.{name}") + ("" if value is True else f" {value}")
