"""Writers of checkpoints that are killed with kill -9 at random moments around their saves.

A writer takes the folder's lock, loads what is there, checks every entry, and saves iteration after iteration of a
small state, in one half of the trials at once and in the other with --async-save. It is killed at a random moment, and
the next one continues in the same folder. The iteration that a writer was told is committed, or a newer one, must be
found whole.
"""

from __future__ import annotations

import os
import random
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from megatron.gpt2.checkpoint.folder import find_checkpoint, lock_folder
from megatron.gpt2.checkpoint.reader import Checkpoint
from megatron.gpt2.checkpoint.saver import Saver
from megatron.gpt2.checkpoint.writer import Piece
from tests.distributed import CONTEXT

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
    saver = Saver(folder=folder, attempt=attempt, asynchronous=asynchronous, keep_last=3, log=lambda line: None)
    iteration = loaded(folder, [])
    while not lock.closed:
        iteration += 1
        pieces = [Piece(values(iteration, file), (ENTRIES,), (0,)) for file in (0, 1)]
        saver.save(iteration, {f"mp_rank_00/file{i}.safetensors": {f"x{i}": pieces[i]} for i in (0, 1)}, {})
        committed.send(saver.saved_iteration or 0)  # in a thread's case the one before
        for piece in pieces:
            piece.tensor.fill_(-1)  # as training changes what was saved: a thread has a copy


def kill_writers(folder: Path, kills: int, seed: int = 1) -> dict[str, Any]:
    """Kill so many writers in `folder`. AssertionError if anything was lost."""
    chance = random.Random(seed)
    inside, fallbacks, newest = 0, 0, 0
    for kill in range(kills):
        receive, send = CONTEXT.Pipe(duplex=False)
        writer = CONTEXT.Process(target=write, args=(folder, f"{kill}", bool(kill % 2), send))
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
    return {"inside_of_a_save": inside, "loads_with_a_warning": fallbacks, "newest_iteration": newest}
