"""What a person reads about the memory of a run: the rows of the start table, a warning where there is too little, and
the line in which a run ends that is out of memory. Sizes are shown in MB of 2^20 bytes, as in the log.
"""

import re
from pathlib import Path

import torch

from data_utils.files import machine_memory
from megatron.gpt2.device import cgroup_folders
from megatron.gpt2.extensions.plan.fit import Candidate, cheapest, cost, smallest
from megatron.gpt2.extensions.plan.sizes import Setting
from megatron.gpt2.extensions.plan.step import CUDA_CONTEXT, Memory, expected, of_stages
from megatron.gpt2.monitor.reporting import resident_memory

# The share of the memory that a proposed change may take: expectations are right within a tenth (benchmarks/memory.py).
MARGIN = 0.9


def in_mb(size: float) -> str:
    """Bytes as whole MB of 2^20 bytes: "12,760"."""
    return f"{size / 2**20:,.0f}"


def parts_of(memory: Memory) -> str:
    """The parts of a MB or more with their MB, the largest first: "activations 561, fixed 336"."""
    parts = sorted(memory.parts.items(), key=lambda item: -item[1])
    return ", ".join(f"{part} {in_mb(size)}" for part, size in parts if size >= 2**20)


def start_rows(setting: Setting) -> list[tuple[str, str]]:
    """The rows (name, text) of the start table about memory."""
    memory = expected(setting)
    host = [("", f"{in_mb(memory.on_host)} MB of the host's memory beside it")] if memory.on_host else []
    stages = [
        ("", f"stage {stage}: {in_mb(of_stage.total)} MB")
        for stage, of_stage in enumerate(of_stages(setting))
        if setting.stages > 1
    ]
    return [
        ("expected memory", f"{in_mb(memory.total)} MB per rank, fullest in {memory.moment}"),
        ("", parts_of(memory)),
        *host,
        *stages,
    ]


def expected_peak(setting: Setting) -> int:
    """Bytes that the log's memory line should show, which rank 0 writes: of the allocator on a GPU, of the process on a
    CPU."""
    memory = expected(setting, setting.stage_of(0))
    return memory.allocated if setting.device == "cuda" else memory.total


def warning(setting: Setting, device: torch.device, local_world_size: int) -> str:
    """Before the first step: what is expected and not there, and the ways out; empty where it fits. local_world_size:
    the ranks that share this machine's memory."""
    memory, (there, where) = expected(setting), available(device, local_world_size)
    return (
        ""
        if memory.total <= there
        else (
            f"WARNING: about {in_mb(memory.total)} MB are expected per rank and {in_mb(there)} MB are there ({where}): "
            + ways_out(setting, there)
        )
    )


def out_of_memory(setting: Setting, device: torch.device, local_world_size: int, rank: int) -> str:
    """The line in which `rank` ends: the expected parts beside what was there, and the cheapest changes. Where the run
    was expected to fit, the changes need clearly less than what was expected."""
    memory, (there, where) = expected(setting, setting.stage_of(rank)), available(device, local_world_size)
    return (
        f"out of memory on rank {rank}: expected {in_mb(memory.total)} MB in {memory.moment} "
        f"({parts_of(memory)}), and {in_mb(there)} MB were there ({where}); "
        + ways_out(setting, min(there, memory.total))
    )


def ways_out(setting: Setting, budget: int) -> str:
    """The three cheapest changes that fit with a margin, or the layout that needs the least."""
    found = cheapest(setting, int(MARGIN * budget), 3)
    now = cost(setting, batch=setting.config.train.micro_batch_size)
    if found:
        return "cheapest changes: " + "; ".join(_offer(candidate, now) for candidate in found)
    return (
        f"no layout on {setting.world_size} rank{'s' * (setting.world_size > 1)} fits: the least is "
        f"{_offer(smallest(setting), now)}; more ranks that share a model, or a smaller one, need less"
    )


def _offer(candidate: Candidate, now: float) -> str:
    flags = " ".join(candidate.flags) or "the flags as they are"
    return f"{flags} ({in_mb(candidate.memory.total)} MB, {max(candidate.than(now), 0.0):.0%} slower)"


def available(device: torch.device, local_world_size: int = 1) -> tuple[int, str]:
    """Bytes that this rank can have, including what it has already, and where that limit comes from."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) + CUDA_CONTEXT, f"on {torch.cuda.get_device_name(device)}"
    by = f", shared by {local_world_size} ranks" if local_world_size > 1 else ""
    shared = [(size // local_world_size, where + by) for size, where in [*_of_the_machine(), *_of_the_cgroup()]]
    return min([*shared, *_of_the_process()], default=(1 << 62, "no limit is known"))


def _of_the_machine() -> list[tuple[int, str]]:
    total = machine_memory("MemTotal")
    return [] if total is None else [(total, "this machine's memory")]


def _of_the_cgroup() -> list[tuple[int, str]]:
    limits = []
    for folder in cgroup_folders("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            try:
                limits.append((int((folder / name).read_text()), "the container's limit"))
            except (OSError, ValueError):  # none there, or "max"
                continue
    return limits


def _of_the_process() -> list[tuple[int, str]]:
    """`ulimit -v`, less the addresses that stand for no memory."""
    try:
        import resource  # not on Windows, hence here
    except ImportError:
        return []
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return []
    status = Path("/proc/self/status")
    pages = re.search(r"VmSize:\s+(\d+)", status.read_text()) if status.exists() else None
    empty = 1024 * int(pages.group(1)) - resident_memory()["resident"] if pages else 0
    return [(max(limit - empty, 0), "ulimit -v")]
