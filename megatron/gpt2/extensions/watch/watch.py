"""What a run notices of itself: one object that the training loop calls around each step, and each update."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import mpu
from megatron.gpt2.config import Config
from megatron.gpt2.dist.hang import Hang
from megatron.gpt2.dist.ranks import Ranks
from megatron.gpt2.extensions.watch.replicas import ReplicaCheck
from megatron.gpt2.extensions.watch.slow_ranks import SlowRanks, counting_waits
from megatron.gpt2.extensions.watch.spikes import Spikes
from megatron.gpt2.monitor.incidents import Incidents
from megatron.gpt2.optimizer.optimizer import AdamWOptimizer


@dataclass(frozen=True, kw_only=True)
class Watch:
    """hang: where there are other ranks. replicas: with --check-replicas-interval. slow_ranks: with --log-straggler.
    spikes: with --rewind-on-spike."""

    hang: Hang | None = None
    slow_ranks: SlowRanks | None = None
    spikes: Spikes | None = None
    replicas: ReplicaCheck | None = None

    def before_step(self) -> None:
        """A step begins."""
        if self.hang is not None:
            self.hang.enter_step()

    def before_update(self) -> None:
        """The gradients are there, and the optimizer is about to use them. StateChanged: see `ReplicaCheck`."""
        if self.replicas is not None:
            self.replicas.before_update()

    def after_step(self, iteration: int) -> None:
        """The step that makes `iteration` is done."""
        if self.hang is not None:
            self.hang.leave_step()
        if self.replicas is not None:
            self.replicas.after_update(iteration)

    def before_save(self) -> None:
        """The state is about to be saved. StateChanged: see `ReplicaCheck`."""
        if self.replicas is not None:
            self.replicas.before_save()

    def slow(self, own_ms: Mapping[str, float], step_ms: float) -> list[str]:
        """At a log line: see `SlowRanks.lines`."""
        return [] if self.slow_ranks is None else self.slow_ranks.lines(own_ms, step_ms)

    def names(self, error: BaseException) -> bool:
        """After a collective has failed: see `Hang.names`."""
        return self.hang is not None and self.hang.names(error)


def build_watch(
    config: Config,
    ranks: Ranks,
    backend: str,
    optimizer: AdamWOptimizer,
    parallel: mpu.ParallelState,
    incidents: Incidents,
    settings: contextlib.ExitStack,
) -> Watch:
    """What the flags and the number of ranks ask for. incidents: of this rank, at the iteration at which it starts.
    settings: end with the run."""
    hang = replicas = slow_ranks = None
    hosts = ranks.meeting.hosts if ranks.meeting is not None else {}
    if ranks.meeting is not None:
        hang = Hang(
            ranks,
            timedelta(minutes=config.parallel.distributed_timeout_minutes),
            incidents,
            watches_steps=backend == "nccl",
        )
    if config.train.check_replicas_interval is not None:
        replicas = ReplicaCheck(optimizer, parallel, config.train.check_replicas_interval, incidents.iteration, hosts)
    if config.train.log_straggler and parallel.world_size > 1:
        slow_ranks = SlowRanks(parallel, hosts, optimizer.flat.params.device)
        settings.enter_context(counting_waits())
    factor = config.train.rewind_on_spike
    return Watch(hang=hang, replicas=replicas, slow_ranks=slow_ranks, spikes=Spikes(factor) if factor else None)
