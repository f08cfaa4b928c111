"""The tensors of a run on the disk, each as a global one: the trace that other runs are compared with.

    trace.json                 the run's facts, and a row for each tensor
    tensors/NUMBER.safetensors one global tensor each

Each rank writes its parts into the places where they belong. No rank ever has a whole tensor in memory, and nothing is
sent. All ranks are on one machine.

Legend: n samples of the global batch, s sequence, w width.
"""

from __future__ import annotations

import itertools
import json
import math
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from data_utils.files import safetensors_header
from megatron.gpt2.checkpoint.reader import DTYPE_CODES, DTYPES
from mpu.partition import Box

FORMAT = 1
INDEX = "trace.json"
SQUARED = "exp_avg_sq of "  # before the name of a parameter
# The kinds of tensors of a step, in the order in which a step makes them.
KINDS = ("input", "activation", "loss", "activation gradient", "gradient", "scalar", "moment", "master", "parameter")


class Key(NamedTuple):
    """Which tensor of a run: its step from 1 on, its kind, its place among those of its kind, and its name."""

    step: int
    kind: str
    place: int
    name: str

    @property
    def order(self) -> tuple[int, int, int, str]:
        """Sorts keys as a step makes the tensors."""
        return self.step, KINDS.index(self.kind), self.place, self.name


class Part(NamedTuple):
    """A rank's part of the global tensor `key`.

    values: any strides, any device. offset: of the part in the global tensor. shape: of the global tensor. Activations
    are [n, s, w], the samples in the order of the global batch; parameters have their true shape; a number is [1].
    writes: True on one of the ranks that hold the same part, so that each number of the tensor counts once.
    """

    key: Key
    values: Tensor
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    writes: bool

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index the global tensor to give this part."""
        return Box(self.offset, tuple(self.values.shape)).slices()

    def chunks(self, elements: int = 1 << 20) -> Iterator[Part]:
        """The part, some rows at a time, of about so many elements: those stay in the processor's cache."""
        rows = max(1, elements * len(self.values) // max(self.values.numel(), 1))
        first, *others = self.offset
        for number, values in enumerate(self.values.split(rows)):
            yield self._replace(values=values, offset=(first + number * rows, *others))


class Row(NamedTuple):
    """A tensor of a trace. rms: the root of the mean square of what is measured of the
    tensor; 0 for whole numbers."""

    key: Key
    dtype: torch.dtype
    shape: tuple[int, ...]
    rms: float


def measured(key: Key, values: Tensor) -> Tensor:
    """What is measured of a tensor: the root of a second moment, since it has the size of the gradients and so their
    rounding."""
    return values.sqrt() if key.name.startswith(SQUARED) else values


def file_of(folder: Path, key: Key) -> Path:
    """The file of a tensor. Every rank derives the same name."""
    return folder / "tensors" / f"{key.step:04d}_{zlib.crc32(repr((key.kind, key.name)).encode()):08x}.safetensors"


class TraceWriter:
    """Writes the parts of this rank into the trace in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: Counter[Key] = Counter()
        (folder / "tensors").mkdir(parents=True, exist_ok=True)

    def __call__(self, part: Part) -> None:
        """Write the part, unless another rank does."""
        if not part.writes:
            return
        key, shape, values = part.key, part.shape, part.values.detach().cpu()
        size = math.prod(shape) * values.itemsize
        entry = {"dtype": DTYPE_CODES[values.dtype], "shape": shape, "data_offsets": [0, size]}
        header = safetensors_header({"__metadata__": {"step": str(key.step), "kind": key.kind}, key.name: entry})
        path = file_of(self._folder, key)
        path.touch()
        # The first rank makes the file as large as it is in the end. All of them write the same header.
        file = torch.from_file(str(path), True, len(header) + size, dtype=torch.uint8)
        file[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        file[len(header) :].view(values.dtype).view(shape)[part.slices] = values
        self._made[key] += values.numel()

    @property
    def found(self) -> list[Any]:
        """How many numbers this rank has written of each tensor, for `write_index`."""
        return list(self._made.items())


def write_index(folder: Path, facts: Mapping[str, Any], found: Sequence[Sequence[Any]]) -> None:
    """Make the index of the trace in `folder` from what the `TraceWriter` of each rank has found, also after a trip
    through JSON. ValueError if a tensor is not whole."""
    rows: list[dict[str, Any]] = []
    made: Counter[Key] = Counter()
    for key, count in itertools.chain(*found):
        made[Key(*key)] += count
    for key in sorted(made, key=lambda key: key.order):
        values = load_file(file_of(folder, key))[key.name]
        if made[key] != values.numel():
            raise ValueError(
                f"the ranks of the first layout made {made[key]:,} of the {values.numel():,} "
                f"numbers of {key.name} in step {key.step}: not every sample was computed once"
            )
        rms = 0.0
        if values.is_floating_point():
            rms = float(torch.linalg.vector_norm(measured(key, values), dtype=torch.float64)) / math.sqrt(made[key])
        rows.append({"key": key, "dtype": DTYPE_CODES[values.dtype], "shape": values.shape, "rms": rms})
    (folder / INDEX).write_text(json.dumps({"format": FORMAT, "facts": facts, "tensors": rows}), encoding="utf-8")


class Trace:
    """The trace in `folder`, whose tensors stay on the disk. rows: by step and name. ValueError if there is no trace
    that this program reads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
            if index["format"] != FORMAT:
                raise ValueError(f"its format is {index['format']}, and this program reads {FORMAT}")
            self.facts: dict[str, Any] = index["facts"]
            rows = [
                Row(Key(*row["key"]), DTYPES[row["dtype"]], tuple(row["shape"]), row["rms"]) for row in index["tensors"]
            ]
        except FileNotFoundError as error:
            raise ValueError(f"{folder} holds no trace: --save-trace writes one") from error
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{folder}/{INDEX} is not a trace of this program: {error}") from error
        self.rows = {(row.key.step, row.key.name): row for row in rows}

    def number(self, step: int, name: str, otherwise: float) -> float:
        """The size of a number of the run; `otherwise` if the run had none of this name."""
        row = self.rows.get((step, name))
        return row.rms if row else otherwise

    def read(self, row: Row, slices: tuple[slice, ...]) -> Tensor:
        """A part of a tensor."""
        try:
            with safe_open(file_of(self.folder, row.key), "pt") as file:
                values: Tensor = file.get_slice(row.key.name)[slices]
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{self.folder} does not hold all of {row.key.name}: {error}") from error
        return values
