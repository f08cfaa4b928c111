"""`TrainState` has the model, gradient buffers and optimizer of a run. `Progress` has its counters."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

import mpu
from data_utils.command_line import Log
from megatron.gpt2.config import ParallelConfig, ignored_flags
from megatron.gpt2.device import choose_attention
from megatron.gpt2.model.gpt2 import TIED_WEIGHT, GPT2Model, build_block_config
from megatron.gpt2.optimizer.bucket_reducer import (
    BucketReducer,
    ParamAllGather,
    ShardedGradReducer,
    TiedGradAccumulator,
    choose_bucket_size,
)
from megatron.gpt2.optimizer.muon import GPU_BATCH_ELEMENTS, MuonOptimizer, layer_matrices
from megatron.gpt2.optimizer.optimizer import LossScaler, MixedPrecisionOptimizer, learning_rates
from megatron.gpt2.optimizer.param_and_grad_buffer import ParamAndGradBuffer
from megatron.gpt2.train.setup import RunContext
from mpu import kernels

# The seeds of data-parallel ranks differ by 65,536, which is more than the offsets of stages and tensor-parallel ranks.
# So no two data-parallel ranks have the same random stream.
DATA_PARALLEL_STRIDE = 1 << 16
PIPELINE_STRIDE = 100


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """The model and the objects that update it.

    buffer: the parameters and gradients of the model in contiguous buffers.
    reducer: sums gradients over micro-batches and data-parallel ranks into `buffer`.
    param_gather: fetches the parameters that other ranks' optimizers update. Call its `finish_param_sync` before you
        read parameters.
    """

    model: GPT2Model
    buffer: ParamAndGradBuffer
    reducer: BucketReducer
    param_gather: ParamAllGather
    optimizer: MixedPrecisionOptimizer


@dataclass
class Progress:
    """The counters of a run.

    iteration: completed steps.
    consumed_samples: training samples that these steps read, over all ranks.
    skipped_samples: samples that were left out after spikes of the loss.
    loss_sum: float64 scalar on the device: the sum of the losses of this rank's samples since the last log line, in
        nats per token of the global batch, without skipped steps.
    started: `time.monotonic()` at the start.
    """

    iteration: int
    consumed_samples: int
    skipped_samples: int
    loss_sum: Tensor
    started: float = field(default_factory=time.monotonic)

    def count_step(self, samples: int) -> None:
        """Count a completed step, which has read `samples` samples over all ranks."""
        self.iteration += 1
        self.consumed_samples += samples


def build_train_state(context: RunContext, parallel: mpu.ParallelState, log: Log) -> TrainState:
    """Build the model with random weights, and its optimizer. Every rank must call this function."""
    config, parallel_config, numerics = context.config, context.config.parallel, context.numerics
    seed_random_streams(config.train.seed, parallel, context.device)
    for line in [*attention_lines(context, parallel), *ignored_flags(config, context.device.type)]:
        log(line)
    model = build_model(context, parallel, numerics.submodules)
    # In a separate bucket, the tied weight is sharded in the same way on the first and the last stage.
    separate_tied_bucket = parallel.embedding_group is not None or numerics.separate_tied_bucket
    buffer = ParamAndGradBuffer(
        model,
        context.dtype,
        bucket_size=choose_bucket_size(parallel_config.ddp_bucket_size, parallel.data_parallel_size),
        data_parallel_rank=parallel.data_parallel_rank,
        data_parallel_size=parallel.data_parallel_size,
        sharded=parallel_config.use_distributed_optimizer,
        offloaded=parallel_config.cpu_offload_optimizer,
        tied_param=TIED_WEIGHT if separate_tied_bucket else None,
        tied_param_is_duplicate=not model.has_embeddings,
        muon_params=layer_matrices(model) if config.optimizer.optimizer == "muon" else (),
        lr_multipliers=model.lr_multipliers(),
    )
    make_reducer = numerics.build_reducer or functools.partial(build_reducer, parallel_config)
    reducer = make_reducer(buffer, model, parallel)
    param_gather = ParamAllGather(buffer, model, parallel.data_parallel_group)
    optimizer = build_optimizer(context, model, buffer, param_gather)
    return TrainState(model=model, buffer=buffer, reducer=reducer, param_gather=param_gather, optimizer=optimizer)


def attention_lines(context: RunContext, parallel: mpu.ParallelState) -> list[str]:
    """Choose the attention kernel. Return log lines about the choice of the kernel. A line warns if attention dropout
    is slow with this kernel, or if its masks depend on the layout."""
    config, device = context.config, context.device
    model, train = config.model, config.train
    choice = choose_attention(
        train.attention_backend,
        device,
        context.dtype,
        b=train.micro_batch_size,
        s=config.data.seq_length,
        n=model.num_attention_heads // parallel.tensor_model_parallel_size,
        d=model.hidden_size // model.num_attention_heads,
        dropout_p=model.attention_dropout,
    )
    lines = [choice] if choice else []
    if model.attention_dropout == 0:
        return lines
    if train.dropout_rng == "counter" and not kernels.has_seeded_attention(device.type):
        lines.append(
            "attention dropout: the kernel draws its own masks, which change with the layout; with "
            "--attention-dropout 0 layouts are comparable"
        )
    if device.type == "cuda" and config.data.reset_attention_mask:
        lines.append(
            "WARNING: --attention-dropout with --reset-attention-mask: torch has no kernel for both, so each document "
            "in each layer has its own launches, thousands in a micro-batch; with --attention-dropout 0 a layer has one"
        )
    return lines


def build_model(context: RunContext, parallel: mpu.ParallelState, submodules: mpu.ModelSubmodules) -> GPT2Model:
    """Build the model chunks of this rank, and compile their layers with --compile."""
    config, train = context.config, context.config.train
    stage, stages = parallel.pipeline_model_parallel_rank, parallel.pipeline_model_parallel_size
    model = GPT2Model(
        config.model,
        build_block_config(
            config.model,
            recompute_granularity=train.recompute_granularity,
            recompute_num_layers=train.recompute_num_layers,
            distribute_saved_activations=config.parallel.partition_activations,
            checkpoint_in_cpu=config.parallel.checkpoint_in_cpu,
            cpu_offloading_num_layers=config.parallel.cpu_offloading_num_layers,
            sequence_parallel=config.parallel.sequence_parallel,
            device=context.device,
        ),
        seed=train.seed,
        layer_ranges=config.layers_of_virtual_stages()[stage::stages],
        dropout_seed=train.seed if train.dropout_rng == "counter" else None,
        submodules=submodules,
    )
    if train.compile:
        model.compile_layers(by_document=config.data.reset_attention_mask)
    return model


def build_optimizer(
    context: RunContext,
    model: GPT2Model,
    buffer: ParamAndGradBuffer,
    param_gather: ParamAllGather,
) -> MixedPrecisionOptimizer:
    """Build AdamW, or Muon if it updates a parameter of `buffer`, with its loss scale and learning rates."""
    config, batch = context.config, context.global_batch_size
    steps_so_far = context.batch_schedule.samples_before_steps(context.train_iters) / batch
    in_batches = context.device.type == "cuda" and context.numerics.batch_matrices
    batch_elements = GPU_BATCH_ELEMENTS if in_batches else 0
    muon = functools.partial(MuonOptimizer, model, batch_elements=batch_elements, timeout=context.timeout)
    optimizer_class = muon if buffer.muon_params else MixedPrecisionOptimizer
    return optimizer_class(
        buffer,
        param_gather,
        config.optimizer,
        LossScaler(config.optimizer, context.dtype, context.device),
        torch.from_numpy(learning_rates(config.optimizer, context.decay_iters, batch, steps_so_far)),
        context.numerics.squared_norm,
    )


def build_reducer(
    config: ParallelConfig, buffer: ParamAndGradBuffer, model: GPT2Model, parallel: mpu.ParallelState
) -> BucketReducer:
    """Connect a new reducer to the model's tied weight (`tied_grad_sink`), and return the reducer. The flags choose its
    class."""
    has_both_parts = model.has_embeddings and model.has_head
    reducer_class = ShardedGradReducer if config.shard_gradients and buffer.is_sharded else BucketReducer
    reducer = reducer_class(
        buffer,
        parallel.data_parallel_group,
        in_bf16=config.grad_reduce_in_bf16,
        embedding_group=parallel.embedding_group,
    )
    model.tied_grad_sink = TiedGradAccumulator(reducer, TIED_WEIGHT, TIED_WEIGHT, joins_parts=has_both_parts)
    return reducer


def seed_random_streams(seed: int, parallel: mpu.ParallelState, device: torch.device) -> None:
    """Seed the random streams of `mpu` for a model on `device`. Pipeline stages have different seeds, as in Megatron.
    Data-parallel ranks have different seeds, too, because otherwise their samples would get the same dropout masks."""
    mpu.model_parallel_cuda_manual_seed(
        seed
        + DATA_PARALLEL_STRIDE * parallel.data_parallel_rank
        + PIPELINE_STRIDE * parallel.pipeline_model_parallel_rank,
        device,
    )
