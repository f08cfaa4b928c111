"""Megatron's checkpoints with one file per rank, of every version, and DeepSpeed's of a Megatron model; read and written.

`mp_rank_TT` or, with a pipeline, `mp_rank_TT_PPP`, holds model_optim_rng.pt; DeepSpeed writes
mp_rank_TT_model_states.pt. A file holds one chunk of the layers, `model`, or, if stages are interleaved, several:
`model0`, `model1`, ... Layers are numbered from 0 in every chunk. All files' first chunks come before all second ones.

This, openai.py and torch_dist.py call torch.save: these files are pickles by definition. torch.save wants all tensors of
a rank at once. They wait for it on the disk, so that one at a time is in memory.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.gpt2.checkpoint.folder import TRACKER
from megatron.gpt2.checkpoint.source import Source
from megatron.gpt2.config import require
from megatron.gpt2.formats.foreign import (
    OPTIMIZER,
    ForeignSource,
    Hints,
    LazyTensor,
    State,
    by_part,
    errors_named,
    has_optimizer,
    head_major,
    on_disk,
    state_if_known,
)
from megatron.gpt2.formats.megatron_model import (
    HEAD,
    LAYER,
    TRUE_VOCABULARY,
    Layout,
    arguments,
    attributes,
    chunks_of_stages,
    in_form,
    iteration_of,
    model_of,
    our_name,
    padded_model,
    shard,
    whole_tensors,
)
from megatron.gpt2.formats.megatron_optimizer import (
    megatron_adam_facts,
    optimizer_state,
    rank_state,
    run_facts,
    schedule,
)
from megatron.gpt2.formats.native import new_folder
from megatron.gpt2.formats.torch_files import load_pickle
from megatron.gpt2.model.gpt2 import parameter_specs

RANK_FILES = ("model_optim_rng.pt", "model_rng.pt")
DEEPSPEED_FILE = re.compile(r"mp_rank_(\d{2,3})_model_states\.pt", re.ASCII)
FOLDER = re.compile(r"mp_rank_(\d{2,3})(?:_(\d{3}))?", re.ASCII)
# DeepSpeed's two; Megatron's of today and of v3.0.
SHARDED_OPTIMIZER = ("zero_pp_rank_*", "bf16_zero_pp_rank_*", "*/distrib_optim.pt", "*/optim.pt")
MAX_TENSORS = 20_000  # twelve in a layer


class RankFile(NamedTuple):
    """A rank's file. weights: by our names, in the order of the file; `HEAD` as well."""

    path: Path
    top: dict[str, Any]
    weights: dict[str, Tensor]


def rank_files(folder: Path) -> dict[tuple[int, int], Path]:
    """The ranks' files in `folder`, by (model-parallel rank, pipeline stage)."""
    found = {}
    for path in sorted(folder.glob("mp_rank_*")):
        if match := DEEPSPEED_FILE.fullmatch(path.name):
            found[int(match[1]), 0] = path
        elif match := FOLDER.fullmatch(path.name):
            for file in (path / name for name in RANK_FILES if (path / name).is_file()):
                found.setdefault((int(match[1]), int(match[2] or 0)), file)
    return found


def version(path: Path) -> str:
    """The format's name, recognised from the file of a rank. ValueError if that holds no model."""
    with errors_named(path):
        top = _load(path)
        if path.name not in RANK_FILES or "module" in top:
            return "deepspeed"
        model: Any = top.get("model", top.get("model0"))
        require(isinstance(model, dict), "holds no model")
        if any(".linear_qkv." in name for name in flatten(model)):
            return "megatron-core"
        if "language_model" not in model:
            return "megatron-2019"
        if "transformer_impl" in attributes(top.get("args")):  # a flag since v3.0
            return "megatron-v3"
        number = top.get("checkpoint_version", 0)  # 2 since v2.0
        return "megatron-v2" if type(number) in (int, float) and number >= 2 else "megatron-v1"


def _load(path: Path) -> dict[str, Any]:
    top = load_pickle(path)
    require(isinstance(top, dict), f"{path}: holds no dictionary")
    return top


def open_megatron(path: Path, format: str, hints: Hints, *, log: Callable[[str], None]) -> ForeignSource:
    """The checkpoint in `path`, the folder of an iteration, of the version `format`. `log` gets a line for a vocabulary
    size that is only assumed. ValueError, one line, for anything that is not right."""
    files, t = _open_files(path)
    top, p, v = files[0].top, len(files) // t, len(_chunks(files[0].top))
    model, padded = model_of(
        top,
        {name: tuple(x.shape) for file in files for name, x in file.weights.items() if name != HEAD},
        {
            "tensor_model_parallel_size": t,
            "model_parallel_size": t,
            "pipeline_model_parallel_size": p,
            "virtual_pipeline_model_parallel_size": v,
        },
        hints,
        log,
        t=t,
        padded_for=t,
    )
    number = top.get("checkpoint_version", 0)
    if type(number) not in (int, float) or number not in (0, 1, 2, 3):
        raise ValueError("its checkpoint_version is unknown; those from 0 to 3 are known")
    order = partial(
        head_major, heads=model.num_attention_heads // t, version=2 if format == "megatron-core" else int(number)
    )

    def whole(kind: str, held: Iterable[Mapping[str, Tensor]]) -> dict[str, LazyTensor]:
        """What the files `held` of all parameters."""
        shards: dict[str, list[tuple[object, LazyTensor]]] = {}
        for file, own in zip(files, held, strict=True):
            for name, x in own.items():
                shards.setdefault(name, []).append((file.path, LazyTensor.of(x)))
        return whole_tensors(kind, shards, specs, t, order)

    specs = parameter_specs(padded, t)
    weights = whole("model", (file.weights for file in files))
    left_out: list[str] = []

    def adam() -> State:
        held, groups, steps = zip(*(rank_state(file.top["optimizer"], file.weights) for file in files), strict=True)
        require(len({*steps}) == 1, f"steps {sorted({*steps})[:5]}")
        facts = megatron_adam_facts(top, top["optimizer"], groups[0], steps[0], left_out)
        return {kind: whole(kind, [states[kind] for states in held]) for kind in OPTIMIZER}, facts

    has_state = top.get("optimizer") is not None
    state, facts = state_if_known(adam, weights, left_out) if has_state else ({}, {})
    if any(name.endswith("rng_state") or name == "rng_tracker_states" for name in top):
        left_out.append("random states: another program's generators")
    if others := sorted(file.name for pattern in SHARDED_OPTIMIZER for file in path.glob(pattern)):
        left_out.append(f"{len(others)} files of a sharded optimizer ({others[0]} ...)")
    layout = {"model_parallel_size": t, "pipeline_parallel_size": p}
    if v > 1:
        layout["virtual_pipeline_parallel_size"] = v
    facts = {**run_facts(attributes(top.get("args"))), **facts, "layout": layout}
    return ForeignSource(path, format, iteration_of(top), model, facts, {"model": weights, **state}, left_out)


def _open_files(path: Path) -> tuple[list[RankFile], int]:
    """All files of the iteration, stage by stage, within a stage rank by rank, and the model-parallel size. ValueError
    that names the file if one is missing, up to the last one that is there and as many as the arguments say, or if they
    are of two runs."""
    paths = rank_files(path)
    first = paths[min(paths)]
    args, sizes = attributes(_load(first).get("args")), []
    for i, flags in enumerate(
        (("tensor_model_parallel_size", "model_parallel_size"), ("pipeline_model_parallel_size",))
    ):
        said = [args[flag] for flag in flags if type(args.get(flag)) is int]
        sizes.append(max(1 + max(key[i] for key in paths), *said[:1], 1))
    t, p = sizes
    for rank, stage in itertools.product(range(t), range(p)):
        if (rank, stage) not in paths:
            name = f"mp_rank_{rank:02d}" + f"_{stage:03d}" * (first.parent.name.count("_") == 3 or p > 1)
            missing = f"{name}_model_states.pt" if first.parent == path else f"{name}/{first.name}"
            raise ValueError(
                f"{missing} is missing; every rank's file is needed, for {t} model-parallel ranks and {p} pipeline stages"
            )
    files = [RankFile(paths[rank, stage], _load(paths[rank, stage]), {}) for stage in range(p) for rank in range(t)]
    begin, top = first.relative_to(path), files[0].top
    chunks, iteration, layers = _chunks(top), iteration_of(top), 0
    for file in files:
        with errors_named(file.path):
            its, own = iteration_of(file.top), _chunks(file.top)
            require(
                its == iteration, f"ranks of two iterations are mixed: {begin} is of {iteration}, this one of {its}"
            )
            require(
                own == chunks,
                f"holds {', '.join(own) or 'no model'}, and {begin} holds {', '.join(chunks)}: are two runs mixed?",
            )
    for chunk in chunks:
        for number, file in enumerate(files, 1):
            with errors_named(file.path):
                local = _take(file.top[chunk], file.weights, layers)
            if number % t == 0:  # the last rank of a stage
                layers += len(local)
    return files, t


def _chunks(top: Mapping[str, Any]) -> list[str]:
    """The names under which a file holds weights, in the order of their layers."""
    found = [name for name in top if isinstance(name, str) and re.fullmatch(r"model\d{0,3}|module", name)]
    return sorted(found, key=lambda name: int("0" + re.sub(r"\D", "", name)))


def _take(held: Any, weights: dict[str, Tensor], first_layer: int) -> set[int]:
    """Puts a chunk's tensors into `weights`; returns the numbers of its layers."""
    if not isinstance(held, dict):
        raise ValueError(
            "holds no dictionary of weights (DeepSpeed's pipeline keeps them in layer_* files, which are not supported)"
        )
    local: set[int] = set()
    for theirs, tensor in flatten(held).items():
        name = our_name(theirs)
        if layer := LAYER.fullmatch(name):
            local.add(int(layer[1]))
            name = f"transformer.layers.{first_layer + int(layer[1])}.{layer[2]}"
        require(name not in weights, f"holds {name} twice, once as {theirs[:120]!r}")
        weights[name] = tensor
    require(local == set(range(len(local))), f"its layers are not numbered from 0 to {len(local) - 1}")
    return local


def flatten(tree: Mapping[str, Any], prefix: str = "", depth: int = 5) -> dict[str, Tensor]:
    """The tensors of nested dictionaries, by name; Transformer Engine's _extra_state (of FP8) is left out."""
    found: dict[str, Tensor] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and depth:
            found |= flatten(value, f"{name}.", depth - 1)
        elif not name.endswith("_extra_state"):
            require(isinstance(value, Tensor), f"{name[:120]!r} is not a tensor")
            found[name] = value
        require(len(found) <= MAX_TENSORS, f"holds more than {MAX_TENSORS:,} tensors")
    return found


def write_megatron(
    source: Source, out: str | Path, format: str, layout: Layout | None = None, *, log: Callable[[str], None] = print
) -> Path:
    """Write `source` into the new folder `out`, in the format "megatron-2019", "megatron-v2", "megatron-v3" or
    "megatron-core", in files for the ranks of `layout`; returns the iteration's folder.

    Masters, moments, loss scaler and schedule are written if the source holds them, except for megatron-core, which
    gets only weights. ValueError for a layout that does not fit.
    """
    layout = layout or Layout()
    t, model = layout.tensor, padded_model(source, layout.tensor)
    stages, specs = chunks_of_stages(model, layout, format), parameter_specs(model, t)
    with_optimizer = format != "megatron-core" and has_optimizer(source)
    top: dict[str, Any] = {"iteration": source.iteration, TRUE_VOCABULARY: source.facts["vocab_size"]}
    if format != "megatron-2019":
        top |= {"args": arguments(source, model, layout, format), "checkpoint_version": 3.0}
    if with_optimizer:
        name = "opt_param_scheduler" if format == "megatron-v3" else "lr_scheduler"
        top[name] = schedule(source, format, log)
        if format == "megatron-2019":
            log("the loss scaler is written as a plain dictionary: 2019's class is not ours to pickle")

    def part(rank: int, folder: Path, kind: str, name: str) -> Tensor:
        x = shard(source, name, specs[name], kind, rank, t)
        if format == "megatron-2019" and ".query_key_value." in name:
            x = by_part(x, model.num_attention_heads // t)
        return on_disk(folder, [x]).view(x.shape)

    with new_folder(out) as folder:
        iteration = folder / f"iter_{source.iteration:07d}"
        for rank, (stage, chunks) in itertools.product(range(t), enumerate(stages)):
            path = iteration / (f"mp_rank_{rank:02d}" + f"_{stage:03d}" * (layout.pipeline > 1)) / RANK_FILES[0]
            path.parent.mkdir(parents=True)
            own = partial(part, rank, path.parent)
            held = dict(top)
            for number, names in enumerate(chunks):
                key = f"model{number}" if len(chunks) > 1 else "model"
                held[key] = in_form(format, {theirs: own("model", ours) for theirs, ours in names.items()})
            if with_optimizer:
                # Without names, in the order of the model: what decays, then what does not.
                groups: list[list[dict[str, Tensor]]] = [[], []]
                for name in (name for names in chunks for name in names.values()):
                    vector = len(specs[name].global_shape) == 1
                    groups[vector].append({kind: own(kind, name) for kind in OPTIMIZER})
                held["optimizer"] = optimizer_state(source, groups, format)
            torch.save(held, path)
        (folder / TRACKER).write_text(f"{source.iteration}")
    return Path(out) / iteration.name
