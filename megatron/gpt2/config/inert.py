"""Flags that a run takes and that change nothing in it."""

from collections.abc import Iterator

from megatron.gpt2.config.sections import Config


def without_effect(config: Config, device: str) -> Iterator[str]:
    """A line for each flag about what is kept for backward that changes nothing in this run. device: cpu or
    cuda."""
    parallel = config.parallel
    recomputes = config.train.recompute_granularity == "full"
    not_recomputed = "no layer is recomputed (--recompute-granularity full)"
    on_host = "the device's memory is the host's"
    if parallel.partition_activations and (
        reason := not_recomputed
        if not recomputes
        else "there is one model-parallel rank"
        if parallel.model_parallel_size == 1
        else "--sequence-parallel has split it"
        if parallel.sequence_parallel
        else ""
    ):
        yield f"--partition-activations: without effect, since {reason}"
    if parallel.checkpoint_in_cpu and (not recomputes or device == "cpu"):
        yield f"--checkpoint-in-cpu: without effect, since {on_host if recomputes else not_recomputed}"
    if parallel.cpu_offloading_num_layers and device == "cpu":
        yield f"--cpu-offloading-num-layers: without effect, since {on_host}"
