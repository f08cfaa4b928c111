"""`.metadata` of torch.distributed.checkpoint (DCP), read without executing anything.

It is a pickle of protocol 4 or 5. For every name it gives the dtype, the shape and the boxes of a tensor, or says that
the name is an object's. For every box and object it gives the file, the first byte and the number of bytes, under a key
that is an object itself. It is longer than a pickle of torch.save: 71 instructions for a box.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.gpt2.checkpoint.reader import without_garbage_collection
from megatron.gpt2.checkpoint.source import TensorInfo
from megatron.gpt2.config import require
from megatron.gpt2.formats.pickle_machine import ORDERED_DICT, OTHERS, PLAIN, PUSHES, Machine, Opaque, update
from mpu.partition import Box

METADATA = ".metadata"
MAX_METADATA_BYTES = 16 << 20
# A 72-layer model with Adam's state at tensor-parallel size 8 has 15,552 boxes: 1.1 million instructions, half of which
# only repeat or remember what is there. The others make things, of up to 120 bytes each.
MAX_STEPS, MAX_MADE = 1_250_000, 530_000
MODULE = "torch.distributed.checkpoint.metadata."
STORAGE_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"
# What genuine files name: torch's classes, and those that Megatron Core saves beside them.
NAMES = re.compile(
    r"torch\.distributed\.checkpoint\.metadata\.(Metadata|(Tensor|Bytes|Chunk)StorageMetadata|TensorProperties"
    r"|MetadataIndex|StorageMeta|_MEM_FORMAT_ENCODING)|torch\.distributed\.checkpoint\.filesystem\.(_StorageInfo"
    r"|_StoragePrefix)|torch\.distributed\.checkpoint\.planner\.(SavePlan|WriteItem|WriteItemType|TensorWriteData)"
    r"|megatron\.core\.dist_checkpointing\.strategies\.torch\.MCore(Metadata|SavePlan)"
    r"|torch\.(Size|device|serialization\._get_layout)|pathlib\.(_local\.)?PosixPath",
    re.ASCII,
)
FILE = re.compile(r"\w[\w.-]*", re.ASCII)  # no way out of the folder


class MetadataMachine(Machine):
    """The machine of pickle's instructions for protocols 4 and 5, which knows the names of `.metadata` alone."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data, 0, len(data), self.no_storage)
        self.pushes, self.others = PUSHES_4, OTHERS_4
        self.kept: list[Any] = []  # protocol 4 numbers what it keeps by itself

    @staticmethod
    def no_storage(dtype: torch.dtype, key: str, numel: int) -> int:
        """ValueError: a `.metadata` holds no tensors."""
        raise ValueError("holds a tensor")

    def knows(self, name: str) -> bool:
        """Whether a genuine `.metadata` names the thing `name`."""
        return NAMES.fullmatch(name) is not None or name == ORDERED_DICT

    def named_by_stack(self) -> Any:
        """What the last two items name, a module and a thing of it."""
        module, name = self.last(2)
        if type(module) is not str or type(name) is not str or len(module) + len(name) > 200:
            raise ValueError("names something with what is no string")
        return self.thing(f"{module}.{name}")

    def run(self) -> tuple[Any, int]:
        """The object, and the byte after its instructions. ValueError for anything but data."""
        data, kept, stack, pushes, others = self.data, self.kept, self.stack, self.pushes, self.others
        at, made = self.at, 0  # local names are faster
        for _ in range(MAX_STEPS):
            code = data[at]
            at += 1
            if code == 0x94:  # these four make nothing, and are half of all
                kept.append(stack[-1])
            elif code == 0x68:
                stack.append(kept[data[at]])
                at += 1
            elif code == 0x6A:
                stack.append(kept[int.from_bytes(data[at : at + 4], "little")])
                at += 4
            elif code == 0x4B:
                stack.append(data[at])
                at += 1
            elif code == 0x2E:
                return stack.pop(), at
            elif made == MAX_MADE:
                break
            else:
                made, self.at = made + 1, at
                if code == 0x85:  # tuples of one and of two, the most frequent
                    stack[-1] = (stack[-1],)
                elif code == 0x86:
                    second = stack.pop()
                    stack[-1] = (stack[-1], second)
                elif value := pushes.get(code):
                    stack.append(value(self))
                elif act := others.get(code):
                    act(self)
                else:
                    raise ValueError(f"damaged: byte {at - 1} is {bytes([code])!r}")
                at = self.at
        raise ValueError(f"damaged, or of more than {MAX_STEPS:,} instructions, {MAX_MADE:,} of which make something")


def _without(table: dict[int, Callable[[Machine], Any]], codes: bytes) -> dict[int, Any]:
    return {code: act for code, act in table.items() if code not in codes}


# Protocol 2's, without what refers to storages (Q), names in lines (c) or numbers what it keeps (h j q r).
PUSHES_4: dict[int, Callable[[Any], Any]] = _without(PUSHES, b"Qchj") | {
    0x8C: lambda m: str(m.text(m.number(1)), "utf-8", "surrogatepass"),
    0x93: MetadataMachine.named_by_stack,
}
# A `MetadataIndex` is a key; as an `Opaque` it equals itself alone.
OTHERS_4: dict[int, Callable[[Any], object]] = _without(OTHERS, b"qr") | {
    0x95: lambda m: m.text(8),
    ord("s"): lambda m: update(m.stack, m.last(2), (*PLAIN, Opaque)),
    ord("u"): lambda m: update(m.stack, m.above_mark(), (*PLAIN, Opaque)),
}


@dataclass(frozen=True)
class Place:
    """Where a small file of torch.save lies within a file of the folder."""

    file: str
    start: int
    length: int


@dataclass(frozen=True)
class Metadata:
    """What a `.metadata` says: tensors by name, with their boxes and where each lies, and where the objects lie."""

    tensors: dict[str, tuple[TensorInfo, list[tuple[Box, Place]]]]
    objects: dict[str, Place]


def read_metadata(path: Path) -> Metadata:
    """`path`, the file `.metadata`. ValueError, one line, for one that is damaged or names something unknown."""
    try:
        with open(path, "rb") as stream:
            data = stream.read(MAX_METADATA_BYTES + 1)
        require(len(data) <= MAX_METADATA_BYTES, f"is larger than {MAX_METADATA_BYTES:,} bytes")
        with without_garbage_collection():  # a third of the time
            top, _ = MetadataMachine(data).run()
            return _metadata(top)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (TypeError, LookupError, AttributeError, ArithmeticError, ValueError) as error:
        said = str(error) if type(error) is ValueError else f"damaged ({type(error).__name__}: {str(error)[:80]!r})"
        raise ValueError(f"{path}: {said}") from error


def _metadata(top: Any) -> Metadata:
    held = top.attributes()
    places = {}
    for index, info in held["storage_data"].items():
        key, said = index.attributes(), info.attributes()
        require(index.name == f"{MODULE}MetadataIndex" and info.name == STORAGE_INFO, "says of no file where it lies")
        require(
            "transform_descriptors" not in said,
            "its files are compressed, or changed by another extension of torch's writer, which is not supported",
        )
        offset = key.get("offset")
        place = Place(said["relative_path"], *_naturals((said["offset"], said["length"])))
        require(
            type(place.file) is str and FILE.fullmatch(place.file) is not None,
            f"names the file {str(place.file)[:80]!r}, which is none of its folder",
        )
        places[_text(key["fqn"]), None if offset is None else _size(offset)] = place
    require(len(places) == len(held["storage_data"]), "names a box twice")
    tensors, objects = {}, {}
    for name, entry in held["state_dict_metadata"].items():
        if entry.name == f"{MODULE}BytesStorageMetadata":
            objects[_text(name)] = places[name, None]
            continue
        require(entry.name == f"{MODULE}TensorStorageMetadata", "holds what is neither tensor nor object")
        said = entry.attributes()
        dtype = said["properties"].state[0]
        require(isinstance(dtype, torch.dtype), f"{_text(name)[:120]} is of an unknown type")
        boxes = [Box(_size(box["offsets"]), _size(box["sizes"])) for box in map(Opaque.attributes, said["chunks"])]
        tensors[_text(name)] = (
            TensorInfo(dtype, _size(said["size"])),
            [(box, places[name, box.offset]) for box in boxes if box.numel],
        )
    return Metadata(tensors, objects)


def _text(value: Any) -> str:
    if type(value) is not str or len(value) > 1000:
        raise ValueError("a name is no string")
    return value


def _size(value: Any) -> tuple[int, ...]:
    """A torch.Size."""
    require(value.name == "torch.Size" and len(value.args) == 1, "a shape is none")
    return _naturals(value.args[0])


def _naturals(values: Any) -> tuple[int, ...]:
    if type(values) is not tuple or len(values) > 8 or any(type(n) is not int or not 0 <= n < 1 << 48 for n in values):
        raise ValueError("a shape or a place is none of whole numbers")
    return values
