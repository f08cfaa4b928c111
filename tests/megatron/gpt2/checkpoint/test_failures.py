"""A crash or an error at any moment of a save leaves the earlier checkpoints loadable."""

from __future__ import annotations

import random
import resource
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from megatron.gpt2.checkpoint.writer import write_checkpoint
from tests.megatron.gpt2.checkpoint.saved_states import (
    find,
    full_state,
    rank_files,
    save,
)
from tests.warm_python import WarmPython

REPOSITORY = Path(__file__).parents[4]


def test_rank_0_names_the_rank_that_is_missing(tmp_path: Path) -> None:
    save(tmp_path, 100)
    with pytest.raises(TimeoutError, match="rank 1 within 0.2 s"):
        write_checkpoint(
            tmp_path,
            200,
            facts={},
            files=rank_files(full_state(200), 0, 2),
            rank=0,
            world_size=2,
            attempt="b",
            timeout_s=0.2,
        )
    assert [path.name for path in tmp_path.glob("iter_*")] == ["iter_0000100"]
    assert find(tmp_path) == (100, "")


def test_what_a_crashed_attempt_left_takes_no_part(tmp_path: Path) -> None:
    """Rank 1 had finished its part before the crash; its report must not stand for the new attempt."""
    save(tmp_path, 100)
    write_checkpoint(
        tmp_path,
        200,
        facts={},
        files=rank_files(full_state(666), 1, 2),
        rank=1,
        world_size=2,
        attempt="crashed",
        timeout_s=5,
    )
    with pytest.raises(TimeoutError, match="rank 1"):
        write_checkpoint(
            tmp_path,
            200,
            facts={},
            files=rank_files(full_state(200), 0, 2),
            rank=0,
            world_size=2,
            attempt="second",
            timeout_s=0.1,
        )
    save(tmp_path, 200, attempt="third")
    assert find(tmp_path) == (200, "")
    assert not list(tmp_path.glob("*.tmp*"))


@pytest.mark.parametrize("rank", [0, 1])
def test_disk_full(rank: int, tmp_path: Path) -> None:
    """In the place of a full disk, a limit on the size of files: the same error in the same place."""
    save(tmp_path, 100)

    other: dict[str, Any] = {"facts": {}, "world_size": 2, "attempt": "b", "timeout_s": 5}
    if rank == 0:
        write_checkpoint(tmp_path, 200, files=rank_files(full_state(200), 1, 2), rank=1, **other)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, hard))  # of rank 1 the model fits, the optimizer does not
    try:
        with pytest.raises(OSError, match=r"safetensors: cannot write its [\d,]+ bytes: .*bytes are free"):
            write_checkpoint(tmp_path, 200, files=rank_files(full_state(200), rank, 2), rank=rank, **other)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    if rank == 1:  # rank 0 hears of it at once
        with pytest.raises(OSError, match="rank 1 could not write its part of .*mp_rank_01/optim"):
            write_checkpoint(tmp_path, 200, files=rank_files(full_state(200), 0, 2), rank=0, **other)
    assert [path.name for path in tmp_path.glob("iter_*")] == ["iter_0000100"]
    assert find(tmp_path) == (100, "")


WRITER = """
import sys
from pathlib import Path
from tests.megatron.gpt2.checkpoint.saved_states import save
for iteration in range(1, 10_000):
    save(Path(sys.argv[1]), iteration % 7 + 1, 1, attempt=f"{sys.argv[2]}-{iteration}")
    print(iteration % 7 + 1, flush=True)
"""


def test_kill_9_leaves_the_last_one_loadable(python: WarmPython, tmp_path: Path) -> None:
    """Numbers are saved again on purpose: renaming aside is part of what is interrupted."""
    chance = random.Random(1)
    for kill in range(3):
        writer = subprocess.Popen(
            [python.python, "-c", WRITER, str(tmp_path), str(kill)], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(chance.uniform(0.0, 0.2))
        writer.kill()
        committed = [line for line in writer.stdout.read().splitlines() if line.isdigit()]
        writer.wait()
        iteration, _ = find(tmp_path)
        assert iteration is not None
        # The one that was being committed may have made it.
        if committed:
            assert iteration in (int(committed[-1]), int(committed[-1]) % 7 + 1)
