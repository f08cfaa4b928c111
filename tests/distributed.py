"""Run a function on several ranks: single-threaded processes with gloo, a rendezvous through a file, and a timeout."""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

CONTEXT = mp.get_context("forkserver")
# The server imports these modules once. A rank then starts in 0.05 s instead of 2 s. TorchDispatchMode imports torch's
# compiler, which takes 2 s more.
CONTEXT.set_forkserver_preload(["pytest", "megatron.gpt2.commands.pretrain_gpt2", "torch._dynamo", "tests.gc_freeze"])


def _worker(
    rank: int, world_size: int, folder: str, timeout: float, fn: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
        )
        assert dist.get_world_size() == world_size, "the world did not really run"
        result = fn(rank, world_size, *args)
        torch.save(result, f"{folder}/result_{rank}")
        dist.barrier()
    except BaseException:
        # All processes share this clock. A file's time is only exact to some milliseconds.
        at = time.monotonic_ns()
        Path(f"{folder}/error_{rank}").write_text(f"{at}\n{traceback.format_exc()}")
        # Exit without clean-up, so that the other ranks notice the lost connection immediately and end as well.
        os._exit(1)


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 240) -> list[Any]:
    """Call `fn(rank, world_size, *args)` on every rank and return the results by rank.

    `fn` is a module-level function. `run_ranks` raises a rank's exception with the traceback of that rank.
    """
    assert world_size >= 1
    if world_size == 1:  # A run of one process has no process group.
        return [fn(0, 1, *args)]
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            CONTEXT.Process(target=_worker, args=(rank, world_size, folder, timeout, fn, args), daemon=True)
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout)
        hung = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for process in processes:
            process.kill()
            process.join()
        # The first error is the cause. Later errors only report lost connections.
        errors = sorted(
            (int(at), path.name, said)
            for path in Path(folder).glob("error_*")
            for at, _, said in [path.read_text().partition("\n")]
        )
        assert not errors, f"{errors[0][1]} of {world_size} ranks:\n{errors[0][2]}"
        assert not hung, f"ranks {hung} of {world_size} hung for {timeout} s"
        codes = [process.exitcode for process in processes]
        assert codes == [0] * world_size, f"exit codes {codes}"
        return [torch.load(f"{folder}/result_{rank}", weights_only=False) for rank in range(world_size)]
