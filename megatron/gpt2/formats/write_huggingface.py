"""Any source written as a complete Hugging Face model: weights, configuration, tokenizer and model card.

transformers is not needed to write it, only to use it. Legend: n heads, d head size.
"""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data_utils import Tokenizer
from data_utils.files import safetensors_header
from megatron.gpt2.checkpoint.manifest import DTYPE_CODES
from megatron.gpt2.checkpoint.source import Source, check_facts
from megatron.gpt2.config import ModelConfig
from megatron.gpt2.formats.foreign import by_part
from megatron.gpt2.formats.new_folder import new_folder
from megatron.gpt2.formats.openai_names import is_linear, openai_name
from megatron.gpt2.formats.openai_tokenizer import tokenizer_files
from megatron.gpt2.model.parameters import parameter_specs

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SHARD_BYTES = 5 * 10**9


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

    dtype: "source" keeps the weights' dtype; "fp32", "bf16" and "fp16" convert, from the fp32 masters where the source
    holds them. ValueError, one line, where `out` is not new or the tokenizer is not the model's.
    """
    model = check_facts(source)
    if tokenizer is not None and tokenizer.vocab_size != model.vocab_size:
        raise ValueError(
            f"{source.path}: has {model.vocab_size:,} tokens and the tokenizer {tokenizer.vocab_size:,}: "
            "give the files that it was trained with"
        )
    wanted = DTYPES.get(dtype, source.tensors["model.word_embeddings.weight"].dtype)
    kind = exported_kind(source, dtype)
    with new_folder(out) as folder:
        _write_weights(source, folder, model, kind, wanted)
        files, problem = tokenizer_files(tokenizer, model.max_position_embeddings) if tokenizer else ({}, "")
        for name, content in files.items():
            (folder / name).write_bytes(content)
        if tokenizer is None or problem:
            problem = problem or "the source has none"
            log(f"WARNING: the export has no tokenizer that transformers could load: {problem}")
            if tokenizer is not None:
                tokenizer.save(folder / "tokenizer")
        eod = tokenizer.eod if tokenizer and tokenizer.has_eod else None
        _write_json(folder / "config.json", _config(model, wanted, eod))
        _write_json(
            folder / "generation_config.json",
            {"_from_model_config": True} | ({} if eod is None else {"bos_token_id": eod, "eos_token_id": eod}),
        )
        (folder / "README.md").write_text(_card(source, model, kind, wanted, tokenizer, problem), encoding="utf-8")
    return Path(out)


def exported_kind(source: Source, dtype: str) -> str:
    """The kind of tensors that an export in `dtype` is made of, "model" or "master"."""
    return "master" if dtype != "source" and "master.word_embeddings.weight" in source.tensors else "model"


def huggingface_tensor(source: Source, model: ModelConfig, kind: str, name: str) -> Tensor:
    """Our parameter `name`, or its master or a moment of it by the `kind`, as Hugging Face lays the parameter out."""
    x = source.read(f"{kind}.{name}")
    x = by_part(model.num_attention_heads)(x) if ".query_key_value." in name else x
    return x.t() if is_linear(name) else x


def _write_weights(source: Source, folder: Path, model: ModelConfig, kind: str, dtype: torch.dtype) -> None:
    """model.safetensors, or where that would be larger than SHARD_BYTES several files and their index."""
    shapes = {
        name: spec.global_shape[::-1] if is_linear(name) else spec.global_shape
        for name, spec in parameter_specs(model).items()
    }
    sizes = {name: math.prod(shape) * dtype.itemsize for name, shape in shapes.items()}
    shards: list[list[str]] = [[]]
    for name, size in sizes.items():
        if shards[-1] and sum(sizes[other] for other in shards[-1]) + size > SHARD_BYTES:
            shards.append([])
        shards[-1].append(name)
    files = (
        ["model.safetensors"]
        if len(shards) == 1
        else [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    )
    for file, names in zip(files, shards, strict=True):
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for name in names:
            header[f"transformer.{openai_name(name)}"] = {
                "dtype": DTYPE_CODES[dtype],
                "shape": shapes[name],
                "data_offsets": [at, at + sizes[name]],
            }
            at += sizes[name]
        with open(folder / file, "wb") as stream:
            stream.write(safetensors_header(header))
            for name in names:
                tensor = huggingface_tensor(source, model, kind, name).to(dtype).contiguous()
                stream.write(tensor.view(-1).view(torch.uint8).numpy().data)
    if len(shards) > 1:
        where = {
            f"transformer.{openai_name(name)}": file
            for file, names in zip(files, shards, strict=True)
            for name in names
        }
        _write_json(
            folder / "model.safetensors.index.json",
            {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where},
        )


def _config(model: ModelConfig, dtype: torch.dtype, eod: int | None) -> dict[str, Any]:
    name = str(dtype).removeprefix("torch.")
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": model.vocab_size,
        "n_positions": model.max_position_embeddings,
        "n_embd": model.hidden_size,
        "n_layer": model.num_layers,
        "n_head": model.num_attention_heads,
        "n_inner": model.ffn_hidden_size,
        "activation_function": {"tanh": "gelu_new", "erf": "gelu"}[model.gelu],
        "layer_norm_epsilon": model.layernorm_epsilon,
        "initializer_range": model.init_method_std,
        "embd_pdrop": model.hidden_dropout,
        "resid_pdrop": model.hidden_dropout,
        "attn_pdrop": model.attention_dropout,
        "bos_token_id": eod,
        "eos_token_id": eod,
        "tie_word_embeddings": True,
        "scale_attn_weights": True,
        "use_cache": True,
        "dtype": name,
        "torch_dtype": name,
    }  # the name of today, and that of transformers 4


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _card(
    source: Source, model: ModelConfig, kind: str, dtype: torch.dtype, tokenizer: Tokenizer | None, problem: str
) -> str:
    """The model card: how to load it, and what the run's facts are."""
    facts, config = source.facts, source.facts["config"]
    consumed, length = facts.get("consumed_samples"), config.get("data", {}).get("seq_length")
    optimizer = config.get("optimizer", {})
    rows: list[tuple[str, Any]] = [
        ("format it was converted from", source.format),
        ("iteration", f"{source.iteration:,}"),
        ("tokens seen", f"{consumed * length:,}" if consumed and length else None),
        ("layers × hidden size × heads", f"{model.num_layers} × {model.hidden_size} × {model.num_attention_heads}"),
        ("positions", f"{model.max_position_embeddings:,}"),
        ("vocabulary", f"{model.vocab_size:,}"),
        ("GELU", model.gelu),
        (
            "weights",
            f"{str(dtype).removeprefix('torch.')}" + (", rounded from the fp32 masters" if kind == "master" else ""),
        ),
        ("trained in", facts.get("precision")),
        ("global batch, samples", facts.get("global_batch_size")),
        ("peak learning rate", optimizer.get("lr")),
        ("weight decay", optimizer.get("weight_decay")),
        ("seed", config.get("train", {}).get("seed")),
        ("data fingerprint", facts.get("data_fingerprint")),
        ("torch", facts.get("torch")),
    ]
    text = [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags: [gpt2]",
        "---",
        "",
        "# A GPT-2 model",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in rows if value is not None),
        "",
    ]
    if tokenizer is not None and not problem:
        text += [
            "```python",
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "",
            'model = AutoModelForCausalLM.from_pretrained("FOLDER")',
            'tokenizer = AutoTokenizer.from_pretrained("FOLDER")',
            "```",
            "",
            "In training the characters `<|endoftext|>` in a text were text; this tokenizer reads them as the end "
            "of a document.",
        ]
    else:
        text += [f"There is no tokenizer for transformers here: {problem}."]
    return "\n".join(text) + "\n"
