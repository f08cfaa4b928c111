"""Read and write Hugging Face's GPT-2 (GPT2LMHeadModel, GPT2Model): config.json, safetensors or .bin files, single or
sharded, tokenizer and model card.

Hugging Face's linear layers are `Conv1D`, stored [in, out]. This module does not import transformers.
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
from data_utils.files import read_json_object, read_safetensors_header, safetensors_header
from megatron.gpt2.checkpoint.base import BaseCheckpoint, TensorInfo, check_metadata
from megatron.gpt2.checkpoint.reader import DTYPE_CODES, DTYPES
from megatron.gpt2.config import ModelConfig, require
from megatron.gpt2.formats.compare import describe, format_value
from megatron.gpt2.formats.external import (
    MAX_JSON_BYTES,
    WORD_EMBEDDINGS,
    ExternalCheckpoint,
    Hints,
    LazyTensor,
    LazyTensors,
    check_integer,
    file_errors,
    short_repr,
)
from megatron.gpt2.formats.native import check_tokenizer, new_folder
from megatron.gpt2.formats.openai import (
    CONFIG_SIZES,
    LM_HEAD,
    export_kind,
    find_weights,
    is_linear,
    openai_name,
    to_native_tensors,
    to_openai,
)
from megatron.gpt2.formats.openai_tokenizer import tokenizer_files
from megatron.gpt2.formats.torch_files import load_torch_file
from megatron.gpt2.model.gpt2 import parameter_specs

WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
# Hugging Face's names of our fields.
CONFIG_INTEGERS = {**CONFIG_SIZES, "n_positions": "max_position_embeddings"}
CONFIG_FRACTIONS = {
    "attn_pdrop": "attention_dropout",
    "resid_pdrop": "hidden_dropout",
    "layer_norm_epsilon": "layernorm_epsilon",
    "initializer_range": "init_method_std",
}
CONFIG_DEFAULTS = {"attn_pdrop": 0.1, "resid_pdrop": 0.1, "layer_norm_epsilon": 1e-5, "initializer_range": 0.02}
GELU = {"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu_fast": "tanh", "gelu": "erf"}
# Settings that change the model's formula, and their values in the original GPT-2.
REQUIRED_VALUES = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
    "add_cross_attention": False,
}
# Files of a tokenizer: transformers 4 writes both sets, transformers 5 only the second.
TOKENIZER_FILES = (("vocab.json", "merges.txt"), ("tokenizer.json",))
EXPORT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SHARD_BYTES = 5 * 10**9


def open_huggingface(folder: Path, hints: Hints, *, log: Callable[[str], None]) -> ExternalCheckpoint:
    """Open the model in `folder`. Raises ValueError, in one line, if a file is not valid or if the model is not a plain
    GPT-2."""
    weights = next(folder / name for name in WEIGHTS if (folder / name).is_file())
    config = read_json_object(folder / "config.json", MAX_JSON_BYTES)
    with file_errors(folder / "config.json"):
        model = _model_config(config, hints)
    left_out: list[str] = []
    with file_errors(weights):
        found, has_head = find_weights(_tensors(weights), left_out)
        if not has_head and config.get("tie_word_embeddings", True) is not True:
            raise ValueError(f"holds no {LM_HEAD}, but config.json has tie_word_embeddings = false")
        tensors = to_native_tensors(model, found, transposed=True)
    files = next((names for names in TOKENIZER_FILES if all((folder / name).is_file() for name in names)), ())
    metadata = {"tokenizer_files": {name: str(folder / name) for name in files}} if files else {}
    return ExternalCheckpoint(folder, "huggingface", 0, model, metadata, {"model": tensors}, left_out)


def _model_config(config: Mapping[str, Any], hints: Hints) -> ModelConfig:
    kind, activation = config.get("model_type"), config.get("activation_function", "gelu_new")
    require(kind == "gpt2", f"model_type is {short_repr(kind)}, and this program supports only gpt2")
    for name, plain in REQUIRED_VALUES.items():
        if config.get(name, plain) is not plain:
            raise ValueError(f"{name} is {short_repr(config[name])}, which this program's GPT-2 does not compute")
    if not isinstance(activation, str) or activation not in GELU:
        raise ValueError(
            f"activation_function is {short_repr(activation)}, and this program supports {', '.join(GELU)}"
        )
    fields: dict[str, Any] = {}
    for name, ours in CONFIG_INTEGERS.items():
        require(name in config, f"has no {name}")
        fields[ours] = check_integer(name, config[name])
    for name, ours in CONFIG_FRACTIONS.items():
        value = fields[ours] = config.get(name, CONFIG_DEFAULTS[name])
        if type(value) not in (int, float) or not 0 <= value < 1:
            raise ValueError(f"{name} should be a number in [0, 1), not {short_repr(value)}")
    if config.get("n_inner") is not None:
        fields["ffn_hidden_size"] = check_integer("n_inner", config["n_inner"])
    fields["vocab_size"] = min(hints.vocab_size or fields["vocab_size"], fields["vocab_size"])  # the rest is padding
    return ModelConfig(gelu=GELU[activation], **fields)


def _tensors(weights: Path) -> LazyTensors:
    """The tensors of the file `weights`, or of the files that this index lists."""
    if weights.suffix != ".json":
        return _load_file(weights)
    where = read_json_object(weights, MAX_JSON_BYTES).get("weight_map")
    kind = weights.name.split(".")[-3]
    if not isinstance(where, dict) or not all(
        isinstance(file, str) and re.fullmatch(rf"[\w-][\w.-]*\.{kind}", file, re.ASCII) for file in where.values()
    ):
        raise ValueError(f"weight_map should name files of this folder that end in .{kind}")
    found: dict[str, LazyTensor] = {}
    for file in sorted(set(where.values())):
        for name, tensor in _load_file(weights.parent / file).items():
            if where.get(name) != file:
                raise ValueError(
                    f"{weights.parent / file}: holds {short_repr(name)}, but {weights.name} lists it in "
                    f"{short_repr(where.get(name))}"
                )
            found[name] = tensor
    if missing := where.keys() - found.keys():
        raise ValueError(f"lists {short_repr(min(missing))}, which is not in any of the files")
    return found


def _load_file(path: Path) -> LazyTensors:
    """The tensors of one file, memory-mapped. This function checks a safetensors header before its library parses it,
    because the library accepts duplicate keys and needs minutes for a long header."""
    with file_errors(path):
        if path.suffix != ".safetensors":
            return {str(name): LazyTensor.from_tensor(tensor) for name, tensor in load_torch_file(path).items()}
        with open(path, "rb") as stream:
            header = read_safetensors_header(stream, MAX_JSON_BYTES)
        file = safe_open(path, "pt")
        return {
            # Only buffers have other dtypes, and they are not read.
            name: LazyTensor(
                TensorInfo(DTYPES.get(entry["dtype"], torch.bool), tuple(entry["shape"])),
                partial(file.get_tensor, name),
            )
            for name, entry in header.items()
            if name != "__metadata__"
        }


def write_huggingface(
    source: BaseCheckpoint,
    out: str | Path,
    *,
    dtype: str = "source",
    tokenizer: Tokenizer | None = None,
    log: Callable[[str], None] = print,
) -> Path:
    """Write `source` as a `GPT2LMHeadModel` into the new folder `out`, and return the folder. Only one tensor is in memory
    at a time.

    dtype: "source" keeps the dtype of the weights. "fp32", "bf16" and "fp16" convert the fp32 masters, or the weights if
    the source has no masters. Raises ValueError, in one line, if `out` exists or the tokenizer does not fit the model.
    """
    model = check_metadata(source)
    check_tokenizer(source, tokenizer)
    wanted = EXPORT_DTYPES.get(dtype, source.tensors[f"model.{WORD_EMBEDDINGS}"].dtype)
    kind = export_kind(source, dtype)
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
            log(f"WARNING: the export has no tokenizer for transformers: {problem}")
            if tokenizer is not None:
                tokenizer.save(folder / "tokenizer")
        config = {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            **{theirs: getattr(model, ours) for theirs, ours in {**CONFIG_INTEGERS, **CONFIG_FRACTIONS}.items()},
            "n_ctx": model.max_position_embeddings,  # for llama.cpp's converter
            "n_inner": model.ffn_hidden_size,
            "activation_function": {"tanh": "gelu_new", "erf": "gelu"}[model.gelu],
            "embd_pdrop": model.hidden_dropout,
            "bos_token_id": eod,
            "eos_token_id": eod,
            # transformers 5 reads the first name, transformers 4 the second.
            **dict.fromkeys(("dtype", "torch_dtype"), str(wanted).removeprefix("torch.")),
            **dict.fromkeys(("tie_word_embeddings", "scale_attn_weights", "use_cache"), True),
        }
        _write_json(folder / "config.json", config)
        _write_json(folder / "generation_config.json", {"_from_model_config": True, **ends})
        (folder / "README.md").write_text(_model_card(source, kind, wanted, problem), encoding="utf-8")
    return Path(out)


def _write_weights(source: BaseCheckpoint, folder: Path, model: ModelConfig, kind: str, dtype: torch.dtype) -> None:
    """Write model.safetensors, or several files of up to SHARD_BYTES and their index."""
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


MODEL_CARD = """---
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


def _model_card(source: BaseCheckpoint, kind: str, dtype: torch.dtype, problem: str) -> str:
    """The model card, with the run's metadata and an example. problem: why the export has no tokenizer, or ""."""
    found, config = describe(source), source.metadata["config"]
    consumed, length = source.metadata.get("consumed_samples"), config.get("data", {}).get("seq_length")
    rows: dict[str, Any] = {
        "format it was converted from": source.format,
        "iteration": source.iteration,
        **found["model"],
        "weights": str(dtype).removeprefix("torch.") + ", rounded from the fp32 masters" * (kind == "master"),
        **found["run"],
        "tokens seen": consumed * length if consumed and length else None,
        **{name: config.get("optimizer", {}).get(name) for name in ("lr", "weight_decay")},
        "seed": config.get("train", {}).get("seed"),
        "data fingerprint": source.metadata.get("data_fingerprint"),
    }
    return MODEL_CARD.format(
        rows="\n".join(f"| {name} | {format_value(value)} |" for name, value in rows.items() if value is not None),
        usage=f"There is no tokenizer for transformers here: {problem}." if problem else USAGE,
    )
