"""GPT-2: embeddings, a stack of parallel layers, and a head tied to the word embeddings.

In a pipeline a rank holds chunks of successive layers. The first chunk embeds; the last one has the final norm, the
head and the loss. The tied matrix is on both. Everything keeps the name that it has in the whole model.

Legend: b batch, s sequence, h hidden, v padded vocabulary, l layers, p tensor-parallel size.
Parameter names are those of Megatron's 2019 checkpoints.
"""

import contextlib
import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

import mpu
from megatron.gpt2.config import ModelConfig
from mpu.initialize import group_rank_and_size
from mpu.layers import InitMethod

TIED = "word_embeddings.weight"  # the head's weight too


def seeded_normal(seed: int, name: str, std: float) -> InitMethod:
    """An init_method that fills the whole weight `name` from N(0, std²).

    The numbers are a function of seed, name and index alone. Each parameter has a generator of its own, so that neither
    the layout nor the order in which layers are made can change a weight.
    """
    key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little", signed=True)

    def fill(weight: Tensor) -> object:
        return nn.init.normal_(weight, 0.0, std, generator=torch.Generator().manual_seed(key))

    return fill


class Transformer(nn.Module):
    """The layers and, after the last one, the final layer norm. [s, b, h] -> [s, b, h], or [s/p, b, h] with sequence
    parallelism.

    numbers: of the layers that this rank holds; the others are None in `layers`.
    init_method_for: gives the init_method of a weight by its name in the whole model. modules: of what a layer is made.
    """

    def __init__(
        self,
        num_layers: int,
        numbers: Sequence[int],
        config: mpu.TransformerConfig,
        init_method_for: Callable[[str], InitMethod],
        modules: mpu.Modules,
    ) -> None:
        super().__init__()
        self.config, self._numbers = config, numbers
        self.layer_pre_hook: Callable[[int], object] = lambda number: None  # is called before each layer computes

        def layer(number: int) -> mpu.ParallelTransformerLayer:
            return mpu.ParallelTransformerLayer(
                config,
                init_method_for=lambda name: init_method_for(f"transformer.layers.{number}.{name}"),
                modules=modules,
            )

        self.layers = nn.ModuleList(
            layer(number) if number in numbers else None  # type: ignore[misc]
            for number in range(num_layers)
        )
        if num_layers - 1 in numbers:
            self.final_layernorm = modules.layer_norm(
                config.hidden_size,
                config.layernorm_epsilon,
                sequence_parallel=config.sequence_parallel,
                device=config.device,
            )
        device = torch.device(config.device or "cpu")
        to_host = device.type == "cuda" and (config.checkpoint_in_cpu or config.cpu_offloading_num_layers > 0)
        self.host_memory = mpu.HostMemory(device) if to_host else None

    def forward(
        self,
        x: Tensor,
        documents: mpu.Documents | None = None,
        cache: mpu.KeyValueCache | None = None,
        keys: Tensor | None = None,
        chunk: range | None = None,
    ) -> Tensor:
        """[s, b, h] -> [s, b, h]. documents: of this micro-batch. cache: reads and keeps the keys and values. keys: of
        dropout, see `mpu.dropout_keys`. chunk: the layers that compute (default: all)."""
        chunk = chunk if chunk is not None else range(len(self.layers))
        of_layer: Sequence[Tensor | None] = [None] * len(self.layers) if keys is None else keys.unbind()
        if self.host_memory is not None:
            self.host_memory.forward_begins()
        full = self.config.recompute_granularity == "full" and self.training
        together = self.config.recompute_num_layers if full else 1
        for start in range(chunk.start, chunk.stop, together):
            numbers = range(start, min(start + together, chunk.stop))
            for number in numbers:
                self.layer_pre_hook(number)
            run = functools.partial(self._run_layers, numbers, documents, cache, of_layer)
            if full:
                # Only tensors are arguments: DeepSpeed's function, in the place of mpu.checkpoint, may keep a part of
                # each on every rank. The attribute says that this tensor differs between the ranks already.
                if self.config.sequence_parallel:
                    x.no_checkpointing = True  # type: ignore[attr-defined]
                x = mpu.checkpoint(run, x, **self._checkpoint_options())
            else:
                with self._of_layer(start):
                    x = run(x)
        if self.host_memory is not None:
            self.host_memory.forward_ends()
        return self.final_layernorm(x) if chunk.stop == len(self.layers) else x

    def _run_layers(
        self,
        numbers: range,
        documents: mpu.Documents | None,
        cache: mpu.KeyValueCache | None,
        keys: Sequence[Tensor | None],
        x: Tensor,
    ) -> Tensor:
        for number in numbers:
            attend = functools.partial(cache.attend, self._numbers.index(number)) if cache else None
            x = self.layers[number](x, documents, attend, keys[number])
        return x

    def _checkpoint_options(self) -> dict[str, Any]:
        """Arguments of `mpu.checkpoint`, which another function may replace: none unless one is asked for."""
        config = self.config
        options: dict[str, Any] = {}
        if config.distribute_saved_activations and not config.sequence_parallel:
            options |= {"distribute_saved_activations": True, "group": config.group}
        return options if self.host_memory is None else options | {"host_memory": self.host_memory}

    def _of_layer(self, number: int) -> AbstractContextManager[None]:
        """Around a layer that is not recomputed: where what it keeps is."""
        if self.host_memory is None or number >= self.config.cpu_offloading_num_layers:
            return contextlib.nullcontext()
        return self.host_memory.of_layer(self.layers[number])


class TiedGradient(Protocol):
    """Is given the gradient of the word embeddings, which the head uses as well: during backward first the gradient of
    the head, then that of the embedding. Autograd would add them in the model's precision, in three more matrices of
    that size.
    """

    def add(self, gradient: Tensor) -> None:
        """Add the gradient of the head, [v/p, h] in the model's dtype."""

    def add_rows(self, rows: Tensor, gradients: Tensor) -> None:
        """Add the gradients [t, h] of the rows whose numbers are [t] int64. Numbers repeat."""


def layer_config(config: ModelConfig, **how: Any) -> mpu.TransformerConfig:
    """The config of the layers of a model. how: they are parallel, recomputed and placed, in the names of
    `mpu.TransformerConfig`; by default plain, over the default tensor-parallel group."""
    return mpu.TransformerConfig(
        config.hidden_size,
        config.num_attention_heads,
        config.ffn_size,
        attention_dropout=config.attention_dropout,
        hidden_dropout=config.hidden_dropout,
        layernorm_epsilon=config.layernorm_epsilon,
        gelu=config.gelu,
        **how,
    )


class GPT2Model(nn.Module):
    """GPT-2 over a tensor-parallel group, in float32; the optimizer or `.to(dtype)` lowers the precision.

    config: its vocab_size is the true size. Raises ValueError if that is None. layer: made by `layer_config` (default:
    plain layers).
    chunks: the successive layers, by number, that this rank of a pipeline holds (default: all, in one chunk).
    dropout_seed: of masks that do not depend on the layout, where `forward` is given the numbers of its samples. None:
    dropout draws from torch's generators.
    modules: of what it is made: layers, head and loss.
    """

    word_embeddings: mpu.VocabParallelEmbedding  # on the first and the last stage of a pipeline
    position_embeddings: mpu.PositionEmbedding  # on the first one

    def __init__(
        self,
        config: ModelConfig,
        layer: mpu.TransformerConfig | None = None,
        *,
        chunks: Sequence[range] | None = None,
        seed: int = 1234,
        dropout_seed: int | None = None,
        modules: mpu.Modules = mpu.PLAIN_MODULES,
    ) -> None:
        super().__init__()
        if config.vocab_size is None:
            raise ValueError("the model needs the tokenizer's vocabulary size (--vocab-size)")
        layer = layer or layer_config(config)
        self.config = config
        self.vocab_size = config.vocab_size
        self.chunks = tuple(chunks) if chunks is not None else (range(config.num_layers),)
        self.has_embeddings, self.has_head = self.chunks[0].start == 0, self.chunks[-1].stop == config.num_layers
        self.group = layer.group if layer.group is not None else mpu.get_tensor_model_parallel_group()
        self.rank, self.world_size = group_rank_and_size(self.group)
        self.sequence_parallel = layer.sequence_parallel and self.world_size > 1
        layer = dataclasses.replace(layer, group=self.group, sequence_parallel=self.sequence_parallel)
        # Each layer adds two branches to the residual stream: their last weights start smaller (GPT-2).
        output_std = config.init_method_std / math.sqrt(2 * config.num_layers)

        def init_method_for(name: str) -> InitMethod:
            is_output = name.endswith(("attention.dense.weight", "mlp.dense_4h_to_h.weight"))
            return seeded_normal(seed, name, output_std if is_output else config.init_method_std)

        self.padded_vocab_size = mpu.padded_vocab_size(
            config.vocab_size, config.make_vocab_size_divisible_by, self.world_size
        )
        if self.has_embeddings or self.has_head:
            self.word_embeddings = mpu.VocabParallelEmbedding(
                config.vocab_size,
                config.hidden_size,
                padded_size=self.padded_vocab_size,
                init_method=init_method_for(TIED),
                **layer.placement,
            )
        if self.has_embeddings:
            self.position_embeddings = modules.position_embedding(
                config.max_position_embeddings,
                config.hidden_size,
                init_method_for("position_embeddings.weight"),
                **layer.placement,
            )
        numbers = [number for chunk in self.chunks for number in chunk]
        self.transformer = Transformer(config.num_layers, numbers, layer, init_method_for, modules)
        self.dropout_seed = dropout_seed
        self._cross_entropy = modules.linear_cross_entropy
        self.tied_gradient: TiedGradient | None = None  # None: autograd does it
        self.is_compiled = False

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        token_weight: Tensor | None = None,
        positions: Tensor | None = None,
        documents: mpu.Documents | None = None,
        samples: Tensor | None = None,
        *,
        chunk: range | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """tokens [b, s] int64 -> this rank's logits [s, b, v/p]. With labels [b, s] int64 and weights [b, s] float32:
        the scalar Σ token_weight · cross-entropy in float32, the same on every rank of the group.

        A label whose weight is 0 must still be an id of the vocabulary. positions: [b, s] int64, where they are not 0
        to s - 1. documents: of this micro-batch, where they do not see each other. samples: [b] int64, the numbers of
        the samples in the whole run, which dropout's masks follow from.

        chunk: one of `chunks`, where a pipeline computes the others (default: the whole model). hidden: the output of
        the chunk before, [s, b, h] or [s/p, b, h]. Every chunk but the last gives its hidden states.
        """
        chunk = chunk if chunk is not None else range(self.config.num_layers)
        tied = self.tied_gradient if labels is not None else None
        keys = None
        if self.training and samples is not None and self.dropout_seed is not None and self.config.has_dropout:
            keys = mpu.dropout_keys(self.dropout_seed, samples, self.config.num_layers)
        x = self._embed(tokens, positions, tied.add_rows if tied else None, keys) if hidden is None else hidden
        x = self.transformer(x, documents, keys=keys, chunk=chunk)
        if chunk.stop < self.config.num_layers:
            return x
        if labels is None:
            to_every_rank = (
                mpu.gather_from_sequence_parallel_region
                if self.sequence_parallel
                else mpu.copy_to_model_parallel_region
            )
            return F.linear(to_every_rank(x, self.group), self.word_embeddings.weight)
        assert token_weight is not None
        return self._cross_entropy(
            x.flatten(0, 1),  # [s, b, h] -> [t, h]
            self.word_embeddings.weight,
            labels.t().reshape(-1),  # [b, s] -> [s, b] -> [t]
            token_weight.t().reshape(-1),
            self.group,
            vocab_size=self.vocab_size,
            sequence_parallel=self.sequence_parallel,
            weight_grad_hook=tied.add if tied else None,
        )

    def hidden_states(
        self, tokens: Tensor, positions: Tensor | None = None, cache: mpu.KeyValueCache | None = None
    ) -> Tensor:
        """tokens [b, s] int64 -> the input of the head, [s, b, h], the same on every rank that has the head. Without
        gradient. Every rank of the pipeline calls it.

        cache: reads and keeps the keys and values. positions: of the tokens in the cache's rows, [b, s] int64.
        """
        for chunk in self.chunks:
            if chunk.start == 0:
                x = self._embed(tokens, positions)
            else:
                x = mpu.receive_from_previous_stage(self.empty_hidden(*tokens.shape))
            x = self.transformer(x, cache=cache, chunk=chunk)
            if chunk.stop < self.config.num_layers:
                mpu.send_to_next_stage(x)
        return mpu.gather_from_sequence_parallel_region(x, self.group) if self.sequence_parallel else x

    def empty_hidden(self, b: int, s: int) -> Tensor:
        """Room for the hidden states [s, b, h], or [s/p, b, h], that the chunk before gives."""
        some = next(self.parameters())
        part = mpu.divide(s, self.world_size) if self.sequence_parallel else s
        return some.new_empty(part, b, self.config.hidden_size)

    def logits(self, x: Tensor) -> Tensor:
        """Hidden states [..., h] -> this rank's logits [..., v/p]. Without gradient."""
        return mpu.linear_without_gradient(x, self.word_embeddings.weight, None)

    def logits_on_every_stage(self, x: Tensor) -> Tensor:
        """What `hidden_states` gives, some of it, [t, h] -> this rank's logits [t, v/p]. Without gradient. Every rank
        of the pipeline calls it."""
        return mpu.broadcast_from_last_stage(
            self.logits(x) if self.has_head else x.new_empty(len(x), self.padded_vocab_size // self.world_size)
        )

    def _embed(
        self,
        tokens: Tensor,
        positions: Tensor | None,
        grad_hook: Callable[[Tensor, Tensor], object] | None = None,
        keys: Tensor | None = None,
    ) -> Tensor:
        """[b, s] -> [s, b, h], or [s/p, b, h]."""
        x = self.position_embeddings(self.word_embeddings(tokens.t(), grad_hook), positions)
        p = self.config.hidden_dropout if self.training else 0.0
        return mpu.hidden_dropout(x, p, self.sequence_parallel, keys=None if keys is None else keys[0], rank=self.rank)

    def compile_layers(self, backend: str = "inductor", *, by_document: bool = False) -> None:
        """Compile each transformer layer, once for all of them. To compile the whole model would take minutes.

        Without dropout a layer is one graph, its collectives inside. With it the graph breaks at attention, and, where
        masks are drawn from torch's generators, at each hidden dropout under sequence parallelism. `by_document`, where
        forward is given documents: it breaks at attention.
        """
        config = self.config
        draws_own_part = config.hidden_dropout > 0 and self.sequence_parallel and self.dropout_seed is None
        breaks = by_document or config.attention_dropout > 0 or draws_own_part
        for layer in filter(None, self.transformer.layers):
            layer.compile(fullgraph=not breaks, backend=backend)
        self.is_compiled = True


def parameter_specs(config: ModelConfig, model_parallel_size: int = 1) -> dict[str, mpu.PartitionSpec]:
    """The spec of every parameter, as `mpu.partition_specs` gives it of the model at this size.

    They come from a model of one layer on the meta device, which has shapes alone; all layers are alike. Its group has
    one rank and communicates with nobody, so torch.distributed need not be running. The size decides nothing but how
    the vocabulary is padded.
    """
    multiple = math.lcm(config.make_vocab_size_divisible_by, model_parallel_size)
    alone = ProcessGroup(0, 1)  # type: ignore[call-arg]  # rank and size, without a store
    one = dataclasses.replace(config, num_layers=1, make_vocab_size_divisible_by=multiple)
    model = GPT2Model(one, layer_config(one, group=alone, device="meta"))
    of_one_layer, first = mpu.partition_specs(model), "transformer.layers.0."
    layers = {
        name.replace(first, f"transformer.layers.{number}."): spec
        for number in range(config.num_layers)
        for name, spec in of_one_layer.items()
        if name.startswith(first)
    }
    specs: dict[str, mpu.PartitionSpec] = {}
    for name, spec in of_one_layer.items():
        specs.update(layers if name in layers else {name: spec})  # in the order of the model's own parameters
    return specs


def count_parameters(config: ModelConfig, model_parallel_size: int = 1) -> tuple[int, int]:
    """Parameters in all (true vocabulary) and in the memory of each rank (padded). No weight is drawn."""
    specs = parameter_specs(config, model_parallel_size).values()
    return (
        sum(math.prod(spec.global_shape) for spec in specs),
        sum(math.prod(spec.local_shape(model_parallel_size)) for spec in specs),
    )
