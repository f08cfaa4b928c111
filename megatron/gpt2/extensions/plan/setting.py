"""All that the memory of a run depends on, so that its parts need nothing else."""

from dataclasses import dataclass
from functools import cached_property

import torch

from megatron.gpt2.config import Config


@dataclass(frozen=True)
class Setting:
    """All that memory depends on. config: with the vocabulary's size. fixed: bytes that are there before the model is.
    keeps_freed: glibc keeps what is freed (`megatron.gpt2.device.set_allocator`). consumed_samples: before the first
    step, from which a growing batch follows."""

    config: Config
    world_size: int
    device: str  # cpu or cuda
    dtype: torch.dtype
    fixed: int
    keeps_freed: bool = False
    consumed_samples: int = 0

    def __post_init__(self) -> None:
        assert self.config.model.vocab_size is not None
        assert self.micro_batches  # raises ValueError where the batch does not fit the ranks

    @property
    def stages(self) -> int:
        """Ranks of a pipeline. Each holds a stage, which is several chunks of layers if the schedule is interleaved."""
        return self.config.parallel.pipeline_model_parallel_size

    def stage_of(self, rank: int) -> int:
        """The stage that `rank` of the whole run holds."""
        return rank // (self.world_size // self.stages)

    @property
    def data_parallel_size(self) -> int:
        """Ranks that share the data."""
        return self.config.data_parallel_size(self.world_size)

    @cached_property
    def micro_batches(self) -> int:
        """Micro-batches of each rank in a step of the final batch, which needs the most memory."""
        return self.config.micro_batches(self.world_size, self.consumed_samples)
