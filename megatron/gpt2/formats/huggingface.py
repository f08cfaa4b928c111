"""Hugging Face's GPT-2 (GPT2LMHeadModel, GPT2Model): config.json and safetensors or .bin files, single or sharded.

Their linear layers are `Conv1D`, stored [in, out].
"""

import re
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from data_utils.files import read_object, read_safetensors_header
from megatron.gpt2.checkpoint.manifest import DTYPES
from megatron.gpt2.checkpoint.source import TensorInfo
from megatron.gpt2.config import ModelConfig, require
from megatron.gpt2.formats.foreign import MAX_JSON_BYTES, ForeignSource, Hints, LazyTensor, short_repr, whole_number
from megatron.gpt2.formats.openai_names import check_layers, openai_tensors
from megatron.gpt2.formats.pickles import load_pickle

WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
GELU = {"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu_fast": "tanh", "gelu": "erf"}
# What changes the formula, and the value under which it is GPT-2's.
PLAIN = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
    "add_cross_attention": False,
}
BUFFERS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)", re.ASCII)  # the causal mask
# What holds a tokenizer: transformers 4 writes both of them, transformers 5 the second.
TOKENIZER_FILES = (("vocab.json", "merges.txt"), ("tokenizer.json",))


def weights_file(folder: Path) -> Path | None:
    """The file that holds or lists the weights; None where `folder` is no model of Hugging Face's."""
    if not (folder / "config.json").is_file():
        return None
    return next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)


def open_huggingface(folder: Path, hints: Hints) -> ForeignSource:
    """The model in `folder`. ValueError, one line, for anything that is not right, or that is not the plain GPT-2 that
    this program computes."""
    weights = weights_file(folder)
    assert weights is not None
    config = read_object(folder / "config.json", MAX_JSON_BYTES)
    found = {name.removeprefix("transformer."): tensor for name, tensor in _tensors(weights).items()}
    found = {name: tensor for name, tensor in found.items() if not BUFFERS.fullmatch(name)}
    model = _model(folder / "config.json", config, hints)
    check_layers(weights, found, model.num_layers)
    head, table = found.pop("lm_head.weight", None), found.get("wte.weight")
    if head is None and table is not None and config.get("tie_word_embeddings", True) is not True:
        raise ValueError(f"{weights}: holds no lm_head.weight, though config.json says that it is not tied")
    if (
        head is not None
        and table is not None
        and not (head.info == table.info and torch.equal(head.make(), table.make()))
    ):
        raise ValueError(f"{weights}: lm_head.weight is not wte.weight, and the head of this program's GPT-2 is tied")
    files = next((names for names in TOKENIZER_FILES if all((folder / name).is_file() for name in names)), ())
    facts = {"tokenizer_files": {name: str(folder / name) for name in files}} if files else {}
    return ForeignSource(folder, "huggingface", 0, model, facts, openai_tensors(weights, model, found, transposed=True))


def _model(path: Path, config: dict[str, Any], hints: Hints) -> ModelConfig:
    if config.get("model_type") != "gpt2":
        raise ValueError(f"{path}: model_type is {short_repr(config.get('model_type'))}, and this program knows gpt2")
    for name, plain in PLAIN.items():
        if config.get(name, plain) is not plain:
            raise ValueError(
                f"{path}: {name} is {short_repr(config[name])}, which this program's GPT-2 does not compute"
            )
    activation = config.get("activation_function", "gelu_new")
    if not isinstance(activation, str) or activation not in GELU:
        raise ValueError(
            f"{path}: activation_function is {short_repr(activation)}, and this program knows {', '.join(GELU)}"
        )

    def size(name: str) -> int:
        require(name in config, f"{path}: says nothing of {name}")
        return whole_number(path, name, config[name])

    def fraction(name: str, default: float) -> float:
        value = config.get(name, default)
        if type(value) not in (int, float) or not 0 <= value < 1:
            raise ValueError(f"{path}: {name} should be a number in [0, 1), not {short_repr(value)}")
        return float(value)

    vocab_size = size("vocab_size")
    if hints.vocab_size is not None and hints.vocab_size < vocab_size:
        vocab_size = hints.vocab_size  # the rest is padding
    try:
        return ModelConfig(
            num_layers=size("n_layer"),
            hidden_size=size("n_embd"),
            num_attention_heads=size("n_head"),
            ffn_hidden_size=None if config.get("n_inner") is None else size("n_inner"),
            max_position_embeddings=size("n_positions"),
            vocab_size=vocab_size,
            gelu=GELU[activation],
            attention_dropout=fraction("attn_pdrop", 0.1),
            hidden_dropout=fraction("resid_pdrop", 0.1),
            layernorm_epsilon=fraction("layer_norm_epsilon", 1e-5),
            init_method_std=fraction("initializer_range", 0.02),
        )
    except ValueError as error:
        raise ValueError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from error


def _tensors(weights: Path) -> dict[str, LazyTensor]:
    """All tensors of `weights`, or of the files that it lists."""
    if weights.suffix != ".json":
        return _load(weights)
    where = read_object(weights, MAX_JSON_BYTES).get("weight_map")
    kind = weights.name.split(".")[-3]
    if not isinstance(where, dict) or not all(
        isinstance(file, str) and re.fullmatch(rf"[\w-][\w.-]*\.{kind}", file, re.ASCII) for file in where.values()
    ):
        raise ValueError(f"{weights}: weight_map should name files of this folder that end in .{kind}")
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
        raise ValueError(f"{weights}: names {short_repr(min(missing))}, which is in none of the files")
    return found


def _load(path: Path) -> dict[str, LazyTensor]:
    if path.suffix == ".safetensors":
        return _safetensors(path)
    tensors = load_pickle(path)
    if not isinstance(tensors, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
        raise ValueError(f"{path}: holds no dictionary of tensors")
    return {str(name): LazyTensor.of(tensor) for name, tensor in tensors.items()}


def _safetensors(path: Path) -> dict[str, LazyTensor]:
    """The tensors of one file, mapped and not read. Its header is checked before safetensors parses it, which takes
    the last of two equal keys, and minutes for a long header."""
    try:
        with open(path, "rb") as stream:
            header = read_safetensors_header(stream, MAX_JSON_BYTES)
        file = safe_open(path, "pt")
        lazy = {}
        for name, entry in header.items():
            if name != "__metadata__":
                # Of other types are buffers, which nobody reads.
                info = TensorInfo(DTYPES.get(entry["dtype"], torch.bool), tuple(entry["shape"]))
                lazy[name] = LazyTensor(info, partial(file.get_tensor, name))
        return lazy
    except (ValueError, OSError, SafetensorError) as error:
        raise ValueError(f"{path}: {str(error).splitlines()[0]}") from error
