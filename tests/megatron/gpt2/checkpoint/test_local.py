"""Local checkpoints: each machine can be lost, a run goes on from the newest one, and what is damaged is left out."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from megatron.gpt2.checkpoint.local import NAME, LocalCheckpoints, assemble
from megatron.gpt2.checkpoint.reader import Checkpoint
from megatron.gpt2.checkpoint.writer import Piece
from megatron.gpt2.dist.ranks import Meeting, Ranks
from megatron.gpt2.train.report import newest_iteration
from tests.distributed import run_ranks
from tests.megatron.gpt2.train.training_runs import finish, start, steps, write_text

HOSTS = ["a", "b", "c", "c"]
ROWS = torch.arange(32.0).view(8, 4)  # two of each rank


def save_lose_and_assemble(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    said: list[str] = []
    own = Path(folder) / HOSTS[rank]  # stands for this machine's memory
    local = LocalCheckpoints(own / "abc", HOSTS, rank, dist.group.WORLD, "word", said.append)
    saved = []
    for iteration in (1, 2, 3):
        piece = Piece(ROWS[2 * rank : 2 * rank + 2] * iteration, (8, 4), (2 * rank, 0))
        saved.append(local.save(iteration, {f"mp_rank_{rank:02d}/model.safetensors": {"w": piece}}, {"at": iteration}))
    found: dict[str, Any] = {"saved": saved}
    dist.barrier()
    found["files"] = sorted(str(path.relative_to(own / "abc")) for path in own.rglob("*.safetensors"))
    dist.barrier()
    if rank == 0:
        shutil.rmtree(Path(folder) / "b")  # a new machine takes its place
        (Path(folder) / NAME).write_text("abc")
    port = [TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False) if rank == 0 else None]
    number = torch.tensor(port[0].port if port[0] else 0)
    dist.broadcast(number, 0)
    store = TCPStore("127.0.0.1", int(number), None, False, wait_for_workers=False)
    alive: Any = SimpleNamespace(gone=lambda seconds: {})
    meeting = Meeting(store, None, dict(enumerate(HOSTS)), alive)
    place = (0, 1) if rank < 2 else (rank - 2, 2)
    dist.barrier()
    dist.destroy_process_group()
    found["older"] = assemble(folder, str(own), 3, Ranks(rank, world_size, *place, meeting=meeting), said.append)
    meeting.store.set(f"done/{rank}", "")
    meeting.store.wait([f"done/{other}" for other in range(world_size)])
    # Each name of a gathering serves once in a run.
    meeting = Meeting(PrefixStore("again", store), None, meeting.hosts, alive)
    ranks = Ranks(rank, world_size, *place, meeting=meeting)
    at = assemble(folder, str(own), 2, ranks, said.append)
    assert at is not None, said
    checkpoint = Checkpoint(at / "iter_0000003")
    found |= {"w": checkpoint.read("w"), "at": checkpoint.facts["at"], "said": said}
    dist.init_process_group("gloo", store=PrefixStore("the end", store), rank=rank, world_size=world_size)
    dist.barrier()  # rank 0 has the store
    return found


def test_a_machine_that_is_lost_gets_everything_from_the_others(tmp_path: Path) -> None:
    found = run_ranks(save_lose_and_assemble, 4, str(tmp_path))
    assert all(one["saved"] == [True] * 3 and one["older"] is None for one in found)
    # The last two; of each the files of the own ranks and of those of the machine before.
    by_machine = {"a": (0, 2, 3), "b": (1, 0), "c": (2, 3, 1)}
    for host, one in zip(HOSTS, found, strict=True):
        assert one["files"] == sorted(
            f"iter_{number:07d}/mp_rank_{rank:02d}/model.safetensors" for number in (2, 3) for rank in by_machine[host]
        )
    assert all(torch.equal(one["w"], 3 * ROWS) and one["at"] == 3 for one in found)
    assert "files, which came from other machines in" in found[0]["said"][0]


def failing_disk(rank: int, world_size: int, folder: str) -> tuple[bool, list[str], list[str]]:
    said: list[str] = []
    own = Path(folder) / HOSTS[rank]
    if rank == 1:
        own.write_text("a file in the place of the folder")
    local = LocalCheckpoints(own / "abc", HOSTS[:2], rank, dist.group.WORLD, "word", said.append)
    piece = Piece(ROWS[:2], (4, 4), (2 * rank, 0))
    saved = local.save(7, {f"mp_rank_{rank:02d}/model.safetensors": {"w": piece}}, {})
    return saved, said, [path.name for path in own.rglob("iter_*")]


def test_a_disk_that_fails_costs_one_checkpoint_and_no_run(tmp_path: Path) -> None:
    for saved, said, left in run_ranks(failing_disk, 2, str(tmp_path)):
        assert not saved and not left
        assert len(said) == 1 and said[0].startswith("WARNING: no local checkpoint at iteration 7: rank 1: ")


def test_a_run_goes_on_from_the_newest_and_from_none_that_is_damaged(tmp_path: Path) -> None:
    write_text(tmp_path)
    flags = ["--local-checkpoint-dir", str(tmp_path / "memory"), "--local-checkpoint-interval", "2"]
    run = start(0, 1, str(tmp_path), flags)
    expected: list[float] = []
    for _ in range(5):
        expected += steps(run, 1)["loss"]
        run.save_locally()
        if run.progress.iteration == 1:
            run.save()
    finish(run)

    run = start(0, 1, str(tmp_path), flags)
    assert run.progress.iteration == 4 and run.config.checkpoint.load is None
    assert steps(run, 1)["loss"] == expected[4:]
    finish(run)

    (file,) = (tmp_path / "memory").glob("*/iter_0000004/mp_rank_00/model.safetensors")
    data, where = bytearray(file.read_bytes()), run.config.checkpoint
    assert newest_iteration(where, alone=True) == 4, "as the line of a restart has it"
    file.write_bytes(b"")
    assert newest_iteration(where, alone=True) == 2 and newest_iteration(where, alone=False) == 4
    assert newest_iteration(replace(where, local_checkpoint_dir=None, local_checkpoint_interval=None), alone=True) == 1
    data[-1] ^= 1
    file.write_bytes(data)
    run = start(0, 1, str(tmp_path), flags)
    assert run.progress.iteration == 1, "the durable one"
    assert steps(run, 1)["loss"] == expected[1:2]
    run.checkpoints.remove_local()
    assert not list((tmp_path / "memory").glob("*/*"))
    finish(run)
