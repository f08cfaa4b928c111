"""What a rank finds out alone before a run: versions, code, device, disk, memory, data."""

import functools
import hashlib
import math
import os
import platform
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch

from data_utils.files import flush_to_disk
from megatron.gpt2.checkpoint.folder import lock_folder
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

Facts = dict[str, Any]  # in JSON's types, since the ranks exchange them


def facts_of_process(device: torch.device) -> Facts:
    """Versions, code, host and device. The same on all ranks, but for the host."""
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


@functools.cache
def code_hash() -> str:
    """A hash of all source files of the program."""
    digest = hashlib.sha256()
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def facts_of_run(prepared: PreparedRun, local_world_size: int) -> Facts:
    """Decisions, data and memory of a run that could be prepared."""
    there, where = available(prepared.device, local_world_size)
    schedule, start = prepared.batch_schedule, prepared.start
    used = schedule.after_steps(prepared.train_iters - start.get("iteration", 0), start.get("consumed_samples", 0))
    return {
        "decisions": decisions(prepared),
        "data": prepared.splits.fingerprint,
        "samples": len(prepared.splits.train),
        "used": used,
        "batch": schedule.final,
        "train_iters": prepared.train_iters,
        "is_finished": prepared.is_finished,
        "precision": PRECISIONS[prepared.dtype],
        "start": start.get("iteration", 0),
        "memory": f"{in_mb(expected(setting_of(prepared)).total)} MB of {in_mb(there)} MB ({where})",
        "memory_problem": shortage(prepared, local_world_size),
    }


def checkpoint_bytes(prepared: PreparedRun) -> int:
    """Of one checkpoint of the run, all ranks' files together, without its JSON."""
    each = prepared.dtype.itemsize + (0 if prepared.config.checkpoint.no_save_optim else MOMENTS)
    return count_parameters(prepared.config.model)[0] * each


def bytes_to_come(prepared: PreparedRun) -> int:
    """What the run's checkpoints will take on the disk beside what is there. One is written before an old one goes."""
    config = prepared.config.checkpoint
    steps = max(0, prepared.train_iters - prepared.start.get("iteration", 0))
    saves = math.ceil(steps / config.save_interval) if config.save_interval else 1
    kept = saves if config.keep_last is None else min(saves, config.keep_last + 1)
    return (kept + 2 * config.keep_best) * checkpoint_bytes(prepared)


def facts_of_disk(folder: Path, *, first: bool, writes: bool) -> Facts:
    """Whether the --save folder can be written, how much is free there, and how fast it takes WRITTEN bytes.

    first: of all ranks, whether it also looks if another run has the folder. writes: of its machine, whether it
    measures. Nothing stays on the disk.
    """
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        if first and (folder / "lock").exists():
            lock_folder(folder, lambda line: None).close()
        if not there.is_dir() or not os.access(there, os.W_OK):
            raise ValueError(f"--save {folder}: {there} cannot be written")
        seconds = write_seconds(there) if writes else 0.0
    except (ValueError, OSError) as error:
        return {"disk_problem": " ".join(str(error).split())}
    return {"free": shutil.disk_usage(there).free, "bytes_per_s": WRITTEN / seconds if writes else 0.0}


def write_seconds(folder: Path) -> float:
    """How long WRITTEN bytes take to be on the disk of `folder`. OSError where it does not take them."""
    data = os.urandom(1 << 20)
    start = time.perf_counter()
    with tempfile.TemporaryFile(dir=folder) as file:
        for _ in range(WRITTEN >> 20):
            file.write(data)
        flush_to_disk(file)
    return max(time.perf_counter() - start, 1e-9)


def product_problem(device: torch.device, dtype: torch.dtype, multiply: Any = torch.matmul) -> str:
    """What is wrong with products of this device; "" where each one has the row and column sums that whole numbers say.

    A [512, 256] and B [256, 512] hold -1, 0 and 1, so that every entry of A B is exact in every precision. The sums of
    A B over a row and over a column follow from A and B by vectors alone, computed on the CPU in int64.
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
