"""The configuration of a run.

sections   Config and its sections as dataclasses: each field is a flag, with its bounds and checks
recipes    named runs, for --model, and config.json, for --config
foreign    the flags of Megatron and the keys of a DeepSpeed file that are not fields
flags      the parser, which is made from the fields
arguments  a command line, read; what the checkpoint that is loaded decides
"""

from megatron.gpt2.config.recipes import read_config, write_config
from megatron.gpt2.config.sections import (
    PRECISION_CHOICES,
    SECTIONS,
    CheckpointConfig,
    Config,
    DataConfig,
    LaunchConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
    by_key,
    differing,
    fields,
    flag,
    require,
    without_effect,
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
    "differing",
    "fields",
    "flag",
    "read_config",
    "require",
    "without_effect",
    "write_config",
]
