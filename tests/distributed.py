"""Run a function on several ranks: single-threaded processes with gloo, a rendezvous through a file, and a timeout."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import get_context
from torch.multiprocessing.spawn import start_processes

CONTEXT = get_context("forkserver")
# The fork server imports the modules once. A rank then starts in 0.05 s instead of 2 s. TorchDispatchMode imports
# torch's compiler, which takes 2 s more.
CONTEXT.set_forkserver_preload(["pytest", "megatron.gpt2.commands.pretrain_gpt2", "torch._dynamo", "tests.gc_freeze"])


def _worker(
    rank: int, world_size: int, folder: str, timeout: float, fn: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout),
    )
    torch.save(fn(rank, world_size, *args), f"{folder}/result_{rank}")
    dist.barrier()


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 240) -> list[Any]:
    """Call `fn(rank, world_size, *args)` on every rank and return the results by rank.

    `fn` is a module-level function. If a rank raises an exception, `run_ranks` raises the traceback of the first such
    rank and kills the others.
    """
    assert world_size >= 1
    if world_size == 1:  # A run of one process has no process group.
        return [fn(0, 1, *args)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = (world_size, folder, timeout, fn, args)
        ranks = start_processes(_worker, arguments, world_size, join=False, daemon=True, start_method="forkserver")
        deadline = time.monotonic() + timeout
        try:
            while not ranks.join(max(0.0, deadline - time.monotonic()), grace_period=0):
                hung = [rank for rank, process in enumerate(ranks.processes) if process.is_alive()]
                assert time.monotonic() < deadline, f"ranks {hung} of {world_size} hung for {timeout} s"
        finally:
            for process in ranks.processes:
                process.kill()
                process.join()
        return [torch.load(f"{folder}/result_{rank}", weights_only=False) for rank in range(world_size)]
