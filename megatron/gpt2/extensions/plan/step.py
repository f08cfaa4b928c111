"""What the memory of one rank holds in a training step, by part, from the flags alone: nothing is allocated.

A step is fullest at one of some moments: in the loss, when everything is kept for backward; at the first layer that
backward meets, which adds its own; at the first that comes back from the host's memory; at the last one, when the
gradients are nearly all there; at the embeddings, when they are; and in the optimizer. The sums below say when each
large tensor of `mpu/` and `megatron/` is made and when it is freed, `sizes.py` how large it is. In a pipeline all but
the last are moments of one chunk and one micro-batch, and `pipelines.py` says what a rank holds of the others then.
docs/explanation/memory.md explains them, `megatron_2019.py` has those of 2019's program, and tests hold them against
what torch allocates.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megatron.gpt2.extensions.plan.pipelines import Beside, Situation, situations
from megatron.gpt2.extensions.plan.setting import Setting
from megatron.gpt2.extensions.plan.sizes import Sizes

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


def expected(setting: Setting, stage: int | None = None) -> Memory:
    """The fullest moment of a training step, on a rank that holds `stage` of the pipeline (default: the fullest)."""
    if stage is None:
        return max(of_stages(setting), key=lambda memory: memory.total)
    size, on_gpu = Sizes(setting, stage), setting.device == "cuda"
    found = situations(setting.config, setting.micro_batches, stage)
    moment, large, kept = max(_moments(setting, size, found), key=lambda item: sum(item[1].values()))
    in_order, passing = min(large["activations"], kept), sum(large.values())
    passing -= large["weights"] + large["optimizer"] + large["gradients"] + in_order
    holes = sum(share * held for share, held in zip(HOLES, (in_order, large["gradients"], passing), strict=True))
    parts = {
        **dict.fromkeys(PARTS, 0),
        **large,
        "--async-save": 0 if on_gpu else size.checkpoint,
        "heap": int(holes) if setting.keeps_freed and not on_gpu else 0,
        "fixed": setting.fixed + _libraries(setting),
    }
    # Beside a GPU's: the offloaded optimizer, what is parked, and the copy that is written while training goes on.
    parked = max(
        sum(
            (count + (chunk == now.chunk)) * size.parked(layers)
            for chunk, (layers, count) in enumerate(zip(size.chunks, now.beside.kept, strict=True))
        )
        for now in found
    )
    return Memory(
        moment + (f" of stage {stage}" if setting.stages > 1 else ""),
        parts,
        size.state - size.optimizer + parked + size.checkpoint if on_gpu else 0,
    )


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
    state = {"weights": size.weights, "optimizer": size.optimizer}
    by_torch = setting.config.parallel.DDP_impl == "torch" and setting.data_parallel_size > 1
    for now in found:
        kept = _kept(size, now.beside) + size.kept_by(size.chunks[now.chunk])
        of_action = {"F": _of_forward, "B": _of_backward, "W": _of_weights}[now.kind]
        for moment, parts in of_action(size, now, 2 * size.element if by_torch else 4, by_torch).items():
            yield moment, {**state, **parts}, kept
    gradients = 4 * size.parameters + (size.second_tied if setting.data_parallel_size > 1 else 0)
    yield (
        "the optimizer",
        {
            **state,
            "gradients": gradients // size.shards + (2 * size.element * size.parameters if by_torch else 0),
            "communication": 0 if by_torch or size.shards > 1 else size.communication(gradients),
            "activations": size.batch,
        },
        sum(map(size.kept_by, size.chunks)),
    )


def _kept(size: Sizes, beside: Beside) -> int:
    """What the rank keeps for other micro-batches and chunks."""
    counts = zip(size.chunks, beside.kept, beside.queued, strict=True)
    return sum(kept * size.kept_by(chunk) + queued * size.queued_by(chunk) for chunk, kept, queued in counts)


def _gradients(size: Sizes, now: Situation, each: int, made: int, largest: int = 0) -> int:
    """Those that exist during an action, of `each` bytes, when it has made `made` bytes of its chunk's. ZeRO stage 2
    has a rank's part of them, and two whole buckets. largest: a bucket, where that is larger than the others. Under
    --exact-layouts sums of earlier micro-batches wait beside them."""
    sizes = [
        each * size.parameters_of(chunk) * begun // size.shards
        for chunk, begun in zip(size.chunks, now.beside.begun, strict=True)
    ]
    whole = 0 if size.shards == 1 else min(made, size.bucket + max(size.bucket, largest))
    waiting = size.waiting_sums * sum(sizes)
    second = size.second_tied * (1 + size.waiting_sums) if all(now.beside.begun) else 0
    return sum(sizes) - sizes[now.chunk] + max(sizes[now.chunk], made // size.shards) + whole + waiting + second


def _of_forward(size: Sizes, now: Situation, each: int, by_torch: bool) -> dict[str, dict[str, int]]:
    """Nothing where there is no loss: the backward of as many micro-batches is fuller."""
    chunk = size.chunks[now.chunk]
    return (
        {}
        if not size.is_last(chunk)
        else {
            "the loss": {
                "gradients": _gradients(size, now, each, 0),
                "activations": _held(size, now) + size.kept_by(chunk),
                "logits and loss": size.residual + size.gathered + size.hidden + max(size.loss, size.head),
            }
        }
    )


def _of_backward(size: Sizes, now: Situation, each: int, by_torch: bool) -> dict[str, dict[str, int]]:
    """Of one chunk. each: bytes of a gradient. Where the weights' gradients come later, backward makes few."""
    chunk, later = size.chunks[now.chunk], size.makes_weights_later
    held, kept, group = _held(size, now), size.kept_by(chunk), size.recomputed_together(chunk)
    together = size.layers_together(chunk)
    steps = -(-len(chunk) // together)
    of_layer, tied = (0 if later else each * size.of_a_layer), each * size.head_comes_first(chunk)
    # Gradients in float32 are allocated by the bucket, with its first one. A CPU's memory is taken when it is written.
    bucket = min(size.bucket, 4 * size.parameters) if size.on_gpu else 4 * size.of_a_layer
    if later:
        bucket = 0
    complete = sum(
        4 * size.of_a_layer * len(layers)
        for layers, is_complete in zip(size.chunks, now.beside.complete, strict=True)
        if is_complete
    )
    complete = complete // size.bucket * size.bucket
    # Of buckets that are complete, of which stage 2 waits for each. torch's DDP sends its own.
    in_flight = 0 if by_torch else size.communication(complete if size.shards == 1 else min(complete, size.bucket))
    # With both ends of the model on this rank, the head's gradient waits for that of the embeddings.
    head = 0 if size.head_comes_first(chunk) or not size.is_last(chunk) else size.head * (3 if by_torch else 1)

    def gradients(layers: int, least: int) -> int:
        return _gradients(size, now, each, tied + max(layers * of_layer, least))

    def queued(but: int) -> int:
        return size.queued_by(chunk, but) if later else 0

    moments = {
        "backward of the last layer": {
            "gradients": gradients(0, bucket),
            "activations": held
            + kept
            + group
            + size.brought_back(min(steps, 2))
            + size.backward_of_a_layer
            + (0 if size.layers_that_stay(chunk) else size.layers_brought_back(chunk)),
            "logits and loss": head,
        },
        "backward of the last layer that was parked": {
            "communication": in_flight,
            "logits and loss": head,
            "gradients": gradients(size.layers_that_stay(chunk), bucket),
            "activations": held + size.residual + size.layers_brought_back(chunk) + size.backward_of_a_layer,
        },
        "backward of the first layer": {
            "gradients": gradients(len(chunk), bucket),
            "communication": in_flight,
            "activations": held + queued(1) + size.kept_by_the_first_layer(chunk) + size.backward_of_a_layer,
            "logits and loss": head,
        },
        "backward of the first layers that are recomputed together": {
            "communication": in_flight,
            "logits and loss": head,
            "gradients": gradients(len(chunk) - together, bucket),
            "activations": held
            + queued(together)
            + size.input_part
            + size.brought_back(0)
            + group
            + size.backward_of_a_layer,
        },
    }
    if size.is_first(chunk):
        made = each * size.parameters_of(chunk) - (each * size.of_a_layer * len(chunk) if later else 0)
        second = 0 if now.beside.begun[now.chunk] else size.second_tied  # else it is there already
        moments["backward of the embeddings"] = {
            "gradients": _gradients(size, now, each, made, size.embedding_gradient) + second,
            "communication": in_flight,
            "logits and loss": head,
            "activations": held + queued(0) + size.residual + (0 if size.element == 4 else 2 * size.residual),
        }
    if size.head_comes_first(chunk):
        moments["backward of the head"] = {
            "gradients": gradients(0, 0),
            "activations": held + kept,
            "logits and loss": size.hidden + size.head,
        }
    return moments


def _of_weights(size: Sizes, now: Situation, each: int, by_torch: bool) -> dict[str, dict[str, int]]:
    """The weights' gradients of one chunk, where they come after its backward."""
    chunk = size.chunks[now.chunk]
    return {
        "the gradients of weights": {
            "gradients": _gradients(size, now, each, each * size.parameters_of(chunk)),
            "activations": _held(size, now) + size.queued_by(chunk) + size.a_weight_gradient,
        }
    }


def _held(size: Sizes, now: Situation) -> int:
    """Activations that are no part of the action itself."""
    return size.batch + _kept(size, now.beside) + now.beside.transfers * size.residual


def _libraries(setting: Setting) -> int:
    if setting.device == "cuda":
        return 0
    train = setting.config.train
    return LIBRARIES + (COMPILER if train.recompute_granularity == "full" or train.compile else 0)
