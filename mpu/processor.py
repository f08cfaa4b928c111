"""The one fact about a CPU that decides which of two kernels is faster: whether it multiplies bf16 matrices by itself.

Measured in bf16 with and without AMX, and in float32 on both, the same fact decided every pair (docs/performance.md).
So it is a rule and no timing at the start: what a rule says does not change when the machine is busy, and runs and
ranks on processors of one kind agree to the bit.
"""

from __future__ import annotations

import os

import torch

# With these oneDNN may be told to leave AMX alone.
_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")


def _has_amx() -> bool:
    limit = next((os.environ[name] for name in _LIMITS if os.environ.get(name)), "ALL").upper()
    return torch.cpu._is_amx_tile_supported() and ("AMX" in limit or limit in ("ALL", "DEFAULT"))


HAS_AMX: bool = _has_amx()
