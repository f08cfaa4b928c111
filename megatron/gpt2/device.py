"""Choose device, precision, backend, attention kernel, threads and allocator of this process. Also return the peak
FLOP/s of its device and the versions of its libraries.

Functions that choose something also return a line for the log with the reason. If the value of a flag is impossible,
these functions raise a ValueError that names the alternative.
"""

import contextlib
import ctypes
import functools
import hashlib
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
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from data_utils.command_line import ROOT, plural, require
from megatron.gpt2.dist.launch import in_slurm_step
from megatron.gpt2.dist.ranks import RankInfo, format_ranks
from mpu.kernels import causal_attention
from mpu.kernels.triton_kernel import MIN_SPEEDUP, milliseconds

PRECISION_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PRECISIONS = {dtype: name for name, dtype in PRECISION_DTYPES.items()}

# cuBLAS is deterministic with several streams if its workspace has one of these values (cuBLAS documentation, "Results
# Reproducibility").
CUBLAS_WORKSPACES = (":4096:8", ":16:8")

# (pattern of the device name, dense 16-bit TFLOP/s of the datasheet). The first pattern that matches is used.
DATASHEET_TFLOPS = (
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


def choose_device(
    requested: str, rank_info: RankInfo, environ: Mapping[str, str] = os.environ
) -> tuple[torch.device, str]:
    """Return the device for --device auto|cpu|cuda, and a log line with the reason. Every rank must call this function.
    Raises ValueError on all ranks if two ranks use the same GPU.

    With `auto`, an unusable GPU is not an error, so that the first run on a new machine works. The log line then starts
    with WARNING and names two solutions."""
    device, why = _choose_own_device(requested, rank_info, environ)
    if rank_info.rendezvous is not None:
        own_gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
        refuse_shared_gpus(rank_info.rendezvous.gather("gpu", rank_info.rank, own_gpu), rank_info.rendezvous.hosts)
    return device, why


def refuse_shared_gpus(gpus: Sequence[str], hosts: Mapping[int, str]) -> None:
    """Raise ValueError if two ranks use the same physical GPU.

    gpus: for each rank, the UUID of its GPU or MIG instance; "" on a CPU.
    hosts: {rank: host name}.
    """
    for gpu in gpus:
        together = [rank for rank, other in enumerate(gpus) if other == gpu]
        require(
            not gpu or len(together) == 1,
            f"{format_ranks(together, hosts)} use the same GPU (UUID {gpu}): give each rank a different GPU "
            "(CUDA_VISIBLE_DEVICES, srun --gpu-bind), start fewer ranks, or train on the CPU with --device cpu "
            "--distributed-backend gloo",
        )


def _choose_own_device(requested: str, rank_info: RankInfo, environ: Mapping[str, str]) -> tuple[torch.device, str]:
    cpu = torch.device("cpu")
    if requested == "cpu":
        return cpu, "device: cpu (--device cpu)"
    with warnings.catch_warnings(record=True) as caught:  # If CUDA fails, torch's warning contains the reason.
        warnings.simplefilter("always")
        visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    # All ranks may see the same single GPU. `refuse_shared_gpus` compares the UUIDs later.
    if visible == 1 and rank_info.local_world_size > 1:
        return torch.device("cuda", 0), f"device: {torch.cuda.get_device_name(0)}, the only GPU that this rank sees"
    if visible:
        require(
            rank_info.local_world_size <= visible,
            f"{plural(rank_info.local_world_size, 'rank')} on this machine but {plural(visible, 'visible GPU')}: start "
            f"at most {visible}, or train on the CPU with --device cpu --distributed-backend gloo",
        )
        return torch.device("cuda", rank_info.local_rank), f"device: {torch.cuda.get_device_name(rank_info.local_rank)}"
    problem = ""  # A GPU that is hidden on purpose is not a problem.
    if gpu_present() and environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1"):
        detail = f" ({' '.join(str(caught[0].message).split())})" if caught else ""
        problem = (
            f"torch {torch.__version__} is built without CUDA; install a CUDA build (https://pytorch.org)"
            if torch.version.cuda is None
            else f"the driver does not support torch's CUDA {torch.version.cuda}; update the driver, or install a "
            f"torch built for its CUDA version (https://pytorch.org){detail}"
        )
    require(requested == "auto", f"--device cuda: {problem or 'this machine has no GPU'}; --device cpu uses the CPU")
    if problem:
        return cpu, (
            f"WARNING: THE GPU IS NOT USED, this run is on the CPU: {problem}; give --device cpu to use the CPU on "
            "purpose"
        )
    if torch.backends.mps.is_available():
        return cpu, "device: cpu (Apple's GPU, MPS, is not supported)"
    return cpu, "device: cpu (this machine has no GPU)"


def gpu_present(root: str = "/") -> bool:
    """Return whether the driver of NVIDIA, or of Windows in WSL, lists a GPU, even if torch cannot use the GPU.

    root: the root of the file system.
    """
    signs = ("proc/driver/nvidia/gpus/*", "dev/nvidia[0-9]*", "dev/dxg")
    return any(any(Path(root).glob(sign)) for sign in signs)


def choose_precision(requested: str, device: torch.device) -> tuple[torch.dtype, str]:
    """Return the dtype for --precision auto|fp32|bf16|fp16|fp16-on-gpu, and a log line with the reason. The line starts
    with WARNING if a different precision is better, and with "notice" if the dtype is not that of the flag."""
    if requested == "fp16-on-gpu" and device.type == "cpu":
        dtype, why = choose_precision("auto", device)
        return dtype, f"notice: --fp16 on a CPU means --precision auto; {why}"
    if requested == "fp16" and device.type == "cpu":
        return torch.float16, (
            "WARNING: --precision fp16 on a CPU: most CPUs have no fp16 arithmetic, and a step can "
            "take 40 times as long as with --precision auto"
        )
    if requested != "auto":
        name = requested.removesuffix("-on-gpu")
        return PRECISION_DTYPES[name], f"precision: {name} (--precision {requested})"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if major >= 8:
            return torch.bfloat16, f"precision: bf16 (native on sm{major}{minor})"
        return torch.float16, f"precision: fp16 (sm{major}{minor} has no bf16, which starts with sm80)"
    if native := cpu_bf16_feature():
        return torch.bfloat16, f"precision: bf16 (this CPU has {native})"
    return torch.float32, "precision: fp32 (this CPU has no bf16 arithmetic: AMX, avx512_bf16, bf16 of ARM)"


def cpu_bf16_feature() -> str:
    """Return the name of the CPU's feature for bf16 products, or "". On other systems than Linux the result is ""."""
    features = torch.cpu.get_capabilities() if sys.platform == "linux" else {}
    # The feature "bf16" is that of ARM.
    return next((name for name in ("amx_bf16", "avx512_bf16", "bf16") if features.get(name)), "")


def choose_backend(requested: str | None, device: torch.device) -> tuple[str, str]:
    """Return the backend for --distributed-backend, and a log line with the reason. Raises ValueError for an impossible
    backend, also for a single rank, so that a wrong command line fails everywhere."""
    on_gpu = device.type == "cuda"
    if requested is None:
        backend = "nccl" if on_gpu and dist.is_nccl_available() else "gloo"
        return backend, f"backend: {backend} (the ranks are on {'GPUs' if on_gpu else 'CPUs'})"
    require(
        requested != "nccl" or on_gpu,
        "--distributed-backend nccl needs a GPU for each rank and this run is on the "
        "CPU: use --distributed-backend gloo",
    )
    require(
        dist.is_backend_available(requested),
        f"--distributed-backend {requested}: this torch is built without it; use gloo, or nccl on GPUs",
    )
    return requested, f"backend: {requested} (--distributed-backend {requested})"


def set_threads(rank_info: RankInfo, environ: Mapping[str, str] = os.environ) -> None:
    """Set the number of torch's threads to this rank's share of the cores, unless OMP_NUM_THREADS is set. Ranks that
    all use all cores slow each other down a lot."""
    if "OMP_NUM_THREADS" not in environ:
        # Slurm binds each task to separate cores, so this process sees only its share.
        bound = in_slurm_step(environ) and "SLURM_CPUS_PER_TASK" in environ
        torch.set_num_threads(max(1, usable_cores() // (1 if bound else rank_info.local_world_size)))


def usable_cores(root: str = "/") -> int:
    """Return the number of physical cores that this process may use, according to its affinity and the CPU quota of its
    cgroup. Hyperthreads of one core count as one core.

    root: the root of the file system.
    """
    if not hasattr(os, "sched_getaffinity"):  # Only Linux has os.sched_getaffinity.
        return os.cpu_count() or 1
    cores = set()
    for cpu in os.sched_getaffinity(0):
        siblings = Path(root, f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(siblings.read_text().strip() if siblings.exists() else str(cpu))
    return max(1, int(min(len(cores), cgroup_cpus(root))))


def cgroup_cpus(root: str = "/") -> float:
    """Return the smallest CPU quota of this process's cgroup and its parents, in CPUs, or inf without a quota."""
    quotas = [float("inf")]
    for folder in cgroup_folders("cpu", root):
        # The root cgroup has no quota file, and a container does not show the files of all cgroups.
        with contextlib.suppress(OSError, ValueError):
            files = ["cpu.max"] if (folder / "cpu.max").exists() else ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
            quota, period = " ".join((folder / file).read_text() for file in files).split()
            if quota not in ("max", "-1"):
                quotas.append(int(quota) / int(period))
    return min(quotas)


def cgroup_folders(controller: str, root: str = "/") -> Iterator[Path]:
    """Yield the folders of this process's cgroup and its parents, of version 1 or 2.

    controller: "cpu" or "memory".
    root: the root of the file system.
    """
    groups = Path(root, "proc/self/cgroup")
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = Path(root, "sys/fs/cgroup") / (controller if controllers else "")
        folder = top / path.lstrip("/")
        yield from (group for group in (folder, *folder.parents) if group.is_relative_to(top))


def require_compiler(device: torch.device, environ: Mapping[str, str] = os.environ) -> None:
    """Raise ValueError if torch.compile cannot work, which needs a C++ compiler on a CPU and Triton on a GPU."""
    if device.type == "cuda":
        require(
            importlib.util.find_spec("triton") is not None,
            "--compile needs Triton on a GPU: pip install triton, or leave the flag out",
        )
    else:
        compilers = [environ["CXX"]] if "CXX" in environ else ["g++", "clang++"]
        require(
            any(shutil.which(name) for name in compilers),
            f"--compile needs a C++ compiler on a CPU, and {' or '.join(compilers)} is not installed: install it, or "
            "leave the flag out",
        )


def set_cuda_variables(
    tp_size: int, environ: MutableMapping[str, str] = os.environ, *, deterministic: bool = False
) -> None:
    """Set environment variables that CUDA, torch's allocator and NCCL read at their start, unless the user has set
    them. Raises ValueError if the user has set a workspace of cuBLAS that is not deterministic.

    Expandable segments avoid fragmentation of the allocator with tensors of many sizes. With tensor parallelism, an
    all-reduce and a matrix product become ready at the same time. With one hardware queue and a high-priority
    communication stream, as in Megatron, the matrix product does not delay the all-reduce.

    deterministic: whether to set the workspace of cuBLAS that `deterministic_algorithms` needs.
    """
    if "PYTORCH_CUDA_ALLOC_CONF" not in environ:  # PYTORCH_CUDA_ALLOC_CONF is the older name of the variable.
        environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    if tp_size > 1:
        environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")
    if deterministic:
        workspace = environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACES[0])
        require(
            workspace in CUBLAS_WORKSPACES,
            f"CUBLAS_WORKSPACE_CONFIG={workspace} lets cuBLAS add in any order: "
            f"unset it, or set it to {' or '.join(CUBLAS_WORKSPACES)}",
        )


def check_expandable_segments(device: torch.device) -> str:
    """Allocate a tensor on a GPU. If the allocation fails, turn off expandable segments, which need a driver with
    virtual memory. Return a line for the log, or "" if nothing was changed. Raises RuntimeError if the second
    allocation fails, too."""
    if device.type == "cuda":
        try:
            torch.empty(1, device=device)
        except RuntimeError as error:
            torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
            torch.empty(1, device=device)
            return f"allocator: no expandable segments, because of {str(error).splitlines()[0]!r}"
    return ""


@contextlib.contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """Make torch deterministic inside the block, and restore its settings afterwards.

    The order of each sum then depends only on the shapes of the operands. An operation without a deterministic kernel
    raises RuntimeError. Matrix products accumulate in float32. For cuBLAS, call `set_cuda_variables` before CUDA is
    initialised.

    `torch.use_deterministic_algorithms` is not used, because it imports torch's compiler, which takes a second.
    """
    blas = torch.backends.cuda.matmul
    fill: Any = torch.utils.deterministic
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

    # Uninitialised memory is not filled, because nothing reads it. "highest" disables TF32.
    switch("error", fills=False, precision="highest", in_bf16=False, in_fp16=False)
    try:
        yield
    finally:
        switch(*before)


def set_allocator(device: torch.device, environ: Mapping[str, str] = os.environ) -> str:
    """On a CPU, make glibc keep freed memory for reuse. Return a line for the log, or "" if nothing was changed.

    By default, glibc asks the system for new memory for each tensor above 32 MB. The page faults take a tenth of the
    time of a small model. With these settings, tensors of up to 256 MB are in the heap, whose memory the process keeps.
    Larger tensors would fragment the heap.
    """
    user_settings = any(name.startswith("MALLOC_") for name in environ) or "malloc" in environ.get("GLIBC_TUNABLES", "")
    if device.type != "cpu" or user_settings or "LD_PRELOAD" in environ or platform.libc_ver()[0] != "glibc":
        return ""
    mallopt = ctypes.CDLL(None).mallopt
    mmap_threshold, trim_threshold, top_pad = -3, -1, -2  # The constants of malloc.h.
    # Some versions of glibc allow a threshold of at most 32 MB.
    megabytes = next((size for size in (256, 32) if mallopt(mmap_threshold, size << 20)), 0)
    if not megabytes or not mallopt(trim_threshold, -1) or not mallopt(top_pad, 64 << 20):
        return ""
    return f"allocator: glibc keeps freed blocks of up to {megabytes} MB for the next step"


def peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """Return the peak FLOP/s for the MFU, and a text with the source of this figure. For a known GPU, the source is the
    datasheet. For other devices, the function measures some large matrix products for about 0.3 s and takes the
    fastest."""
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else plural(torch.get_num_threads(), "thread")
    if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        teraflops = datasheet_tflops(where)
        if teraflops and (dtype == torch.float16 or torch.cuda.get_device_capability(device) >= (8, 0)):
            return teraflops * 1e12, f"datasheet {teraflops:g} TFLOP/s dense {PRECISIONS[dtype]} of {where}"
    flops = _measure_gemm_flops(device, dtype)
    return flops, f"measured {flops / 1e12:.3g} TFLOP/s of a {PRECISIONS[dtype]} matrix product on {where}"


def datasheet_tflops(name: str) -> float | None:
    """Return the dense 16-bit TFLOP/s of the GPU `name`, or None for an unknown GPU and for a MIG instance."""
    if re.search(r"\bMIG\b", name):
        return None
    return next((flops for pattern, flops in DATASHEET_TFLOPS if re.search(rf"\b{pattern}\b", name)), None)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work. On a CPU there is nothing to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@functools.cache
@torch.no_grad()
def _measure_gemm_flops(device: torch.device, dtype: torch.dtype, seconds: float = 0.3) -> float:
    best, size, took, end = 0.0, 256, 0.0, time.perf_counter() + seconds
    while time.perf_counter() < end or not best:
        is_new = took < seconds / 20 and size < 8192
        if is_new:
            size *= 2
            # Use different numbers: with ones, an H200 needs less power and is 13 % faster.
            numbers = torch.arange(size * size, device=device, dtype=torch.float32).sin().view(size, size).to(dtype)
        start = time.perf_counter()
        torch.nn.functional.linear(numbers, numbers)  # [size, size] x [size, size]
        synchronize(device)
        took = time.perf_counter() - start
        if not is_new:  # The first matrix product of each size is an untimed warm-up.
            best = max(best, 2 * size**3 / took)
    return best


# The kernels in order of preference. A later kernel is chosen only if it is faster by the factor MIN_SPEEDUP.
ATTENTION_BACKENDS: dict[str, Callable[[bool], Any]] = {
    "flash": torch.backends.cuda.enable_flash_sdp,
    "fused": torch.backends.cuda.enable_cudnn_sdp,
    "efficient": torch.backends.cuda.enable_mem_efficient_sdp,
}


def choose_attention(
    requested: str, device: torch.device, dtype: torch.dtype, *, b: int, s: int, n: int, d: int, dropout_p: float
) -> str:
    """Enable one of torch's kernels for attention over [s, b, n, d] on a GPU. Return a log line with the kernel and the
    reason; on a CPU, change nothing and return "".

    With `auto`, the kernels are measured. On Hopper, torch's default is cuDNN's kernel, which is the fastest without
    dropout. With dropout, cuDNN's kernel can be several times slower than FlashAttention. With torch's deterministic
    algorithms, the first kernel that supports the shape is chosen, because measured times differ between runs. torch's
    math implementation stays enabled for shapes that the kernel does not support.

    requested: the value of --attention-backend.
    """
    if device.type != "cuda":
        return ""
    if requested != "auto":
        _enable(requested)
        return f"attention: {requested}, by --attention-backend"
    times: dict[str, float] = {}
    deterministic = torch.are_deterministic_algorithms_enabled()
    for name in ATTENTION_BACKENDS:
        _enable(name, allow_math=False)
        try:
            times[name] = _measure_ms(device, dtype, b, s, n, d, dropout_p)
        except RuntimeError:  # The kernel does not support this device, dtype or shape.
            torch.cuda.synchronize(device)
        if times and deterministic:
            break
    chosen = fastest(times)
    _enable(chosen)
    if not times:
        return "attention: unfused, since no kernel supports this dtype and shape here"
    if deterministic:
        return f"attention: {chosen}, the first deterministic kernel that supports this dtype and shape"
    measured = ", ".join(f"{name} {ms:.2f}" for name, ms in times.items())
    return f"attention: {chosen}, the fastest (ms forward and backward: {measured})"


@contextlib.contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """Put `model` into evaluation mode and disable cuDNN's attention kernel inside the block. cuDNN makes a plan for
    each new length, which takes 0.05 to 1 s (pytorch#155958), and generation has a new length for each token."""
    was_training = model.training
    model.eval()
    try:
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            yield
    finally:
        model.train(was_training)


def fastest(times: dict[str, float]) -> str:
    """Return the name of the fastest kernel, or "unfused" if `times` is empty. A later kernel must be faster by the
    factor MIN_SPEEDUP.

    times: {name of a kernel: milliseconds}."""
    best = "unfused"
    for name, ms in times.items():
        if best == "unfused" or ms * MIN_SPEEDUP < times[best]:
            best = name
    return best


def _enable(chosen: str, *, allow_math: bool = True) -> None:
    for name, switch in ATTENTION_BACKENDS.items():
        switch(name == chosen)
    torch.backends.cuda.enable_math_sdp(allow_math)


def _measure_ms(device: torch.device, dtype: torch.dtype, b: int, s: int, n: int, d: int, dropout_p: float) -> float:
    """Return the median time of forward and backward of attention. The state of the default generator does not
    change."""
    with torch.random.fork_rng(devices=[device]):
        qkv = torch.randn(s, b, n, 3, d, device=device, dtype=dtype, requires_grad=True)

        def forward_and_backward() -> None:
            y = causal_attention(qkv, dropout_p)
            torch.autograd.grad(y, qkv, torch.ones_like(y))

        return milliseconds(forward_and_backward)


def library_versions(device: torch.device) -> dict[str, str]:
    """Return {name: version} of Python and of the libraries that a run computes with."""
    versions = {
        "torch": torch.__version__,
        "numpy": np.__version__,
        "safetensors": safetensors.__version__,
        "Python": platform.python_version(),
    }
    if device.type == "cuda":
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        versions |= {"CUDA": str(torch.version.cuda), "cuDNN": str(torch.backends.cudnn.version()), "NCCL": nccl}
    return versions


def describe_environment(device: torch.device, rank_info: RankInfo) -> dict[str, str]:
    """Return {name: text} that describes hardware and software, for config.json and report.html."""
    devices = f"{os.cpu_count()} CPU cores per host, {plural(torch.get_num_threads(), 'thread')} per rank"
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        devices = f"{torch.cuda.get_device_name(device)}, {memory / 2**30:.0f} GiB"
    return {
        "command": shlex.join(sys.orig_argv),
        "commit": source_commit(),
        "hosts": f"{max(1, rank_info.world_size // rank_info.local_world_size)}, rank 0 on {platform.node()}",
        "ranks": f"{rank_info.world_size}",
        "devices": devices,
        "versions": ", ".join(f"{name} {version}" for name, version in library_versions(device).items()),
        "system": platform.platform(),
    }


def source_commit(root: Path = ROOT) -> str:
    """Return the commit of the checkout `root`, with ", with changes" if files have changed since this commit. If the
    commit is unknown, return the reason."""
    if not (root / ".git").exists():
        return "none: no git checkout"
    git = ["git", "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty=, with changes"]
    try:
        return subprocess.check_output(
            git, stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL, timeout=10, cwd=root
        ).strip()
    except (OSError, subprocess.SubprocessError) as error:
        return f"none: git failed: {error}"


def code_hash() -> str:
    """Return a hash of all source files of the program."""
    digest = hashlib.sha256()
    for folder in ("mpu", "data_utils", "megatron/gpt2"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()
