"""Megatron's checkpoints of every version, and DeepSpeed's of a Megatron model.

Legend: h hidden, n heads, d head size, p model-parallel size.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from megatron.gpt2.config import require
from megatron.gpt2.formats.foreign import ForeignSource, Hints, LazyTensor
from megatron.gpt2.formats.megatron_files import HEAD, RANK_FILES, RankFiles, attributes, flatten, join, open_ranks
from megatron.gpt2.formats.megatron_model import model_of, tell_of_padding, with_padding
from megatron.gpt2.formats.megatron_optimizer import optimizer_state
from megatron.gpt2.formats.pickles import load_pickle
from megatron.gpt2.model.parameters import parameter_specs
from mpu.partition import PartitionSpec

# DeepSpeed's two; Megatron's of today and of v3.0.
SHARDED_OPTIMIZER = ("zero_pp_rank_*", "bf16_zero_pp_rank_*", "*/distrib_optim.pt", "*/optim.pt")


def version(files: Mapping[tuple[int, int], Path]) -> str:
    """The format's name in `FORMATS`, recognised from the first rank's file. ValueError where that is no model."""
    path = files[min(files)]
    top = load_pickle(path)
    require(isinstance(top, dict), f"{path}: holds no dictionary")
    if path.name not in RANK_FILES or "module" in top:
        return "deepspeed"
    model = top.get("model", top.get("model0"))
    require(isinstance(model, dict), f"{path}: holds no model")
    if any(".linear_qkv." in name for name in flatten(path, model)):
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
    ranks = open_ranks(path)
    args = attributes(ranks.top.get("args"))
    shards = ranks.shards()
    model, padded = model_of(
        path,
        ranks.top,
        {name: tuple(parts[0].shape) for name, parts in shards.items()},
        hints,
        {
            "num_layers": ranks.num_layers,
            "tensor_model_parallel_size": ranks.size,
            "model_parallel_size": ranks.size,
            "pipeline_model_parallel_size": ranks.stages,
            "virtual_pipeline_model_parallel_size": len(ranks.parts) // ranks.stages,
        },
        ranks.size,
    )
    number = ranks.top.get("checkpoint_version", 0)
    if type(number) not in (int, float) or number not in (0, 1, 2, 3):
        raise ValueError(f"{path}: its checkpoint_version is unknown; those from 0 to 3 are known")
    order = 2 if format == "megatron-core" else int(number)
    # As the ranks hold it, with the vocabulary's padding.
    held = parameter_specs(with_padding(model, padded), ranks.size)
    _check_parts(ranks, held)

    def joined(kind: str, parts: Mapping[str, list[Tensor]]) -> dict[str, LazyTensor]:
        assert model.vocab_size is not None
        return {
            f"{kind}.{name}": join(
                name, spec, parts[name], version=order, heads=model.num_attention_heads, vocab_size=model.vocab_size
            )
            for name, spec in held.items()
        }

    lazy = joined("model", shards)
    facts, states, left_out = optimizer_state(ranks, args, held)
    for kind, parts in states.items():
        lazy |= joined(kind, parts)
    if any(name.endswith("rng_state") or name == "rng_tracker_states" for name in ranks.top):
        left_out.append("random states: another program's generators")
    if others := sorted(file.name for pattern in SHARDED_OPTIMIZER for file in path.glob(pattern)):
        left_out.append(f"{len(others)} files of a sharded optimizer ({others[0]} ...)")
    tell_of_padding(path, ranks.top, model, padded, hints, ranks.size, log)
    layout = {"model_parallel_size": ranks.size, "pipeline_parallel_size": ranks.stages}
    if (chunks := len(ranks.parts) // ranks.stages) > 1:
        layout["virtual_pipeline_parallel_size"] = chunks
    return ForeignSource(path, format, ranks.iteration, model, {**facts, "layout": layout}, lazy, left_out)


def _check_parts(ranks: RankFiles, held: Mapping[str, PartitionSpec]) -> None:
    """ValueError unless every rank holds its part of every parameter, and the same of what is replicated."""
    names = [name for stage in ranks.parts for name in stage[0].names if name != HEAD]
    for name in sorted(set(names) ^ held.keys()):
        problem = f"holds no {name}" if name in held else f"holds {name}, which is no part of a GPT-2"
        raise ValueError(f"{ranks.path}: {problem}: is a pipeline stage missing, or is it another model?")
    require(len(names) == len(held), f"{ranks.path}: two pipeline stages hold the same parameter")
    for stage in ranks.parts:
        for part in stage:
            for name, tensor in part.tensors.items():
                spec = held["word_embeddings.weight" if name == HEAD else name]
                if tuple(tensor.shape) != spec.local_shape(ranks.size):
                    raise ValueError(
                        f"{part.path}: {name} has shape {tuple(tensor.shape)} instead of {spec.local_shape(ranks.size)}"
                    )
                first = stage[0].tensors[name]
                if tensor.dtype != first.dtype or (spec.dim is None and not torch.equal(tensor, first)):
                    raise ValueError(
                        f"{part.path}: {name} should be the same on all ranks and is another one in "
                        f"{stage[0].path.relative_to(ranks.path)}: are two runs mixed?"
                    )
    for begin, *others in zip(*ranks.parts, strict=True):
        for part in (begin, *others):
            if HEAD in part.tensors and not torch.equal(part.tensors[HEAD], begin.tensors["word_embeddings.weight"]):
                raise ValueError(
                    f"{part.path}: {HEAD} is not the word embeddings of "
                    f"{begin.path.relative_to(ranks.path)}, and the head of this program's GPT-2 is tied "
                    "to them"
                )
