"""Two properties of the CPU that select kernels: its instructions for bf16 matrix products.

Measurements in bf16 with AMX, with AVX-512's bf16 products and with neither, and in float32 on all three, showed that
these properties decide every choice (docs/explanation/performance.md). So nothing is timed at start: the choice does
not depend on the machine's load, and runs and ranks on the same kind of processor agree to the bit.
"""

import os
import platform

import torch

# These environment variables limit the instructions of oneDNN, which computes matrix products.
_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
_WITHOUT_BF16 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI")


def _limit() -> str:
    return next((os.environ[name] for name in _LIMITS if os.environ.get(name)), "ALL").upper()


def _has_amx() -> bool:
    return torch.cpu._is_amx_tile_supported() and ("AMX" in _limit() or _limit() in ("ALL", "DEFAULT"))


def _has_bf16_products() -> bool:
    if platform.machine() not in ("x86_64", "AMD64"):
        return True  # not measured: keep torch's default
    return torch.cpu._is_avx512_bf16_supported() and _limit() not in _WITHOUT_BF16


HAS_AMX: bool = _has_amx()
HAS_BF16_PRODUCTS: bool = HAS_AMX or _has_bf16_products()
