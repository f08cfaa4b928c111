"""benchmarks/server_soak.py, cut to some requests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

for library in ("starlette", "uvicorn"):
    pytest.importorskip(library, reason=f"{library} is not installed: the extra [serve] brings it")

from benchmarks import server_soak  # noqa: E402


@pytest.mark.slow
def test_some_bad_clients(tmp_path: Path) -> None:
    """So few requests say nothing of the memory."""
    server_soak.main(["--requests", "300", "--clients", "8", "--output", str(tmp_path)])
    result = json.loads((tmp_path / "server_soak.json").read_text())
    assert [line for line in result["problems"] if "memory" not in line] == []
    assert sum(count for of_kind in result["outcomes"].values() for count in of_kind.values()) == 300
    assert len(result["outcomes"]) == 10 and result["outcomes"]["good"]["200"] > 20
