"""What this process runs on: device, precision, backend, threads, allocator, how fast that could be at best, and the
versions of all of it.

Each choice comes with its reason, a line for the log. If the user asked for something impossible, a ValueError names
what to ask for instead.
"""

import contextlib
import ctypes
import functools
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch
import torch.distributed as dist

from data_utils.command_line import ROOT
from megatron.gpt2.config import require
from megatron.gpt2.dist.launch import in_slurm_step
from megatron.gpt2.dist.ranks import Ranks, named

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PRECISIONS = {dtype: name for name, dtype in DTYPES.items()}

# With these cuBLAS has a workspace for each stream, whatever else runs (its documentation, "Results Reproducibility").
CUBLAS_WORKSPACES = (":4096:8", ":16:8")

# Dense 16-bit TFLOP/s of the datasheets, by a pattern of the device's name; the first that matches counts.
DATASHEET = (
    ("B200", 2250),
    ("GB200", 2500),
    ("H100 PCIe", 756),
    ("(H100|H200) NVL", 835),
    ("(H100|H200|H800|GH200)", 989),
    ("(A100|A800)", 312),
    ("A30", 165),
    ("A40", 149.7),
    ("A10", 125),
    ("L40S", 362),
    ("L40", 181),
    ("L4", 121),
    ("RTX 5090", 209.5),
    ("RTX 4090", 165.2),
    ("RTX 3090", 71),
    ("V100.PCIE?", 112),
    ("V100", 125),
    ("T4", 65),
    ("MI300X", 1307),
)


def choose_device(requested: str, ranks: Ranks, environ: Mapping[str, str] = os.environ) -> tuple[torch.device, str]:
    """Return the device for --device auto|cpu|cuda, and why. Every rank calls it: two on one GPU are a ValueError on
    all. An unusable GPU is not an error under `auto`, because the first run on a new machine should work, but its line
    starts with WARNING and names both ways out."""
    device, why = _own_device(requested, ranks, environ)
    if ranks.meeting is not None:
        mine = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
        refuse_shared_gpus(ranks.meeting.gather("gpu", ranks.rank, mine), ranks.meeting.hosts)
    return device, why


def refuse_shared_gpus(gpus: Sequence[str], hosts: Mapping[int, str]) -> None:
    """ValueError if two ranks are on one physical GPU. gpus: the UUID of each rank's, or of its part of one (MIG);
    empty on a CPU."""
    for gpu in gpus:
        together = [rank for rank, other in enumerate(gpus) if other == gpu]
        require(
            not gpu or len(together) == 1,
            f"{named(together, hosts)} are on one GPU (UUID {gpu}): show each rank a GPU of "
            "its own (CUDA_VISIBLE_DEVICES, srun --gpu-bind), start fewer, or train on the CPU with --device cpu "
            "--distributed-backend gloo",
        )


def _own_device(requested: str, ranks: Ranks, environ: Mapping[str, str]) -> tuple[torch.device, str]:
    cpu = torch.device("cpu")
    if requested == "cpu":
        return cpu, "cpu: --device cpu"
    with warnings.catch_warnings(record=True) as caught:  # torch says why CUDA fails in a warning
        warnings.simplefilter("always")
        visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if visible == 1 and ranks.local_world_size > 1:  # its own, or one for all: their UUIDs show it
        return torch.device("cuda", 0), f"cuda: {torch.cuda.get_device_name(0)}, the one that this rank sees"
    if visible:
        require(
            ranks.local_world_size <= visible,
            f"{ranks.local_world_size} ranks on this machine but {visible} visible GPUs: start "
            f"at most {visible}, or train on the CPU with --device cpu --distributed-backend gloo",
        )
        return torch.device("cuda", ranks.local_rank), f"cuda: {torch.cuda.get_device_name(ranks.local_rank)}"
    problem = ""  # also if the GPU is hidden on purpose
    if gpu_present() and environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1"):
        detail = f" ({' '.join(str(caught[0].message).split())})" if caught else ""
        problem = (
            f"torch {torch.__version__} is built without CUDA; install a CUDA build (https://pytorch.org)"
            if torch.version.cuda is None
            else f"the driver does not serve torch's CUDA {torch.version.cuda}; update it, or install a torch built for "
            f"its CUDA (https://pytorch.org){detail}"
        )
    require(requested == "auto", f"--device cuda: {problem or 'this machine has no GPU'}; --device cpu trains without")
    if problem:
        return cpu, (
            f"WARNING: THE GPU IS NOT USED, this run is on the CPU: {problem}; --device cpu says that the CPU is meant"
        )
    if torch.backends.mps.is_available():
        return cpu, "cpu: Apple's GPU (MPS) is not supported"
    return cpu, "cpu: this machine has no GPU"


def gpu_present(root: str = "/") -> bool:
    """Whether the NVIDIA driver shows a GPU (in WSL, the driver of Windows), even if torch cannot use it. root: of the
    file system."""
    signs = ("proc/driver/nvidia/gpus/*", "dev/nvidia[0-9]*", "dev/dxg")
    return any(any(Path(root).glob(sign)) for sign in signs)


def choose_precision(requested: str, device: torch.device) -> tuple[torch.dtype, str]:
    """Return the dtype for --precision auto|fp32|bf16|fp16|fp16-on-gpu, and why. The line starts with WARNING if another
    choice would serve better, and with notice if it is not the dtype that the flag names."""
    if requested == "fp16-on-gpu" and device.type == "cpu":
        dtype, why = choose_precision("auto", device)
        return dtype, f"notice: --fp16 on a CPU means --precision auto: {why}"
    if requested == "fp16" and device.type == "cpu":
        return torch.float16, (
            "WARNING: --precision fp16 on a CPU: most CPUs have no fp16 arithmetic, and a step can "
            "take 40 times as long as with --precision auto"
        )
    if requested != "auto":
        name = requested.removesuffix("-on-gpu")
        return DTYPES[name], f"{name}: --precision {requested}"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if major >= 8:
            return torch.bfloat16, f"bf16: native on sm{major}{minor}"
        return torch.float16, f"fp16: sm{major}{minor} has no bf16, which starts with sm80"
    if native := cpu_bf16():
        return torch.bfloat16, f"bf16: this CPU has {native}"
    return torch.float32, "fp32: this CPU has no bf16 arithmetic (AMX, avx512_bf16)"


def cpu_bf16(cpuinfo: str = "/proc/cpuinfo") -> str:
    """Return the name of the CPU's feature that multiplies bf16; empty if it has none. cpuinfo: the file that lists
    them."""
    text = ""
    with contextlib.suppress(OSError):
        text = Path(cpuinfo).read_text()
    line = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)  # x86 and ARM
    features = line[1].split() if line else []
    return next((name for name in ("amx_bf16", "avx512_bf16", "bf16") if name in features), "")


def choose_backend(requested: str | None, device: torch.device) -> tuple[str, str]:
    """Return the backend for --distributed-backend, and why; it counts in a world of one as well, so that a command
    line is wrong everywhere or nowhere."""
    on_gpu = device.type == "cuda"
    if requested is None:
        backend = "nccl" if on_gpu and dist.is_nccl_available() else "gloo"
        return backend, f"{backend}: the ranks are on {'GPUs' if on_gpu else 'CPUs'}"
    require(
        requested != "nccl" or on_gpu,
        "--distributed-backend nccl needs a GPU for each rank and this run is on the "
        "CPU: use --distributed-backend gloo",
    )
    require(
        requested != "nccl" or dist.is_nccl_available(),
        "--distributed-backend nccl: this torch is built without NCCL; use gloo",
    )
    require(
        requested != "mpi" or dist.is_mpi_available(),
        "--distributed-backend mpi: this torch is built without MPI; use gloo, or nccl on GPUs",
    )
    return requested, f"{requested}: --distributed-backend {requested}"


def set_threads(ranks: Ranks, environ: Mapping[str, str] = os.environ) -> None:
    """Give torch this rank's share of the cores, unless OMP_NUM_THREADS sets it. Ranks that each took all cores would
    slow each other down many times over."""
    if "OMP_NUM_THREADS" not in environ:
        # Slurm binds each task to its own cores, so what this process sees is its share already.
        bound = in_slurm_step(environ) and "SLURM_CPUS_PER_TASK" in environ
        torch.set_num_threads(max(1, usable_cores() // (1 if bound else ranks.local_world_size)))


def usable_cores(root: str = "/") -> int:
    """Return the physical cores that this process may use: its affinity, hyperthreads counted once, within the quota
    of its cgroup. root: of the file system."""
    if not hasattr(os, "sched_getaffinity"):  # not Linux
        return os.cpu_count() or 1
    cores = set()
    for cpu in os.sched_getaffinity(0):
        siblings = Path(root, f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(siblings.read_text().strip() if siblings.exists() else str(cpu))
    return max(1, int(min(len(cores), cgroup_cpus(root))))


def cgroup_cpus(root: str = "/") -> float:
    """Return the least CPU quota of this process's cgroup and those above it (version 2 or 1), in CPUs; inf without
    one."""
    quotas = [float("inf")]
    for folder in cgroup_folders("cpu", root):
        # The root has no such file, nor has a cgroup that this container does not show.
        with contextlib.suppress(OSError, ValueError):
            files = ["cpu.max"] if (folder / "cpu.max").exists() else ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
            quota, period = " ".join((folder / file).read_text() for file in files).split()
            if quota not in ("max", "-1"):
                quotas.append(int(quota) / int(period))
    return min(quotas)


def cgroup_folders(controller: str, root: str = "/") -> Iterator[Path]:
    """The folders that limit this process's share of a controller ("cpu", "memory"): its cgroup's and those above it,
    of version 2 or 1."""
    groups = Path(root, "proc/self/cgroup")
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = Path(root, "sys/fs/cgroup") / (controller if controllers else "")
        folder = top / path.lstrip("/")
        yield from (place for place in (folder, *folder.parents) if place.is_relative_to(top))


def require_compiler(device: torch.device, environ: Mapping[str, str] = os.environ) -> None:
    """ValueError if torch.compile cannot work: it writes C++ for a CPU and Triton for a GPU."""
    if device.type == "cuda":
        require(
            importlib.util.find_spec("triton") is not None,
            "--compile needs Triton on a GPU: pip install triton, or leave the flag out",
        )
    else:
        compilers = [environ["CXX"]] if "CXX" in environ else ["g++", "clang++"]
        require(
            any(shutil.which(name) for name in compilers),
            f"--compile needs a C++ compiler on a CPU, and there is "
            f"no {' or '.join(compilers)}: install one, or leave the flag out",
        )


def set_cuda_variables(
    model_parallel_size: int, environ: MutableMapping[str, str] = os.environ, *, deterministic: bool = False
) -> None:
    """Set what CUDA, torch's allocator and NCCL read when they start, unless the user has set it. deterministic: also
    what `deterministic_algorithms` needs of cuBLAS; ValueError if the user has set that in another way.

    The allocator's segments grow if tensors of many sizes come and go, instead of being cut up. With layers that are
    split, a gradient's all-reduce and a weight's product become ready together: one queue starts them in their order,
    and the communication's stream comes first, so that the product does not take every processor before it (as
    Megatron).
    """
    if "PYTORCH_CUDA_ALLOC_CONF" not in environ:  # its older name
        environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    if model_parallel_size > 1:
        environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")
    if deterministic:
        workspace = environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACES[0])
        require(
            workspace in CUBLAS_WORKSPACES,
            f"CUBLAS_WORKSPACE_CONFIG={workspace} lets cuBLAS add up in any order: "
            f"unset it, or set it to {' or '.join(CUBLAS_WORKSPACES)}",
        )


@contextlib.contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """Inside, each operation of torch adds up in an order that follows from its operands' shapes alone, on a CPU as on
    a GPU, or raises RuntimeError where torch knows no such kernel. Products are summed in float32 throughout.
    Afterwards all is as before. cuBLAS needs `set_cuda_variables` as well, before CUDA starts.

    `torch.use_deterministic_algorithms` does the same and loads torch's compiler, which takes a second.
    """
    blas = torch.backends.cuda.matmul
    fill: Any = torch.utils.deterministic  # a module with a property
    before = (
        torch.get_deterministic_debug_mode(),
        fill.fill_uninitialized_memory,
        torch.get_float32_matmul_precision(),
        blas.allow_bf16_reduced_precision_reduction,
        blas.allow_fp16_reduced_precision_reduction,
    )

    def switch(mode: int | str, fills: bool, precision: str, in_bf16: bool, in_fp16: bool) -> None:
        torch.set_deterministic_debug_mode(mode)
        fill.fill_uninitialized_memory = fills
        torch.set_float32_matmul_precision(precision)
        blas.allow_bf16_reduced_precision_reduction = in_bf16
        blas.allow_fp16_reduced_precision_reduction = in_fp16

    # Nothing reads memory before it is written. TF32 is off.
    switch("error", fills=False, precision="highest", in_bf16=False, in_fp16=False)
    try:
        yield
    finally:
        switch(*before)


def set_allocator(device: torch.device, environ: Mapping[str, str] = os.environ) -> str:
    """On a CPU, make glibc keep freed memory. Returns a line about it, empty where nothing was done.

    By default each tensor above 32 MB is mapped afresh and its pages fault in again, in every step: a tenth of a small
    model's time. In the heap, which is never given back, they are reused. Blocks above 256 MB stay outside: they
    would fragment it.
    """
    own = any(name.startswith("MALLOC_") for name in environ) or "malloc" in environ.get("GLIBC_TUNABLES", "")
    if device.type != "cpu" or own or "LD_PRELOAD" in environ or platform.libc_ver()[0] != "glibc":
        return ""
    mallopt = ctypes.CDLL(None).mallopt
    mmap_threshold, trim_threshold, top_pad = -3, -1, -2  # malloc.h
    kept = next((size for size in (256, 32) if mallopt(mmap_threshold, size << 20)), 0)  # an old glibc takes 32 at most
    if not kept or not mallopt(trim_threshold, -1) or not mallopt(top_pad, 64 << 20):
        return ""
    return f"glibc keeps freed blocks of up to {kept} MB for the next step"


def peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """Return the FLOP/s that MFU refers to, and what they are: the datasheet's for a GPU that is known, else the
    fastest of some large matrix products, about 0.3 s of them."""
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        teraflops = datasheet(where)
        if teraflops and (dtype == torch.float16 or torch.cuda.get_device_capability(device) >= (8, 0)):
            return teraflops * 1e12, f"datasheet {teraflops:g} TFLOP/s dense {PRECISIONS[dtype]} of {where}"
    flops = _measured_gemm(device, dtype)
    return flops, f"measured {flops / 1e12:.3g} TFLOP/s of a {PRECISIONS[dtype]} matrix product on {where}"


def datasheet(name: str) -> float | None:
    """Return dense 16-bit TFLOP/s of the GPU called `name`; None for an unknown one, and for a part of one (MIG)."""
    if re.search(r"\bMIG\b", name):
        return None
    return next((flops for pattern, flops in DATASHEET if re.search(rf"\b{pattern}\b", name)), None)


@functools.cache
@torch.no_grad()
def _measured_gemm(device: torch.device, dtype: torch.dtype, seconds: float = 0.3) -> float:
    best, size, took, end = 0.0, 256, 0.0, time.perf_counter() + seconds
    while time.perf_counter() < end or not best:
        is_new = took < seconds / 20 and size < 8192
        if is_new:
            size *= 2
            # All different: a GPU multiplies ones with less power and so at a higher clock, by 13 % on an H200.
            numbers = torch.arange(size * size, device=device, dtype=torch.float32).sin().view(size, size).to(dtype)
        start = time.perf_counter()
        torch.nn.functional.linear(numbers, numbers)  # [size, size] x [size, size], as a linear layer multiplies
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        took = time.perf_counter() - start
        if not is_new:  # else it is a warm-up
            best = max(best, 2 * size**3 / took)
    return best


def versions(device: torch.device) -> dict[str, str]:
    """The versions of Python and of the libraries that a run computes with, by name."""
    found = {
        "torch": torch.__version__,
        "numpy": np.__version__,
        "safetensors": safetensors.__version__,
        "Python": platform.python_version(),
    }
    if device.type == "cuda":
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        found |= {"CUDA": str(torch.version.cuda), "cuDNN": str(torch.backends.cudnn.version()), "NCCL": nccl}
    return found


def describe_environment(device: torch.device, *, world_size: int, local_world_size: int) -> dict[str, str]:
    """What a run runs on, name to text, for config.json and report.html, as seen from this rank. local_world_size:
    ranks on this machine."""
    devices = f"{os.cpu_count()} CPU cores per host, {torch.get_num_threads()} threads per rank"
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        devices = f"{torch.cuda.get_device_name(device)}, {memory / 2**30:.0f} GiB"
    return {
        "command": shlex.join(sys.orig_argv),
        "commit": source_commit(),
        "hosts": f"{max(1, world_size // local_world_size)}, rank 0 on {platform.node()}",
        "ranks": f"{world_size}",
        "devices": devices,
        "versions": ", ".join(f"{name} {version}" for name, version in versions(device).items()),
        "system": platform.platform(),
    }


def source_commit(root: Path = ROOT) -> str:
    """The commit of the checkout `root` and whether its files differ from it, or why there is no commit."""
    if not (root / ".git").exists():
        return "none: no git checkout"
    git = functools.partial(
        subprocess.run, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=10, cwd=root
    )
    try:
        commit = git(["git", "rev-parse", "HEAD"]).stdout.strip()
        is_changed = git(["git", "status", "--porcelain", "--untracked-files=no"]).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return f"none: git failed: {error}"
    return f"{commit}, with changes" if is_changed else commit
