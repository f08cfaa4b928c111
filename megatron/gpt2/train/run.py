"""`Run`: everything that a training run has on one rank. `build.py` makes it."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import mpu
from megatron.gpt2.config import Config
from megatron.gpt2.dist.signals import StopSignal
from megatron.gpt2.hooks import Hook
from megatron.gpt2.monitor.incidents import Incidents
from megatron.gpt2.monitor.run_log import RunLog
from megatron.gpt2.monitor.timers import Timers
from megatron.gpt2.train.checkpointing import Checkpointing
from megatron.gpt2.train.data import TrainingData
from megatron.gpt2.train.engine import Engine
from megatron.gpt2.train.prepare import PreparedRun
from megatron.gpt2.train.progress import Progress
from megatron.gpt2.train.schedule_runner import ScheduleRunner


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training run under way. Only what `progress` and the tensors of `engine` hold changes from step to step.

    prepared: what was known before the ranks met: flags, device, precision, lengths. schedule: runs the forward and
    backward passes of a step.
    parallel: the groups of this rank. peak: FLOP/s of one device, and words for what that figure is.
    settings: of torch, which end with the run. incidents: of this rank, for whoever finds out why a run died.
    hooks: what extends the run, or watches it.
    """

    prepared: PreparedRun
    parallel: mpu.ParallelState
    engine: Engine
    schedule: ScheduleRunner
    data: TrainingData
    checkpoints: Checkpointing
    log: RunLog
    timers: Timers
    stop: StopSignal
    progress: Progress
    peak: tuple[float, str]
    settings: contextlib.ExitStack
    incidents: Incidents
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
    def samples_of_step(self) -> int:
        """Samples that the next step takes over all ranks."""
        return self.prepared.batch_schedule.size(self.progress.consumed_samples)

    @property
    def hosts(self) -> dict[int, str]:
        """The host name of each rank; empty for one that is alone."""
        meeting = self.prepared.ranks.meeting
        return meeting.hosts if meeting is not None else {}

    def mfu(self, tokens_per_second: float) -> float:
        """Model FLOPs utilisation: the fraction of the peak of all devices that the model's own arithmetic used."""
        flops = self.config.model.flops_per_token(self.config.data.seq_length)
        return tokens_per_second * flops / (self.peak[0] * self.parallel.world_size)

    def save(self) -> Path | None:
        """Write a checkpoint of this iteration, see `Checkpointing.save`."""
        self._before_save()
        return self.checkpoints.save(self.progress)

    def save_locally(self) -> None:
        """Write a local checkpoint of this iteration, where one is due."""
        if self.checkpoints.local_is_due(self.progress):
            self._before_save()
            self.checkpoints.save_locally(self.progress)

    def save_if_best(self, valid_loss: float) -> None:
        """Write a checkpoint of this iteration aside, where no validation loss was lower."""
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
