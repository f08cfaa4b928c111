"""Dropout whose masks do not depend on the layout.

A mask is a function of the seed, the global number of the sample, the layer, the place in the layer and the position
with its channel, or in attention the head, the query and the key. So it is the same on any number of ranks, in any
micro-batch, and when a layer is computed again; nothing about it is kept or saved. `kernels/dropout.py` is the function.

Where the layers are given no keys, dropout draws from torch's generators, as in 2019: see `random`.

Legend: b batch, s sequence, h hidden, p model-parallel size, l layers.
"""

import torch
from torch import Tensor

from mpu import kernels
from mpu.random import current_rng_tracker

# The places where a layer drops. The embeddings' dropout belongs to the first layer.
OF_EMBEDDINGS, OF_PROBABILITIES, AFTER_ATTENTION, AFTER_MLP = range(4)


def dropout_keys(seed: int, samples: Tensor, num_layers: int) -> Tensor:
    """The keys of a micro-batch, int64 [l, b, 3]: the seed, the sample's number, the layer's.

    samples: int64 [b], the global numbers of the samples, on the device of the model. Tensors, since a compiled layer
    would be compiled anew for every number.
    """
    keys = torch.empty(num_layers, samples.numel(), 3, dtype=torch.int64, device=samples.device)
    keys[..., 0] = seed
    keys[..., 1] = samples
    keys[..., 2] = torch.arange(num_layers, device=samples.device).unsqueeze(1)
    return keys


def hidden_dropout(
    x: Tensor, p: float, sequence_parallel: bool, *, keys: Tensor | None = None, site: int = 0, rank: int = 0
) -> Tensor:
    """Dropout of hidden states [s, b, h], or [s/p, b, h] with sequence_parallel.

    keys: int64 [b, 3], a layer's of `dropout_keys`. Without them it draws from the default generator where the ranks
    hold the same activations and must drop the same elements, and from the tracker under sequence parallelism, where
    each rank holds a part of its own. rank: in the model-parallel group.
    """
    if p == 0:
        return x
    if keys is not None:
        return kernels.keyed_dropout(x, p, keys, site, rank * x.size(0) if sequence_parallel else 0)
    return dropout_of_own_part(x, p) if sequence_parallel else kernels.dropout(x, p)


def dropout_of_own_part(x: Tensor, p: float) -> Tensor:
    """Dropout with a mask of torch's generators that differs from that of the other ranks. Any shape."""
    with current_rng_tracker().fork():
        return kernels.dropout(x, p)
