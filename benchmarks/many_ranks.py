#!/usr/bin/env python3
"""What a checkpoint of thousands of ranks costs beside its tensors: tables, manifest, commit, opening, planning a load.

    python benchmarks/many_ranks.py     # 8.3B parameters on 8 x 512 ranks: some minutes, 0.2 GB of disk

One process takes the part of every rank, one after the other, and rank 0's last, when all others are done. It runs the
code that training runs, but for the tensors: those have shapes alone, and a file is its header and a hole of the right
size. The optimizer is sharded. Then rank 0 opens the checkpoint with its share of the checks, and one rank in the midst
loads its masters and moments, in the layout that wrote them and in another.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works in a clone that is not installed

import torch

import mpu
from benchmarks import report
from megatron.gpt2.checkpoint import folder as folders
from megatron.gpt2.checkpoint.files import Piece, file_entry, header_of
from megatron.gpt2.checkpoint.folder import find_checkpoint, write_checkpoint
from megatron.gpt2.checkpoint.manifest import MANIFEST
from megatron.gpt2.checkpoint.reader import Checkpoint
from megatron.gpt2.checkpoint.state import load_state, state_pieces
from megatron.gpt2.config import ModelConfig, ParallelConfig
from megatron.gpt2.model.gpt2 import GPT2Model
from megatron.gpt2.model.parameters import parameter_specs
from megatron.gpt2.optimizer.flat_parameters import FlatParameters
from megatron.gpt2.optimizer.flat_state import FlatState

KINDS = ("master", "exp_avg", "exp_avg_sq")
RANDOM = {"cpu": 5056, "cuda": 16, "tracker.model-parallel-rng": 16}  # bytes of the states
SHAPE = ModelConfig(
    num_layers=72, hidden_size=3072, num_attention_heads=32, max_position_embeddings=1024, vocab_size=50257
)


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
            model = GPT2Model(shape, device="meta")
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


def write_hole(folder: Path, file: str, iteration: int, pieces: Mapping[str, Piece]) -> dict[str, Any]:
    """In the place of `write_tensors`: the file has its header and its size."""
    pieces = {key: piece for key, piece in pieces.items() if piece.tensor.numel()}
    if not pieces:
        return {"tensors": {}, "files": {}}
    header, _, size = header_of(file, iteration, pieces)
    (folder / file).parent.mkdir(exist_ok=True)
    with open(folder / file, "xb") as stream:
        stream.write(header)
        stream.truncate(size)
    return file_entry(file, pieces, size, "0" * 64)


def timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def simulate(save: Path, shape: ModelConfig, layout: Layout, other: Layout, bucket_size: int) -> dict[str, Any]:
    """One save and its loads in the new folder `save`."""
    ranks, size = SimulatedRanks(shape, layout, bucket_size), layout.model_parallel * layout.data_parallel
    seconds: list[float] = []

    def write(rank: int) -> None:
        dp_rank, mp_rank = divmod(rank, layout.model_parallel)
        files = ranks.files(mp_rank, dp_rank)
        seconds.append(
            timed(
                lambda: write_checkpoint(
                    save, 1, facts={}, files=files, rank=rank, world_size=size, attempt="a", timeout_s=60
                )
            )
        )

    with mock.patch.object(folders, "write_tensors", write_hole):
        for rank in range(1, size):
            write(rank)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        write(0)
        commit_grew = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    path = save / "iter_0000001"
    tables = sorted(table.stat().st_size for table in (path / "boxes").iterdir())
    boxes = sum(table.read_bytes().count(b'"offset"') for table in (path / "boxes").iterdir())
    found: dict[str, Any] = {
        "shape": shape.__dict__ | {},
        "layout": layout._asdict(),
        "bucket_size": bucket_size,
        "bytes": {
            "manifest": (path / MANIFEST).stat().st_size,
            "tables": sum(tables),
            "largest_table": tables[-1],
            "smallest_table": tables[0],
            "tensors": sum(file.stat().st_size for file in path.rglob("*.safetensors")),
        },
        "boxes": boxes,
        "files": sum(1 for file in path.rglob("*.safetensors")),
        "other_rank_writes_s": report.spread(seconds[:-1]),
        "commit_s": seconds[-1],
        "commit_memory_bytes": commit_grew,
    }
    opened: list[Checkpoint] = []
    found["open_s"] = timed(lambda: opened.append(Checkpoint(path)))
    found["find_s"] = timed(lambda: find_checkpoint(save, log=print, share=(0, size), verify=False))
    found["load"] = load(Checkpoint(path), ranks)
    found["load_otherwise"] = load(Checkpoint(path), SimulatedRanks(shape, other, bucket_size))
    found["check_all_tables_s"] = timed(lambda: complain(opened[0].damage(hashed=False)))
    return found


def load(checkpoint: Checkpoint, ranks: SimulatedRanks) -> dict[str, Any]:
    """Masters and moments of a rank in the midst."""
    states, layout = list(ranks.states(ranks.layout.data_parallel // 3)), ranks.layout
    place = {"mp_rank": layout.model_parallel // 2, "mp_size": layout.model_parallel}
    seconds = timed(lambda: load_state(states, ranks.specs, checkpoint, **place))
    return {
        "layout": layout._asdict(),
        "seconds": seconds,
        "tables_read": len(checkpoint.tables_read),
        "of": len(list((checkpoint.path / "boxes").iterdir())),
    }


def complain(problem: str) -> None:
    if problem:
        raise RuntimeError(problem)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model-parallel-size", type=int, default=8)
    parser.add_argument("--data-parallel-size", type=int, default=512)
    parser.add_argument("--folder", metavar="DIR", help="where to save (default: temporary)")
    parser.add_argument("--output", metavar="DIR", help="folder of the result (default: benchmarks/results)")
    chosen = parser.parse_args(argv)
    layout = Layout(chosen.model_parallel_size, chosen.data_parallel_size)
    with tempfile.TemporaryDirectory(dir=chosen.folder) as scratch:
        result = {
            **report.header("many_ranks"),
            **simulate(Path(scratch) / "save", SHAPE, layout, Layout(4, 64), ParallelConfig().ddp_bucket_size),
        }
    output = Path(chosen.output) if chosen.output else report.RESULTS
    report.write(output / "many_ranks.json", result)
    rows = [[name, f"{size:,}"] for name, size in result["bytes"].items()]
    rows += [["boxes", f"{result['boxes']:,}"], ["files", f"{result['files']:,}"]]
    times = [[name, f"{result[name]:.2f}"] for name in ("commit_s", "open_s", "find_s", "check_all_tables_s")]
    times += [
        [f"{name}, {result[name]['tables_read']} tables of {result[name]['of']}", f"{result[name]['seconds']:.2f}"]
        for name in ("load", "load_otherwise")
    ]
    print(
        "\n\n".join(
            [report.machine_line(result), report.table(["bytes of", ""], rows), report.table(["seconds", ""], times)]
        )
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
