"""A small model state, and helpers that save it as several ranks and load it."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.gpt2.checkpoint.reader import NativeCheckpoint
from megatron.gpt2.checkpoint.save_folder import find_checkpoint
from megatron.gpt2.checkpoint.saver import PendingSave, Saver
from megatron.gpt2.checkpoint.sharded_state import parameter_states, sharded_state_dict
from megatron.gpt2.checkpoint.writer import ShardedTensor
from megatron.gpt2.optimizer.param_and_grad_buffer import ParamShard
from mpu import PartitionSpec

VOCAB = 130  # padded to 256, so that at tensor-parallel size 4 the last rank has only padding
SPECS = {
    "embedding": PartitionSpec((VOCAB, 8), 0, 256),
    "column": PartitionSpec((24, 8), 0),
    "bias": PartitionSpec((24,), 0),
    "row": PartitionSpec((8, 16), 1),
    "norm": PartitionSpec((8,)),
    "scalar": PartitionSpec(()),
}
KINDS = ("model", "master", "exp_avg", "exp_avg_sq")


def full_state(seed: int) -> dict[tuple[str, str], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        (kind, name): torch.randn(spec.global_shape, generator=generator).to(
            torch.bfloat16 if kind == "model" else torch.float32
        )
        for kind in KINDS
        for name, spec in SPECS.items()
    }


def rank_files(state: dict[tuple[str, str], Tensor], tp_rank: int, tp_size: int) -> dict[str, dict[str, ShardedTensor]]:
    local = [(kind, name, SPECS[name].split(full, tp_rank, tp_size)) for (kind, name), full in state.items()]
    folder = f"mp_rank_{tp_rank:02d}"
    return {
        f"{folder}/model.safetensors": sharded_state_dict(
            parameter_states((n, t) for k, n, t in local if k == "model"), SPECS, tp_rank=tp_rank, tp_size=tp_size
        ),
        f"{folder}/optim_dp_00.safetensors": sharded_state_dict(
            [ParamShard(k, n, t.view(-1)) for k, n, t in local if k != "model"], SPECS, tp_rank=tp_rank, tp_size=tp_size
        ),
    }


def write(
    folder: Path,
    iteration: int,
    files: Any,
    *,
    metadata: Any = None,
    timeout_s: float = 60.0,
    problem: str = "",
    **more: Any,
) -> Path:
    """Call `Saver.write` without a thread, by default as the only rank."""
    saver = Saver(folder=folder, **{"start_id": "a", "log": print, **more})
    return saver.write(
        iteration, files, metadata or {}, PendingSave(deadline=time.monotonic() + timeout_s, remote_error=problem)
    )


def save(folder: Path, iteration: int, tp_size: int = 2, seed: int | None = None, **options: Any) -> list[str]:
    """Save a checkpoint with `tp_size` ranks, which are threads. Return the log lines."""
    state = full_state(iteration if seed is None else seed)
    logged: list[str] = []
    chosen: dict[str, Any] = {"metadata": {"consumed_samples": iteration}, "log": logged.append, **options}

    def write_rank(rank: int) -> Path:
        return write(folder, iteration, rank_files(state, rank, tp_size), rank=rank, world_size=tp_size, **chosen)

    with ThreadPoolExecutor(tp_size) as ranks:
        assert set(ranks.map(write_rank, range(tp_size))) == {folder / f"iter_{iteration:07d}"}
    return logged


def assert_holds(checkpoint: NativeCheckpoint, seed: int) -> None:
    for (kind, name), full in full_state(seed).items():
        assert torch.equal(checkpoint.read(f"{kind}.{name}"), full), (kind, name)


def find(folder: Path, **options: Any) -> tuple[int | None, str]:
    """Return the iteration that `find_checkpoint` opens, and its log lines. Check the values of the checkpoint."""
    logged: list[str] = []
    checkpoint = find_checkpoint(folder, log=logged.append, **options)
    if checkpoint is not None:
        assert_holds(checkpoint, checkpoint.iteration)
    assert all("\n" not in line for line in logged)
    return checkpoint.iteration if checkpoint else None, " | ".join(logged)
