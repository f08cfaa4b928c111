"""Files `.metadata` of a DCP folder that were made to do harm: `CRAFTED` holds what gives the bytes of each, by name.

Each function gets the bytes of a genuine file and the path that a payload would make.
"""

from __future__ import annotations

import dataclasses
import pickle
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)

Craft = Callable[[bytes, Path], bytes]
CRAFTED: dict[str, Craft] = {}
BEGIN, END = b"\x80\x04", b"."


def text(value: str) -> bytes:
    data = value.encode()
    return b"\x8c" + bytes([len(data)]) + data


def name(module: str, thing: str) -> bytes:
    return text(module) + text(thing) + b"\x93"


# Payloads: names that act when they are called, in every way in which a pickle calls.
ACTING = (
    "os.system",
    "posix.system",
    "subprocess.check_call",
    "builtins.eval",
    "builtins.exec",
    "builtins.open",
    "builtins.__import__",
    "builtins.getattr",
    "builtins.bytearray",
    "shutil.rmtree",
    "pathlib.Path.touch",
    "pathlib.Path",
    "torch.load",
    "torch.hub.load",
    "torch.save",
    "numpy.save",
    "functools.partial",
    "operator.attrgetter",
    "torch._utils._rebuild_tensor_v2",
    "torch.FloatStorage",
    "argparse.Namespace",
    "torch.distributed.checkpoint.metadata.os.system",
    "torch.distributed.checkpoint.filesystem.FileSystem",
    "torch.distributed.checkpoint.metadata.Metadata.__init__",
    "torch.serialization._get_layout.x",
    "megatron.core.dist_checkpointing.strategies.torch.pickle",
    "_codecs.encode",
    "codecs.decode",
)


def calls(thing: str, marker: Path) -> dict[str, bytes]:
    module, _, last = thing.rpartition(".")
    args = b"(" + text(f"touch {marker}") + b"t"
    named = name(module, last)
    return {
        "called": named + args + b"R",
        "as a class": named + args + b"\x81",
        "with a state": named + b")\x81}" + text("x") + b"K\x01sb",
        "by a line": f"c{module}\n{last}\n".encode() + args + b"R",
        "as a key": b"}" + named + args + b"RK\x01s",
    }


for _thing in ACTING:
    for _way in ("called", "as a class", "with a state", "by a line", "as a key"):
        CRAFTED[f"{_thing} {_way}"] = lambda data, marker, thing=_thing, way=_way: (
            BEGIN + calls(thing, marker)[way] + END
        )  # type: ignore[misc]


# Streams of instructions, besides those of crafted_files.py, which the same machine reads.
SIZE = name("torch", "Size")
INDEX = name("torch.distributed.checkpoint.metadata", "MetadataIndex")
# A tuple of 2**60 leaves.
DOUBLED = b"K\x01\x94" + b"".join(b"h" + bytes([i]) + b"h" + bytes([i]) + b"\x86\x94" for i in range(60))
DEEP = 100_000
STREAMS: dict[str, bytes] = {
    "a number": b"K\x07",
    "a class's key that takes years to hash": b"}" + SIZE + DOUBLED + b"\x85R\x94h\xffNs",
    "a tuple as a key": b"})Ns",
    "nothing to keep": b"\x94",
    "nothing that was kept": b"h\x07",
    "nothing that was kept, far": b"j\xff\xff\xff\xff",
    "kept under a number": b"Nq\x00",
    "kept under a large number": b"Nr\xff\xff\xff\x7f",
    "a string of 2**60 bytes": b"\x8d" + struct.pack("<Q", 1 << 60) + b"abc",
    "bytes of 2**60 bytes": b"\x8e" + struct.pack("<Q", 1 << 60) + b"abc",
    "a bytearray of 2**60 bytes": b"\x96" + struct.pack("<Q", 1 << 60),
    "a frame of 2**60 bytes": b"\x95" + struct.pack("<Q", 1 << 60),
    "a number of 2**31 bytes": b"\x8b" + struct.pack("<I", 2**31 - 1),
    "a set": b"\x8f",
    "a frozen set": b"(\x91",
    "keyword arguments": SIZE + b")}\x92",
    "an extension": b"\x82\x01",
    "a persistent id": b"K\x01Q",
    "a persistent name": b"Pabc\n",
    "an instance by a line": b"(S'touch x'\nios\nsystem\n",
    "a buffer out of band": b"\x97",
    "the last item taken away": b"N0N",
    "a name of numbers": b"K\x01K\x02\x93",
    "a name of long strings": (b"X" + struct.pack("<I", 10**6) + b"a" * 10**6) * 2 + b"\x93",
    "a call of a dictionary": b"}\x94h\x00)R",
    "a state for a number": b"K\x01K\x02b",
    "nested deeply in tuples": b")" + b"\x85" * DEEP,
    "a deep state": (SIZE + b")\x81") * 30_000 + b"b" * 29_999,
    "too many instructions": b"K\x01" * 3_000_000,
    "too many things": b"N" * 3_000_000,
    "too many lists": b"]" * 3_000_000,
    "too many dictionaries": b"}" * 3_000_000,
    "too many dictionaries of one": b"}K\x01K\x01s" * 600_000,
    "too many objects": SIZE + b"\x94" + b"h\x00)\x81" * 600_000,
    "too many states": SIZE + b"\x94" + b"h\x00)\x81}K\x01K\x01sb" * 300_000,
    "too much kept": b"N" + b"\x94" * 3_000_000,
    "too many strings": b"\x8c\x08abcdefgh" * 800_000,
    "too many numbers": b"J\xff\xff\xff\x00" * 800_000,
    "too many fractions": b"G" * 5_000_000,
    "too many names": b"".join(name("torch", f"Size{i}") for i in range(100)),
    "a name too often": SIZE * 200_000,
    "a long list in many": b"](" + b"N" * 50_000 + b"e\x94" + (SIZE + b"h\x00\x85R") * 50_000,
    "an index without a name": b"}" + INDEX + b")\x81Ns",
}
for _name, _stream in STREAMS.items():
    CRAFTED[f"stream: {_name}"] = lambda data, marker, stream=_stream: BEGIN + stream + END  # type: ignore[misc]


# Genuine files in which one thing was changed.


def changed(title: str) -> Callable[[Callable[[Any, MetadataIndex, str], Any]], Any]:
    """The function changes the metadata, given the index of a box and the name of its tensor, or gives another."""

    def keep(change: Callable[[Any, MetadataIndex, str], Any]) -> Any:
        def craft(data: bytes, marker: Path) -> bytes:
            held = pickle.loads(data)
            index = next(key for key in held.storage_data if key.fqn == "embedding.word_embeddings.weight")
            other = change(held, index, index.fqn)
            return pickle.dumps(held if other is None else other, 4)

        CRAFTED[f"changed: {title}"] = craft
        return change

    return keep


FILES = (
    "../../etc/passwd",
    "/etc/passwd",
    "..",
    ".",
    "",
    ".metadata",
    "a/b.distcp",
    "a\0b",
    "missing.distcp",
    7,
    None,
    "é.distcp",
    "a\nb",
)
INFOS = {
    "before the file": (-1, 100),
    "past the file": (1 << 40, 100),
    "too long": (0, 1 << 40),
    "of no length": (0, 0),
    "at a fraction": (0.5, 100),
    "at the end of numbers": (1 << 70, 100),
    "in the middle": (13, 400),
    "of some bytes": (0, 40),
    "at a string": ("0", 100),
    "at True": (True, 100),
}
for _file in FILES:

    @changed(f"a box in the file {_file!r}")
    def _(held: Any, index: MetadataIndex, fqn: str, file: Any = _file) -> None:
        held.storage_data[index].relative_path = file


for _title, _info in INFOS.items():

    @changed(f"a box {_title}")
    def _(held: Any, index: MetadataIndex, fqn: str, info: Any = _info) -> None:
        held.storage_data[index].offset, held.storage_data[index].length = info


SIZES: dict[str, Any] = {
    "of 2**40 rows": torch.Size((1 << 40, 8)),
    "of 2**60 entries": torch.Size((1 << 30, 1 << 30)),
    "of one row more": torch.Size((33, 8)),
    "of one row less": torch.Size((31, 8)),
    "of no rows": torch.Size((0, 8)),
    "of one dimension": torch.Size((256,)),
    "of three dimensions": torch.Size((32, 8, 1)),
    "of a hundred dimensions": torch.Size((1,) * 100),
    "of no size": None,
    "of a list": [32, 8],
    "of a tuple": (32, 8),
    "transposed": torch.Size((8, 32)),
}
for _title, _size in SIZES.items():

    @changed(f"a tensor {_title}")
    def _(held: Any, index: MetadataIndex, fqn: str, size: Any = _size) -> None:
        held.state_dict_metadata[fqn].size = size

    @changed(f"a part {_title}")
    def _(held: Any, index: MetadataIndex, fqn: str, size: Any = _size) -> None:
        held.state_dict_metadata[fqn].chunks[0].sizes = size


CHANGES: dict[str, Callable[[Any, MetadataIndex, str], object]] = {
    "a box twice": lambda held, index, fqn: held.state_dict_metadata[fqn].chunks.extend(
        list(held.state_dict_metadata[fqn].chunks)
    ),
    "no box": lambda held, index, fqn: held.state_dict_metadata[fqn].chunks.clear(),
    "a box that lies nowhere": lambda held, index, fqn: held.storage_data.pop(index),
    "an object that lies nowhere": lambda held, index, fqn: held.state_dict_metadata.update(
        nowhere=BytesStorageMetadata()
    ),
    "an object in the place of a tensor": lambda held, index, fqn: held.state_dict_metadata.update(
        {fqn: BytesStorageMetadata()}
    ),
    "a name that is none": lambda held, index, fqn: held.state_dict_metadata.update({7: held.state_dict_metadata[fqn]}),
    "a long name": lambda held, index, fqn: held.state_dict_metadata.update(
        {"a" * 100_000: held.state_dict_metadata[fqn]}
    ),
    "a number for a tensor": lambda held, index, fqn: held.state_dict_metadata.update({fqn: 7}),
    "a number for a place": lambda held, index, fqn: held.storage_data.update({index: 7}),
    "a name for an index": lambda held, index, fqn: held.storage_data.update({fqn: held.storage_data.pop(index)}),
}
for _dtype in (torch.int64, "torch.float32", torch.complex64):
    CHANGES[f"a tensor of {_dtype}"] = lambda held, index, fqn, dtype=_dtype: setattr(  # type: ignore[misc]
        held.state_dict_metadata[fqn].properties, "dtype", dtype
    )
for _field in ("state_dict_metadata", "storage_data"):
    for _nothing in (None, (), "", 7):
        CHANGES[f"{_nothing!r} for {_field}"] = lambda held, index, fqn, field=_field, value=_nothing: setattr(  # type: ignore[misc]
            held, field, value
        )
for _title, _change in CHANGES.items():

    @changed(_title)
    def _(held: Any, index: MetadataIndex, fqn: str, change: Any = _change) -> None:
        change(held, index, fqn)


@changed("compressed files")
def _(held: Any, index: MetadataIndex, fqn: str) -> None:
    for info in held.storage_data.values():
        info.transform_descriptors = ["zstd"]


@changed("twenty thousand boxes in one place")
def _(held: Any, index: MetadataIndex, fqn: str) -> None:
    entry = held.state_dict_metadata[fqn]
    entry.size = torch.Size((20_000, 8))
    entry.chunks = [ChunkStorageMetadata(torch.Size((i, 0)), torch.Size((1, 8))) for i in range(20_000)]
    info = held.storage_data.pop(index)
    held.storage_data |= {MetadataIndex(fqn, (i, 0)): info for i in range(20_000)}


@changed("boxes that cross each other")
def _(held: Any, index: MetadataIndex, fqn: str) -> None:
    entry, n = held.state_dict_metadata[fqn], 2000
    entry.size = torch.Size((n, n, 2))
    entry.chunks = [ChunkStorageMetadata(torch.Size((0, i, 0)), torch.Size((n - i, 1, 2))) for i in range(n)] + [
        ChunkStorageMetadata(torch.Size((n - i, i, 0)), torch.Size((i, 1, 2))) for i in range(1, n)
    ]
    info = held.storage_data.pop(index)
    held.storage_data |= {MetadataIndex(fqn, chunk.offsets): info for chunk in entry.chunks}


@changed("a tensor's description for an index")
def _(held: Any, index: MetadataIndex, fqn: str) -> Any:
    entry = TensorStorageMetadata(held.state_dict_metadata[fqn].properties, torch.Size((1,)), [])
    return dataclasses.replace(held, storage_data=entry)


@changed("another class")
def _(held: Any, index: MetadataIndex, fqn: str) -> Any:
    return _StorageInfo("a", 0, 1)


@changed("a tensor of another model")
def _(held: Any, index: MetadataIndex, fqn: str) -> None:
    held.state_dict_metadata["model.layers.0.q_proj"] = held.state_dict_metadata[fqn]
    held.storage_data[MetadataIndex("model.layers.0.q_proj", index.offset)] = held.storage_data[index]


for _part in range(20):
    CRAFTED[f"cut after {_part} of 20 parts"] = lambda data, marker, part=_part: data[: part * len(data) // 20]  # type: ignore[misc]
CRAFTED["of zeros"] = lambda data, marker: bytes(100_000)
CRAFTED["of noise"] = lambda data, marker: random.Random(0).randbytes(100_000)
CRAFTED["of 17 MB"] = lambda data, marker: data + bytes(17 << 20)
