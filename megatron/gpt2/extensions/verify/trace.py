"""The tensors of a run on the disk, each as a global one: the trace that other runs are compared with.

    trace.json                 the run's facts, and a row for each tensor
    tensors/NUMBER.safetensors one global tensor each

Each rank writes its parts into the places where they belong. No rank ever has a whole tensor in memory, and nothing is
sent. All ranks are on one machine.

Legend: n samples of the global batch, s sequence, w width.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from data_utils.files import safetensors_header
from megatron.gpt2.checkpoint.manifest import DTYPE_CODES, DTYPES
from mpu.partition import Box

FORMAT = 1
INDEX = "trace.json"
SQUARED = "exp_avg_sq of "  # before the name of a parameter
# What is captured of a step, in the order in which a step makes it.
KINDS = ("input", "activation", "loss", "activation gradient", "gradient", "scalar", "moment", "master", "parameter")


class Key(NamedTuple):
    """Which tensor of a run: its step from 1 on, its kind, its place among those of its kind, and its name."""

    step: int
    kind: str
    place: int
    name: str

    @property
    def order(self) -> tuple[int, int, int, str]:
        """What sorts keys as a step makes the tensors."""
        return self.step, KINDS.index(self.kind), self.place, self.name


@dataclass(frozen=True)
class Part:
    """What this rank holds of the global tensor `key`.

    values: of the shape of `box`, any strides, any device. global_shape: activations are [n, s, w], the samples in
    the order of the global batch; parameters have their true shape; a number is [1].
    writes: of several ranks that hold the part one has True, so that each number of the tensor counts once.
    """

    key: Key
    values: Tensor
    box: Box
    global_shape: tuple[int, ...]
    writes: bool = True


def rows_part(key: Key, x: Tensor, *, first: int = 0, rows: int | None = None, writes: bool = True) -> Part:
    """x, the rows from `first` on of a tensor of so many rows (default: all of it)."""
    box = Box((first, *(0,) * (x.dim() - 1)), tuple(x.shape))
    return Part(key, x, box, (rows or len(x), *x.shape[1:]), writes)


class Row(NamedTuple):
    """A tensor of a trace. rms: the root of the mean square of what is measured of it; 0 of whole numbers."""

    key: Key
    dtype: torch.dtype
    shape: tuple[int, ...]
    rms: float


def measured(key: Key, values: Tensor) -> Tensor:
    """What is measured of a tensor: of a second moment its root, which has the size of the gradients and so their
    rounding."""
    return values.sqrt() if key.name.startswith(SQUARED) else values


def file_of(folder: Path, key: Key) -> Path:
    """Where the tensor is: a name that every rank derives alike."""
    return folder / "tensors" / f"{key.step:04d}_{zlib.crc32(repr((key.kind, key.name)).encode()):08x}.safetensors"


class TraceWriter:
    """Writes the parts of this rank into the trace in `folder`. found: what `merge` needs of each tensor, as JSON."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rows: dict[Key, dict[str, Any]] = {}
        (folder / "tensors").mkdir(parents=True, exist_ok=True)

    def __call__(self, part: Part) -> None:
        """Write the part, unless another rank does."""
        if not part.writes:
            return
        key, shape, values = part.key, part.global_shape, part.values.detach().cpu()
        code, size = DTYPE_CODES[values.dtype], math.prod(shape) * values.itemsize
        header = safetensors_header(
            {
                "__metadata__": {"step": str(key.step), "kind": key.kind},
                key.name: {"dtype": code, "shape": shape, "data_offsets": [0, size]},
            }
        )
        path = file_of(self._folder, key)
        path.touch()
        # The first rank makes the file as large as it is in the end. All of them write the same header.
        file = torch.from_file(str(path), True, len(header) + size, dtype=torch.uint8)
        file[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        file[len(header) :].view(values.dtype).view(shape)[part.box.slices()] = values
        row = self._rows.setdefault(key, {"key": key, "dtype": code, "shape": shape, "count": 0, "squares": 0.0})
        row["count"] += values.numel()
        if values.is_floating_point():
            row["squares"] += float(torch.linalg.vector_norm(measured(key, values), dtype=torch.float32)) ** 2

    @property
    def found(self) -> list[Any]:
        """A row for each tensor of which this rank has written a part."""
        return list(self._rows.values())


def merge(folder: Path, reports: Sequence[dict[str, Any]]) -> None:
    """Make the index of the trace in `folder` from the reports of all ranks. ValueError where a tensor is not whole."""
    rows: dict[Key, dict[str, Any]] = {}
    for row in (row for report in reports for row in report["found"]):
        whole = rows.setdefault(Key(*row["key"]), {**row, "count": 0, "squares": 0.0})
        whole["count"] += row["count"]
        whole["squares"] += row["squares"]
    table = []
    for key, row in sorted(rows.items(), key=lambda item: item[0].order):
        if row["count"] != math.prod(row["shape"]):
            raise ValueError(
                f"the ranks of the first layout made {row['count']:,} of the {math.prod(row['shape']):,} "
                f"numbers of {key.name} in step {key.step}: not every sample was computed once"
            )
        rms = math.sqrt(row["squares"] / row["count"])
        table.append({"key": key, "dtype": row["dtype"], "shape": row["shape"], "rms": rms})
    index = {"format": FORMAT, "facts": reports[0]["facts"], "tensors": table}
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
                (key := Key(*row["key"])): Row(key, DTYPES[row["dtype"]], tuple(row["shape"]), row["rms"])
                for row in index["tensors"]
            }
        except FileNotFoundError as error:
            raise ValueError(f"{folder} holds no trace: --save-trace writes one") from error
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{folder}/{INDEX} is not a trace of this program: {error}") from error
        self._by_name = {(key.step, key.name): row for key, row in self.rows.items()}

    def find(self, step: int, name: str) -> Row | None:
        """The row of a tensor by its name; None where the run had none of this name."""
        return self._by_name.get((step, name))

    def number(self, step: int, name: str, otherwise: float) -> float:
        """The size of a number of the run; `otherwise` where the run had none of this name."""
        row = self.find(step, name)
        return row.rms if row else otherwise

    def chunks(self, row: Row, box: Box, elements: int = 1 << 20) -> Iterator[tuple[slice, Tensor]]:
        """The part `box` of a tensor, some rows of its first dimension at a time: (which of the box, their values).
        elements: of a chunk, about: what is done with it stays in the processor's cache."""
        together = max(1, elements * box.shape[0] // max(box.numel, 1))
        try:
            with safe_open(file_of(self.folder, row.key), "pt") as file:
                whole = file.get_slice(row.key.name)
                for start in range(0, box.shape[0], together):
                    size = min(together, box.shape[0] - start)
                    part = Box((box.offset[0] + start, *box.offset[1:]), (size, *box.shape[1:]))
                    yield slice(start, start + size), whole[part.slices()]
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{self.folder} does not hold all of {row.key.name}: {error}") from error
