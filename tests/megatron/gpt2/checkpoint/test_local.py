"""Local checkpoints: the run survives the loss of any machine, continues from the newest checkpoint, and ignores
damaged ones."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from megatron.gpt2.checkpoint.local import RUN_NAME_FILE, LocalCheckpoints, assemble_local_checkpoint
from megatron.gpt2.checkpoint.save_folder import find_checkpoint
from megatron.gpt2.checkpoint.writer import ShardedTensor
from megatron.gpt2.dist.ranks import RankInfo, Rendezvous
from megatron.gpt2.train.checkpointing import newest_iteration
from tests.distributed import run_ranks
from tests.megatron.gpt2.train.training_runs import finish, start, steps, write_text

HOSTS = ["a", "b", "c", "c"]
ROWS = torch.arange(32.0).view(8, 4)  # Each rank has two rows.


def save_lose_and_assemble(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    logged: list[str] = []
    own = folder / HOSTS[rank]  # a folder instead of the machine's memory
    local = LocalCheckpoints(own / "abc", HOSTS, rank, dist.group.WORLD, "word", logged.append)
    saved = []
    for iteration in (1, 2, 3):
        shard = ShardedTensor(ROWS[2 * rank : 2 * rank + 2] * iteration, (8, 4), (2 * rank, 0))
        saved.append(local.save(iteration, {f"mp_rank_{rank:02d}/model.safetensors": {"w": shard}}, {"at": iteration}))
    dist.barrier()
    files = sorted(str(path.relative_to(own / "abc")) for path in own.rglob("*.safetensors"))
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder / "b")  # A new machine with an empty disk replaces machine b.
        (folder / RUN_NAME_FILE).write_text("abc")
    port = [TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False) if rank == 0 else None]
    number = torch.tensor(port[0].port if port[0] else 0)
    dist.broadcast(number, 0)
    store = TCPStore("127.0.0.1", int(number), None, False, wait_for_workers=False)
    alive: Any = SimpleNamespace(lost_ranks=lambda seconds: {})
    rendezvous = Rendezvous(store, None, dict(enumerate(HOSTS)), alive)
    place = (0, 1) if rank < 2 else (rank - 2, 2)
    dist.barrier()
    dist.destroy_process_group()
    ranks = RankInfo(rank, world_size, *place, rendezvous=rendezvous)
    at = assemble_local_checkpoint(str(folder), str(own), 2, ranks, logged.append)
    assert at is not None, logged
    checkpoint = find_checkpoint(at, log=logged.append)  # There is no warning.
    assert checkpoint.iteration == 3
    found = {"saved": saved, "files": files, "w": checkpoint.read("w"), "at": checkpoint.metadata["at"], "said": logged}
    dist.init_process_group("gloo", store=PrefixStore("the end", store), rank=rank, world_size=world_size)
    dist.barrier()  # Rank 0 serves the store, so it must end last.
    return found


def test_a_machine_that_is_lost_gets_everything_from_the_others(tmp_path: Path) -> None:
    found = run_ranks(save_lose_and_assemble, 4, tmp_path)
    assert all(of_rank["saved"] == [True] * 3 for of_rank in found)
    # Each machine has the last two checkpoints: the files of its ranks and of the previous machine.
    by_machine = {"a": (0, 2, 3), "b": (1, 0), "c": (2, 3, 1)}
    for host, of_rank in zip(HOSTS, found, strict=True):
        assert of_rank["files"] == sorted(
            f"iter_{number:07d}/mp_rank_{rank:02d}/model.safetensors" for number in (2, 3) for rank in by_machine[host]
        )
    assert all(torch.equal(of_rank["w"], 3 * ROWS) and of_rank["at"] == 3 for of_rank in found)
    assert "missing files of a local checkpoint from other machines in" in found[0]["said"][0]
    assert not any(line.startswith("WARNING") for of_rank in found for line in of_rank["said"])


def failing_disk(rank: int, world_size: int, folder: Path) -> tuple[bool, list[str], list[str]]:
    logged: list[str] = []
    own = folder / HOSTS[rank]
    if rank == 1:
        own.write_text("a file in the place of the folder")
    local = LocalCheckpoints(own / "abc", HOSTS[:2], rank, dist.group.WORLD, "word", logged.append)
    shard = ShardedTensor(ROWS[:2], (4, 4), (2 * rank, 0))
    saved = local.save(7, {f"mp_rank_{rank:02d}/model.safetensors": {"w": shard}}, {})
    return saved, logged, [path.name for path in own.rglob("iter_*")]


def test_a_disk_that_fails_costs_one_checkpoint_and_no_run(tmp_path: Path) -> None:
    for saved, logged, left in run_ranks(failing_disk, 2, tmp_path):
        assert not saved and not left
        assert len(logged) == 1 and logged[0].startswith("WARNING: no local checkpoint at iteration 7: rank 1: ")


def test_a_run_goes_on_from_the_newest_and_from_none_that_is_damaged(tmp_path: Path) -> None:
    write_text(tmp_path)
    flags = ["--local-checkpoint-dir", str(tmp_path / "memory"), "--local-checkpoint-interval", "2"]
    trainer = start(0, 1, tmp_path, flags)
    expected: list[float] = []
    for _ in range(5):
        expected += steps(trainer, 1)["loss"]
        trainer.checkpoints.save_locally()
        if trainer.progress.iteration == 1:
            trainer.checkpoints.save()
    finish(trainer)

    trainer = start(0, 1, tmp_path, flags)
    assert trainer.progress.iteration == 4 and trainer.config.checkpoint.load is None
    assert steps(trainer, 1)["loss"] == expected[4:]
    finish(trainer)

    (file,) = (tmp_path / "memory").glob("*/iter_0000004/mp_rank_00/model.safetensors")
    data, where = bytearray(file.read_bytes()), trainer.config.checkpoint
    assert newest_iteration(where, one_machine=True) == 4, "as the line of a restart has it"
    file.write_bytes(b"")
    assert newest_iteration(where, one_machine=True) == 2 and newest_iteration(where, one_machine=False) == 4
    data[-1] ^= 1
    file.write_bytes(data)
    trainer = start(0, 1, tmp_path, flags)
    assert trainer.progress.iteration == 1, "the durable one"
    assert steps(trainer, 1)["loss"] == expected[1:2]
    trainer.checkpoints.remove_local()
    assert not list((tmp_path / "memory").glob("*/*"))
    finish(trainer)
