"""What a run is: frozen dataclasses, one for each section, validated when they are made.

Each field is one command-line flag (`num_layers` is `--num-layers`); `option` gives it its help text and the
other spellings that Megatron users know. `megatron/gpt2/config/flags.py` builds the parser from these fields, so
that a flag exists in exactly one place. Defaults are those of Megatron's 2019 release unless the help text says
otherwise. Values that follow from others are properties or methods.

    options        how a field is written and checked
    model, data, optimizer, parallel, train, checkpoint        the sections of a run
    launch         how its ranks start, which is not saved with it
    sections       Config: all sections of a run together
    flag_names     from a field to its flag, and the flags that make a run differ from another
    config_json    config.json in the save folder
"""

from megatron.gpt2.config.checkpoint import CheckpointConfig
from megatron.gpt2.config.data import DataConfig
from megatron.gpt2.config.launch import LaunchConfig
from megatron.gpt2.config.model import ModelConfig
from megatron.gpt2.config.optimizer import OptimizerConfig
from megatron.gpt2.config.options import require
from megatron.gpt2.config.parallel import ParallelConfig
from megatron.gpt2.config.sections import SECTIONS, Config
from megatron.gpt2.config.train import PRECISION_CHOICES, TrainConfig

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
    "require",
]
