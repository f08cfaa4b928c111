"""Megatron's `torch_dist` checkpoints, its default: a folder of DCP, with what is no tensor in `common.pt`.

The tensors are whole, whatever the layout of the run was. The layers are stacked, as [layers, ...] under
`decoder.layers.NAME`, or stand one by one under `decoder.layers.N.NAME`. Adam's state has the same names behind
`optimizer.state.KIND.`. The form `fully_sharded_model_space` (until Megatron Core 0.15) keeps a tensor of [x, y] that
was split over a grid of [f, g] ranks as [f, g, xy / fg]. The form `dp_reshardable` is read by megatron_buckets.py.

Megatron Core 0.16 writes some values of `fully_reshardable` in a wrong place where it pads a bucket that is not its
buffer's last. So the state is taken only where its masters are the weights, whatever its form is.
"""

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data_utils.files import read_object
from megatron.gpt2.config import ModelConfig, require
from megatron.gpt2.formats.dcp import DcpFolder
from megatron.gpt2.formats.foreign import MAX_JSON_BYTES, ForeignSource, Hints, LazyTensor, first_rows, short_repr
from megatron.gpt2.formats.megatron_buckets import GROUP, bucket_states, check_masters
from megatron.gpt2.formats.megatron_files import LAYER, attributes, iteration_of, name_of_2019
from megatron.gpt2.formats.megatron_model import model_of, tell_of_padding, with_padding
from megatron.gpt2.formats.megatron_optimizer import adam_facts, run_facts
from megatron.gpt2.formats.pickles import load_pickle
from megatron.gpt2.model.parameters import parameter_specs

COMMON, CONFIG = "common.pt", "metadata.json"
STACKED = re.compile(r"decoder\.layers\.(?!\d)(.+)", re.ASCII)
STATE = re.compile(r"optimizer\.state\.(fp32_param|param|exp_avg|exp_avg_sq)\.(.+)", re.ASCII)
KINDS = {"fp32_param": "master", "param": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
NO_BUCKETS = (
    "the optimizer's state: its form dp_reshardable holds flat buckets of its writer's ranks, in an order "
    "that is not known here; with --dist-ckpt-optim-fully-reshardable Megatron saves it by name"
)
Held = dict[str, dict[str, LazyTensor]]  # by kind and by our names, the vocabulary padded


def open_torch_dist(path: Path, hints: Hints, *, log: Callable[[str], None]) -> ForeignSource:
    """The checkpoint in `path`, the folder of an iteration. ValueError, one line, for anything that is not right."""
    backend = read_object(path / CONFIG, MAX_JSON_BYTES).get("sharded_backend")
    if backend != "torch_dist":
        raise ValueError(f"{path / CONFIG}: sharded_backend is {short_repr(backend)}, and torch_dist is read here")
    top = load_pickle(path / COMMON)
    require(isinstance(top, dict), f"{path / COMMON}: holds no dictionary")
    args, folder = attributes(top.get("args")), DcpFolder(path)
    held = _held(folder)
    weights = held.pop("model")
    layers = {match[1] for name in weights if (match := LAYER.fullmatch(name))}
    p = args.get("tensor_model_parallel_size")
    p = p if type(p) is int and p > 0 else 1
    model, padded = model_of(
        path, top, {name: tensor.info.shape for name, tensor in weights.items()}, hints, {"num_layers": len(layers)}, 1
    )
    tell_of_padding(path, top, model, padded, hints, p, log)
    _check(path, weights, model, padded)
    facts: dict[str, Any] = {
        **run_facts(args),
        "layout": {"model_parallel_size": p, "pipeline_parallel_size": args.get("pipeline_model_parallel_size") or 1},
    }
    left_out = ["random states: another program's generators"] * any(
        name.startswith("rng_state") for name in folder.objects
    )
    flat = any(name.startswith(GROUP) for name in folder.tensors)
    if held or flat:
        if "master" not in held and all(tensor.info.dtype == torch.float32 for tensor in weights.values()):
            held["master"] = weights  # in fp32 the weights are their own masters
        try:
            if flat:
                held = bucket_states(folder, args, with_padding(model, padded), weights)
                top = {
                    **top,
                    "optimizer": {
                        name: folder.object(f"{GROUP}0.{name}/shard_0_1")[0]
                        for name in ("optimizer", "grad_scaler")
                        if f"{GROUP}0.{name}/shard_0_1" in folder.objects
                    },
                }
            said, config, missing = _optimizer(top, args, held, weights)
            if not flat:
                check_masters(held["master"], weights)
        except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError) as error:
            left_out.append(
                (NO_BUCKETS if flat else "the optimizer's state: its form is not one that is known here")
                + f" ({type(error).__name__}: {str(error)[:200]})"
            )
            held = {}
        else:
            facts |= {"optimizer": said, "config": {"optimizer": config}}
            left_out += missing
    assert model.vocab_size is not None
    rows = first_rows(model.vocab_size)
    lazy = {
        f"{kind}.{name}": tensors[name].then(rows) if name == "word_embeddings.weight" else tensors[name]
        for kind, tensors in {"model": weights, **held}.items()
        for name in parameter_specs(model)
    }
    return ForeignSource(path, "torch_dist", iteration_of(path / COMMON, top), model, facts, lazy, left_out)


def _held(folder: DcpFolder) -> Held:
    """The folder's tensors, layer by layer. ValueError for two of one name."""
    held: Held = {"model": {}}
    for theirs in folder.tensors:
        if theirs.startswith(GROUP):
            continue
        state = STATE.fullmatch(theirs)
        kind, name = (KINDS[state[1]], state[2]) if state else ("model", theirs)
        for number, tensor in _by_layer(folder, theirs, name).items():
            ours = name_of_2019(number)
            require(ours not in held.setdefault(kind, {}), f"{folder.path}: holds {ours[:120]} twice")
            held[kind][ours] = tensor
    return held


def _by_layer(folder: DcpFolder, theirs: str, name: str) -> dict[str, LazyTensor]:
    """What the tensor `theirs` holds of the parameter `name`, or of each layer's."""
    if name not in folder.tensors:
        raise ValueError(f"{folder.path}: holds {theirs[:120]} of a parameter that it does not hold")
    shape, whole = folder.tensors[theirs].shape, folder.tensors[name].shape
    if len(shape) == len(whole) + 1:
        if math.prod(shape) != math.prod(whole) or any(not k or n % k for n, k in zip(whole, shape, strict=False)):
            raise ValueError(f"{folder.path}: {theirs[:120]} has shape {shape}, and its parameter {whole}")
    elif shape != whole:
        raise ValueError(f"{folder.path}: {theirs[:120]} has shape {shape}, and its parameter {whole}")
    grid = shape[:-1] if len(shape) > len(whole) else None
    stacked = STACKED.fullmatch(name)
    if not stacked:
        tensor = folder.lazy(theirs)
        return {name: tensor.then(from_grid(grid, whole)) if grid else tensor}
    require(not grid or grid[0] == whole[0], f"{folder.path}: {theirs[:120]} splits layers")
    require(len(whole) > 1, f"{folder.path}: {theirs[:120]} has no layers")
    found = {}
    for row in range(whole[0]):
        tensor = folder.lazy(theirs, row)
        found[f"decoder.layers.{row}.{stacked[1]}"] = tensor.then(from_grid(grid[1:], whole[1:])) if grid else tensor
    return found


def from_grid(grid: tuple[int, ...], shape: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
    """The change from the parts of a tensor, [*grid, values], to the tensor of `shape` that they make up."""
    part = [n // k for n, k in zip(shape, grid, strict=True)]
    order = [axis for i in range(len(grid)) for axis in (i, len(grid) + i)]
    return lambda x: x.reshape(*grid, *part).permute(order).reshape(shape)


def _check(path: Path, weights: Mapping[str, LazyTensor], model: ModelConfig, padded: int) -> None:
    """ValueError unless `weights` are those of the model."""
    specs = parameter_specs(with_padding(model, padded))
    for name in sorted(set(weights) ^ specs.keys()):
        problem = f"holds no {name}" if name in specs else f"holds {name[:120]}, which is no part of a GPT-2"
        raise ValueError(f"{path}: {problem}")
    for name, spec in specs.items():
        shape = weights[name].info.shape
        require(shape == spec.global_shape, f"{path}: {name} has shape {shape} instead of {spec.global_shape}")


def _optimizer(
    top: Mapping[str, Any], args: Mapping[str, Any], held: Held, weights: Mapping[str, LazyTensor]
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """The facts of Adam, its flags and what these cannot say. ValueError where a tensor is missing or is not fp32."""
    for kind in ("master", "exp_avg", "exp_avg_sq"):
        for name, weight in weights.items():
            info = held[kind][name].info
            require(info.dtype == torch.float32 and info.shape == weight.info.shape, f"{kind} of {name} is no fp32")
    optimizer = top["optimizer"]
    inner = optimizer.get("optimizer", optimizer)  # around it are masters and scaler
    groups = inner["param_groups"]
    step = inner["state"]["common_step"] if "common_step" in inner.get("state", {}) else groups[0]["step"]
    return adam_facts(top, args, optimizer, groups, int(step))
