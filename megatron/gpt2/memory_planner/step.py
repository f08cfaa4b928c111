"""What the memory of one rank holds in a training step, by part, from the flags alone: nothing is allocated.

A step is fullest at one of some moments: in the loss, when everything is kept for backward; at the first layer that
backward meets, which adds its own; at the first that comes back from the host's memory; at the last one, when the
gradients are nearly all there; at the embeddings, when they are; and in the optimizer. The sums below say when each
large tensor of `mpu/` and `megatron/` is made and when it is freed, `sizes.py` how large it is.
docs/explanation/memory.md explains them, `megatron_2019.py` has those of 2019's program, and tests hold them against
what torch allocates.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from megatron.gpt2.memory_planner.sizes import Setting, Sizes

PARTS = ("weights", "gradients", "optimizer", "activations", "logits and loss", "communication", "--async-save", "heap",
         "fixed")

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


def expected(setting: Setting) -> Memory:
    """The fullest moment of a training step."""
    size, on_gpu = Sizes(setting), setting.device == "cuda"
    moment, large = max(_moments(setting, size).items(), key=lambda item: sum(item[1].values()))
    in_order, passing = min(large["activations"], size.kept_by_all_layers), sum(large.values())
    passing -= large["weights"] + large["optimizer"] + large["gradients"] + in_order
    holes = sum(share * held for share, held in zip(HOLES, (in_order, large["gradients"], passing), strict=True))
    parts = {**dict.fromkeys(PARTS, 0), **large, "--async-save": 0 if on_gpu else size.checkpoint,
             "heap": int(holes) if setting.keeps_freed and not on_gpu else 0,
             "fixed": setting.fixed + _libraries(setting)}
    # Beside a GPU's: the offloaded optimizer, what is parked, and the copy that is written while training goes on.
    return Memory(moment, parts, size.state - size.optimizer + size.parked + size.checkpoint if on_gpu else 0)


def _moments(setting: Setting, size: Sizes) -> dict[str, dict[str, int]]:
    """What changes and what stays, at each moment, without heap and fixed."""
    parallel = setting.config.parallel
    # Without the reducer's own way for the tied matrix autograd adds the gradients of head and embedding.
    by_torch = parallel.DDP_impl == "torch" and setting.data_parallel_size > 1
    gradients = 4 * size.parameters
    shards = setting.data_parallel_size if parallel.shard_gradients else 1
    before = gradients // shards if setting.micro_batches > 1 else 0  # those of the micro-batches before
    state = {"weights": size.weights, "optimizer": size.optimizer}
    kept, group = size.kept_by_all_layers, size.recomputed_together
    steps = -(-size.layers // size.layers_together)
    of_layers = 4 * (size.parameters - size.outside_of_layers)
    # Gradients in float32 are allocated by the bucket, with its first one. A CPU's memory is taken when it is written.
    bucket = min(size.bucket, gradients) if size.on_gpu else of_layers // size.layers
    complete = of_layers // size.bucket * size.bucket  # buckets that are on their way, of which stage 2 waits for each
    in_flight = size.communication(complete if shards == 1 else min(complete, size.bucket))
    head = size.head * (3 if by_torch else 1)
    if by_torch:
        # Parameters' own gradients and DDP's buckets; the float32 ones come when backward is over.
        gradients, of_layers, before = (2 * size.element * x // 4 for x in (gradients, of_layers, before))
        in_flight = 0

    def held(made: int, largest: int = size.bucket) -> int:
        """What exists when backward has made so much. ZeRO stage 2 has a rank's part of it, and two whole buckets."""
        return max(before, made) if shards == 1 else max(before, made // shards) + min(made, size.bucket + largest)

    return {
        "the loss": {
            **state, "gradients": before, "activations": size.batch + kept,
            "logits and loss": size.residual + size.gathered + size.hidden + max(size.loss, size.head)},
        "backward of the last layer": {
            **state, "gradients": held(bucket),
            "activations": size.batch + kept + group + size.brought_back(min(steps, 2)) + size.backward_of_a_layer + (
                0 if size.layers_that_stay else size.layers_brought_back), "logits and loss": head},
        "backward of the last layer that was parked": {
            **state, "communication": in_flight, "logits and loss": head,
            "gradients": held(max(of_layers // size.layers * size.layers_that_stay, bucket)),
            "activations": size.batch + size.residual + size.layers_brought_back + size.backward_of_a_layer},
        "backward of the first layer": {
            **state, "gradients": held(max(of_layers, bucket)), "communication": in_flight,
            "activations": size.batch + size.kept_by_the_first_layer + size.backward_of_a_layer,
            "logits and loss": head},
        "backward of the first layers that are recomputed together": {
            **state, "communication": in_flight, "logits and loss": head,
            "gradients": held(max(of_layers - of_layers // size.layers * size.layers_together, bucket)),
            "activations": size.batch + size.input_part + size.brought_back(0) + group + size.backward_of_a_layer},
        "backward of the embeddings": {
            **state, "gradients": held(gradients, max(size.bucket, size.embedding_gradient)),
            "communication": in_flight, "logits and loss": head,
            "activations": size.batch + size.residual + (0 if size.element == 4 else 2 * size.residual)},
        "the optimizer": {
            **state, "gradients": 4 * size.parameters // shards + (gradients if by_torch else 0),
            "communication": 0 if by_torch or shards > 1 else size.communication(gradients),
            "activations": size.batch},
    }


def _libraries(setting: Setting) -> int:
    if setting.device == "cuda":
        return 0
    train = setting.config.train
    return LIBRARIES + (COMPILER if train.recompute_granularity == "full" or train.compile else 0)
