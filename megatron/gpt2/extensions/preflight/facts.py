"""What a rank finds out before a run: by itself, versions, code, device, disk, memory and data; with the others, whether
each collective of each group gives what it must, and how far their clocks are apart."""

import functools
import hashlib
import math
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

import mpu
from data_utils.files import flush_to_disk
from megatron.gpt2.checkpoint.folder import lock_folder
from megatron.gpt2.commands.bench_collectives import OPERATIONS, Members, correct, prepare, time_run
from megatron.gpt2.device import PRECISIONS
from megatron.gpt2.extensions.plan.hook import available, setting_of, shortage
from megatron.gpt2.extensions.plan.step import expected, in_mb
from megatron.gpt2.model.gpt2 import count_parameters
from megatron.gpt2.monitor.environment import ROOT
from megatron.gpt2.train.setup import PreparedRun, decisions

ROOMS = ("mpu", "data_utils", "megatron/gpt2")
WRITTEN = 16 << 20  # bytes, for the speed of the --save folder
MOMENTS = 12  # bytes of a parameter: master and two moments in fp32
PRODUCTS = 4
INNER = 256  # of the product: sums of so many -1, 0 and 1 are exact in every precision
COLLECTIVE_BYTES = 1 << 18  # of a message, or of all its blocks together
COLLECTIVE_RUNS = 3
CLOCK_ROUNDS = 5

Facts = dict[str, Any]  # in JSON's types, since the ranks exchange them


def facts_of_process(device: torch.device) -> Facts:
    """Versions, code, host and device. The same on all ranks, except for the host."""
    cuda = device.type == "cuda"
    return {
        "host": platform.node(),
        "versions": {
            "torch": torch.__version__,
            "Python": platform.python_version(),
            "CUDA": torch.version.cuda if cuda else None,
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
            "numpy": np.__version__,
            "safetensors": safetensors.__version__,
        },
        "code": code_hash(),
        "device": torch.cuda.get_device_name(device) if cuda else platform.machine(),
    }


def code_hash() -> str:
    """A hash of all source files of the program."""
    digest = hashlib.sha256()
    for path in (path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))):
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def facts_of_run(prepared: PreparedRun, local_world_size: int) -> Facts:
    """Decisions, data, memory and checkpoints of a run that could be prepared."""
    there, where = available(prepared.device, local_world_size)
    schedule, config = prepared.batch_schedule, prepared.config.checkpoint
    start = prepared.start.get("iteration", 0)
    steps = max(0, prepared.train_iters - start)
    saves = math.ceil(steps / config.save_interval) if config.save_interval else 1
    kept = (
        saves if config.keep_last is None else min(saves, config.keep_last + 1)
    )  # one is written before an old one goes
    bytes_each = prepared.dtype.itemsize + (0 if config.no_save_optim else MOMENTS)
    checkpoint_bytes = count_parameters(prepared.config.model)[0] * bytes_each  # all ranks' files, without the JSON
    return {
        "decisions": decisions(prepared),
        "data": prepared.splits.fingerprint,
        "samples": len(prepared.splits.train),
        "used": schedule.after_steps(prepared.train_iters - start, prepared.start.get("consumed_samples", 0)),
        "batch": schedule.final,
        "train_iters": prepared.train_iters,
        "is_finished": prepared.is_finished,
        "precision": PRECISIONS[prepared.dtype],
        "start": start,
        "memory": f"{in_mb(expected(setting_of(prepared)).total)} MB of {in_mb(there)} MB ({where})",
        "memory_problem": shortage(prepared, local_world_size),
        "checkpoint_bytes": checkpoint_bytes,
        "bytes_to_come": (kept + 2 * config.keep_best) * checkpoint_bytes,
    }


def facts_of_disk(folder: Path, *, first: bool, writes: bool) -> Facts:
    """Whether the --save folder can be written, how much is free there, and how fast it takes WRITTEN bytes.

    first: whether this rank, the first of all, also looks if another run has the folder. writes: whether this rank, the
    first of its machine, measures. Nothing stays on the disk.
    """
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    speed = 0.0
    try:
        if first and (folder / "lock").exists():
            lock_folder(folder, lambda line: None).close()
        if not there.is_dir() or not os.access(there, os.W_OK):
            raise ValueError(f"--save {folder}: {there} cannot be written")
        if writes:
            data, start = os.urandom(1 << 20), time.perf_counter()
            with tempfile.TemporaryFile(dir=there) as file:
                for _ in range(WRITTEN >> 20):
                    file.write(data)
                flush_to_disk(file)
            speed = WRITTEN / max(time.perf_counter() - start, 1e-9)
    except (ValueError, OSError) as error:
        return {"disk_problem": " ".join(str(error).split())}
    return {"free": shutil.disk_usage(there).free, "bytes_per_s": speed}


def product_problem(device: torch.device, dtype: torch.dtype, multiply: Callable[..., Tensor] = torch.matmul) -> str:
    """What is wrong with products of this device; "" if each one has the row and column sums that whole numbers say.

    A [512, 256] and B [256, 512] hold -1, 0 and 1, so that every entry of A B is exact in every precision. The sums of
    A B over a row and over a column follow from A and B by vectors only, computed on the CPU in int64.
    """
    generator = torch.Generator().manual_seed(1)
    for number in range(PRODUCTS):
        a, b = (torch.randint(-1, 2, shape, generator=generator) for shape in ((512, INNER), (INNER, 512)))
        rows = (a * b.sum(1)).sum(1)  # [512]
        columns = (a.sum(0)[:, None] * b).sum(0)  # [512]
        product = multiply(a.to(device, dtype), b.to(device, dtype)).cpu().double()
        wrong = int((product.sum(1) != rows).sum()) + int((product.sum(0) != columns).sum())
        if wrong:
            return f"product {number + 1} of {PRODUCTS} has {wrong} of 1,024 row and column sums wrong"
    return ""


def try_groups(state: mpu.ParallelState, device: torch.device) -> dict[str, Facts]:
    """What `try_group` finds of each group that has more than one member. Every rank calls it."""
    groups = {
        "world": dist.group.WORLD,
        "tensor": state.tensor_model_parallel_group,
        "data": state.data_parallel_group,
        "pipeline": state.pipeline_model_parallel_group,
    }
    return {name: try_group(group, device) for name, group in groups.items() if group is not None and group.size() > 1}


def try_group(group: ProcessGroup, device: torch.device) -> Facts:
    """{"ms": {operation: the median of its runs}, "wrong": the operations that gave other values on this rank}."""
    found: Facts = {"ms": {}, "wrong": []}
    members = Members(group, device, torch.float32)
    for name in ("all_reduce_sum", "all_gather", "reduce_scatter", "broadcast"):
        operation, seconds, right = OPERATIONS[name], [], True
        for _ in range(COLLECTIVE_RUNS):
            x, y = prepare(operation, members, COLLECTIVE_BYTES)
            seconds.append(time_run(functools.partial(operation.run, members, x, y), device, group))
            right &= correct(operation, members, y)
        name = name.removesuffix("_sum")
        found["ms"][name] = round(1000 * statistics.median(seconds), 3)
        found["wrong"] += [] if right else [name]
    return found


def clock_offset(device: torch.device) -> float:
    """Seconds by which this rank's clock is before that of rank 0: the median of some rounds, in each of which all
    ranks read their clocks behind a barrier."""
    offsets = []
    for _ in range(CLOCK_ROUNDS):
        dist.barrier()
        now = torch.tensor(time.time(), dtype=torch.float64, device=device)
        of_first = now.clone()
        dist.broadcast(of_first, 0)
        offsets.append(float(now - of_first))
    return statistics.median(offsets)
