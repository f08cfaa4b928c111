"""Bitwise-reproducible layouts: layers with identical results at every tensor-parallel size that divides V.

A group of tp ranks emulates V *virtual ranks*: each rank computes the shards of V/tp virtual ranks in order. Every
matrix product, attention and GELU has the same operands and shapes in every layout, with or without sequence
parallelism. Sums over virtual ranks (the all-reduces *f* and *g* of Megatron's paper) are float32 sums along one binary
tree: first within a rank, then over the ranks. A sum over the sequence adds the sums of V slices.

    sums:          the tree, and the collectives of virtual ranks
    layers:        linear layers, layer norm, position embeddings
    transformer:   attention and MLP, and `exact_submodules`, the spec of all layers
    cross_entropy: the head with its loss
    norm:          a gradient norm that does not depend on the sharding of the gradients
    reducer:       gradients summed over micro-batches and data-parallel ranks

Kernels must return the same bits for the same operands at any memory address. `docs/explanation/reproducibility.md`
lists the other requirements.
"""

from megatron.gpt2.extensions.exact.norm import exact_squared_norm
from megatron.gpt2.extensions.exact.sums import tree_sum
from megatron.gpt2.extensions.exact.transformer import exact_submodules

__all__ = ["exact_submodules", "exact_squared_norm", "tree_sum"]
