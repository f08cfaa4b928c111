"""What the memory of one rank holds in a training step, by part, from the flags alone: nothing is allocated.

A step is fullest at one of some moments: in the loss, when everything is kept for backward; at the first layer that
backward meets, which adds its own; at the first that comes back from the host's memory; at the last one, when the
gradients are nearly all there; at the embeddings, when they are; and in the optimizer. The sums below say when each
large tensor of `mpu/` and `megatron/` is made and when it is freed, `sizes.py` how large it is. In a pipeline all but
the last are moments of one chunk and one micro-batch, and `pipelines.py` says what a rank holds of the others then.
docs/explanation/memory.md explains them, and tests hold them against what torch allocates.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megatron.gpt2.extensions.plan.pipelines import Situation, situations
from megatron.gpt2.extensions.plan.sizes import Setting, Sizes

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

# What a CPU's process takes beside what is resident before the model is made, without the pages of files (torch 2.13):
# buffers of the matrix libraries; and the compiler's Python objects, which torch makes for its checkpoint as well.
LIBRARIES, COMPILER = 24 << 20, 45 << 20
# Of a GPU: CUDA's context and the kernels of torch, NCCL and cuBLAS; 0.4 to 0.8 GB.
CUDA_CONTEXT = 600 << 20
# Blocks that glibc keeps although they fit nothing, as a share of what is freed in the order in which it came (what
# layers keep for backward), of gradients, and of all that comes and goes between: fitted to runs,
# see docs/explanation/memory.md.
HOLES = (0.2, 0.4, 1.2)


@dataclass(frozen=True)
class Memory:
    """Bytes by part at the fullest moment of a step, and in the host's memory beside a GPU's."""

    moment: str
    parts: Mapping[str, int]
    on_host: int = 0

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())

    @property
    def allocated(self) -> int:
        """What torch's allocator counts: the total without what is fixed."""
        return self.total - self.parts["fixed"]


def in_mb(size: float) -> str:
    """Bytes as whole MB of 2^20 bytes: "12,760"."""
    return f"{size / 2**20:,.0f}"


def expected(setting: Setting, stage: int | None = None) -> Memory:
    """The fullest moment of a training step, on a rank that holds `stage` of the pipeline (default: the fullest)."""
    if stage is None:
        return max(of_stages(setting), key=lambda memory: memory.total)
    size, train = Sizes(setting, stage), setting.config.train
    found = situations(setting.config, setting.micro_batches, stage)
    moment, large, kept = max(_moments(setting, size, found), key=lambda item: sum(item[1].values()))
    in_order = min(large["activations"], kept)
    passing = large["activations"] - in_order + large["logits and loss"] + large["communication"]
    holes = sum(share * held for share, held in zip(HOLES, (in_order, large["gradients"], passing), strict=True))
    name = moment + (f" of stage {stage}" if setting.stages > 1 else "")
    if size.on_gpu:
        # In the host's memory: the offloaded optimizer, what is parked, and the copy that is written meanwhile.
        parked = max(
            sum(
                (count + (number == now.chunk)) * chunk.parked
                for number, (chunk, count) in enumerate(zip(size.chunks, now.kept, strict=True))
            )
            for now in found
        )
        on_host = size.state - size.optimizer + parked + size.checkpoint
        return Memory(name, dict.fromkeys(PARTS, 0) | large | {"fixed": setting.fixed}, on_host)
    compiler = COMPILER if train.recompute_granularity == "full" or train.compile else 0
    of_process = {
        "--async-save": size.checkpoint,
        "heap": int(holes) if setting.keeps_freed else 0,
        "fixed": setting.fixed + LIBRARIES + compiler,
    }
    return Memory(name, dict.fromkeys(PARTS, 0) | large | of_process)


def at_rest(setting: Setting) -> int:
    """What the first stage needs at least: in the optimizer, without activations."""
    size = Sizes(setting)
    return size.weights + size.optimizer + 4 * size.parameters // size.shards + setting.fixed


def of_stages(setting: Setting) -> list[Memory]:
    """The fullest moment of each stage of the pipeline."""
    return [expected(setting, stage) for stage in range(setting.stages)]


def _moments(setting: Setting, size: Sizes, found: list[Situation]) -> Iterator[tuple[str, dict[str, int], int]]:
    """Moments of a step: what they are called, what changes and what stays, without heap and fixed, and what of the
    activations layers keep for backward."""
    by_torch = setting.config.parallel.DDP_impl == "torch" and setting.data_parallel_size > 1
    for now in found:
        kept, chunk = _kept(size, now), size.chunks[now.chunk]
        held = size.batch + kept + now.transfers * size.residual  # activations that are no part of the action itself
        each = 2 * size.element if by_torch else 4  # bytes of a gradient
        if now.kind == "F":
            rows = _of_forward(size, now, each)
        elif now.kind == "B":
            rows = _of_backward(size, now, each, by_torch)
        else:
            made = _gradients(size, now, each, each * chunk.parameters)
            queued = len(chunk.layers) * size.queued_by_a_layer
            rows = [("the gradients of weights", made, queued + size.a_weight_gradient, 0, 0)]
        for name, gradients, activations, logits, communication in rows:
            yield name, _parts(size, gradients, held + activations, logits, communication), kept + chunk.kept
    gradients = 4 * size.parameters + (size.second_tied if setting.data_parallel_size > 1 else 0)
    sent = 0 if by_torch or size.shards > 1 else size.communication(gradients)
    gradients = gradients // size.shards + (2 * size.element * size.parameters if by_torch else 0)
    yield "the optimizer", _parts(size, gradients, size.batch, 0, sent), sum(chunk.kept for chunk in size.chunks)


def _parts(size: Sizes, gradients: int, activations: int, logits: int, communication: int) -> dict[str, int]:
    return {
        "weights": size.weights,
        "optimizer": size.optimizer,
        "gradients": gradients,
        "activations": activations,
        "logits and loss": logits,
        "communication": communication,
    }


def _kept(size: Sizes, now: Situation) -> int:
    """What the rank keeps for other micro-batches and chunks."""
    counts = zip(size.chunks, now.kept, now.queued, strict=True)
    return sum(
        kept * chunk.kept + queued * len(chunk.layers) * size.queued_by_a_layer for chunk, kept, queued in counts
    )


def _gradients(size: Sizes, now: Situation, each: int, made: int, largest: int = 0) -> int:
    """Those that exist during an action, of `each` bytes, when it has made `made` bytes of its chunk's. ZeRO stage 2
    has a rank's part of them, and two whole buckets. largest: a bucket, where that is larger than the others. Under
    --exact-layouts sums of earlier micro-batches wait beside them."""
    sizes = [
        each * chunk.parameters * begun // size.shards for chunk, begun in zip(size.chunks, now.begun, strict=True)
    ]
    whole = 0 if size.shards == 1 else min(made, size.bucket + max(size.bucket, largest))
    waiting = size.waiting_sums * sum(sizes)
    second = size.second_tied * (1 + size.waiting_sums) if all(now.begun) else 0
    return sum(sizes) - sizes[now.chunk] + max(sizes[now.chunk], made // size.shards) + whole + waiting + second


# A moment: its name, its gradients, its activations beside those that are held anyway, logits and loss, communication.
Rows = list[tuple[str, int, int, int, int]]


def _of_forward(size: Sizes, now: Situation, each: int) -> Rows:
    """Nothing where there is no loss: the backward of as many micro-batches is fuller."""
    chunk = size.chunks[now.chunk]
    logits = size.residual + size.gathered + size.hidden + max(size.loss, size.head)
    return [("the loss", _gradients(size, now, each, 0), chunk.kept, logits, 0)] if chunk.is_last else []


def _of_backward(size: Sizes, now: Situation, each: int, by_torch: bool) -> Rows:
    """Of one chunk. Where the weights' gradients come later, backward makes few."""
    chunk, later, layer = size.chunks[now.chunk], size.makes_weights_later, size.backward_of_a_layer
    count, together = len(chunk.layers), chunk.together
    stay, queued = count - chunk.parked_layers, size.queued_by_a_layer if later else 0
    from_host = min(chunk.parked_layers, 2) * size.kept_by_a_layer  # a layer that was parked, and the one before it
    inputs = size.brought_back + min(-(-count // together), 2) * size.parked_input
    of_layer, tied = (0 if later else each * size.of_a_layer), each * chunk.tied
    # Gradients in float32 are allocated by the bucket, with its first one. A CPU's memory is taken when it is written.
    bucket = min(size.bucket, 4 * size.parameters) if size.on_gpu else 4 * size.of_a_layer
    bucket = 0 if later else bucket
    complete = zip(size.chunks, now.complete, strict=True)
    sent = sum(4 * size.of_a_layer * len(other.layers) for other, is_complete in complete if is_complete)
    sent = sent // size.bucket * size.bucket
    # Of buckets that are complete, of which stage 2 waits for each. torch's DDP sends its own.
    sent = 0 if by_torch else size.communication(sent if size.shards == 1 else min(sent, size.bucket))
    # With both ends of the model on this rank, the head's gradient waits for that of the embeddings.
    head = 0 if chunk.tied or not chunk.is_last else size.head * (3 if by_torch else 1)

    def gradients(layers: int, least: int = bucket) -> int:
        return _gradients(size, now, each, tied + max(layers * of_layer, least))

    last = chunk.kept + chunk.again + inputs + layer + (0 if stay else from_host)
    first = (count - 1) * queued + size.of_first_layer + chunk.mask + layer
    in_groups = (count - together) * queued + size.input_part + size.brought_back + chunk.again + layer
    rows = [
        ("backward of the last layer", gradients(0), last, head, 0),
        (
            "backward of the last layer that was parked",
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
        made = each * chunk.parameters - (each * size.of_a_layer * count if later else 0)
        made = _gradients(size, now, each, made, size.embedding_gradient)
        made += 0 if now.begun[now.chunk] else size.second_tied  # else it is there already
        in_float32 = 0 if size.element == 4 else 2 * size.residual
        rows.append(("backward of the embeddings", made, count * queued + size.residual + in_float32, head, sent))
    if chunk.tied:
        rows.append(("backward of the head", gradients(0, 0), chunk.kept, size.hidden + size.head, 0))
    return rows
