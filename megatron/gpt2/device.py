"""What this process runs on: device, precision, backend, threads, allocator, and how fast that could be at best.

Each choice comes with its reason, a line for the log. Where the user asked for something impossible, a ValueError names
what to ask for instead.
"""

import contextlib
import ctypes
import functools
import importlib.util
import os
import platform
import re
import shutil
import time
import warnings
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

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
    """The device for --device auto|cpu|cuda, and why. Every rank calls it: two on one GPU are a ValueError on all.
    An unusable GPU is no error under `auto`, for the first run on a new machine should work, but its line starts with
    WARNING and names both ways out."""
    device, why = _own_device(requested, ranks, environ)
    if ranks.meeting is not None:
        mine = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
        refuse_shared_gpus(ranks.meeting.gather("gpu", ranks.rank, mine), ranks.meeting.hosts)
    return device, why


def refuse_shared_gpus(gpus: Sequence[str], hosts: Mapping[int, str]) -> None:
    """ValueError where two ranks are on one physical GPU. gpus: the UUID of each rank's, or of its part of one (MIG);
    empty on a CPU."""
    for gpu in dict.fromkeys(filter(None, gpus)):
        together = [rank for rank, other in enumerate(gpus) if other == gpu]
        require(
            len(together) == 1,
            f"{named(together, hosts)} are on one GPU (UUID {gpu}): show each rank a GPU of "
            "its own (CUDA_VISIBLE_DEVICES, srun --gpu-bind), start fewer, or train on the CPU with --device cpu "
            "--distributed-backend gloo",
        )


def _own_device(requested: str, ranks: Ranks, environ: Mapping[str, str]) -> tuple[torch.device, str]:
    if requested == "cpu":
        return torch.device("cpu"), "cpu: --device cpu"
    with warnings.catch_warnings(record=True) as caught:  # torch says why CUDA fails in a warning
        warnings.simplefilter("always")
        usable = torch.cuda.is_available() and torch.cuda.device_count() > 0
    if usable:
        visible = torch.cuda.device_count()
        if visible == 1 and ranks.local_world_size > 1:  # its own, or one for all: their UUIDs show it
            return torch.device("cuda", 0), f"cuda: {torch.cuda.get_device_name(0)}, the one that this rank sees"
        require(
            ranks.local_world_size <= visible,
            f"{ranks.local_world_size} ranks on this machine but {visible} visible GPUs: start "
            f"at most {visible}, or train on the CPU with --device cpu --distributed-backend gloo",
        )
        return torch.device("cuda", ranks.local_rank), f"cuda: {torch.cuda.get_device_name(ranks.local_rank)}"
    problem = _why_no_cuda([str(w.message) for w in caught], environ)
    require(requested == "auto", f"--device cuda: {problem or 'this machine has no GPU'}; --device cpu trains without")
    if problem:
        return torch.device("cpu"), (
            f"WARNING: THE GPU IS NOT USED, this run is on the CPU: {problem}; --device cpu says that the CPU is meant"
        )
    if torch.backends.mps.is_available():
        return torch.device("cpu"), "cpu: Apple's GPU (MPS) is not supported"
    return torch.device("cpu"), "cpu: this machine has no GPU"


def _why_no_cuda(warned: list[str], environ: Mapping[str, str]) -> str:
    """What keeps torch from the GPU that this machine has; empty if it has none, or if it is hidden on purpose."""
    if not gpu_present() or environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return ""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA; install a CUDA build (https://pytorch.org)"
    detail = f" ({' '.join(warned[0].split())})" if warned else ""
    return (
        f"the driver does not serve torch's CUDA {torch.version.cuda}; update it, or install a torch built for "
        f"its CUDA (https://pytorch.org){detail}"
    )


def gpu_present(root: str = "/") -> bool:
    """Whether the NVIDIA driver shows a GPU (in WSL, the driver of Windows), even if torch cannot use it. root: of the
    file system."""
    signs = ("proc/driver/nvidia/gpus/*", "dev/nvidia[0-9]*", "dev/dxg")
    return any(any(Path(root).glob(sign)) for sign in signs)


def choose_precision(requested: str, device: torch.device) -> tuple[torch.dtype, str]:
    """The dtype for --precision auto|fp32|bf16|fp16|fp16-on-gpu, and why. The line starts with WARNING where another
    choice would serve better, and with notice where it is not the dtype that the flag names."""
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
    native = cpu_bf16()
    return (
        (torch.bfloat16, f"bf16: this CPU has {native}")
        if native
        else (torch.float32, "fp32: this CPU has no bf16 arithmetic (AMX, avx512_bf16)")
    )


def cpu_bf16(cpuinfo: str = "/proc/cpuinfo") -> str:
    """The name of the CPU's feature that multiplies bf16; empty where it has none. cpuinfo: the file that lists
    them."""
    try:
        text = Path(cpuinfo).read_text()
    except OSError:
        return ""
    line = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)  # x86 and ARM
    features = set(line.group(1).split()) if line else set()
    return next((name for name in ("amx_bf16", "avx512_bf16", "bf16") if name in features), "")


def choose_backend(requested: str | None, device: torch.device) -> tuple[str, str]:
    """The backend for --distributed-backend, and why; it counts in a world of one as well, so that a command line is
    wrong everywhere or nowhere."""
    if requested is None:
        backend = "nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"
        return backend, f"{backend}: the ranks are on {'GPUs' if device.type == 'cuda' else 'CPUs'}"
    if requested == "nccl":
        require(
            device.type == "cuda",
            "--distributed-backend nccl needs a GPU for each rank and this run is on the "
            "CPU: use --distributed-backend gloo",
        )
        require(dist.is_nccl_available(), "--distributed-backend nccl: this torch is built without NCCL; use gloo")
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
    """Physical cores that this process may use: its affinity, hyperthreads counted once, within the cgroup's quota."""
    if not hasattr(os, "sched_getaffinity"):  # not Linux
        return os.cpu_count() or 1
    cores = set()
    for cpu in os.sched_getaffinity(0):
        siblings = Path(root, f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            cores.add(siblings.read_text().strip())
        except OSError:
            cores.add(str(cpu))
    return max(1, int(min(len(cores), cgroup_cpus(root))))


def cgroup_cpus(root: str = "/") -> float:
    """The least CPU quota of this process's cgroup and those above it (version 2 or 1), in CPUs; inf without one."""
    quotas = [float("inf")]
    for folder in cgroup_folders("cpu", root):
        try:
            if (folder / "cpu.max").exists():
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            if quota.strip() not in ("max", "-1"):
                quotas.append(int(quota) / int(period))
        except (OSError, ValueError):
            continue  # the file of the root, or of a cgroup that this container does not show
    return min(quotas)


def cgroup_folders(controller: str, root: str = "/") -> Iterator[Path]:
    """The folders that limit this process's share of a controller ("cpu", "memory"): its cgroup's and those above it,
    of version 2 or 1."""
    try:
        lines = Path(root, "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = Path(root, "sys/fs/cgroup") / (controller if controllers else "")
        folder = top / path.lstrip("/")
        yield from (place for place in (folder, *folder.parents) if top in (place, *place.parents))


def require_compiler(device: torch.device, environ: Mapping[str, str] = os.environ) -> None:
    """ValueError where torch.compile could not work: it writes C++ for a CPU and Triton for a GPU."""
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
    """What CUDA, torch's allocator and NCCL read when they start, unless the user has set it. deterministic: also what
    `deterministic_algorithms` needs of cuBLAS; ValueError where the user has set that in another way.

    The allocator's segments grow where tensors of many sizes come and go, instead of being cut up. With layers that are
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
    """FLOP/s that MFU refers to, and what they are: the datasheet's for a GPU that is known, else the fastest of
    some large matrix products, about 0.3 s of them."""
    if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        name = torch.cuda.get_device_name(device)
        teraflops = datasheet(name)
        if teraflops and (dtype == torch.float16 or torch.cuda.get_device_capability(device) >= (8, 0)):
            return teraflops * 1e12, f"datasheet {teraflops:g} TFLOP/s dense {PRECISIONS[dtype]} of {name}"
    flops = _measured_gemm(device, dtype)
    where = f"{torch.get_num_threads()} threads" if device.type == "cpu" else torch.cuda.get_device_name(device)
    return flops, f"measured {flops / 1e12:.3g} TFLOP/s of a {PRECISIONS[dtype]} matrix product on {where}"


def datasheet(name: str) -> float | None:
    """Dense 16-bit TFLOP/s of the GPU called `name`; None for an unknown one, and for a part of one (MIG)."""
    if re.search(r"\bMIG\b", name):
        return None
    return next((flops for pattern, flops in DATASHEET if re.search(rf"\b{pattern}\b", name)), None)


@functools.cache
@torch.no_grad()
def _measured_gemm(device: torch.device, dtype: torch.dtype, seconds: float = 0.3) -> float:
    def numbers(size: int) -> torch.Tensor:
        # All different: a GPU multiplies ones with less power and so at a higher clock, by 13 % on an H200.
        return torch.arange(size * size, device=device, dtype=torch.float32).sin().view(size, size).to(dtype)

    def timed(size: int) -> float:
        # [size, size] x [size, size], as a linear layer multiplies
        start = time.perf_counter()
        torch.nn.functional.linear(x, weight)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    best, size, end = 0.0, 512, time.perf_counter() + seconds
    x = weight = numbers(size)
    timed(size)  # warm up
    while True:
        took = timed(size)
        best = max(best, 2 * size**3 / took)
        if time.perf_counter() > end:
            return best
        if took < seconds / 20 and size < 8192:
            size *= 2
            x = weight = numbers(size)
