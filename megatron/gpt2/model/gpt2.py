"""GPT-2: embeddings, a stack of parallel layers, and a head that is tied to the word embeddings.

With pipeline parallelism a rank holds model chunks, each with successive layers. The first chunk has the embeddings;
the last chunk has the final norm, the head and the loss. The first and the last chunk have a copy of the tied matrix.
Parameters have the names of Megatron's 2019 checkpoints, and a chunk uses the names of the whole model.

Legend: b batch, s sequence, h hidden, v padded vocabulary, l layers, tp tensor-parallel size.
"""

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

import mpu
from megatron.gpt2.config import ModelConfig
from mpu import kernels
from mpu.initialize import group_rank_and_size
from mpu.layers import InitMethod
from mpu.mappings import enter_model_parallel_region
from mpu.transformer import FusedTransformerLayer

TIED_WEIGHT = "word_embeddings.weight"  # also the weight of the head


def seeded_normal(seed: int, name: str, std: float) -> InitMethod:
    """Return an init_method that fills the whole weight `name` from N(0, std²).

    The values depend only on seed, name and index. Each parameter has a separate generator, so the values do not depend
    on the layout or on the order in which layers are created.
    """
    key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little", signed=True)

    def fill(weight: Tensor) -> object:
        return nn.init.normal_(weight, 0.0, std, generator=torch.Generator().manual_seed(key))

    return fill


@dataclass(frozen=True)
class TransformerBlockConfig(mpu.TransformerConfig):
    """The configuration of the layers, and of the activations that the block saves for backward. The fields have the
    names of megatron.core, except `checkpoint_in_cpu`, which is a flag of Megatron-DeepSpeed.

    recompute_num_layers: with recompute_granularity "full", how many layers are recomputed from one saved input.
    distribute_saved_activations: with "full", each rank saves only its shard of layer inputs. This field has no effect
        with sequence_parallel, which already shards the inputs.
    checkpoint_in_cpu: with "full", a GPU saves layer inputs in host memory.
    cpu_offloading_num_layers: with "none", a GPU saves the activations of the first N layers in host memory.
    """

    recompute_num_layers: int = 1
    distribute_saved_activations: bool = False
    checkpoint_in_cpu: bool = False
    cpu_offloading_num_layers: int = 0


class TransformerBlock(nn.Module):
    """The layers and, after the last one, the final layer norm. [s, b, h] -> [s, b, h], or [s/tp, b, h] with sequence
    parallelism.

    layer_numbers: the layers that this rank holds, starting from 0; the other entries of `layers` are None.
    init_method_for: returns the init_method of a weight by its name in the whole model.
    submodules: implementations of the parts of a layer.
    """

    def __init__(
        self,
        num_layers: int,
        layer_numbers: Sequence[int],
        config: TransformerBlockConfig,
        init_method_for: Callable[[str], InitMethod],
        submodules: mpu.ModelSubmodules,
    ) -> None:
        super().__init__()
        self.config, self._layer_numbers = config, layer_numbers
        # Called with the number of each layer before the layer runs.
        self.layer_pre_hook: Callable[[int], object] = lambda number: None

        # FusedTransformerLayer supports only the default submodules.
        is_default = submodules == mpu.DEFAULT_SUBMODULES
        layer_class = FusedTransformerLayer if is_default else mpu.ParallelTransformerLayer

        def build_layer(number: int) -> mpu.ParallelTransformerLayer:
            return layer_class(
                config,
                init_method_for=lambda name: init_method_for(f"transformer.layers.{number}.{name}"),
                submodules=submodules,
            )

        self.layers = nn.ModuleList(
            build_layer(number) if number in layer_numbers else None  # type: ignore[misc]
            for number in range(num_layers)
        )
        if num_layers - 1 in layer_numbers:
            self.final_layernorm = submodules.layer_norm(
                config.hidden_size,
                config.layernorm_epsilon,
                sequence_parallel=config.sequence_parallel,
                device=config.device,
            )
        device = torch.device(config.device or "cpu")
        to_host = device.type == "cuda" and (config.checkpoint_in_cpu or config.cpu_offloading_num_layers > 0)
        self.activation_offload = mpu.ActivationOffload(device) if to_host else None

    def forward(
        self,
        x: Tensor,
        packed_seq_params: mpu.PackedSeqParams | None = None,
        cache: mpu.KeyValueCache | None = None,
        dropout_seeds: Tensor | None = None,
        layer_range: range | None = None,
    ) -> Tensor:
        """[s, b, h] -> [s, b, h].

        packed_seq_params: the documents of this micro-batch.
        cache: stores the keys and values of earlier tokens.
        dropout_seeds: see `mpu.make_dropout_seeds`.
        layer_range: the layers to compute (default: all).
        """
        layer_range = layer_range or range(len(self.layers))
        layer_seeds: Sequence[Tensor | None] = (
            [None] * len(self.layers) if dropout_seeds is None else dropout_seeds.unbind()
        )
        if self.activation_offload is not None:
            self.activation_offload.forward_begins()
        full = self._recomputes_layers
        hidden: Tensor | kernels.ResidualTerms = x
        layers_per_checkpoint = self.config.recompute_num_layers if full else 1
        for start in range(layer_range.start, layer_range.stop, layers_per_checkpoint):
            layer_numbers = range(start, min(start + layers_per_checkpoint, layer_range.stop))
            for number in layer_numbers:
                self.layer_pre_hook(number)
            run = functools.partial(self._run_layers, layer_numbers, packed_seq_params, cache, layer_seeds)
            if full:
                # x is the only argument, because DeepSpeed's replacement of mpu.checkpoint may shard each argument over
                # the ranks. `no_checkpointing` tells DeepSpeed that x is already sharded.
                if self.config.sequence_parallel:
                    hidden.no_checkpointing = True  # type: ignore[union-attr]
                hidden = mpu.checkpoint(run, hidden, **self._checkpoint_options())
            elif self.activation_offload is not None and start < self.config.cpu_offloading_num_layers:
                with self.activation_offload.offload_layer(self.layers[start]):
                    hidden = run(hidden)
            else:
                hidden = run(hidden)
        if self.activation_offload is not None:
            self.activation_offload.forward_ends()
        x = kernels.sum_terms(hidden)
        return self.final_layernorm(x) if layer_range.stop == len(self.layers) else x

    def _run_layers(
        self,
        layer_numbers: range,
        packed_seq_params: mpu.PackedSeqParams | None,
        cache: mpu.KeyValueCache | None,
        dropout_seeds: Sequence[Tensor | None],
        x: Tensor | kernels.ResidualTerms,
    ) -> Tensor | kernels.ResidualTerms:
        for number in layer_numbers:
            attention_fn = functools.partial(cache.attend, self._layer_numbers.index(number)) if cache else None
            x = self.layers[number](x, packed_seq_params, attention_fn, dropout_seeds[number])
        return kernels.sum_terms(x) if self._recomputes_layers else x

    @property
    def _recomputes_layers(self) -> bool:
        return self.config.recompute_granularity == "full" and self.training

    def _checkpoint_options(self) -> dict[str, Any]:
        """Return the keyword arguments for `mpu.checkpoint`, without default values, because DeepSpeed's replacement of
        this function accepts no keyword arguments."""
        config = self.config
        options: dict[str, Any] = {}
        if config.distribute_saved_activations and not config.sequence_parallel:
            options |= {"distribute_saved_activations": True, "group": config.group}
        return options if self.activation_offload is None else options | {"activation_offload": self.activation_offload}


class TiedGradSink(Protocol):
    """Receives both gradients of the tied matrix: backward computes the head's gradient first and the embedding's last.
    Autograd would add both gradients in the model's precision, and allocate three more matrices of their size."""

    def add(self, gradient: Tensor) -> None:
        """Add the head's gradient, [v/tp, h] in the model's dtype."""

    def add_rows(self, rows: Tensor, gradients: Tensor) -> None:
        """Add gradients [t, h] of the rows [t] int64. A row may occur several times."""


def build_block_config(config: ModelConfig, **overrides: Any) -> TransformerBlockConfig:
    """Return the config of the transformer block of a model.

    overrides: fields of `TransformerBlockConfig` for parallelism, recomputation and device (default: no recomputation,
        the default tensor-parallel group).
    """
    return TransformerBlockConfig(
        config.hidden_size,
        config.num_attention_heads,
        config.ffn_size,
        attention_dropout=config.attention_dropout,
        hidden_dropout=config.hidden_dropout,
        layernorm_epsilon=config.layernorm_epsilon,
        gelu=config.gelu,
        **overrides,
    )


class GPT2Model(nn.Module):
    """GPT-2 over a tensor-parallel group. The weights are in float32, until `ParamAndGradBuffer` or `.to(dtype)` rounds
    the weights.

    The model contains word and position embeddings, transformer layers with a final layer norm, and a head that uses
    the weight of the word embeddings. A pipeline rank has only the parts of its model chunks.

    config: `config.vocab_size` is the true size of the vocabulary; None raises ValueError.
    block_config: a result of `build_block_config` (default: `build_block_config(config)`).
    layer_ranges: the layers of each model chunk of this pipeline rank (default: all layers in one chunk).
    dropout_seed: makes dropout masks that do not depend on the layout, if `forward` gets `sample_ids`; None draws masks
        from torch's generators.
    submodules: implementations of layers, position embedding and loss.
    """

    word_embeddings: mpu.VocabParallelEmbedding  # on the first and the last pipeline stage
    position_embeddings: mpu.PositionEmbedding  # on the first pipeline stage

    def __init__(
        self,
        config: ModelConfig,
        block_config: TransformerBlockConfig | None = None,
        *,
        layer_ranges: Sequence[range] | None = None,
        seed: int = 1234,
        dropout_seed: int | None = None,
        submodules: mpu.ModelSubmodules = mpu.DEFAULT_SUBMODULES,
    ) -> None:
        super().__init__()
        if config.vocab_size is None:
            raise ValueError("the model needs the tokenizer's vocabulary size (--vocab-size)")
        block_config = block_config or build_block_config(config)
        self.config = config
        self.vocab_size = config.vocab_size
        self.head_weight: Tensor | None = None  # a copy of the embeddings' weight for inference
        self.layer_ranges = tuple(layer_ranges) if layer_ranges is not None else (range(config.num_layers),)
        self.has_embeddings = self.layer_ranges[0].start == 0
        self.has_head = self.layer_ranges[-1].stop == config.num_layers
        self.group = block_config.group or mpu.get_tensor_model_parallel_group()
        self.tp_rank, self.tp_size = group_rank_and_size(self.group)
        self.sequence_parallel = block_config.sequence_parallel and self.tp_size > 1
        block_config = dataclasses.replace(block_config, group=self.group, sequence_parallel=self.sequence_parallel)
        std = config.init_method_std
        layer_std = std * math.sqrt(config.mup_scale)
        # Each layer adds two branches to the residual stream, so their output weights start smaller (GPT-2).
        output_std = layer_std / math.sqrt(2 * config.num_layers)

        def init_method_for(name: str) -> InitMethod:
            is_output = name.endswith(("attention.dense.weight", "mlp.dense_4h_to_h.weight"))
            in_layer = name.startswith("transformer.layers.")
            return seeded_normal(seed, name, output_std if is_output else layer_std if in_layer else std)

        self.padded_vocab_size = mpu.padded_vocab_size(
            config.vocab_size, config.make_vocab_size_divisible_by, self.tp_size
        )
        if self.has_embeddings or self.has_head:
            self.word_embeddings = mpu.VocabParallelEmbedding(
                config.vocab_size,
                config.hidden_size,
                padded_size=self.padded_vocab_size,
                init_method=init_method_for(TIED_WEIGHT),
                **block_config.layer_kwargs,
            )
        if self.has_embeddings:
            self.position_embeddings = submodules.position_embedding(
                config.max_position_embeddings,
                config.hidden_size,
                init_method_for("position_embeddings.weight"),
                **block_config.layer_kwargs,
            )
        layer_numbers = [number for layer_range in self.layer_ranges for number in layer_range]
        self.transformer = TransformerBlock(config.num_layers, layer_numbers, block_config, init_method_for, submodules)
        if self.has_head:
            nn.init.constant_(self.transformer.final_layernorm.weight, config.mup_scale)
        self.dropout_seed = dropout_seed
        self._cross_entropy = submodules.linear_cross_entropy
        # Without a sink, autograd adds the gradients of head and embedding.
        self.tied_grad_sink: TiedGradSink | None = None
        self.is_compiled = False

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        token_weight: Tensor | None = None,
        positions: Tensor | None = None,
        packed_seq_params: mpu.PackedSeqParams | None = None,
        sample_ids: Tensor | None = None,
        *,
        layer_range: range | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Without labels, return this rank's logits [s, b, v/tp]. With labels, return the float32 scalar
        Σ token_weight · cross-entropy, equal on every rank of the group. A chunk that is not the last one returns its
        hidden states, [s, b, h] or [s/tp, b, h].

        tokens: [b, s] int64.
        labels: [b, s] int64. A label with weight 0 must still be an id of the vocabulary.
        token_weight: [b, s] float32, needed with labels.
        positions: [b, s] int64 (default: 0 to s - 1).
        packed_seq_params: the documents of this micro-batch; no token attends to another document.
        sample_ids: [b] int64, the number of each sample in the run, which determines its dropout masks. Without ids,
            torch's generators draw the masks.
        layer_range: one of `layer_ranges`, for pipelines (default: all layers).
        hidden: the output of the previous chunk.
        """
        layer_range = layer_range or range(self.config.num_layers)
        tied_sink = self.tied_grad_sink if labels is not None else None
        dropout_seeds = None
        if self.training and sample_ids is not None and self.dropout_seed is not None and self.config.has_dropout:
            dropout_seeds = mpu.make_dropout_seeds(self.dropout_seed, sample_ids, self.config.num_layers)
        x = (
            self._embed(tokens, positions, tied_sink.add_rows if tied_sink else None, dropout_seeds)
            if hidden is None
            else hidden
        )
        x = self.transformer(x, packed_seq_params, dropout_seeds=dropout_seeds, layer_range=layer_range)
        if layer_range.stop < self.config.num_layers:
            return x
        if labels is None:
            x = enter_model_parallel_region(x, self.group, self.sequence_parallel)
            return F.linear(x, self.word_embeddings.weight)
        assert token_weight is not None
        return self._cross_entropy(
            x.flatten(0, 1),  # [s, b, h] -> [t, h]
            self.word_embeddings.weight,
            labels.t().reshape(-1),  # [b, s] -> [s, b] -> [t]
            token_weight.t().reshape(-1),
            self.group,
            vocab_size=self.vocab_size,
            sequence_parallel=self.sequence_parallel,
            weight_grad_sink=tied_sink.add if tied_sink else None,
        )

    def hidden_states(
        self, tokens: Tensor, positions: Tensor | None = None, cache: mpu.KeyValueCache | None = None
    ) -> Tensor:
        """tokens [b, s] int64 -> the input of the head, [s, b, h], equal on every rank that has the head. Call this
        method with gradients disabled, on every rank of the pipeline.

        cache: stores the keys and values of earlier tokens.
        positions: the positions of the tokens in the cache's rows, [b, s] int64.
        """
        for layer_range in self.layer_ranges:
            if layer_range.start == 0:
                x = self._embed(tokens, positions)
            else:
                x = mpu.recv_forward(self.empty_hidden(*tokens.shape), ring=True)
            x = self.transformer(x, cache=cache, layer_range=layer_range)
            if layer_range.stop < self.config.num_layers:
                mpu.send_forward(x, ring=True)
        return mpu.gather_from_sequence_parallel_region(x, self.group) if self.sequence_parallel else x

    def lr_multipliers(self) -> dict[str, float]:
        """Return factors of AdamW's rate and epsilon by the names of parameters. A parameter without an entry has the
        factor 1.

        With muP (`config.mup_base_width`, arXiv:2203.03466, table 8) the best learning rate nearly does not depend on
        h, for a constant head size d. With r = base width / h:

            matrices of layers:  initial standard deviation · √r; AdamW's rate and epsilon · r, so also their decay
            final layer norm:    initial weight r, so logits · r; AdamW's rate and epsilon · r
            other parameters:    as without muP, also the tied embeddings

        The final layer norm contains the factor of the logits, so programs that read a checkpoint need no support for
        muP. Attention divides by √d and not, as in muP, by d: for a constant d the two differ only by a constant.
        """
        named = self.transformer.named_parameters(prefix="transformer")
        scaled = [name for name, parameter in named if parameter.dim() == 2 or "final_layernorm" in name]
        return dict.fromkeys(scaled, self.config.mup_scale)

    def empty_hidden(self, b: int, s: int) -> Tensor:
        """Return an uninitialised tensor for the hidden states of the previous chunk: [s, b, h], or [s/tp, b, h]."""
        part = mpu.divide(s, self.tp_size) if self.sequence_parallel else s
        return next(self.parameters()).new_empty(part, b, self.config.hidden_size)

    def logits(self, x: Tensor) -> Tensor:
        """Compute this rank's logits [..., v/tp] of hidden states [..., h]. No gradient flows back."""
        weight = self.word_embeddings.weight if self.head_weight is None else self.head_weight
        return mpu.linear_without_gradient(x, weight)

    def logits_on_every_stage(self, x: Tensor) -> Tensor:
        """Hidden states [t, h] from `hidden_states` -> this rank's logits [t, v/tp], without gradient. Every rank of
        the pipeline must call this method."""
        return mpu.broadcast_from_last_stage(
            self.logits(x) if self.has_head else x.new_empty(len(x), self.padded_vocab_size // self.tp_size)
        )

    def _embed(
        self,
        tokens: Tensor,
        positions: Tensor | None,
        grad_sink: Callable[[Tensor, Tensor], object] | None = None,
        dropout_seeds: Tensor | None = None,
    ) -> Tensor:
        """Embed the tokens: [b, s] -> [s, b, h], or [s/tp, b, h]."""
        x = self.position_embeddings(self.word_embeddings(tokens.t(), grad_sink), positions)
        p = self.transformer.config.hidden_dropout if self.training else 0.0
        return mpu.apply_hidden_dropout(
            x,
            p,
            self.sequence_parallel,
            dropout_seeds=None if dropout_seeds is None else dropout_seeds[0],
            first_position=self.position_embeddings.first_position(x),
        )

    def compile_layers(self, backend: str = "inductor", *, by_document: bool = False) -> None:
        """Compile each transformer layer. All layers share one compiled graph (on a GPU, all after the first);
        compiling the whole model would take minutes.

        Each layer is one graph, including its collectives and its dropout, whose masks must come from `dropout_seed`.

        by_document: `forward` will get `packed_seq_params`, which breaks the graph at attention.
        """
        for layer in filter(None, self.transformer.layers):
            layer.compile(fullgraph=not by_document, backend=backend)
        self.is_compiled = True


def model_partition_specs(config: ModelConfig, tp_size: int = 1) -> dict[str, mpu.PartitionSpec]:
    """Return the spec of every parameter of a model with this tensor-parallel size, as `mpu.partition_specs` does.

    The specs are computed from a model on the meta device, whose group has one rank and never communicates, so
    torch.distributed need not be initialised. tp_size only affects the padding of the vocabulary.
    """
    multiple = math.lcm(config.make_vocab_size_divisible_by, tp_size)
    one_rank_group = ProcessGroup(0, 1)  # type: ignore[call-arg]  # rank and size, without a store
    config = dataclasses.replace(config, make_vocab_size_divisible_by=multiple)
    return mpu.partition_specs(GPT2Model(config, build_block_config(config, group=one_rank_group, device="meta")))


def count_parameters(config: ModelConfig, tp_size: int = 1) -> tuple[int, int]:
    """Return the number of parameters of the whole model with the true vocabulary, and the number of each
    tensor-parallel rank with the padded vocabulary. No weight is created."""
    specs = model_partition_specs(config, tp_size).values()
    return (
        sum(math.prod(spec.global_shape) for spec in specs),
        sum(math.prod(spec.local_shape(tp_size)) for spec in specs),
    )
