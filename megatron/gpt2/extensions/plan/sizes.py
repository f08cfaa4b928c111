"""The large tensors of a training step on one rank: how many bytes each has, from the flags alone.

A rank of a pipeline holds one or several chunks of successive layers, which are given as ranges. Without a pipeline the
one chunk is the whole model.

Legend: b micro-batch, s sequence, t = b · s tokens, h hidden, f width inside the MLP, n heads, v padded vocabulary, p
tensor-parallel size, e bytes of an element of the model's precision. Sizes are bytes.
"""

import functools

import torch

import mpu
from megatron.gpt2.extensions.exact.reducer import sums_kept
from megatron.gpt2.extensions.plan.setting import Setting
from megatron.gpt2.model.parameters import count_parameters
from megatron.gpt2.optimizer.gradient_reducer import bucket_size
from mpu import kernels
from mpu.cross_entropy import chunk_size_for
from mpu.kernels import attention, attention_keyed
from mpu.kernels.attention import materialised_attention
from mpu.kernels.cross_entropy import products_at_once, rows_in_cache

# What a token of a step is as numbers: text, tokens and labels in int64, mask and weight in float32.
BATCH = 40
_count_parameters = functools.lru_cache(maxsize=64)(count_parameters)


class Sizes:
    """The large tensors of one rank, in bytes unless a name says otherwise. stage: of the pipeline, which this rank
    holds."""

    def __init__(self, setting: Setting, stage: int = 0) -> None:
        config = setting.config
        model, train, parallel = config.model, config.train, config.parallel
        assert model.vocab_size is not None
        self._setting, self._train = setting, train
        self.on_gpu = setting.device == "cuda"
        p = self._p = parallel.model_parallel_size
        self.element = e = setting.dtype.itemsize
        self.chunks = config.layers_of_stages()[stage :: setting.stages]
        self._num_layers, self._s = model.num_layers, config.data.seq_length
        self._tokens = train.micro_batch_size * self._s
        self._heads, self._dropout = model.num_attention_heads // p, (model.attention_dropout, model.hidden_dropout)
        self._keyed = train.dropout_rng == "counter"  # then masks are made again, and none is kept
        self._is_exact = parallel.exact_layouts is not None

        rows = mpu.padded_vocab_size(model.vocab_size, model.make_vocab_size_divisible_by, p) // p
        self._rows, self._h = rows, model.hidden_size
        self._positions = model.max_position_embeddings
        outside = (rows + self._positions + 2) * model.hidden_size
        self.of_a_layer = (_count_parameters(model, p)[1] - outside) // model.num_layers  # parameters
        self.parameters = sum(map(self.parameters_of, self.chunks))
        self.weights = e * self.parameters
        self.batch = BATCH * setting.micro_batches * self._tokens
        self.hidden = e * self._tokens * model.hidden_size  # [t, h]
        self.residual = self.hidden // p if parallel.sequence_parallel else self.hidden
        self.gathered = 0 if self.residual == self.hidden else self.hidden  # from all shards, for the head
        self._wide = e * self._tokens * model.ffn_size // p  # [t, f/p]
        self._wide_weight = model.ffn_size // p * model.hidden_size
        self.a_weight_gradient = e * self._wide_weight
        self.makes_weights_later = config.schedule(1).splits_backward
        # The gradients that exist from a bucket's first one on.
        self.bucket = 4 * max(bucket_size(parallel.ddp_bucket_size, setting.data_parallel_size), self._wide_weight)
        self.embedding_gradient = 4 * rows * model.hidden_size
        self.head = e * rows * model.hidden_size  # the gradient of [v/p, h], rounded
        self.shards = setting.data_parallel_size if parallel.shard_gradients else 1  # of gradients
        # --exact-layouts: sums of gradients that wait for others of their size, and the embedding's of the tied matrix.
        self.waiting_sums = sums_kept(setting.micro_batches, setting.data_parallel_size) if self._is_exact else 0
        self.second_tied = self.embedding_gradient if self._is_exact and self._has_both_ends else 0

    @property
    def _has_both_ends(self) -> bool:
        return self.is_first(self.chunks[0]) and self.is_last(self.chunks[-1])

    def is_first(self, chunk: range) -> bool:
        """Whether the chunk has the embeddings."""
        return chunk.start == 0

    def is_last(self, chunk: range) -> bool:
        """Whether the chunk has the final norm, the head and the loss."""
        return chunk.stop == self._num_layers

    def head_comes_first(self, chunk: range) -> int:
        """Parameters of the tied matrix, where the head's gradient does not wait for the embedding's."""
        return self._rows * self._h if self.is_last(chunk) and (self._is_exact or not self._has_both_ends) else 0

    def parameters_of(self, chunk: range) -> int:
        """Parameters, with what is before the first layer of the model and after the last one."""
        embeddings = (self._rows + self._positions) * self._h if self.is_first(chunk) else 0
        final_norm = 2 * self._h if self.is_last(chunk) else 0
        own_copy = 0 if self._has_both_ends else self.head_comes_first(chunk)
        return len(chunk) * self.of_a_layer + embeddings + final_norm + own_copy

    @property
    def optimizer(self) -> int:
        """Masters, where they are not the weights themselves, and two moments, on the device."""
        return 0 if self._setting.config.parallel.cpu_offload_optimizer and self.on_gpu else self.state

    @property
    def state(self) -> int:
        """Masters and moments, wherever they are. Offloaded: the masters always exist, with their rounded copy and a
        copy of the gradients."""
        e = self.element
        master = 0 if e == 4 else 4
        if self._setting.config.parallel.cpu_offload_optimizer:
            master = 4 + 4 + (0 if e == 4 else e)
        return (master + 8) * self._owned

    @property
    def _owned(self) -> int:
        """Parameters that this rank's optimizer updates."""
        ranks = self._setting.data_parallel_size if self._setting.config.parallel.use_distributed_optimizer else 1
        return -(-self.parameters // ranks)

    @property
    def checkpoint(self) -> int:
        """The copy that --async-save writes while training goes on, of the first data-parallel rank."""
        wanted = self._setting.config.checkpoint
        return (self.weights + (0 if wanted.no_save_optim else 12 * self._owned)) if wanted.async_save else 0

    @property
    def kept_by_a_layer(self) -> int:
        """What one layer keeps for its backward, its output (the next one's input) included."""
        residual, wide, own = self.residual, self._wide, self.hidden // self._p
        norms_and_gelu = 0 if self._train.recompute_granularity == "selective" else 2 * residual + wide
        return 2 * residual + norms_and_gelu + 3 * own + self._attention + own + wide + 2 * self._dropped(residual)

    def _dropped(self, size: int) -> int:
        """The mask of a hidden dropout of `size` bytes: a byte an element on a GPU, the factors on a CPU."""
        return 0 if self._dropout[1] == 0 or self._keyed else size // self.element if self.on_gpu else size

    @property
    def _scores(self) -> int:
        """One matrix of attention's scores [b, n/p, s, s], where they are materialised; 0 where a kernel makes them
        piece by piece. torch's plain formulas take them in float32, ours for a CPU in bf16."""
        materialised = (
            self._train.attention_backend == "unfused" if self.on_gpu else self._dropout[0] > 0 and not self._keyed
        )
        elements = self._tokens * self._heads * self._s
        return elements * (self.element if self._by_our_formulas else 4) if materialised else 0

    @property
    def _by_keyed_attention(self) -> bool:
        return self._keyed and self._dropout[0] > 0 and kernels.attention_takes_keys(self._setting.device)

    @property
    def _element_of_scores(self) -> int:
        """Bytes, in `mpu.kernels.attention_keyed`."""
        return attention_keyed.computed_in(self._setting.dtype).itemsize

    @property
    def _by_our_formulas(self) -> bool:
        kernel = kernels.attention_kernel(
            self._setting.device, self._setting.dtype, self._s, self._dropout[0], gradient=True
        )
        return kernel is materialised_attention

    @property
    def _attention(self) -> int:
        """Kept between queries, keys and values, side by side, and the output, all [t, h/p]."""
        own = self.hidden // self._p
        if self._by_keyed_attention:
            return self._element_of_scores * self._tokens // self._s * self._heads * attention_keyed.kept_pairs(self._s)
        if self._scores:  # the softmax, and with dropout its mask (a byte an element on a GPU) and their product
            masks = 0 if self._dropout[0] == 0 else self._scores // 4 if self.on_gpu else self._scores
            products = self._scores if self._dropout[0] > 0 else 0
            return self._scores + masks + products + (0 if self._by_our_formulas else 3 * own * 4 // self.element)
        by_blocks = not self.on_gpu and self._setting.dtype == torch.bfloat16
        return 0 if by_blocks else 4 * self._tokens * self._heads  # the log-sums

    def kept_by(self, chunk: range) -> int:
        """What a chunk keeps of a micro-batch between forward and backward. Of its first layer the input, of its last
        one the output only before the final norm: the other chunks send it away."""
        parked = self._parked_layers(chunk)
        if self._recomputes_all:
            inside = 0 if self._inputs_are_parked else self.recomputed_steps(chunk) * self.input_part
            received = self._inputs_are_parked or self._inputs_are_split
        else:
            inside, received = (len(chunk) - parked) * self.kept_by_a_layer, parked > 0
        # What another rank has sent stays until backward, also where the layers keep another form of it.
        inside += self.residual if received and not self.is_first(chunk) else 0
        return inside + (self.residual if self.is_last(chunk) else 0) + self._of_embeddings(chunk)

    def _of_embeddings(self, chunk: range) -> int:
        return self._dropped(self.residual) if self.is_first(chunk) else 0

    def queued_by(self, chunk: range, but: int = 0) -> int:
        """What the gradients of its weights still need of a micro-batch after the backward of all but `but` layers,
        where they come later: the inputs and the outputs' gradients of the linear layers, the replicated ones whole."""
        return (len(chunk) - but) * (4 * self.hidden + 4 * self.hidden // self._p + 2 * self._wide)

    @property
    def _recomputes_all(self) -> bool:
        return self._train.recompute_granularity == "full"

    def recomputed_steps(self, chunk: range) -> int:
        """Steps of full recomputation."""
        return -(-len(chunk) // self._train.recompute_num_layers)

    @property
    def input_part(self) -> int:
        """What one rank keeps of the input of a step of full recomputation."""
        return -(-self.residual // self._p) if self._inputs_are_split else self.residual

    @property
    def _inputs_are_split(self) -> bool:
        parallel = self._setting.config.parallel
        return (
            parallel.partition_activations and not parallel.sequence_parallel and self._p > 1 and self._recomputes_all
        )

    @property
    def _inputs_are_parked(self) -> bool:
        return self._setting.config.parallel.checkpoint_in_cpu and self.on_gpu and self._recomputes_all

    def _parked_layers(self, chunk: range) -> int:
        parked = self._setting.config.parallel.cpu_offloading_num_layers if self.on_gpu else 0
        return len(range(chunk.start, min(chunk.stop, parked)))

    def parked(self, chunk: range) -> int:
        """What of a micro-batch is in the host's memory between forward and backward."""
        inputs = self.recomputed_steps(chunk) * self.input_part if self._inputs_are_parked else 0
        return inputs + self._parked_layers(chunk) * self.kept_by_a_layer

    def brought_back(self, steps: int) -> int:
        """What backward has of the inputs of a step of full recomputation beside what is kept: it, gathered, and where
        they are parked, those of `steps`."""
        return (self.residual if self._inputs_are_split else 0) + (
            steps * self.input_part if self._inputs_are_parked else 0
        )

    def layers_brought_back(self, chunk: range) -> int:
        """What backward has of a layer that was parked and of the one before it."""
        return min(self._parked_layers(chunk), 2) * self.kept_by_a_layer

    def layers_that_stay(self, chunk: range) -> int:
        """Layers without those that are parked."""
        return len(chunk) - self._parked_layers(chunk)

    def layers_together(self, chunk: range) -> int:
        """Layers of one step of full recomputation."""
        return min(self._train.recompute_num_layers, len(chunk))

    def recomputed_together(self, chunk: range) -> int:
        """What full recomputation makes again for one of its steps."""
        return self.layers_together(chunk) * self.kept_by_a_layer if self._recomputes_all else 0

    def kept_by_the_first_layer(self, chunk: range) -> int:
        """With its input, which alone a recomputed layer keeps until its backward begins."""
        return self.kept_by_a_layer + self.residual + self._of_embeddings(chunk)

    @property
    def backward_of_a_layer(self) -> int:
        """Beside what it kept: the gradients of its output, of what is between the MLP's products, and of a weight; and
        GELU's output where that is made again. Or those of the scores, or of attention by blocks."""
        again = self._wide if self._train.recompute_granularity == "selective" else 0
        return max(self.residual + self._wide + again + self.a_weight_gradient, self._scores, self._attention_by_blocks)

    @property
    def _attention_by_blocks(self) -> int:
        """`mpu.kernels`' backward of attention for bf16 on a CPU: queries, keys and values and their gradients, twice,
        and three matrices of a block's scores, when what the MLP kept is free."""
        own, heads = self.hidden // self._p, self._tokens // self._s * self._heads
        free = (1 if self._train.recompute_granularity == "selective" else 2) * self._wide
        if self._by_keyed_attention:  # and the masks
            e, block = self._element_of_scores, min(attention_keyed.BLOCK, self._s)
            heads = min(attention_keyed.heads_at_once(self._s), heads)
            return self.residual + 11 * own * e // self.element + (4 * e + 2) * heads * block * self._s - free
        if self.on_gpu or self._setting.dtype != torch.bfloat16 or self._dropout[0] > 0:
            return 0
        heads = min(attention.heads_at_once(self._s), heads)
        block = min(attention.BLOCK, self._s)
        return self.residual + 11 * own + 3 * self.element * heads * block * self._s - free

    @property
    def loss(self) -> int:
        """The gradient of the head's weight as it is summed, and a part of the logits. See `_LinearCrossEntropy`."""
        matrix, e = self._rows * self._h, self.element
        chunk = chunk_size_for(self._tokens)
        products = -(-self._tokens // chunk)
        together = products_at_once(self._setting.dtype, self._setting.device) or products
        # Beyond them the sum is in float32, to which a CPU adds a copy of the next ones in float32.
        summed = e * matrix if products <= together else (4 + e + (0 if self.on_gpu else 4)) * matrix
        chunk = min(chunk, self._tokens)
        in_float32 = chunk if self.on_gpu else min(rows_in_cache(self._rows), chunk)
        logits = (e * chunk + 4 * in_float32) * self._rows
        return max(summed, min(summed, (4 + e) * matrix) + logits)

    def communication(self, gradients: int) -> int:
        """What exists beside gradients of `gradients` bytes that are being sent: their copy in bf16, and gloo's
        copy; or under --exact-layouts what comes from the other ranks."""
        parallel = self._setting.config.parallel
        if self._setting.data_parallel_size == 1:
            return 0
        if self._is_exact:
            return gradients
        sent = gradients // 2 if parallel.grad_reduce_in_bf16 else 0
        copied = parallel.use_distributed_optimizer and not self.on_gpu  # gloo reduces a copy of all, keeps a part
        return sent + ((sent or gradients) if copied else 0)
