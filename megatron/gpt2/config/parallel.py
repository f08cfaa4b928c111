"""The section `parallel`: how the work is laid out over ranks, and what of it is in the host's memory."""

from dataclasses import dataclass

from megatron.gpt2.config.options import option, require, require_positive
from megatron.gpt2.pipeline.schedule import SCHEDULES


@dataclass(frozen=True)
class ParallelConfig:
    """How the work is laid out over ranks."""

    model_parallel_size: int = option(1, "ranks that share each layer", "--tensor-model-parallel-size")
    pipeline_model_parallel_size: int = option(1, "ranks that hold successive layers, the stages of a pipeline")
    pipeline_schedule: str | None = option(
        None,
        "the order of forward and backward over the stages (default: 1f1b, or interleaved where each rank has "
        "several virtual stages)",
        choices=SCHEDULES,
    )
    num_layers_per_virtual_pipeline_stage: int | None = option(
        None, "each rank holds several groups of so many layers, which shortens the bubble"
    )
    num_virtual_stages_per_pipeline_rank: int | None = option(None, "the same, by the number of groups per rank")
    decoder_first_pipeline_num_layers: int | None = option(
        None, "layers of the first stage (default: as many as the others, or fewer)"
    )
    decoder_last_pipeline_num_layers: int | None = option(None, "layers of the last stage")
    distributed_backend: str | None = option(
        None, "default: nccl on GPUs, gloo on CPUs", choices=("nccl", "gloo", "mpi")
    )
    distributed_timeout_minutes: float = option(10.0, "a collective that takes longer ends the run")
    DDP_impl: str = option(
        "local", "data parallelism by our contiguous buffer or by torch's DDP", choices=("local", "torch")
    )
    ddp_bucket_size: int = option(25_000_000, "gradient elements reduced at once")
    sequence_parallel: bool = option(False, "split the sequence over the model-parallel ranks between the split layers")
    use_distributed_optimizer: bool = option(
        False, "each data-parallel rank holds masters and moments of its part of every bucket alone (ZeRO stage 1)"
    )
    shard_gradients: bool = option(
        False,
        "with --use-distributed-optimizer: between micro-batches too, each "
        "data-parallel rank holds the gradients of that part alone (ZeRO stage 2)",
    )
    exact_layouts: int | None = option(
        None,
        "sums have one order: the same bits with every model-parallel size that divides this power of two, every "
        "number of data-parallel ranks, and every pipeline",
        metavar="V",
    )
    grad_reduce_in_bf16: bool = option(False, "send gradients in bf16; they are accumulated in fp32")
    cpu_offload_optimizer: bool = option(
        False, "masters and moments in host memory, AdamW on the CPU", "--optimizer-cpu-offload", "--cpu-optimizer"
    )

    partition_activations: bool = option(
        False,
        "with --recompute-granularity full: every model-parallel rank keeps its part alone of each input that "
        "is kept, and backward gathers it",
        "--distribute-saved-activations",
        "--distribute-checkpointed-activations",
    )
    checkpoint_in_cpu: bool = option(
        False, "with --recompute-granularity full, on a GPU: the inputs that are kept are in host memory"
    )
    cpu_offloading_num_layers: int = option(
        0, "without recomputation, on a GPU: what the first so many layers keep for backward is in host memory"
    )

    def __post_init__(self) -> None:
        require_positive(
            self,
            "model_parallel_size",
            "pipeline_model_parallel_size",
            "num_layers_per_virtual_pipeline_stage",
            "num_virtual_stages_per_pipeline_rank",
            "decoder_first_pipeline_num_layers",
            "decoder_last_pipeline_num_layers",
            "distributed_timeout_minutes",
            "ddp_bucket_size",
            "exact_layouts",
        )
        require(
            self.num_layers_per_virtual_pipeline_stage is None or self.num_virtual_stages_per_pipeline_rank is None,
            "--num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank say the same: give "
            "one of them",
        )
        for name in ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"):
            require(
                getattr(self, name) is None or self.pipeline_model_parallel_size > 1,
                f"--{name.replace('_', '-')} needs --pipeline-model-parallel-size of at least 2",
            )
        require(
            self.pipeline_model_parallel_size == 1 or self.DDP_impl == "local",
            "--pipeline-model-parallel-size needs --DDP-impl local: torch's DDP reduces in a way of its own",
        )
        require(
            self.distributed_timeout_minutes <= 1e6,
            f"--distributed-timeout-minutes must be at most 1e6, not {self.distributed_timeout_minutes}",
        )
        require(
            self.cpu_offloading_num_layers >= 0,
            f"--cpu-offloading-num-layers must not be negative, got {self.cpu_offloading_num_layers}",
        )
        require(
            not self.shard_gradients or self.use_distributed_optimizer,
            "--shard-gradients is about the part that a rank updates: give --use-distributed-optimizer as well",
        )
        require(
            not self.shard_gradients or self.pipeline_model_parallel_size == 1,
            "--shard-gradients (--zero-stage 2) and --pipeline-model-parallel-size "
            f"{self.pipeline_model_parallel_size}: a pipeline has several micro-batches in flight, whose gradients "
            "would each be sent; leave it out (--zero-stage 1)",
        )
        if (parts := self.exact_layouts) is not None:
            require(parts & (parts - 1) == 0, f"--exact-layouts {parts} is not a power of two")
            require(
                parts % self.model_parallel_size == 0,
                f"--exact-layouts {parts} is not divisible by --model-parallel-size {self.model_parallel_size}",
            )
            for given, flag, why in (
                (self.DDP_impl == "torch", "--DDP-impl torch", "torch's DDP adds in an order of its own"),
                (self.grad_reduce_in_bf16, "--grad-reduce-in-bf16", "another number of ranks rounds other sums"),
                (
                    self.shard_gradients,
                    "--shard-gradients (--zero-stage 2)",
                    "it adds up ranks before micro-batches; --zero-stage 1 does not",
                ),
            ):
                require(not given, f"--exact-layouts and {flag}: {why}; leave one out")
        for name in ("use_distributed_optimizer", "grad_reduce_in_bf16"):
            require(
                not getattr(self, name) or self.DDP_impl == "local",
                f"--{name.replace('_', '-')} needs --DDP-impl local: torch's DDP reduces in a way of its own",
            )
