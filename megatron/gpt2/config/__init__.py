"""The configuration of a run.

sections   the sections as dataclasses: each field is a flag, with its checks
config     Config: all sections together; from a field to its flag; config.json
presets    named runs, for --model
foreign    the flags of Megatron and the keys of a DeepSpeed file that are no fields
flags      the parser, which is made from the fields
arguments  a command line, read; what the checkpoint that is loaded decides
"""

from megatron.gpt2.config.config import (
    SECTIONS,
    Config,
    by_key,
    differing_flags,
    fields,
    flag,
    read_config,
    without_effect,
    write_config,
)
from megatron.gpt2.config.sections import (
    PRECISION_CHOICES,
    CheckpointConfig,
    DataConfig,
    LaunchConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
    require,
)

__all__ = [
    "PRECISION_CHOICES",
    "SECTIONS",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "LaunchConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "TrainConfig",
    "by_key",
    "differing_flags",
    "fields",
    "flag",
    "read_config",
    "require",
    "without_effect",
    "write_config",
]
