"""Which kernels a CPU gets depends on its instructions and on what oneDNN was told to leave alone."""

from __future__ import annotations

import pytest
import torch

from mpu.kernels.processor import _has_amx


@pytest.mark.parametrize(
    ("limit", "left"),
    [
        (None, True),
        ("", True),
        ("ALL", True),
        ("default", True),
        ("AVX512_CORE_AMX", True),
        ("AVX10_1_512_AMX", True),
        ("AVX512_CORE", False),
        ("AVX512_CORE_BF16", False),
        ("avx2", False),
    ],
)
@pytest.mark.parametrize("there", [True, False])
def test_amx(limit: str | None, left: bool, there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: there)
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
        monkeypatch.delenv("DNNL_MAX_CPU_ISA", raising=False)
        if limit is not None:
            monkeypatch.setenv(name, limit)
        assert _has_amx() is (there and left)
