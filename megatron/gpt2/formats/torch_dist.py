"""Read and write Megatron's default format, `torch_dist`: a DCP folder. Everything but tensors is in `common.pt` or,
since Megatron Core 0.19, in an object of the folder.

Tensors of the folder are global, so they do not depend on the layout of the run. The form of Adam's state is one of:

`fully_reshardable`
    The parameters of all layers are stacked, as [layers, ...] under `decoder.layers.NAME`, or separate, under
    `decoder.layers.N.NAME`. Adam's state has the same names after `optimizer.state.KIND.`. Megatron Core's distributed
    optimizer loads this form in every layout, so our exports have it. Megatron Core 0.16 writes some values to a wrong
    place if it pads a bucket that is not the last of its buffer. `ForeignCheckpoint` finds wrong values, because it
    compares each master, rounded to the dtype of the weights, with the weight.

`fully_sharded_model_space` (until Megatron Core 0.15)
    Like `fully_reshardable`, but a tensor [x, y] that was split over a grid of [f, g] ranks is saved as [f, g, xy /
    fg].

`dp_reshardable`
    Each model-parallel rank stores its parameters, from the last to the first, in a flat buffer. A parameter starts at
    a multiple of 64 values. The buffer is cut into buckets between parameters, and each bucket is one tensor, for any
    number of data-parallel ranks. The folder contains the length of each bucket, but not the positions of the
    parameters, which follow from the order of Megatron Core's modules. The comparison with the weights finds a wrong
    order.

torch's DCP writer writes the exports. The stacked layers are memory-mapped from temporary files, so that only one layer
must be in memory.
"""

import contextlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data_utils.command_line import Log, require
from data_utils.files import read_json_object
from megatron.gpt2.checkpoint.interface import BaseCheckpoint, Shape, TensorInfo
from megatron.gpt2.checkpoint.save_folder import LATEST_FILE
from megatron.gpt2.config import ModelConfig
from megatron.gpt2.formats.foreign_checkpoint import (
    MAX_JSON_BYTES,
    Entries,
    ForeignCheckpoint,
    Hints,
    LazyTensor,
    LazyTensors,
    OptimizerState,
    TensorsByKind,
    check_masters,
    has_optimizer,
    short_repr,
    spill_to_disk,
)
from megatron.gpt2.formats.megatron_model import (
    EMBEDDINGS_FOR_HEAD,
    FUSED,
    LAYER,
    MegatronLayout,
    chunks_of_stages,
    core_name,
    infer_model_config,
    merge_ranks,
    namespace_dict,
    native_name,
    padded_model_config,
    read_shard,
    run_entries,
    saved_iteration,
)
from megatron.gpt2.formats.megatron_optimizer import (
    grad_scaler_state_dict,
    megatron_adam_metadata,
    megatron_param_groups,
    progress_metadata,
    scheduler_state_dict,
)
from megatron.gpt2.formats.native import new_folder
from megatron.gpt2.formats.torch_files import DcpCheckpoint, load_torch_file, save_dcp
from megatron.gpt2.model.gpt2 import TIED_WEIGHT, model_partition_specs
from megatron.gpt2.optimizer.optimizer import MOMENTS

COMMON, COMMON_OBJECT, CONFIG = "common.pt", "common_state/shard_0_1", "metadata.json"
LAYERS = "decoder.layers."
STACKED = re.compile(r"decoder\.layers\.(?!\d)(.+)", re.ASCII)
STATE = re.compile(r"optimizer\.state\.(?:(fp32_)?param|(exp_avg|exp_avg_sq))\.(.+)", re.ASCII)
# The number of the model-parallel rank, counted stage by stage, follows BUCKET_PREFIX. gbuf_idx is the number of a
# buffer; a rank has one buffer for each of its chunks of layers.
BUCKET_PREFIX = "optimizer.distributed.dp_group_idx_"
BUCKET = re.compile(
    re.escape(BUCKET_PREFIX) + r"(\d{1,6})\.gbuf_idx_(\d{1,3})\.dtype_.{1,80}\.bucket_idx_(\d{1,6})\.param", re.ASCII
)
STATE_NAMES = {"master": "param", **{moment: moment for moment in MOMENTS}}
ALIGNMENT = 64
# the orders of a layer's modules with Megatron Core's own layers, and with those of Transformer Engine
_LAST_MODULES = ("attention.query_key_value", "post_attention_layernorm", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
MODULE_ORDERS = (
    ("input_layernorm", "attention.dense", *_LAST_MODULES),
    ("attention.dense", "input_layernorm", *_LAST_MODULES),
)
FLAT_BUCKETS_PROBLEM = (
    ": its form is dp_reshardable, flat buckets with an unknown order of parameters; with "
    "--dist-ckpt-optim-fully-reshardable Megatron saves the state by name"
)
SHARDING_TYPE = "fully_reshardable"
# The modules of each layer whose FP8 state Megatron's loader needs. Without FP8, the state is None.
WITH_EXTRA_STATE = (
    "self_attention.linear_proj",
    "self_attention.linear_qkv",
    "self_attention.core_attention",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)


def open_torch_dist(path: Path, hints: Hints, *, log: Log) -> ForeignCheckpoint:
    """Open the checkpoint in `path`, the folder of an iteration. Raises ValueError, in one line, if the checkpoint is
    not valid."""
    backend = read_json_object(path / CONFIG, MAX_JSON_BYTES).get("sharded_backend")
    is_ours = backend == "torch_dist"
    require(is_ours, f"{path / CONFIG}: sharded_backend is {short_repr(backend)}, but must be torch_dist")
    folder = DcpCheckpoint(path)
    top = _common_state(folder)
    args = namespace_dict(top.get("args"))
    kinds = _tensors_by_kind(folder)
    weights = kinds.pop("model", {})
    shapes = {name: tensor.info.shape for name, tensor in weights.items()}
    model, padded = infer_model_config(top, shapes, {}, hints, log)
    for name, spec in model_partition_specs(padded).items():
        require(shapes[name] == spec.global_shape, f"{name} has shape {shapes[name]} instead of {spec.global_shape}")
    left_out = ["random states: of another program's generators"] * any("rng_state" in name for name in folder.objects)
    flat = any(name.startswith(BUCKET_PREFIX) for name in folder.tensors)
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    layout = {name: _positive_arg(args, name) or 1 for name in sizes}

    def adam() -> OptimizerState:
        if flat:
            states = _bucket_states(folder, args, layout, padded, weights)
            objects = {name: f"{BUCKET_PREFIX}0.{name}/shard_0_1" for name in ("optimizer", "grad_scaler")}
            optimizer = {name: folder.object(key)[0] for name, key in objects.items() if key in folder.objects}
        else:
            states, optimizer = kinds, top["optimizer"]
        # With masters, Adam's state is inside a dictionary that also has the loss scaler.
        inner = optimizer.get("optimizer", optimizer)
        groups, state = inner["param_groups"], inner.get("state", {})
        step = int(state["common_step"] if "common_step" in state else groups[0]["step"])
        return states, megatron_adam_metadata(top, optimizer, groups, step, left_out)

    return ForeignCheckpoint(
        path,
        "torch_dist",
        saved_iteration(top),
        model,
        {**progress_metadata(args), "layout": layout},
        weights,
        left_out,
        adam if kinds or flat else None,
        FLAT_BUCKETS_PROBLEM if flat else ": unknown form",
    )


def _common_state(folder: DcpCheckpoint) -> Any:
    """Return everything but tensors: the file common.pt, or an object of the folder since Megatron Core 0.19."""
    if (folder.path / COMMON).is_file():
        return load_torch_file(folder.path / COMMON)
    require(
        COMMON_OBJECT in folder.objects,
        f"{folder.path}: holds neither {COMMON}, as until Megatron Core 0.18, nor {COMMON_OBJECT}, as since 0.19: the "
        "form of a later version is not supported",
    )
    return folder.object(COMMON_OBJECT)[0]


def _positive_arg(args: Entries, name: str) -> int | None:
    """Return the argument `name` if it is a positive integer, else None."""
    return args[name] if type(args.get(name)) is int and args[name] > 0 else None


def _tensors_by_kind(folder: DcpCheckpoint) -> TensorsByKind:
    """Return the tensors of the folder by kind and our name, with separate layers. Raises ValueError for duplicate
    names."""
    by_kind: TensorsByKind = {}
    for saved_name in folder.tensors:
        if saved_name.startswith(BUCKET_PREFIX):
            continue
        state = STATE.fullmatch(saved_name)
        kind, name = (state[2] or "master", state[3]) if state else ("model", saved_name)
        for each, tensor in _split_layers(folder, saved_name, name).items():
            native = native_name(each)
            require(native not in by_kind.setdefault(kind, {}), f"holds {native[:120]} twice")
            by_kind[kind][native] = tensor
    return by_kind


def _split_layers(folder: DcpCheckpoint, saved_name: str, name: str) -> dict[str, LazyTensor]:
    """Split the tensor `saved_name`, which belongs to the parameter `name`, into layers if it is a stack of layers."""
    require(name in folder.tensors, f"holds {saved_name[:120]}, but not its parameter")
    shape, param_shape = folder.tensors[saved_name].shape, folder.tensors[name].shape
    layers = {name: LazyTensor.from_checkpoint(folder, saved_name)}
    if stacked := STACKED.fullmatch(name):
        layers = {f"{LAYERS}{row}.{stacked[1]}": folder.lazy_row(saved_name, row) for row in range(param_shape[0])}
    if shape == param_shape:
        return layers
    # In fully_sharded_model_space, the shape is [*grid of ranks, values], for a stack [layers, *grid of ranks, values].
    layer_dims = 1 if stacked else 0
    change = partial(merge_grid, grid=shape[layer_dims:-1], shape=param_shape[layer_dims:])
    return {each: x.map(change) for each, x in layers.items()}


def merge_grid(x: Tensor, grid: Shape, shape: Shape) -> Tensor:
    """Return the tensor of `shape` from its parts, [*grid, values], that a grid of ranks has saved."""
    part = [n // k for n, k in zip(shape, grid, strict=True)]
    order = [axis for i in range(len(grid)) for axis in (i, len(grid) + i)]
    return x.reshape(*grid, *part).permute(order).reshape(shape)


# --- flat buckets


def _bucket_states(
    folder: DcpCheckpoint, args: Entries, layout: Mapping[str, int], model: ModelConfig, weights: LazyTensors
) -> TensorsByKind:
    """Read masters and moments, fp32, from flat buckets.

    args, layout: the arguments of the run, and its tensor- and pipeline-parallel size.
    model: the model's configuration with the padded vocabulary.

    Raises ValueError, in one line, if the buckets do not fit the model in any known order of modules.
    """
    tp_size, pp_size = layout.values()
    virtual = _positive_arg(args, "virtual_pipeline_model_parallel_size")
    ends = (_positive_arg(args, f"decoder_{end}_pipeline_num_layers") for end in ("first", "last"))
    core = MegatronLayout(tp_size, pp_size, virtual and model.num_layers // (pp_size * virtual), *ends)
    # {(rank, number of the buffer): {number of the bucket: name in the folder, without the kind}}
    buffers: dict[tuple[int, int], dict[int, str]] = {}
    for name in folder.tensors:
        if match := BUCKET.fullmatch(name):
            buffers.setdefault((int(match[1]), int(match[2])), {})[int(match[3])] = name.removesuffix(".param")
    problem = "its buffers do not fit the layout in its arguments"
    require(pp_size * tp_size <= len(buffers), problem)
    chunks = {
        (stage * tp_size + rank, number): chunk
        for stage, stage_chunks in enumerate(chunks_of_stages(model, core, "megatron-core"))
        for rank in range(tp_size)
        for number, chunk in enumerate(stage_chunks)
    }
    require(chunks.keys() == buffers.keys(), problem)
    specs = model_partition_specs(model, tp_size)
    shapes = {name: spec.local_shape(tp_size) for name, spec in specs.items()}
    shapes[EMBEDDINGS_FOR_HEAD] = shapes[TIED_WEIGHT]
    for order in MODULE_ORDERS:
        with contextlib.suppress(ValueError):
            ranks = [
                (f"rank {rank}", _rank_state(folder, buffers[rank, number], _in_module_order(chunk, order), shapes))
                for (rank, number), chunk in chunks.items()
            ]
            states = merge_ranks(ranks, specs, tp_size)
            check_masters(weights, states["master"])
            return states
    raise ValueError("its parameters have no known order of modules, or a master, rounded, is not the weight")


def _in_module_order(chunk: Mapping[str, str], order: Sequence[str]) -> list[str]:
    """Return our names of the parameters of a chunk, and `EMBEDDINGS_FOR_HEAD`, in the order of the rank's modules.

    chunk: {name in the chunk: our name}.
    """

    def position(name: str) -> tuple[int, ...]:
        if match := LAYER.fullmatch(name):
            return 1, int(match[1]), order.index(match[2].rpartition(".")[0])
        return (2 if name.startswith("transformer.") or name == EMBEDDINGS_FOR_HEAD else 0,)

    return [EMBEDDINGS_FOR_HEAD if name == EMBEDDINGS_FOR_HEAD else chunk[name] for name in sorted(chunk, key=position)]


def _rank_state(
    folder: DcpCheckpoint, buckets: Mapping[int, str], names: Sequence[str], shapes: Mapping[str, Shape]
) -> TensorsByKind:
    """Return the tensors of a buffer by kind and name. A bucket ends at the end of a parameter, or at the start of the
    next one. Raises ValueError if the lengths do not fit."""
    states: TensorsByKind = {kind: {} for kind in STATE_NAMES}
    bucket_number = position = 0
    for name in reversed(names):
        shape, bucket = shapes[name], buckets.get(bucket_number, "")
        end = position + math.prod(shape)
        for kind, state_name in STATE_NAMES.items():
            info = folder.tensors.get(f"{bucket}.{state_name}")
            if info is None or len(info.shape) != 1 or end > info.shape[0]:
                raise ValueError(f"{name} does not fit into bucket {bucket_number}")
            load = partial(_read_flat, folder, f"{bucket}.{state_name}", position, shape)
            states[kind][name] = LazyTensor(TensorInfo(info.dtype, shape), load)
        position = -(-end // ALIGNMENT) * ALIGNMENT
        if position >= folder.tensors[f"{bucket}.param"].shape[0]:
            bucket_number, position = bucket_number + 1, 0
    require(bucket_number == len(buckets) and not position, "its buckets are longer than its parameters")
    return states


def _read_flat(folder: DcpCheckpoint, bucket: str, start: int, shape: Shape) -> Tensor:
    return folder.read(bucket, (start,), (math.prod(shape),)).view(shape)


# --- write


def write_torch_dist(source: BaseCheckpoint, out: str | Path, layout: MegatronLayout, *, log: Log = print) -> Path:
    """Write `source`, with Adam's state if it has one, into the new folder `out`. Return the iteration's folder.
    Megatron can load the checkpoint in every layout; `layout` is saved in the arguments. Raises ValueError for a layout
    that Megatron Core does not support."""
    model = padded_model_config(source, layout.tensor)
    chunks_of_stages(model, layout, "megatron-core")  # `chunks_of_stages` checks the layout.
    specs = model_partition_specs(model, layout.tensor)
    stacks: dict[str, list[str]] = {}
    for name in specs:
        stacks.setdefault(torch_dist_name(name), []).append(name)
    prefixes = {"model": ""}
    content: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    top = run_entries(source, model, layout, "megatron-core") | {"content_metadata": content}
    if has_optimizer(source):
        prefixes |= {kind: f"optimizer.state.{saved_name}." for kind, saved_name in STATE_NAMES.items()}
        top["args"].use_distributed_optimizer = True
        content["distrib_optim_sharding_type"] = SHARDING_TYPE
        top["opt_param_scheduler"] = scheduler_state_dict(source, "megatron-v3", log)
        top["optimizer"] = {
            "optimizer": {"param_groups": megatron_param_groups(source)},
            "param_state_sharding_type": SHARDING_TYPE,
            **grad_scaler_state_dict(source),
        }
    with new_folder(out) as folder:
        path = folder / f"iter_{source.iteration:07d}"
        path.mkdir()
        state: dict[str, Any] = {
            f"{LAYERS}{module}._extra_state/shard_{layer}_{model.num_layers}": [None]
            for module in WITH_EXTRA_STATE
            for layer in range(model.num_layers)
        }
        for kind, prefix in prefixes.items():
            for saved_name, names in stacks.items():
                shape = specs[names[0]].local_shape(1)
                if saved_name.startswith(LAYERS):
                    shape = (len(names), *shape)
                parts = (read_shard(source, name, specs[name], kind, 0, 1) for name in names)
                state[prefix + saved_name] = spill_to_disk(path, parts, shape)
        save_dcp(path, state)
        torch.save(top, path / COMMON)
        config = {"sharded_backend": "torch_dist", "common_backend": "torch"}
        (path / CONFIG).write_text(json.dumps(config | {f"{name}_version": 1 for name in config}))
        (folder / LATEST_FILE).write_text(f"{source.iteration}")
    return Path(out) / path.name


def torch_dist_name(name: str) -> str:
    """Return torch_dist's name of the parameter `name`, such as
    decoder.layers.self_attention.linear_qkv.layer_norm_bias."""
    result = re.sub(r"\.layers\.\d+\.", ".layers.", core_name(name))
    for plain, fused in FUSED.items():
        result = result.replace(plain, fused)
    return result
