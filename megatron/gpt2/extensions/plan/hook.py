"""What a training run says of its memory: rows and a warning at its start, and its last line where there is too
little."""

from megatron.gpt2.config import Config
from megatron.gpt2.extensions.plan.pipelines import bubble
from megatron.gpt2.extensions.plan.report import expected_peak, out_of_memory, start_rows, warning
from megatron.gpt2.extensions.plan.sizes import Setting
from megatron.gpt2.extensions.plan.step import CUDA_CONTEXT
from megatron.gpt2.hooks import Hook
from megatron.gpt2.train.run import Run
from megatron.gpt2.train.setup import PreparedRun


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
        rows = start_rows(setting_of(run.prepared))
        if run.parallel.pipeline_model_parallel_size > 1:
            idle = bubble(run.config, run.prepared.micro_batches)
            rows.insert(0, ("pipeline", f"{idle:.0%} of a step idle if all layers are equally fast"))
        return rows

    def start_lines(self, run: Run) -> list[str]:
        """A warning where the run will not fit."""
        prepared = run.prepared
        return [
            line for line in [warning(setting_of(prepared), prepared.device, prepared.ranks.local_world_size)] if line
        ]

    def expected_memory(self, run: Run) -> int:
        """Of rank 0, which writes the log."""
        return expected_peak(setting_of(run.prepared))

    def explain_out_of_memory(self, prepared: PreparedRun) -> str:
        """What was expected, what was there, and the cheapest changes."""
        ranks = prepared.ranks
        return out_of_memory(setting_of(prepared), prepared.device, ranks.local_world_size, ranks.rank)
