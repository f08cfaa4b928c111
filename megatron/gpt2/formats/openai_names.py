"""GPT-2 under the names that OpenAI gave its parameters, which Hugging Face and nanoGPT keep.

The rows of QKV are [3, heads, head size]. Legend: h hidden, f width inside the MLP.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

import torch

from megatron.gpt2.checkpoint.source import TensorInfo
from megatron.gpt2.config import ModelConfig, require
from megatron.gpt2.formats.foreign import GPT2_VOCABULARY, Hints, LazyTensor, first_rows, head_major, renamed
from megatron.gpt2.model.parameters import parameter_specs

PADDED_VOCABULARY = 50304  # GPT-2's, to a multiple of 64
MODULES = {"word_embeddings": "wte", "position_embeddings": "wpe", "transformer.final_layernorm": "ln_f"}
LAYER_MODULES = {
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
    "attention.query_key_value": "attn.c_attn",
    "attention.dense": "attn.c_proj",
    "mlp.dense_h_to_4h": "mlp.c_fc",
    "mlp.dense_4h_to_h": "mlp.c_proj",
}


def openai_name(name: str) -> str:
    """transformer.layers.3.attention.dense.bias -> h.3.attn.c_proj.bias."""
    return renamed(name, MODULES, "h", LAYER_MODULES)


def is_linear(name: str) -> bool:
    """Whether our parameter `name` is the weight of a linear layer, which Hugging Face keeps transposed."""
    return name.endswith((".query_key_value.weight", ".dense.weight", ".dense_h_to_4h.weight", ".dense_4h_to_h.weight"))


def true_vocabulary(path: Path, rows: int, hints: Hints, log: Callable[[str], None]) -> int:
    """The tokens of a table of `rows`, which may hold padding: nanoGPT pads GPT-2's vocabulary, and says so nowhere."""
    if hints.vocab_size is None and rows == PADDED_VOCABULARY:
        log(
            f"{path}: the vocabulary is taken to be its padded size, {rows}: --vocab-size {GPT2_VOCABULARY} "
            "(GPT-2's) leaves out the rows that are padding"
        )
    return min(rows, hints.vocab_size or rows)


def check_layers(path: Path, names: Iterable[str], num_layers: int) -> None:
    """ValueError unless `names`, OpenAI's, have `num_layers` layers. Call it before anything is made for each layer."""
    found = len({layer[1] for name in names if (layer := re.match(r"h\.(\d+)\.", name, re.ASCII))})
    require(found == num_layers, f"{path}: holds {found} layers instead of {num_layers}")


def openai_tensors(
    path: Path,
    model: ModelConfig,
    found: Mapping[str, LazyTensor],
    *,
    transposed: bool,
    biases: bool = True,
    prefix: str = "model.",
) -> dict[str, LazyTensor]:
    """Our tensors, made of `found`, which has OpenAI's names. ValueError unless `found` is a GPT-2 of the shape
    `model`.

    transposed: the linear layers are stored [in, out]. biases: False where there are none, which equals biases of zero.
    prefix: goes before our names. Rows of `wte` past the true vocabulary are padding and are left out.
    """
    lazy, left = {}, dict(found)
    for name, spec in parameter_specs(model).items():
        theirs, shape = openai_name(name), spec.global_shape
        if not biases and name.endswith(".bias"):
            info = TensorInfo(found["wte.weight"].info.dtype, shape)
            lazy[prefix + name] = LazyTensor(info, partial(torch.zeros, info.shape, dtype=info.dtype))
            continue
        require(theirs in left, f"{path}: holds no {theirs}")
        tensor = left.pop(theirs)
        changes: list[Callable[[torch.Tensor], torch.Tensor]] = []
        if name == "word_embeddings.weight" and tensor.info.shape[:1] > shape[:1]:
            shape = (tensor.info.shape[0], *shape[1:])
            changes.append(first_rows(spec.global_shape[0]))
        if transposed and is_linear(name):
            shape = shape[::-1]
            changes.append(torch.t)
        if ".query_key_value." in name:
            changes.append(head_major(model.num_attention_heads))
        require(tensor.info.shape == shape, f"{path}: {theirs} has shape {tensor.info.shape} instead of {shape}")
        for change in changes:
            tensor = tensor.then(change)
        lazy[prefix + name] = tensor
    if left:
        raise ValueError(f"{path}: holds {next(iter(left))!r}, which is no part of GPT-2")
    return lazy
