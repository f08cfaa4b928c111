"""Starts the ranks of an example: processes on this machine that can communicate."""

import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `import mpu` if it is not installed


def run(function: Callable[[int, int], None], world_size: int = 2) -> None:
    """Call function(rank, world_size) in `world_size` processes, connected by gloo."""
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]  # a free port
    method = "fork" if sys.platform == "linux" else "spawn"  # A forked process has already imported torch.
    start_processes(_start, (function, world_size, port), nprocs=world_size, daemon=True, start_method=method)


def _start(rank: int, function: Callable[[int, int], None], world_size: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))  # the address at which rank 0 listens
    torch.set_num_threads(1)  # All ranks share the cores of this machine.
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(0)  # All ranks draw the same random numbers.
    function(rank, world_size)
    dist.destroy_process_group()


def say(text: str) -> None:
    """Print one line for each rank, in rank order. All ranks must call `say`."""
    texts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    if dist.get_rank() == 0:
        for rank, line in enumerate(texts):
            print(f"rank {rank}: {line}", flush=True)
