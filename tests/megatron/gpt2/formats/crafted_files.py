"""Files of torch.save, and models of Hugging Face and Megatron, that were made to do harm, or are none: `CRAFTED` holds
what writes each, by name."""

from __future__ import annotations

import json
import os
import pickle
import random
import struct
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.megatron.gpt2.formats.made import nanogpt_checkpoint, random_weights, write_huggingface, write_megatron

MAGIC = pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2)
SYSTEM = pickle.dumps({"protocol_version": 1001, "little_endian": True, "type_sizes": {}}, 2)


class Call:
    """Pickled, it is a call of `function`."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


Craft = Callable[..., Path]
CRAFTED: dict[str, Callable[[Path], Path]] = {}


def craft(name: str, make: Craft, *args: Any) -> None:
    """`make(folder, *args)` writes the file and returns the path to be opened."""
    assert name not in CRAFTED
    CRAFTED[name] = lambda folder: make(folder, *args)


def crafted(name: str) -> Callable[[Craft], Craft]:
    def keep(make: Craft) -> Craft:
        craft(name, make)
        return make

    return keep


def marker(folder: Path) -> Path:
    return folder / "executed"


# Payloads: in every format that holds a pickle, in both containers.

PAYLOADS: dict[str, Callable[[Path], Any]] = {
    "os.system": lambda folder: Call(os.system, f"touch {marker(folder)}"),
    "subprocess": lambda folder: Call(subprocess.check_call, ["touch", str(marker(folder))]),
    "eval": lambda folder: Call(eval, f"open({str(marker(folder))!r}, 'w')"),
    "exec": lambda folder: Call(exec, f"open({str(marker(folder))!r}, 'w')"),
    "open": lambda folder: Call(open, str(marker(folder)), "w"),
    "getattr": lambda folder: Call(getattr, "a", "upper"),
    "import": lambda folder: Call(__import__, "antigravity"),
    "torch.load": lambda folder: Call(torch.load, str(marker(folder))),
    "numpy.save": lambda folder: Call(np.save, str(marker(folder)), 0),
    "bytearray": lambda folder: Call(bytearray, 10**11),
    "touch": lambda folder: Call(Path.touch, Path(folder / "executed")),
}


def with_payload(folder: Path, form: str, payload: str, legacy: bool) -> Path:
    evil = PAYLOADS[payload](folder)
    zipped = {"_use_new_zipfile_serialization": not legacy}
    if form in ("flat", "v2", "fused"):
        return write_megatron(folder, random_weights(), form, legacy=legacy, evil=evil)
    if form == "deepspeed":
        torch.save({"module": evil, "iteration": 7}, folder / "mp_rank_00_model_states.pt", **zipped)
    elif form == "nanogpt":
        torch.save({**nanogpt_checkpoint()[0], "config": evil}, folder / "ckpt.pt", **zipped)
    else:
        write_huggingface(folder)
        (folder / "model.safetensors").unlink()
        torch.save({"transformer.wte.weight": torch.ones(101, 48), "x": evil}, folder / "pytorch_model.bin", **zipped)
    return folder


for _form in ("flat", "v2", "fused", "deepspeed", "nanogpt", "huggingface"):
    for _container, _legacy in (("zip", False), ("legacy", True)):
        craft(f"{_form} runs os.system, {_container}", with_payload, _form, "os.system", _legacy)
for _payload in list(PAYLOADS)[1:]:
    craft(f"flat runs {_payload}", with_payload, "flat", _payload, False)


@crafted("a pickle instead of the manifest")
def _(folder: Path) -> Path:
    (folder / "iter_0000001").mkdir()
    (folder / "iter_0000001/manifest.json").write_bytes(pickle.dumps(PAYLOADS["os.system"](folder)))
    return folder


@crafted("a pickle instead of safetensors")
def _(folder: Path) -> Path:
    write_huggingface(folder)
    torch.save(PAYLOADS["os.system"](folder), folder / "model.safetensors")
    return folder


@crafted("a pickle instead of config.json")
def _(folder: Path) -> Path:
    write_huggingface(folder)
    (folder / "config.json").write_bytes(pickle.dumps(PAYLOADS["os.system"](folder)))
    return folder


@crafted("a pickle without a container")
def _(folder: Path) -> Path:
    (folder / "ckpt.pt").write_bytes(pickle.dumps(PAYLOADS["os.system"](folder), 2))
    return folder


# Streams of instructions, as ckpt.pt. `p` is what builds an object; `.` is added.


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def call(module: str, name: str, args: bytes) -> bytes:
    return f"c{module}\n{name}\n".encode() + args + b"R"


def storage(kind: str = "Float", numel: bytes = b"K\x04", legacy: bool = False, key: bytes = b"") -> bytes:
    return (
        b"("
        + text("storage")
        + f"ctorch\n{kind}Storage\n".encode()
        + (key or text("0"))
        + text("cpu")
        + numel
        + (b"N" if legacy else b"")
        + b"tQ"
    )


def tensor(of: bytes, offset: bytes = b"K\x00", shape: bytes = b"K\x04\x85", stride: bytes = b"K\x01\x85") -> bytes:
    return call("torch._utils", "_rebuild_tensor_v2", b"(" + of + offset + shape + stride + b"\x89N" + b"t")


def zip_of(folder: Path, instructions: bytes, **records: bytes) -> Path:
    path = folder / "ckpt.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + instructions + b".")
        for name, data in {"version": b"3\n", "byteorder": b"little", **records}.items():
            archive.writestr(f"archive/{name}", data)
    return path


def legacy_of(folder: Path, instructions: bytes, keys: Any = ("0",), after: bytes = b"") -> Path:
    path = folder / "ckpt.pt"
    path.write_bytes(MAGIC + SYSTEM + b"\x80\x02" + instructions + b"." + pickle.dumps(list(keys), 2) + after)
    return path


FOUR = struct.pack("<q", 4) + b"\0" * 16
DEEP = 80_000
LONG = b"\x8a\x08" + struct.pack("<q", 1 << 45)
DOUBLED = b"K\x01" + b"".join(b"q" + bytes([i]) + b"h" + bytes([i]) + b"\x86" for i in range(60))  # 2**60 leaves
STREAMS: dict[str, bytes] = {
    "a key that takes years to hash": b"}" + DOUBLED + b"Ns",
    "a storage's key that takes years to hash": tensor(storage(key=DOUBLED)),
    "a dictionary's key nested deeply": b"}" + b")" + b"\x85" * DEEP + b"Ns",
    "nested deeply": b"]" * DEEP + b"a" * (DEEP - 1),
    "nested deeply in dictionaries": b"}" + b"K\x01}" * DEEP + b"s" * DEEP,
    "a string longer than the file": b"X" + struct.pack("<I", 2**32 - 1) + b"abc",
    "a string that is no UTF-8": b"X" + struct.pack("<I", 2) + b"\xff\xfe",
    "an empty stack": b"a",
    "no mark": b"t",
    "a memo that nobody filled": b"h\x07",
    "an unknown instruction": b"\xff",
    "protocol 4": pickle.dumps({"model": 1}, 4)[2:-1],
    "an instance of protocol 0": b"(cos\nsystem\no",
    "a global without an end": b"c" + b"a" * 1000,
    "items for a number": b"K\x01K\x02a",
    "items for a tuple": b")K\x02K\x03s",
    "a key twice": b"}(" + (text("a") + b"N") * 2 + b"u",
    "an odd number of items": b"}(" + text("a") * 3 + b"u",
    "a list as a key": b"}]Ns",
    "a call of a number": b"K\x01)R",
    "a call of a tensor": tensor(storage()) + b")R",
    "too many instructions": b"N" * 600_000,
    "a name too often": b"cnumpy\ndtype\n" * 600_000,
    "too many names": b"".join(f"cnumpy.dtypes\nN{i}DType\n".encode() for i in range(100_000)),
    "endless memo": b"]" + b"r\0\0\0\0" * 300_000 + b"h\x09",
    "copies of a long list": b"](" + b"N" * 50_000 + b"eq\x00" + (b"cbuiltins\nset\nh\x00\x85R") * 50_000 + b"a",
    "a storage of a tuple": tensor(b"(" + text("storage") + b")" + text("0") + text("cpu") + b"K\x04tQ"),
    "a storage of an unknown type": tensor(storage("Quint8")),
    "a storage that is missing": tensor(storage(key=text("7"))),
    "a storage with a path": tensor(storage(key=text("../../../etc/passwd"))),
    "a negative storage": tensor(storage(numel=b"J\xff\xff\xff\xff")),
    "a storage larger than its record": tensor(storage(numel=b"K\x05")),
    "a storage of 2**45 elements": tensor(storage(numel=LONG)),
    "a storage of a fraction": tensor(storage(numel=b"G@\x10\0\0\0\0\0\0")),
    "a tensor past its storage": tensor(storage(), offset=b"K\x01"),
    "a tensor before its storage": tensor(storage(), offset=b"J\xfe\xff\xff\xff"),
    "a tensor of 2**45 elements": tensor(storage(), shape=LONG + b"\x85", stride=b"K\x00\x85"),
    "a tensor of many equal elements": tensor(storage(), shape=b"K\xff\x85", stride=b"K\x00\x85"),
    "a tensor of negative stride": tensor(storage(), stride=b"J\xff\xff\xff\xff\x85"),
    "a tensor of negative size": tensor(storage(), shape=b"J\xff\xff\xff\xff\x85"),
    "a tensor of a thousand dimensions": tensor(
        storage(), shape=b"(" + b"K\x01" * 1000 + b"t", stride=b"(" + b"K\x00" * 1000 + b"t"
    ),
    "a tensor of no storage": tensor(b"N"),
    "a tensor with too few arguments": call("torch._utils", "_rebuild_tensor_v2", b"(" + storage() + b"t"),
    "another type's memory": call("torch._utils", "_rebuild_wrapper_subclass", b")"),
    "a tensor of numpy's": call("torch._utils", "_rebuild_device_tensor_from_numpy", b")"),
    "a class with attributes": call("torch._tensor", "_rebuild_from_type_v2", b"(cos\nsystem\n)))t"),
    "nothing": b"",
    "a number instead of a checkpoint": b"K\x07",
    "weights that are numbers": pickle.dumps(
        {"model": {"wte": 1}, "model_args": {"n_layer": 1, "n_embd": 8, "n_head": 1, "block_size": 8, "vocab_size": 9}},
        2,
    )[2:-1],
    "sizes that take years to print": b"}("
    + text("model")
    + b"}"
    + text("model_args")
    + b"}("
    + text("n_layer")
    + DOUBLED
    + b"uu",
}


def zip_of_stream(folder: Path, name: str) -> Path:
    return zip_of(folder, STREAMS[name], **{"data/0": b"\0" * 16})


def legacy_of_stream(folder: Path, name: str) -> Path:
    return legacy_of(folder, STREAMS[name].replace(text("cpu") + b"K\x04tQ", text("cpu") + b"K\x04NtQ"), after=FOUR)


for _name in STREAMS:
    craft(f"zip: {_name}", zip_of_stream, _name)
for _name in (
    "a storage of 2**45 elements",
    "a tensor past its storage",
    "a key that takes years to hash",
    "a string longer than the file",
    "too many instructions",
    "nested deeply",
    "a storage's key that takes years to hash",
):
    craft(f"legacy: {_name}", legacy_of_stream, _name)


@crafted("legacy: a key of a storage that takes years to hash")
def _(folder: Path) -> Path:
    (folder / "ckpt.pt").write_bytes(
        MAGIC + SYSTEM + b"\x80\x02" + tensor(storage(legacy=True)) + b".\x80\x02]" + DOUBLED + b"a." + FOUR
    )
    return folder


for _name, _keys, _after in (
    ("no key", (), FOUR),
    ("a key twice", ("0", "0"), FOUR * 2),
    ("another key", ("1",), FOUR),
    ("a storage cut short", ("0",), FOUR[:-1]),
    ("no storage", ("0",), b""),
    ("another length", ("0",), struct.pack("<q", 5) + b"\0" * 20),
):
    craft(f"legacy: {_name}", legacy_of, tensor(storage(legacy=True)), _keys, _after)


@crafted("legacy: thousands of storages")
def _(folder: Path) -> Path:
    """Each of 100 MB, in a file of 400 KB."""
    one = [tensor(storage(numel=b"J\0\0\x80\x01", legacy=True, key=text(str(i)))) for i in range(2000)]
    return legacy_of(folder, b"](" + b"".join(one) + b"e", [str(i) for i in range(2000)])


@crafted("legacy: big endian")
def _(folder: Path) -> Path:
    (folder / "ckpt.pt").write_bytes(MAGIC + pickle.dumps({"little_endian": False}, 2) + pickle.dumps({}, 2))
    return folder


# Zip files


def valid_zip(folder: Path) -> Path:
    torch.save(nanogpt_checkpoint()[0], folder / "ckpt.pt")
    return folder / "ckpt.pt"


@crafted("zip: a bomb")
def _(folder: Path) -> Path:
    with zipfile.ZipFile(folder / "ckpt.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * 100_000_000)
    return folder


@crafted("zip: a path out of its folder")
def _(folder: Path) -> Path:
    return zip_of(folder, b"}", **{"../../executed": b"x"})


@crafted("zip: a record twice")
def _(folder: Path) -> Path:
    path = zip_of(folder, b"}", **{"data/0": b"1234"})
    with pytest.warns(UserWarning), zipfile.ZipFile(path, "a") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}.")
    return path


@crafted("zip: a hundred thousand records")
def _(folder: Path) -> Path:
    with zipfile.ZipFile(folder / "ckpt.pt", "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}.")
        entry = archive.infolist()[0]
        archive.filelist.extend([entry] * 100_000)  # records that share their bytes
    return folder


@crafted("zip: records that overlap")
def _(folder: Path) -> Path:
    with zipfile.ZipFile(folder / "ckpt.pt", "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}." + b" " * 10_000)
        for number in range(20):
            entry = zipfile.ZipInfo(f"archive/data/{number}")
            entry.file_size = entry.compress_size = 10_000
            entry.header_offset = entry.CRC = 0
            archive.filelist.append(entry)
    return folder


@crafted("zip: a size past the end")
def _(folder: Path) -> Path:
    with zipfile.ZipFile(folder / "ckpt.pt", "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}.")
        archive.infolist()[0].file_size = archive.infolist()[0].compress_size = 1 << 31
    return folder


@crafted("zip: of something else")
def _(folder: Path) -> Path:
    with zipfile.ZipFile(folder / "ckpt.pt", "w") as archive:
        archive.writestr("word/document.xml", b"<x/>")
    return folder


@crafted("zip: big endian")
def _(folder: Path) -> Path:
    return zip_of(folder, b"}", byteorder=b"big")


def cut(folder: Path, make: Craft, part: float) -> Path:
    path = make(folder)
    data = path.read_bytes()
    path.write_bytes(data[: int(part * len(data))])
    return path


def ckpt_of(folder: Path, data: bytes) -> Path:
    (folder / "ckpt.pt").write_bytes(data)
    return folder


for _part in (0.01, 0.5, 0.99):
    craft(f"zip: cut at {_part}", cut, valid_zip, _part)
OTHER_BYTES = {"empty": b"", "of zeros": b"\0" * 4096, "of noise": random.Random(0).randbytes(100_000)}
for _name, _data in OTHER_BYTES.items():
    craft(f"a file {_name}", ckpt_of, _data)


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
