"""What a training run says of its memory: rows and a warning at its start, and its last line where there is too little.
Sizes are shown in MB of 2^20 bytes, as in the log.
"""

import re
from pathlib import Path

import torch

from data_utils.files import machine_memory
from megatron.gpt2.config import Config
from megatron.gpt2.device import cgroup_folders
from megatron.gpt2.extensions.plan.fit import Candidate, cheapest, cost, smallest
from megatron.gpt2.extensions.plan.pipelines import bubble
from megatron.gpt2.extensions.plan.sizes import Setting
from megatron.gpt2.extensions.plan.step import CUDA_CONTEXT, Memory, expected, in_mb, of_stages
from megatron.gpt2.hooks import Hook
from megatron.gpt2.monitor.reporting import resident_memory
from megatron.gpt2.train.run import Run
from megatron.gpt2.train.setup import PreparedRun

# The share of the memory that a proposed change may take: expectations are right within a tenth (benchmarks/memory.py).
MARGIN = 0.9


def setting_of(prepared: PreparedRun) -> Setting:
    """What the memory of this rank depends on. On a CPU its fixed part is what was resident before any model."""
    return Setting(
        prepared.config,
        prepared.ranks.world_size,
        prepared.device.type,
        prepared.dtype,
        CUDA_CONTEXT if prepared.device.type == "cuda" else prepared.resident,
        prepared.keeps_freed,
        prepared.start.get("consumed_samples", 0),
    )


class MemoryPlan(Hook):
    """Expected memory, beside what is there."""

    def __init__(self, config: Config) -> None:
        pass

    def start_rows(self, run: Run) -> list[tuple[str, str]]:
        """Expected memory by part; in a pipeline also how long its ranks wait."""
        setting = setting_of(run.prepared)
        memory = expected(setting)
        rows = [
            ("expected memory", f"{in_mb(memory.total)} MB per rank, fullest in {memory.moment}"),
            ("", parts_of(memory)),
        ]
        if memory.on_host:
            rows.append(("", f"{in_mb(memory.on_host)} MB of the host's memory beside it"))
        if setting.stages > 1:
            idle = bubble(run.config, run.prepared.micro_batches)
            rows.insert(0, ("pipeline", f"{idle:.0%} of a step idle if all layers are equally fast"))
            stages = enumerate(of_stages(setting))
            rows += [("", f"stage {stage}: {in_mb(of_stage.total)} MB") for stage, of_stage in stages]
        return rows

    def start_lines(self, run: Run) -> list[str]:
        """A warning where the run will not fit."""
        line = shortage(run.prepared, run.prepared.ranks.local_world_size)
        return [f"WARNING: {line}"] if line else []

    def expected_memory(self, run: Run) -> int:
        """Of rank 0, which writes the log: of the allocator on a GPU, of the process on a CPU."""
        memory = expected(setting_of(run.prepared), 0)
        return memory.allocated if run.device.type == "cuda" else memory.total

    def explain_out_of_memory(self, prepared: PreparedRun) -> str:
        """What was expected, what was there, and the cheapest changes. Where the run was expected to fit, they need
        clearly less than what was expected."""
        setting, rank = setting_of(prepared), prepared.ranks.rank
        memory = expected(setting, setting.stage_of(rank))
        there, where = available(prepared.device, prepared.ranks.local_world_size)
        return (
            f"out of memory on rank {rank}: expected {in_mb(memory.total)} MB in {memory.moment} "
            f"({parts_of(memory)}), and {in_mb(there)} MB were there ({where}); "
            + ways_out(setting, min(there, memory.total))
        )


def shortage(prepared: PreparedRun, local_world_size: int) -> str:
    """Before the first step: what is expected and not there, and the ways out; empty where it fits. local_world_size:
    see `available`."""
    setting = setting_of(prepared)
    total, (there, where) = expected(setting).total, available(prepared.device, local_world_size)
    if total <= there:
        return ""
    expectation = f"about {in_mb(total)} MB are expected per rank and {in_mb(there)} MB are there ({where}): "
    return expectation + ways_out(setting, there)


def parts_of(memory: Memory) -> str:
    """The parts of a MB or more with their MB, the largest first: "activations 561, fixed 336"."""
    parts = sorted(memory.parts.items(), key=lambda item: -item[1])
    return ", ".join(f"{part} {in_mb(size)}" for part, size in parts if size >= 2**20)


def ways_out(setting: Setting, budget: int) -> str:
    """The three cheapest changes that fit with a margin, or the layout that needs the least."""
    now = cost(setting, batch=setting.config.train.micro_batch_size)

    def offer(candidate: Candidate) -> str:
        flags = " ".join(candidate.flags) or "the flags as they are"
        return f"{flags} ({in_mb(candidate.memory.total)} MB, {max(candidate.than(now), 0.0):.0%} slower)"

    if found := cheapest(setting, int(MARGIN * budget), 3):
        return "cheapest changes: " + "; ".join(map(offer, found))
    return (
        f"no layout on {setting.world_size} rank{'s' * (setting.world_size > 1)} fits: the least is "
        f"{offer(smallest(setting))}; more ranks that share a model, or a smaller one, need less"
    )


def available(device: torch.device, local_world_size: int = 1) -> tuple[int, str]:
    """Bytes that this rank can have, including what it has already, and where that limit comes from. local_world_size:
    the ranks that share this machine's memory."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) + CUDA_CONTEXT, f"on {torch.cuda.get_device_name(device)}"
    limits = [(machine_memory("MemTotal"), "this machine's memory")]
    for folder in cgroup_folders("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            try:
                limits.append((int((folder / name).read_text()), "the container's limit"))
            except (OSError, ValueError):  # none there, or "max"
                continue
    by = f", shared by {local_world_size} ranks" if local_world_size > 1 else ""
    shared = [(size // local_world_size, where + by) for size, where in limits if size is not None]
    return min([*shared, *_of_the_process()], default=(1 << 62, "no limit is known"))


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
