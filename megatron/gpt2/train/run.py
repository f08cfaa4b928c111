"""`Run`: everything that a training run has on one rank, and how it is built."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

import mpu
from megatron.gpt2 import device as devices
from megatron.gpt2.checkpoint.folder import set_best_aside
from megatron.gpt2.config import Config
from megatron.gpt2.dist.hang import Hang
from megatron.gpt2.dist.rendezvous import initialize_distributed
from megatron.gpt2.dist.signals import StopSignal
from megatron.gpt2.hooks import Hook
from megatron.gpt2.monitor.incidents import Incidents
from megatron.gpt2.monitor.run_log import RunLog
from megatron.gpt2.monitor.timers import Timers
from megatron.gpt2.monitor.trackers import open_trackers
from megatron.gpt2.train.checkpointing import Checkpointing, load_run, lock_save_folder, write_config_and_tokenizer
from megatron.gpt2.train.data import TrainingData
from megatron.gpt2.train.engine import Engine, Progress, build_engine
from megatron.gpt2.train.forward_backward import ForwardBackward
from megatron.gpt2.train.setup import Log, PreparedRun, check_ranks_agree


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training run under way. Only what `progress` and the tensors of `engine` hold changes from step to step.

    prepared: what was known before the process group existed: flags, device, precision, lengths. parallel: the groups of this rank.
    forward_backward: runs the passes of a step. peak: FLOP/s of one device, and words for what that figure is.
    settings: of torch, which end with the run. hooks: what extends the run, or watches it.
    """

    prepared: PreparedRun
    parallel: mpu.ParallelState
    engine: Engine
    forward_backward: ForwardBackward
    data: TrainingData
    checkpoints: Checkpointing
    log: RunLog
    timers: Timers
    stop: StopSignal
    progress: Progress
    peak: tuple[float, str]
    settings: contextlib.ExitStack
    hooks: Sequence[Hook]

    @property
    def config(self) -> Config:
        """The configuration of the run."""
        return self.prepared.config

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.prepared.device

    @property
    def incidents(self) -> Incidents:
        """Of this rank, for whoever finds out why a run died."""
        return self.prepared.incidents

    @property
    def hosts(self) -> dict[int, str]:
        """The host name of each rank; empty for one that is alone."""
        meeting = self.prepared.ranks.meeting
        return meeting.hosts if meeting is not None else {}

    @property
    def samples_of_step(self) -> int:
        """Samples that the next step takes over all ranks."""
        return self.prepared.batch_schedule.size(self.progress.consumed_samples)

    def mfu(self, tokens_per_second: float) -> float:
        """Model FLOPs utilisation: the fraction of the peak of all devices that the model's own arithmetic used."""
        flops = self.config.model.flops_per_token(self.config.data.seq_length)
        return tokens_per_second * flops / (self.peak[0] * self.parallel.world_size)

    def save(self) -> Path | None:
        """Write a checkpoint of this iteration, see `Checkpointing.save`."""
        self._before_save()
        return self.checkpoints.save(self.progress)

    def save_locally(self) -> None:
        """Write a local checkpoint of this iteration, if one is due."""
        if self.checkpoints.local_is_due(self.progress):
            self._before_save()
            self.checkpoints.save_locally(self.progress)

    def save_if_best(self, valid_loss: float) -> None:
        """Write a checkpoint of this iteration aside, if no validation loss was lower."""
        self._before_save()
        self.checkpoints.save_if_best(self.progress, valid_loss)

    def _before_save(self) -> None:
        for hook in self.hooks:
            hook.before_save(self)

    def close(self) -> None:
        """After the last step, or an error: nothing is read or written any more, another run may have the folder, and
        signals and torch's settings are as before the run. Waits for no other rank."""
        for hook in self.hooks:
            hook.close(self)
        self.data.loader.close()
        self.checkpoints.close()
        self.log.close()
        self.checkpoints.unlock()
        self.stop.restore()
        self.settings.close()


def build_run(prepared: PreparedRun, log: Log) -> Run:
    """Make the process groups, and make or load everything that a step needs. Every rank calls it. log: takes the lines
    from before the run has its own log. ValueError on every rank if the ranks cannot train together."""
    device, config = prepared.device, prepared.config
    with contextlib.ExitStack() as settings:
        if config.is_deterministic:
            settings.enter_context(devices.deterministic_algorithms())
        parallel = make_groups(prepared)
        lock = lock_save_folder(prepared, parallel.rank, log)
        engine = build_engine(prepared, parallel, log)
        iteration, consumed, skipped = load_run(prepared, parallel, engine, log)
        prepared.incidents.iteration = iteration
        run_log = open_log(prepared, iteration, active=parallel.rank == 0)
        timers = Timers(device)
        hooks = list(prepared.hooks)
        if prepared.ranks.meeting is not None:
            nccl = prepared.backend == "nccl"
            hooks.append(Hang(prepared.ranks, prepared.timeout, prepared.incidents, watches_steps=nccl))
        run = Run(
            prepared=prepared,
            parallel=parallel,
            engine=engine,
            forward_backward=ForwardBackward(config.schedule, engine, parallel, timers),
            data=TrainingData(prepared, parallel, consumed, skipped),
            checkpoints=Checkpointing(prepared, parallel, engine, lock=lock, log=run_log.info),
            log=run_log,
            timers=timers,
            stop=StopSignal(prepared.timeout),
            progress=Progress(iteration, consumed, skipped, torch.zeros((), dtype=torch.float64, device=device)),
            peak=devices.peak_flops(device, prepared.dtype),
            settings=settings.pop_all(),
            hooks=hooks,
        )
        for hook in hooks:
            hook.begin(run)
        return run


def make_groups(prepared: PreparedRun) -> mpu.ParallelState:
    """Join the process group, unless a program around this one has done so, and make mpu's groups. ValueError, on every
    rank, if one was started in another way."""
    if prepared.device.type == "cuda":
        torch.cuda.set_device(prepared.device)
    parallel = prepared.config.parallel
    if not dist.is_initialized():
        initialize_distributed(prepared.ranks, prepared.backend, prepared.device, parallel.distributed_timeout_minutes)
    check_ranks_agree(prepared)
    return mpu.initialize_model_parallel(
        parallel.model_parallel_size, parallel.pipeline_model_parallel_size, timeout=prepared.timeout
    )


def open_log(prepared: PreparedRun, iteration: int, *, active: bool) -> RunLog:
    """The log of a run that continues at `iteration`. The active rank also puts aside what an earlier run left, and
    writes config.json and the tokenizer."""
    log = RunLog(
        prepared.save_directory,
        train_iters=prepared.train_iters,
        start_iteration=iteration,
        trackers=open_trackers(prepared.config, start_iteration=iteration, active=active),
        active=active,
    )
    if active:
        if iteration == 0:
            set_best_aside(prepared.save_directory, log.info)
        write_config_and_tokenizer(prepared)
    return log
