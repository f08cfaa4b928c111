"""The large tensors of a training step on one rank: how many bytes each has, from the flags alone.

A rank of a pipeline holds one or several chunks of successive layers. Without a pipeline the one chunk is the whole
model.

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
from megatron.gpt2.extensions.exact.reducer import sums_kept
from megatron.gpt2.model.gpt2 import count_parameters
from megatron.gpt2.optimizer.gradient_reducer import bucket_size
from mpu import kernels
from mpu.cross_entropy import chunk_size_for
from mpu.kernels import attention
from mpu.kernels.cross_entropy import products_at_once, rows_in_cache

# What a token of a step is as numbers: text, tokens and labels in int64, mask and weight in float32.
BATCH = 40
_count_parameters = functools.lru_cache(maxsize=64)(count_parameters)


@dataclass(frozen=True)
class Setting:
    """All that memory depends on. config: with the vocabulary's size. fixed: bytes that are there before the model is.
    keeps_freed: glibc keeps what is freed (`megatron.gpt2.device.set_allocator`). consumed_samples: before the first
    step, from which a growing batch follows."""

    config: Config
    world_size: int
    device: str  # cpu or cuda
    dtype: torch.dtype
    fixed: int
    keeps_freed: bool = False
    consumed_samples: int = 0

    def __post_init__(self) -> None:
        assert self.config.model.vocab_size is not None
        assert self.micro_batches  # raises ValueError where the batch does not fit the ranks

    @property
    def stages(self) -> int:
        """Ranks of a pipeline. Each holds a stage, which is several chunks of layers if the schedule is interleaved."""
        return self.config.parallel.pipeline_model_parallel_size

    def stage_of(self, rank: int) -> int:
        """The stage that `rank` of the whole run holds."""
        return rank // (self.world_size // self.stages)

    @property
    def data_parallel_size(self) -> int:
        """Ranks that share the data."""
        return self.config.data_parallel_size(self.world_size)

    @cached_property
    def micro_batches(self) -> int:
        """Micro-batches of each rank in a step of the final batch, which needs the most memory."""
        return self.config.micro_batches(self.world_size, self.consumed_samples)


@dataclass(frozen=True)
class Chunk:
    """Successive layers on a rank. is_first: it has the embeddings. is_last: it has the final norm, the head and the
    loss. parameters: with those. tied: parameters of the tied matrix, where the head's gradient does not wait for the
    embedding's.

    kept: what is kept of a micro-batch between forward and backward. mask: of the embeddings' dropout. parked_layers,
    parked: what is in the host's memory meanwhile. together: layers of one step of full recomputation; again: what it
    makes again for one of its steps.
    """

    layers: range
    is_first: bool
    is_last: bool
    parameters: int
    tied: int
    kept: int
    mask: int
    parked_layers: int
    parked: int
    together: int
    again: int


class Sizes:
    """The large tensors of one rank, in bytes unless a name says otherwise. stage: of the pipeline, which this rank
    holds.

    parameters: a number. residual: hidden states [t, h] as they are between layers; gathered: from all shards, for the
    head. bucket: the gradients that exist from a bucket's first one on. head: the gradient of [v/p, h], rounded.
    shards: of gradients. waiting_sums: under --exact-layouts the sums of gradients that wait for others of their size;
    second_tied: the embedding's gradient of the tied matrix. state: masters, where they are not the weights themselves,
    and two moments, wherever they are; optimizer: those on the device. Offloaded masters always exist, with their
    rounded copy and a copy of the gradients. checkpoint: the copy that --async-save writes while training goes on, of
    the first data-parallel rank.

    kept_by_a_layer: what one layer keeps for its backward, its output (the next one's input) included.
    backward_of_a_layer: beside what it kept, the gradients of its output, of what is between the MLP's products, and of
    a weight, and GELU's output where that is made again; or those of the scores, or of attention by blocks.
    of_first_layer: that with its input, which is all that a recomputed layer keeps until its backward begins.
    queued_by_a_layer: what the gradients of its weights still need of a micro-batch after its backward, where they come
    later: inputs and outputs' gradients of the linear layers, the replicated ones whole.
    input_part: what one rank keeps of the input of a step of full recomputation. brought_back: what backward has of one
    beside what is kept, gathered; parked_input: and where inputs are parked, it. loss: the gradient of the head's
    weight as it is summed, and a part of the logits, see `_LinearCrossEntropy`.
    """

    def __init__(self, setting: Setting, stage: int = 0) -> None:
        config, on_gpu = setting.config, setting.device == "cuda"
        model, train, parallel = config.model, config.train, config.parallel
        assert model.vocab_size is not None
        self._setting, self.on_gpu = setting, on_gpu
        p, ranks, is_exact = (
            parallel.model_parallel_size,
            setting.data_parallel_size,
            parallel.exact_layouts is not None,
        )
        self.element = e = setting.dtype.itemsize
        s, h, f = config.data.seq_length, model.hidden_size, model.ffn_size // p
        t, n = train.micro_batch_size * s, model.num_attention_heads // p
        v = mpu.padded_vocab_size(model.vocab_size, model.make_vocab_size_divisible_by, p) // p
        full, selective = (train.recompute_granularity == granularity for granularity in ("full", "selective"))

        hidden, wide, own = e * t * h, e * t * f, e * t * h // p
        self.hidden, self.residual = hidden, own if parallel.sequence_parallel else hidden
        residual = self.residual
        self.gathered = 0 if residual == hidden else hidden
        self.batch = BATCH * setting.micro_batches * t
        self.a_weight_gradient, self.head, self.embedding_gradient = e * f * h, e * v * h, 4 * v * h
        self.loss = _loss(setting, t, v, h)
        self.makes_weights_later = config.schedule(1).splits_backward
        self.bucket = 4 * max(bucket_size(parallel.ddp_bucket_size, ranks), f * h)
        self.shards = ranks if parallel.shard_gradients else 1

        # A mask of hidden dropout: a byte an element on a GPU, the factors on a CPU. Masks by a counter are made again.
        mask = residual // e if on_gpu else residual
        mask = mask if model.hidden_dropout > 0 and train.dropout_rng != "counter" else 0
        again = wide if selective else 0
        # Attention's own matrices come when what the MLP kept is free.
        kept_by_attention, of_attention = _attention(setting, t, s, n, own, residual - 2 * wide + again)
        norms_and_gelu = 0 if selective else 2 * residual + wide
        self.kept_by_a_layer = 2 * residual + norms_and_gelu + 4 * own + kept_by_attention + wide + 2 * mask
        self.backward_of_a_layer = max(residual + wide + again + self.a_weight_gradient, of_attention)
        self.of_first_layer = self.kept_by_a_layer + residual
        self.queued_by_a_layer = 4 * hidden + 4 * own + 2 * wide
        is_split = parallel.partition_activations and not parallel.sequence_parallel and p > 1 and full
        is_parked = parallel.checkpoint_in_cpu and on_gpu and full
        self.input_part = -(-residual // p) if is_split else residual
        self.brought_back, self.parked_input = residual if is_split else 0, self.input_part if is_parked else 0

        positions = model.max_position_embeddings
        outside = (v + positions + 2) * h
        self.of_a_layer = (_count_parameters(model, p)[1] - outside) // model.num_layers  # parameters
        layers = config.layers_of_stages()[stage :: setting.stages]
        both_ends = layers[0].start == 0 and layers[-1].stop == model.num_layers
        self.chunks = []
        for chunk in layers:
            count, is_first, is_last = len(chunk), chunk.start == 0, chunk.stop == model.num_layers
            tied = v * h if is_last and (is_exact or not both_ends) else 0
            ends = ((v + positions) * h if is_first else 0) + (2 * h if is_last else 0) + (0 if both_ends else tied)
            steps, together = -(-count // train.recompute_num_layers), min(train.recompute_num_layers, count)
            parked = len(range(chunk.start, min(chunk.stop, parallel.cpu_offloading_num_layers if on_gpu else 0)))
            if full:
                kept, keeps_another_form = 0 if is_parked else steps * self.input_part, is_parked or is_split
            else:
                kept, keeps_another_form = (count - parked) * self.kept_by_a_layer, parked > 0
            # What another rank has sent stays until backward, also where the layers keep another form of it.
            kept += residual if keeps_another_form and not is_first else 0
            # Of the last layer the output stays only before the final norm: the other chunks send it away.
            kept += (residual if is_last else 0) + (mask if is_first else 0)
            self.chunks.append(
                Chunk(
                    layers=chunk,
                    is_first=is_first,
                    is_last=is_last,
                    parameters=count * self.of_a_layer + ends,
                    tied=tied,
                    kept=kept,
                    mask=mask if is_first else 0,
                    parked_layers=parked,
                    parked=steps * self.parked_input + parked * self.kept_by_a_layer,
                    together=together,
                    again=together * self.kept_by_a_layer if full else 0,
                )
            )
        self.parameters = sum(chunk.parameters for chunk in self.chunks)
        self.weights = e * self.parameters
        self.waiting_sums = sums_kept(setting.micro_batches, ranks) if is_exact else 0
        self.second_tied = self.embedding_gradient if is_exact and both_ends else 0
        owned = -(-self.parameters // (ranks if parallel.use_distributed_optimizer else 1))
        master, rounded = (0, 0) if e == 4 else (4, e)
        self.state = (8 + (8 + rounded if parallel.cpu_offload_optimizer else master)) * owned
        self.optimizer = 0 if parallel.cpu_offload_optimizer and on_gpu else self.state
        copied = self.weights + (0 if config.checkpoint.no_save_optim else 12 * owned)
        self.checkpoint = copied if config.checkpoint.async_save else 0

    def communication(self, gradients: int) -> int:
        """What exists beside gradients of `gradients` bytes that are being sent: their copy in bf16, and gloo's copy; or
        under --exact-layouts what comes from the other ranks."""
        parallel = self._setting.config.parallel
        if self._setting.data_parallel_size == 1:
            return 0
        if parallel.exact_layouts is not None:
            return gradients
        sent = gradients // 2 if parallel.grad_reduce_in_bf16 else 0
        copied = parallel.use_distributed_optimizer and not self.on_gpu  # gloo reduces a copy of all, keeps a part
        return sent + ((sent or gradients) if copied else 0)


def _attention(setting: Setting, t: int, s: int, n: int, own: int, free: int) -> tuple[int, int]:
    """Of a layer's attention: what is kept between queries, keys and values, side by side, and the output, all
    [t, h/p] of `own` bytes; and the matrices of its backward, with what else there is then, `free` bytes."""
    train, dropout = setting.config.train, setting.config.model.attention_dropout
    device, dtype, e, on_gpu = setting.device, setting.dtype, setting.dtype.itemsize, setting.device == "cuda"
    heads, has_keys = t // s * n, train.dropout_rng == "counter"  # then masks are made again, and none is kept
    # One matrix of the scores [b, n/p, s, s], where they are materialised; 0 where a kernel makes them piece by piece.
    # torch's plain formulas take them in float32, ours for a CPU in bf16.
    kernel = kernels.attention_kernel(device, dtype, s, dropout, gradient=True)
    ours = kernel is attention.materialised_attention and attention.computed_in(dtype) == dtype
    is_materialised = train.attention_backend == "unfused" if on_gpu else dropout > 0 and not has_keys
    scores = heads * s * s * (e if ours else 4) if is_materialised else 0
    if has_keys and dropout > 0 and kernels.attention_takes_keys(device):
        size, block = attention.computed_in(dtype).itemsize, min(attention.KEYED_BLOCK, s)
        at_once = min(attention.keyed_heads_at_once(s), heads)  # of the scores, and the masks
        blocks = free + 11 * own * size // e + (4 * size + 2) * at_once * block * s
        return size * heads * attention.kept_pairs(s), max(scores, blocks)
    by_blocks = not on_gpu and dtype == torch.bfloat16
    blocks = 0
    if by_blocks and dropout == 0:  # queries, keys and values and their gradients, twice, and a block's scores
        at_once, block = min(attention.heads_at_once(s), heads), min(attention.BLOCK, s)
        blocks = free + 11 * own + 3 * e * at_once * block * s
    if scores:  # the softmax, and with dropout its mask (a byte an element on a GPU) and their product
        with_dropout = (scores // 4 if on_gpu else scores) + scores if dropout > 0 else 0
        return scores + with_dropout + (0 if ours else 3 * own * 4 // e), max(scores, blocks)
    return 0 if by_blocks else 4 * t * n, blocks  # the log-sums


def _loss(setting: Setting, t: int, v: int, h: int) -> int:
    """The gradient of the head's weight as it is summed, and a part of the logits. See `_LinearCrossEntropy`."""
    matrix, e, on_gpu = v * h, setting.dtype.itemsize, setting.device == "cuda"
    chunk = chunk_size_for(t)
    products = -(-t // chunk)
    together = products_at_once(setting.dtype, setting.device) or products
    # Beyond them the sum is in float32, to which a CPU adds a copy of the next ones in float32.
    summed = e * matrix if products <= together else (4 + e + (0 if on_gpu else 4)) * matrix
    chunk = min(chunk, t)
    in_float32 = chunk if on_gpu else min(rows_in_cache(v), chunk)
    return max(summed, min(summed, (4 + e) * matrix) + (e * chunk + 4 * in_float32) * v)
