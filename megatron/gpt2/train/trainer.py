"""`Trainer` holds everything that a training run has on one rank. `build_trainer` makes it."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

import mpu
from megatron.gpt2 import device as devices
from megatron.gpt2.checkpoint.folder import rename_old_best
from megatron.gpt2.checkpoint.lease import Lease
from megatron.gpt2.config import Config
from megatron.gpt2.dist.hang import HangDetector
from megatron.gpt2.dist.rendezvous import initialize_distributed
from megatron.gpt2.dist.signals import StopSignal
from megatron.gpt2.hooks import Hook
from megatron.gpt2.monitor.incidents import IncidentLog
from megatron.gpt2.monitor.run_log import RunLog, open_trackers
from megatron.gpt2.monitor.timers import Timers
from megatron.gpt2.train.checkpointing import (
    CheckpointManager,
    lease_save_folder,
    load_checkpoint,
    write_config_and_tokenizer,
)
from megatron.gpt2.train.data import TrainingData
from megatron.gpt2.train.forward_backward import ForwardBackward
from megatron.gpt2.train.setup import Log, RunContext, check_ranks_agree
from megatron.gpt2.train.train_state import Progress, TrainState, build_train_state


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """The parts of a training run. From step to step only `progress` and the tensors of `state` change.

    context: flags, device, precision and data of the run, known before the process group exists.
    parallel: the process groups of this rank.
    forward_backward: runs the forward and backward passes of a step.
    peak_flops: FLOP/s of one device, and a text that says where the figure is from.
    torch_settings: settings of torch that are restored when the run ends.
    hooks: extensions of the run.
    """

    context: RunContext
    parallel: mpu.ParallelState
    state: TrainState
    forward_backward: ForwardBackward
    data: TrainingData
    checkpoints: CheckpointManager
    log: RunLog
    timers: Timers
    stop_signal: StopSignal
    progress: Progress
    peak_flops: tuple[float, str]
    torch_settings: contextlib.ExitStack
    hooks: Sequence[Hook]

    @property
    def config(self) -> Config:
        """Return the configuration of the run."""
        return self.context.config

    @property
    def device(self) -> torch.device:
        """Return the device of this rank."""
        return self.context.device

    @property
    def incidents(self) -> IncidentLog:
        """Return the incident log of this rank, which helps to find out why a run failed."""
        return self.context.incidents

    @property
    def hosts(self) -> dict[int, str]:
        """Return the host name of each rank. It is empty for a run of one rank."""
        return self.context.rank_info.hosts

    @property
    def current_global_batch_size(self) -> int:
        """Return the number of samples that the next step reads over all ranks."""
        return self.context.batch_schedule.size(self.progress.consumed_samples)

    def mfu(self, tokens_per_second: float) -> float:
        """Return the model FLOPs utilisation: the FLOP/s that the model needs, divided by the peak of all devices."""
        flops = self.config.model.flops_per_token(self.config.data.seq_length)
        return tokens_per_second * flops / (self.peak_flops[0] * self.parallel.world_size)

    def save(self) -> Path | None:
        """Write a checkpoint of this iteration. Return its folder, or None with a warning if it failed on any rank.
        With --async-save, only start to write and return None; `checkpoints.saver.finish` waits for the result."""
        self._before_save()
        return self.checkpoints.saver.save(*self.checkpoints.contents(self.progress))

    def save_locally(self) -> None:
        """Write a local checkpoint of this iteration, if one is due."""
        local, interval = self.checkpoints.local, self.config.checkpoint.local_checkpoint_interval
        if local is not None and interval is not None and self.progress.iteration % interval == 0:
            self._before_save()
            local.save(*self.checkpoints.contents(self.progress))

    def save_if_best(self, valid_loss: float) -> None:
        """Write a checkpoint of this iteration into the folder `best` if `valid_loss` is the lowest so far."""
        self._before_save()
        self.checkpoints.save_if_best(self.progress, valid_loss)

    def _before_save(self) -> None:
        self.checkpoints.restore_folder()
        self.log.sync()
        self.incidents.sync()
        for hook in self.hooks:
            hook.before_save(self)

    def close(self) -> None:
        """End the run after the last step or an error. Stop the threads, unlock the --save folder, and restore signal
        handlers and torch's settings. It does not wait for other ranks."""
        for hook in self.hooks:
            hook.close(self)
        self.data.loader.close()
        self.checkpoints.saver.close()
        self.log.close()
        self.checkpoints.unlock()
        self.stop_signal.restore()
        self.torch_settings.close()


def build_trainer(context: RunContext, log: Log) -> Trainer:
    """Make the process groups, the model and its optimizer, and load the checkpoint. Every rank must call it.

    log: receives lines until the run has its own log. Raises ValueError on every rank if the ranks cannot train
    together.
    """
    device, config = context.device, context.config
    with contextlib.ExitStack() as settings:
        if config.is_deterministic:
            settings.enter_context(devices.deterministic_algorithms())
        parallel = initialize_groups(context, log)
        lease = lease_save_folder(context, parallel.rank)
        state = build_train_state(context, parallel, log)
        iteration, consumed, skipped = load_checkpoint(context, parallel, state, log)
        context.incidents.iteration = iteration
        run_log = open_log(context, iteration, lease)
        timers = Timers(device)
        hooks = list(context.hooks)
        if context.rank_info.rendezvous is not None:
            nccl = context.backend == "nccl"
            hooks.append(HangDetector(context.rank_info, context.timeout, context.incidents, watches_steps=nccl))
        trainer = Trainer(
            context=context,
            parallel=parallel,
            state=state,
            forward_backward=ForwardBackward(config.pipeline_schedule, state, parallel, timers),
            data=TrainingData(context, parallel, consumed, skipped),
            checkpoints=CheckpointManager(context, parallel, state, lease=lease, log=run_log.info),
            log=run_log,
            timers=timers,
            stop_signal=StopSignal(context.timeout),
            progress=Progress(iteration, consumed, skipped, torch.zeros((), dtype=torch.float64, device=device)),
            peak_flops=devices.peak_flops(device, context.dtype),
            torch_settings=settings.pop_all(),
            hooks=hooks,
        )
        for hook in hooks:
            hook.begin(trainer)
        return trainer


def initialize_groups(context: RunContext, log: Log) -> mpu.ParallelState:
    """Join the process group, unless the calling program has already done so, and make mpu's groups. Raises ValueError
    on every rank if a rank was started with different flags or files."""
    if context.device.type == "cuda":
        torch.cuda.set_device(context.device)
    parallel = context.config.parallel
    if not dist.is_initialized():
        initialize_distributed(context.rank_info, context.backend, context.device, parallel.distributed_timeout_minutes)
    check_ranks_agree(context, log)
    return mpu.initialize_model_parallel(
        parallel.model_parallel_size, parallel.pipeline_model_parallel_size, timeout=context.timeout
    )


def open_log(context: RunContext, iteration: int, lease: Lease | None) -> RunLog:
    """Open the log of a run that starts at `iteration`. The rank with the `lease` also renames an earlier run's folder
    `best` and writes config.json and the tokenizer."""
    active = lease is not None
    log = RunLog(
        context.save_directory,
        train_iters=context.train_iters,
        start_iteration=iteration,
        trackers=open_trackers(context.config, start_iteration=iteration, active=active),
        active=active,
        is_owner=lease.is_held if lease is not None else lambda: False,
    )
    if active:
        if iteration == 0:
            rename_old_best(context.save_directory, log.info)
        write_config_and_tokenizer(context)
    return log
