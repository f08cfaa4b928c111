"""Hugging Face's GPT-2 (GPT2LMHeadModel, GPT2Model), read and written: config.json and safetensors or .bin files, single
or sharded, with tokenizer and model card.

Their linear layers are `Conv1D`, stored [in, out]. transformers is not needed to write a model, only to use it.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from data_utils import Tokenizer
from data_utils.files import read_object, read_safetensors_header, safetensors_header
from megatron.gpt2.checkpoint.reader import DTYPE_CODES, DTYPES
from megatron.gpt2.checkpoint.source import Source, TensorInfo, check_facts
from megatron.gpt2.config import ModelConfig, require
from megatron.gpt2.formats.compare import describe, shown
from megatron.gpt2.formats.foreign import (
    MAX_JSON_BYTES,
    TABLE,
    ForeignSource,
    Hints,
    LazyTensor,
    Tensors,
    errors_named,
    short_repr,
    whole_number,
)
from megatron.gpt2.formats.native import check_tokenizer, new_folder
from megatron.gpt2.formats.openai import (
    HEAD,
    SIZES,
    exported_kind,
    is_linear,
    openai_name,
    our_tensors,
    to_openai,
    weights_of,
)
from megatron.gpt2.formats.openai_tokenizer import tokenizer_files
from megatron.gpt2.formats.torch_files import load_pickle
from megatron.gpt2.model.gpt2 import parameter_specs

WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
# Their names of our sizes and fractions, and the fractions' defaults.
LENGTHS = {**SIZES, "n_positions": "max_position_embeddings"}
FRACTIONS = {
    "attn_pdrop": "attention_dropout",
    "resid_pdrop": "hidden_dropout",
    "layer_norm_epsilon": "layernorm_epsilon",
    "initializer_range": "init_method_std",
}
DEFAULTS = {"attn_pdrop": 0.1, "resid_pdrop": 0.1, "layer_norm_epsilon": 1e-5, "initializer_range": 0.02}
GELU = {"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu_fast": "tanh", "gelu": "erf"}
# What changes the formula, and the value under which it is GPT-2's.
PLAIN = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
    "add_cross_attention": False,
}
# What holds a tokenizer: transformers 4 writes both of them, transformers 5 the second.
TOKENIZER_FILES = (("vocab.json", "merges.txt"), ("tokenizer.json",))
KINDS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SHARD_BYTES = 5 * 10**9


def open_huggingface(folder: Path, hints: Hints, *, log: Callable[[str], None]) -> ForeignSource:
    """The model in `folder`. ValueError, one line, for anything that is not right, or that is not the plain GPT-2 that
    this program computes."""
    weights = next(folder / name for name in WEIGHTS if (folder / name).is_file())
    config = read_object(folder / "config.json", MAX_JSON_BYTES)
    with errors_named(folder / "config.json"):
        model = _model(config, hints)
    left_out: list[str] = []
    with errors_named(weights):
        found, has_head = weights_of(_tensors(weights), left_out)
        if not has_head and config.get("tie_word_embeddings", True) is not True:
            raise ValueError(f"holds no {HEAD}, though config.json says that it is not tied")
        tensors = our_tensors(model, found, transposed=True)
    files = next((names for names in TOKENIZER_FILES if all((folder / name).is_file() for name in names)), ())
    facts = {"tokenizer_files": {name: str(folder / name) for name in files}} if files else {}
    return ForeignSource(folder, "huggingface", 0, model, facts, {"model": tensors}, left_out)


def _model(config: Mapping[str, Any], hints: Hints) -> ModelConfig:
    kind, activation = config.get("model_type"), config.get("activation_function", "gelu_new")
    require(kind == "gpt2", f"model_type is {short_repr(kind)}, and this program knows gpt2")
    for name, plain in PLAIN.items():
        if config.get(name, plain) is not plain:
            raise ValueError(f"{name} is {short_repr(config[name])}, which this program's GPT-2 does not compute")
    if not isinstance(activation, str) or activation not in GELU:
        raise ValueError(f"activation_function is {short_repr(activation)}, and this program knows {', '.join(GELU)}")
    said: dict[str, Any] = {}
    for name, ours in LENGTHS.items():
        require(name in config, f"says nothing of {name}")
        said[ours] = whole_number(name, config[name])
    for name, ours in FRACTIONS.items():
        value = said[ours] = config.get(name, DEFAULTS[name])
        if type(value) not in (int, float) or not 0 <= value < 1:
            raise ValueError(f"{name} should be a number in [0, 1), not {short_repr(value)}")
    if config.get("n_inner") is not None:
        said["ffn_hidden_size"] = whole_number("n_inner", config["n_inner"])
    said["vocab_size"] = min(hints.vocab_size or said["vocab_size"], said["vocab_size"])  # the rest is padding
    return ModelConfig(gelu=GELU[activation], **said)


def _tensors(weights: Path) -> Tensors:
    """All tensors of `weights`, or of the files that it lists."""
    if weights.suffix != ".json":
        return _load(weights)
    where = read_object(weights, MAX_JSON_BYTES).get("weight_map")
    kind = weights.name.split(".")[-3]
    if not isinstance(where, dict) or not all(
        isinstance(file, str) and re.fullmatch(rf"[\w-][\w.-]*\.{kind}", file, re.ASCII) for file in where.values()
    ):
        raise ValueError(f"weight_map should name files of this folder that end in .{kind}")
    found: dict[str, LazyTensor] = {}
    for file in sorted(set(where.values())):
        for name, tensor in _load(weights.parent / file).items():
            if where.get(name) != file:
                raise ValueError(
                    f"{weights.parent / file}: holds {short_repr(name)}, which {weights.name} "
                    f"looks for in {short_repr(where.get(name))}"
                )
            found[name] = tensor
    if missing := where.keys() - found.keys():
        raise ValueError(f"names {short_repr(min(missing))}, which is in none of the files")
    return found


def _load(path: Path) -> Tensors:
    """The tensors of one file, mapped and not read. The header of safetensors is checked before its library parses it,
    which takes the last of two equal keys, and minutes for a long header."""
    with errors_named(path):
        if path.suffix != ".safetensors":
            return {str(name): LazyTensor.of(tensor) for name, tensor in load_pickle(path).items()}
        with open(path, "rb") as stream:
            header = read_safetensors_header(stream, MAX_JSON_BYTES)
        file = safe_open(path, "pt")
        return {
            # Of other types are buffers, which are not read.
            name: LazyTensor(
                TensorInfo(DTYPES.get(entry["dtype"], torch.bool), tuple(entry["shape"])),
                partial(file.get_tensor, name),
            )
            for name, entry in header.items()
            if name != "__metadata__"
        }


def write_huggingface(
    source: Source,
    out: str | Path,
    *,
    dtype: str = "source",
    tokenizer: Tokenizer | None = None,
    log: Callable[[str], None] = print,
) -> Path:
    """Write `source` as a `GPT2LMHeadModel` into the new folder `out`; returns the folder. One tensor is in memory at a
    time.

    dtype: "source" keeps the weights' dtype; "fp32", "bf16" and "fp16" convert, from the fp32 masters if the source
    holds them. ValueError, one line, if `out` is not new or the tokenizer is not the model's.
    """
    model = check_facts(source)
    check_tokenizer(source, tokenizer)
    wanted = KINDS.get(dtype, source.tensors[f"model.{TABLE}"].dtype)
    kind = exported_kind(source, dtype)
    eod = tokenizer.eod if tokenizer and tokenizer.has_eod else None
    ends = {} if eod is None else {"bos_token_id": eod, "eos_token_id": eod}
    with new_folder(out) as folder:
        _write_weights(source, folder, model, kind, wanted)
        files, problem = (
            tokenizer_files(tokenizer, model.max_position_embeddings) if tokenizer else ({}, "the source has none")
        )
        for name, content in files.items():
            (folder / name).write_bytes(content)
        if problem:
            log(f"WARNING: the export has no tokenizer that transformers could load: {problem}")
            if tokenizer is not None:
                tokenizer.save(folder / "tokenizer")
        config = {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            **{theirs: getattr(model, ours) for theirs, ours in {**LENGTHS, **FRACTIONS}.items()},
            "n_inner": model.ffn_hidden_size,
            "activation_function": {"tanh": "gelu_new", "erf": "gelu"}[model.gelu],
            "embd_pdrop": model.hidden_dropout,
            "bos_token_id": eod,
            "eos_token_id": eod,
            # The name of today, and that of transformers 4.
            **dict.fromkeys(("dtype", "torch_dtype"), str(wanted).removeprefix("torch.")),
            **dict.fromkeys(("tie_word_embeddings", "scale_attn_weights", "use_cache"), True),
        }
        _write_json(folder / "config.json", config)
        _write_json(folder / "generation_config.json", {"_from_model_config": True, **ends})
        (folder / "README.md").write_text(_card(source, kind, wanted, problem), encoding="utf-8")
    return Path(out)


def _write_weights(source: Source, folder: Path, model: ModelConfig, kind: str, dtype: torch.dtype) -> None:
    """model.safetensors, or several files and their index if that would be larger than SHARD_BYTES."""
    specs = parameter_specs(model)
    sizes = {name: math.prod(spec.global_shape) * dtype.itemsize for name, spec in specs.items()}
    shards: list[list[str]] = [[]]
    for name, size in sizes.items():
        if shards[-1] and sum(sizes[other] for other in shards[-1]) + size > SHARD_BYTES:
            shards.append([])
        shards[-1].append(name)
    where = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for name in names:
            theirs, shape = f"transformer.{openai_name(name)}", specs[name].global_shape
            where[theirs], end = file, at + sizes[name]
            header[theirs] = {
                "dtype": DTYPE_CODES[dtype],
                "shape": shape[::-1] if is_linear(name) else shape,
                "data_offsets": [at, end],
            }
            at = end
        with open(folder / file, "wb") as stream:
            stream.write(safetensors_header(header))
            for name in names:
                x = to_openai(source.read(f"{kind}.{name}").to(dtype), name, model.num_attention_heads)
                stream.write(x.contiguous().view(-1).view(torch.uint8).numpy().data)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where}
        _write_json(folder / "model.safetensors.index.json", index)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags: [gpt2]
---

# A GPT-2 model

| | |
|---|---|
{rows}

{usage}
"""
USAGE = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("FOLDER")
tokenizer = AutoTokenizer.from_pretrained("FOLDER")
```

In training the characters `<|endoftext|>` in a text were text; this tokenizer reads them as the end of a document."""


def _card(source: Source, kind: str, dtype: torch.dtype, problem: str) -> str:
    """The model card: how to load it, and what the run's facts are. problem: why there is no tokenizer, or ""."""
    found, config = describe(source), source.facts["config"]
    consumed, length = source.facts.get("consumed_samples"), config.get("data", {}).get("seq_length")
    rows: dict[str, Any] = {
        "format it was converted from": source.format,
        "iteration": source.iteration,
        **found["model"],
        "weights": str(dtype).removeprefix("torch.") + ", rounded from the fp32 masters" * (kind == "master"),
        **found["run"],
        "tokens seen": consumed * length if consumed and length else None,
        **{name: config.get("optimizer", {}).get(name) for name in ("lr", "weight_decay")},
        "seed": config.get("train", {}).get("seed"),
        "data fingerprint": source.facts.get("data_fingerprint"),
    }
    return CARD.format(
        rows="\n".join(f"| {name} | {shown(value)} |" for name, value in rows.items() if value is not None),
        usage=f"There is no tokenizer for transformers here: {problem}." if problem else USAGE,
    )
