"""The sizes of the large tensors of a training step on one rank, computed from the flags.

A rank of a pipeline holds one or several chunks of successive layers. Without a pipeline, one chunk is the whole model.

Legend: b micro-batch, s sequence, t = b · s tokens, h hidden, f width inside the MLP, n heads of a rank, v rows of a
rank's part of the padded vocabulary, p tensor-parallel size, e bytes of an element of the model's precision. Sizes are
bytes.
"""

import functools
from dataclasses import dataclass
from functools import cached_property

import torch

import mpu
from megatron.gpt2.config import Config
from megatron.gpt2.extensions.exact.reducer import max_waiting_sums
from megatron.gpt2.model.gpt2 import count_parameters
from megatron.gpt2.optimizer.bucket_reducer import choose_bucket_size
from mpu import kernels
from mpu.cross_entropy import chunk_size_for
from mpu.kernels import attention
from mpu.kernels.cross_entropy import products_at_once, rows_in_cache

# Per token of a step: text, tokens and labels in int64, mask and weight in float32.
BATCH_BYTES_PER_TOKEN = 40
_count_parameters = functools.lru_cache(maxsize=64)(count_parameters)


@dataclass(frozen=True)
class MemoryInputs:
    """The inputs of an estimate.

    config: must have the vocabulary size.
    fixed: bytes in use before the model exists.
    keeps_freed: glibc keeps freed memory (`megatron.gpt2.device.set_allocator`).
    consumed_samples: before the first step, for batch sizes that grow.
    """

    config: Config
    world_size: int
    device: str  # cpu or cuda
    dtype: torch.dtype
    fixed: int
    keeps_freed: bool = False
    consumed_samples: int = 0

    def __post_init__(self) -> None:
        assert self.config.model.vocab_size is not None
        assert self.num_microbatches  # raises ValueError if the ranks cannot share the batch

    @property
    def stages(self) -> int:
        """Ranks of a pipeline. Each holds a stage, which has several chunks if the schedule is interleaved."""
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
        """Micro-batches of each rank in a step of the final batch, which needs the most memory."""
        return self.config.num_microbatches(self.world_size, self.consumed_samples)


@dataclass(frozen=True)
class ChunkSizes:
    """Successive layers on a rank.

    is_first: includes the embeddings.
    is_last: includes the final norm, the head and the loss.
    parameters: all of these.
    tied: parameters of the tied matrix if the head has a separate gradient.

    kept: bytes that a micro-batch stores between forward and backward.
    mask: the mask of the embeddings' dropout.
    offloaded_layers, offloaded: layers and bytes in host memory during that time.
    recomputed_layers: layers that full recomputation recomputes together.
    recomputed: the bytes that they store then.
    """

    layers: range
    is_first: bool
    is_last: bool
    parameters: int
    tied: int
    kept: int
    mask: int
    offloaded_layers: int
    offloaded: int
    recomputed_layers: int
    recomputed: int


class TensorSizes:
    """The large tensors of one rank. All sizes except `parameters` are bytes. stage: the rank's pipeline stage.

    parameters: their number.
    residual: hidden states [t, h] between layers.
    gathered: those of all sequence shards, for the head.
    bucket: bytes of gradients that are allocated together.
    head: the head's gradient [v/p, h] in the model's precision.
    shards: this rank's shards of gradients.
    waiting_sums: stored partial sums with --exact-layouts.
    second_tied_gradient: the embedding's gradient of the tied matrix.
    state: masters (if they are not the weights) and two moments, with Muon one for matrices, on any device.
    optimizer: the part of `state` on this device. Offloading adds masters, their rounded copy and a copy of the
        gradients.
    checkpoint: the copy that --async-save writes during training, on the first data-parallel rank.

    kept_by_layer: stored by a layer for backward, its output included.
    layer_backward: temporary bytes of a layer's backward: the gradients of its output, inside the MLP and of a weight,
        and GELU's recomputed output; or, if larger, the matrices of attention.
    first_layer: `kept_by_layer` and the layer's input.
    queued_by_layer: the inputs and output gradients of the linear layers, which wait for the weight gradients if a
        schedule computes these later.

    kept_input: bytes that a rank stores of the input of a step of full recomputation.
    gathered_input: the gathered input, if it is partitioned.
    offloaded_input: the input in host memory.
    loss: the gradient of the head's weight and a chunk of the logits, see `_LinearCrossEntropy`.
    """

    def __init__(self, inputs: MemoryInputs, stage: int = 0) -> None:
        config, on_gpu = inputs.config, inputs.device == "cuda"
        model, train, parallel = config.model, config.train, config.parallel
        assert model.vocab_size is not None
        self._inputs, self.on_gpu = inputs, on_gpu
        p, ranks = parallel.model_parallel_size, inputs.data_parallel_size
        is_exact = parallel.exact_layouts is not None
        self.element = e = inputs.dtype.itemsize
        s, h, f = config.data.seq_length, model.hidden_size, model.ffn_size // p
        t, n = train.micro_batch_size * s, model.num_attention_heads // p
        v = mpu.padded_vocab_size(model.vocab_size, model.make_vocab_size_divisible_by, p) // p
        full, selective = (train.recompute_granularity == granularity for granularity in ("full", "selective"))

        hidden, wide, own = e * t * h, e * t * f, e * t * h // p
        self.hidden, self.residual = hidden, own if parallel.sequence_parallel else hidden
        residual = self.residual
        self.gathered = 0 if residual == hidden else hidden
        self.batch = BATCH_BYTES_PER_TOKEN * inputs.num_microbatches * t
        self.weight_gradient, self.head, self.embedding_gradient = e * f * h, e * v * h, 4 * v * h
        self.loss = _loss(inputs, t, v, h)
        self.defers_weight_gradients = config.pipeline_schedule(1).splits_backward
        self.bucket = 4 * max(choose_bucket_size(parallel.ddp_bucket_size, ranks), f * h)
        self.shards = ranks if parallel.shard_gradients else 1

        # A mask of hidden dropout has 1 byte per element on a GPU, and factors on a CPU. Counter-based masks are not
        # stored.
        mask = residual // e if on_gpu else residual
        mask = mask if model.hidden_dropout > 0 and train.dropout_rng != "counter" else 0
        again = wide if selective else 0
        # The backward of attention begins after the MLP's activations are freed.
        kept_by_attention, of_attention = _attention(inputs, t, s, n, own, residual - 2 * wide + again)
        norms_and_gelu = 0 if selective else 2 * residual + wide
        self.kept_by_layer = 2 * residual + norms_and_gelu + 4 * own + kept_by_attention + wide + 2 * mask
        self.layer_backward = max(residual + wide + again + self.weight_gradient, of_attention)
        self.first_layer = self.kept_by_layer + residual
        self.queued_by_layer = 4 * hidden + 4 * own + 2 * wide
        is_split = parallel.partition_activations and not parallel.sequence_parallel and p > 1 and full
        is_offloaded = parallel.checkpoint_in_cpu and on_gpu and full
        self.kept_input = -(-residual // p) if is_split else residual
        self.gathered_input, self.offloaded_input = residual if is_split else 0, self.kept_input if is_offloaded else 0

        positions = model.max_position_embeddings
        outside = (v + positions + 2) * h
        self.layer_parameters = (_count_parameters(model, p)[1] - outside) // model.num_layers  # parameters
        layers = config.layers_of_stages()[stage :: inputs.stages]
        both_ends = layers[0].start == 0 and layers[-1].stop == model.num_layers
        self.chunks = []
        for chunk in layers:
            count, is_first, is_last = len(chunk), chunk.start == 0, chunk.stop == model.num_layers
            tied = v * h if is_last and (is_exact or not both_ends) else 0
            ends = ((v + positions) * h if is_first else 0) + (2 * h if is_last else 0) + (0 if both_ends else tied)
            steps, together = -(-count // train.recompute_num_layers), min(train.recompute_num_layers, count)
            offloaded = len(range(chunk.start, min(chunk.stop, parallel.cpu_offloading_num_layers if on_gpu else 0)))
            if full:
                kept, in_other_form = 0 if is_offloaded else steps * self.kept_input, is_offloaded or is_split
            else:
                kept, in_other_form = (count - offloaded) * self.kept_by_layer, offloaded > 0
            # The received hidden states stay until backward, also if the layers store them in a different form.
            kept += residual if in_other_form and not is_first else 0
            # Only the last chunk stores the output of its last layer; the other chunks send it to the next stage.
            kept += (residual if is_last else 0) + (mask if is_first else 0)
            self.chunks.append(
                ChunkSizes(
                    layers=chunk,
                    is_first=is_first,
                    is_last=is_last,
                    parameters=count * self.layer_parameters + ends,
                    tied=tied,
                    kept=kept,
                    mask=mask if is_first else 0,
                    offloaded_layers=offloaded,
                    offloaded=steps * self.offloaded_input + offloaded * self.kept_by_layer,
                    recomputed_layers=together,
                    recomputed=together * self.kept_by_layer if full else 0,
                )
            )
        self.parameters = sum(chunk.parameters for chunk in self.chunks)
        self.weights = e * self.parameters
        self.waiting_sums = max_waiting_sums(inputs.num_microbatches, ranks) if is_exact else 0
        self.second_tied_gradient = self.embedding_gradient if is_exact and both_ends else 0
        shared_by = ranks if parallel.use_distributed_optimizer else 1
        owned = -(-self.parameters // shared_by)
        master, rounded = (0, 0) if e == 4 else (4, e)
        matrices = sum(map(len, layers)) * (4 * h // p + 2 * f) * h if config.optimizer.optimizer == "muon" else 0
        saved = 4 * matrices // shared_by  # a matrix has one moment
        self.state = (8 + (8 + rounded if parallel.cpu_offload_optimizer else master)) * owned - saved
        self.optimizer = 0 if parallel.cpu_offload_optimizer and on_gpu else self.state
        copied = self.weights + (0 if config.checkpoint.no_save_optim else 12 * owned - saved)
        self.checkpoint = copied if config.checkpoint.async_save else 0

    def communication(self, gradients: int) -> int:
        """Return the extra bytes while gradients of `gradients` bytes are sent: a copy in bf16 and gloo's copy, or with
        --exact-layouts the received partial sums."""
        parallel = self._inputs.config.parallel
        if self._inputs.data_parallel_size == 1:
            return 0
        if parallel.exact_layouts is not None:
            return gradients
        sent = gradients // 2 if parallel.grad_reduce_in_bf16 else 0
        copied = parallel.use_distributed_optimizer and not self.on_gpu  # gloo reduces a copy of the whole bucket
        return sent + ((sent or gradients) if copied else 0)


def _attention(inputs: MemoryInputs, t: int, s: int, n: int, own: int, free: int) -> tuple[int, int]:
    """Return the bytes that a layer's attention stores in addition to QKV and its output (each [t, h/p] has `own`
    bytes), and the bytes of its backward, which include `free` bytes of other tensors."""
    train, dropout = inputs.config.train, inputs.config.model.attention_dropout
    device, dtype, e, on_gpu = inputs.device, inputs.dtype, inputs.dtype.itemsize, inputs.device == "cuda"
    heads, is_seeded = t // s * n, train.dropout_rng == "counter"  # then masks are recomputed and not stored
    # Bytes of the scores [b, n/p, s, s] if they are materialised; 0 if a kernel computes them by blocks. torch's
    # formula uses float32.
    is_materialised = train.attention_backend == "unfused" if on_gpu else dropout > 0 and not is_seeded
    scores = heads * s * s * 4 if is_materialised else 0
    if is_seeded and dropout > 0 and kernels.has_seeded_attention(device):
        size, block = attention.compute_dtype(dtype).itemsize, min(attention.SEEDED_BLOCK, s)
        at_once = min(attention.seeded_heads_at_once(s), heads)  # for the scores and the masks
        blocks = free + 11 * own * size // e + (4 * size + 2) * at_once * block * s
        return size * heads * attention.saved_probabilities(s), max(scores, blocks)
    by_blocks = not on_gpu and dtype == torch.bfloat16
    blocks = 0
    if by_blocks and dropout == 0:  # QKV and their gradients, twice, and the scores of a block
        at_once, block = min(attention.heads_at_once(s), heads), min(attention.BLOCK, s)
        blocks = free + 11 * own + 3 * e * at_once * block * s
    if scores:  # the softmax, and with dropout its mask (1 byte per element on a GPU) and their product
        with_dropout = (scores // 4 if on_gpu else scores) + scores if dropout > 0 else 0
        return scores + with_dropout + 3 * own * 4 // e, max(scores, blocks)
    return 0 if by_blocks else 4 * t * n, blocks  # the log-sum-exp of each row


def _loss(inputs: MemoryInputs, t: int, v: int, h: int) -> int:
    """Return the bytes of the head's weight gradient and of a chunk of the logits, see `_LinearCrossEntropy`."""
    matrix, e, on_gpu = v * h, inputs.dtype.itemsize, inputs.device == "cuda"
    chunk = chunk_size_for(t)
    products = -(-t // chunk)
    together = products_at_once(inputs.dtype, inputs.device) or products
    # With more products the sum is in float32. A CPU also needs a float32 copy of the next product.
    summed = e * matrix if products <= together else (4 + e + (0 if on_gpu else 4)) * matrix
    chunk = min(chunk, t)
    in_float32 = chunk if on_gpu else min(rows_in_cache(v), chunk)
    return max(summed, min(summed, (4 + e) * matrix) + (e * chunk + 4 * in_float32) * v)
