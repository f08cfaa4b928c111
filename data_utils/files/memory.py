"""What the system says of this machine's memory."""

from __future__ import annotations

from pathlib import Path

MEMINFO = Path("/proc/meminfo")


def machine_memory(entry: str) -> int | None:
    """An entry of Linux's /proc/meminfo in bytes: "MemTotal", or "MemAvailable", which is what a program can have
    without swapping. None where the system does not say."""
    try:
        lines = MEMINFO.read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{entry}:")), None)
