"""Everything that a training run is made of: the groups, the model, the optimizer, the data, and the state of the
checkpoint, made in the order in which one part needs another; and saving it.
"""

from __future__ import annotations

import functools
import secrets
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import mpu
from data_utils import BatchLoader, Splits, Tokenizer
from megatron.gpt2 import device as devices
from megatron.gpt2.checkpoint.best import BEST, refuse_best_folder, set_best_aside
from megatron.gpt2.checkpoint.folder import Piece, find_checkpoint, write_checkpoint
from megatron.gpt2.checkpoint.save_lock import lock_together
from megatron.gpt2.checkpoint.saver import Saver
from megatron.gpt2.checkpoint.state import load_model, load_rng, load_state, model_pieces, rng_pieces, state_pieces
from megatron.gpt2.config import Config
from megatron.gpt2.config.config_json import write_config
from megatron.gpt2.launch.rendezvous import initialize_distributed
from megatron.gpt2.launch.signals import StopSignal
from megatron.gpt2.model.attention_backend import choose_attention
from megatron.gpt2.model.gpt2 import GPT2Model
from megatron.gpt2.optimizer.flat_parameters import FlatParameters
from megatron.gpt2.optimizer.gradient_reducer import (
    GradientReducer,
    ParameterGatherer,
    TorchDDPReducer,
    bucket_size,
    reducer_for,
)
from megatron.gpt2.optimizer.learning_rates import LearningRate
from megatron.gpt2.optimizer.mixed_precision import MOMENTS, MixedPrecisionOptimizer, build_loss_scaler
from megatron.gpt2.records.environment import describe_environment
from megatron.gpt2.records.run_log import RunLog
from megatron.gpt2.records.timers import Timers
from megatron.gpt2.records.trackers import open_trackers
from megatron.gpt2.training.plan import Plan, Say

# Data-parallel ranks are further apart than any model-parallel size, so that no two random streams meet.
DATA_PARALLEL_STRIDE = 1 << 16


@dataclass
class Run:
    """A run under way: what does not change, then what each step moves on."""

    plan: Plan
    parallel: mpu.ParallelState
    model: GPT2Model
    forward: nn.Module  # the model, inside torch's DDP where that was asked for
    flat: FlatParameters
    reducer: GradientReducer | TorchDDPReducer
    gatherer: ParameterGatherer
    optimizer: MixedPrecisionOptimizer
    loader: BatchLoader
    log: RunLog
    saver: Saver
    lock: BinaryIO | None  # on rank 0, of the --save folder
    timers: Timers
    stop: StopSignal
    peak: tuple[float, str]  # FLOP/s of one device, and what they are
    iteration: int
    consumed_samples: int
    loss_sum: Tensor
    started: float  # time.monotonic()

    @property
    def config(self) -> Config:
        return self.plan.config

    @property
    def device(self) -> torch.device:
        return self.plan.device

    @property
    def tokenizer(self) -> Tokenizer:
        return self.plan.tokenizer

    @property
    def splits(self) -> Splits:
        return self.plan.splits

    @property
    def train_iters(self) -> int:
        return self.plan.train_iters

    @property
    def global_batch_size(self) -> int:
        return self.plan.global_batch_size

    @property
    def micro_batches(self) -> int:
        return self.config.accumulation(self.parallel.data_parallel_size)

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.config.data.seq_length

    @property
    def save_directory(self) -> Path:
        assert self.config.checkpoint.save is not None
        return Path(self.config.checkpoint.save)

    def mfu(self, tokens_per_second: float) -> float:
        """Fraction of the peak of all devices that the model's own arithmetic used."""
        flops = self.config.model.flops_per_token(self.config.data.seq_length)
        return tokens_per_second * flops / (self.peak[0] * self.parallel.world_size)

    def save(self) -> Path | None:
        """Write a checkpoint of this iteration: its folder, or None, with a warning, where that failed on any rank.

        With --async-save a thread has only begun with it, and None says nothing: `saver.finish` has the outcome.
        """
        self.gatherer.wait()
        return self.saver.save(self.iteration, self.files(), self.facts())

    def files(self) -> dict[str, dict[str, Piece]]:
        """The files that this rank has of a checkpoint, of the tensors as they are."""
        p, config = self.parallel, self.config.checkpoint
        specs = mpu.partition_specs(self.model)
        files: dict[str, dict[str, Piece]] = {}
        folder = f"mp_rank_{p.model_parallel_rank:02d}"
        layout = {"mp_rank": p.model_parallel_rank, "mp_size": p.model_parallel_size}
        if p.data_parallel_rank == 0:
            files[f"{folder}/model.safetensors"] = model_pieces(self.model.named_parameters(), specs, **layout)
        # Each data-parallel rank holds all of the optimizer's state, or where it is sharded a part of it.
        if not config.no_save_optim and (p.data_parallel_rank == 0 or self.flat.is_sharded):
            pieces = state_pieces(self.optimizer.tensors(), specs, **layout)
            for kind in ("master", *MOMENTS):  # a file of each: they are written and hashed side by side
                files[f"{folder}/{kind}_dp_{p.data_parallel_rank:02d}.safetensors"] = {
                    key: piece for key, piece in pieces.items() if key.startswith(f"{kind}.")}
        if not config.no_save_rng:
            files[f"{folder}/rng_dp_{p.data_parallel_rank:02d}.safetensors"] = rng_pieces(
                mp_rank=p.model_parallel_rank, dp_rank=p.data_parallel_rank, device=self.device)
        return files

    def facts(self) -> dict[str, Any]:
        """What the manifest says of the run: all that is no tensor."""
        return {
            "layout": {"model_parallel_size": self.parallel.model_parallel_size,
                       "data_parallel_size": self.parallel.data_parallel_size,
                       "optimizer_is_sharded": self.flat.is_sharded},
            "config": self.config.as_dict(),
            "vocab_size": self.tokenizer.vocab_size,
            "tokenizer": {"kind": self.tokenizer.kind, "fingerprint": self.tokenizer.fingerprint,
                          "vocab_size": self.tokenizer.vocab_size},
            "iteration": self.iteration,
            "train_iters": self.train_iters,
            "consumed_samples": self.consumed_samples,
            "global_batch_size": self.global_batch_size,
            "data_fingerprint": self.splits.fingerprint,
            "optimizer": self.optimizer.state_dict(),
            "precision": str(self.plan.dtype).removeprefix("torch."),
            "torch": torch.__version__,
        }

    def close(self) -> None:
        """After the last step, or an error: nothing is written any more, and another run may have the folder."""
        self.saver.close()
        self.log.close()
        if self.lock is not None:
            self.lock.close()


def greatest(number: int, device: torch.device) -> int:
    """The greatest of all ranks' numbers. A collective; nothing in a world of one."""
    if not dist.is_initialized():
        return number
    shared = torch.tensor(number, dtype=torch.int64, device=device if dist.get_backend() == "nccl" else "cpu")
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    return int(shared)


def build_run(plan: Plan, say: Say) -> Run:
    """Join the other ranks and make or load everything that a step needs. Every rank calls it."""
    config, device = plan.config, plan.device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():  # a program around this one may have done so
        initialize_distributed(plan.ranks, plan.backend, device, config.parallel.distributed_timeout_minutes)
    parallel = mpu.initialize_model_parallel(
        config.parallel.model_parallel_size, timeout=timedelta(minutes=config.parallel.distributed_timeout_minutes))
    seed_random_streams(config.train.seed, parallel)
    assert config.checkpoint.save is not None
    shared = functools.partial(greatest, device=device)
    seen = int(plan.splits.fingerprint[:15], 16)
    if shared(seen) != -shared(-seen):
        raise ValueError("the ranks read different training data: every machine needs the same files")
    refuse_best_folder(Path(config.checkpoint.save))
    lock = lock_together(config.checkpoint.save, rank=parallel.rank, greatest=shared, log=say)

    shape = config.model
    if reason := choose_attention(
            config.train.attention_backend, device, plan.dtype,
            b=config.train.micro_batch_size, s=config.data.seq_length,
            n=shape.num_attention_heads // parallel.model_parallel_size,
            d=shape.hidden_size // shape.num_attention_heads, dropout_p=shape.attention_dropout):
        say(reason)
    model = GPT2Model(config.model, seed=config.train.seed, device=device,
                      recompute=config.train.recompute_granularity,
                      recompute_num_layers=config.train.recompute_num_layers,
                      sequence_parallel=config.parallel.sequence_parallel)
    if config.train.compile:
        model.compile_layers(by_document=config.data.reset_attention_mask)
    flat = FlatParameters(model, plan.dtype,
                          bucket_size=bucket_size(config.parallel.ddp_bucket_size, parallel.data_parallel_size),
                          ranks=(parallel.data_parallel_rank, parallel.data_parallel_size),
                          sharded=config.parallel.use_distributed_optimizer,
                          offloaded=config.parallel.cpu_offload_optimizer)
    reducer, forward = reducer_for(config.parallel, flat, model, parallel.data_parallel_group)
    gatherer = ParameterGatherer(flat, model, parallel.data_parallel_group)
    rates = LearningRate(config.optimizer, plan.train_iters).table(plan.train_iters)
    optimizer = MixedPrecisionOptimizer(flat, gatherer, config.optimizer,
                                        build_loss_scaler(config.optimizer, plan.dtype, device),
                                        torch.from_numpy(rates))
    iteration, consumed_samples = 0, 0
    if plan.source is not None:
        iteration, consumed_samples = load_run(plan, parallel, model, optimizer, say)
    trackers = open_trackers(config, start_iteration=iteration, active=parallel.rank == 0)
    log = RunLog(str(config.checkpoint.save), train_iters=plan.train_iters, start_iteration=iteration,
                 trackers=trackers, active=parallel.rank == 0)
    if parallel.rank == 0:
        if iteration == 0:
            set_best_aside(Path(config.checkpoint.save), log.info)
        save_settings(plan)
    samples, order = plan.splits.training_samples(config.train.seed, plan.train_iters * plan.global_batch_size)
    loader = BatchLoader(samples, order, micro_batch_size=config.train.micro_batch_size,
                         accumulation=config.accumulation(parallel.data_parallel_size),
                         data_parallel_rank=parallel.data_parallel_rank,
                         data_parallel_size=parallel.data_parallel_size, consumed_samples=consumed_samples,
                         prefetch=config.data.num_workers, finish=pinned if device.type == "cuda" else torch.from_numpy)
    write = functools.partial(write_checkpoint, directory=config.checkpoint.save, rank=parallel.rank,
                              world_size=parallel.world_size, keep_last=config.checkpoint.keep_last,
                              timeout_s=60 * config.parallel.distributed_timeout_minutes)
    saver = Saver(write, attempt=f"{shared(secrets.randbits(62) if parallel.rank == 0 else 0):x}",
                  asynchronous=config.checkpoint.async_save, local_world_size=plan.ranks.local_world_size,
                  greatest=shared, say=log.info)
    run = Run(plan, parallel, model, forward, flat, reducer, gatherer, optimizer, loader, log, saver, lock,
              Timers(device), StopSignal(timedelta(minutes=config.parallel.distributed_timeout_minutes)),
              devices.peak_flops(device, plan.dtype), iteration, consumed_samples,
              torch.zeros((), dtype=torch.float32, device=device), time.monotonic())
    saver.prepare(run.files())
    return run


def seed_random_streams(seed: int, parallel: mpu.ParallelState) -> None:
    """mpu's streams, others on every data-parallel rank, whose samples differ (2019 gave them the same)."""
    mpu.model_parallel_cuda_manual_seed(seed + DATA_PARALLEL_STRIDE * parallel.data_parallel_rank)


def pinned(text: np.ndarray) -> Tensor:
    """In memory that a GPU reads by itself; the loader's thread calls it, ahead of the step."""
    return torch.from_numpy(text).pin_memory()


def load_run(plan: Plan, parallel: mpu.ParallelState, model: GPT2Model, optimizer: MixedPrecisionOptimizer,
             say: Say) -> tuple[int, int]:
    """Fill model, optimizer and random states from `plan.source`; returns iteration and consumed samples."""
    assert plan.source is not None
    wanted = plan.config.checkpoint
    checkpoint = find_checkpoint(plan.source, log=say, share=(parallel.rank, parallel.world_size),
                                 greatest=functools.partial(greatest, device=plan.device),
                                 verify=not wanted.no_verify)
    if checkpoint is None:
        raise ValueError(f"--load {plan.source}: the checkpoint vanished while the run was starting")
    specs = mpu.partition_specs(model)
    layout = {"mp_rank": parallel.model_parallel_rank, "mp_size": parallel.model_parallel_size}
    has_optimizer = any(name.startswith("master.") for name in checkpoint.names())
    if wanted.finetune or wanted.no_load_optim or not has_optimizer:
        if has_optimizer:  # the weights before they were rounded
            masters = (state for state in optimizer.tensors() if state.kind == "master")
            load_state(masters, specs, checkpoint, **layout)
            optimizer.write_back()
        else:
            load_model(model.named_parameters(), specs, checkpoint, **layout)
            optimizer.masters_from_model()
        if wanted.finetune:
            say(f"weights from {checkpoint.path}: fine-tuning starts at iteration 0")
            return 0, 0
        if not wanted.no_load_optim:
            say(f"WARNING: {checkpoint.path} holds no optimizer (--no-save-optim): its moments start at zero")
        optimizer.set_good_steps(int(checkpoint.facts["optimizer"]["good_steps"]))
    else:
        load_state(optimizer.tensors(), specs, checkpoint, **layout)
        optimizer.load_state_dict(checkpoint.facts["optimizer"])
    if not wanted.no_load_rng and not load_rng(
            checkpoint, mp_rank=parallel.model_parallel_rank, dp_rank=parallel.data_parallel_rank,
            mp_size=parallel.model_parallel_size, dp_size=parallel.data_parallel_size, device=plan.device):
        # Not the seed itself: dropout would repeat the masks of the first steps.
        seed_random_streams(plan.config.train.seed + checkpoint.iteration, parallel)
        say(f"random states start afresh: {checkpoint.path} has none for this layout and device")
    say(f"continuing {checkpoint.path}")
    return checkpoint.iteration, int(checkpoint.facts["consumed_samples"])


def save_settings(plan: Plan) -> None:
    """config.json and the tokenizer, in the save folder: with a checkpoint, all that generation needs."""
    folder = Path(str(plan.config.checkpoint.save))
    plan.tokenizer.save(folder / "tokenizer")
    if plan.config.checkpoint.keep_best:
        plan.tokenizer.save(folder / BEST / "tokenizer")
    facts = {"environment": describe_environment(
                 plan.device, world_size=plan.ranks.world_size, local_world_size=plan.ranks.local_world_size),
             "world_size": plan.ranks.world_size,
             "train_iters": plan.train_iters, "global_batch_size": plan.global_batch_size,
             "device": str(plan.device), "precision": str(plan.dtype).removeprefix("torch."),
             "torch": torch.__version__}
    write_config(folder, plan.config, facts, goes_on=plan.source == plan.config.checkpoint.save)
