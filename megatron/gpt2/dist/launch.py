"""What flags and launchers say of this process: its rank, and where the ranks meet. The first that says so counts:

    flags      --rank --world-size --init-method, of processes started by hand, or --nproc-per-node, which starts them
    torchrun   RANK, WORLD_SIZE …
    MPI        OMPI_COMM_WORLD_RANK …, or PMI_RANK …
    Slurm      SLURM_PROCID … inside a step of srun

torch reads torchrun's variables only. A plain `python` runs as a single rank, also inside an allocation. Nothing here
touches the network: see rendezvous.py.
"""

import itertools
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

Environment = Mapping[str, str]

# Steps that Slurm makes by itself (interactive, batch, extern …) count down from here; `srun` counts up from 0.
FIRST_SPECIAL_STEP = 0xFFFFFFF0
DEFAULT_PORT = "29500"  # torchrun's
# Rank, ranks, and the same on this machine: of torchrun, of Open MPI, and of MPICH, Intel MPI and what else speaks PMI.
VARIABLES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
# Variables that name a job to all of its ranks.
JOBS = ("SLURM_JOB_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID", "PBS_JOBID", "LSB_JOBID")
# Variables that name an allocation, and the program that starts ranks in it.
ALLOCATIONS = {"SLURM_JOB_ID": "srun", "PBS_JOBID": "mpirun", "LSB_JOBID": "mpirun"}


@dataclass(frozen=True)
class Launch:
    """What flags or a launcher say about this process, before the ranks meet."""

    rank: int = 0
    world_size: int = 1
    local: tuple[int, int] | None = None  # rank on this machine, ranks on it; None if only the meeting shows it
    where: str = ""  # the meeting place, as --init-method spells it
    served: bool = False  # by the launcher, and not by rank 0
    host: str = ""  # this machine's name
    hosts: tuple[str, ...] = ()  # of each rank, if the launcher gives them
    timeout: float = LaunchConfig.init_timeout
    starts: int = 0  # ranks that this process is to start, from `rank` on
    max_restarts: int = 0  # how often it starts them again
    elastic: bool = False  # go on with the ranks that come
    attempt: int = 0  # how often this rank's launcher has started its ranks again
    notice: str = ""  # a line for the user

    def __post_init__(self) -> None:
        self.ranks()  # raises ValueError if the numbers contradict each other

    def ranks(self) -> Ranks:
        """This process among the ranks, as far as it is known: without `local` it counts as the only one on its
        machine."""
        return Ranks(self.rank, self.world_size, *(self.local or (0, 1)))


def read_launch(argv: Sequence[str], environ: Environment = os.environ) -> tuple[Launch, list[str]]:
    """Return the launch of this process, and the words of its command line that are not about it. ValueError for bad
    flags."""
    flags, words = launch_flags(argv)
    if flags.rank is not None and flags.world_size is not None:
        said: Launch | None = Launch(flags.rank, flags.world_size)
    else:
        said = _from_variables(environ) or _from_slurm(environ)
    started = _started_here(flags, environ)
    require(
        not (started and said and said.world_size > 1),
        "--nproc-per-node starts the ranks itself, but a launcher has started this "
        f"process as one of {said.world_size if said else 0} already: leave out the one or the other",
    )
    found = started or said or Launch()
    found = replace(
        found,
        where=flags.init_method or found.where,
        host=environ.get("SLURMD_NODENAME") or socket.gethostname(),
        timeout=flags.init_timeout,
        elastic=flags.elastic,
        attempt=attempt(environ),
    )
    if found.world_size > max(found.starts, 1):  # others are elsewhere
        _check_place(found)
    elif found.world_size == 1 and said is None:
        require(flags.init_method is None, "--init-method needs --rank and --world-size, or a launcher that knows them")
        found = replace(found, notice=_notice(environ))
    return found, words


def _started_here(flags: LaunchConfig, environ: Environment) -> Launch | None:
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


def _from_variables(environ: Environment) -> Launch | None:
    """torchrun's variables, or MPI's. MPI does not say where the ranks meet: on this machine if all are there, else on
    the first one that Slurm lists."""
    for names in VARIABLES:
        if names[0] in environ and names[1] in environ:
            rank, world, *local = (_number(environ, name) for name in names if name in environ)
            served, host, port = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True", "", ""
            if names[0] != "RANK":
                host = "localhost" if local[1:] == [world] else next(iter(_slurm_hosts(environ)), "")
                served, port = False, _job_port(environ)
            place = _place(environ, host, port)
            return Launch(rank, world, (local[0], local[1]) if len(local) == 2 else None, place, served)
    return None


def _from_slurm(environ: Environment) -> Launch | None:
    if not in_slurm_step(environ):
        return None
    hosts, node = _slurm_hosts(environ), int(environ.get("SLURM_NODEID", 0))
    tasks = re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    counts = [int(count) for count, times in tasks for _ in range(int(times or 1))]  # "4(x2),3": of nodes with 4, 4, 3
    require(
        bool(counts) or "SLURM_NTASKS" in environ,
        "srun started this process, but neither SLURM_NTASKS nor SLURM_STEP_TASKS_PER_NODE gives the number of tasks",
    )
    return Launch(
        _number(environ, "SLURM_PROCID"),
        sum(counts) or _number(environ, "SLURM_NTASKS"),
        (_number(environ, "SLURM_LOCALID"), counts[node]) if node < len(counts) else None,
        _place(environ, next(iter(hosts), ""), _job_port(environ)),
        hosts=tuple(host for host, count in zip(hosts, counts, strict=False) for _ in range(count)),
    )


def attempt(environ: Environment = os.environ) -> int:
    """How often the launcher has started the ranks again: torchrun, or --max-restarts, which sets the same variable."""
    return int(environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def in_slurm_step(environ: Environment) -> bool:
    """Whether srun started this process as one of its tasks.

    In a batch script or a shell inside an allocation the same variables describe the whole allocation, and a plain
    `python` there must run as a single rank: slurmd's name is in that environment, but no step of srun's.
    """
    if "SLURM_PROCID" not in environ or "SLURM_LOCALID" not in environ:
        return False
    if "SLURM_STEP_ID" in environ:
        return _number(environ, "SLURM_STEP_ID") < FIRST_SPECIAL_STEP
    return "SLURMD_NODENAME" not in environ


def _notice(environ: Environment) -> str:
    for name, starter in ALLOCATIONS.items():
        if name in environ:
            return (
                f"notice: this process runs alone: it is inside the allocation {name}={environ[name]}, but not "
                f"started by {starter}, torchrun or --nproc-per-node"
            )
    return ""


def _number(environ: Environment, name: str) -> int:
    require(environ[name].isdecimal(), f"{name}={environ[name]} in the environment is not a number")
    return int(environ[name])


def _place(environ: Environment, host: str, port: str) -> str:
    """tcp://HOST:PORT, of MASTER_ADDR and MASTER_PORT if they are set; empty if either is unknown."""
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
    except ValueError:  # a port that is not a number, or half a bracket
        is_tcp = False
    require(
        bool(is_tcp) or launch.where.startswith("file:///"),
        f"the ranks cannot meet at {launch.where}: tcp://HOST:PORT of rank 0 (tcp://[ADDRESS]:PORT for "
        "IPv6) or file:///PATH would do",
    )


def _job_port(environ: Environment) -> str:
    """A port below the ephemeral ones, the same on all ranks of a job: jobs that share a node get different ports."""
    job = next((environ[name] for name in JOBS if name in environ), None)
    if job is None:
        return DEFAULT_PORT
    return str(15000 + zlib.crc32(f"{job}.{environ.get('SLURM_STEP_ID', 0)}".encode()) % 14000)


def _slurm_hosts(environ: Environment) -> list[str]:
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    return expand_hosts(next((environ[name] for name in names if environ.get(name)), ""))


def expand_hosts(text: str) -> list[str]:
    """Expand Slurm's short form: "rack[1-2]n[01-02],login" is rack1n01, rack1n02, rack2n01, rack2n02, login.

    Slurm's own tool for this, scontrol, is not always there.
    """
    hosts: list[str] = []
    for item in re.findall(r"(?:\[[^\]]*\]|[^,\[])+", text):  # split at the commas outside brackets
        parts = [_expand_ranges(part) if part[0] == "[" else [part] for part in re.findall(r"\[[^\]]*\]|[^\[]+", item)]
        hosts += map("".join, itertools.product(*parts))
    return hosts


def _expand_ranges(text: str) -> list[str]:
    """[002-004,7] -> 002, 003, 004, 7."""
    numbers: list[str] = []
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)]
    return numbers
