#!/usr/bin/env python3
"""Compare saving and loading with torch's distributed checkpoint (DCP):

    python benchmarks/checkpoint.py                          # GPT-2 124M with Adam's state: 2 to 4 minutes, 6 GB
    python benchmarks/checkpoint.py --smoke --output DIR     # a quick check with a tiny state

Our program and DCP save and load the same tensors of one rank: weights in bf16, masters and both moments in fp32, 14
bytes per parameter. A save writes to a new folder, after the earlier folder was deleted and synced, and ends when its
bytes are on the disk (both programs call fsync). A load fills existing tensors, with the files in the page cache. CPU
seconds are summed over all threads of the process. The two programs alternate in mirrored order (A B B A), after one
untimed save by each.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # The project need not be installed.

import torch
import torch.distributed.checkpoint
from torch import Tensor

from benchmarks import harness
from megatron.gpt2.checkpoint.save_folder import find_checkpoint
from megatron.gpt2.checkpoint.saver import PendingSave, Saver
from megatron.gpt2.checkpoint.sharded_state import load_sharded_state_dict, sharded_state_dict
from megatron.gpt2.checkpoint.writer import ShardedTensor
from megatron.gpt2.config import ModelConfig
from megatron.gpt2.model.gpt2 import model_partition_specs
from megatron.gpt2.optimizer.param_and_grad_buffer import ParamShard

dcp: Any = torch.distributed.checkpoint
State = dict[str, Tensor]
SHAPES = {
    False: ModelConfig(
        num_layers=12, hidden_size=768, num_attention_heads=12, max_position_embeddings=1024, vocab_size=50257
    ),
    True: ModelConfig(num_layers=2, hidden_size=64, num_attention_heads=2, max_position_embeddings=64, vocab_size=1000),
}
KINDS = {"model": torch.bfloat16, "master": torch.float32, "exp_avg": torch.float32, "exp_avg_sq": torch.float32}
# Each pair has our value and DCP's value.
RATIOS = {
    "save": ("ours: save", "DCP: save"),
    "load, hashed": ("ours: load", "DCP: load"),
    "load --no-verify": ("ours: load --no-verify", "DCP: load"),
}


def make_state(smoke: bool, seed: int) -> State:
    specs = model_partition_specs(SHAPES[smoke], 1).items()
    return {
        f"{kind}.{name}": torch.arange(math.prod(spec.global_shape), dtype=torch.float32)
        .add_(seed)
        .to(dtype)
        .view(spec.global_shape)
        for name, spec in specs
        for kind, dtype in KINDS.items()
    }


def flat_states(state: State) -> list[ParamShard]:
    named = [(*key.partition("."), tensor) for key, tensor in state.items()]
    return [ParamShard(kind, name, tensor.view(-1)) for kind, _, name, tensor in named]


def checkpoint_files(state: State, smoke: bool) -> dict[str, dict[str, ShardedTensor]]:
    """Return the files that a run of one rank saves."""
    shards = sharded_state_dict(flat_states(state), model_partition_specs(SHAPES[smoke], 1), tp_rank=0, tp_size=1)
    return {
        f"mp_rank_00/{kind if kind == 'model' else kind + '_dp_00'}.safetensors": {
            key: shard for key, shard in shards.items() if key.startswith(f"{kind}.")
        }
        for kind in KINDS
    }


def save_ours(state: State, folder: Path, smoke: bool) -> None:
    Saver(folder=folder, start_id="a", log=print).write(1, checkpoint_files(state, smoke), {}, PendingSave())


def load_ours(state: State, folder: Path, smoke: bool, verify: bool) -> None:
    checkpoint = find_checkpoint(folder, log=print, verify=verify)
    assert checkpoint is not None
    load_sharded_state_dict(
        flat_states(state), model_partition_specs(SHAPES[smoke], 1), checkpoint, tp_rank=0, tp_size=1
    )


def save_dcp(state: State, folder: Path, smoke: bool) -> None:
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)


def load_dcp(state: State, folder: Path, smoke: bool) -> None:
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=True)


SAVES: dict[str, Callable[..., None]] = {
    "ours: save": save_ours,
    "DCP: save": save_dcp,
}
LOADS: dict[str, Callable[..., None]] = {
    "ours: load": functools.partial(load_ours, verify=True),
    "ours: load --no-verify": functools.partial(load_ours, verify=False),
    "DCP: load": load_dcp,
}


def folder_of(scratch: Path, name: str) -> Path:
    return scratch / name.partition(":")[0]


def timed(work: Callable[[], object]) -> dict[str, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}


def time_blocked(state: State, scratch: Path, smoke: bool, count: int) -> list[dict[str, float]]:
    """Time --async-save: how long a save blocks training, and when it is committed."""
    saver = Saver(folder=scratch / "async", start_id="a", asynchronous=True, keep_last=1, log=lambda line: None)
    # A training run allocates the buffer before its first step.
    saver.allocate_host_buffer(checkpoint_files(state, smoke))
    visits = []
    for iteration in range(1, count + 1):
        os.sync()
        cpu, start = time.process_time(), time.perf_counter()
        saver.save(iteration, checkpoint_files(state, smoke), {})
        visits.append({"wall_s": time.perf_counter() - start})
        assert saver.finish() is not None
        visits[-1] |= {"committed_s": time.perf_counter() - start, "cpu_s": time.process_time() - cpu}
    saver.close()
    shutil.rmtree(scratch / "async")
    return visits


def measure_arms(scratch: Path, smoke: bool, rounds: int) -> dict[str, Any]:
    """Time saves and loads of both programs. Return the times by program."""
    state, target = make_state(smoke, 0), make_state(smoke, 1)

    def save(name: str) -> dict[str, float]:
        shutil.rmtree(folder_of(scratch, name), ignore_errors=True)
        os.sync()
        return timed(lambda: SAVES[name](state, folder_of(scratch, name), smoke))

    def load(name: str) -> dict[str, float]:
        for tensor in target.values():
            tensor.zero_()
        visit = timed(lambda: LOADS[name](target, folder_of(scratch, name), smoke))
        assert all(torch.equal(tensor, target[key]) for key, tensor in state.items()), name
        return visit

    saves = {name: functools.partial(save, name) for name in SAVES}
    harness.alternate(saves, 1)  # The warm-up touches the memory, so the timed saves do not wait for new pages.
    visits = harness.alternate(saves, 2 * rounds)
    visits["ours: save --async-save, blocked"] = time_blocked(state, scratch, smoke, 2 * rounds)
    os.sync()
    visits |= harness.alternate({name: functools.partial(load, name) for name in LOADS}, 2 * rounds)
    return {"gigabytes": sum(tensor.nbytes for tensor in state.values()) / 1e9, "visits": visits}


def summarise(result: dict[str, Any]) -> None:
    """Add the seconds per gigabyte of both programs, and their ratios, to the result."""
    size = result["gigabytes"]
    result["summary"] = figures = {
        name: {f"{key}_per_gb": harness.spread([visit[key] / size for visit in visits]) for key in ("wall_s", "cpu_s")}
        for name, visits in result["visits"].items()
    }
    times = {name: figure["wall_s_per_gb"]["median"] for name, figure in figures.items()}
    result["ratios"] = {name: times[ours] / times[other] for name, (ours, other) in RATIOS.items()}


def format_result(result: dict[str, Any]) -> str:
    columns = [
        ("wall_s_per_gb", "median"),
        ("wall_s_per_gb", "p10"),
        ("wall_s_per_gb", "p90"),
        ("cpu_s_per_gb", "median"),
    ]
    rows = [[n, *(f"{figure[key][part]:.3f}" for key, part in columns)] for n, figure in result["summary"].items()]
    ratios = [[name, f"{ratio:.3f}"] for name, ratio in result["ratios"].items()]
    seconds = harness.format_table(["seconds a GB", "wall", "p10", "p90", "CPU"], rows)
    return "\n\n".join([harness.machine_line(result), seconds, harness.format_table(["ours ÷ DCP", "time"], ratios)])


def main(argv: list[str] | None = None) -> int:
    parser = harness.make_parser(__doc__)
    parser.add_argument("--folder", metavar="DIR", help="folder on the disk to measure (default: temporary)")
    parser.add_argument("--rounds", type=int, default=3, help="repetitions of the mirrored order")
    args = harness.parse_args(parser, argv)
    warnings.filterwarnings("ignore", module="torch.distributed")
    logging.getLogger("torch").setLevel(logging.ERROR)
    rounds = 1 if args.smoke else args.rounds
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        result = {
            **harness.header("checkpoint"),
            "smoke": args.smoke,
            "rounds": rounds,
            "state": "weights bf16, masters and two moments fp32",
            **measure_arms(Path(folder), args.smoke, rounds),
        }
    summarise(result)
    harness.write_json(args.output / "checkpoint.json", result)
    print(format_result(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
