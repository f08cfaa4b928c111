"""A training run prints its memory: rows and a warning at the start, and the error if it runs out of memory. Sizes are
in MB of 2^20 bytes, as in the log.
"""

import contextlib
import re
from pathlib import Path

import torch

from data_utils.command_line import plural
from data_utils.files import machine_memory
from megatron.gpt2.config import Config
from megatron.gpt2.device import cgroup_folders
from megatron.gpt2.extensions.plan.memory import CUDA_CONTEXT, MemoryEstimate, MemoryInputs, estimate_memory, in_mb
from megatron.gpt2.extensions.plan.search import bubble, cheapest_offers, smallest_offer
from megatron.gpt2.hooks import ExpectedMemory, Hook
from megatron.gpt2.monitor.log_lines import resident_memory
from megatron.gpt2.train.setup import RunContext
from megatron.gpt2.train.trainer import Trainer

# A proposed layout may use 90 % of the memory, because estimates are up to 10 % wrong (benchmarks/memory.py).
MARGIN = 0.9


def memory_inputs(context: RunContext) -> MemoryInputs:
    """Return the inputs of a run's estimate. On a CPU, `fixed` is the resident memory before the model exists."""
    return MemoryInputs(
        context.config,
        context.rank_info.world_size,
        context.device.type,
        context.dtype,
        CUDA_CONTEXT if context.device.type == "cuda" else context.resident,
        context.keeps_freed_memory,
        context.resume_metadata.get("consumed_samples", 0),
    )


def describe_failure(error: Exception) -> str:
    """Describe in one line why the trace of the run's step failed. Neither a run nor preflight needs the plan."""
    return f"no memory plan ({type(error).__name__}: {' '.join(str(error).split())[:200]})"


class MemoryPlan(Hook):
    """Prints the estimated memory of a run, and compares it with the available memory. At the start, rank 0 traces a
    step in 0.1 to 0.4 s. An error of the estimate does not end the run."""

    def __init__(self, config: Config) -> None:
        """Ignore `config`, in which the size of the vocabulary is not known yet. `expected_memory` reads
        `trainer.config`."""

    def expected_memory(self, trainer: Trainer) -> ExpectedMemory:
        """Return the estimate by part, the bubble of a pipeline, and a warning if the run will not fit. Ranks
        other than 0 print nothing, so they estimate nothing."""
        if trainer.context.rank_info.rank > 0:
            return ExpectedMemory([], [], None)
        try:
            return expected_memory(trainer)
        except Exception as error:
            return ExpectedMemory([], [f"{describe_failure(error)}; the run does not need it"], None)

    def explain_out_of_memory(self, context: RunContext) -> str | None:
        """Return the error: the estimate, the available memory, and the cheapest changes. If the estimate was below the
        available memory, the proposed changes need clearly less memory than the estimate."""
        with contextlib.suppress(Exception):
            inputs, rank = memory_inputs(context), context.rank_info.rank
            memory = estimate_memory(inputs, inputs.stage_of(rank))
            available, limit = available_memory(context.device, context.rank_info.local_world_size)
            return (
                f"out of memory on rank {rank}: expected {in_mb(memory.total)} MB in {memory.moment} "
                f"({format_parts(memory)}), and {in_mb(available)} MB were available ({limit}); "
                + suggest_changes(inputs, min(available, memory.total))
            )
        return None


def expected_memory(trainer: Trainer) -> ExpectedMemory:
    """Estimate the memory of a run. `peak` is the peak of rank 0, because rank 0 writes the log. `peak` counts the
    memory of torch's allocator on a GPU, and the memory of the process on a CPU."""
    context = trainer.context
    inputs = memory_inputs(context)
    memory, of_rank_0 = estimate_memory(inputs), estimate_memory(inputs, 0)
    rows = [
        ("expected memory", f"{in_mb(memory.total)} MB per rank, largest in {memory.moment}"),
        ("", format_parts(memory)),
    ]
    if memory.on_host >= 2**20:
        rows.append(("", f"{in_mb(memory.on_host)} MB of host memory in addition"))
    if inputs.stages > 1:
        idle = bubble(trainer.config, context.num_microbatches)
        rows.insert(0, ("pipeline", f"{idle:.0%} of a step idle if all layers are equally fast"))
    shortage = memory_shortage(context, context.rank_info.local_world_size)
    peak = of_rank_0.allocated if context.device.type == "cuda" else of_rank_0.total
    return ExpectedMemory(rows, [f"WARNING: {shortage}"] if shortage else [], peak)


def memory_shortage(context: RunContext, local_world_size: int) -> str:
    """Describe how much memory is missing and the possible changes, or return "" if the run fits.

    local_world_size: see `available_memory`.
    """
    inputs = memory_inputs(context)
    total, (available, limit) = estimate_memory(inputs).total, available_memory(context.device, local_world_size)
    if total <= available:
        return ""
    expectation = f"about {in_mb(total)} MB are expected per rank, and {in_mb(available)} MB are available ({limit}): "
    return expectation + suggest_changes(inputs, available)


def format_parts(memory: MemoryEstimate) -> str:
    """Format all parts of at least 1 MB, the largest first: "activations 561, fixed 336"."""
    parts = sorted(memory.parts.items(), key=lambda item: -item[1])
    return ", ".join(f"{part} {in_mb(size)}" for part, size in parts if size >= 2**20)


def suggest_changes(inputs: MemoryInputs, budget: int) -> str:
    """Describe the three cheapest changes that fit with a margin, or the smallest layout."""
    if found := cheapest_offers(inputs, int(MARGIN * budget)):
        return f"cheapest changes: {'; '.join(map(str, found))}"
    return (
        f"no layout on {plural(inputs.world_size, 'rank')} fits; the smallest: {smallest_offer(inputs)}; "
        "use more ranks per model, or a smaller model"
    )


def available_memory(device: torch.device, local_world_size: int = 1) -> tuple[int, str]:
    """Return the bytes that this rank can use, including those that it already uses, and the origin of the limit.
    local_world_size: the ranks that share this machine's memory."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) + CUDA_CONTEXT, f"on {torch.cuda.get_device_name(device)}"
    limits = [(machine_memory("MemTotal"), "this machine's memory")]
    for folder in cgroup_folders("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            try:
                limits.append((int((folder / name).read_text()), "the container's limit"))
            except (OSError, ValueError):  # The file does not exist or contains "max".
                continue
    by = f", shared by {local_world_size} ranks" if local_world_size > 1 else ""
    shared = [(size // local_world_size, origin + by) for size, origin in limits if size is not None]
    return min([*shared, *_process_limit()], default=(1 << 62, "no limit is known"))


def _process_limit() -> list[tuple[int, str]]:
    """Return the limit of `ulimit -v`, minus the address space that this process has reserved but does not use."""
    try:
        import resource  # Windows does not have this module.
    except ImportError:
        return []
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return []
    status = Path("/proc/self/status")
    pages = re.search(r"VmSize:\s+(\d+)", status.read_text()) if status.exists() else None
    empty = 1024 * int(pages.group(1)) - resident_memory()["resident"] if pages else 0
    return [(max(limit - empty, 0), "ulimit -v")]
