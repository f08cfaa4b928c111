"""GPT-2: embeddings, a stack of parallel layers, and a head tied to the word embeddings.

Legend: b batch, s sequence, h hidden, v padded vocabulary, p model-parallel size.
Parameter names are those of Megatron's 2019 checkpoints.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mpu
from megatron.gpt2.config import ModelConfig


def seeded_normal(seed: int, name: str, std: float) -> Callable[[Tensor], object]:
    """An init_method that fills the whole weight `name` from N(0, std²).

    A function of (seed, name, index) alone: each parameter has a generator of its own, so that neither the
    layout nor the order in which layers are made can change a weight.
    """
    key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little", signed=True)

    def fill(weight: Tensor) -> object:
        return nn.init.normal_(weight, 0.0, std, generator=torch.Generator().manual_seed(key))

    return fill


class Transformer(nn.Module):
    """The layers and the closing layer norm. [s, b, h] -> [s, b, h]."""

    def __init__(self, config: ModelConfig, init_method_for: Callable[[str], Callable[[Tensor], object]],
                 recompute: str, recompute_num_layers: int, sequence_parallel: bool,
                 device: torch.device | str | None) -> None:
        super().__init__()
        self.sequence_parallel = sequence_parallel
        self.layers_recomputed_together = recompute_num_layers if recompute == "full" else 0
        self.before_layer: Callable[[int], object] = lambda number: None  # told before each layer computes

        def layer(number: int) -> mpu.ParallelTransformerLayer:
            return mpu.ParallelTransformerLayer(
                config.hidden_size, config.num_attention_heads, config.ffn_size,
                attention_dropout=config.attention_dropout, hidden_dropout=config.hidden_dropout,
                layernorm_epsilon=config.layernorm_epsilon, gelu=config.gelu,
                recompute=recompute == "selective", sequence_parallel=sequence_parallel, device=device,
                init_method_for=lambda name: init_method_for(f"transformer.layers.{number}.{name}"))

        self.layers = nn.ModuleList(layer(number) for number in range(config.num_layers))
        self.final_layernorm = mpu.LayerNorm(config.hidden_size, config.layernorm_epsilon,
                                             sequence_parallel=sequence_parallel, device=device)

    def forward(self, x: Tensor, documents: mpu.Documents | None = None,
                cache: mpu.KeyValueCache | None = None) -> Tensor:
        together = self.layers_recomputed_together
        if together and self.training:
            for start in range(0, len(self.layers), together):
                part = self.layers[start:start + together]
                for number in range(start, start + len(part)):
                    self.before_layer(number)
                # Tensors alone are arguments: DeepSpeed's function, put in the place of mpu.checkpoint, may keep a part
                # of each on every rank. The attribute tells it that this one differs between the ranks already.
                if self.sequence_parallel:
                    x.no_checkpointing = True  # type: ignore[attr-defined]
                x = mpu.checkpoint(functools.partial(_through, part, documents), x)
        else:
            for number, layer in enumerate(self.layers):
                self.before_layer(number)
                x = layer(x, documents, functools.partial(cache.attend, number) if cache else None)
        return self.final_layernorm(x)


def _through(layers: nn.ModuleList, documents: mpu.Documents | None, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x, documents)
    return x


class TiedGradient(Protocol):
    """Takes the gradient of the word embeddings, which the head uses as well: during backward first that of the head,
    then that of the embedding. Autograd would add them in the model's precision, in three more matrices of that size.
    """

    def add(self, gradient: Tensor) -> None:
        """[v/p, h]"""

    def add_rows(self, rows: Tensor, gradients: Tensor) -> None:
        """Row numbers [t] int64, with repetitions, and [t, h]."""


class GPT2Model(nn.Module):
    """GPT-2 over the default model-parallel group, in float32; the optimizer or `.to(dtype)` lowers it.

    config.vocab_size is the true size. recompute: what is computed again in backward instead of being kept, "none",
    "selective" (the outputs of GELU and of the layers' norms) or "full" (all but the input of every
    `recompute_num_layers` layers).
    sequence_parallel: between the split layers the sequence is split over the group, which must divide it.
    """

    def __init__(self, config: ModelConfig, *, seed: int = 1234, recompute: str = "none", recompute_num_layers: int = 1,
                 sequence_parallel: bool = False, device: torch.device | str | None = None) -> None:
        super().__init__()
        if config.vocab_size is None:
            raise ValueError("the model needs the tokenizer's vocabulary size (--vocab-size)")
        self.config = config
        self.vocab_size = config.vocab_size
        self.sequence_parallel = sequence_parallel and mpu.get_model_parallel_world_size() > 1
        padded = mpu.padded_vocab_size(config.vocab_size, config.make_vocab_size_divisible_by,
                                       mpu.get_model_parallel_world_size())
        # Each layer adds two branches to the residual stream: their last weights start smaller (GPT-2).
        output_std = config.init_method_std / math.sqrt(2 * config.num_layers)

        def init_method_for(name: str) -> Callable[[Tensor], object]:
            is_output = name.endswith(("attention.dense.weight", "mlp.dense_4h_to_h.weight"))
            return seeded_normal(seed, name, output_std if is_output else config.init_method_std)

        self.word_embeddings = mpu.VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, padded_size=padded, sequence_parallel=self.sequence_parallel,
            init_method=init_method_for("word_embeddings.weight"), device=device)
        positions = torch.empty(config.max_position_embeddings, config.hidden_size)
        init_method_for("position_embeddings.weight")(positions)
        self.position_embeddings = nn.Embedding.from_pretrained(positions.to(device), freeze=False)
        if self.sequence_parallel:
            mpu.mark_sequence_parallel(self.position_embeddings.parameters())
        self.transformer = Transformer(config, init_method_for, recompute, recompute_num_layers,
                                       self.sequence_parallel, device)
        self.tied_gradient: TiedGradient | None = None  # None: autograd does it
        self.is_compiled = False

    def forward(self, tokens: Tensor, labels: Tensor | None = None, token_weight: Tensor | None = None,
                positions: Tensor | None = None, documents: mpu.Documents | None = None) -> Tensor:
        """tokens [b, s] int64 -> this rank's logits [s, b, v/p]; with labels and weights, both [b, s], the scalar
        Σ token_weight · cross-entropy in float32, the same on every rank of the model-parallel group.

        A label whose weight is 0 must still be an id of the vocabulary. positions: [b, s] int64, where they are not 0
        to s - 1. documents: of this micro-batch, where they do not see each other.
        """
        tied = self.tied_gradient if labels is not None else None
        x = self._embed(tokens, positions, tied.add_rows if tied else None)
        x = self.transformer(x, documents)
        if labels is None:
            whole = mpu.gather_from_sequence_parallel_region(x) if self.sequence_parallel else \
                mpu.copy_to_model_parallel_region(x)
            return F.linear(whole, self.word_embeddings.weight)
        assert token_weight is not None
        return mpu.vocab_parallel_linear_cross_entropy(
            x.flatten(0, 1), self.word_embeddings.weight, labels.t().reshape(-1), token_weight.t().reshape(-1),
            vocab_size=self.vocab_size, sequence_parallel=self.sequence_parallel,
            collect=tied.add if tied else None)

    def hidden_states(self, tokens: Tensor, positions: Tensor | None = None,
                      cache: mpu.KeyValueCache | None = None) -> Tensor:
        """tokens [b, s] int64 -> what the head reads, [s, b, h], the same on every rank. Without gradient. cache: reads
        and keeps the keys and values; positions: then those of the tokens."""
        x = self.transformer(self._embed(tokens, positions), cache=cache)
        return mpu.gather_from_sequence_parallel_region(x) if self.sequence_parallel else x

    def logits(self, x: Tensor) -> Tensor:
        """Hidden states [..., h] -> this rank's logits [..., v/p]. Without gradient."""
        return mpu.linear_without_gradient(x, self.word_embeddings.weight, None)

    def next_logits(self, tokens: Tensor, last: Tensor, positions: Tensor | None = None,
                    cache: mpu.KeyValueCache | None = None) -> Tensor:
        """As `hidden_states`, but this rank's logits of what follows the token `last` [b] of each row, [b, v/p]."""
        x = self.hidden_states(tokens, positions, cache)
        return self.logits(x[last, torch.arange(last.numel(), device=last.device)])  # [s, b, h] -> [b, h]

    def _embed(self, tokens: Tensor, positions: Tensor | None,
               collect: Callable[[Tensor, Tensor], object] | None = None) -> Tensor:
        """[b, s] -> [s, b, h], or [s/p, b, h]."""
        own, table = self._own_positions(tokens.size(1)), self.position_embeddings.weight
        places = table[own].unsqueeze(1) if positions is None else F.embedding(positions.t()[own], table)
        p = self.config.hidden_dropout if self.training else 0.0
        return mpu.hidden_dropout(self.word_embeddings(tokens.t(), collect) + places, p, self.sequence_parallel)

    def _own_positions(self, s: int) -> slice:
        """The positions of a sequence of s whose hidden states this rank holds."""
        if not self.sequence_parallel:
            return slice(0, s)
        part = mpu.divide(s, mpu.get_model_parallel_world_size())
        return slice(mpu.get_model_parallel_rank() * part, (mpu.get_model_parallel_rank() + 1) * part)

    def compile_layers(self, backend: str = "inductor", *, by_document: bool = False) -> None:
        """Compile each transformer layer, once for all of them, instead of the whole model, which takes minutes.

        Without dropout a layer is one graph, its collectives inside. With it the graph breaks where the random stream
        changes: at attention's dropout, and at each hidden one under sequence parallelism. `by_document`, where forward
        is given documents: it breaks at attention.
        """
        config = self.config
        breaks = by_document or config.attention_dropout > 0 or (config.hidden_dropout > 0 and self.sequence_parallel)
        for layer in self.transformer.layers:
            layer.compile(fullgraph=not breaks, backend=backend)
        self.is_compiled = True


def parameter_specs(config: ModelConfig, model_parallel_size: int = 1) -> dict[str, mpu.PartitionSpec]:
    """The spec of every parameter, as `mpu.partition_specs` gives it of a model, without making one."""
    assert config.vocab_size is not None
    h, f, p = config.hidden_size, config.ffn_size, model_parallel_size

    def layer_norm(name: str) -> dict[str, mpu.PartitionSpec]:
        return {f"{name}.weight": mpu.PartitionSpec((h,)), f"{name}.bias": mpu.PartitionSpec((h,))}

    specs = {
        "word_embeddings.weight": mpu.PartitionSpec((config.vocab_size, h), 0, mpu.padded_vocab_size(
            config.vocab_size, config.make_vocab_size_divisible_by, p)),
        "position_embeddings.weight": mpu.PartitionSpec((config.max_position_embeddings, h))}
    for number in range(config.num_layers):
        layer = {
            **layer_norm("input_layernorm"),
            "attention.query_key_value.weight": mpu.PartitionSpec((3 * h, h), 0),
            "attention.query_key_value.bias": mpu.PartitionSpec((3 * h,), 0),
            "attention.dense.weight": mpu.PartitionSpec((h, h), 1),
            "attention.dense.bias": mpu.PartitionSpec((h,)),
            **layer_norm("post_attention_layernorm"),
            "mlp.dense_h_to_4h.weight": mpu.PartitionSpec((f, h), 0),
            "mlp.dense_h_to_4h.bias": mpu.PartitionSpec((f,), 0),
            "mlp.dense_4h_to_h.weight": mpu.PartitionSpec((h, f), 1),
            "mlp.dense_4h_to_h.bias": mpu.PartitionSpec((h,))}
        specs |= {f"transformer.layers.{number}.{name}": spec for name, spec in layer.items()}
    return specs | layer_norm("transformer.final_layernorm")


def count_parameters(config: ModelConfig, model_parallel_size: int = 1) -> tuple[int, int]:
    """Parameters in all (true vocabulary) and in one rank's memory (padded), without making them."""
    specs = parameter_specs(config, model_parallel_size).values()
    return (sum(math.prod(spec.global_shape) for spec in specs),
            sum(math.prod(spec.local_shape(model_parallel_size)) for spec in specs))
