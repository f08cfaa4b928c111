"""`Trainer` has all objects of a training run on one rank. `build_trainer` builds it."""

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

import mpu
from data_utils.command_line import Log
from megatron.gpt2 import device as devices
from megatron.gpt2.checkpoint.lease import Lease
from megatron.gpt2.checkpoint.save_folder import rename_old_best
from megatron.gpt2.config import Config
from megatron.gpt2.dist.hang import HangDetector
from megatron.gpt2.dist.rendezvous import initialize_distributed
from megatron.gpt2.dist.signals import StopSignal
from megatron.gpt2.hooks import Hook, Hooks
from megatron.gpt2.monitor.incidents import IncidentLog
from megatron.gpt2.monitor.run_log import RunLog, open_metric_writers
from megatron.gpt2.monitor.timers import Timers
from megatron.gpt2.train.checkpointing import (
    CheckpointManager,
    lease_save_folder,
    load_checkpoint,
    write_config_and_tokenizer,
)
from megatron.gpt2.train.data import TrainingData
from megatron.gpt2.train.forward_backward import ForwardBackward
from megatron.gpt2.train.setup import RunContext, check_settings_match
from megatron.gpt2.train.train_state import Progress, TrainState, build_train_state


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """The objects of a training run. A checkpoint saves the counters of `progress`, the weights, the optimizer and
    the random states. The other objects change, too, but a resumed run builds them again.

    context: flags, device, precision and data of the run, which are known before the process group exists.
    parallel: the process groups of this rank.
    forward_backward: a function that runs the forward and backward passes of a step.
    peak_flops: peak FLOP/s of one device, and a text that says whether it was measured or is that of a datasheet.
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
    hooks: Hooks

    @property
    def config(self) -> Config:
        return self.context.config

    @property
    def device(self) -> torch.device:
        return self.context.device

    @property
    def incidents(self) -> IncidentLog:
        """The incident log of this rank, from which `post_mortem` finds out why a run failed."""
        return self.context.incidents

    @property
    def hosts(self) -> dict[int, str]:
        """{rank: host name}; empty for a run of one rank."""
        return self.context.rank_info.hosts

    @property
    def current_global_batch_size(self) -> int:
        """The number of samples that the next step reads over all ranks."""
        return self.context.batch_schedule.size(self.progress.consumed_samples)

    def mfu(self, tokens_per_second: float) -> float:
        """Return the model FLOPs utilisation (MFU) at a speed of `tokens_per_second`: the FLOP/s that the model needs,
        divided by the peak FLOP/s of all devices."""
        flops = self.config.model.flops_per_token(self.config.data.seq_length)
        return tokens_per_second * flops / (self.peak_flops[0] * self.parallel.world_size)

    def rewind(self, folder: Path) -> int:
        """Load the newest checkpoint in `folder`, and skip the samples that the run has read since this checkpoint.
        Return the number of skipped samples. Every rank must call this method."""
        progress, end = self.progress, self.progress.consumed_samples
        self.checkpoints.finish()
        self.state.param_gather.finish_param_sync()
        # A rewind loads the whole state, even if the run was started with --finetune, --no-load-optim or --no-load-rng.
        checkpoint_config = replace(self.config.checkpoint, finetune=False, no_load_optim=False, no_load_rng=False)
        source = replace(self.context, source=str(folder), config=replace(self.config, checkpoint=checkpoint_config))
        progress.iteration, progress.consumed_samples, _ = load_checkpoint(
            source, self.parallel, self.state, self.log.info
        )
        progress.skipped_samples += end - progress.consumed_samples
        progress.loss_sum.zero_()
        self.checkpoints.remove_local()
        self.state.optimizer.skipped_in_a_row.zero_()
        self.data.rewind(progress.consumed_samples, progress.skipped_samples)
        self.log.rewind(progress.iteration)
        self.incidents.iteration = progress.iteration
        if self.timers.last_ms:
            self.timers.take_ms(1)
        self.hooks.call(Hook.on_train_begin, self)
        return end - progress.consumed_samples

    def close(self) -> None:
        """Stop the threads of the run, unlock the --save folder, and restore signal handlers and torch's settings. The
        method is called after the last step or an error. It calls no collective. It waits for a pending save, and on
        rank 0 at most GRACE_SECONDS for files of other ranks."""
        self.hooks.call(Hook.on_train_end, self)
        self.data.loader.close()
        self.checkpoints.close()
        self.log.close()
        self.stop_signal.restore()
        self.torch_settings.close()


def build_trainer(context: RunContext, log: Log) -> Trainer:
    """Create the process groups, the model and its optimizer, and load the checkpoint. Every rank must call this
    function. Raises ValueError on every rank if flags or files differ between ranks.

    log: gets the lines that are logged before the run has its own log.
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
        hooks = Hooks(context.hooks)
        if context.rank_info.rendezvous is not None:
            nccl = context.backend == "nccl"
            hooks.append(HangDetector(context.rank_info, context.timeout, context.incidents, watches_steps=nccl))
        progress = Progress(iteration, consumed, skipped, torch.zeros((), dtype=torch.float64, device=device))
        trainer = Trainer(
            context=context,
            parallel=parallel,
            state=state,
            forward_backward=ForwardBackward(config.pipeline_schedule, state, parallel, timers),
            data=TrainingData(context, parallel, consumed, skipped),
            checkpoints=CheckpointManager(
                context,
                parallel,
                state,
                progress,
                lease=lease,
                log=run_log,
                on_save=lambda: hooks.call(Hook.on_save, trainer),
            ),
            log=run_log,
            timers=timers,
            stop_signal=StopSignal(context.timeout),
            progress=progress,
            peak_flops=devices.peak_flops(device, context.dtype),
            torch_settings=settings.pop_all(),
            hooks=hooks,
        )
        hooks.call(Hook.on_train_begin, trainer)
        return trainer


def initialize_groups(context: RunContext, log: Log) -> mpu.ParallelState:
    """Create torch's process group, if it does not exist, and the groups of `mpu`. Raises ValueError on every rank if a
    rank was started with different flags or files."""
    if context.device.type == "cuda":
        torch.cuda.set_device(context.device)
    parallel = context.config.parallel
    if not dist.is_initialized():
        initialize_distributed(context.rank_info, context.backend, context.device, parallel.distributed_timeout_minutes)
    check_settings_match(context, log)
    return mpu.initialize_model_parallel(
        parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size, timeout=context.timeout
    )


def open_log(context: RunContext, iteration: int, lease: Lease | None) -> RunLog:
    """Open the log of a run that starts at `iteration`. The rank with the `lease` of the --save folder also writes
    config.json and the tokenizer. At the start of a new run, this rank renames the folder `best` of an earlier run."""
    active = lease is not None
    log = RunLog(
        context.save_directory,
        train_iters=context.train_iters,
        start_iteration=iteration,
        metric_writers=open_metric_writers(context.config, start_iteration=iteration, active=active),
        active=active,
        is_owner=lease.is_held if lease is not None else lambda: False,
    )
    if active:
        if iteration == 0:
            rename_old_best(context.save_directory, log.info)
        write_config_and_tokenizer(context)
    return log
