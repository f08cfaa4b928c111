"""Test the choice of device, precision, backend, threads and allocator, their errors, and the peak FLOP/s for the
MFU."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
import time
from unittest import mock

import pytest
import torch

from megatron.gpt2 import device as on
from megatron.gpt2.dist.ranks import RankInfo

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def gpus(monkeypatch, count: int, capability: tuple[int, int] = (9, 0), name: str = "NVIDIA H200") -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)


def test_device(monkeypatch):
    gpus(monkeypatch, 2)
    assert on.choose_device("auto", RankInfo(3, 4, 1, 2), {})[0] == torch.device("cuda", 1)
    with pytest.raises(
        ValueError, match="3 ranks on this machine but 2 visible GPUs.*--device cpu --distributed-backend gloo"
    ):
        on.choose_device("auto", RankInfo(0, 3, 0, 3), {})
    gpus(monkeypatch, 1)  # Each rank sees only its own GPU, as cuda:0.
    assert on.choose_device("cuda", RankInfo(1, 2, 1, 2), {"CUDA_VISIBLE_DEVICES": "1"})[0] == GPU


def test_an_unusable_gpu_is_reported(monkeypatch, tmp_path):
    gpus(monkeypatch, 0)
    monkeypatch.setattr(on, "gpu_present", lambda: True)
    for cuda, problem in ((None, "built without CUDA"), ("13.0", "the driver does not support torch's CUDA 13.0")):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        device, reason = on.choose_device("auto", RankInfo(), {})
        assert device == CPU and reason.startswith("WARNING") and problem in reason and "\n" not in reason
        with pytest.raises(ValueError, match=f"--device cuda: .*{problem}.*--device cpu"):
            on.choose_device("cuda", RankInfo(), {})
    hidden = on.choose_device("auto", RankInfo(), {"CUDA_VISIBLE_DEVICES": ""})
    assert hidden == (CPU, "device: cpu (this machine has no GPU)")
    monkeypatch.setattr(on, "gpu_present", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert on.choose_device("auto", RankInfo(), {}) == (CPU, "device: cpu (Apple's GPU, MPS, is not supported)")


def test_gpu_present(tmp_path):
    (tmp_path / "dev").mkdir()
    for name, present in (("nvidiactl", False), ("nvidia0", True)):
        (tmp_path / "dev" / name).touch()
        assert on.gpu_present(str(tmp_path)) == present


def test_precision(monkeypatch):
    chosen = on.choose_precision
    for found, said in (
        ("avx512_bf16 amx_bf16 amx_tile", "bf16 (this CPU has amx_bf16)"),
        ("neon bf16", "bf16 (this CPU has bf16)"),
        ("avx2", "fp32 (this CPU has no bf16 arithmetic: AMX, avx512_bf16, bf16 of ARM)"),
    ):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(found.split(), True))  # noqa: B023
        assert chosen("fp16-on-gpu", CPU)[1] == f"notice: --fp16 on a CPU means --precision auto; precision: {said}"
    gpus(monkeypatch, 1, (8, 0))
    assert chosen("auto", GPU)[0] == torch.bfloat16
    gpus(monkeypatch, 1, (7, 5))
    assert chosen("auto", GPU) == (torch.float16, "precision: fp16 (sm75 has no bf16, which starts with sm80)")
    assert chosen("fp16-on-gpu", GPU) == (torch.float16, "precision: fp16 (--precision fp16-on-gpu)")


def test_backend(monkeypatch):
    assert on.choose_backend(None, CPU)[0] == "gloo"
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_mpi_available", lambda: False)
    assert on.choose_backend(None, GPU)[0] == "nccl" and on.choose_backend("gloo", GPU)[0] == "gloo"
    with pytest.raises(ValueError, match="--distributed-backend nccl needs a GPU.*gloo"):
        on.choose_backend("nccl", CPU)
    with pytest.raises(ValueError, match="--distributed-backend mpi: this torch is built without it"):
        on.choose_backend("mpi", CPU)


def test_threads(monkeypatch):
    monkeypatch.setattr(on, "usable_cores", lambda: 9)
    given: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    for ranks, environ in ((2, {}), (16, {}), (2, {"OMP_NUM_THREADS": "3"})):
        on.set_threads(RankInfo(0, ranks, 0, ranks), environ)
    assert given == [4, 1]


VERSION_2 = {
    "proc/self/cgroup": "0::/job/step\n",
    "sys/fs/cgroup/job/step/cpu.max": "max 100000\n",
    "sys/fs/cgroup/job/cpu.max": "250000 100000\n",
}
VERSION_1 = {
    "proc/self/cgroup": "4:memory:/a\n3:cpu,cpuacct:/b\n",
    "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000\n",
    "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
}


@pytest.mark.parametrize("files, quota, cores", [({}, float("inf"), 4), (VERSION_2, 2.5, 2), (VERSION_1, 0.5, 1)])
def test_cores_within_affinity_hyperthreads_and_quota(tmp_path, monkeypatch, files, quota, cores):
    root = str(tmp_path)
    assert 1 <= on.usable_cores() <= len(os.sched_getaffinity(0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert on.usable_cores(root) == 8
    siblings = {
        f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": f"{cpu % 4},{cpu % 4 + 4}\n"
        for cpu in range(8)
    }
    for path, text in (siblings | files).items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert (on.cgroup_cpus(root), on.usable_cores(root)) == (quota, cores)


FAULTS = """
import resource, torch
from megatron.gpt2.device import set_allocator
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def least():
    counts = []
    for _ in range(8):  # until the size of the heap is stable
        before = faults()
        torch.empty(25_000_000).fill_(1.0)  # 100 MB
        counts.append(faults() - before)
    return min(counts)
before = least()
assert set_allocator(torch.device("cpu"), {}) and not set_allocator(torch.device("cuda"), {})
assert not set_allocator(torch.device("cpu"), {"MALLOC_ARENA_MAX": "1"})
print(before, least())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator of glibc is what is set")
def test_allocator_ends_the_page_faults_of_large_tensors():
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_", "LD_PRE"))}
    done = subprocess.run([sys.executable, "-c", FAULTS], check=True, capture_output=True, timeout=240, env=clean)
    faults = [int(count) for count in done.stdout.split()]
    assert faults[0] > 40 and faults[1] < 5  # 100 MB need 48 page faults even in huge pages of 2 MB.


def test_cuda_variables_of_the_user_are_kept():
    segments, connections = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    user = {"CUDA_DEVICE_MAX_CONNECTIONS": "8", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}
    cublas, priority = "CUBLAS_WORKSPACE_CONFIG", {"TORCH_NCCL_HIGH_PRIORITY": "1"}
    for size, before, deterministic, after in (
        (1, {}, True, segments | {cublas: ":4096:8"}),
        (2, {}, False, segments | connections | priority),
        (2, user | {cublas: ":16:8"}, True, user | {cublas: ":16:8"} | priority),
    ):
        on.set_cuda_variables(size, environ := dict(before), deterministic=deterministic)
        assert environ == after
    with pytest.raises(ValueError, match=f"{cublas}=:0:0 .* unset it, or set it to :4096:8 or :16:8"):
        on.set_cuda_variables(1, {cublas: ":0:0"}, deterministic=True)


def test_a_driver_without_expandable_segments_is_served_without_them():
    answers = [RuntimeError("CUDA driver error: operation not supported\nmore"), torch.ones(1)]
    with (
        mock.patch.object(torch, "empty", side_effect=answers) as allocate,
        mock.patch.object(torch._C, "_accelerator_setAllocatorSettings") as settings,
    ):
        said = on.check_expandable_segments(torch.device("cuda", 0))
        assert on.check_expandable_segments(torch.device("cpu")) == ""
    settings.assert_called_once_with("expandable_segments:False")
    assert allocate.call_count == 2 and "'CUDA driver error: operation not supported'" in said


def test_deterministic_algorithms_are_reset_and_import_nothing():
    def settings() -> list[object]:
        blas, fill = torch.backends.cuda.matmul, vars(torch.utils)["deterministic"]
        return [
            torch.are_deterministic_algorithms_enabled(),
            fill.fill_uninitialized_memory,
            torch.get_float32_matmul_precision(),
            blas.allow_bf16_reduced_precision_reduction,
            blas.allow_fp16_reduced_precision_reduction,
        ]

    before, loaded = settings(), set(sys.modules)
    with contextlib.suppress(KeyError), on.deterministic_algorithms():
        assert settings() == [True, False, "highest", False, False]
        assert torch.nn.functional.linear(torch.ones(2, 2), torch.ones(2, 2)).sum() == 8
        raise KeyError
    assert settings() == before and set(sys.modules) == loaded


def test_datasheets():
    known = {"NVIDIA H100 80GB HBM3": 989, "NVIDIA H100 PCIe": 756, "Tesla V100-PCIE-32GB": 112, "NVIDIA L4": 121}
    for name, teraflops in {**known, "NVIDIA A10G": None, "NVIDIA H100 80GB HBM3 MIG 1g.10gb": None}.items():
        assert on.datasheet_tflops(name) == teraflops, name


def test_peak(monkeypatch):
    start = time.process_time()
    flops, words = on.peak_flops(CPU, torch.float32)
    assert 1e9 < flops < 1e15 and words.startswith("measured") and time.process_time() - start < 3
    gpus(monkeypatch, 1)
    assert on.peak_flops(GPU, torch.bfloat16) == (989e12, "datasheet 989 TFLOP/s dense bf16 of NVIDIA H200")
    gpus(monkeypatch, 1, (7, 0), "Tesla V100-SXM2-16GB")
    monkeypatch.setattr(
        on, "_measure_gemm_flops", lambda device, dtype: 1e13
    )  # A V100 has no bf16 units, so its bf16 products are measured.
    assert on.peak_flops(GPU, torch.bfloat16)[0] == 1e13 and on.peak_flops(GPU, torch.float16)[0] == 125e12


def test_compile_without_a_compiler_is_a_one_line_error():
    with pytest.raises(
        ValueError, match="--compile needs a C.. compiler on a CPU, and no-such-compiler is not installed"
    ):
        on.require_compiler(CPU, {"CXX": "no-such-compiler"})
    on.require_compiler(CPU, {"CXX": "python3"})  # The test does not check that CXX is a compiler.
