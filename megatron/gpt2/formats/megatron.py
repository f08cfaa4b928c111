"""Read and write Megatron's checkpoints with one file per rank, of every version. Read DeepSpeed's checkpoints of a
Megatron model.

Each folder `mp_rank_TT` or, with a pipeline, `mp_rank_TT_PPP` has a file model_optim_rng.pt. DeepSpeed writes
mp_rank_TT_model_states.pt. A file contains one chunk of layers, `model`, or several with interleaved stages: `model0`,
`model1`, ... Layers are numbered from 0 in every chunk. In the model, the first chunks of all files precede the second
chunks.

With ZeRO 1 or 2, each data-parallel rank D of a model-parallel rank has a file
zero_pp_rank_D_mp_rank_TT_optim_states.pt.

megatron.py, nanogpt_and_dcp.py and torch_dist.py call torch.save, because their formats are pickles. torch.save needs
all tensors of a rank at once, so the tensors are memory-mapped from temporary files.
"""

import itertools
import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from data_utils.command_line import Log, plural, require
from megatron.gpt2.checkpoint.interface import BaseCheckpoint
from megatron.gpt2.checkpoint.save_folder import LATEST_FILE
from megatron.gpt2.formats.foreign_checkpoint import (
    OPTIMIZER_KINDS,
    Entries,
    ForeignCheckpoint,
    Hints,
    LazyTensor,
    OptimizerState,
    file_errors,
    from_head_major,
    has_optimizer,
    same_step,
    spill_to_disk,
    to_head_major,
)
from megatron.gpt2.formats.megatron_model import (
    EMBEDDINGS_FOR_HEAD,
    LAYER,
    MegatronLayout,
    chunks_of_stages,
    format_state_dict,
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
    megatron_adam_metadata,
    optimizer_state_dict,
    progress_metadata,
    read_rank_optimizer,
    read_zero_optimizer,
    scheduler_state_dict,
)
from megatron.gpt2.formats.native import new_folder
from megatron.gpt2.formats.torch_files import load_torch_file
from megatron.gpt2.model.gpt2 import model_partition_specs

MAX_TENSORS = 20_000  # A layer has twelve tensors.
RANK_FILE = re.compile(r"mp_rank_(\d{2,3})(?:_(\d{3}))?(?:/model(?:_optim)?_rng\.pt|_model_states\.pt)", re.ASCII)
ZERO_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d{1,5})_mp_rank_(\d{2,3})_?optim_states\.pt", re.ASCII)
SHARDED_OPTIMIZER = ("*/distrib_optim.pt", "*/optim.pt")  # files of Megatron v3.0 and later


class RankFile(NamedTuple):
    """The opened file of a rank.

    top: the dictionary in the file.
    weights: the weights by our names, in file order, with `EMBEDDINGS_FOR_HEAD`.
    """

    path: Path
    top: dict[str, Any]
    weights: dict[str, LazyTensor]


def rank_files(folder: Path) -> dict[tuple[int, int], Path]:
    """Return the files of the ranks in `folder`, by (tensor-parallel rank, pipeline stage)."""
    files: dict[tuple[int, int], Path] = {}
    for path in sorted((*folder.glob("mp_rank_*.pt"), *folder.glob("mp_rank_*/*.pt"))):
        if match := RANK_FILE.fullmatch(path.relative_to(folder).as_posix()):
            files.setdefault((int(match[1]), int(match[2] or 0)), path)
    return files


def detect_megatron_format(path: Path) -> str:
    """Return the format of `path`, the file of a rank. Raises ValueError if the file contains no model."""
    with file_errors(path):
        top = load_torch_file(path)
        if path.name.endswith("_states.pt") or "module" in top:
            return "deepspeed"
        model: Any = top.get("model", top.get("model0"))
        require(isinstance(model, dict), "holds no model")
        if any(".linear_qkv." in name for name in flatten_state_dict(model)):
            return "megatron-core"
        if "language_model" not in model:
            return "megatron-2019"
        if "transformer_impl" in namespace_dict(top.get("args")):  # a flag of Megatron since v3.0
            return "megatron-v3"
        return "megatron-v2" if top.get("checkpoint_version") in (2, 3) else "megatron-v1"


def open_megatron(path: Path, format: str, hints: Hints, *, log: Log) -> ForeignCheckpoint:
    """Open the checkpoint in `path`, the folder of an iteration. `log` gets a line if the true vocabulary size is only
    assumed. Raises ValueError, in one line, if the checkpoint is not valid."""
    files, tp_size = _open_files(path)
    top = files[0].top
    sizes = {
        "tensor_model_parallel_size": tp_size,
        "pipeline_model_parallel_size": len(files) // tp_size,
        "virtual_pipeline_model_parallel_size": len(_chunks(top)),
    }
    layout = {name: size for name, size in sizes.items() if size > 1 or "virtual" not in name}
    shapes = {name: x.info.shape for file in files for name, x in file.weights.items() if name != EMBEDDINGS_FOR_HEAD}
    file_sizes = {**sizes, "model_parallel_size": tp_size}
    model, padded_model = infer_model_config(top, shapes, file_sizes, hints, log, tp_size)
    saved_version = top.get("checkpoint_version", 0)
    require(saved_version in (0, 1, 2, 3), "its checkpoint_version is unknown; versions 0 to 3 are supported")
    version = 2 if format == "megatron-core" else int(saved_version)
    order = partial(to_head_major, heads=model.num_attention_heads // tp_size, version=version)
    specs = model_partition_specs(padded_model, tp_size)
    weights = merge_ranks([(file.path, {"model": file.weights}) for file in files], specs, tp_size, order)["model"]
    left_out: list[str] = []
    zero = _zero_files(path, tp_size)

    def adam() -> OptimizerState:
        if zero:
            optimizers = [read_zero_optimizer(zero[rank], file.top, file.weights) for rank, file in enumerate(files)]
        else:
            optimizers = [read_rank_optimizer(file.top["optimizer"], file.weights) for file in files]
        states, optimizer, groups, _ = optimizers[0]
        step = same_step(step for *_, step in optimizers)
        ranks = [(file.path, states) for file, (states, *_) in zip(files, optimizers, strict=True)]
        metadata = megatron_adam_metadata(top, optimizer, groups, step, left_out)
        return merge_ranks(ranks, specs, tp_size, order), metadata

    if any(name.endswith("rng_state") or name == "rng_tracker_states" for name in top):
        left_out.append("random states: of another program's generators")
    if others := sorted(file.name for pattern in SHARDED_OPTIMIZER for file in path.glob(pattern)):
        left_out.append(f"{plural(len(others), 'file')} of a sharded optimizer ({others[0]} ...)")
    return ForeignCheckpoint(
        path,
        format,
        saved_iteration(top),
        model,
        {**progress_metadata(namespace_dict(top.get("args"))), "layout": layout},
        weights,
        left_out,
        adam if zero or top.get("optimizer") is not None else None,
    )


def _zero_files(path: Path, tp_size: int) -> list[list[Path]]:
    """Return ZeRO's optimizer files: for each model-parallel rank, a list by data-parallel rank. Return [] if there are
    none."""
    found = {
        (int(match[2]), int(match[1])): file for file in path.iterdir() if (match := ZERO_FILE.fullmatch(file.name))
    }
    return [[found[key] for key in sorted(found) if key[0] == rank] for rank in range(tp_size)] if found else []


def _open_files(path: Path) -> tuple[list[RankFile], int]:
    """Return all files of the iteration, ordered by stage and then by rank, and the tensor-parallel size. The
    highest rank numbers in the folder and the saved arguments determine which files must exist. Raises ValueError,
    which names the file, if a file is missing or belongs to a different run."""
    paths = rank_files(path)
    first_file = paths[min(paths)]
    args = namespace_dict(load_torch_file(first_file).get("args"))

    def size(numbers: Iterable[int], *flags: str) -> int:
        return max(1 + max(numbers), *(args[flag] for flag in flags if type(args.get(flag)) is int), 1)

    ranks, stages = zip(*paths, strict=True)
    tp_size = size(ranks, "tensor_model_parallel_size", "model_parallel_size")
    pp_size = size(stages, "pipeline_model_parallel_size")
    for rank, stage in ((rank, stage) for rank in range(tp_size) for stage in range(pp_size)):
        if (rank, stage) not in paths:
            name = f"mp_rank_{rank:02d}" + f"_{stage:03d}" * (first_file.parent.name.count("_") == 3 or pp_size > 1)
            missing = f"{name}_model_states.pt" if first_file.parent == path else f"{name}/{first_file.name}"
            raise ValueError(
                f"{missing} is missing; all files of {plural(tp_size, 'tensor-parallel rank')} and "
                f"{plural(pp_size, 'pipeline stage')} are needed"
            )
    ordered = [paths[rank, stage] for stage in range(pp_size) for rank in range(tp_size)]
    files = [RankFile(file, load_torch_file(file), {}) for file in ordered]
    first_name, top = first_file.relative_to(path), files[0].top
    chunks, iteration, layers = _chunks(top), saved_iteration(top), 0
    for file in files:
        with file_errors(file.path):
            number, own_chunks = saved_iteration(file.top), ", ".join(_chunks(file.top)) or "no model"
            require(number == iteration, f"two iterations are mixed: {number}, and {iteration} in {first_name}")
            require(
                own_chunks == ", ".join(chunks),
                f"holds {own_chunks}, and {first_name} holds {', '.join(chunks)}: are two runs mixed?",
            )
    for chunk in chunks:
        for number, file in enumerate(files, 1):
            with file_errors(file.path):
                num_layers = _add_chunk(file.top[chunk], file.weights, layers)
            if number % tp_size == 0:  # `file` is the last file of its stage.
                layers += num_layers
    return files, tp_size


def _chunks(top: Entries) -> list[str]:
    """Return the keys of a file's chunks, in the order of their layers."""
    found = [name for name in top if isinstance(name, str) and re.fullmatch(r"model\d{0,3}|module", name)]
    return sorted(found, key=lambda name: int("0" + re.sub(r"\D", "", name)))


def _add_chunk(chunk: Any, weights: dict[str, LazyTensor], first_layer: int) -> int:
    """Add the tensors of a chunk to `weights`. Return the number of layers of the chunk."""
    if not isinstance(chunk, dict):
        raise ValueError(
            "holds no dictionary of weights (DeepSpeed's pipeline keeps them in layer_* files, which are not supported)"
        )
    local: set[int] = set()
    for megatron_name, tensor in flatten_state_dict(chunk).items():
        name = native_name(megatron_name)
        if layer := LAYER.fullmatch(name):
            local.add(int(layer[1]))
            name = f"transformer.layers.{first_layer + int(layer[1])}.{layer[2]}"
        require(name not in weights, f"holds {name} twice, once as {megatron_name[:120]!r}")
        weights[name] = LazyTensor.from_tensor(tensor)
    return len(local)


def flatten_state_dict(tree: Entries, prefix: str = "", depth: int = 5) -> dict[str, Tensor]:
    """Return the tensors of nested dictionaries, by name, without Transformer Engine's _extra_state (of FP8)."""
    found: dict[str, Tensor] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and depth:
            found |= flatten_state_dict(value, f"{name}.", depth - 1)
        elif not name.endswith("_extra_state"):
            found[name] = value
        require(len(found) <= MAX_TENSORS, f"holds more than {MAX_TENSORS:,} tensors")
    return found


def write_megatron(
    source: BaseCheckpoint,
    out: str | Path,
    format: str,
    layout: MegatronLayout | None = None,
    *,
    log: Log = print,
) -> Path:
    """Write `source` into the new folder `out` and return the iteration's folder.

    format: "megatron-2019", "megatron-v2", "megatron-v3" or "megatron-core".
    layout: the ranks that load the files.

    Masters, moments, loss scaler and schedule are written if the source contains them, except for megatron-core, which
    gets only weights. Raises ValueError for a layout that does not fit the model or the format.
    """
    layout = layout or MegatronLayout()
    tp_size, model = layout.tensor, padded_model_config(source, layout.tensor)
    stages, specs = chunks_of_stages(model, layout, format), model_partition_specs(model, tp_size)
    with_optimizer = format != "megatron-core" and has_optimizer(source)
    top = run_entries(source, model, layout, format)
    if with_optimizer:
        name = "opt_param_scheduler" if format == "megatron-v3" else "lr_scheduler"
        top[name] = scheduler_state_dict(source, format, log)
        if format == "megatron-2019":
            log("the loss scaler is written as a plain dictionary, not as the class of Megatron in 2019")

    def part(rank: int, folder: Path, kind: str, name: str) -> Tensor:
        x = read_shard(source, name, specs[name], kind, rank, tp_size)
        if format == "megatron-2019" and ".query_key_value." in name:
            x = from_head_major(x, model.num_attention_heads // tp_size)
        return spill_to_disk(folder, [x], x.shape)

    with new_folder(out) as folder:
        iteration = folder / f"iter_{source.iteration:07d}"
        for rank, (stage, chunks) in itertools.product(range(tp_size), enumerate(stages)):
            path = iteration / (f"mp_rank_{rank:02d}" + f"_{stage:03d}" * (layout.pipeline > 1)) / "model_optim_rng.pt"
            path.parent.mkdir(parents=True)
            rank_part = partial(part, rank, path.parent)
            saved = dict(top)
            for number, names in enumerate(chunks):
                key = f"model{number}" if len(chunks) > 1 else "model"
                saved[key] = format_state_dict(
                    format, {megatron_name: rank_part("model", name) for megatron_name, name in names.items()}
                )
            if with_optimizer:
                # The optimizer state has no names, but an order: tensors with weight decay first.
                groups: list[list[dict[str, Tensor]]] = [[], []]
                for name in (name for names in chunks for name in names.values()):
                    vector = len(specs[name].global_shape) == 1
                    groups[vector].append({kind: rank_part(kind, name) for kind in OPTIMIZER_KINDS})
                saved["optimizer"] = optimizer_state_dict(source, groups, format)
            torch.save(saved, path)
        (folder / LATEST_FILE).write_text(f"{source.iteration}")
    return Path(out) / iteration.name
