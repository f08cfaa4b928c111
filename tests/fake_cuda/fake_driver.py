"""What a process asks of CUDA before and beside its kernels, answered as by a machine with one H200.

Needs torch's CUDA build and g++, and no driver.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import subprocess
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._subclasses.fake_tensor as fake_tensor
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from tests.fake_cuda.fake_streams import FakeEvent, FakeStream, running_on

H200 = types.SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    total_memory=150_754_820_096,
    multi_processor_count=132,
    warp_size=32,
    L2_cache_size=62_914_560,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    regs_per_multiprocessor=65_536,
    shared_memory_per_multiprocessor=233_472,
    shared_memory_per_block=49_152,
    shared_memory_per_block_optin=232_448,
    gcnArchName="",
    uuid="fake",
    is_integrated=0,
    clock_rate=1_980_000,
    memory_bus_width=6144,
    memory_clock_rate=3_201_000,
)


@functools.cache
def guard() -> ctypes.CDLL:
    """`guard.cpp`, compiled: 3 s, once per process."""
    folder = Path(torch.__file__).parent
    library = Path(tempfile.mkdtemp()) / "guard.so"
    subprocess.run(
        [
            "g++",
            "-shared",
            "-fPIC",
            "-std=c++20",
            "-O1",
            f"-I{folder}/include",
            f"-I{folder}/include/torch/csrc/api/include",
            str(Path(__file__).with_name("guard.cpp")),
            "-o",
            str(library),
            f"-L{folder}/lib",
            "-lc10",
            "-ltorch_cpu",
        ],
        check=True,
    )
    return ctypes.CDLL(str(library))


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False
) -> Tensor:
    """F.scaled_dot_product_attention, whose choice of a kernel asks the driver: FlashAttention's, or the plain one with
    a mask."""
    if attn_mask is None and q.dtype != torch.float32:
        y: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, False)[0]
        return y
    y = torch.ops.aten._scaled_dot_product_efficient_attention(
        q, k, v, attn_mask, q.requires_grad, dropout_p, is_causal
    )[0]
    return y


@contextlib.contextmanager
def patched_cuda() -> Iterator[None]:
    """`torch.cuda` of a machine with one H200."""

    def state(device: Any = None) -> Tensor:
        with unset_fake_temporarily():
            return torch.zeros(16, dtype=torch.uint8)

    replaced: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "is_initialized": lambda: True,
        "get_device_name": lambda device=None: H200.name,
        "get_device_properties": lambda device=None: H200,
        "get_device_capability": lambda device=None: (H200.major, H200.minor),
        "is_bf16_supported": lambda *_, **options: True,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "_lazy_init": lambda: None,
        "_exchange_device": lambda index: 0,
        "_maybe_exchange_device": lambda index: 0,
        "synchronize": lambda device=None: None,
        "is_current_stream_capturing": lambda: False,
        "get_rng_state": state,
        "set_rng_state": lambda state, device=None: None,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "mem_get_info": lambda device=None: (140 << 30, 140 << 30),
        "memory_reserved": lambda device=None: 0,
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "Event": FakeEvent,
        "Stream": FakeStream,
        "stream": running_on,
        "current_stream": lambda device=None: FakeStream.current,
    }
    FakeStream.current = FakeStream()
    with contextlib.ExitStack() as stack:
        for name, function in replaced.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, function))
        stack.enter_context(mock.patch.object(torch.cuda.nccl, "version", lambda: (2, 29, 7)))
        stack.enter_context(mock.patch.object(F, "scaled_dot_product_attention", flash_attention))
        stack.enter_context(mock.patch.object(fake_tensor, "init_gpu_context", lambda device: None))
        stack.enter_context(mock.patch.object(FakeTensorMode, "avoid_device_init", property(lambda self: True)))
        torch._C._ensureCUDADeviceGuardSet()
        yield
