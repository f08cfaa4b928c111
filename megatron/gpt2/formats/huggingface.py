"""Read and write Hugging Face's GPT-2 (GPT2LMHeadModel, GPT2Model): config.json, safetensors or .bin files, single or
sharded, tokenizer and model card.

Hugging Face's linear layers are `Conv1D`, stored [in, out]. huggingface.py does not import transformers.
"""

import json
import re
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from data_utils import Tokenizer
from data_utils.command_line import Log, require
from data_utils.files import read_json_object, read_safetensors_header
from megatron.gpt2.checkpoint.interface import BaseCheckpoint, TensorInfo, check_metadata
from megatron.gpt2.checkpoint.reader import SAFETENSORS_DTYPES
from megatron.gpt2.checkpoint.writer import ShardedTensor, write_safetensors
from megatron.gpt2.device import PRECISION_DTYPES
from megatron.gpt2.formats.compare import describe, format_description
from megatron.gpt2.formats.foreign_checkpoint import (
    MAX_JSON_BYTES,
    Entries,
    ForeignCheckpoint,
    Hints,
    LazyTensor,
    LazyTensors,
    check_integer,
    file_errors,
    short_repr,
)
from megatron.gpt2.formats.nanogpt_and_dcp import CONFIG_SIZES, build_checkpoint, export_kind, export_tensors
from megatron.gpt2.formats.native import check_tokenizer, new_folder
from megatron.gpt2.formats.openai_tokenizer import tokenizer_files
from megatron.gpt2.formats.torch_files import load_torch_file
from megatron.gpt2.model.gpt2 import TIED_WEIGHT

WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
# {name in Hugging Face's config.json: field of ModelConfig}
CONFIG_INTEGERS = {**CONFIG_SIZES, "n_positions": "max_position_embeddings"}
CONFIG_FRACTIONS = {
    "attn_pdrop": "attention_dropout",
    "resid_pdrop": "hidden_dropout",
    "layer_norm_epsilon": "layernorm_epsilon",
    "initializer_range": "init_method_std",
}
GELU_FORMS = {"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu_fast": "tanh", "gelu": "erf"}
# settings that change the model's formula, with the values of the original GPT-2
REQUIRED_VALUES = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
    "add_cross_attention": False,
}
# Each set of files contains a whole tokenizer. transformers 4 writes both sets, and transformers 5 only the second.
TOKENIZER_FILES = (("vocab.json", "merges.txt"), ("tokenizer.json",))


def open_huggingface(folder: Path, hints: Hints, *, log: Log) -> ForeignCheckpoint:
    """Open the model in `folder`. Raises ValueError, in one line, if a file is not valid or if the model is not a plain
    GPT-2."""
    weights = next(folder / name for name in WEIGHTS if (folder / name).is_file())
    config = read_json_object(folder / "config.json", MAX_JSON_BYTES)
    with file_errors(folder / "config.json"):
        fields = _model_fields(config)
    files = next((names for names in TOKENIZER_FILES if all((folder / name).is_file() for name in names)), ())
    with file_errors(weights):
        return build_checkpoint(
            folder,
            "huggingface",
            _tensors(weights),
            fields,
            hints,
            log,
            iteration=0,
            tied=config.get("tie_word_embeddings", True),
            metadata={"tokenizer_files": {name: str(folder / name) for name in files}} if files else {},
        )


def _model_fields(config: Entries) -> dict[str, Any]:
    """Return the fields of ModelConfig that config.json gives."""
    kind, activation = config.get("model_type"), config.get("activation_function", "gelu_new")
    require(kind == "gpt2", f"model_type is {short_repr(kind)}, and this program supports only gpt2")
    for name, plain in REQUIRED_VALUES.items():
        if config.get(name, plain) is not plain:
            raise ValueError(f"{name} is {short_repr(config[name])}, which this program's GPT-2 does not compute")
    is_known = isinstance(activation, str) and activation in GELU_FORMS
    require(
        is_known, f"activation_function is {short_repr(activation)}, and this program supports {', '.join(GELU_FORMS)}"
    )
    fields: dict[str, Any] = {"gelu": GELU_FORMS[activation]}
    for name, field in CONFIG_INTEGERS.items():
        require(name in config, f"has no {name}")
        fields[field] = check_integer(name, config[name])
    inner = config.get("n_inner")
    fields["ffn_hidden_size"] = None if inner in (None, 4 * config["n_embd"]) else check_integer("n_inner", inner)
    for name, field in CONFIG_FRACTIONS.items():
        if name in config:
            value = fields[field] = config[name]
            is_fraction = type(value) in (int, float) and 0 <= value < 1
            require(is_fraction, f"{name} should be a number in [0, 1), not {short_repr(value)}")
    return fields


def _tensors(weights: Path) -> LazyTensors:
    """Return the tensors of `weights`, which is a file with tensors or an index of such files."""
    if weights.suffix != ".json":
        return _load_file(weights)
    weight_map = read_json_object(weights, MAX_JSON_BYTES).get("weight_map")
    kind = weights.name.split(".")[-3]
    if not isinstance(weight_map, dict) or not all(
        isinstance(file, str) and re.fullmatch(rf"[\w-][\w.-]*\.{kind}", file, re.ASCII) for file in weight_map.values()
    ):
        raise ValueError(f"weight_map should name files of this folder that end in .{kind}")
    files = {file: _load_file(weights.parent / file) for file in sorted(set(weight_map.values()))}
    for name, file in weight_map.items():
        require(name in files[file], f"lists {short_repr(name)}, which is not in {file}")
    return {name: files[file][name] for name, file in weight_map.items()}


def _load_file(path: Path) -> LazyTensors:
    """Return the tensors of one file, memory-mapped. `_load_file` checks a safetensors header before the library parses
    it: the library accepts duplicate keys, and needs minutes for a long header."""
    with file_errors(path):
        if path.suffix != ".safetensors":
            return {str(name): LazyTensor.from_tensor(tensor) for name, tensor in load_torch_file(path).items()}
        with open(path, "rb") as stream:
            header = read_safetensors_header(stream, MAX_JSON_BYTES)
        file = safe_open(path, "pt")
        return {
            # Only buffers, which are not read, have dtypes that SAFETENSORS_DTYPES lacks.
            name: LazyTensor(
                TensorInfo(SAFETENSORS_DTYPES.get(entry["dtype"], torch.bool), tuple(entry["shape"])),
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
    log: Log = print,
) -> Path:
    """Write `source` as a `GPT2LMHeadModel` into the new folder `out`, and return the folder. Only one tensor is in
    memory at a time.

    dtype: "source" keeps the dtype of the weights. "fp32", "bf16" and "fp16" convert the fp32 masters, or
    the weights if the source has no masters.

    Raises ValueError, in one line, if `out` exists or the tokenizer does not fit the model.
    """
    model = check_metadata(source)
    check_tokenizer(source, tokenizer)
    weight_dtype = PRECISION_DTYPES.get(dtype, source.tensors[f"model.{TIED_WEIGHT}"].dtype)
    kind = export_kind(source, dtype)
    eod = tokenizer.eod if tokenizer and tokenizer.has_eod else None
    ends = {} if eod is None else {"bos_token_id": eod, "eos_token_id": eod}
    weights = {
        name: ShardedTensor(
            torch.empty(x.info.shape, dtype=weight_dtype, device="meta"), x.info.shape, (0,) * len(x.info.shape), x.load
        )
        for name, x in export_tensors(source, kind, transposed=True, dtype=weight_dtype).items()
    }
    with new_folder(out) as folder:
        write_safetensors(folder, WEIGHTS[0], source.iteration, weights)
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
            **{key: getattr(model, field) for key, field in {**CONFIG_INTEGERS, **CONFIG_FRACTIONS}.items()},
            "n_ctx": model.max_position_embeddings,  # for llama.cpp's converter
            "n_inner": model.ffn_hidden_size,
            "activation_function": {"tanh": "gelu_new", "erf": "gelu"}[model.gelu],
            "embd_pdrop": model.hidden_dropout,
            "bos_token_id": eod,
            "eos_token_id": eod,
            # transformers 5 reads the first name, transformers 4 the second.
            **dict.fromkeys(("dtype", "torch_dtype"), str(weight_dtype).removeprefix("torch.")),
            **dict.fromkeys(("tie_word_embeddings", "scale_attn_weights", "use_cache"), True),
        }
        generation = {"_from_model_config": True, **ends}
        for name, values in {"config.json": config, "generation_config.json": generation}.items():
            (folder / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        (folder / "README.md").write_text(_model_card(source, kind, weight_dtype, problem), encoding="utf-8")
    return Path(out)


MODEL_CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags: [gpt2]
---

# A GPT-2 model

```
{description}
```

{usage}
"""
USAGE = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("FOLDER")
tokenizer = AutoTokenizer.from_pretrained("FOLDER")
```

In training the characters `<|endoftext|>` in a text were text; this tokenizer reads them as the end of a document."""


def _model_card(source: BaseCheckpoint, kind: str, dtype: torch.dtype, problem: str) -> str:
    """Return the model card, with the run's metadata and an example.

    problem: why the export has no tokenizer, or "".
    """
    _, *lines = takewhile(bool, format_description(describe(source)))  # Leave out the path and the list of tensors.
    lines.append(
        f"weights  {str(dtype).removeprefix('torch.')}{', rounded from the fp32 masters' * (kind == 'master')}"
    )
    usage = f"There is no tokenizer for transformers here: {problem}." if problem else USAGE
    return MODEL_CARD.format(description="\n".join(lines), usage=usage)
