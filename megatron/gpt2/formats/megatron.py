"""Megatron's checkpoints with one file per rank, of every version, and DeepSpeed's of a Megatron model; read and written.

`mp_rank_TT` or, with a pipeline, `mp_rank_TT_PPP`, holds model_optim_rng.pt; DeepSpeed writes
mp_rank_TT_model_states.pt. A file holds one chunk of the layers, `model`, or, if stages are interleaved, several:
`model0`, `model1`, ... Layers are numbered from 0 in every chunk. All files' first chunks come before all second ones.

This and nanogpt.py and torch_dist.py call torch.save: these files are pickles by definition. torch.save wants all tensors
of a rank at once. They wait for it on the disk, so that one at a time is in memory.
"""

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.gpt2.checkpoint.folder import TRACKER
from megatron.gpt2.checkpoint.source import Source, TensorInfo
from megatron.gpt2.config import require
from megatron.gpt2.formats.foreign import (
    OPTIMIZER,
    TABLE,
    ForeignSource,
    Hints,
    LazyTensor,
    by_part,
    errors_named,
    first_rows,
    has_optimizer,
    head_major,
    on_disk,
)
from megatron.gpt2.formats.megatron_model import (
    HEAD,
    LAYER,
    TRUE_VOCABULARY,
    Layout,
    arguments,
    attributes,
    check_names,
    chunks_of_stages,
    in_form,
    iteration_of,
    model_of,
    name_of_2019,
    padded_model,
)
from megatron.gpt2.formats.megatron_optimizer import (
    Files,
    RankFile,
    optimizer_2019,
    optimizer_later,
    optimizer_state,
    schedule,
)
from megatron.gpt2.formats.native import new_folder
from megatron.gpt2.formats.torch_files import load_pickle
from megatron.gpt2.model.gpt2 import parameter_specs
from megatron.gpt2.optimizer.optimizer import MOMENTS
from mpu.partition import PartitionSpec

RANK_FILES = ("model_optim_rng.pt", "model_rng.pt")
DEEPSPEED_FILE = re.compile(r"mp_rank_(\d{2,3})_model_states\.pt", re.ASCII)
FOLDER = re.compile(r"mp_rank_(\d{2,3})(?:_(\d{3}))?", re.ASCII)
# DeepSpeed's two; Megatron's of today and of v3.0.
SHARDED_OPTIMIZER = ("zero_pp_rank_*", "bf16_zero_pp_rank_*", "*/distrib_optim.pt", "*/optim.pt")
MAX_TENSORS = 20_000  # twelve in a layer
Specs = Mapping[str, PartitionSpec]


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
        top = load_pickle(path)
        require(isinstance(top, dict), "holds no dictionary")
        if path.name not in RANK_FILES or "module" in top:
            return "deepspeed"
        model = top.get("model", top.get("model0"))
        require(isinstance(model, dict), "holds no model")
        if any(".linear_qkv." in name for name in flatten(model)):
            return "megatron-core"
        if "language_model" not in model:
            return "megatron-2019"
        if "transformer_impl" in attributes(top.get("args")):  # a flag since v3.0
            return "megatron-v3"
        number = top.get("checkpoint_version", 0)  # 2 since v2.0
        return "megatron-v2" if type(number) in (int, float) and number >= 2 else "megatron-v1"


def open_megatron(path: Path, format: str, hints: Hints, *, log: Callable[[str], None]) -> ForeignSource:
    """The checkpoint in `path`, the folder of an iteration, of the version `format`. `log` gets a line for a vocabulary
    size that is only assumed. ValueError, one line, for anything that is not right."""
    tops, size = _open_files(path)
    top, stages = tops[0][1], len(tops) // size
    files, num_layers = _weights(tops, size)
    v = len(_chunks(top))
    model, padded = model_of(
        top,
        {name: tuple(x.shape) for file in files for name, x in file.weights.items() if name != HEAD},
        {
            "num_layers": num_layers,
            "tensor_model_parallel_size": size,
            "model_parallel_size": size,
            "pipeline_model_parallel_size": stages,
            "virtual_pipeline_model_parallel_size": v,
        },
        hints,
        log,
        t=size,
        padded_for=size,
    )
    number = top.get("checkpoint_version", 0)
    if type(number) not in (int, float) or number not in (0, 1, 2, 3):
        raise ValueError("its checkpoint_version is unknown; those from 0 to 3 are known")
    specs = parameter_specs(padded, size)
    _check(path, files, specs, size)
    order = head_major(model.num_attention_heads // size, 2 if format == "megatron-core" else int(number))
    facts, states, left_out = optimizer_state(path, top, files, specs)
    shards: dict[str, list[Tensor]] = {}
    for file in files:
        for name, x in file.weights.items():
            shards.setdefault(name, []).append(x)
    lazy = {
        f"{kind}.{name}": _joined(parts[name], name, spec, order, model.vocab_size)
        for kind, parts in {"model": shards, **states}.items()
        for name, spec in specs.items()
    }
    if any(name.endswith("rng_state") or name == "rng_tracker_states" for name in top):
        left_out.append("random states: another program's generators")
    if others := sorted(file.name for pattern in SHARDED_OPTIMIZER for file in path.glob(pattern)):
        left_out.append(f"{len(others)} files of a sharded optimizer ({others[0]} ...)")
    layout = {"model_parallel_size": size, "pipeline_parallel_size": stages}
    if v > 1:
        layout["virtual_pipeline_parallel_size"] = v
    return ForeignSource(path, format, iteration_of(top), model, {**facts, "layout": layout}, lazy, left_out)


def _joined(
    shards: list[Tensor], name: str, spec: PartitionSpec, order: Callable[[Tensor], Tensor], vocab_size: int | None
) -> LazyTensor:
    """The whole tensor, out of the ranks'. order: puts a rank's rows of QKV into our order."""
    tensor = LazyTensor.of(shards[0])
    if spec.dim is not None:
        change: Callable[[Tensor], Tensor] = order if ".query_key_value." in name else lambda x: x
        info = TensorInfo(shards[0].dtype, spec.global_shape)
        tensor = LazyTensor(info, lambda: torch.cat([change(x) for x in shards], spec.dim or 0))
    return tensor.then(first_rows(vocab_size)) if name == TABLE and vocab_size else tensor


def _open_files(path: Path) -> tuple[list[tuple[Path, dict[str, Any]]], int]:
    """All files of the iteration, stage by stage, within a stage rank by rank, and the model-parallel size. ValueError that names the file if one is
    missing, up to the last one that is there and as many as the arguments say, or if they are of two runs."""
    files = rank_files(path)
    first = files[min(files)]
    top = load_pickle(first)
    args = attributes(top.get("args")) if isinstance(top, dict) else {}
    sizes = []
    for i, flags in enumerate(
        (("tensor_model_parallel_size", "model_parallel_size"), ("pipeline_model_parallel_size",))
    ):
        said = [args[flag] for flag in flags if type(args.get(flag)) is int]
        sizes.append(max(1 + max(key[i] for key in files), *said[:1], 1))
    for rank, stage in itertools.product(*map(range, sizes)):
        if (rank, stage) not in files:
            pipelined = first.parent.name.count("_") == 3 or sizes[1] > 1
            name = f"mp_rank_{rank:02d}" + f"_{stage:03d}" * pipelined
            missing = f"{name}_model_states.pt" if first.parent == path else f"{name}/{first.name}"
            raise ValueError(
                f"{missing} is missing; every rank's file is needed, for {sizes[0]} "
                f"model-parallel ranks and {sizes[1]} pipeline stages"
            )
    tops = [
        (files[rank, stage], load_pickle(files[rank, stage])) for stage in range(sizes[1]) for rank in range(sizes[0])
    ]
    seen = []
    for file, top in tops:
        with errors_named(file):
            require(isinstance(top, dict), "holds no dictionary")
            seen.append((iteration_of(top), _chunks(top)))
            (iteration, chunks), (its, own) = seen[0], seen[-1]
            begin = first.relative_to(path)
            require(
                its == iteration, f"ranks of two iterations are mixed: {begin} is of {iteration}, this one of {its}"
            )
            require(
                own == chunks,
                f"holds {', '.join(own) or 'no model'}, and {begin} holds {', '.join(chunks)}: are two runs mixed?",
            )
    return tops, sizes[0]


def _chunks(top: Mapping[str, Any]) -> list[str]:
    """The names under which a file holds weights, in the order of their layers."""
    found = [name for name in top if isinstance(name, str) and re.fullmatch(r"model\d{0,3}|module", name)]
    return sorted(found, key=lambda name: int("0" + re.sub(r"\D", "", name)))


def _weights(tops: Sequence[tuple[Path, dict[str, Any]]], size: int) -> tuple[Files, int]:
    """Every file with its weights under our names, and the number of layers."""
    files = [RankFile(path, top.get("optimizer"), {}) for path, top in tops]
    layers = 0
    for chunk in _chunks(tops[0][1]):
        for number, ((path, top), file) in enumerate(zip(tops, files, strict=True), 1):
            with errors_named(path):
                local = _take(top[chunk], file.weights, layers)
            if number % size == 0:  # the last rank of a stage
                layers += len(local)
    for number, file in enumerate(files):
        begin = files[number - number % size]
        if list(file.weights) != list(begin.weights):
            raise ValueError(f"{file.path}: holds other parameters than {begin.path}")
    return files, layers


def _take(held: Any, weights: dict[str, Tensor], first_layer: int) -> set[int]:
    """Puts a chunk's tensors into `weights`; returns the numbers of its layers."""
    if not isinstance(held, dict):
        raise ValueError(
            "holds no dictionary of weights (DeepSpeed's pipeline keeps them in layer_* files, which are not supported)"
        )
    local: set[int] = set()
    for theirs, tensor in flatten(held).items():
        name = name_of_2019(theirs)
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
            require(isinstance(value, Tensor), f"{name[:120]!r} is no tensor")
            found[name] = value
        require(len(found) <= MAX_TENSORS, f"holds more than {MAX_TENSORS:,} tensors")
    return found


def _check(path: Path, files: Files, specs: Specs, size: int) -> None:
    """ValueError unless every rank holds its part of every parameter, and the same of what is replicated."""
    names = [name for file in files[::size] for name in file.weights if name != HEAD]
    check_names(names, specs)
    require(len(names) == len(specs), "two pipeline stages hold the same parameter")
    for number, file in enumerate(files):
        rank = number % size
        begin, tables = files[number - rank], files[rank]
        for name, tensor in file.weights.items():
            spec, first = specs[TABLE if name == HEAD else name], begin.weights[name]
            if tuple(tensor.shape) != spec.local_shape(size):
                raise ValueError(
                    f"{file.path}: {name} has shape {tuple(tensor.shape)} instead of {spec.local_shape(size)}"
                )
            if tensor.dtype != first.dtype or (spec.dim is None and not torch.equal(tensor, first)):
                raise ValueError(
                    f"{file.path}: {name} should be the same on all ranks and is another one in "
                    f"{begin.path.relative_to(path)}: are two runs mixed?"
                )
        if HEAD in file.weights and not torch.equal(file.weights[HEAD], tables.weights[TABLE]):
            raise ValueError(
                f"{file.path}: {HEAD} is not the word embeddings of {tables.path.relative_to(path)}, and the head of "
                "this program's GPT-2 is tied to them"
            )


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
    top: dict[str, Any] = {"iteration": source.iteration}
    if format != "megatron-2019":
        top |= {"args": arguments(source, model, layout, format), "checkpoint_version": 3.0}
    if with_optimizer:
        name = "opt_param_scheduler" if format == "megatron-v3" else "lr_scheduler"
        top[name] = schedule(source, format, log)
        if format == "megatron-2019":
            log("the loss scaler is written as a plain dictionary: 2019's class is not ours to pickle")

    def shard(rank: int, folder: Path, kind: str, name: str) -> Tensor:
        """The rank's part. Rows of padding repeat the last true one, as Megatron's own converter does: its softmax
        counts them, and beside logits far below 0 those of zero rows would take nearly all."""
        spec, full_name = specs[name], f"{kind}.{name}"
        local = torch.zeros(spec.local_shape(t), dtype=source.tensors[full_name].dtype)
        own = spec.true_part(local, rank, t)
        source.read_into(own, full_name, spec.box(rank, t).offset)
        if len(own) < len(local) and kind not in MOMENTS:
            rows, width = spec.global_shape
            local[len(own) :] = source.read(full_name, (rows - 1, 0), (1, width))
        if format == "megatron-2019" and ".query_key_value." in name:
            local = by_part(model.num_attention_heads // t)(local)
        return on_disk(folder, [local]).view(local.shape)

    with new_folder(out) as folder:
        iteration = folder / f"iter_{source.iteration:07d}"
        for rank, (stage, chunks) in itertools.product(range(t), enumerate(stages)):
            name = f"mp_rank_{rank:02d}" + f"_{stage:03d}" * (layout.pipeline > 1)
            path = iteration / name / RANK_FILES[0]
            path.parent.mkdir(parents=True)
            part = partial(shard, rank, path.parent)
            held: dict[str, Any] = {**top, TRUE_VOCABULARY: source.facts["vocab_size"]}
            for number, names in enumerate(chunks):
                key = f"model{number}" if len(chunks) > 1 else "model"
                held[key] = in_form(format, {theirs: part("model", ours) for theirs, ours in names.items()})
            if with_optimizer:
                # Without names, in the order of the model: what decays, then what does not.
                ours = [name for names in chunks for name in names.values()]
                groups = [
                    [
                        {kind: part(kind, name) for kind in OPTIMIZER}
                        for name in ours
                        if (len(specs[name].global_shape) > 1) == decays
                    ]
                    for decays in (True, False)
                ]
                make = optimizer_2019 if format == "megatron-2019" else optimizer_later
                held["optimizer"] = make(source, groups)
            torch.save(held, path)
        (folder / TRACKER).write_text(f"{source.iteration}")
    return Path(out) / iteration.name
