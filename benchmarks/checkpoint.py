#!/usr/bin/env python3
"""Saving and loading beside torch's distributed checkpoint (DCP), in one run, by turns:

    python benchmarks/checkpoint.py                          # GPT-2 124M with Adam's state: 2 to 4 minutes, 6 GB
    python benchmarks/checkpoint.py --smoke --output DIR     # a tiny state: does it run?

Both sides save and load the same tensors of one rank: weights in bf16, masters and both moments in fp32, 14 bytes a
parameter. A save goes into a folder that is not there, after what went before was deleted and synced, and ends when its
bytes are on the disk (both call fsync). A load fills tensors that are there, with the files in the page cache (warm) or
dropped from it (cold). CPU seconds are the process's own, over all its threads. Arms run in mirrored order (A B B A);
of every kind of plain save the first visit, which touches memory for the first time, is left out of the figures.
"""

from __future__ import annotations

import argparse
import functools
import logging
import math
import multiprocessing
import os
import shutil
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works in a clone that is not installed

os.environ["OMP_NUM_THREADS"] = "1"  # peaks are measured in forked children, which OpenMP's threads do not survive

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from benchmarks import report
from megatron.gpt2.checkpoint.folder import find_checkpoint
from megatron.gpt2.checkpoint.saver import Saver
from megatron.gpt2.checkpoint.state import load_state, state_pieces
from megatron.gpt2.checkpoint.writer import Piece, write_checkpoint
from megatron.gpt2.config import ModelConfig
from megatron.gpt2.model.parameters import parameter_specs
from megatron.gpt2.optimizer.flat_state import FlatState

State = dict[str, Tensor]
SHAPES = {
    False: ModelConfig(
        num_layers=12, hidden_size=768, num_attention_heads=12, max_position_embeddings=1024, vocab_size=50257
    ),
    True: ModelConfig(num_layers=2, hidden_size=64, num_attention_heads=2, max_position_embeddings=64, vocab_size=1000),
}
KINDS = {"model": torch.bfloat16, "master": torch.float32, "exp_avg": torch.float32, "exp_avg_sq": torch.float32}
# (name, ours, DCP's, the greatest ratio of their times)
GOALS = (
    ("save", "ours: save", "DCP: save", 1.0),
    ("load, hashed", "ours: load, warm", "DCP: load, warm", 1.3),
    ("load --no-verify", "ours: load --no-verify, warm", "DCP: load, warm", 0.7),
)


def make_state(smoke: bool, seed: int) -> State:
    specs = parameter_specs(SHAPES[smoke], 1).items()
    return {
        f"{kind}.{name}": torch.arange(math.prod(spec.global_shape), dtype=torch.float32)
        .add_(seed)
        .to(dtype)
        .view(spec.global_shape)
        for name, spec in specs
        for kind, dtype in KINDS.items()
    }


def flat(state: State) -> list[FlatState]:
    return [FlatState(*name.split(".", 1), tensor.view(-1)) for name, tensor in state.items()]


def files_of(state: State, smoke: bool) -> dict[str, dict[str, Piece]]:
    """As a run of one rank saves them."""
    pieces = state_pieces(flat(state), parameter_specs(SHAPES[smoke], 1), mp_rank=0, mp_size=1)
    return {
        f"mp_rank_00/{kind if kind == 'model' else kind + '_dp_00'}.safetensors": {
            key: piece for key, piece in pieces.items() if key.startswith(f"{kind}.")
        }
        for kind in KINDS
    }


def save_ours(state: State, folder: Path, smoke: bool) -> None:
    write_checkpoint(folder, 1, facts={}, files=files_of(state, smoke), rank=0, world_size=1, attempt="a", timeout_s=60)


def load_ours(state: State, folder: Path, smoke: bool, verify: bool) -> None:
    checkpoint = find_checkpoint(folder, log=print, verify=verify)
    assert checkpoint is not None
    load_state(flat(state), parameter_specs(SHAPES[smoke], 1), checkpoint, mp_rank=0, mp_size=1)


def save_dcp(state: State, folder: Path, smoke: bool, threads: int = 1) -> None:
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, thread_count=threads), no_dist=True)


def load_dcp(state: State, folder: Path, smoke: bool) -> None:
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=True)


SAVES: dict[str, Callable[..., None]] = {
    "ours: save": save_ours,
    "DCP: save": save_dcp,
    "DCP: save, 4 threads": functools.partial(save_dcp, threads=4),
}
LOADS: dict[str, Callable[..., None]] = {
    "ours: load": functools.partial(load_ours, verify=True),
    "ours: load --no-verify": functools.partial(load_ours, verify=False),
    "DCP: load": load_dcp,
}


def folder_of(scratch: Path, name: str) -> Path:
    return scratch / (name.split(":")[0] + "4" * name.endswith("4 threads"))


def timed(work: Callable[[], object]) -> dict[str, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu, "load": os.getloadavg()[0]}


def cached(folder: Path, warm: bool) -> None:
    """Bring the folder's files into the page cache, or drop them from it; they are on the disk."""
    for path in (path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb", buffering=0) as stream:
            if warm:
                while stream.read(1 << 22):
                    pass
            else:
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def blocked(state: State, scratch: Path, smoke: bool, count: int) -> list[dict[str, float]]:
    """--async-save: how long a save holds up training, and until it is committed."""
    saver = Saver(folder=scratch / "async", attempt="a", asynchronous=True, keep_last=1, log=lambda line: None)
    saver.prepare(files_of(state, smoke))  # as a run does before its first step
    visits = []
    for iteration in range(1, count + 1):
        os.sync()
        cpu, start = time.process_time(), time.perf_counter()
        saver.save(iteration, files_of(state, smoke), {})
        visits.append({"blocked_s": time.perf_counter() - start})
        assert saver.finish() is not None
        visits[-1] |= {"committed_s": time.perf_counter() - start, "cpu_s": time.process_time() - cpu}
    saver.close()
    shutil.rmtree(scratch / "async")
    return visits


def anonymous() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


def peak_of(work: Callable[[], object]) -> int:
    """Anonymous bytes at the peak of `work` beyond those at its beginning."""
    before = peak = anonymous()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        work()
    finally:
        done.set()
    watcher.join()
    return peak - before


def peaks(state: State, scratch: Path, smoke: bool) -> dict[str, int]:
    """Of every arm, each in a child that begins as this process is now: nothing was freed yet that it could use."""
    arms = {**SAVES, **LOADS}.items()
    works = {name: functools.partial(work, state, folder_of(scratch, name), smoke) for name, work in arms}
    works["ours: save --async-save"] = functools.partial(blocked, state, scratch, smoke, 1)
    context, found = multiprocessing.get_context("fork"), {}
    for name, work in works.items():
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=lambda send, work: send(peak_of(work)), args=(sender.send, work))
        child.start()
        sender.close()
        found[name] = receiver.recv()
        child.join()
    return found


def measure(scratch: Path, smoke: bool, rounds: int) -> dict[str, Any]:
    state = make_state(smoke, 0)
    peak_extra_bytes = peaks(state, scratch, smoke)
    gigabytes = sum(tensor.nbytes for tensor in state.values()) / 1e9
    visits: dict[str, list[dict[str, float]]] = {name: [] for name in SAVES}
    for name in [*SAVES] + [name for _ in range(rounds) for name in [*SAVES, *reversed(SAVES)]]:
        shutil.rmtree(folder_of(scratch, name), ignore_errors=True)
        os.sync()
        visits[name].append(timed(lambda name=name: SAVES[name](state, folder_of(scratch, name), smoke)))
    visits = {name: all_of_it[1:] for name, all_of_it in visits.items()}  # the first touches memory for the first time
    visits["ours: save --async-save, blocked"] = [
        {**visit, "wall_s": visit["blocked_s"]} for visit in blocked(state, scratch, smoke, 2 * rounds)
    ]
    os.sync()
    target = make_state(smoke, 1)
    for warm in (True, False):
        for name in [name for _ in range(rounds) for name in [*LOADS, *reversed(LOADS)]]:
            for tensor in target.values():
                tensor.zero_()
            cached(folder_of(scratch, name), warm)
            visits.setdefault(f"{name}, {'warm' if warm else 'cold'}", []).append(
                timed(lambda name=name: LOADS[name](target, folder_of(scratch, name), smoke))
            )
            assert all(torch.equal(tensor, target[key]) for key, tensor in state.items()), name
    return {"gigabytes": gigabytes, "visits": visits, "peak_extra_bytes": peak_extra_bytes}


def summarise(result: dict[str, Any]) -> None:
    """Seconds a gigabyte of each arm, and the goals."""
    size = result["gigabytes"]
    result["summary"] = figures = {
        name: {f"{key}_per_gb": report.spread([visit[key] / size for visit in visits]) for key in ("wall_s", "cpu_s")}
        for name, visits in result["visits"].items()
    }

    def median(name: str, key: str = "wall_s_per_gb") -> float:
        return figures[name][key]["median"]

    goals = [(name, median(ours) / median(other), limit) for name, ours, other, limit in GOALS]
    goals += [
        (
            "CPU s a GB, the most of ours",
            max(median(name, "cpu_s_per_gb") for name in figures if name.startswith("ours")),
            2.0,
        ),
        ("--async-save blocks, s a GB", median("ours: save --async-save, blocked"), 0.3),
    ]
    result["goals"] = [
        {"goal": name, "found": found, "limit": limit, "met": found <= limit} for name, found, limit in goals
    ]


def show(result: dict[str, Any]) -> str:
    rows = [
        [
            name,
            *(
                f"{figure[key][part]:.3f}"
                for key, part in (
                    ("wall_s_per_gb", "median"),
                    ("wall_s_per_gb", "p10"),
                    ("wall_s_per_gb", "p90"),
                    ("cpu_s_per_gb", "median"),
                )
            ),
        ]
        for name, figure in result["summary"].items()
    ]
    memory = [[name, f"{peak / 1e9:.3f}"] for name, peak in result["peak_extra_bytes"].items()]
    goals = [
        [goal["goal"], f"{goal['found']:.3f}", f"{goal['limit']:.2f}", "met" if goal["met"] else "NOT MET"]
        for goal in result["goals"]
    ]
    return "\n\n".join(
        [
            report.machine_line(result),
            report.table(["seconds a GB", "wall", "p10", "p90", "CPU"], rows),
            report.table(["peak of anonymous memory beyond the state", "GB"], memory),
            report.table(["goal", "found", "at most", ""], goals),
        ]
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", metavar="DIR", help="where to save, on the disk in question (default: temporary)")
    parser.add_argument("--rounds", type=int, default=3, help="repetitions of the mirrored order")
    parser.add_argument("--output", metavar="DIR", help="folder of the result (default: benchmarks/results)")
    parser.add_argument("--smoke", action="store_true", help="a tiny state: proves the script")
    chosen = parser.parse_args(argv)
    if chosen.smoke and not chosen.output:
        parser.error("--smoke needs --output DIR: its figures are no results")
    warnings.filterwarnings("ignore", module="torch.distributed")
    logging.getLogger("torch").setLevel(logging.ERROR)
    rounds = 1 if chosen.smoke else chosen.rounds
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        result = {
            **report.header("checkpoint"),
            "smoke": chosen.smoke,
            "rounds": rounds,
            "state": "weights bf16, masters and two moments fp32",
            **measure(Path(folder), chosen.smoke, rounds),
        }
    summarise(result)
    output = Path(chosen.output) if chosen.output else report.RESULTS
    report.write(output / "checkpoint.json", result)
    print(show(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
