"""The files of a Megatron checkpoint, one per rank, joined to one model under our names.

`mp_rank_TT` or, with a pipeline, `mp_rank_TT_PPP`, holds model_optim_rng.pt; DeepSpeed writes
mp_rank_TT_model_states.pt. A file holds one chunk of the layers, `model`, or, where stages are interleaved, several:
`model0`, `model1`, ... Layers are numbered from 0 in every chunk. All files' first chunks come before all second ones.

Legend: h hidden, n heads, d head size, p model-parallel size.
"""

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.gpt2.checkpoint.source import TensorInfo
from megatron.gpt2.config import require
from megatron.gpt2.formats.foreign import LazyTensor, first_rows, head_major
from megatron.gpt2.formats.pickles import Opaque, load_pickle
from mpu.partition import PartitionSpec

RANK_FILES = ("model_optim_rng.pt", "model_rng.pt")
DEEPSPEED_FILE = re.compile(r"mp_rank_(\d{2,3})_model_states\.pt", re.ASCII)
FOLDER = re.compile(r"mp_rank_(\d{2,3})(?:_(\d{3}))?", re.ASCII)
HEAD = "word_embeddings_for_head.weight"  # the last stage's copy of the tied matrix; Core calls it output_layer.weight
# From the names of every version to those of 2019, one after the other.
RENAMES = [
    (re.compile(old), new)
    for old, new in (
        (r"^(module\.)*(language_model\.)?(embedding\.)?", ""),
        (r"^(encoder|decoder)\.", "transformer."),
        (r"^output_layer\.", "word_embeddings_for_head."),
        (r"\.self_attention\.", ".attention."),
        (r"\.attention\.linear_qkv\.layer_norm_", ".input_layernorm."),
        (r"\.mlp\.linear_fc1\.layer_norm_", ".post_attention_layernorm."),
        (r"\.linear_qkv\.", ".query_key_value."),
        (r"\.linear_proj\.", ".dense."),
        (r"\.linear_fc1\.", ".dense_h_to_4h."),
        (r"\.linear_fc2\.", ".dense_4h_to_h."),
        (r"\.pre_mlp_layernorm\.", ".post_attention_layernorm."),
        (r"\.(input|post_attention|final)_norm\.", r".\1_layernorm."),
    )
]
MAX_TENSORS = 20_000  # twelve in a layer
LAYER = re.compile(r"transformer\.layers\.(\d{1,5})\.(.+)", re.ASCII)


def rank_files(folder: Path) -> dict[tuple[int, int], Path]:
    """The ranks' files in `folder`, by (model-parallel rank, pipeline stage)."""
    found = {}
    for path in sorted(folder.glob("mp_rank_*")):
        if match := DEEPSPEED_FILE.fullmatch(path.name):
            found[int(match[1]), 0] = path
        elif match := FOLDER.fullmatch(path.name):
            for file in (path / name for name in RANK_FILES):
                if file.is_file():
                    found[int(match[1]), int(match[2] or 0)] = file
                    break
    return found


def attributes(value: Any) -> dict[str, Any]:
    """The attributes of a namespace, or the entries of a dictionary, by name; none where `value` is neither."""
    return value if isinstance(value, dict) else value.attributes() if isinstance(value, Opaque) else {}


@dataclass
class Part:
    """What one rank's file says of a chunk of the layers."""

    path: Path
    optimizer: Any
    names: list[str]  # ours, in the order of the file; HEAD as well
    tensors: dict[str, Tensor]  # this rank's parts


@dataclass
class RankFiles:
    """All files of an iteration, opened. parts: by chunk in the model's order, each by model-parallel rank."""

    path: Path
    top: dict[str, Any]  # the first file
    iteration: int
    size: int  # of the model-parallel group
    stages: int  # of the pipeline: files per model-parallel rank
    num_layers: int = 0
    parts: list[list[Part]] = field(default_factory=list)

    def files(self) -> list[list[Part]]:
        """Of each file its chunks: stage by stage, within a stage rank by rank."""
        return [
            [parts[rank] for parts in self.parts[stage :: self.stages]]
            for stage in range(self.stages)
            for rank in range(self.size)
        ]

    def shards(self) -> dict[str, list[Tensor]]:
        """Every parameter's parts, by rank."""
        return {
            name: [part.tensors[name] for part in stage]
            for stage in self.parts
            for name in stage[0].names
            if name != HEAD
        }


def open_ranks(path: Path) -> RankFiles:
    """All files of the iteration in `path`. ValueError where a rank is missing, or where the files are of two
    iterations or of different models."""
    files = rank_files(path)
    _require_all(path, files)
    held = {key: load_pickle(file) for key, file in files.items()}
    for key, file in files.items():
        require(isinstance(held[key], dict), f"{file}: holds no dictionary")
    iterations = {key: iteration_of(files[key], top) for key, top in held.items()}
    if len(set(iterations.values())) > 1:
        other = next(key for key in iterations if iterations[key] != iterations[0, 0])
        raise ValueError(
            f"{path}: ranks of two iterations are mixed: {files[0, 0].relative_to(path)} is of "
            f"{iterations[0, 0]}, {files[other].relative_to(path)} of {iterations[other]}"
        )
    size, stages = (1 + max(key[i] for key in files) for i in (0, 1))
    ranks = RankFiles(path, held[0, 0], iterations[0, 0], size, stages)
    chunks = _chunks(held[0, 0])
    for key, file in files.items():
        if _chunks(held[key]) != chunks:
            raise ValueError(
                f"{file}: holds {', '.join(_chunks(held[key])) or 'no model'}, and "
                f"{files[0, 0].relative_to(path)} holds {', '.join(chunks)}: are two runs mixed?"
            )
    for chunk in chunks:
        for stage in range(stages):
            parts = [_part(files[rank, stage], held[rank, stage], chunk, ranks.num_layers) for rank in range(size)]
            for part in parts:
                if part.names != parts[0].names:
                    raise ValueError(f"{part.path}: holds other parameters than {parts[0].path.relative_to(path)}")
            ranks.num_layers += len({match[1] for name in parts[0].names if (match := LAYER.fullmatch(name))})
            ranks.parts.append(parts)
    return ranks


def _require_all(path: Path, files: Mapping[tuple[int, int], Path]) -> None:
    """ValueError that names the file unless all ranks' files are there: those up to the last one that is there, and
    as many as the arguments say."""
    first = min(files)
    top = load_pickle(files[first])
    args = attributes(top.get("args")) if isinstance(top, dict) else {}
    sizes = []
    for i, flags in enumerate(
        (("tensor_model_parallel_size", "model_parallel_size"), ("pipeline_model_parallel_size",))
    ):
        said = [args[flag] for flag in flags if type(args.get(flag)) is int]
        sizes.append(max(1 + max(key[i] for key in files), *said[:1], 1))
    for rank, stage in itertools.product(*map(range, sizes)):
        if (rank, stage) not in files:
            here = files[first]
            pipelined = here.parent.name.count("_") == 3 or sizes[1] > 1
            name = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pipelined else "")
            missing = f"{name}_model_states.pt" if here.parent == path else f"{name}/{here.name}"
            raise ValueError(
                f"{path}: {missing} is missing; every rank's file is needed, for {sizes[0]} "
                f"model-parallel ranks and {sizes[1]} pipeline stages"
            )


def _chunks(top: Mapping[str, Any]) -> list[str]:
    """The names under which a file holds weights, in the order of their layers."""
    found = [name for name in top if isinstance(name, str) and re.fullmatch(r"model\d{0,3}|module", name)]
    return sorted(found, key=lambda name: int("0" + re.sub(r"\D", "", name)))


def iteration_of(path: Path, top: Mapping[str, Any]) -> int:
    """The iteration that the file says; 0 where it says none. ValueError where it is no whole number."""
    for name in ("iteration", "total_iters", "global_steps"):
        if name in top:
            require(type(top[name]) is int and 0 <= top[name] < 10**12, f"{path}: {name} is no iteration")
            return int(top[name])
    return 0


def _part(path: Path, top: Mapping[str, Any], key: str, first_layer: int) -> Part:
    part = Part(path, top.get("optimizer"), [], {})
    local: set[int] = set()
    if not isinstance(top.get(key), dict):
        raise ValueError(
            f"{path}: holds no weights under {key!r} (DeepSpeed's pipeline keeps them in layer_* files, "
            "which are not supported)"
        )
    for theirs, tensor in flatten(path, top[key]).items():
        name = name_of_2019(theirs)
        if layer := LAYER.fullmatch(name):
            local.add(int(layer[1]))
            name = f"transformer.layers.{first_layer + int(layer[1])}.{layer[2]}"
        require(name not in part.tensors, f"{path}: holds {name} twice, once as {theirs[:120]!r}")
        part.names.append(name)
        part.tensors[name] = tensor
    if local != set(range(len(local))):
        raise ValueError(f"{path}: its layers are not numbered from 0 to {len(local) - 1}")
    return part


def name_of_2019(theirs: str) -> str:
    """The name in Megatron's 2019 release, which is ours, of a parameter's name in any version."""
    for old, new in RENAMES:
        theirs = old.sub(new, theirs)
    return theirs


def flatten(path: Path, tree: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of nested dictionaries, by name; Transformer Engine's _extra_state (of FP8) is left out."""
    found: dict[str, Tensor] = {}

    def visit(prefix: str, inner: Mapping[str, Any], depth: int) -> None:
        for key, value in inner.items():
            name = f"{prefix}{key}"
            if isinstance(value, dict) and depth:
                visit(name + ".", value, depth - 1)
            elif not name.endswith("_extra_state"):
                if not isinstance(value, Tensor) or len(found) >= MAX_TENSORS:
                    raise ValueError(f"{path}: {name[:120]!r} is no tensor, or the {MAX_TENSORS:,}th")
                found[name] = value

    visit("", tree, 5)
    return found


def join(
    name: str, spec: PartitionSpec, shards: list[Tensor], *, version: int, heads: int, vocab_size: int
) -> LazyTensor:
    """The global tensor `name`, out of `shards`, the tensors of the ranks in their order.

    version: Megatron's `checkpoint_version`, which says how the rows of QKV are ordered. heads: n, of all ranks
    together. vocab_size: the true one; rows of the word embeddings beyond it are left out.
    """
    tensor = LazyTensor.of(shards[0])
    if spec.dim is not None:
        change, dim = head_major(heads // len(shards), version if ".query_key_value." in name else 2), spec.dim
        shape = list(shards[0].shape)
        shape[dim] *= len(shards)
        tensor = LazyTensor(
            TensorInfo(shards[0].dtype, tuple(shape)), lambda: torch.cat([change(shard) for shard in shards], dim)
        )
    return tensor.then(first_rows(vocab_size)) if name == "word_embeddings.weight" else tensor
