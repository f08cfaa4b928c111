"""Crafted files that attack a reader, and files that are not checkpoints.

`FILES` has functions that write such a file into a folder and return the path to open. `METADATA` has functions that
convert the bytes of a real `.metadata` to a crafted one. A payload that runs makes the file `executed` in the current
folder.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import struct
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, ChunkStorageMetadata, MetadataIndex

from tests.megatron.gpt2.formats.sample_checkpoints import (
    nanogpt_checkpoint,
    random_weights,
    write_huggingface,
    write_megatron,
)

FILES: dict[str, Callable[[Path], Path]] = {}
METADATA: dict[str, Callable[[bytes], bytes]] = {}
TOUCH = "touch executed"


# --- calls, in every format that holds a pickle, in both containers


class Call:
    """Pickles to a call of `function`."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


EVIL = Call(os.system, TOUCH)
PAYLOADS = {
    "eval": Call(eval, "open('executed', 'w')"),
    "open": Call(open, "executed", "w"),
    "getattr": Call(getattr, "a", "upper"),
    "torch.load": Call(torch.load, "executed"),
    "numpy.save": Call(np.save, "executed", 0),
    "bytearray": Call(bytearray, 10**11),
    "touch": Call(Path.touch, Path("executed")),
}


def with_payload(form: str, evil: Call, legacy: bool, folder: Path) -> Path:
    file, held = {
        "deepspeed": ("mp_rank_00_model_states.pt", {"module": evil, "iteration": 7}),
        "nanogpt": ("ckpt.pt", {**nanogpt_checkpoint()[0], "config": evil}),
        "huggingface": ("pytorch_model.bin", {"transformer.wte.weight": torch.ones(101, 48), "x": evil}),
    }.get(form, ("", {}))
    if not file:
        return write_megatron(folder, random_weights(), form, legacy=legacy, evil=evil)
    if form == "huggingface":
        write_huggingface(folder)
        (folder / "model.safetensors").unlink()
    torch.save(held, folder / file, _use_new_zipfile_serialization=not legacy)
    return folder


def with_file(name: str, data: bytes, folder: Path) -> Path:
    """A Hugging Face model with one file replaced, or a folder with only this file."""
    if name in ("config.json", "model.safetensors"):
        write_huggingface(folder)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(data)
    return folder


for _form in ("flat", "v2", "fused", "deepspeed", "nanogpt", "huggingface"):
    for _legacy in (False, True):
        FILES[f"{_form} calls os.system, {'legacy' if _legacy else 'zip'}"] = partial(
            with_payload, _form, EVIL, _legacy
        )
for _payload, _call in PAYLOADS.items():
    FILES[f"flat calls {_payload}"] = partial(with_payload, "flat", _call, False)
for _file in ("iter_0000001/manifest.json", "model.safetensors", "config.json", "ckpt.pt"):
    FILES[f"a pickle instead of {_file}"] = partial(with_file, _file, pickle.dumps(EVIL, 2))


# --- streams of instructions, as ckpt.pt; each builds an object


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def call(module: str, name: str, args: bytes) -> bytes:
    return f"c{module}\n{name}\n".encode() + args + b"R"


def storage(kind: str = "Float", numel: bytes = b"K\x04", key: bytes = text("0"), end: bytes = b"") -> bytes:
    return b"(" + text("storage") + f"ctorch\n{kind}Storage\n".encode() + key + text("cpu") + numel + end + b"tQ"


def tensor(of: bytes, offset: bytes = b"K\x00", shape: bytes = b"K\x04\x85", stride: bytes = b"K\x01\x85") -> bytes:
    return call("torch._utils", "_rebuild_tensor_v2", b"(" + of + offset + shape + stride + b"\x89Nt")


def zip_of(instructions: bytes, folder: Path, **records: bytes) -> Path:
    path = folder / "ckpt.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + instructions + b".")
        for name, data in {"byteorder": b"little", "data/0": b"\0" * 16, **records}.items():
            archive.writestr(f"archive/{name}", data)
    return path


def legacy_of(instructions: bytes, keys: bytes, after: bytes, folder: Path) -> Path:
    path = folder / "ckpt.pt"
    path.write_bytes(MAGIC + SYSTEM + b"\x80\x02" + instructions + b"." + keys + after)
    return path


MAGIC = pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2)
SYSTEM = pickle.dumps({"protocol_version": 1001, "little_endian": True, "type_sizes": {}}, 2)
ONE_KEY, FOUR = pickle.dumps(["0"], 2), struct.pack("<q", 4) + b"\0" * 16
DEEP = 80_000
LONG = b"\x8a\x08" + struct.pack("<q", 1 << 45)
DOUBLED = b"K\x01" + b"".join(b"q" + bytes([i]) + b"h" + bytes([i]) + b"\x86" for i in range(60))  # 2**60 leaves
SAID = {"n_layer": 1, "n_embd": 8, "n_head": 1, "block_size": 8, "vocab_size": 9}
# Valid data that are not a checkpoint.
WELL_FORMED = {
    "nested deeply": b"]" * DEEP + b"a" * (DEEP - 1),
    "nested deeply in dictionaries": b"}" + b"K\x01}" * DEEP + b"s" * DEEP,
    "protocol 4": pickle.dumps({"model": 1}, 4)[2:-1],
    "a number instead of a checkpoint": b"K\x07",
    "weights that are numbers": pickle.dumps({"model": {"wte": 1}, "model_args": SAID}, 2)[2:-1],
    "sizes that take years to print": b"}("
    + text("model")
    + b"}"
    + text("model_args")
    + b"}("
    + text("n_layer")
    + DOUBLED
    + b"uu",
}
STREAMS = {
    "a key that takes years to hash": b"}" + DOUBLED + b"Ns",
    "a storage's key that takes years to hash": tensor(storage(key=DOUBLED)),
    "a dictionary's key nested deeply": b"}" + b")" + b"\x85" * DEEP + b"Ns",
    "a string longer than the file": b"X" + struct.pack("<I", 2**32 - 1) + b"abc",
    "a string that is no UTF-8": b"X" + struct.pack("<I", 2) + b"\xff\xfe",
    "an empty stack": b"a",
    "no mark": b"t",
    "a memo that nobody filled": b"h\x07",
    "an unknown instruction": b"\xff",
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
    "a tensor of a thousand dimensions": tensor(storage(), b"K\0", *(b"(" + b"K\x01" * 1000 + b"t",) * 2),
    "a tensor of no storage": tensor(b"N"),
    "a tensor with too few arguments": call("torch._utils", "_rebuild_tensor_v2", b"(" + storage() + b"t"),
    "another type's memory": call("torch._utils", "_rebuild_wrapper_subclass", b")"),
    "a class with attributes": call("torch._tensor", "_rebuild_from_type_v2", b"(cos\nsystem\n)))t"),
    "nothing": b"",
}
for _name, _stream in {**STREAMS, **WELL_FORMED}.items():
    FILES[f"zip: {_name}"] = partial(zip_of, _stream)
for _name in (
    "a storage of 2**45 elements",
    "a tensor past its storage",
    "a key that takes years to hash",
    "a string longer than the file",
    "too many instructions",
    "a storage's key that takes years to hash",
):
    FILES[f"legacy: {_name}"] = partial(legacy_of, STREAMS[_name].replace(b"K\x04tQ", b"K\x04NtQ"), ONE_KEY, FOUR)
GOOD_LEGACY = tensor(storage(end=b"N"))
# Records of 100 MB each, in a file of 400 KB.
THOUSANDS = b"".join(tensor(storage(numel=b"J\0\0\x80\x01", end=b"N", key=text(str(i)))) for i in range(2000))
FILES |= {
    f"legacy: {_name}": partial(legacy_of, _stream, _keys, _after)
    for _name, _stream, _keys, _after in (
        ("a key of a storage that takes years to hash", GOOD_LEGACY, b"\x80\x02]" + DOUBLED + b"a.", FOUR),
        ("no key", GOOD_LEGACY, pickle.dumps([], 2), FOUR),
        ("a key twice", GOOD_LEGACY, pickle.dumps(["0", "0"], 2), FOUR * 2),
        ("another key", GOOD_LEGACY, pickle.dumps(["1"], 2), FOUR),
        ("a storage cut short", GOOD_LEGACY, ONE_KEY, FOUR[:-1]),
        ("no storage", GOOD_LEGACY, ONE_KEY, b""),
        ("another length", GOOD_LEGACY, ONE_KEY, struct.pack("<q", 5) + b"\0" * 20),
        ("thousands of storages", b"](" + THOUSANDS + b"e", pickle.dumps(list(map(str, range(2000))), 2), b""),
    )
}
FILES["legacy: big endian"] = partial(
    with_file, "ckpt.pt", MAGIC + pickle.dumps({"little_endian": False}, 2) + pickle.dumps({}, 2)
)


# --- zip files


def valid_zip(folder: Path) -> Path:
    torch.save(nanogpt_checkpoint()[0], folder / "ckpt.pt")
    return folder / "ckpt.pt"


def zip_with(change: Callable[[zipfile.ZipFile], object], folder: Path) -> Path:
    """A zip file with one record and a changed list of records."""
    with zipfile.ZipFile(folder / "ckpt.pt", "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}." + b" " * 10_000)
        change(archive)
    return folder


def a_record_twice(archive: zipfile.ZipFile) -> None:
    with pytest.warns(UserWarning):
        archive.writestr("archive/data.pkl", b"\x80\x02}.")


def records_that_overlap(archive: zipfile.ZipFile) -> None:
    for number in range(20):
        entry = zipfile.ZipInfo(f"archive/data/{number}")
        entry.file_size = entry.compress_size = 10_000
        entry.header_offset = entry.CRC = 0
        archive.filelist.append(entry)


def a_size_past_the_end(archive: zipfile.ZipFile) -> None:
    archive.infolist()[0].file_size = archive.infolist()[0].compress_size = 1 << 31


def cut(make: Callable[[Path], Path], file: str, part: float, folder: Path) -> Path:
    make(folder)
    data = (folder / file).read_bytes()
    (folder / file).write_bytes(data[: int(part * len(data))])
    return folder


FILES |= {
    "zip: a bomb": partial(
        zip_with, lambda archive: archive.writestr("archive/x", b"\0" * 10**8, zipfile.ZIP_DEFLATED)
    ),
    "zip: a record twice": partial(zip_with, a_record_twice),
    # Records with overlapping bytes.
    "zip: a hundred thousand records": partial(
        zip_with, lambda archive: archive.filelist.extend(archive.filelist * 10**5)
    ),
    "zip: records that overlap": partial(zip_with, records_that_overlap),
    "zip: a size past the end": partial(zip_with, a_size_past_the_end),
    "zip: big endian": partial(zip_of, b"}", byteorder=b"big"),
}
OTHER_BYTES = {"empty": b"", "of zeros": b"\0" * 4096, "of noise": random.Random(0).randbytes(100_000)}
for _name, _data in OTHER_BYTES.items():
    FILES[f"a file {_name}"] = partial(with_file, "ckpt.pt", _data)
    FILES[f"safetensors: a file {_name}"] = partial(with_file, "model.safetensors", _data)
for _part in (0.01, 0.5, 0.99):
    FILES[f"zip: cut at {_part}"] = partial(cut, valid_zip, "ckpt.pt", _part)
    FILES[f"safetensors: cut at {_part}"] = partial(cut, write_huggingface, "model.safetensors", _part)


# --- Hugging Face's files


def with_config(config: dict[str, Any], folder: Path) -> Path:
    return write_huggingface(folder, **config)


CONFIGS: tuple[dict[str, Any], ...] = (
    *({"n_layer": value} for value in (10**6, 2**31, 10**30, "4", 3.5, None)),
    *({"n_head": value} for value in (0, -4, True)),
    {"n_embd": 10**9, "n_head": 10**9},
    {"vocab_size": 2**31},
    {"n_positions": 2**31},
    {"n_embd": [48]},
    {"layer_norm_epsilon": float("inf")},
    {"layer_norm_epsilon": float("nan")},
    {"attn_pdrop": 2},
    {"activation_function": [["gelu"]]},
    {"n_inner": 2**31},
    {"model_type": {"gpt2": 1}},
)
for _config in CONFIGS:
    FILES[f"config.json: {_config}"] = partial(with_config, _config)
for _name, _data in {
    "nested deeply": b"[" * 10**6,
    "objects nested deeply": b'{"a":' * 10**6,
    "no object": b"[]",
    "a key twice": b'{"model_type": "gpt2", "model_type": "gpt2"}',
    "empty": b"{}",
    "a number of a million digits": b'{"n_layer": ' + b"9" * 10**6 + b"}",
    "50 MB": b" " * 50_000_000,
    "no UTF-8": b'{"\xff": 1}',
}.items():
    FILES[f"config.json: {_name}"] = partial(with_file, "config.json", _data)


def header_of(length: int, header: bytes) -> bytes:
    return struct.pack("<Q", length or len(header)) + header + b"\0" * 64


def entry(shape: str = "[4,4]", offsets: str = "[0,64]", kind: str = "F32") -> bytes:
    return f'"wte.weight":{{"dtype":"{kind}","shape":{shape},"data_offsets":{offsets}}}'.encode()


EMPTY = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
for _name, _data in {
    "a key twice": b"{" + entry() + b"," + entry() + b"}",
    "a header of 40 MB": b" " * 40_000_000,
    "25,000 empty tensors": json.dumps({f"t{i}": EMPTY for i in range(25_000)}).encode(),
    "a header nested deeply": b"[" * 10**6,
    "offsets past the end": b"{" + entry("[8,4]", "[0,128]") + b"}",
    "a shape that is not the size": b"{" + entry("[1099511627776]") + b"}",
    "a shape of 2**64": b"{" + entry("[4294967296,4294967296]", "[0,0]") + b"}",
    "negative offsets": b"{" + entry(offsets="[-64,0]") + b"}",
    "an unknown type": b"{" + entry(kind="F31") + b"}",
    "no tensors": b"{}",
}.items():
    FILES[f"safetensors: {_name}"] = partial(with_file, "model.safetensors", header_of(0, _data))
FILES["safetensors: a header of 2**63 bytes"] = partial(with_file, "model.safetensors", header_of(2**63, b"{}"))


def with_index(weight_map: Any, folder: Path) -> Path:
    write_huggingface(folder)
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


for _index in ("../model.safetensors", "/etc/passwd", "pytorch_model.bin", 7, "", "a/b.safetensors", "2.safetensors"):
    FILES[f"index: {_index!r}"] = partial(with_index, {"transformer.wte.weight": _index})
FILES["index: of no object"] = partial(with_index, [1])
FILES["index: of other names"] = partial(with_index, {"x": "model-1.safetensors"})


# --- Megatron's dictionaries


def with_top(change: Callable[[dict[str, Any]], object], folder: Path) -> Path:
    write_megatron(folder, random_weights(), "v2", version=3)
    file = folder / "iter_0000007/mp_rank_00/model_optim_rng.pt"
    top = torch.load(file, weights_only=False)
    change(top)
    torch.save(top, file)
    return folder


def with_tensor(name: str, value: torch.Tensor) -> Callable[[dict[str, Any]], object]:
    return lambda top: top["model"]["language_model"]["encoder"].update({name: value})


def without_a_layer(top: dict[str, Any]) -> None:
    encoder = top["model"]["language_model"]["encoder"]
    for name in [name for name in encoder if name.startswith("layers.1.")]:
        del encoder[name]


def fan(width: int, depth: int) -> dict[str, Any]:
    """Nested dictionaries with width**depth names, made of only `depth` small dictionaries."""
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
    "a model of a million names": lambda top: top.update(model={"language_model": fan(16, 5)}),
    "a layer that is missing": without_a_layer,
    "a layer of number 10**9": with_tensor("layers.1000000000.input_layernorm.weight", torch.ones(48)),
    "another shape": with_tensor("layers.1.mlp.dense_4h_to_h.weight", torch.ones(48, 81)),
    "integers for weights": with_tensor("final_layernorm.weight", torch.ones(48, dtype=torch.int64)),
    "a name twice": lambda top: top["model"].update({"transformer.final_layernorm.bias": torch.ones(48)}),
    "heads that are a text": lambda top: setattr(top["args"], "num_attention_heads", "4"),
    "heads without end": lambda top: setattr(top["args"], "num_attention_heads", 10**18),
}
for _name, _top in TOPS.items():
    FILES[f"megatron: {_name}"] = partial(with_top, _top)


def ranks_up_to_999(folder: Path) -> Path:
    write_megatron(folder, random_weights(), "v2", version=3)
    (folder / "iter_0000007/mp_rank_00").rename(folder / "iter_0000007/mp_rank_999")
    return folder


def a_tracker_that_leads_out(folder: Path) -> Path:
    write_megatron(folder / "inner/there", random_weights(), "v2", version=3)
    (folder / "inner/there").rename(folder / "there")
    (folder / "inner/latest_checkpointed_iteration.txt").write_text("../there")
    return folder / "inner"


FILES |= {function.__name__: function for function in (ranks_up_to_999, a_tracker_that_leads_out)}


# --- streams of instructions as .metadata


def named(thing: str) -> bytes:
    return b"".join(b"\x8c" + bytes([len(part)]) + part.encode() for part in thing.rpartition(".")[::2]) + b"\x93"


# Functions with side effects, called in every way that pickle has.
ACTING = (
    "os.system",
    "posix.system",
    "subprocess.check_call",
    "builtins.eval",
    "builtins.open",
    "builtins.__import__",
    "builtins.getattr",
    "builtins.bytearray",
    "shutil.rmtree",
    "pathlib.Path.touch",
    "pathlib.Path",
    "torch.load",
    "torch.save",
    "functools.partial",
    "torch._utils._rebuild_tensor_v2",
    "torch.FloatStorage",
    "argparse.Namespace",
    "torch.distributed.checkpoint.metadata.os.system",
    "torch.distributed.checkpoint.metadata.Metadata.__init__",
    "torch.serialization._get_layout.x",
    "megatron.core.dist_checkpointing.strategies.torch.pickle",
    "_codecs.encode",
)
ARGS = b"(" + text(TOUCH) + b"t"
SIZE, INDEX = named("torch.Size"), named("torch.distributed.checkpoint.metadata.MetadataIndex")
META_STREAMS = {
    f"{_thing} {_way}": _stream
    for _thing in ACTING
    for _way, _stream in {
        "called": named(_thing) + ARGS + b"R",
        "as a class": named(_thing) + ARGS + b"\x81",
        "with a state": named(_thing) + b")\x81}" + text("x") + b"K\x01sb",
        "by a line": "c{}\n{}\n".format(*_thing.rpartition(".")[::2]).encode() + ARGS + b"R",
        "as a key": b"}" + named(_thing) + ARGS + b"RK\x01s",
    }.items()
} | {
    "a number": b"K\x07",
    "a tuple as a key": b"})Ns",
    "nothing to keep": b"\x94",
    "nothing that was kept, far": b"j\xff\xff\xff\xff",
    "kept under a large number": b"Nr\xff\xff\xff\x7f",
    "a string of 2**60 bytes": b"\x8d" + struct.pack("<Q", 1 << 60) + b"abc",
    "a bytearray of 2**60 bytes": b"\x96" + struct.pack("<Q", 1 << 60),
    "a frame of 2**60 bytes": b"\x95" + struct.pack("<Q", 1 << 60),
    "a number of 2**31 bytes": b"\x8b" + struct.pack("<I", 2**31 - 1),
    "a set": b"\x8f",
    "keyword arguments": SIZE + b")}\x92",
    "an extension": b"\x82\x01",
    "a persistent id": b"K\x01Q",
    "an instance by a line": b"(S'touch x'\nios\nsystem\n",
    "a name of numbers": b"K\x01K\x02\x93",
    "a name of long strings": (b"X" + struct.pack("<I", 10**6) + b"a" * 10**6) * 2 + b"\x93",
    "a call of a dictionary": b"}\x94h\x00)R",
    "a state for a number": b"K\x01K\x02b",
    "a class's key that takes years to hash": b"}" + SIZE + DOUBLED + b"\x85R\x94h\xffNs",
    "nested deeply in tuples": b")" + b"\x85" * 100_000,
    "a deep state": (SIZE + b")\x81") * 30_000 + b"b" * 29_999,
    "too many instructions": b"K\x01" * 3_000_000,
    "too many lists": b"]" * 3_000_000,
    "too many dictionaries of one": b"}K\x01K\x01s" * 600_000,
    "too many objects": SIZE + b"\x94" + b"h\x00)\x81" * 600_000,
    "too many states": SIZE + b"\x94" + b"h\x00)\x81}K\x01K\x01sb" * 300_000,
    "too much kept": b"N" + b"\x94" * 3_000_000,
    "too many strings": b"\x8c\x08abcdefgh" * 800_000,
    "too many fractions": b"G" * 5_000_000,
    "too many names": b"".join(named(f"torch.Size{i}") for i in range(100)),
    "a name too often": SIZE * 200_000,
    "a long list in many": b"](" + b"N" * 50_000 + b"e\x94" + (SIZE + b"h\x00\x85R") * 50_000,
    "an index without a name": b"}" + INDEX + b")\x81Ns",
}
OTHER_METADATA = {
    **{_name: b"\x80\x04" + _stream + b"." for _name, _stream in META_STREAMS.items()},
    "of zeros": bytes(100_000),
    "of noise": random.Random(0).randbytes(100_000),
    "of 17 MB": bytes(17 << 20),
}
for _name, _data in OTHER_METADATA.items():
    METADATA[_name] = lambda genuine, data=_data: data  # type: ignore[misc]
for _part in range(20):
    METADATA[f"cut after {_part} of 20 parts"] = lambda genuine, part=_part: genuine[: part * len(genuine) // 20]  # type: ignore[misc]


# --- genuine .metadata in which one thing was changed

WORD_EMBEDDINGS = "embedding.word_embeddings.weight"
# Arguments: the metadata, the index of a box of the word embeddings, and the entry of this tensor.
Change = Callable[[Any, MetadataIndex, Any], object]


def changed(change: Change, genuine: bytes) -> bytes:
    held = pickle.loads(genuine)
    index = next(key for key in held.storage_data if key.fqn == WORD_EMBEDDINGS)
    change(held, index, held.state_dict_metadata[WORD_EMBEDDINGS])
    return pickle.dumps(held, 4)


def boxes(shapes: Mapping[Any, tuple[int, ...]], size: tuple[int, ...]) -> Change:
    """A tensor of `size` with the boxes {offset: shape}, which all have the same region of the file."""

    def change(held: Any, index: MetadataIndex, entry: Any) -> None:
        entry.size, info = torch.Size(size), held.storage_data.pop(index)
        entry.chunks = [ChunkStorageMetadata(torch.Size(offset), torch.Size(shape)) for offset, shape in shapes.items()]
        held.storage_data |= {MetadataIndex(WORD_EMBEDDINGS, offset): info for offset in shapes}

    return change


def another_model(held: Any, index: MetadataIndex, entry: Any) -> None:
    held.state_dict_metadata["model.layers.0.q_proj"] = entry
    held.storage_data[MetadataIndex("model.layers.0.q_proj", index.offset)] = held.storage_data[index]


def compressed(held: Any, index: MetadataIndex, entry: Any) -> None:
    for info in held.storage_data.values():
        info.transform_descriptors = ["zstd"]


N = 2000
CROSSING = {(0, i, 0): (N - i, 1, 2) for i in range(N)} | {(N - i, i, 0): (i, 1, 2) for i in range(1, N)}
CHANGES: dict[str, Change] = {
    "a box twice": lambda held, index, entry: entry.chunks.extend(list(entry.chunks)),
    "no box": lambda held, index, entry: entry.chunks.clear(),
    "a box that lies nowhere": lambda held, index, entry: held.storage_data.pop(index),
    "an object that lies nowhere": lambda held, index, entry: held.state_dict_metadata.update(x=BytesStorageMetadata()),
    "an object in the place of a tensor": lambda held, index, entry: held.state_dict_metadata.update(
        {WORD_EMBEDDINGS: BytesStorageMetadata()}
    ),
    "a name that is none": lambda held, index, entry: held.state_dict_metadata.update({7: entry}),
    "a long name": lambda held, index, entry: held.state_dict_metadata.update({"a" * 100_000: entry}),
    "a number for a tensor": lambda held, index, entry: held.state_dict_metadata.update({WORD_EMBEDDINGS: 7}),
    "a number for a place": lambda held, index, entry: held.storage_data.update({index: 7}),
    "a name for an index": lambda held, index, entry: held.storage_data.update(
        {WORD_EMBEDDINGS: held.storage_data.pop(index)}
    ),
    "compressed files": compressed,
    "twenty thousand boxes in one place": boxes({(i, 0): (1, 8) for i in range(20_000)}, (20_000, 8)),
    "boxes that cross each other": boxes(CROSSING, (N, N, 2)),
    "a tensor of another model": another_model,
}
FILE_NAMES = ("../../etc/passwd", "/etc/passwd", "..", ".", "", ".metadata", "a/b", "a\0b", "gone.distcp", 7, "a\nb")
for _value in FILE_NAMES:
    CHANGES[f"a box in the file {_value!r}"] = lambda held, index, entry, value=_value: setattr(  # type: ignore[misc]
        held.storage_data[index], "relative_path", value
    )
PLACES = ((-1, 100), (1 << 40, 100), (0, 1 << 40), (0, 0), (0.5, 100), (1 << 70, 100), (13, 400), ("0", 100), (True, 9))
for _place in PLACES:
    CHANGES[f"a box at {_place}"] = lambda held, index, entry, place=_place: held.storage_data[index].__dict__.update(  # type: ignore[misc]
        offset=place[0], length=place[1]
    )
ROWS = (1 << 40, 33, 31, 0)
SIZES = (*((rows, 8) for rows in ROWS), (1 << 30, 1 << 30), (256,), (32, 8, 1), (1,) * 100, (8, 32))
for _size in (*map(torch.Size, SIZES), None, [32, 8], (32, 8)):
    CHANGES[f"a tensor of {_size!r}"] = lambda held, index, entry, size=_size: setattr(entry, "size", size)  # type: ignore[misc]
    CHANGES[f"a part of {_size!r}"] = lambda held, index, entry, size=_size: setattr(entry.chunks[0], "sizes", size)  # type: ignore[misc]
for _dtype in (torch.int64, "torch.float32", torch.complex64):
    CHANGES[f"a tensor of {_dtype!r}"] = lambda held, index, entry, dtype=_dtype: setattr(  # type: ignore[misc]
        entry.properties, "dtype", dtype
    )
for _field in ("state_dict_metadata", "storage_data"):
    for _nothing in (None, (), "", 7):
        CHANGES[f"{_nothing!r} for {_field}"] = lambda held, index, entry, field=_field, value=_nothing: setattr(  # type: ignore[misc]
            held, field, value
        )
for _name, _change in CHANGES.items():
    METADATA[f"changed: {_name}"] = partial(changed, _change)
