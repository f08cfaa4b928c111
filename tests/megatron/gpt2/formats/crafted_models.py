"""Models of Hugging Face and Megatron that were made to do harm, or are none, added to `CRAFTED`."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.megatron.gpt2.formats.crafted_pickles import OTHER_BYTES, craft, crafted
from tests.megatron.gpt2.formats.made import random_weights, write_megatron
from tests.megatron.gpt2.formats.test_readers_openai import write_huggingface

CONFIGS: dict[str, dict[str, Any]] = {
    "a million layers": {"n_layer": 10**6},
    "2**31 layers": {"n_layer": 2**31},
    "10**30 layers": {"n_layer": 10**30},
    "a width of 10**9": {"n_embd": 10**9, "n_head": 10**9},
    "a vocabulary of 2**31": {"vocab_size": 2**31},
    "2**31 positions": {"n_positions": 2**31},
    "a text for a number": {"n_layer": "4"},
    "no heads": {"n_head": 0},
    "negative heads": {"n_head": -4},
    "a fraction of a layer": {"n_layer": 3.5},
    "a list": {"n_embd": [48]},
    "true": {"n_head": True},
    "null": {"n_layer": None},
    "an endless epsilon": {"layer_norm_epsilon": float("inf")},
    "no number for epsilon": {"layer_norm_epsilon": float("nan")},
    "a dropout of 2": {"attn_pdrop": 2},
    "an activation of lists": {"activation_function": [["gelu"]]},
    "an MLP of 2**31": {"n_inner": 2**31},
    "a type that is none": {"model_type": {"gpt2": 1}},
}


def with_config(folder: Path, config: dict[str, Any]) -> Path:
    return write_huggingface(folder, **config)


def with_bytes(folder: Path, file: str, data: bytes) -> Path:
    write_huggingface(folder)
    (folder / file).write_bytes(data)
    return folder


for _name, _config in CONFIGS.items():
    craft(f"config.json: {_name}", with_config, _config)
for _name, _data in (
    ("nested deeply", b"[" * 10**6),
    ("objects nested deeply", b'{"a":' * 10**6),
    ("no object", b"[]"),
    ("a key twice", b'{"model_type": "gpt2", "model_type": "gpt2"}'),
    ("empty", b"{}"),
    ("a number of a million digits", b'{"n_layer": ' + b"9" * 10**6 + b"}"),
    ("50 MB", b" " * 50_000_000),
    ("no UTF-8", b'{"\xff": 1}'),
):
    craft(f"config.json: {_name}", with_bytes, "config.json", _data)
for _name, _data in OTHER_BYTES.items():
    craft(f"safetensors: a file {_name}", with_bytes, "model.safetensors", _data)


def with_cut(folder: Path, part: float) -> Path:
    data = (write_huggingface(folder) / "model.safetensors").read_bytes()
    return with_bytes(folder, "model.safetensors", data[: int(part * len(data))])


for _part in (0.01, 0.5, 0.99):
    craft(f"safetensors: cut at {_part}", with_cut, _part)


def with_header(folder: Path, header: str, length: int | None) -> Path:
    data = header.encode()
    return with_bytes(
        folder, "model.safetensors", struct.pack("<Q", len(data) if length is None else length) + data + b"\0" * 64
    )


ENTRY = '{"dtype":"F32","shape":[4,4],"data_offsets":[0,64]}'
HEADERS: dict[str, tuple[str, int | None]] = {
    "a key twice": (f'{{"wte.weight":{ENTRY},"wte.weight":{ENTRY}}}', None),
    "a header of 2**63 bytes": ("{}", 2**63),
    "a header of 40 MB": (" " * 40_000_000, None),
    "25,000 empty tensors": (
        json.dumps({f"t{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(25_000)}),
        None,
    ),
    "a header nested deeply": ("[" * 10**6, None),
    "offsets past the end": ('{"wte.weight":{"dtype":"F32","shape":[8,4],"data_offsets":[0,128]}}', None),
    "a shape that is not the size": (
        '{"wte.weight":{"dtype":"F32","shape":[1099511627776],"data_offsets":[0,64]}}',
        None,
    ),
    "a shape of 2**64": ('{"wte.weight":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}}', None),
    "negative offsets": ('{"wte.weight":{"dtype":"F32","shape":[4,4],"data_offsets":[-64,0]}}', None),
    "an unknown type": ('{"wte.weight":{"dtype":"F31","shape":[4,4],"data_offsets":[0,64]}}', None),
    "no tensors": ("{}", None),
}
for _name, (_header, _length) in HEADERS.items():
    craft(f"safetensors: {_name}", with_header, _header, _length)

INDEXES: dict[str, Any] = {
    "up": "../model.safetensors",
    "absolute": "/etc/passwd",
    "another kind": "pytorch_model.bin",
    "a number": 7,
    "nothing": "",
    "a folder": "inner/model.safetensors",
    "a backslash": "..\\model.safetensors",
    "a missing file": "model-00002-of-00002.safetensors",
}


def with_index(folder: Path, weight_map: Any) -> Path:
    write_huggingface(folder)
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


for _name, _file in INDEXES.items():
    craft(f"index: {_name}", with_index, {"transformer.wte.weight": _file})
craft("index: of no object", with_index, [1])
craft("index: of other names", with_index, {"x": "model-1.safetensors"})


# Megatron's dictionaries


def with_top(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    write_megatron(folder, random_weights(), "v2", version=3)
    file = folder / "iter_0000007/mp_rank_00/model_optim_rng.pt"
    top = torch.load(file, weights_only=False)
    change(top)
    torch.save(top, file)
    return folder


def _fan(width: int, depth: int) -> dict[str, Any]:
    """width**depth names out of `depth` small dictionaries."""
    inner: dict[str, Any] = {"x": torch.ones(1)}
    for _ in range(depth):
        inner = {f"k{i}": inner for i in range(width)}
    return inner


TOPS: dict[str, Callable[[dict[str, Any]], object]] = {
    "no model": lambda top: top.pop("model"),
    "a model that is a list": lambda top: top.update(model=[1]),
    "an iteration in words": lambda top: top.update(iteration="seven"),
    "a negative iteration": lambda top: top.update(iteration=-1),
    "an unknown version": lambda top: top.update(checkpoint_version=9),
    "a version that is a list": lambda top: top.update(checkpoint_version=[3]),
    "no layers": lambda top: top["model"]["language_model"].update(encoder={}),
    "a model of a million names": lambda top: top.update(model={"language_model": _fan(16, 5)}),
    "a layer that is missing": lambda top: [
        top["model"]["language_model"]["encoder"].pop(name)
        for name in list(top["model"]["language_model"]["encoder"])
        if name.startswith("layers.1.")
    ],
    "a layer of number 10**9": lambda top: top["model"]["language_model"]["encoder"].update(
        {"layers.1000000000.input_layernorm.weight": torch.ones(48)}
    ),
    "another shape": lambda top: top["model"]["language_model"]["encoder"].update(
        {"layers.1.mlp.dense_4h_to_h.weight": torch.ones(48, 81)}
    ),
    "integers for weights": lambda top: top["model"]["language_model"]["encoder"].update(
        {"final_layernorm.weight": torch.ones(48, dtype=torch.int64)}
    ),
    "a name twice": lambda top: top["model"].update({"transformer.final_layernorm.bias": torch.ones(48)}),
    "heads that are a text": lambda top: setattr(top["args"], "num_attention_heads", "4"),
    "heads without end": lambda top: setattr(top["args"], "num_attention_heads", 10**18),
}
for _name, _change in TOPS.items():
    craft(f"megatron: {_name}", with_top, _change)


@crafted("megatron: ranks up to 999")
def _(folder: Path) -> Path:
    write_megatron(folder, random_weights(), "v2", version=3)
    (folder / "iter_0000007/mp_rank_00").rename(folder / "iter_0000007/mp_rank_999")
    return folder


@crafted("megatron: a tracker that leads out of its folder")
def _(folder: Path) -> Path:
    write_megatron(folder / "inner/there", random_weights(), "v2", version=3)
    (folder / "inner/there").rename(folder / "there")
    (folder / "inner/latest_checkpointed_iteration.txt").write_text("../there")
    return folder / "inner"
