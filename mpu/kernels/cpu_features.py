"""The properties of the CPU that select kernels: its instructions for bf16 matrix products, and whether packed weights
are faster.

Measurements on processors with AMX, with AVX-512's bf16 products and with neither showed that these properties decide
which kernel is the fastest. Nothing is timed at start, so the choice does not depend on the load of the machine, and
ranks on the same kind of processor agree to the bit.

Times of GPT-2 124M in ms, one thread of an Intel Xeon, the fastest run, 2026-11-22. "Without AMX" is the same processor
with ONEDNN_MAX_CPU_ISA=AVX512_CORE.

    operation                                               kernel A, kernel B     with AMX       without AMX
    layers, one row, bf16          F.linear, matrix-vector product                 21.5, 13.3     10.7, 12.0
    layers, 8 rows, bf16           F.linear, (A xᵀ)ᵀ                               18.7, 14.5     73.5, 143.4
    head, 8 rows, fp32             F.linear, (A xᵀ)ᵀ                               46.8, 27.6     44.4, 25.2
    attention backward, bf16       fused, by blocks (4 heads, 1,024 tokens)        80, 72         129, 151
    attention with dropout         scores in bf16, in float32 (2 heads, 512)       10.3, 22.2     43.4, 22.3
    weight gradient, bf16          whole, in parts (2,048 tokens, 3,072 × 768)     103, 71        559, 603

Without AMX and AVX-512's bf16 products, bf16 linear layers of 4 and more rows multiply blocks in float32: 44 ms instead
of 61.
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
        return True  # No measurement covers this processor, so keep torch's default.
    return torch.cpu._is_avx512_bf16_supported() and _limit() not in _WITHOUT_BF16


HAS_AMX: bool = _has_amx()
HAS_BF16_PRODUCTS: bool = HAS_AMX or _has_bf16_products()
# Measurements showed that packed weights are faster on x86 without AMX.
HAS_PACKED_WEIGHTS: bool = (
    not HAS_AMX and platform.machine() in ("x86_64", "AMD64") and torch.backends.mkldnn.is_available()
)
