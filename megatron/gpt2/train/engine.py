"""The model of a run and what updates it, over the ranks that share data; and how far the run is."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

import mpu
from megatron.gpt2.config import without_effect
from megatron.gpt2.hooks import first
from megatron.gpt2.model.attention_backend import choose_attention
from megatron.gpt2.model.gpt2 import TIED, GPT2Model, layer_config
from megatron.gpt2.optimizer.flat_parameters import FlatParameters
from megatron.gpt2.optimizer.gradient_reducer import (
    GradientReducer,
    ParameterGatherer,
    ShardedGradientReducer,
    TiedGradient,
    TorchDDPReducer,
    bucket_size,
)
from megatron.gpt2.optimizer.learning_rates import LearningRate
from megatron.gpt2.optimizer.optimizer import AdamWOptimizer, build_loss_scaler
from megatron.gpt2.train.setup import Log, PreparedRun
from mpu import kernels

# Data-parallel ranks are further apart than any model-parallel size, so that no two random streams meet.
DATA_PARALLEL_STRIDE = 1 << 16
PIPELINE_STRIDE = 100


@dataclass(frozen=True, kw_only=True)
class Engine:
    """The model, and what updates it.

    forward: the module to call in training: the model, inside torch's DDP under --DDP-impl torch.
    flat: the model's parameters and gradients in contiguous buffers.
    reducer: sums gradients over micro-batches and data-parallel ranks into `flat`.
    gatherer: fetches the parameters that other ranks' optimizers own. Whoever reads parameters calls its `wait` first.
    """

    model: GPT2Model
    forward: nn.Module
    flat: FlatParameters
    reducer: GradientReducer | TorchDDPReducer
    gatherer: ParameterGatherer
    optimizer: AdamWOptimizer


@dataclass
class Progress:
    """iteration: steps that are done. consumed_samples: training samples that they took, over all ranks.
    skipped_samples: those between them that no step took, after a spike of the loss.

    loss_sum: float64 scalar on the device, the losses of this rank's samples since the last log line, in nats per
    token of the global batch; steps that were skipped are left out. started: `time.monotonic()` at the start.
    """

    iteration: int
    consumed_samples: int
    skipped_samples: int
    loss_sum: Tensor
    started: float = field(default_factory=time.monotonic)

    def step(self, samples: int) -> None:
        """One more iteration is done, which took `samples` samples over all ranks."""
        self.iteration += 1
        self.consumed_samples += samples


def build_engine(prepared: PreparedRun, parallel: mpu.ParallelState, log: Log) -> Engine:
    """The model with random weights and its fresh optimizer. Every rank calls it."""
    config, device, hooks = prepared.config, prepared.device, prepared.hooks
    shape, train, layout = config.model, config.train, config.parallel
    seed_random_streams(train.seed, parallel, device)
    draws_by_counter = train.dropout_rng == "counter"
    lines = [
        choose_attention(
            train.attention_backend,
            device,
            prepared.dtype,
            b=train.micro_batch_size,
            s=config.data.seq_length,
            n=shape.num_attention_heads // parallel.tensor_model_parallel_size,
            d=shape.hidden_size // shape.num_attention_heads,
            dropout_p=shape.attention_dropout,
        )
    ]
    if draws_by_counter and shape.attention_dropout > 0 and not kernels.attention_takes_keys(device.type):
        lines.append(
            "attention dropout: the kernel draws its own masks, which change with the layout; with "
            "--attention-dropout 0 layouts are comparable"
        )
    for line in filter(None, [*lines, *without_effect(config, device.type)]):
        log(line)
    stage, stages = parallel.pipeline_model_parallel_rank, parallel.pipeline_model_parallel_size
    model = GPT2Model(
        shape,
        layer_config(
            shape,
            recompute_granularity=train.recompute_granularity,
            recompute_num_layers=train.recompute_num_layers,
            distribute_saved_activations=layout.partition_activations,
            checkpoint_in_cpu=layout.checkpoint_in_cpu,
            cpu_offloading_num_layers=layout.cpu_offloading_num_layers,
            sequence_parallel=layout.sequence_parallel,
            device=device,
        ),
        seed=train.seed,
        chunks=config.layers_of_stages()[stage::stages],
        dropout_seed=train.seed if draws_by_counter else None,
        modules=first(hook.modules() for hook in hooks) or mpu.PLAIN_MODULES,
    )
    if train.compile:
        model.compile_layers(by_document=config.data.reset_attention_mask)
    is_shared = parallel.embedding_group is not None or any(hook.splits_tied_gradient for hook in hooks)
    flat = FlatParameters(
        model,
        prepared.dtype,
        bucket_size=bucket_size(layout.ddp_bucket_size, parallel.data_parallel_size),
        ranks=(parallel.data_parallel_rank, parallel.data_parallel_size),
        sharded=layout.use_distributed_optimizer,
        offloaded=layout.cpu_offload_optimizer,
        shared=TIED if is_shared else None,
        is_copy=not model.has_embeddings,
    )
    reducer, forward = reducer_for(prepared, flat, model, parallel)
    gatherer = ParameterGatherer(flat, model, parallel.data_parallel_group)
    batch = prepared.global_batch_size
    before = prepared.batch_schedule.before_steps(prepared.train_iters) / batch
    optimizer = AdamWOptimizer(
        flat,
        gatherer,
        config.optimizer,
        build_loss_scaler(config.optimizer, prepared.dtype, device),
        torch.from_numpy(LearningRate(config.optimizer, prepared.decay_iters, batch).table(before)),
        first(hook.squared_norm(device) for hook in hooks) or mpu.squared_norm,
    )
    return Engine(model=model, forward=forward, flat=flat, reducer=reducer, gatherer=gatherer, optimizer=optimizer)


def reducer_for(
    prepared: PreparedRun, flat: FlatParameters, model: GPT2Model, parallel: mpu.ParallelState
) -> tuple[GradientReducer | TorchDDPReducer, nn.Module]:
    """The reducer that the flags ask for, and the module to call forward on."""
    config, group = prepared.config.parallel, parallel.data_parallel_group
    if config.DDP_impl == "torch" and group is not None and group.size() > 1:
        ddp = TorchDDPReducer(flat, model, group, bucket_size=config.ddp_bucket_size)
        return ddp, ddp.module
    is_whole = model.has_embeddings and model.has_head
    if (extended := first(hook.reducer(flat, model, parallel) for hook in prepared.hooks)) is not None:
        return extended, model
    kind = ShardedGradientReducer if config.shard_gradients and flat.is_sharded else GradientReducer
    reducer = kind(flat, group, in_bf16=config.grad_reduce_in_bf16, embedding_group=parallel.embedding_group)
    model.tied_gradient = TiedGradient(reducer, TIED, None if is_whole else TIED)
    return reducer, model


def seed_random_streams(seed: int, parallel: mpu.ParallelState, device: torch.device) -> None:
    """Seed mpu's random streams for a model on `device`, with other seeds on every data-parallel rank, whose samples
    differ (Megatron seeded them alike in 2019), and, as in Megatron, on every stage of a pipeline."""
    mpu.model_parallel_cuda_manual_seed(
        seed
        + DATA_PARALLEL_STRIDE * parallel.data_parallel_rank
        + PIPELINE_STRIDE * parallel.pipeline_model_parallel_rank,
        device,
    )
