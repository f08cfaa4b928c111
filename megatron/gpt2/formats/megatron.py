"""Megatron's checkpoints of every version, and DeepSpeed's of a Megatron model.

Legend: h hidden, n heads, d head size, p model-parallel size.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.gpt2.config import ModelConfig, require
from megatron.gpt2.formats.foreign import GPT2_VOCABULARY, TRUE_VOCABULARY, ForeignSource, Hints, LazyTensor, short_repr
from megatron.gpt2.formats.megatron_files import HEAD, RANK_FILES, RankFiles, attributes, flatten, join, open_ranks
from megatron.gpt2.formats.megatron_optimizer import optimizer_state
from megatron.gpt2.formats.pickles import load_pickle
from megatron.gpt2.model.parameters import parameter_specs
from mpu.partition import PartitionSpec

# Arguments that change the formula, and are absent, None or False in a GPT-2.
OTHER_MODELS = ("apply_residual_connection_post_layernorm", "swiglu", "squared_relu", "quick_geglu",
                "apply_layernorm_1p", "untie_embeddings_and_output_weights", "num_experts", "multi_latent_attention",
                "qk_layernorm")
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
    for name in OTHER_MODELS:
        require(not args.get(name), f"{path}: was trained with {name}, which this program's GPT-2 does not compute")
    shards = ranks.shards()
    model, padded = _model(ranks, shards, args, hints)
    number = ranks.top.get("checkpoint_version", 0)
    if type(number) not in (int, float) or number not in (0, 1, 2, 3):
        raise ValueError(f"{path}: its checkpoint_version is unknown; those from 0 to 3 are known")
    order = 2 if format == "megatron-core" else int(number)
    # As the ranks hold it, with the vocabulary's padding.
    held = parameter_specs(dataclasses.replace(model, vocab_size=padded, make_vocab_size_divisible_by=1), ranks.size)
    _check_parts(ranks, held)

    def joined(kind: str, parts: Mapping[str, list[Tensor]]) -> dict[str, LazyTensor]:
        assert model.vocab_size is not None
        return {f"{kind}.{name}": join(name, spec, parts[name], version=order, heads=model.num_attention_heads,
                                       vocab_size=model.vocab_size) for name, spec in held.items()}

    lazy = joined("model", shards)
    facts, states, left_out = optimizer_state(ranks, args, held)
    for kind, parts in states.items():
        lazy |= joined(kind, parts)
    if any(name.endswith("rng_state") or name == "rng_tracker_states" for name in ranks.top):
        left_out.append("random states: another program's generators")
    if others := sorted(file.name for pattern in SHARDED_OPTIMIZER for file in path.glob(pattern)):
        left_out.append(f"{len(others)} files of a sharded optimizer ({others[0]} ...)")
    if model.vocab_size == padded and hints.vocab_size is None and TRUE_VOCABULARY not in ranks.top:
        guesses = [f"{size} ({whose})" for size, whose in (
            (GPT2_VOCABULARY, "GPT-2's"), (args.get("vocab_size"), "its arguments'"))
            if type(size) is int and 0 < padded - size <= 128 * ranks.size]
        log(f"{path}: the vocabulary is taken to be its padded size, {padded}: --vocab-size "
            f"{' or '.join(guesses) or 'N'} leaves out the rows that are padding")
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
                    raise ValueError(f"{part.path}: {name} has shape {tuple(tensor.shape)} instead of "
                                     f"{spec.local_shape(ranks.size)}")
                first = stage[0].tensors[name]
                if tensor.dtype != first.dtype or (spec.dim is None and not torch.equal(tensor, first)):
                    raise ValueError(f"{part.path}: {name} should be the same on all ranks and is another one in "
                                     f"{stage[0].path.relative_to(ranks.path)}: are two runs mixed?")
    for begin, *others in zip(*ranks.parts, strict=True):
        for part in (begin, *others):
            if HEAD in part.tensors and not torch.equal(part.tensors[HEAD], begin.tensors["word_embeddings.weight"]):
                raise ValueError(f"{part.path}: {HEAD} is not the word embeddings of "
                                 f"{begin.path.relative_to(ranks.path)}, and the head of this program's GPT-2 is tied "
                                 "to them")


def _model(ranks: RankFiles, shards: Mapping[str, list[Tensor]], args: Mapping[str, Any],
           hints: Hints) -> tuple[ModelConfig, int]:
    """The shape, its vocabulary true as far as that is known, and the padded vocabulary."""
    path, p = ranks.path, ranks.size

    def shape(name: str, dimensions: int) -> tuple[int, ...]:
        if name not in shards or shards[name][0].dim() != dimensions:
            raise ValueError(f"{path}: holds no {name}: is a pipeline stage missing, or is it no GPT-2?")
        return tuple(shards[name][0].shape)

    rows, h = shape("word_embeddings.weight", 2)
    positions, _ = shape("position_embeddings.weight", 2)
    qkv_rows, _ = shape("transformer.layers.0.attention.query_key_value.weight", 2)
    ffn, _ = shape("transformer.layers.0.mlp.dense_h_to_4h.weight", 2)
    if qkv_rows * p != 3 * h:
        some = f"{3 * h // qkv_rows} ranks" if qkv_rows and 3 * h % qkv_rows == 0 else "another number of ranks"
        raise ValueError(f"{path}: was written by {some}, and the files of {p} are here: is one missing?")
    for name, found in (("num_layers", ranks.num_layers), ("hidden_size", h), ("padded_vocab_size", rows * p),
                        ("tensor_model_parallel_size", p), ("model_parallel_size", p),
                        ("pipeline_model_parallel_size", ranks.stages),
                        ("virtual_pipeline_model_parallel_size", len(ranks.parts) // ranks.stages)):
        if isinstance(args.get(name), int) and args[name] != found:
            raise ValueError(f"{path}: {name} is {args[name]} by its arguments and {found} by its files: are two runs "
                             "mixed?")
    true = ranks.top.get(TRUE_VOCABULARY)
    if true is not None and not (type(true) is int and 0 < true <= rows * p):
        raise ValueError(f"{path}: {TRUE_VOCABULARY} is {short_repr(true)}, and it holds {rows * p} rows, padding "
                         "included")
    vocab_size = true or hints.vocab_size or rows * p
    if vocab_size > rows * p:
        raise ValueError(f"{path}: --vocab-size {vocab_size} is more than the {rows * p} rows that it holds, padding "
                         "included")
    said: dict[str, Any] = {name: float(args[name]) for name in ("attention_dropout", "hidden_dropout",
                                                                 "layernorm_epsilon", "init_method_std")
                            if type(args.get(name)) in (int, float)}
    if type(args.get("norm_epsilon")) is float:  # its name since 2023
        said["layernorm_epsilon"] = args["norm_epsilon"]
    divisor = args.get("make_vocab_size_divisible_by")
    if true is None and hints.vocab_size is None:
        said["make_vocab_size_divisible_by"] = 1  # padded already
    elif type(divisor) is int and divisor > 0:
        said["make_vocab_size_divisible_by"] = divisor
    heads = _heads(path, h, p, args, hints)
    try:
        return ModelConfig(num_layers=ranks.num_layers, hidden_size=h, num_attention_heads=heads,
                           ffn_hidden_size=None if ffn * p == 4 * h else ffn * p, max_position_embeddings=positions,
                           vocab_size=vocab_size, gelu=hints.gelu or _gelu(args), **said), rows * p
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _heads(path: Path, h: int, p: int, args: Mapping[str, Any], hints: Hints) -> int:
    said = args.get("num_attention_heads")
    heads = said if isinstance(said, int) else hints.num_attention_heads
    fitting = sorted((n for n in range(p, h + 1, p) if h % n == 0), key=lambda n: abs(math.log2(h / n / 64)))
    if heads is None or heads not in fitting:
        problem = "does not say how many attention heads it has" if heads is None else \
            f"{heads} attention heads do not divide its hidden size of {h} over {p} ranks"
        raise ValueError(f"{path}: {problem}: give --num-attention-heads, likeliest first one of "
                         f"{', '.join(map(str, fitting[:6]))}")
    return heads


def _gelu(args: Mapping[str, Any]) -> str:
    """2019 knew the tanh form alone, as the fused kernel does; without it later versions compute erf's."""
    if "openai_gelu" not in args or args["openai_gelu"] or args.get("bias_gelu_fusion"):
        return "tanh"
    return "erf"
