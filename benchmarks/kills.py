#!/usr/bin/env python3
"""kill -9 at random moments around saves: the last committed iteration loads every time.

    python benchmarks/kills.py      # 200 kills in half a minute

A writer takes the folder's lock, loads what is there, checks every entry, and saves iteration after iteration of a
small state, in the one half of the trials at once and in the other with --async-save. It is killed at a random moment,
and the next one goes on in the same folder. What a writer was told is committed, or something newer, has to be found
whole.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works in a clone that is not installed

import torch

from benchmarks import report
from megatron.gpt2.checkpoint.folder import Checkpoint, Piece, find_checkpoint, write_checkpoint
from megatron.gpt2.checkpoint.save_lock import lock_folder
from megatron.gpt2.checkpoint.saver import Saver

ENTRIES = 50_000  # of each of two files: large enough that kills find every part of a save at work


def values(iteration: int, file: int) -> torch.Tensor:
    return torch.arange(ENTRIES, dtype=torch.float32) + 1000 * iteration + file


def loaded(folder: Path, said: list[str]) -> int:
    """The iteration that a load finds, every entry of it right; 0 where there is none."""
    checkpoint = find_checkpoint(folder, log=said.append)
    if checkpoint is None:
        return 0
    assert_whole(checkpoint)
    return checkpoint.iteration


def assert_whole(checkpoint: Checkpoint) -> None:
    for file in (0, 1):
        assert torch.equal(checkpoint.read(f"x{file}"), values(checkpoint.iteration, file)), checkpoint.path


def write(folder: Path, attempt: str, asynchronous: bool, committed: Connection) -> None:
    """Until it is killed: save, and say what is on the disk."""
    lock = lock_folder(folder, print)
    saver = Saver(
        functools.partial(write_checkpoint, folder, rank=0, world_size=1, timeout_s=60, keep_last=3),
        rank=0,
        attempt=attempt,
        asynchronous=asynchronous,
        local_world_size=1,
        max_over_ranks=int,
        log=lambda line: None,
    )
    iteration = loaded(folder, [])
    while not lock.closed:
        iteration += 1
        pieces = [Piece(values(iteration, file), (ENTRIES,), (0,)) for file in (0, 1)]
        saver.save(iteration, {f"mp_rank_00/file{i}.safetensors": {f"x{i}": pieces[i]} for i in (0, 1)}, {})
        committed.send(saver.saved_iteration or 0)  # in a thread's case the one before
        for piece in pieces:
            piece.tensor.fill_(-1)  # as training changes what was saved: a thread has a copy


def campaign(folder: Path, kills: int, seed: int = 1) -> dict[str, Any]:
    """Kill so many writers in `folder`. AssertionError where anything was lost."""
    chance, context = random.Random(seed), multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.kills"])  # imports torch once
    inside, fallbacks, newest = 0, 0, 0
    for kill in range(kills):
        receive, send = context.Pipe(duplex=False)
        writer = context.Process(target=write, args=(folder, f"{kill}", bool(kill % 2), send))
        writer.start()
        send.close()
        known = [receive.recv()]  # it is at work
        time.sleep(chance.uniform(0.0, 0.15))
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        assert writer.exitcode == -signal.SIGKILL, "the writer ended by itself"
        try:
            while True:
                known.append(receive.recv())
        except EOFError:
            pass
        said: list[str] = []
        found = loaded(folder, said)
        newest = max(newest, *known)
        assert newest <= found <= newest + 2, (kill, newest, found, said)
        inside += any(folder.glob("iter_*.tmp-*"))
        fallbacks, newest = fallbacks + bool(said), found
    return {
        "kills": kills,
        "seed": seed,
        "last_committed_loads": kills,
        "inside_of_a_save": inside,
        "loads_with_a_warning": fallbacks,
        "newest_iteration": newest,
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--folder", metavar="DIR", help="where to save (default: temporary)")
    parser.add_argument("--output", metavar="DIR", help="folder of the result (default: benchmarks/results)")
    chosen = parser.parse_args(argv)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        result = {
            **report.header("kills"),
            **campaign(Path(folder), chosen.kills),
            "seconds": round(time.monotonic() - start, 1),
        }
    output = Path(chosen.output) if chosen.output else report.RESULTS
    report.write(output / "kills.json", result)
    print(
        f"{report.machine_line(result)}: {result['kills']} kills in {result['seconds']} s, after each of which the "
        f"last committed iteration was loaded; {result['inside_of_a_save']} left a half-written one behind"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
