"""The tensors of a run on the disk, each as a global one: the trace that other runs are compared with.

    trace.json                 the run's facts, and a row for each tensor
    tensors/NUMBER.safetensors one global tensor each

Each rank writes its parts into the places where they belong. No rank ever has a whole tensor in memory, and nothing is
sent. All ranks are on one machine.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data_utils.files.safetensors import header_bytes
from megatron.gpt2.checkpoint.files import DTYPE_CODES, DTYPES
from megatron.gpt2.extensions.verify.parts import Key, Part, measured
from mpu.partition import Box

FORMAT = 1
INDEX = "trace.json"
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # numpy has no bfloat16


@dataclass(frozen=True)
class Row:
    """A tensor of a trace. rms: the root of the mean square of what is measured of it; 0 of whole numbers."""

    key: Key
    dtype: torch.dtype
    shape: tuple[int, ...]
    rms: float


def words(values: Tensor) -> np.ndarray:
    """The bits of `values`, with the same strides where it is on the CPU already."""
    return values.detach().cpu().view(WORDS[values.element_size()]).numpy()


def file_of(folder: Path, key: Key) -> Path:
    """Where the tensor is: a name that every rank derives alike."""
    return folder / "tensors" / f"{key.step:04d}_{zlib.crc32(repr((key.kind, key.name)).encode()):08x}.safetensors"


def _header(key: Key, dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    size = math.prod(shape) * dtype.itemsize
    return header_bytes(
        {
            "__metadata__": {"step": str(key.step), "kind": key.kind},
            key.name: {"dtype": DTYPE_CODES[dtype], "shape": shape, "data_offsets": [0, size]},
        }
    )


def _mapped(path: Path, key: Key, dtype: torch.dtype, shape: tuple[int, ...], mode: Any) -> np.ndarray:
    word = np.dtype(str(WORDS[dtype.itemsize]).removeprefix("torch."))
    return np.memmap(path, word, mode, len(_header(key, dtype, shape)), shape)


class TraceWriter:
    """Writes what this rank has of a run into `folder`; `finish` leaves a file that `merge` reads."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._rows: dict[Key, dict[str, Any]] = {}
        (folder / "tensors").mkdir(parents=True, exist_ok=True)

    def __call__(self, part: Part) -> None:
        """Write the part, unless another rank does."""
        if not part.writes:
            return
        key, dtype, path = part.key, part.values.dtype, file_of(self._folder, part.key)
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = {
                "key": key,
                "dtype": DTYPE_CODES[dtype],
                "shape": part.global_shape,
                "count": 0,
                "squares": 0.0,
            }
            header = _header(key, dtype, part.global_shape)
            # Whichever rank comes first makes the file; the others write the same bytes.
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            os.pwrite(descriptor, header, 0)
            os.ftruncate(descriptor, len(header) + math.prod(part.global_shape) * dtype.itemsize)
            os.close(descriptor)
        _mapped(path, key, dtype, part.global_shape, "r+")[part.box.slices()] = words(part.values)
        row["count"] += part.values.numel()
        if dtype.is_floating_point:
            row["squares"] += float(torch.linalg.vector_norm(measured(key, part.values), dtype=torch.float32)) ** 2

    def finish(self) -> None:
        """After the last step."""
        rows = list(self._rows.values())
        (self._folder / f"rank_{self._rank}.json").write_text(json.dumps(rows), encoding="utf-8")


def merge(folder: Path, world_size: int, facts: Mapping[str, Any]) -> None:
    """Make the index of the trace in `folder` of what all ranks have left. ValueError where a tensor is not whole."""
    rows: dict[Key, dict[str, Any]] = {}
    for rank in range(world_size):
        path = folder / f"rank_{rank}.json"
        for row in json.loads(path.read_text(encoding="utf-8")):
            key = Key(*row.pop("key"))
            if key not in rows:
                rows[key] = row
            else:
                rows[key]["count"] += row["count"]
                rows[key]["squares"] += row["squares"]
        path.unlink()
    for key, row in rows.items():
        if row["count"] != math.prod(row["shape"]):
            raise ValueError(
                f"the ranks of the first layout made {row['count']:,} of the {math.prod(row['shape']):,} "
                f"numbers of {key.name} in step {key.step}: not every sample was computed once"
            )
    table = [
        {"key": key, "dtype": row["dtype"], "shape": row["shape"], "rms": math.sqrt(row["squares"] / row["count"])}
        for key, row in sorted(rows.items(), key=lambda item: item[0].order)
    ]
    index = {"format": FORMAT, "facts": facts, "tensors": table}
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")


class Trace:
    """The trace in `folder`. Its tensors stay on the disk. ValueError where there is none that this program reads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
            if index["format"] != FORMAT:
                raise ValueError(f"its format is {index['format']}, and this program reads {FORMAT}")
            self.facts: dict[str, Any] = index["facts"]
            self.rows = {
                Key(*row["key"]): Row(Key(*row["key"]), DTYPES[row["dtype"]], tuple(row["shape"]), row["rms"])
                for row in index["tensors"]
            }
        except FileNotFoundError as error:
            raise ValueError(f"{folder} holds no trace: --save-trace writes one") from error
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{folder}/{INDEX} is no trace of this program: {error}") from error
        self._by_name = {(key.step, key.name): row for key, row in self.rows.items()}

    def find(self, step: int, name: str) -> Row | None:
        """The row of a tensor by its name; None where the run had none of this name."""
        return self._by_name.get((step, name))

    def chunks(self, row: Row, box: Box, elements: int = 1 << 20) -> Iterator[tuple[slice, Tensor]]:
        """The part `box` of a tensor, some rows of its first dimension at a time: (which of the box, their values).
        elements: of a chunk, about: what is done with it stays in the processor's cache."""
        try:
            mapped = _mapped(file_of(self.folder, row.key), row.key, row.dtype, row.shape, "c")[box.slices()]
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.folder} does not hold all of {row.key.name}: {error}") from error
        together = max(1, elements * len(mapped) // max(mapped.size, 1))
        for start in range(0, len(mapped), together):
            rows = slice(start, min(start + together, len(mapped)))
            yield rows, torch.from_numpy(np.ascontiguousarray(mapped[rows])).view(row.dtype)
