"""Faults of parallel training that tests plant into a run.

A fault is a function (trainer, patch), which every rank calls. `patch` undoes the changes.
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
from megatron.gpt2.optimizer import bucket_reducer
from megatron.gpt2.train.data import Batch
from megatron.gpt2.train.trainer import Trainer
from mpu import kernels
from mpu.layers import linear

Patch = pytest.MonkeyPatch
TENSOR_PARALLEL = "--model-parallel-size 2 --micro-batch-size 4"
SEQUENCE_PARALLEL = TENSOR_PARALLEL + " --sequence-parallel"
SHARDED = "--micro-batch-size 2 --use-distributed-optimizer --ddp-bucket-size 4000"
STAGES = "--micro-batch-size 2 --pipeline-model-parallel-size 2"
ACCUMULATED = "--micro-batch-size 1"  # With two ranks and a global batch of 4, a step has two micro-batches.


class PlantedFault(NamedTuple):
    """A fault, and what `verify` must report about it: the tensor, a part of the operation's name, the step and the
    ranks.

    flags: the flags of the layout.
    """

    plant: Callable[[Trainer, Patch], None]
    tensor: str
    operation: str
    flags: str = TENSOR_PARALLEL
    step: int = 1
    ranks: tuple[int, ...] = (0, 1)


def get_layer(trainer: Trainer, number: int) -> Any:
    return trainer.state.model.transformer.layers[number]


def bias_once_per_rank(trainer: Trainer, patch: Patch) -> None:
    """Add the bias of a row-parallel layer before the sum over the ranks."""
    layer = get_layer(trainer, 1).attention.dense
    patch.setattr(layer, "forward", lambda x: layer.reduce(linear(x, layer.weight, layer.bias)))


def gradient_summed_twice(trainer: Trainer, patch: Patch) -> None:
    original = bucket_reducer.all_reduce_partial_grads

    def twice(buffer: Any) -> None:
        original(buffer)
        original(buffer)

    patch.setattr(bucket_reducer, "all_reduce_partial_grads", twice)


def local_index(trainer: Trainer, patch: Patch) -> None:
    """Let each sequence-parallel rank use the positions from 0 on."""
    patch.setattr(trainer.state.model.position_embeddings, "local_positions", lambda x: slice(0, x.size(0)))


def patch_attention(
    trainer: Trainer, patch: Patch, number: int, change: Callable[[Tensor], Tensor], *, first_head: int = -1
) -> None:
    """Let the attention of layer `number` read change(qkv), [s, b, n, 3, d], and use the dropout masks of the heads
    from `first_head` on."""
    original, chosen = kernels.seeded_attention, get_layer(trainer, number).attention
    forward = chosen.forward

    def changed(qkv: Tensor, p: float, dropout_seeds: Tensor, location: int, first: int) -> Tensor:
        return original(change(qkv), p, dropout_seeds, location, first if first_head < 0 else first_head)

    def with_change(x: Tensor, **more: Any) -> Tensor:
        with mock.patch.object(kernels, "seeded_attention", changed):
            return forward(x, **more)

    patch.setattr(chosen, "forward", with_change)


def mask_by_local_index(trainer: Trainer, patch: Patch) -> None:
    """Let each rank use the dropout masks of the first heads."""
    patch_attention(trainer, patch, 1, lambda qkv: qkv, first_head=0)


def qkv_order(trainer: Trainer, patch: Patch) -> None:
    """Read [n, 3, d] as [3, n, d]."""
    patch_attention(trainer, patch, 1, lambda qkv: qkv.flatten(2, 3).unflatten(2, (3, -1)).transpose(2, 3).contiguous())


def missing_scale(trainer: Trainer, patch: Patch) -> None:
    """Omit the division by √d."""

    def unscaled(qkv: Tensor) -> Tensor:
        factors = torch.tensor([math.sqrt(qkv.size(-1)), 1.0, 1.0], dtype=qkv.dtype)
        return qkv * factors.view(3, 1)

    patch_attention(trainer, patch, 0, unscaled)


def norm_counted_twice(trainer: Trainer, patch: Patch) -> None:
    """Let each model-parallel rank add the replicated gradients to the norm."""
    optimizer, original = trainer.state.optimizer, mpu.all_reduced_squared_norm
    patch.setattr(
        optimizer,
        "squared_norm",
        lambda split, replicated, *args, **kwargs: original([*split, *replicated], [], *args, **kwargs),
    )


def lost_gradient(trainer: Trainer, patch: Patch) -> None:
    """Let each micro-batch overwrite the gradients of earlier micro-batches."""
    patch.setattr(trainer.state.reducer, "add", lambda name, gradient: trainer.state.buffer.grad(name).copy_(gradient))


def lost_micro_batch(trainer: Trainer, patch: Patch) -> None:
    """Let rank 1 use its first micro-batch twice."""
    if trainer.parallel.rank == 1:
        original = Batch.split
        patch.setattr(Batch, "split", lambda *args: (parts := original(*args))[:1] * len(parts))


def swapped_shards(trainer: Trainer, patch: Patch) -> None:
    weight = get_layer(trainer, 1).mlp.dense_4h_to_h.weight.data
    shards = [torch.empty_like(weight) for _ in range(2)]
    dist.all_gather(shards, weight)
    weight.copy_(shards[1 - trainer.parallel.rank])


def padding_in_the_softmax(trainer: Trainer, patch: Patch) -> None:
    original = trainer.state.model._cross_entropy
    patch.setattr(
        trainer.state.model,
        "_cross_entropy",
        lambda x, weight, *args, **kwargs: original(x, weight, *args, **(kwargs | {"vocab_size": 2 * len(weight)})),
    )


def positions_off_by_one(trainer: Trainer, patch: Patch) -> None:
    patch.setattr(trainer.state.model.position_embeddings, "local_positions", lambda x: slice(1, x.size(0) + 1))


STALE = "transformer.layers.1.mlp.dense_h_to_4h.weight"


def stale_parameter(trainer: Trainer, patch: Patch) -> None:
    """Let rank 1 have the old values of rank 0's shard of a parameter after the all-gather."""
    param_gather, buffer = trainer.state.param_gather, trainer.state.buffer
    launch = param_gather.start_param_sync

    def launch_and_restore() -> None:
        own = buffer.params[buffer.ranges[STALE]].clone()
        launch()
        param_gather.finish_param_sync()
        if trainer.parallel.rank == 1:
            _, part, start = buffer.owned_part(STALE)
            whole = buffer.params[buffer.ranges[STALE]]
            mine = whole[start : start + part.stop - part.start].clone()
            whole.copy_(own)
            whole[start : start + len(mine)] = mine

    patch.setattr(param_gather, "start_param_sync", launch_and_restore)


def one_learning_rate(trainer: Trainer, patch: Patch) -> None:
    if trainer.parallel.rank == 1:
        optimizer = trainer.state.optimizer
        optimizer.learning_rate.mul_(1.01)
        patch.setattr(optimizer, "_lr_by_update", optimizer._lr_by_update * 1.01)


def tied_gradient_not_summed(trainer: Trainer, patch: Patch) -> None:
    """Let the first and the last pipeline stage not sum their gradients of the tied matrix."""
    patch.setattr(trainer.state.reducer, "_embedding_group", None)


LAST = "gradient of transformer.final_layernorm.bias"
CORE = "transformer.layers.1.attention.core"
FAULTS = {
    "bias added once per rank": PlantedFault(
        bias_once_per_rank,
        "transformer.layers.1.attention.dense",
        "the all-reduce of layer 1's attention.dense, with its bias, forward",
        step=2,
    ),
    "gradient summed twice": PlantedFault(
        gradient_summed_twice, LAST, "over 2 tensor-parallel ranks", SEQUENCE_PARALLEL
    ),
    "position by local index": PlantedFault(
        local_index, "embeddings", "position embeddings", SEQUENCE_PARALLEL, ranks=(1,)
    ),
    "mask by local index": PlantedFault(mask_by_local_index, CORE, "its dropout", ranks=(1,)),
    "wrong QKV order": PlantedFault(qkv_order, CORE, "attention of layer 1"),
    "norm counted twice": PlantedFault(norm_counted_twice, "gradient norm", "each of which counts once"),
    "lost micro-batch": PlantedFault(lost_micro_batch, "sample_ids", "the data loader", ACCUMULATED, ranks=(1,)),
    "lost gradient of a micro-batch": PlantedFault(lost_gradient, LAST, "over 2 micro-batches", ACCUMULATED),
    "swapped shards": PlantedFault(
        swapped_shards,
        "transformer.layers.1.mlp.dense_4h_to_h.weight",
        "initialisation of layer 1's mlp.dense_4h_to_h.weight",
        step=0,
    ),
    "missing scale": PlantedFault(missing_scale, "transformer.layers.0.attention.core", "attention of layer 0"),
    "padding in the softmax": PlantedFault(padding_in_the_softmax, "loss", "the cross-entropy"),
    "positions off by one": PlantedFault(positions_off_by_one, "embeddings", "position embeddings"),
    "stale parameter after a gather": PlantedFault(stale_parameter, STALE, "the all-gather", SHARDED, ranks=(1,)),
    "tied gradient not summed": PlantedFault(
        tied_gradient_not_summed,
        "gradient of word_embeddings.weight",
        "over the first and the last stage of the pipeline",
        STAGES,
    ),
    "one rank's learning rate": PlantedFault(one_learning_rate, "learning rate", "the schedule", ranks=(1,)),
}
