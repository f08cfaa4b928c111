"""The section `parallel`: how the work is laid out over ranks."""

from dataclasses import dataclass

from megatron.gpt2.config.options import option, require, require_positive


@dataclass(frozen=True)
class ParallelConfig:
    """How the work is laid out over ranks."""

    model_parallel_size: int = option(1, "ranks that share each layer", "--tensor-model-parallel-size")
    distributed_backend: str | None = option(None, "default: nccl on GPUs, gloo on CPUs",
                                             choices=("nccl", "gloo", "mpi"))
    distributed_timeout_minutes: float = option(10.0, "a collective that takes longer ends the run")
    DDP_impl: str = option("local", "data parallelism by our contiguous buffer or by torch's DDP",
                           choices=("local", "torch"))
    ddp_bucket_size: int = option(25_000_000, "gradient elements reduced at once")
    sequence_parallel: bool = option(False, "split the sequence over the model-parallel ranks between the split layers")
    use_distributed_optimizer: bool = option(False, "each data-parallel rank holds masters and moments of its part of "
                                                    "every bucket alone (ZeRO stage 1)")
    grad_reduce_in_bf16: bool = option(False, "send gradients in bf16; they are accumulated in fp32")
    cpu_offload_optimizer: bool = option(False, "masters and moments in host memory, AdamW on the CPU",
                                         "--optimizer-cpu-offload", "--cpu-optimizer")

    def __post_init__(self) -> None:
        require_positive(self, "model_parallel_size", "distributed_timeout_minutes", "ddp_bucket_size")
        require(self.distributed_timeout_minutes <= 1e6,
                f"--distributed-timeout-minutes must be at most 1e6, not {self.distributed_timeout_minutes}")
        for name in ("use_distributed_optimizer", "grad_reduce_in_bf16"):
            require(not getattr(self, name) or self.DDP_impl == "local",
                    f"--{name.replace('_', '-')} needs --DDP-impl local: torch's DDP reduces in a way of its own")
