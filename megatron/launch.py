"""Who am I among the ranks, and how do we meet: torchrun's or Slurm's variables, and the process group."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron.config import require

# Steps that Slurm makes by itself (interactive, batch, extern …) count down from here; `srun` counts up from 0.
FIRST_SPECIAL_STEP = 0xFFFFFFF0


@dataclass(frozen=True)
class Ranks:
    """This process among all (`rank` of `world_size`) and on its machine (`local_rank` of `local_world_size`)."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    def __post_init__(self) -> None:
        require(0 <= self.rank < self.world_size and 0 <= self.local_rank < self.local_world_size <= self.world_size,
                f"the launcher's variables contradict each other: rank {self.rank} of {self.world_size}, "
                f"local rank {self.local_rank} of {self.local_world_size}")

    @staticmethod
    def from_environment(environ: Mapping[str, str] = os.environ) -> Ranks:
        """torchrun's variables, else those of a Slurm step, else a world of one. Raises ValueError if they are bad."""
        if "RANK" in environ and "WORLD_SIZE" in environ:
            rank, world = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
            # A launcher that says nothing about machines has one.
            local_world = _number(environ, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environ else world
            local = _number(environ, "LOCAL_RANK") if "LOCAL_RANK" in environ else rank % max(local_world, 1)
            return Ranks(rank, world, local, local_world)
        if in_slurm_step(environ):
            world = _number(environ, "SLURM_NTASKS")
            return Ranks(_number(environ, "SLURM_PROCID"), world, _number(environ, "SLURM_LOCALID"),
                         _slurm_tasks_here(environ, world))
        return Ranks()


def in_slurm_step(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process as one of its tasks. In a batch script or a shell inside an allocation the
    same variables describe the whole allocation, and a plain `python` there must run alone: slurmd put its name into
    that environment, but no step of srun's."""
    if not all(name in environ for name in ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")):
        return False
    if "SLURM_STEP_ID" in environ:
        return _number(environ, "SLURM_STEP_ID") < FIRST_SPECIAL_STEP
    return "SLURMD_NODENAME" not in environ


def _number(environ: Mapping[str, str], name: str) -> int:
    require(environ[name].isdecimal(), f"{name}={environ[name]} in the environment is not a number")
    return int(environ[name])


def _slurm_tasks_here(environ: Mapping[str, str], world_size: int) -> int:
    """Tasks on this node, from a list such as "4(x2),3": two nodes of 4 and one of 3."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?",
                                   environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE", ""))):
        counts += [int(count)] * int(times or 1)
    node = int(environ.get("SLURM_NODEID", 0))
    if sum(counts) == world_size and node < len(counts):
        return counts[node]
    return -(-world_size // max(1, len(_slurm_hosts(environ))))


def _slurm_hosts(environ: Mapping[str, str]) -> list[str]:
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    return expand_hosts(next((environ[name] for name in names if environ.get(name)), ""))


def expand_hosts(text: str) -> list[str]:
    """Slurm's short form of a list of hosts: "rack[1-2]n[01-02],login" is rack1n01, rack1n02, rack2n01, rack2n02 and
    login. Its own tool for this, scontrol, need not be there."""
    hosts: list[str] = []
    for item in re.findall(r"(?:\[[^\]]*\]|[^,\[])+", text):  # split at the commas outside brackets
        made = [""]
        for bracket, plain in re.findall(r"\[([^\]]*)\]|([^\[\]]+)", item):
            parts = [part for piece in bracket.split(",") for part in _expand_range(piece)] if bracket else [plain]
            made = [host + part for host in made for part in parts]
        hosts += made
    return hosts


def _expand_range(text: str) -> list[str]:
    first, dash, last = text.partition("-")
    if not dash:
        return [first]
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]


def set_rendezvous(ranks: Ranks, environ: MutableMapping[str, str] = os.environ) -> None:
    """Make sure that MASTER_ADDR and MASTER_PORT say where the ranks meet. Under Slurm they are derived from what all
    ranks see alike: the first host, and a port from the job and step so that jobs that share a node do not clash."""
    if in_slurm_step(environ) and "RANK" not in environ:
        hosts = _slurm_hosts(environ)
        if hosts:
            environ.setdefault("MASTER_ADDR", hosts[0])
        job, step = (int(environ.get(name, 0)) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
        environ.setdefault("MASTER_PORT", str(15000 + (job + 97 * step) % 17000))  # below the ephemeral ports
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        require(name in environ, f"{name} is not in the environment, so {ranks.world_size} ranks cannot meet: start "
                                 "them with torchrun or srun")
    if ranks.local_world_size == ranks.world_size and any(name == "lo" for _, name in socket.if_nameindex()):
        # On one machine gloo would look its host name up, which fails or warns in many a container.
        environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def initialize_distributed(ranks: Ranks, backend: str, timeout_minutes: float) -> None:
    """Join the process group; nothing to join in a world of one. `backend` is what `device.choose_backend` allowed;
    for nccl the current CUDA device is this rank's own. The timeout is what ends a run whose peer hangs: torch's
    default is half an hour."""
    if ranks.world_size == 1:
        return
    set_rendezvous(ranks)
    device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else None
    dist.init_process_group(backend, init_method="env://", rank=ranks.rank, world_size=ranks.world_size,
                            timeout=timedelta(minutes=timeout_minutes), device_id=device)


def shutdown() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
