"""A save and its loads by thousands of ranks, in one process that takes the part of every rank, rank 0's last.

It runs the code that training runs, but for the tensors: those have shapes only, and a file is its header and a hole of
the right size. The optimizer is sharded. Then a rank in the middle loads its masters and moments, in the layout that
wrote them and in another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from unittest import mock

import torch

import mpu
from megatron.gpt2.checkpoint import writer
from megatron.gpt2.checkpoint.manifest import MANIFEST
from megatron.gpt2.checkpoint.reader import Checkpoint
from megatron.gpt2.checkpoint.state import load_state, state_pieces
from megatron.gpt2.checkpoint.writer import Piece, write_checkpoint
from megatron.gpt2.config import ModelConfig
from megatron.gpt2.model.gpt2 import GPT2Model, layer_config
from megatron.gpt2.model.parameters import parameter_specs
from megatron.gpt2.optimizer.flat_parameters import FlatParameters
from megatron.gpt2.optimizer.flat_state import FlatState

KINDS = ("master", "exp_avg", "exp_avg_sq")
RANDOM = {"cpu": 5056, "cuda": 16, "tracker.model-parallel-rng": 16}  # bytes of the states


class Layout(NamedTuple):
    model_parallel: int
    data_parallel: int


class Group(NamedTuple):
    """All that a layer asks its group for when it is made."""

    size_: int

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return self.size_


class SimulatedRanks:
    """The boxes of every rank of a layout, out of the buffer of one: all are cut alike."""

    def __init__(self, shape: ModelConfig, layout: Layout, bucket_size: int) -> None:
        self.layout, self.specs = layout, parameter_specs(shape, layout.model_parallel)
        group: Any = Group(layout.model_parallel)
        state = mpu.ParallelState(
            tensor_model_parallel_group=group,
            tensor_model_parallel_size=layout.model_parallel,
            data_parallel_size=layout.data_parallel,
        )
        with mock.patch("mpu.initialize._default", state):
            model = GPT2Model(shape, layer_config(shape, device="meta"))
        self.flat = FlatParameters(
            model, torch.bfloat16, bucket_size=bucket_size, ranks=(0, layout.data_parallel), sharded=True
        )

    def states(self, dp_rank: int) -> Iterator[FlatState]:
        """What the optimizer of a data-parallel rank owns: its share of each bucket."""
        nothing = torch.empty(0, device="meta")
        for bucket in self.flat.buckets:
            length = (bucket.range.stop - bucket.range.start) // self.layout.data_parallel
            first = bucket.range.start + dp_rank * length
            for name in bucket.names:
                whole = self.flat.ranges[name]
                start, stop = max(first, whole.start), min(first + length, whole.stop)
                values = torch.empty(stop - start, device="meta") if start < stop else nothing
                for kind in KINDS:
                    yield FlatState(kind, name, values, max(start - whole.start, 0))

    def files(self, mp_rank: int, dp_rank: int) -> dict[str, dict[str, Piece]]:
        """As `Run.files`."""
        place = {"mp_rank": mp_rank, "mp_size": self.layout.model_parallel}
        folder, files = f"mp_rank_{mp_rank:02d}", {}
        if dp_rank == 0:
            weights = (
                FlatState(
                    "model",
                    name,
                    torch.empty(spec.local_shape(self.layout.model_parallel), dtype=torch.bfloat16, device="meta").view(
                        -1
                    ),
                )
                for name, spec in self.specs.items()
            )
            files[f"{folder}/model.safetensors"] = state_pieces(weights, self.specs, **place)
        own = (state for state in self.states(dp_rank) if state.values.numel())
        pieces = state_pieces(own, self.specs, **place)
        for kind in KINDS:
            files[f"{folder}/{kind}_dp_{dp_rank:02d}.safetensors"] = {
                key: piece for key, piece in pieces.items() if key.startswith(f"{kind}.")
            }
        files[f"{folder}/rng_dp_{dp_rank:02d}.safetensors"] = {
            f"rng.mp_{mp_rank:02d}.dp_{dp_rank:02d}.{name}": Piece(
                torch.empty(size, dtype=torch.uint8, device="meta"), (size,), (0,)
            )
            for name, size in RANDOM.items()
        }
        return files


def write_hole(stream: BinaryIO, header: bytes, pieces: Iterable[Piece]) -> str:
    """In the place of `write_values`: the file has its header and its size."""
    stream.write(header)
    stream.truncate(len(header) + sum(piece.tensor.nbytes for piece in pieces))
    return "0" * 64


def simulate(save: Path, shape: ModelConfig, layout: Layout, other: Layout, bucket_size: int) -> dict[str, Any]:
    """One save and its loads in the new folder `save`: bytes of the manifest and of the tables, and the tables that a
    load reads, by this layout and by the `other` one."""
    ranks, size = SimulatedRanks(shape, layout, bucket_size), layout.model_parallel * layout.data_parallel
    with mock.patch.object(writer, "write_values", write_hole):
        for rank in (*range(1, size), 0):
            dp_rank, mp_rank = divmod(rank, layout.model_parallel)
            files = ranks.files(mp_rank, dp_rank)
            write_checkpoint(save, 1, facts={}, files=files, rank=rank, world_size=size, attempt="a", timeout_s=60)
    path = save / "iter_0000001"
    assert not Checkpoint(path).damage(hashed=False)
    return {
        "manifest_bytes": (path / MANIFEST).stat().st_size,
        "tables_bytes": sum(table.stat().st_size for table in (path / "boxes").iterdir()),
        "tables_read": tables_read(Checkpoint(path), ranks),
        "tables_read_otherwise": tables_read(Checkpoint(path), SimulatedRanks(shape, other, bucket_size)),
    }


def tables_read(checkpoint: Checkpoint, ranks: SimulatedRanks) -> int:
    """The tables that are read to load masters and moments of a rank in the middle."""
    states, layout = list(ranks.states(ranks.layout.data_parallel // 3)), ranks.layout
    load_state(states, ranks.specs, checkpoint, mp_rank=layout.model_parallel // 2, mp_size=layout.model_parallel)
    return len(checkpoint.tables_read)
