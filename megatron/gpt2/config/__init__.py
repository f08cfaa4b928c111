"""The configuration of a run.

sections   Config and its sections as dataclasses: each field is a flag, with its bounds and checks
presets    presets for --model, and config.json for --config
compat     rules for Megatron's other flags and for the keys of a DeepSpeed file
flags      the parser, which is made from the fields
arguments  parses a command line and merges it with the loaded checkpoint
"""

from megatron.gpt2.config.presets import read_config, write_config
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
    config_fields,
    flag_name,
    flatten_sections,
    ignored_flags,
    non_default_values,
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
    "flatten_sections",
    "non_default_values",
    "config_fields",
    "flag_name",
    "read_config",
    "ignored_flags",
    "write_config",
]
