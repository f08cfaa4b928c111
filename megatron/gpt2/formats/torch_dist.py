"""Megatron's `torch_dist` checkpoints, its default, read and written: a folder of DCP, with what is not a tensor in
`common.pt`.

The tensors are whole, whatever the layout of the run was. The layers are stacked, as [layers, ...] under
`decoder.layers.NAME`, or stand one by one under `decoder.layers.N.NAME`. Adam's state has the same names behind
`optimizer.state.KIND.`. The form `fully_sharded_model_space` (until Megatron Core 0.15) keeps a tensor of [x, y] that
was split over a grid of [f, g] ranks as [f, g, xy / fg].

The form `dp_reshardable` has flat buckets of each model-parallel rank. A rank lays its parameters out from its last to
its first, each from a multiple of 64 values on, and cuts the row into buckets between two parameters. A bucket is one
tensor of the file, whatever the number of data-parallel ranks was. The file says how long it is, and not what lies where:
that is the order of Megatron Core's modules.

Megatron Core 0.16 writes some values of `fully_reshardable` in a wrong place if it pads a bucket that is not its buffer's
last. So the state is taken only if every master, rounded as the weights are, is the weight, whatever its form is. A wrong
order cannot pass either. `fully_reshardable`, which Megatron Core's distributed optimizer loads under every layout, is
what is written, by torch's own writer. The stacks wait on the disk, so that one layer of them is in memory.

Legend: t tensor-parallel size.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data_utils.files import read_object
from megatron.gpt2.checkpoint.folder import TRACKER
from megatron.gpt2.checkpoint.source import Source, TensorInfo
from megatron.gpt2.config import ModelConfig, require
from megatron.gpt2.formats.foreign import (
    MAX_JSON_BYTES,
    TABLE,
    ForeignSource,
    Hints,
    LazyTensor,
    State,
    Tensors,
    has_optimizer,
    on_disk,
    short_repr,
    state_if_known,
)
from megatron.gpt2.formats.megatron_model import (
    FUSED,
    HEAD,
    LAYER,
    TRUE_VOCABULARY,
    Layout,
    arguments,
    attributes,
    chunks_of_stages,
    core_name,
    iteration_of,
    model_of,
    our_name,
    padded_model,
    shard,
    whole_tensors,
)
from megatron.gpt2.formats.megatron_optimizer import (
    grad_scaler,
    megatron_adam_facts,
    param_groups,
    run_facts,
    schedule,
)
from megatron.gpt2.formats.native import new_folder
from megatron.gpt2.formats.torch_files import DcpFolder, load_pickle, save_dcp
from megatron.gpt2.model.gpt2 import parameter_specs
from megatron.gpt2.optimizer.optimizer import MOMENTS

COMMON, CONFIG = "common.pt", "metadata.json"
LAYERS = "decoder.layers."
STACKED = re.compile(r"decoder\.layers\.(?!\d)(.+)", re.ASCII)
STATE = re.compile(r"optimizer\.state\.(?:(fp32_)?param|(exp_avg|exp_avg_sq))\.(.+)", re.ASCII)
GROUP = "optimizer.distributed.dp_group_idx_"  # one for each model-parallel rank, those of the first stage first
# A rank has a buffer for each of its chunks of layers.
BUCKET = re.compile(
    re.escape(GROUP) + r"(\d{1,6})\.gbuf_idx_(\d{1,3})\.dtype_.{1,80}\.bucket_idx_(\d{1,6})\.param", re.ASCII
)
KINDS = {"master": "param", **{moment: moment for moment in MOMENTS}}
ALIGNMENT = 64
# A layer's modules in the order of Megatron Core's own layers, and of those with Transformer Engine's.
_LAST = ("attention.query_key_value", "post_attention_layernorm", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
ORDERS = (
    ("input_layernorm", "attention.dense", *_LAST),
    ("attention.dense", "input_layernorm", *_LAST),
)
FLAT = (
    ": its form dp_reshardable holds flat buckets of its writer's ranks, in an order that is not known here; with "
    "--dist-ckpt-optim-fully-reshardable Megatron saves it by name"
)
FORM = "fully_reshardable"
# Modules whose state of FP8 the loader looks for, of each layer; it is none.
WITH_EXTRA_STATE = (
    "self_attention.linear_proj",
    "self_attention.linear_qkv",
    "self_attention.core_attention",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)


def open_torch_dist(path: Path, hints: Hints, *, log: Callable[[str], None]) -> ForeignSource:
    """The checkpoint in `path`, the folder of an iteration. ValueError, one line, for anything that is not right."""
    backend = read_object(path / CONFIG, MAX_JSON_BYTES).get("sharded_backend")
    if backend != "torch_dist":
        raise ValueError(f"{path / CONFIG}: sharded_backend is {short_repr(backend)}, and torch_dist is read here")
    top = load_pickle(path / COMMON)
    require(isinstance(top, dict), f"{path / COMMON}: holds no dictionary")
    args, folder = attributes(top.get("args")), DcpFolder(path)
    held = _by_name(folder)
    weights = held.pop("model", {})
    t = _size(args, "tensor_model_parallel_size") or 1
    shapes = {name: tensor.info.shape for name, tensor in weights.items()}
    model, padded = model_of(top, shapes, {}, hints, log, t=1, padded_for=t)
    for name, spec in parameter_specs(padded).items():
        require(shapes[name] == spec.global_shape, f"{name} has shape {shapes[name]} instead of {spec.global_shape}")
    left_out = ["random states: another program's generators"] * any(n.startswith("rng_state") for n in folder.objects)
    flat = any(name.startswith(GROUP) for name in folder.tensors)

    def adam() -> State:
        if flat:
            states = _bucket_states(folder, args, padded, weights)
            objects = {name: f"{GROUP}0.{name}/shard_0_1" for name in ("optimizer", "grad_scaler")}
            said = {name: folder.object(key)[0] for name, key in objects.items() if key in folder.objects}
        else:
            states, said = {"master": weights, **held}, top["optimizer"]  # in fp32 the weights are their own masters
            _check_masters(states["master"], weights)
        inner = said.get("optimizer", said)  # around it are masters and scaler
        groups, state = inner["param_groups"], inner.get("state", {})
        step = int(state["common_step"] if "common_step" in state else groups[0]["step"])
        return {kind: states[kind] for kind in KINDS}, megatron_adam_facts(top, said, groups, step, left_out)

    what = FLAT if flat else ""
    states, facts = state_if_known(adam, weights, left_out, what) if held or flat else ({}, {})
    layout = {"model_parallel_size": t, "pipeline_parallel_size": args.get("pipeline_model_parallel_size") or 1}
    facts = {**run_facts(args), **facts, "layout": layout}
    return ForeignSource(path, "torch_dist", iteration_of(top), model, facts, {"model": weights, **states}, left_out)


def _size(args: Mapping[str, Any], name: str) -> int | None:
    """The argument, if it is a size."""
    return args[name] if type(args.get(name)) is int and args[name] > 0 else None


def _by_name(folder: DcpFolder) -> dict[str, dict[str, LazyTensor]]:
    """The folder's tensors by kind and by our names, layer by layer. ValueError for two of one name."""
    held: dict[str, dict[str, LazyTensor]] = {}
    for theirs in folder.tensors:
        if theirs.startswith(GROUP):
            continue
        state = STATE.fullmatch(theirs)
        kind, name = (state[2] or "master", state[3]) if state else ("model", theirs)
        for each, tensor in _by_layer(folder, theirs, name).items():
            ours = our_name(each)
            require(ours not in held.setdefault(kind, {}), f"holds {ours[:120]} twice")
            held[kind][ours] = tensor
    return held


def _by_layer(folder: DcpFolder, theirs: str, name: str) -> dict[str, LazyTensor]:
    """What the tensor `theirs` holds of the parameter `name`, or of each layer's."""
    require(name in folder.tensors, f"holds {theirs[:120]} of a parameter that it does not hold")
    shape, whole = folder.tensors[theirs].shape, folder.tensors[name].shape
    grid = shape[:-1] if len(shape) == len(whole) + 1 else (1,) * len(whole)  # of ranks, in fully_sharded_model_space
    splits = math.prod(shape) == math.prod(whole) and all(k and n % k == 0 for n, k in zip(whole, grid, strict=True))
    require(shape == whole or splits, f"{theirs[:120]} has shape {shape}, and its parameter {whole}")
    stacked = STACKED.fullmatch(name)
    if not stacked:
        found = {name: folder.lazy(theirs)}
    else:
        require(len(whole) > 1, f"{theirs[:120]} has no layers")
        require(len(shape) == len(whole) or grid[0] == whole[0], f"{theirs[:120]} splits layers")
        found = {f"{LAYERS}{row}.{stacked[1]}": folder.lazy(theirs, row) for row in range(whole[0])}
        grid, whole = grid[1:], whole[1:]
    change = partial(from_grid, grid=grid, shape=whole)
    return found if len(shape) == len(folder.tensors[name].shape) else {n: x.then(change) for n, x in found.items()}


def from_grid(x: Tensor, grid: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    """The tensor of `shape` that its parts, [*grid, values], make up."""
    part = [n // k for n, k in zip(shape, grid, strict=True)]
    order = [axis for i in range(len(grid)) for axis in (i, len(grid) + i)]
    return x.reshape(*grid, *part).permute(order).reshape(shape)


def _check_masters(masters: Tensors, weights: Tensors) -> None:
    """ValueError unless every master, rounded as the weights are, is the weight. Both are read, one at a time, unless
    the weights are their own masters."""
    for name, weight in weights.items() if masters is not weights else ():
        value = weight.make()
        same = torch.equal(masters[name].make().to(value.dtype), value)
        require(same, f"the master of {name}, rounded, is not the weight")


# --- flat buckets


def _bucket_states(
    folder: DcpFolder, args: Mapping[str, Any], model: ModelConfig, weights: Tensors
) -> dict[str, dict[str, LazyTensor]]:
    """Masters and moments, fp32. args: the run's, which say its layout. model: with the padded vocabulary. ValueError,
    one line, if the buckets are not those of the model in an order that is known here."""
    t, pipeline = (_size(args, f"{kind}_model_parallel_size") or 1 for kind in ("tensor", "pipeline"))
    virtual = _size(args, "virtual_pipeline_model_parallel_size")
    ends = (_size(args, f"decoder_{end}_pipeline_num_layers") for end in ("first", "last"))
    stages = chunks_of_stages(
        model, Layout(t, pipeline, virtual and model.num_layers // (pipeline * virtual), *ends), "megatron-core"
    )
    buffers: dict[tuple[int, int], dict[int, str]] = {}  # a buffer's buckets by number: the name without the kind
    for name in folder.tensors:
        if match := BUCKET.fullmatch(name):
            buffers.setdefault((int(match[1]), int(match[2])), {})[int(match[3])] = name.removesuffix(".param")
    problem = "its buffers are not those of the layout that its arguments tell of"
    require(len(stages) * t <= len(buffers), problem)
    chunks = {
        (stage * t + rank, number): chunk
        for stage, held in enumerate(stages)
        for rank in range(t)
        for number, chunk in enumerate(held)
    }
    require(chunks.keys() == buffers.keys(), problem)
    specs, problem = parameter_specs(model, t), ""
    shapes = {name: spec.local_shape(t) for name, spec in specs.items()}
    shapes[HEAD] = shapes[TABLE]
    for order in ORDERS:
        parts: dict[str, dict[str, list[tuple[object, LazyTensor]]]] = {kind: {} for kind in KINDS}
        try:
            for key, chunk in chunks.items():
                for name, bucket, start in _places(folder, buffers[key], _in_order(chunk, order), shapes):
                    for kind, theirs in KINDS.items():
                        part = _part(folder, f"{bucket}.{theirs}", start, shapes[name])
                        parts[kind].setdefault(name, []).append((f"{bucket}.{theirs}", part))
            states = {kind: whole_tensors(kind, by_name, specs, t) for kind, by_name in parts.items()}
            _check_masters(states["master"], weights)
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
    folder: DcpFolder, buckets: Mapping[int, str], names: Sequence[str], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, str, int]]:
    """Of each parameter of a buffer its bucket and the first value there. A bucket ends where a parameter does, or
    where the next one would begin. ValueError if the lengths do not fit."""
    number = at = 0
    for name in reversed(names):
        size, bucket = math.prod(shapes[name]), buckets.get(number, "")
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
    one = (start,), (math.prod(shape),)
    return LazyTensor(TensorInfo(torch.float32, shape), lambda: folder.read(name, *one).view(shape))


# --- written


def write_torch_dist(source: Source, out: str | Path, layout: Layout, *, log: Callable[[str], None] = print) -> Path:
    """Write `source`, with Adam's state if it holds one, into the new folder `out`; returns the iteration's folder.
    It loads under every layout; that of `layout` stands in the arguments. ValueError for one that Megatron Core does
    not have."""
    model = padded_model(source, layout.tensor)
    chunks_of_stages(model, layout, "megatron-core")  # checks the layout
    specs = parameter_specs(model, layout.tensor)
    stacks: dict[str, list[str]] = {}
    for name in specs:
        stacks.setdefault(dist_name(name), []).append(name)
    prefixes = {"model": ""}
    content: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    top: dict[str, Any] = {
        "args": arguments(source, model, layout, "megatron-core"),
        "checkpoint_version": 3.0,
        "iteration": source.iteration,
        TRUE_VOCABULARY: source.facts["vocab_size"],
        "content_metadata": content,
    }
    if has_optimizer(source):
        prefixes |= {kind: f"optimizer.state.{theirs}." for kind, theirs in KINDS.items()}
        top["args"].use_distributed_optimizer = True
        content["distrib_optim_sharding_type"] = FORM
        top["opt_param_scheduler"] = schedule(source, "megatron-v3", log)
        top["optimizer"] = {
            "optimizer": {"param_groups": param_groups(source)},
            "param_state_sharding_type": FORM,
            **grad_scaler(source),
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
            for theirs, names in stacks.items():
                shape = specs[names[0]].local_shape(1)
                stack = on_disk(path, (shard(source, name, specs[name], kind, 0, 1) for name in names))
                state[prefix + theirs] = (
                    stack.view(len(names), *shape) if theirs.startswith(LAYERS) else stack.view(shape)
                )
        save_dcp(path, state)
        torch.save(top, path / COMMON)
        config = {"sharded_backend": "torch_dist", "common_backend": "torch"}
        (path / CONFIG).write_text(json.dumps(config | {f"{name}_version": 1 for name in config}))
        (folder / TRACKER).write_text(f"{source.iteration}")
    return Path(out) / path.name


def dist_name(name: str) -> str:
    """transformer.layers.3.input_layernorm.bias -> decoder.layers.self_attention.linear_qkv.layer_norm_bias."""
    theirs = re.sub(r"\.layers\.\d+\.", ".layers.", core_name(name))
    for plain, fused in FUSED.items():
        theirs = theirs.replace(plain, fused)
    return theirs
