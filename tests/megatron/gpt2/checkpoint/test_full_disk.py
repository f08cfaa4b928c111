"""A disk that fills up, at every point of a save: the error names the file and its bytes, the old checkpoint stays."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from megatron.gpt2.checkpoint.folder import TRACKER, find_checkpoint
from megatron.gpt2.checkpoint.manifest import MANIFEST
from megatron.gpt2.checkpoint.writer import Piece, write_checkpoint
from tests.conftest import ROOT


def save_until_it_fits(folder: str) -> None:
    """With 0, 1, 2, ... free pages on the filesystem of `folder`: every way in which a save can run out of them."""
    disk, ballast = Path(folder), Path(folder) / "ballast"
    state = {iteration: torch.randn(3000, generator=torch.Generator().manual_seed(iteration)) for iteration in (1, 2)}

    def save(iteration: int) -> list[str]:
        """What went wrong on either rank."""
        problems = []
        for rank in (1, 0):
            pieces = {f"x#{rank}": Piece(state[iteration][1500 * rank : 1500 * rank + 1500], (3000,), (1500 * rank,))}
            try:
                write_checkpoint(
                    disk / "save",
                    iteration,
                    files={f"mp_rank_0{rank}/model.safetensors": pieces},
                    facts={"a manifest": "of three pages" * 600},
                    rank=rank,
                    world_size=2,
                    attempt="a",
                    timeout_s=0.2,
                    log=pytest.fail,
                )
            except OSError as error:
                problems.append(str(error))
        return problems

    assert not save(1)
    full: Counter[str] = Counter()
    for pages in range(100):
        with open(ballast, "wb", buffering=0) as stream, contextlib.suppress(OSError):
            while True:
                stream.write(bytes(4096))
        os.truncate(ballast, ballast.stat().st_size // 4096 * 4096 - 4096 * pages)
        if not (problems := save(2)):
            break
        found = re.match(
            rf"{disk}/save/(\S+): cannot write its [\d,]+ bytes: No space left on device "
            r"\([\d,]+ bytes are free there\); earlier checkpoints are untouched",
            problems[0],
        )
        assert found, problems
        full[found[1].rpartition("/")[2]] += 1
        assert sorted(os.listdir(disk / "save")) == ["iter_0000001", TRACKER], pages
        checkpoint = find_checkpoint(disk / "save", log=pytest.fail)
        assert checkpoint is not None and torch.equal(checkpoint.read("x"), state[1])
        ballast.unlink()
    checkpoint = find_checkpoint(disk / "save", log=pytest.fail)
    assert checkpoint is not None and torch.equal(checkpoint.read("x"), state[2])
    print(json.dumps(full))


def test_a_full_disk(tmp_path: Path) -> None:
    mounted = f"mount -t tmpfs -o size=400k tmpfs {tmp_path} && "
    alone = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    if not shutil.which("unshare") or subprocess.run([*alone, mounted + "true"], capture_output=True).returncode:
        pytest.skip("no small filesystem can be mounted here; test_checkpointing.py limits the size of files instead")
    program = f"from {__name__} import save_until_it_fits; save_until_it_fits({str(tmp_path)!r})"
    run = subprocess.run(
        [*alone, f'{mounted} exec "$0" -c "$1"', sys.executable, program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stderr
    # The second rank's file and its table, then the first rank's, the manifest and the tracker.
    assert json.loads(run.stdout.splitlines()[-1]).keys() == {
        "model.safetensors",
        "rank_00001.tmp",
        "rank_00000.tmp",
        MANIFEST,
        f"{TRACKER}.tmp",
    }
