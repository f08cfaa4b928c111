"""What parameters a model has, without one in memory."""

import math
from dataclasses import replace

from torch.distributed import ProcessGroup

import mpu
from megatron.gpt2.config import ModelConfig
from megatron.gpt2.model.gpt2 import GPT2Model, layer_config


def parameter_specs(config: ModelConfig, model_parallel_size: int = 1) -> dict[str, mpu.PartitionSpec]:
    """The spec of every parameter, as `mpu.partition_specs` gives it of the model at this size.

    They come from a model of one layer on the meta device, which has shapes alone; all layers are alike. Its group has
    one rank and communicates with nobody, so torch.distributed need not be running. The size decides nothing but how
    the vocabulary is padded.
    """
    multiple = math.lcm(config.make_vocab_size_divisible_by, model_parallel_size)
    alone = ProcessGroup(0, 1)  # type: ignore[call-arg]  # rank and size, without a store
    one = replace(config, num_layers=1, make_vocab_size_divisible_by=multiple)
    model = GPT2Model(one, layer_config(one, group=alone, device="meta"))
    of_one_layer, first = mpu.partition_specs(model), "transformer.layers.0."
    layers = {
        name.replace(first, f"transformer.layers.{number}."): spec
        for number in range(config.num_layers)
        for name, spec in of_one_layer.items()
        if name.startswith(first)
    }
    specs: dict[str, mpu.PartitionSpec] = {}
    for name, spec in of_one_layer.items():
        specs.update(layers if name in layers else {name: spec})  # in the order of the model's own parameters
    return specs


def count_parameters(config: ModelConfig, model_parallel_size: int = 1) -> tuple[int, int]:
    """Parameters in all (true vocabulary) and in the memory of each rank (padded). No weight is drawn."""
    specs = parameter_specs(config, model_parallel_size).values()
    return (
        sum(math.prod(spec.global_shape) for spec in specs),
        sum(math.prod(spec.local_shape(model_parallel_size)) for spec in specs),
    )
