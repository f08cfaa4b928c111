"""All sections of a run together."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from data_utils.batch_schedule import BatchSchedule
from megatron.gpt2.config.checkpoint import CheckpointConfig
from megatron.gpt2.config.data import DataConfig
from megatron.gpt2.config.model import ModelConfig
from megatron.gpt2.config.optimizer import OptimizerConfig
from megatron.gpt2.config.options import require
from megatron.gpt2.config.parallel import ParallelConfig
from megatron.gpt2.config.train import TrainConfig
from megatron.gpt2.pipeline.schedule import Schedule, build_schedule
from megatron.gpt2.pipeline.stages import layers_of_stages, virtual_stages


@dataclass(frozen=True)
class Config:
    """A whole run. What must fit together between sections is checked when it is made."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    def __post_init__(self) -> None:
        p = self.parallel.model_parallel_size
        require(
            self.model.num_attention_heads % p == 0,
            f"--num-attention-heads {self.model.num_attention_heads} is not divisible by --model-parallel-size {p}",
        )
        require(
            self.model.ffn_size % p == 0,
            f"--ffn-hidden-size {self.model.ffn_size} is not divisible by --model-parallel-size {p}",
        )
        require(
            self.data.seq_length <= self.model.max_position_embeddings,
            f"--seq-length {self.data.seq_length} is longer than "
            f"--max-position-embeddings {self.model.max_position_embeddings}",
        )
        require(
            not self.parallel.sequence_parallel or self.data.seq_length % p == 0,
            f"--sequence-parallel splits --seq-length {self.data.seq_length} over --model-parallel-size {p}, which "
            "does not divide it",
        )
        recompute = self.train.recompute_granularity
        parked = self.parallel.cpu_offloading_num_layers
        require(
            parked == 0 or recompute == "none",
            f"--cpu-offloading-num-layers {parked} is about layers that are not recomputed: leave out "
            f"--recompute-granularity {recompute}, or give --recompute-granularity full --checkpoint-in-cpu",
        )
        require(
            parked <= self.model.num_layers,
            f"--cpu-offloading-num-layers {parked} is more than --num-layers {self.model.num_layers}",
        )

        if (parts := self.parallel.exact_layouts) is not None:
            for flag, number in (
                ("--num-attention-heads", self.model.num_attention_heads),
                ("--ffn-hidden-size", self.model.ffn_size),
                ("--seq-length", self.data.seq_length),
                ("--make-vocab-size-divisible-by", self.model.make_vocab_size_divisible_by),
            ):
                require(
                    number % parts == 0,
                    f"{flag} {number} is not divisible by --exact-layouts {parts}: change one of them",
                )
            require(
                not self.train.compile,
                "--exact-layouts and --compile: a compiler chooses the order of sums; leave one out",
            )
            require(
                self.train.dropout_rng == "counter" or not self.model.has_dropout,
                "--exact-layouts and --dropout-rng torch: each rank would drop others; leave one out, or give "
                "--hidden-dropout 0 --attention-dropout 0",
            )
        self.layers_of_stages()
        schedule = self.schedule(1)
        require(
            not (schedule.splits_backward and self.train.compile),
            "--pipeline-schedule zero-bubble and --compile: a compiled layer computes the gradients of input and "
            "weights together; leave one out",
        )

    @property
    def is_deterministic(self) -> bool:
        """Whether each operation has to add up in one order (--deterministic, --exact-layouts)."""
        return self.train.deterministic or self.parallel.exact_layouts is not None

    @property
    def virtual_stages(self) -> int:
        """Chunks of layers per rank of the pipeline."""
        parallel = self.parallel
        if (size := parallel.num_layers_per_virtual_pipeline_stage) is None:
            return parallel.num_virtual_stages_per_pipeline_rank or 1
        return virtual_stages(self.model.num_layers, parallel.pipeline_model_parallel_size, size)

    def layers_of_stages(self) -> list[range]:
        """The layers of each stage of the pipeline, virtual ones too. ValueError where they cannot be divided so."""
        parallel = self.parallel
        return layers_of_stages(
            self.model.num_layers,
            parallel.pipeline_model_parallel_size,
            self.virtual_stages,
            parallel.decoder_first_pipeline_num_layers,
            parallel.decoder_last_pipeline_num_layers,
        )

    def schedule(self, micro_batches: int) -> Schedule:
        """What each stage of the pipeline does in a step. ValueError where --pipeline-schedule does not fit."""
        v = self.virtual_stages
        return build_schedule(
            self.parallel.pipeline_schedule or ("1f1b" if v == 1 else "interleaved"),
            self.parallel.pipeline_model_parallel_size,
            v,
            micro_batches,
        )

    def data_parallel_size(self, world_size: int) -> int:
        """How many ranks share the data. ValueError where the ranks cannot be divided so."""
        t, p = self.parallel.model_parallel_size, self.parallel.pipeline_model_parallel_size
        stages = f" × --pipeline-model-parallel-size {p}" if p > 1 else ""
        require(
            world_size % (t * p) == 0,
            f"the world of {world_size} ranks is not divisible by --model-parallel-size {t}{stages}: start another "
            "number of ranks (--nproc-per-node; the scripts: GPUS_PER_NODE), or give another size (the scripts: "
            "MP_SIZE)",
        )
        return world_size // (t * p)

    def batch_schedule(self, world_size: int, consumed_samples: int = 0) -> BatchSchedule:
        """The samples of each step over all ranks. ValueError where the ranks or a batch, of those that come after
        `consumed_samples`, cannot be divided so."""
        train, ranks = self.train, self.data_parallel_size(world_size)
        together, steps = train.micro_batch_size * ranks, train.gradient_accumulation_steps
        schedule = train.batch_schedule(self.data.seq_length, default=together * (steps or 1))
        require(
            steps is None or schedule.final == together * steps,
            f"--global-batch-size {schedule.final} is not --micro-batch-size {train.micro_batch_size} × "
            f"{ranks} data-parallel ranks × --gradient-accumulation-steps {steps}: leave one of them out",
        )
        for span in schedule.spans(consumed_samples):
            named = f"{train.growth}: a batch of {span.step}" if train.growth else f"--global-batch-size {span.step}"
            require(
                span.step % together == 0,
                f"{named} is not divisible by --micro-batch-size "
                f"{train.micro_batch_size} × {ranks} data-parallel ranks",
            )
        return schedule

    def usable_ranks(self, ranks: int) -> int:
        """How many of `ranks` ranks the run can use: the largest number that can be divided into its layout and that
        divides its batches; 0 where there is none."""
        for world_size in range(ranks, 0, -1):
            with contextlib.suppress(ValueError):
                self.batch_schedule(world_size)
                return world_size
        return 0

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """The sections by name, each a dict of its fields: what a checkpoint and config.json hold."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(values: Mapping[str, Mapping[str, Any]]) -> Config:
        """The inverse of `as_dict`, also after a trip through JSON; what is absent takes its default."""
        sections = {}
        for name, kind in SECTIONS.items():
            known = {f.name for f in dataclasses.fields(kind)}
            given = values.get(name, {})
            require(
                known >= given.keys(),
                f"unknown in the configuration's section {name!r}: "
                f"{', '.join(sorted(given.keys() - known))} (written by a newer version?)",
            )
            sections[name] = kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in given.items()})
        return Config(**sections)


SECTIONS: dict[str, Any] = {
    "model": ModelConfig,
    "data": DataConfig,
    "optimizer": OptimizerConfig,
    "parallel": ParallelConfig,
    "train": TrainConfig,
    "checkpoint": CheckpointConfig,
}
