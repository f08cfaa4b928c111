"""A trace: the global tensors of a run on disk, with which other runs are compared.

    trace.json                 metadata of the run, and an entry for each tensor
    tensors/NUMBER.safetensors one global tensor each

Each rank writes its shards directly into the files. No rank has a global tensor in memory, and the ranks do not
communicate. All ranks must be on one machine.

Legend: b samples of the global batch, s sequence, w width.
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

from data_utils.command_line import require
from data_utils.files import safetensors_header, wrap_errors
from megatron.gpt2.checkpoint.reader import SAFETENSORS_CODES, SAFETENSORS_DTYPES
from mpu.partition import TensorSlice

FORMAT = 3
INDEX = "trace.json"
SECOND_MOMENT = "exp_avg_sq of "  # the beginning of the name of a parameter's second moment
# The kinds of tensors have the order in which a step computes them.
KINDS = ("input", "activation", "loss", "activation gradient", "gradient", "scalar", "moment", "parameter")


class TensorKey(NamedTuple):
    """Identifies a tensor of a run.

    step: the number of the step, from 1 on, or 0 before the first step.
    position: the index among the tensors of the same kind.
    """

    step: int
    kind: str
    position: int
    name: str

    @property
    def order(self) -> tuple[int, int, int, str]:
        """A sort key, which puts tensors in the order in which a step computes them."""
        return self.step, KINDS.index(self.kind), self.position, self.name


class TensorShard(NamedTuple):
    """A rank's shard of the global tensor that `key` identifies.

    values: the shard, with any strides and device.
    offset: the first index of the shard in the global tensor.
    shape: the shape of the global tensor. Activations are [b, s, w] with the samples in the order of the global batch;
        parameters have no padding; a scalar is [1].
    writes: True on one of the ranks that hold the same shard, so that each element counts once.
    """

    key: TensorKey
    values: Tensor
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    writes: bool

    @property
    def slices(self) -> tuple[slice, ...]:
        """The slices of the global tensor that this shard covers."""
        return TensorSlice(self.offset, tuple(self.values.shape)).slices()

    def chunks(self, elements: int = 1 << 20) -> Iterator[TensorShard]:
        """Split the shard by rows into chunks of about `elements`, which fit into the processor's cache."""
        rows = max(1, elements * len(self.values) // max(self.values.numel(), 1))
        first, *others = self.offset
        for number, values in enumerate(self.values.split(rows)):
            yield self._replace(values=values, offset=(first + number * rows, *others))


class TraceEntry(NamedTuple):
    """A tensor of a trace.

    rms: the root mean square of its measured values (see `measured`); 0 for integers.
    """

    key: TensorKey
    dtype: torch.dtype
    shape: tuple[int, ...]
    rms: float


def measured(key: TensorKey, values: Tensor) -> Tensor:
    """Return the values to compare: the square root of a second moment, which has the scale and the rounding errors of
    gradients, or any other tensor itself."""
    return values.sqrt() if key.name.startswith(SECOND_MOMENT) else values


def tensor_file(folder: Path, key: TensorKey) -> Path:
    """Return the file of a tensor. All ranks get the same path."""
    return folder / "tensors" / f"{key.step:04d}_{zlib.crc32(repr((key.kind, key.name)).encode()):08x}.safetensors"


class TraceWriter:
    """Writes one rank's shards into the trace in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._element_counts: Counter[TensorKey] = Counter()
        (folder / "tensors").mkdir(parents=True, exist_ok=True)

    def __call__(self, shard: TensorShard) -> None:
        """Write the shard, unless a different rank writes it."""
        if not shard.writes:
            return
        key, shape, values = shard.key, shard.shape, shard.values.detach().cpu()
        size = math.prod(shape) * values.itemsize
        entry = {"dtype": SAFETENSORS_CODES[values.dtype], "shape": shape, "data_offsets": [0, size]}
        header = safetensors_header({"__metadata__": {"step": str(key.step), "kind": key.kind}, key.name: entry})
        path = tensor_file(self._folder, key)
        path.touch()
        # The first rank creates the file in its final size. All ranks write the same header.
        file = torch.from_file(str(path), True, len(header) + size, dtype=torch.uint8)
        file[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        file[len(header) :].view(values.dtype).view(shape)[shard.slices] = values
        self._element_counts[key] += values.numel()

    @property
    def findings(self) -> list[Any]:
        """The number of elements of each tensor that this rank has written, for `write_index`."""
        return list(self._element_counts.items())


def write_index(folder: Path, metadata: Mapping[str, Any], findings: Sequence[Sequence[Any]]) -> None:
    """Write the index of the trace in `folder`.

    Raises ValueError if a tensor is incomplete.

    findings: `TraceWriter.findings` of each rank, as lists if they were read from JSON.
    """
    entries: list[dict[str, Any]] = []
    counts: Counter[TensorKey] = Counter()
    for key, count in itertools.chain(*findings):
        counts[TensorKey(*key)] += count
    for key in sorted(counts, key=lambda key: key.order):
        values = load_file(tensor_file(folder, key))[key.name]
        if counts[key] != values.numel():
            raise ValueError(
                f"the ranks of the first layout made {counts[key]:,} of the {values.numel():,} "
                f"numbers of {key.name} in step {key.step}: not every sample was computed once"
            )
        rms = 0.0
        if values.is_floating_point():
            rms = float(torch.linalg.vector_norm(measured(key, values), dtype=torch.float64)) / math.sqrt(counts[key])
        entries.append({"key": key, "dtype": SAFETENSORS_CODES[values.dtype], "shape": values.shape, "rms": rms})
    (folder / INDEX).write_text(
        json.dumps({"format": FORMAT, "metadata": metadata, "tensors": entries}), encoding="utf-8"
    )


class TensorTrace:
    """The trace in `folder`; its tensors stay on disk. Raises ValueError if `folder` is not a trace of the current
    version.

    entries: the entries by (step, name).
    """

    def __init__(self, folder: Path) -> None:
        self.folder, path = folder, folder / INDEX
        require(path.is_file(), f"{folder} holds no trace: --save-trace writes one")
        with wrap_errors(path):
            index = json.loads(path.read_text(encoding="utf-8"))
            found = index["format"]
            require(found == FORMAT, f"its format is {found}, and this program reads format {FORMAT}")
            self.metadata: dict[str, Any] = index["metadata"]
            rows = [
                TraceEntry(
                    TensorKey(*entry["key"]), SAFETENSORS_DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["rms"]
                )
                for entry in index["tensors"]
            ]
        self.entries = {(entry.key.step, entry.key.name): entry for entry in rows}

    def scalar(self, step: int, name: str, otherwise: float) -> float:
        """Return the absolute value of a scalar, or `otherwise` if the trace lacks the scalar."""
        entry = self.entries.get((step, name))
        return entry.rms if entry else otherwise

    def read(self, entry: TraceEntry, slices: tuple[slice, ...]) -> Tensor:
        """Read a slice of a tensor."""
        try:
            with safe_open(tensor_file(self.folder, entry.key), "pt") as file:
                values: Tensor = file.get_slice(entry.key.name)[slices]
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{self.folder} does not hold all of {entry.key.name}: {error}") from error
        return values
