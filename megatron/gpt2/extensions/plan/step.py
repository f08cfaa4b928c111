"""The memory of one rank in a training step, by part, computed from the flags. Nothing is allocated.

Memory is largest at one of these moments: in the loss, when all activations are stored; in the first layer of backward,
which adds its temporary tensors; in the first layer that returns from host memory; in the last layer of backward, when
nearly all gradients exist; at the embeddings, when all exist; or in the optimizer. The sums below follow when each
large tensor of `mpu/` and `megatron/` is allocated and freed; `sizes.py` has their sizes. In a pipeline each moment
except the optimizer belongs to one chunk and one micro-batch; `pipelines.py` has what the rank stores for the others.
docs/explanation/memory.md explains the sums, and tests compare them with what torch allocates.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megatron.gpt2.extensions.plan.pipelines import RankState, rank_states
from megatron.gpt2.extensions.plan.sizes import MemoryInputs, TensorSizes

PARTS = (
    "weights",
    "gradients",
    "optimizer",
    "activations",
    "logits and loss",
    "communication",
    "--async-save",
    "heap",
    "fixed",
)

# Resident memory that a process on a CPU needs in addition to the memory before the model exists, without file pages
# (torch 2.13): buffers of the matrix libraries; and the compiler's Python objects, which torch's checkpoint needs, too.
LIBRARY_BYTES, COMPILER_BYTES = 24 << 20, 45 << 20
# CUDA's context and the kernels of torch, NCCL and cuBLAS: 0.4 to 0.8 GB.
CUDA_CONTEXT = 600 << 20
# Fragmentation of glibc's heap, as a share of stored activations, of gradients, and of temporary tensors. Fitted to
# runs, see docs/explanation/memory.md.
FRAGMENTATION = (0.2, 0.4, 1.2)


@dataclass(frozen=True)
class MemoryEstimate:
    """The memory of a rank at its largest moment.

    parts: bytes by part.
    on_host: host memory, with a GPU.
    """

    moment: str
    parts: Mapping[str, int]
    on_host: int = 0

    @property
    def total(self) -> int:
        """The bytes of all parts."""
        return sum(self.parts.values())

    @property
    def allocated(self) -> int:
        """The bytes that torch's allocator counts: the total without `fixed`."""
        return self.total - self.parts["fixed"]


def in_mb(size: float) -> str:
    """Format bytes in whole MB of 2^20 bytes: "12,760"."""
    return f"{size / 2**20:,.0f}"


def estimate_memory(inputs: MemoryInputs, stage: int | None = None) -> MemoryEstimate:
    """Estimate the largest memory of a training step on `stage` of the pipeline (default: the stage with the most)."""
    if stage is None:
        return max(estimate_stages(inputs), key=lambda memory: memory.total)
    size, train = TensorSizes(inputs, stage), inputs.config.train
    found = rank_states(inputs.config, inputs.num_microbatches, stage)
    moment, large, kept = max(_moments(inputs, size, found), key=lambda item: sum(item[1].values()))
    in_order = min(large["activations"], kept)
    passing = large["activations"] - in_order + large["logits and loss"] + large["communication"]
    holes = sum(
        share * held for share, held in zip(FRAGMENTATION, (in_order, large["gradients"], passing), strict=True)
    )
    name = moment + (f" of stage {stage}" if inputs.stages > 1 else "")
    if size.on_gpu:
        # Host memory holds the offloaded optimizer, offloaded activations, and the copy that --async-save writes.
        offloaded = max(
            sum(
                (count + (number == state.chunk)) * chunk.offloaded
                for number, (chunk, count) in enumerate(zip(size.chunks, state.kept, strict=True))
            )
            for state in found
        )
        on_host = size.state - size.optimizer + offloaded + size.checkpoint
        return MemoryEstimate(name, dict.fromkeys(PARTS, 0) | large | {"fixed": inputs.fixed}, on_host)
    compiler = COMPILER_BYTES if train.recompute_granularity == "full" or train.compile else 0
    of_process = {
        "--async-save": size.checkpoint,
        "heap": int(holes) if inputs.keeps_freed else 0,
        "fixed": inputs.fixed + LIBRARY_BYTES + compiler,
    }
    return MemoryEstimate(name, dict.fromkeys(PARTS, 0) | large | of_process)


def min_memory(inputs: MemoryInputs) -> int:
    """Return a lower bound for the first stage: its memory in the optimizer, without activations."""
    size = TensorSizes(inputs)
    return size.weights + size.optimizer + 4 * size.parameters // size.shards + inputs.fixed


def estimate_stages(inputs: MemoryInputs) -> list[MemoryEstimate]:
    """Estimate each stage of the pipeline."""
    return [estimate_memory(inputs, stage) for stage in range(inputs.stages)]


def _moments(
    inputs: MemoryInputs, size: TensorSizes, found: list[RankState]
) -> Iterator[tuple[str, dict[str, int], int]]:
    """Yield the moments of a step: the name, the bytes by part (without heap and fixed), and the stored activations."""
    by_torch = inputs.config.parallel.DDP_impl == "torch" and inputs.data_parallel_size > 1
    for state in found:
        kept, chunk = _kept_activations(size, state), size.chunks[state.chunk]
        held = size.batch + kept + state.transfers * size.residual  # activations outside the action
        grad_bytes = 2 * size.element if by_torch else 4  # per element
        if state.kind == "F":
            moments = _forward_moments(size, state, grad_bytes)
        elif state.kind == "B":
            moments = _backward_moments(size, state, grad_bytes, by_torch)
        else:
            made = _gradients(size, state, grad_bytes, grad_bytes * chunk.parameters)
            queued = len(chunk.layers) * size.queued_by_layer
            moments = [("the gradients of weights", made, queued + size.weight_gradient, 0, 0)]
        for name, gradients, activations, logits, communication in moments:
            yield name, _parts(size, gradients, held + activations, logits, communication), kept + chunk.kept
    gradients = 4 * size.parameters + (size.second_tied_gradient if inputs.data_parallel_size > 1 else 0)
    sent = 0 if by_torch or size.shards > 1 else size.communication(gradients)
    gradients = gradients // size.shards + (2 * size.element * size.parameters if by_torch else 0)
    yield "the optimizer", _parts(size, gradients, size.batch, 0, sent), sum(chunk.kept for chunk in size.chunks)


def _parts(size: TensorSizes, gradients: int, activations: int, logits: int, communication: int) -> dict[str, int]:
    return {
        "weights": size.weights,
        "optimizer": size.optimizer,
        "gradients": gradients,
        "activations": activations,
        "logits and loss": logits,
        "communication": communication,
    }


def _kept_activations(size: TensorSizes, state: RankState) -> int:
    """Return the bytes that the rank stores for other micro-batches and chunks."""
    counts = zip(size.chunks, state.kept, state.queued, strict=True)
    return sum(kept * chunk.kept + queued * len(chunk.layers) * size.queued_by_layer for chunk, kept, queued in counts)


def _gradients(size: TensorSizes, state: RankState, grad_bytes: int, made: int, largest: int = 0) -> int:
    """Return the bytes of all gradients during an action that has computed `made` bytes of its chunk's gradients.

    grad_bytes: bytes per element of a gradient.
    largest: a bucket that is larger than the others. ZeRO stage 2 stores the rank's shard and two whole buckets.
        --exact-layouts also stores partial sums of earlier micro-batches.
    """
    sizes = [
        grad_bytes * chunk.parameters * begun // size.shards
        for chunk, begun in zip(size.chunks, state.begun, strict=True)
    ]
    whole = 0 if size.shards == 1 else min(made, size.bucket + max(size.bucket, largest))
    waiting = size.waiting_sums * sum(sizes)
    second = size.second_tied_gradient * (1 + size.waiting_sums) if all(state.begun) else 0
    return sum(sizes) - sizes[state.chunk] + max(sizes[state.chunk], made // size.shards) + whole + waiting + second


# A moment: its name, gradients, activations inside the action, logits and loss, communication.
Moments = list[tuple[str, int, int, int, int]]


def _forward_moments(size: TensorSizes, state: RankState, grad_bytes: int) -> Moments:
    """Return the moment of the loss. Other forward passes need less than the backward of as many micro-batches."""
    chunk = size.chunks[state.chunk]
    logits = size.residual + size.gathered + size.hidden + max(size.loss, size.head)
    return [("the loss", _gradients(size, state, grad_bytes, 0), chunk.kept, logits, 0)] if chunk.is_last else []


def _backward_moments(size: TensorSizes, state: RankState, grad_bytes: int, by_torch: bool) -> Moments:
    """Return the moments of a chunk's backward. Some schedules compute the weight gradients later."""
    chunk, later, layer = size.chunks[state.chunk], size.defers_weight_gradients, size.layer_backward
    count, together = len(chunk.layers), chunk.recomputed_layers
    stay, queued = count - chunk.offloaded_layers, size.queued_by_layer if later else 0
    from_host = min(chunk.offloaded_layers, 2) * size.kept_by_layer  # an offloaded layer, and the next one
    inputs = size.gathered_input + min(-(-count // together), 2) * size.offloaded_input
    of_layer, tied = (0 if later else grad_bytes * size.layer_parameters), grad_bytes * chunk.tied
    # A bucket of float32 gradients is allocated with its first gradient. A CPU uses the memory only when it is written.
    bucket = min(size.bucket, 4 * size.parameters) if size.on_gpu else 4 * size.layer_parameters
    bucket = 0 if later else bucket
    complete = zip(size.chunks, state.complete, strict=True)
    sent = sum(4 * size.layer_parameters * len(other.layers) for other, is_complete in complete if is_complete)
    sent = sent // size.bucket * size.bucket
    # Buckets that are complete are sent; ZeRO stage 2 waits for each one. torch's DDP sends its own buckets.
    sent = 0 if by_torch else size.communication(sent if size.shards == 1 else min(sent, size.bucket))
    # If this rank has both ends of the model, the head's gradient waits for the embedding's gradient.
    head = 0 if chunk.tied or not chunk.is_last else size.head * (3 if by_torch else 1)

    def gradients(layers: int, least: int = bucket) -> int:
        return _gradients(size, state, grad_bytes, tied + max(layers * of_layer, least))

    last = chunk.kept + chunk.recomputed + inputs + layer + (0 if stay else from_host)
    first = (count - 1) * queued + size.first_layer + chunk.mask + layer
    in_groups = (count - together) * queued + size.kept_input + size.gathered_input + chunk.recomputed + layer
    moments = [
        ("backward of the last layer", gradients(0), last, head, 0),
        (
            "backward of the last offloaded layer",
            gradients(stay),
            size.residual + from_host + layer,
            head,
            sent,
        ),
        ("backward of the first layer", gradients(count), first, head, sent),
        (
            "backward of the first layers that are recomputed together",
            gradients(count - together),
            in_groups,
            head,
            sent,
        ),
    ]
    if chunk.is_first:
        made = grad_bytes * chunk.parameters - (grad_bytes * size.layer_parameters * count if later else 0)
        made = _gradients(size, state, grad_bytes, made, size.embedding_gradient)
        made += 0 if state.begun[state.chunk] else size.second_tied_gradient  # otherwise it already exists
        in_float32 = 0 if size.element == 4 else 2 * size.residual
        moments.append(("backward of the embeddings", made, count * queued + size.residual + in_float32, head, sent))
    if chunk.tied:
        moments.append(("backward of the head", gradients(0, 0), chunk.kept, size.hidden + size.head, 0))
    return moments
