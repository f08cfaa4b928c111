"""The two facts about a CPU that decide which of two kernels is faster: which instructions it has for products in bf16.

Measured in bf16 with AMX, with AVX-512's bf16 products and with neither, and in float32 on all, these facts decided
every pair (docs/explanation/performance.md). So they are rules, and nothing is timed when a program starts: a rule says
the same on a busy machine, and runs and ranks on processors of one kind agree to the bit.
"""

import os
import platform

import torch

# With these variables a user tells oneDNN, which computes the products, which instructions it may use.
_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
_WITHOUT_BF16 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI")


def _limit() -> str:
    return next((os.environ[name] for name in _LIMITS if os.environ.get(name)), "ALL").upper()


def _has_amx() -> bool:
    return torch.cpu._is_amx_tile_supported() and ("AMX" in _limit() or _limit() in ("ALL", "DEFAULT"))


def _has_bf16_products() -> bool:
    if platform.machine() not in ("x86_64", "AMD64"):
        return True  # not measured: torch's own way
    return torch.cpu._is_avx512_bf16_supported() and _limit() not in _WITHOUT_BF16


HAS_AMX: bool = _has_amx()
HAS_BF16_PRODUCTS: bool = HAS_AMX or _has_bf16_products()
