"""Adam's state in Megatron's form `dp_reshardable`: flat buckets of each model-parallel rank.

A rank lays its parameters out from its last to its first, each from a multiple of 64 values on, and cuts the row into
buckets between two parameters. A bucket is one tensor of the file, whatever the number of data-parallel ranks was. The
file says how long it is, and not what lies where: that is the order of Megatron Core's modules. An order is taken only
where every master, rounded as the weights are, is the weight itself. So a wrong one cannot pass.

Legend: p tensor-parallel size.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.gpt2.checkpoint.source import TensorInfo
from megatron.gpt2.config import ModelConfig, require
from megatron.gpt2.formats.dcp import DcpFolder
from megatron.gpt2.formats.foreign import LazyTensor
from megatron.gpt2.formats.megatron_files import HEAD, LAYER
from megatron.gpt2.formats.megatron_layout import Layout, chunks_of_stages
from megatron.gpt2.model.parameters import parameter_specs
from mpu.partition import PartitionSpec

GROUP = "optimizer.distributed.dp_group_idx_"  # one for each model-parallel rank, those of the first stage first
# A rank has a buffer for each of its chunks of layers.
BUCKET = re.compile(
    re.escape(GROUP) + r"(\d{1,6})\.gbuf_idx_(\d{1,3})\.dtype_.{1,80}\.bucket_idx_(\d{1,6})\.param", re.ASCII
)
KINDS = {"master": "param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
ALIGNMENT = 64
TABLE = "word_embeddings.weight"
# A layer's modules in the order of Megatron Core's own layers, and of those with Transformer Engine's.
ORDERS = (
    (
        "input_layernorm",
        "attention.dense",
        "attention.query_key_value",
        "post_attention_layernorm",
        "mlp.dense_h_to_4h",
        "mlp.dense_4h_to_h",
    ),
    (
        "attention.dense",
        "input_layernorm",
        "attention.query_key_value",
        "post_attention_layernorm",
        "mlp.dense_h_to_4h",
        "mlp.dense_4h_to_h",
    ),
)
Buckets = dict[int, str]  # a buffer's, by number: the name without the kind
States = dict[str, dict[str, LazyTensor]]  # by kind and by our names


def bucket_states(
    folder: DcpFolder, args: Mapping[str, Any], model: ModelConfig, weights: Mapping[str, LazyTensor]
) -> States:
    """Masters and moments, fp32. model: with the padded vocabulary. args: the run's, which say its layout. ValueError,
    one line, where the buckets are not those of the model in an order that is known here."""

    def said(name: str) -> int | None:
        return args[name] if type(args.get(name)) is int and args[name] > 0 else None

    p, pipeline = said("tensor_model_parallel_size") or 1, said("pipeline_model_parallel_size") or 1
    virtual = said("virtual_pipeline_model_parallel_size")
    stages = chunks_of_stages(
        model,
        Layout(
            p,
            pipeline,
            virtual and model.num_layers // (pipeline * virtual),
            said("decoder_first_pipeline_num_layers"),
            said("decoder_last_pipeline_num_layers"),
        ),
        "megatron-core",
    )
    buffers: dict[tuple[int, int], Buckets] = {}
    for name in folder.tensors:
        if match := BUCKET.fullmatch(name):
            buffers.setdefault((int(match[1]), int(match[2])), {})[int(match[3])] = name.removesuffix(".param")
    chunks = (
        {
            (stage * p + rank, number): chunk
            for stage, held in enumerate(stages)
            for rank in range(p)
            for number, chunk in enumerate(held)
        }
        if len(stages) * p <= len(buffers)
        else {}
    )
    require(chunks.keys() == buffers.keys(), "its buffers are not those of the layout that its arguments tell of")
    specs = parameter_specs(model, p)
    specs |= {HEAD: specs[TABLE]} if len(stages) > 1 else {}
    problem = ""
    for order in ORDERS:
        parts: dict[str, dict[str, dict[int, LazyTensor]]] = {kind: {name: {} for name in specs} for kind in KINDS}
        try:
            for key, chunk in chunks.items():
                for name, bucket, start in _places(folder, buffers[key], _in_order(chunk, order), specs, p):
                    for kind, theirs in KINDS.items():
                        parts[kind][name][key[0] % p] = _part(
                            folder, f"{bucket}.{theirs}", start, specs[name].local_shape(p)
                        )
            states = _joined(parts, specs, p)
            check_masters(states["master"], weights)
            return states
        except ValueError as error:
            problem = problem or str(error)
    raise ValueError(problem)


def _in_order(chunk: Mapping[str, str], order: Sequence[str]) -> list[str]:
    """Our names, and `HEAD`, in the order of the rank's modules. chunk: {the rank's name: ours}, layer by layer."""

    def place(name: str) -> tuple[int, ...]:
        if match := LAYER.fullmatch(name):
            return 1, int(match[1]), order.index(match[2].rpartition(".")[0])
        return (2 if name.startswith("transformer.") or name == HEAD else 0,)

    return [HEAD if name == HEAD else chunk[name] for name in sorted(chunk, key=place)]


def _places(
    folder: DcpFolder, buckets: Buckets, names: Sequence[str], specs: Mapping[str, PartitionSpec], p: int
) -> Iterator[tuple[str, str, int]]:
    """Of each parameter of a buffer its bucket and the first value there. A bucket ends where a parameter does, or
    where the next one would begin. ValueError where the lengths do not fit."""
    number = at = 0
    for name in reversed(names):
        size = math.prod(specs[name].local_shape(p))
        bucket = buckets.get(number, "")
        held = folder.tensors[f"{bucket}.param"].shape if bucket else ()
        require(len(held) == 1 and at + size <= held[0], f"{name} does not fit into bucket {number}")
        yield name, bucket, at
        at = -(-(at + size) // ALIGNMENT) * ALIGNMENT
        if at >= held[0]:
            number, at = number + 1, 0
    require(number == len(buckets) and not at, "its buckets are longer than its parameters")


def _part(folder: DcpFolder, name: str, start: int, shape: tuple[int, ...]) -> LazyTensor:
    info = folder.tensors.get(name)
    require(info is not None and info.dtype == torch.float32, f"holds no {name[-120:]} in fp32")

    def read() -> Tensor:
        return folder.read(name, (start,), (math.prod(shape),)).view(shape)

    return LazyTensor(TensorInfo(torch.float32, shape), read)


def _joined(
    parts: Mapping[str, Mapping[str, Mapping[int, LazyTensor]]], specs: Mapping[str, PartitionSpec], p: int
) -> States:
    """Every parameter's state, whole. ValueError where ranks differ in what all of them hold."""

    def whole(ranks: Sequence[LazyTensor], dim: int) -> Tensor:
        return torch.cat([part.make() for part in ranks], dim)

    states: States = {kind: {} for kind in parts}
    for kind, by_name in parts.items():
        for name, held in by_name.items():
            ranks = [held[rank] for rank in range(p)]
            spec = specs[name]
            if spec.dim is not None:
                states[kind][name] = LazyTensor(
                    TensorInfo(torch.float32, spec.global_shape), partial(whole, ranks, spec.dim)
                )
            else:
                require(
                    all(torch.equal(ranks[0].make(), other.make()) for other in ranks[1:]),
                    f"{kind} of {name} differs between ranks",
                )
                states[kind][name] = ranks[0]
        if HEAD in specs:
            require(
                torch.equal(states[kind].pop(HEAD).make(), states[kind][TABLE].make()),
                f"{kind} of {HEAD} is not that of the word embeddings",
            )
    return states


def check_masters(masters: Mapping[str, LazyTensor], weights: Mapping[str, LazyTensor]) -> None:
    """ValueError unless every master, rounded as the weights are, is the weight. Both are read, one at a time, unless
    the weights are their own masters."""
    for name, weight in weights.items() if masters is not weights else ():
        value = weight.make()
        require(
            torch.equal(masters[name].make().to(value.dtype), value),
            f"the master of {name}, rounded, is not the weight",
        )
