"""Faults of parallel training, each planted into a run that is built, on every rank.

A fault is a function (run, patch), where `patch` puts back what it has changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import mpu
from megatron.gpt2.optimizer import gradient_reducer
from megatron.gpt2.train.data import Batch
from megatron.gpt2.train.run import Run
from mpu import kernels
from mpu.layers import linear

Patch = pytest.MonkeyPatch
TWO_PARTS = ("--model-parallel-size", "2", "--micro-batch-size", "4")
OF_SEQUENCE = (*TWO_PARTS, "--sequence-parallel")
SHARDED = ("--micro-batch-size", "2", "--use-distributed-optimizer", "--ddp-bucket-size", "4000")
STAGES = ("--micro-batch-size", "2", "--pipeline-model-parallel-size", "2")
ACCUMULATED = ("--micro-batch-size", "1")  # two ranks and a global batch of 4: two micro-batches


class Fault(NamedTuple):
    """What is planted, and what must be named: the tensor, a part of its operation, the step and the ranks. flags: of
    the layout."""

    plant: Callable[[Run, Patch], None]
    tensor: str
    operation: str
    flags: tuple[str, ...] = TWO_PARTS
    step: int = 1
    ranks: tuple[int, ...] = (0, 1)


def layer_of(run: Run, number: int) -> Any:
    return run.engine.model.transformer.layers[number]


def bias_once_per_rank(run: Run, patch: Patch) -> None:
    """The bias of a row-parallel layer is added before the sum over the ranks."""
    layer = layer_of(run, 1).attention.dense
    patch.setattr(layer, "forward", lambda x: layer.reduce(linear(x, layer.weight, layer.bias)))


def gradient_summed_twice(run: Run, patch: Patch) -> None:
    original = gradient_reducer.sum_partial

    def twice(flat: Any) -> None:
        original(flat)
        original(flat)

    patch.setattr(gradient_reducer, "sum_partial", twice)


def local_index(run: Run, patch: Patch) -> None:
    """Each rank takes its positions from 0 on."""
    patch.setattr(run.engine.model.position_embeddings, "own_part", lambda x: slice(0, x.size(0)))


def of_layer(run: Run, patch: Patch, number: int, change: Callable[[Tensor], Tensor], *, first_head: int = -1) -> None:
    """Attention of one layer reads change(qkv), [s, b, n, 3, d], and drops as if its heads began at `first_head`."""
    original, chosen = kernels.keyed_attention, layer_of(run, number).attention
    forward = chosen.forward

    def changed(qkv: Tensor, p: float, keys: Tensor, site: int, first: int) -> Tensor:
        return original(change(qkv), p, keys, site, first if first_head < 0 else first_head)

    def with_change(x: Tensor, **more: Any) -> Tensor:
        with mock.patch.object(kernels, "keyed_attention", changed):
            return forward(x, **more)

    patch.setattr(chosen, "forward", with_change)


def mask_by_local_index(run: Run, patch: Patch) -> None:
    """Each rank takes its heads for the first ones."""
    of_layer(run, patch, 1, lambda qkv: qkv, first_head=0)


def qkv_order(run: Run, patch: Patch) -> None:
    """[n, 3, d] is read as [3, n, d]."""
    of_layer(run, patch, 1, lambda qkv: qkv.flatten(2, 3).unflatten(2, (3, -1)).transpose(2, 3).contiguous())


def missing_scale(run: Run, patch: Patch) -> None:
    """No division by √d."""

    def unscaled(qkv: Tensor) -> Tensor:
        factors = torch.tensor([math.sqrt(qkv.size(-1)), 1.0, 1.0], dtype=qkv.dtype)
        return qkv * factors.view(3, 1)

    of_layer(run, patch, 0, unscaled)


def norm_counted_twice(run: Run, patch: Patch) -> None:
    """Each model-parallel rank counts the replicated gradients."""
    optimizer, original = run.engine.optimizer, mpu.squared_norm
    patch.setattr(
        optimizer,
        "squared_norm",
        lambda split, replicated, *args, **kwargs: original([*split, *replicated], [], *args, **kwargs),
    )


def lost_gradient(run: Run, patch: Patch) -> None:
    """The gradients of each micro-batch take the place of those before."""
    patch.setattr(run.engine.reducer, "add", lambda name, gradient: run.engine.flat.grad(name).copy_(gradient))


def lost_micro_batch(run: Run, patch: Patch) -> None:
    """The last micro-batch of rank 1 is the first one again."""
    if run.parallel.rank == 1:
        original = Batch.micro_batches
        patch.setattr(Batch, "micro_batches", lambda self, size, weight: original(self, size, weight)[:1] * 2)


def swapped_shards(run: Run, patch: Patch) -> None:
    weight = layer_of(run, 1).mlp.dense_4h_to_h.weight.data
    shards = [torch.empty_like(weight) for _ in range(2)]
    dist.all_gather(shards, weight)
    weight.copy_(shards[1 - run.parallel.rank])


def padding_in_the_softmax(run: Run, patch: Patch) -> None:
    original = run.engine.model._cross_entropy
    patch.setattr(
        run.engine.model,
        "_cross_entropy",
        lambda x, weight, *args, **kwargs: original(x, weight, *args, **(kwargs | {"vocab_size": 2 * len(weight)})),
    )


def positions_off_by_one(run: Run, patch: Patch) -> None:
    patch.setattr(run.engine.model.position_embeddings, "own_part", lambda x: slice(1, x.size(0) + 1))


STALE = "transformer.layers.1.mlp.dense_h_to_4h.weight"


def stale_parameter(run: Run, patch: Patch) -> None:
    """On rank 1 the all-gather leaves what rank 0 has updated of a parameter as it was."""
    gatherer, flat = run.engine.gatherer, run.engine.flat
    launch = gatherer.launch

    def and_back() -> None:
        own = flat.params[flat.ranges[STALE]].clone()
        launch()
        gatherer.wait()
        if run.parallel.rank == 1:
            _, part, start = flat.owned_part_of(STALE)
            whole = flat.params[flat.ranges[STALE]]
            mine = whole[start : start + part.stop - part.start].clone()
            whole.copy_(own)
            whole[start : start + len(mine)] = mine

    patch.setattr(gatherer, "launch", and_back)


def one_learning_rate(run: Run, patch: Patch) -> None:
    if run.parallel.rank == 1:
        optimizer = run.engine.optimizer
        optimizer.learning_rate.mul_(1.01)
        patch.setattr(optimizer, "_rates", optimizer._rates * 1.01)


def tied_gradient_not_summed(run: Run, patch: Patch) -> None:
    """Of a pipeline's first and last stage each keeps its own gradient of the tied matrix."""
    patch.setattr(run.engine.reducer, "_embedding_group", None)


LAST = "gradient of transformer.final_layernorm.bias"
CORE = "transformer.layers.1.attention.core"
FAULTS = {
    "bias added once per rank": Fault(
        bias_once_per_rank,
        "transformer.layers.1.attention.dense",
        "the all-reduce of layer 1's attention.dense, with its bias, forward",
        step=2,
    ),
    "gradient summed twice": Fault(gradient_summed_twice, LAST, "over 2 model-parallel ranks", OF_SEQUENCE),
    "position by local index": Fault(local_index, "embeddings", "position embeddings", OF_SEQUENCE, ranks=(1,)),
    "mask by local index": Fault(mask_by_local_index, CORE, "its dropout", ranks=(1,)),
    "wrong QKV order": Fault(qkv_order, CORE, "attention of layer 1"),
    "norm counted twice": Fault(norm_counted_twice, "gradient norm", "each of which counts once"),
    "lost micro-batch": Fault(lost_micro_batch, "samples", "the data loader", ACCUMULATED, ranks=(1,)),
    "lost gradient of a micro-batch": Fault(lost_gradient, LAST, "over 2 micro-batches", ACCUMULATED),
    "swapped shards": Fault(
        swapped_shards,
        "transformer.layers.1.mlp.dense_4h_to_h.weight",
        "initialisation of layer 1's mlp.dense_4h_to_h.weight",
        step=0,
    ),
    "missing scale": Fault(missing_scale, "transformer.layers.0.attention.core", "attention of layer 0"),
    "padding in the softmax": Fault(padding_in_the_softmax, "loss", "the cross-entropy"),
    "positions off by one": Fault(positions_off_by_one, "embeddings", "position embeddings"),
    "stale parameter after a gather": Fault(stale_parameter, STALE, "the all-gather", SHARDED, ranks=(1,)),
    "tied gradient not summed": Fault(
        tied_gradient_not_summed,
        "gradient of word_embeddings.weight",
        "over the first and the last stage of the pipeline",
        STAGES,
    ),
    "one rank's learning rate": Fault(one_learning_rate, "learning rate", "the schedule", ranks=(1,)),
}
