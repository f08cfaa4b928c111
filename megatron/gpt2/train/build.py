"""A run is built: the ranks join, and each makes or loads what a step needs, in the order in which one part needs
another.
"""

import contextlib

import torch
import torch.distributed as dist

import mpu
from megatron.gpt2 import device as devices
from megatron.gpt2.dist.hang import Hang
from megatron.gpt2.dist.rendezvous import initialize_distributed
from megatron.gpt2.dist.signals import StopSignal
from megatron.gpt2.monitor.timers import Timers
from megatron.gpt2.train.agreement import check_data_is_the_same, check_ranks_agree
from megatron.gpt2.train.checkpointing import Checkpointing, load_run, lock_save_folder
from megatron.gpt2.train.data import TrainingData
from megatron.gpt2.train.engine import build_engine
from megatron.gpt2.train.log_lines import open_log
from megatron.gpt2.train.prepare import Log, PreparedRun
from megatron.gpt2.train.progress import Progress
from megatron.gpt2.train.run import Run
from megatron.gpt2.train.schedule_runner import ScheduleRunner


def build_run(prepared: PreparedRun, log: Log) -> Run:
    """Join the other ranks and make or load everything that a step needs. Every rank calls it. log: takes the lines
    from before the run has a log of its own. ValueError on every rank where the ranks cannot train together."""
    device = prepared.device
    with contextlib.ExitStack() as settings:
        if prepared.config.is_deterministic:
            settings.enter_context(devices.deterministic_algorithms())
        parallel = make_groups(prepared)
        check_data_is_the_same(prepared)
        lock = lock_save_folder(prepared, parallel.rank, log)
        engine = build_engine(prepared, parallel, log)
        iteration, consumed, skipped = load_run(prepared, parallel, engine, log)
        prepared.incidents.iteration = iteration
        run_log = open_log(prepared, iteration, active=parallel.rank == 0)
        data = TrainingData(prepared, parallel, consumed, skipped)
        checkpoints = Checkpointing(prepared, parallel, engine, lock=lock, log=run_log.info)
        timers = Timers(device)
        schedule = ScheduleRunner(prepared.config.schedule, engine, parallel, timers)
        hooks = list(prepared.hooks)
        if prepared.ranks.meeting is not None:
            nccl = prepared.backend == "nccl"
            hooks.append(Hang(prepared.ranks, prepared.timeout, prepared.incidents, watches_steps=nccl))
        run = Run(
            prepared=prepared,
            parallel=parallel,
            engine=engine,
            schedule=schedule,
            data=data,
            checkpoints=checkpoints,
            log=run_log,
            timers=timers,
            stop=StopSignal(prepared.timeout),
            progress=Progress.at(iteration, consumed, skipped, device),
            incidents=prepared.incidents,
            peak=devices.peak_flops(device, prepared.dtype),
            settings=settings.pop_all(),
            hooks=hooks,
        )
        for hook in hooks:
            hook.begin(run)
        return run


def make_groups(prepared: PreparedRun) -> mpu.ParallelState:
    """Join the process group, unless a program around this one has done so, and make mpu's groups. ValueError, on every
    rank, where one was started in another way."""
    if prepared.device.type == "cuda":
        torch.cuda.set_device(prepared.device)
    parallel = prepared.config.parallel
    if not dist.is_initialized():
        initialize_distributed(prepared.ranks, prepared.backend, prepared.device, parallel.distributed_timeout_minutes)
    check_ranks_agree(prepared)
    return mpu.initialize_model_parallel(
        parallel.model_parallel_size, parallel.pipeline_model_parallel_size, timeout=prepared.timeout
    )
