"""Layers whose numbers are the same to the bit at every tensor-parallel size that divides V, with sequence parallelism
and without.

A group of p ranks does what V ranks would do: each rank computes V/p *parts* of each split layer, one after the other.
So every product, every attention and every GELU has the same operands and shapes in every layout. A sum over parts is
formed along one binary tree, in float32, over the parts of a rank first and then over the ranks: f and g of the paper
for V ranks. The sums over the sequence that sequence parallelism would split are formed of V parts as well.

    sums           the tree, and the parts of a group
    layers         linear layers, layer norm, position embeddings
    transformer    attention and MLP, and `exact_modules`, which gives all of them
    cross_entropy  the head with its loss
    norm           the norm of gradients, whatever part of them each rank holds

Kernels must give the same bits for the same operands, whatever their address in memory; `docs/explanation/one-truth.md`
says what else is needed.
"""

from megatron.gpt2.extensions.exact.norm import exact_squared_norm
from megatron.gpt2.extensions.exact.sums import tree_sum
from megatron.gpt2.extensions.exact.transformer import exact_modules

__all__ = ["exact_modules", "exact_squared_norm", "tree_sum"]
