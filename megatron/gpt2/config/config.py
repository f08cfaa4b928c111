"""`Config`, all sections of a run together; the flags that its fields are; and `config.json`, which keeps it.

Every start of a run writes `config.json` into its save folder, and `--config` reads it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_utils.files import RUN_SETTINGS_VERSION, one_line, replace_text
from data_utils.samplers import BatchSchedule
from megatron.gpt2.config.sections import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
    require,
)
from megatron.gpt2.pipeline.schedule import Schedule, build_schedule
from megatron.gpt2.pipeline.stages import layers_of_stages, virtual_stages

FILE = "config.json"
SECTIONS: dict[str, Any] = {
    "model": ModelConfig,
    "data": DataConfig,
    "optimizer": OptimizerConfig,
    "parallel": ParallelConfig,
    "train": TrainConfig,
    "checkpoint": CheckpointConfig,
}


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

    def micro_batches(self, world_size: int, consumed_samples: int = 0) -> int:
        """Micro-batches of each rank in a step, when the batch does not grow any more."""
        together = self.train.micro_batch_size * self.data_parallel_size(world_size)
        return self.batch_schedule(world_size, consumed_samples).final // together

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


def flag(key: str) -> str:
    """The flag of a field: "model.num_layers" -> "--num-layers"."""
    return "--" + key.split(".")[1].replace("_", "-")


def fields() -> dict[str, dataclasses.Field[Any]]:
    """Every field of the configuration by "section.field", in the order in which the sections have them."""
    return {f"{name}.{f.name}": f for name, kind in SECTIONS.items() for f in dataclasses.fields(kind)}


def by_key(sections: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """{section: {field: value}}, as `Config.as_dict` gives it, by "section.field" in the same order."""
    return {f"{section}.{name}": value for section, values in sections.items() for name, value in values.items()}


def differing_flags(config: Config, default: Config | None = None) -> list[tuple[str, Any]]:
    """(flag, value) for each field that is not what `default` has (None: the defaults), in the order of the fields."""
    theirs = by_key((default or Config()).as_dict())
    return [(flag(key), value) for key, value in by_key(config.as_dict()).items() if value != theirs[key]]


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


def write_config(folder: Path, config: Config, facts: dict[str, Any], *, goes_on: bool) -> None:
    """Write `config`, and beside it `facts` about the run (JSON), into `folder`, atomically. goes_on: the run continues
    the checkpoint in `folder`; the file then keeps the --load and --finetune that it has there, with which the run
    began. Raises OSError where the disk refuses the file."""
    sections = config.as_dict()
    if goes_on:
        try:
            before = json.loads((folder / FILE).read_text(encoding="utf-8"))["config"]["checkpoint"]
            sections["checkpoint"] |= {name: before[name] for name in ("load", "finetune")}
        except (OSError, ValueError, KeyError, TypeError):
            pass  # there is none, or it is damaged: nothing but --config reads it
    settings = {"version": RUN_SETTINGS_VERSION, "config": sections, **facts}
    replace_text(folder / FILE, json.dumps(settings, indent=2) + "\n")


def read_config(path: str) -> dict[str, Any]:
    """The flags of the run that wrote the file `path`: "section.field" to value, where that is not the default. The
    batch is the whole run's, for any number of ranks. Raises ValueError or FileNotFoundError, in one line, where
    `path` is no such file."""
    try:
        settings = json.loads(Path(path).read_text(encoding="utf-8"))
        version, sections = settings.get("version", RUN_SETTINGS_VERSION), settings["config"]
        require(
            version == RUN_SETTINGS_VERSION,
            f"--config {path} is of version {version}, and this program reads {RUN_SETTINGS_VERSION}",
        )
        unknown = sections.keys() - SECTIONS.keys()
        require(not unknown, f"unknown section {', '.join(sorted(unknown))} (written by a newer version?)")
        config, default = by_key(Config.from_dict(sections).as_dict()), by_key(Config().as_dict())
        batch = int(settings["global_batch_size"])
    except OSError as error:
        raise FileNotFoundError(f"--config {path}: {error.strerror}") from None
    except (KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise ValueError(
            f"--config {path} is not the {FILE} of a run: {type(error).__name__}: {one_line(error)}"
        ) from None
    except ValueError as error:
        named = "" if str(error).startswith("--config") else f"--config {path}: "
        raise ValueError(named + one_line(error)) from None
    values = {key: value for key, value in config.items() if value != default[key]}
    values["train.global_batch_size"] = batch  # whatever the number of ranks is now
    values.pop("train.gradient_accumulation_steps", None)
    values.pop("model.vocab_size", None)  # the tokenizer's
    if values.get("checkpoint.load") == config["checkpoint.save"]:
        values.pop("checkpoint.load", None)  # a run that begins where it saves, which another --save is not
    return values
