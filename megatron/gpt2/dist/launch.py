"""Read the rank of this process and the rendezvous address from flags or the variables of a launcher. The first source
in this list that has a rank is used:

    flags      --rank --world-size --init-method for processes started by hand, or --nproc-per-node, which starts ranks
    torchrun   RANK, WORLD_SIZE …
    MPI        OMPI_COMM_WORLD_RANK …, or PMI_RANK …
    Slurm      SLURM_PROCID … inside a step of srun

torch itself reads only torchrun's variables. A process that no launcher has started is a single rank, even inside an
allocation of Slurm. This module does not use the network; rendezvous.py connects the ranks.
"""

import os
import re
import resource
import socket
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

import torch

from data_utils.command_line import require
from megatron.gpt2.config import LaunchConfig
from megatron.gpt2.config.flags import parse_launch_flags
from megatron.gpt2.dist.ranks import RankInfo

Environment = Mapping[str, str]

# Slurm numbers the steps of `srun` from 0 upwards, and its special steps (interactive, batch, extern …) from this
# number downwards.
FIRST_SPECIAL_STEP = 0xFFFFFFF0
# A process opens at most 128 files, and at most 8 connections to each other rank: one in each group that gloo connects.
OPEN_FILES, OPEN_FILES_FOR_A_RANK = 128, 8
DEFAULT_PORT = "29500"  # torchrun's default port
# Variables for rank, world size, local rank and local world size of torchrun, Open MPI, and PMI (MPICH, Intel MPI …).
VARIABLES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
# Each of these variables has the id of a job, which is equal on all ranks.
JOBS = ("SLURM_JOB_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID", "PBS_JOBID", "LSB_JOBID")
# {variable with the id of an allocation: program that starts ranks in the allocation}
ALLOCATIONS = {"SLURM_JOB_ID": "srun", "PBS_JOBID": "mpirun", "LSB_JOBID": "mpirun"}


@dataclass(frozen=True)
class Launch:
    """The launch settings of this process, before the rendezvous."""

    rank: int = 0
    world_size: int = 1
    # (local rank, local world size), or None if only the rendezvous can find them
    local: tuple[int, int] | None = None
    init_method: str = ""  # The address of the rendezvous, as in --init-method.
    use_agent_store: bool = False  # The launcher serves the store instead of rank 0.
    host: str = ""  # The name of this machine.
    timeout: float = LaunchConfig.init_timeout
    ranks_to_start: int = 0  # The number of ranks that this process starts. The first one is `rank`.
    max_restarts: int = 0
    elastic: bool = False  # The run may start with fewer ranks (--elastic).
    restart_count: int = 0  # The number of times that the launcher has restarted the ranks.
    notice: str = ""  # A line that the program prints for the user.

    def __post_init__(self) -> None:
        self.rank_info()  # `rank_info` raises ValueError if rank and world size contradict each other.

    def rank_info(self) -> RankInfo:
        """Return rank and world size. If the local rank is unknown, the process counts as the only one on its
        machine."""
        return RankInfo(self.rank, self.world_size, *(self.local or (0, 1)))


def read_launch(argv: Sequence[str], environ: Environment = os.environ) -> tuple[Launch, list[str]]:
    """Return the launch settings of this process and the remaining arguments of its command line. Raises ValueError for
    bad flags."""
    flags, args = parse_launch_flags(argv)
    if flags.rank is not None and flags.world_size is not None:
        from_environment: Launch | None = Launch(flags.rank, flags.world_size)
    else:
        from_environment = _from_variables(environ) or _from_slurm(environ)
    started = _started_here(flags, environ)
    require(
        not (started and from_environment and from_environment.world_size > 1),
        "--nproc-per-node starts the ranks itself, but a launcher has started this "
        f"process as one of {from_environment.world_size if from_environment else 0} already: leave one of them out",
    )
    launch = started or from_environment or Launch()
    launch = replace(
        launch,
        init_method=flags.init_method or launch.init_method,
        host=environ.get("SLURMD_NODENAME") or socket.gethostname(),
        timeout=flags.init_timeout,
        elastic=flags.elastic,
        restart_count=restart_count(environ),
    )
    if launch.world_size > 1:
        raise_open_file_limit(launch.world_size)
    if launch.world_size > max(launch.ranks_to_start, 1):
        _check_init_method(launch)
    elif launch.world_size == 1 and from_environment is None:
        require(flags.init_method is None, "--init-method needs --rank and --world-size, or a launcher that sets them")
        launch = replace(launch, notice=_notice(environ))
    return launch, args


def raise_open_file_limit(world_size: int) -> None:
    """Raise the limit of open files and connections of this process and its children to what a rank needs. Raises
    ValueError if the limit is too low and cannot be raised."""
    needed = OPEN_FILES + OPEN_FILES_FOR_A_RANK * world_size
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        require(
            hard == resource.RLIM_INFINITY or hard >= needed,
            f"this process may open {soft} files, and each of {world_size} ranks needs up to {needed}: raise the limit "
            f"(ulimit -n {needed})",
        )
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _started_here(flags: LaunchConfig, environ: Environment) -> Launch | None:
    """Return the launch for --nproc-per-node, with the first rank of this machine, or None without the flag. A single
    rank is not started but runs in this process."""
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
        ranks_to_start=starts,
        max_restarts=flags.max_restarts,
        init_method=_tcp_address(environ, "", DEFAULT_PORT) if flags.nnodes > 1 else "",
    )


def _from_variables(environ: Environment) -> Launch | None:
    """Read the variables of torchrun or MPI, or return None without them. MPI gives no rendezvous address: the ranks
    use this machine if all of them are on it, and otherwise the first machine in Slurm's list."""
    for names in VARIABLES:
        if names[0] in environ and names[1] in environ:
            rank, world, *local = (_number(environ, name) for name in names if name in environ)
            served, host, port = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True", "", ""
            if names[0] != "RANK":
                host = "localhost" if local[1:] == [world] else _first_slurm_host(environ)
                served, port = False, _job_port(environ)
            address = _tcp_address(environ, host, port)
            return Launch(rank, world, (local[0], local[1]) if len(local) == 2 else None, address, served)
    return None


def _from_slurm(environ: Environment) -> Launch | None:
    if not in_slurm_step(environ):
        return None
    node = int(environ.get("SLURM_NODEID", 0))
    tasks = re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    # "4(x2),3" means nodes with 4, 4 and 3 ranks.
    counts = [int(count) for count, times in tasks for _ in range(int(times or 1))]
    require(
        bool(counts) or "SLURM_NTASKS" in environ,
        "srun started this process, but neither SLURM_NTASKS nor SLURM_STEP_TASKS_PER_NODE gives the number of tasks",
    )
    return Launch(
        _number(environ, "SLURM_PROCID"),
        sum(counts) or _number(environ, "SLURM_NTASKS"),
        (_number(environ, "SLURM_LOCALID"), counts[node]) if node < len(counts) else None,
        _tcp_address(environ, _first_slurm_host(environ), _job_port(environ)),
    )


def restart_count(environ: Environment = os.environ) -> int:
    """Return how often torchrun or --max-restarts has restarted the ranks."""
    return int(environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def in_slurm_step(environ: Environment) -> bool:
    """Return whether srun started this process as one of its tasks.

    A batch script or a shell in an allocation has most of the variables that a task has. A process that the script or
    shell starts without srun must be a single rank.
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
                f"notice: this process runs as a single rank: it is in the allocation {name}={environ[name]}, but not "
                f"started by {starter}, torchrun or --nproc-per-node"
            )
    return ""


def _number(environ: Environment, name: str) -> int:
    require(environ[name].isdecimal(), f"{name}={environ[name]} in the environment is not a number")
    return int(environ[name])


def _tcp_address(environ: Environment, host: str, port: str) -> str:
    """Return tcp://HOST:PORT, or "" if host or port is unknown. MASTER_ADDR and MASTER_PORT replace the arguments."""
    host, port = environ.get("MASTER_ADDR", host), environ.get("MASTER_PORT", port)
    return f"tcp://{host_port(host, port)}" if host and port else ""


def host_port(host: str, port: object) -> str:
    """Return HOST:PORT, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _check_init_method(launch: Launch) -> None:
    """Raise ValueError if the rendezvous address is missing or malformed."""
    require(
        launch.init_method != "",
        f"no rendezvous address for the {launch.world_size} ranks: set MASTER_ADDR (the host of "
        "rank 0) and MASTER_PORT, or give --init-method tcp://HOST:PORT or file:///PATH; torchrun and srun set "
        "them by themselves",
    )
    try:
        address = urlsplit(launch.init_method)
        is_tcp = address.scheme == "tcp" and address.hostname and address.port
    except ValueError:  # For example, the port is not a number.
        is_tcp = False
    require(
        bool(is_tcp) or launch.init_method.startswith("file:///"),
        f"bad rendezvous address {launch.init_method}: give tcp://HOST:PORT of rank 0 (tcp://[ADDRESS]:PORT for "
        "IPv6) or file:///PATH",
    )


def _job_port(environ: Environment) -> str:
    """Return the port of a job, below the ephemeral ports. All ranks of a job compute the same port. Different jobs
    usually compute different ports."""
    job = next((environ[name] for name in JOBS if name in environ), None)
    if job is None:
        return DEFAULT_PORT
    return str(15000 + zlib.crc32(f"{job}.{environ.get('SLURM_STEP_ID', 0)}".encode()) % 14000)


def _first_slurm_host(environ: Environment) -> str:
    """Return the first host of Slurm's list, or "" without a list. The first host of "rack[1-2]n[01-02],login" is
    rack1n01. Slurm's own tool for such lists, scontrol, may not be installed."""
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    text = next((environ[name] for name in names if environ.get(name)), "")
    first = "".join(re.findall(r"^(?:\[[^\]]*\]|[^,\[])+", text))  # the text before the first comma outside brackets
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first)
