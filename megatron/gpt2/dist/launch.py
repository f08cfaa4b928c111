"""What flags and launchers say of this process: its rank, and where the ranks meet. The first that says so counts:

    flags      --rank --world-size --init-method, of processes started by hand, or --nproc-per-node, which starts them
    torchrun   RANK, WORLD_SIZE …
    MPI        OMPI_COMM_WORLD_RANK …, or PMI_RANK …
    Slurm      SLURM_PROCID … inside a step of srun

torch reads torchrun's variables only. A plain `python` runs alone, also inside an allocation. Nothing here touches the
network: see rendezvous.py.
"""

import os
import re
import socket
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

import torch

from megatron.gpt2.config import LaunchConfig, require
from megatron.gpt2.config.flags import launch_flags
from megatron.gpt2.dist.ranks import Ranks

# Steps that Slurm makes by itself (interactive, batch, extern …) count down from here; `srun` counts up from 0.
FIRST_SPECIAL_STEP = 0xFFFFFFF0
DEFAULT_PORT = "29500"  # torchrun's
# Rank, ranks, and the same on this machine: of torchrun, of Open MPI, and of MPICH, Intel MPI and what else speaks PMI.
VARIABLES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
# What names a job to all of its ranks, where Slurm does not.
JOBS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID", "PBS_JOBID", "LSB_JOBID")
# What names an allocation, and what starts ranks in it.
ALLOCATIONS = (("SLURM_JOB_ID", "srun"), ("PBS_JOBID", "mpirun"), ("LSB_JOBID", "mpirun"))


@dataclass(frozen=True)
class Launch:
    """What flags or a launcher say about this process, before the ranks meet."""

    rank: int = 0
    world_size: int = 1
    local: tuple[int, int] | None = None  # rank on this machine, ranks on it; None where it shows when they meet
    where: str = ""  # the meeting place, as --init-method spells it
    served: bool = False  # by the launcher, and not by rank 0
    host: str = ""  # this machine's name
    hosts: tuple[str, ...] = ()  # of each rank, where the launcher gives them
    timeout: float = LaunchConfig.init_timeout
    starts: int = 0  # ranks that this process is to start, from `rank` on
    max_restarts: int = 0  # how often it starts them again
    elastic: bool = False  # go on with the ranks that come
    attempt: int = 0  # how often this rank's launcher has started its ranks again
    notice: str = ""  # a line for the user

    def __post_init__(self) -> None:
        self.ranks()  # raises where the numbers cannot be

    def ranks(self) -> Ranks:
        """This process among the ranks, as far as it is known: without `local` it counts as alone on its machine."""
        return Ranks(self.rank, self.world_size, *(self.local or (0, 1)))


def read_launch(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> tuple[Launch, list[str]]:
    """The launch of this process, and the words of its command line that are not about it. ValueError for bad flags."""
    flags, words = launch_flags(argv)
    by_hand = flags.rank is not None and flags.world_size is not None
    said = (
        Launch(flags.rank or 0, flags.world_size or 1) if by_hand else _from_variables(environ) or _from_slurm(environ)
    )
    started = _started_here(flags, environ)
    require(
        not (started and said and said.world_size > 1),
        "--nproc-per-node starts the ranks itself, but a launcher has started this "
        f"process as one of {said.world_size if said else 0} already: leave out the one or the other",
    )
    found = started or said or Launch()
    found = replace(found, where=flags.init_method or found.where)
    if found.world_size > max(found.starts, 1):  # others are elsewhere
        _check_place(found)
    elif found.world_size == 1 and said is None:
        require(flags.init_method is None, "--init-method needs --rank and --world-size, or a launcher that knows them")
        found = replace(found, notice=_notice(environ))
    host = environ.get("SLURMD_NODENAME") or socket.gethostname()
    return replace(found, host=host, timeout=flags.init_timeout, elastic=flags.elastic, attempt=attempt(environ)), words


def _started_here(flags: LaunchConfig, environ: Mapping[str, str]) -> Launch | None:
    """With --nproc-per-node, the first rank of this machine; a single rank of a machine is this process itself."""
    if flags.nproc_per_node is None:
        return None
    here = flags.nproc_per_node or torch.cuda.device_count() or 2
    starts = here if here > 1 or flags.max_restarts or flags.elastic else 0
    if here * flags.nnodes == 1 and not starts:
        return None
    return Launch(
        flags.node_rank * here,
        flags.nnodes * here,
        (0, here),
        starts=starts,
        max_restarts=flags.max_restarts,
        where=_place(environ, "", DEFAULT_PORT) if flags.nnodes > 1 else "",
    )


def _from_variables(environ: Mapping[str, str]) -> Launch | None:
    """torchrun's and MPI's. MPI does not say where the ranks meet, but where all are on this machine, or Slurm does."""
    for rank, size, local_rank, local_size in VARIABLES:
        if rank in environ and size in environ:
            world, local, host, port = _number(environ, size), None, "", ""
            if local_rank in environ and local_size in environ:
                local = _number(environ, local_rank), _number(environ, local_size)
            if rank != "RANK":
                is_here = local is not None and local[1] == world
                host, port = "localhost" if is_here else next(iter(_slurm_hosts(environ)), ""), _job_port(environ)
            served = rank == "RANK" and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            return Launch(_number(environ, rank), world, local, _place(environ, host, port), served)
    return None


def _from_slurm(environ: Mapping[str, str]) -> Launch | None:
    if not in_slurm_step(environ):
        return None
    hosts, counts = _slurm_hosts(environ), _slurm_counts(environ)
    names = [name for name in ("SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_NPROCS") if name in environ]
    world = _number(environ, names[0]) if names else sum(counts)
    require(
        world > 0,
        "srun started this process, but neither SLURM_NTASKS nor SLURM_STEP_TASKS_PER_NODE gives the number of tasks",
    )
    node = int(environ.get("SLURM_NODEID", 0))
    known = sum(counts) == world and node < len(counts)
    here = counts[node] if known else -(-world // max(1, len(hosts)))
    of_ranks = [host for host, count in zip(hosts, counts, strict=False) for _ in range(count)]
    return Launch(
        _number(environ, "SLURM_PROCID"),
        world,
        (_number(environ, "SLURM_LOCALID"), here),
        _place(environ, next(iter(hosts), ""), _job_port(environ)),
        hosts=tuple(of_ranks) if len(of_ranks) == world else (),
    )


def attempt(environ: Mapping[str, str] = os.environ) -> int:
    """How often the launcher has started the ranks again: torchrun, or --max-restarts, which says it alike."""
    count = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return int(count) if count.isdecimal() else 0


def in_slurm_step(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process as one of its tasks.

    In a batch script or a shell inside an allocation the same variables describe the whole allocation, and a plain
    `python` there must run alone: slurmd's name is in that environment, but no step of srun's.
    """
    if not all(name in environ for name in ("SLURM_PROCID", "SLURM_LOCALID")):
        return False
    if "SLURM_STEP_ID" in environ:
        return _number(environ, "SLURM_STEP_ID") < FIRST_SPECIAL_STEP
    return "SLURMD_NODENAME" not in environ


def _notice(environ: Mapping[str, str]) -> str:
    for name, starter in ALLOCATIONS:
        if name in environ:
            return (
                f"notice: this process runs alone: it is inside the allocation {name}={environ[name]}, but not "
                f"started by {starter}, torchrun or --nproc-per-node"
            )
    return ""


def _number(environ: Mapping[str, str], name: str) -> int:
    require(environ[name].isdecimal(), f"{name}={environ[name]} in the environment is not a number")
    return int(environ[name])


def _place(environ: Mapping[str, str], host: str, port: str) -> str:
    """tcp://HOST:PORT, of MASTER_ADDR and MASTER_PORT where they are set; empty where either is unknown."""
    host, port = environ.get("MASTER_ADDR", host), environ.get("MASTER_PORT", port)
    return f"tcp://{host_port(host, port)}" if host and port else ""


def host_port(host: str, port: object) -> str:
    """HOST:PORT, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _check_place(launch: Launch) -> None:
    """ValueError unless `launch` says where its ranks meet, in a form that can be read."""
    require(
        launch.where != "",
        f"nothing says where the {launch.world_size} ranks meet: set MASTER_ADDR (the host of "
        "rank 0) and MASTER_PORT for each, or give --init-method tcp://HOST:PORT or file:///PATH; torchrun and "
        "srun set them by themselves",
    )
    try:
        place = urlsplit(launch.where)
        is_tcp = place.scheme == "tcp" and place.hostname and place.port
    except ValueError:  # a port that is none, or half a bracket
        is_tcp = False
    require(
        bool(is_tcp) or launch.where.startswith("file:///"),
        f"the ranks cannot meet at {launch.where}: tcp://HOST:PORT of rank 0 (tcp://[ADDRESS]:PORT for "
        "IPv6) or file:///PATH would do",
    )


def _job_port(environ: Mapping[str, str]) -> str:
    """A port below the ephemeral ones, which all ranks of a job derive alike: jobs that share a node get different
    ports.
    """
    job = next((environ[name] for name in JOBS if name in environ), None)
    if "SLURM_JOB_ID" in environ and environ["SLURM_JOB_ID"].isdecimal():
        number = int(environ["SLURM_JOB_ID"]) + 97 * int(environ.get("SLURM_STEP_ID", 0))
    elif job is not None:
        number = zlib.crc32(job.encode())
    else:
        return DEFAULT_PORT
    return str(15000 + number % 14000)


def _slurm_counts(environ: Mapping[str, str]) -> list[int]:
    """Tasks of each node, from a list such as "4(x2),3": two nodes of 4 and one of 3."""
    text = environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE", ""))
    return [int(count) for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text) for _ in range(int(times or 1))]


def _slurm_hosts(environ: Mapping[str, str]) -> list[str]:
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    return expand_hosts(next((environ[name] for name in names if environ.get(name)), ""))


def expand_hosts(text: str) -> list[str]:
    """The hosts of Slurm's short form: "rack[1-2]n[01-02],login" is rack1n01, rack1n02, rack2n01, rack2n02, login.

    Slurm's own tool for this, scontrol, is not always there.
    """
    hosts: list[str] = []
    for item in re.findall(r"(?:\[[^\]]*\]|[^,\[])+", text):  # split at the commas outside brackets
        made = [""]
        for bracket, plain in re.findall(r"\[([^\]]*)\]|([^\[\]]+)", item):
            parts = [part for piece in bracket.split(",") for part in _expand_range(piece)] if bracket else [plain]
            made = [host + part for host in made for part in parts]
        hosts += made
    return hosts


def _expand_range(text: str) -> list[str]:
    """002-004 -> 002, 003, 004."""
    first, _, last = text.partition("-")
    return [str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)]
