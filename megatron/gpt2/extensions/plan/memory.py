"""The memory of one rank in a training step, by part, from a trace of the program.

The estimate is the largest memory of the rank at any line of the program. The file that makes an allocation decides
whether it belongs to gradients, to logits and loss, or to communication. All other allocations are activations if they
exist after their forward pass, and otherwise temporary.

If a step has many micro-batches, its trace has fewer: two for each pipeline stage, after which the memory repeats. A
trace also has few layers, because at each line of the program memory is a linear function of the number of layers.
"""

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from megatron.gpt2.config import Config
from megatron.gpt2.extensions.plan.trace import Allocation, Communication, Mark, Operation, Release, Trace, trace_step

# A chunk with at most MAX_TRACED_LAYERS layers is traced completely, since the traces of few layers would take as long.
MAX_TRACED_LAYERS = 16
FEW_LAYERS = (2, 4, 6)
# Memory is a linear function of the number of layers if the deviation is less than LINEAR_WITHIN bytes.
LINEAR_WITHIN = 1 << 20
# The first and the last EDGE_COUNT allocations of a line in a phase are extrapolated.
EDGE_COUNT = 4
PARTS = (
    "weights",
    "gradients",
    "optimizer",
    "activations",
    "temporary",
    "logits and loss",
    "communication",
    "--async-save",
    "heap",
    "fixed",
)
BUCKETS = "megatron/gpt2/optimizer/param_and_grad_buffer.py"
PART_OF_FILE = {
    BUCKETS: "gradients",
    "megatron/gpt2/optimizer/bucket_reducer.py": "communication",
    "megatron/gpt2/extensions/exact/reducer.py": "gradients",
    "mpu/cross_entropy.py": "logits and loss",
    "mpu/kernels/cross_entropy.py": "logits and loss",
    "megatron/gpt2/extensions/exact/cross_entropy.py": "logits and loss",
}
PHASE_NAMES = {
    "forward": "the forward pass",
    "backward": "the backward pass",
    "allreduce": "the reduction of gradients",
    "optimizer": "the optimizer",
}
# bytes of a step's tokens: text, inputs, labels, masks and weights
BATCH_BYTES_PER_TOKEN = 40
# On a CPU, the buffers of the matrix libraries, and the objects of torch's compiler, which recomputation imports, are
# allocated only after the model exists (torch 2.13, without file pages).
LIBRARY_BYTES, COMPILER_BYTES = 24 << 20, 45 << 20
# CUDA's context and the kernels of torch, NCCL and cuBLAS take 0.4 to 0.8 GB.
CUDA_CONTEXT = 600 << 20
# Fragmentation of glibc's heap adds a share to each part. The shares are fitted to measured runs
# (docs/explanation/memory.md).
FRAGMENTATION = {
    "activations": 0.2,
    "gradients": 0.4,
    "temporary": 1.2,
    "logits and loss": 1.2,
    "communication": 1.2,
}


@dataclass(frozen=True)
class MemoryInputs:
    """The inputs of an estimate.

    config: must have the vocabulary size.
    fixed: bytes in use before the model exists.
    keeps_freed: whether glibc keeps freed memory (`megatron.gpt2.device.set_allocator`).
    consumed_samples: the samples before the first step, for batch sizes that grow.
    """

    config: Config
    world_size: int
    device: str  # "cpu" or "cuda"
    dtype: torch.dtype
    fixed: int
    keeps_freed: bool = False
    consumed_samples: int = 0

    @property
    def stages(self) -> int:
        """The number of stages. Each rank of a pipeline holds one stage, which has several chunks if the schedule is
        interleaved."""
        return self.config.parallel.pipeline_model_parallel_size

    def stage_of(self, rank: int) -> int:
        """Return the stage of `rank`."""
        return rank // (self.world_size // self.stages)

    @property
    def data_parallel_size(self) -> int:
        """The number of data-parallel ranks."""
        return self.config.data_parallel_size(self.world_size)

    @cached_property
    def num_microbatches(self) -> int:
        """The number of micro-batches of each rank in a step of the final batch, which needs the most memory. Raises
        ValueError if the ranks cannot share the batch."""
        return self.config.num_microbatches(self.world_size, self.consumed_samples)


@dataclass(frozen=True)
class MemoryEstimate:
    """The memory of a rank at the moment of its peak.

    parts: bytes by part.
    on_host: bytes of host memory, with a GPU.
    parameters: the number of parameters on the rank.
    """

    moment: str
    parts: Mapping[str, int]
    on_host: int = 0
    parameters: int = 0

    @property
    def total(self) -> int:
        """The sum of the bytes of all parts."""
        return sum(self.parts.values())

    @property
    def allocated(self) -> int:
        """The bytes that torch's allocator counts: the total without `fixed`."""
        return self.total - self.parts["fixed"]


def low_bytes(inputs: MemoryInputs) -> float:
    """Return a low estimate of the memory of the first stage without a trace, by the table in
    docs/explanation/memory.md."""
    config, model, parallel, train = inputs.config, inputs.config.model, inputs.config.parallel, inputs.config.train
    assert model.vocab_size is not None
    h, tp, pp, vpp = model.hidden_size, parallel.tensor_model_parallel_size, inputs.stages, config.num_model_chunks
    layers = sum(map(len, config.layers_of_virtual_stages()[::pp]))
    parameters = (layers * (4 * h + 2 * model.ffn_size) + model.vocab_size) * h / tp
    on_host = parallel.cpu_offload_optimizer and inputs.device == "cuda"
    moments = 0 if on_host else 8 if inputs.dtype == torch.float32 else 12  # 12 includes float32 masters.
    state = inputs.dtype.itemsize + moments / (inputs.data_parallel_size if parallel.use_distributed_optimizer else 1)
    # The gradients of a single micro-batch are freed as soon as they are reduced.
    frees = parallel.shard_gradients or (parallel.use_distributed_optimizer and inputs.num_microbatches == 1)
    state += 4 / (inputs.data_parallel_size if frees else 1)
    if on_host or parallel.checkpoint_in_cpu or parallel.cpu_offloading_num_layers or parallel.partition_activations:
        # These settings split activations, move them to the host, or free them before all gradients exist, so the low
        # estimate leaves activations out.
        return state * parameters + inputs.fixed
    full = 2 / train.recompute_num_layers, 0
    replicated, split = {"none": (8, 24), "selective": (4, 16), "full": full}[train.recompute_granularity]
    # the bytes of a layer's activations for each token and hidden unit
    of_layer = replicated / (tp if parallel.sequence_parallel else 1) + split / tp
    in_flight = min(pp + (pp - 1) * (vpp > 1) / vpp, inputs.num_microbatches)
    tokens = train.micro_batch_size * config.data.seq_length
    return state * parameters + tokens * h * layers * in_flight * of_layer + inputs.fixed


def in_mb(size: float) -> str:
    """Format bytes in whole MB of 2^20 bytes, such as "12,760"."""
    return f"{size / 2**20:,.0f}"


# The memory of a rank at one time: bytes by part, and numbers that are not in the sum: "host", "saved" (of a
# checkpoint), "parameters", "untouched" (of the gradients), "total" (the sum of the parts without "untouched"), and
# "allocated", the largest sum of the step with "untouched".
MemoryByPart = dict[str, int]


class PointInStep(NamedTuple):
    """A point of a step at which memory can change: an allocation or a communication.

    order: the number of the event among all events of its line in its phase: 0, 1, … for the first events, …, -2, -1
        for the last events, None between. At the first and the last events, the memory of a rank is a linear function
        of the number of layers.
    """

    phase: str
    place: str
    order: int | None


def held_bytes(by_part: MemoryByPart) -> int:
    """Return the bytes of all parts, without the pages of gradient buckets that are not written yet."""
    return by_part["total"]


def with_batch_size(config: Config, global_batch_size: int) -> Config:
    """Return `config` with a batch size that does not grow."""
    train = dataclasses.replace(
        config.train,
        global_batch_size=global_batch_size,
        gradient_accumulation_steps=None,
        rampup_batch_size=(),
        step_batch_size_schedule=(),
    )
    return dataclasses.replace(config, train=train)


def with_few_layers(inputs: MemoryInputs) -> tuple[list[MemoryInputs], float] | None:
    """Return three models with fewer layers, and the factor x of an extrapolation: the memory of the whole model is
    that of the last smaller model plus x times the difference between the last two. A chunk of a smaller model has
    `FEW_LAYERS` times --recompute-num-layers layers. Return None if the model itself must be traced, because its chunks
    have few layers or different numbers of layers."""
    config, parallel = inputs.config, inputs.config.parallel
    layers = config.layers_of_virtual_stages()
    groups = len(layers[0]) / config.train.recompute_num_layers
    is_regular = len(set(map(len, layers))) == 1
    is_regular = is_regular and not (parallel.cpu_offloading_num_layers or parallel.checkpoint_in_cpu)
    if not is_regular or groups <= MAX_TRACED_LAYERS:
        return None
    few = []
    for count in (number * config.train.recompute_num_layers for number in FEW_LAYERS):
        model = dataclasses.replace(config.model, num_layers=count * len(layers))
        of_chunk = count if parallel.num_layers_per_virtual_pipeline_stage else None
        split = dataclasses.replace(parallel, num_layers_per_virtual_pipeline_stage=of_chunk)
        few.append(dataclasses.replace(inputs, config=dataclasses.replace(config, model=model, parallel=split)))
    return few, (groups - FEW_LAYERS[2]) / (FEW_LAYERS[2] - FEW_LAYERS[1])


@functools.lru_cache(maxsize=4096)
def stage_memory(inputs: MemoryInputs, stage: int) -> dict[PointInStep, MemoryByPart]:
    """Return the result of `traced_memory`, or an extrapolation from few layers. Few layers are traced if all chunks of
    the model have the same number of layers. The extrapolation leaves out moments at which memory is not linear in the
    number of layers, for example because layers share buckets."""
    few_layers = with_few_layers(inputs)
    if few_layers is None:
        return traced_memory(inputs, stage)
    models, steps = few_layers
    fewest, fewer, few = (traced_memory(each, stage) for each in models)
    return {
        key: {name: int(size + steps * (size - fewer[key][name])) for name, size in held.items()}
        for key, held in few.items()
        if key.order is not None
        and key in fewest
        and key in fewer
        and all(
            abs(held[part] - 2 * fewer[key][part] + fewest[key][part]) < LINEAR_WITHIN for part in (*PARTS, "total")
        )
    }


def trace_stage(inputs: MemoryInputs, stage: int, num_microbatches: int) -> Trace:
    """Trace a step of `num_microbatches` micro-batches on the first rank of `stage`."""
    samples = inputs.config.train.micro_batch_size * inputs.data_parallel_size * num_microbatches
    return trace_step(
        with_batch_size(inputs.config, samples),
        rank=stage * (inputs.world_size // inputs.stages),
        world_size=inputs.world_size,
        device=inputs.device,
        dtype=inputs.dtype,
    )


def traced_memory(inputs: MemoryInputs, stage: int) -> dict[PointInStep, MemoryByPart]:
    """Trace a step of the first rank of `stage`. Return the bytes of this rank at each point of the step. If a point
    occurs several times, its largest number of bytes counts."""
    config, m, pp = inputs.config, inputs.num_microbatches, inputs.stages
    traced = m if m <= 3 * pp or config.parallel.exact_layouts is not None else 2 * pp + m % pp
    trace = trace_stage(inputs, stage, traced)
    left_out = (m - traced) * config.train.micro_batch_size * config.data.seq_length * BATCH_BYTES_PER_TOKEN
    now = dict.fromkeys((*PARTS, "host", "untouched"), 0) | {
        "weights": trace.weights,
        "optimizer": trace.held[inputs.device] - trace.weights,
        "temporary": left_out,
    }
    now["host"] = most_on_host = trace.held["cpu"] if inputs.device == "cuda" else 0
    now["total"] = sum(now[part] for part in PARTS)
    moments, of_phase = dict[PointInStep, MemoryByPart](), defaultdict[str, list[MemoryByPart]](list)
    kept_blocks, blocks = _kept_blocks(trace), dict[int, tuple[str, int]]()
    copies, most_allocated, is_cpu = 0, 0, inputs.device == "cpu"

    def allocate(part: str, size: int) -> None:
        now[part] += size
        now["total"] += size if part in PARTS else 0

    def leave_untouched(size: int) -> None:
        """Leave `size` bytes of a bucket out of the total: on a CPU the system provides a page when it is written."""
        now["untouched"] += size
        now["total"] -= size

    for event in trace.events:
        fills = is_cpu and isinstance(event, Operation) and _fills_bucket(event)
        if isinstance(event, Allocation):
            blocks[event.block] = _part(event, event.block in kept_blocks, inputs.device), event.size
            allocate(*blocks[event.block])
            if is_cpu and event.place.startswith(BUCKETS):
                leave_untouched(event.size)
        elif isinstance(event, Operation) and fills:
            leave_untouched(-min(event.written, now["untouched"]))
        elif isinstance(event, Release) and event.block in blocks:
            part, size = blocks.pop(event.block)
            allocate(part, -size)
        elif isinstance(event, Communication) and is_cpu and _is_scattered(event):
            # gloo reduces a copy of the bucket, and frees the copy when the result is received.
            more = event.size - (copies if config.parallel.shard_gradients else 0)
            copies += more
            allocate("communication", more)
        elif isinstance(event, Mark):
            for place, row in of_phase.items():
                near = min(EDGE_COUNT, (len(row) + 1) // 2)
                for number, by_part in enumerate(row):
                    last = number - len(row)
                    order = number if number < near else last if last >= -near else None
                    moment = PointInStep(event.phase, place, order)
                    moments[moment] = max(moments.get(moment, by_part), by_part, key=held_bytes)
            of_phase.clear()
            if event.phase == "backward" and event.ends:
                leave_untouched(-now["untouched"])
            if event.phase == "allreduce" and event.ends:
                allocate("communication", -copies)
                copies = 0
        most_on_host = max(most_on_host, now["host"])
        most_allocated = max(most_allocated, now["total"] + now["untouched"])
        is_sent = isinstance(event, Communication) and copies
        if isinstance(event, Allocation | Communication | Operation) and (
            isinstance(event, Allocation) or fills or is_sent
        ):
            of_phase[event.place].append(now.copy())
    saved = trace.weights + (0 if config.checkpoint.no_save_optim else trace.saved)
    of_step = {"parameters": trace.parameters, "saved": saved, "host": most_on_host, "allocated": most_allocated}
    for by_part in moments.values():
        by_part.update(of_step)
    return moments


def _kept_blocks(trace: Trace) -> set[int]:
    """Return the blocks that still exist after the forward pass that allocated them, and the blocks that were allocated
    outside of the forward and backward passes."""
    kept, alive, fresh = set[int](), set[int](), set[int]()
    for event in trace.events:
        if isinstance(event, Allocation):
            (fresh if event.phase == "forward" else kept if event.phase != "backward" else alive).add(event.block)
        elif isinstance(event, Release):
            fresh.discard(event.block)
        elif isinstance(event, Mark) and event.phase == "forward" and event.ends:
            kept |= fresh
            fresh.clear()
    return kept


def _part(event: Allocation, is_kept: bool, device: str) -> str:
    if event.device != device:
        return "host"
    return PART_OF_FILE.get(event.place.split(":")[0]) or ("activations" if is_kept else "temporary")


def _fills_bucket(event: Operation) -> bool:
    return event.name in ("copy_", "zero_") and event.place.startswith("megatron/gpt2/optimizer/bucket_reducer.py")


def _is_scattered(event: Communication) -> bool:
    return "reduce_scatter" in event.name and event.place.startswith("megatron/gpt2/optimizer/")


def estimate_memory(inputs: MemoryInputs, stage: int | None = None) -> MemoryEstimate:
    """Estimate the largest memory of a training step on `stage` of the pipeline (default: the stage that needs the
    most)."""
    if stage is None:
        layers = [len(layers) for layers in inputs.config.layers_of_virtual_stages()[: inputs.stages]]
        # Among stages with the same number of layers, the first stage keeps the most micro-batches, and the last stage
        # computes the loss.
        largest = {layers.index(max(layers)), 0, inputs.stages - 1}
        return max((estimate_memory(inputs, each) for each in largest), key=lambda memory: memory.total)
    return _largest(inputs, stage, stage_memory(inputs, stage))


def _largest(inputs: MemoryInputs, stage: int, moments: Mapping[PointInStep, MemoryByPart]) -> MemoryEstimate:
    config = inputs.config
    point, by_part = max(moments.items(), key=lambda item: held_bytes(item[1]))
    of_loss = point.phase == "forward" and PART_OF_FILE.get(point.place.split(":")[0]) == "logits and loss"
    moment = "the loss" if of_loss else PHASE_NAMES.get(point.phase, point.phase)
    parts = {part: by_part[part] for part in PARTS} | {"fixed": inputs.fixed}
    parts["gradients"] -= by_part["untouched"]
    saved, on_host = by_part["saved"] if config.checkpoint.async_save else 0, by_part["host"]
    if inputs.device == "cuda":
        on_host += saved
    else:
        parts["--async-save"] = saved
        if inputs.keeps_freed:
            parts["heap"] = int(sum(share * parts[part] for part, share in FRAGMENTATION.items()))
        needs_compiler = config.train.recompute_granularity == "full" or config.train.compile
        parts["fixed"] += LIBRARY_BYTES + (COMPILER_BYTES if needs_compiler else 0)
    name = moment + (f" of stage {stage}" if inputs.stages > 1 else "")
    return MemoryEstimate(name, parts, on_host, by_part["parameters"])
