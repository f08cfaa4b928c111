"""GPT-2 under the names that OpenAI gave its parameters, which Hugging Face and nanoGPT keep.

The rows of QKV are [3, heads, head size]. Hugging Face keeps its linear layers [in, out], nanoGPT as ours.
"""

import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.gpt2.checkpoint.source import Source, TensorInfo
from megatron.gpt2.config import ModelConfig, require
from megatron.gpt2.formats.foreign import (
    GPT2_VOCABULARY,
    TABLE,
    Hints,
    LazyTensor,
    Tensors,
    by_part,
    first_rows,
    head_major,
    optimizer_config,
    renamed,
)
from megatron.gpt2.model.gpt2 import parameter_specs

PADDED_VOCABULARY = 50304  # GPT-2's, to a multiple of 64
WTE, HEAD = "wte.weight", "lm_head.weight"
MODULES = {"word_embeddings": "wte", "position_embeddings": "wpe", "transformer.final_layernorm": "ln_f"}
LAYER_MODULES = {
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
    "attention.query_key_value": "attn.c_attn",
    "attention.dense": "attn.c_proj",
    "mlp.dense_h_to_4h": "mlp.c_fc",
    "mlp.dense_4h_to_h": "mlp.c_proj",
}
BUFFERS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)", re.ASCII)  # the causal mask


def openai_name(name: str) -> str:
    """transformer.layers.3.attention.dense.bias -> h.3.attn.c_proj.bias."""
    return renamed(name, MODULES, "h", LAYER_MODULES)


def is_linear(name: str) -> bool:
    """Whether our parameter `name` is the weight of a linear layer, which Hugging Face keeps transposed."""
    return name.endswith((".query_key_value.weight", ".dense.weight", ".dense_h_to_4h.weight", ".dense_4h_to_h.weight"))


def true_vocabulary(rows: int, hints: Hints, log: Callable[[str], None]) -> int:
    """The tokens of a table of `rows`, which may hold padding: nanoGPT pads GPT-2's vocabulary, and says so nowhere."""
    if hints.vocab_size is None and rows == PADDED_VOCABULARY:
        log(
            f"the vocabulary is taken to be its padded size, {rows}: --vocab-size {GPT2_VOCABULARY} "
            "(GPT-2's) leaves out the rows that are padding"
        )
    return min(rows, hints.vocab_size or rows)


def weights_of(found: Tensors) -> tuple[dict[str, LazyTensor], bool]:
    """The parameters without what programs put before their names, without buffers and head, and whether there is a
    head. ValueError if it is not the table."""
    weights = {re.sub(r"^(_orig_mod\.)?(transformer\.)?", "", name): tensor for name, tensor in found.items()}
    weights = {name: tensor for name, tensor in weights.items() if not BUFFERS.fullmatch(name)}
    head, table = weights.pop(HEAD, None), weights.get(WTE)
    if head is not None and table is not None and not head.equals(table):
        raise ValueError(f"{HEAD} is not {WTE}, and the head of this program's GPT-2 is tied")
    return weights, head is not None


def count_layers(names: Iterable[str]) -> int:
    """The layers that `names`, OpenAI's, have."""
    return len({layer[1] for name in names if (layer := re.match(r"h\.(\d+)\.", name, re.ASCII))})


def openai_tensors(
    model: ModelConfig, found: Tensors, *, transposed: bool, biases: bool = True, kind: str = "model"
) -> dict[str, LazyTensor]:
    """Our tensors of a `kind`, made of `found`, which has OpenAI's names. ValueError unless `found` is a GPT-2 of the
    shape `model`.

    transposed: the linear layers are stored [in, out]. biases: False if there are none, which equals biases of zero.
    Rows of `wte` past the true vocabulary are padding and are left out.
    """
    layers = count_layers(found)  # before anything is made for each layer
    require(layers == model.num_layers, f"holds {layers} layers instead of {model.num_layers}")
    lazy, left = {}, dict(found)
    for name, spec in parameter_specs(model).items():
        theirs, shape = openai_name(name), spec.global_shape
        if not biases and name.endswith(".bias"):
            dtype = found[WTE].info.dtype
            lazy[f"{kind}.{name}"] = LazyTensor(TensorInfo(dtype, shape), partial(torch.zeros, shape, dtype=dtype))
            continue
        require(theirs in left, f"holds no {theirs}")
        tensor = left.pop(theirs)
        changes: list[Callable[[Tensor], Tensor]] = []
        if name == TABLE and tensor.info.shape[:1] > shape[:1]:
            changes.append(first_rows(shape[0]))
            shape = (tensor.info.shape[0], *shape[1:])
        if transposed and is_linear(name):
            shape = shape[::-1]
            changes.append(torch.t)
        if ".query_key_value." in name:
            changes.append(head_major(model.num_attention_heads))
        require(tensor.info.shape == shape, f"{theirs} has shape {tensor.info.shape} instead of {shape}")
        for change in changes:
            tensor = tensor.then(change)
        lazy[f"{kind}.{name}"] = tensor
    if left:
        raise ValueError(f"holds {next(iter(left))!r}, which is no part of GPT-2")
    return lazy


def openai_tensor(source: Source, model: ModelConfig, kind: str, name: str, *, transposed: bool) -> Tensor:
    """Our parameter `name`, or its master or a moment of it by the `kind`, as OpenAI lays the parameter out."""
    x = source.read(f"{kind}.{name}")
    x = by_part(model.num_attention_heads)(x) if ".query_key_value." in name else x
    return x.t() if transposed and is_linear(name) else x


def exported_kind(source: Source, dtype: str) -> str:
    """The kind of tensors that an export in `dtype` is made of, "model" or "master"."""
    return "master" if dtype != "source" and f"master.{TABLE}" in source.tensors else "model"


def adamw_groups(source: Source) -> list[dict[str, Any]]:
    """What torch's AdamW says of its two groups, the matrices, which decay, and the vectors; without `params`."""
    config = optimizer_config(source)
    off = dict.fromkeys(("amsgrad", "maximize", "capturable", "differentiable"), False)
    return [
        {
            "lr": config.lr,
            "betas": (config.adam_beta1, config.adam_beta2),
            "eps": config.adam_eps,
            "weight_decay": decay,
            **off,
            "foreach": None,
            "fused": None,
            "decoupled_weight_decay": True,
        }
        for decay in (config.weight_decay, 0.0)
    ]
