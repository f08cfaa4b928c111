"""What the system says of this machine's memory, and of the folder for this user's downloads and tokenised data."""

import os
import tempfile
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


def user_cache() -> Path:
    """$XDG_CACHE_HOME/gpt2-model-parallel, else the same under ~/.cache; it need not exist."""
    home = os.path.expanduser("~")
    if home == "~":  # a user without a home, as in some containers
        home = os.path.join(tempfile.gettempdir(), f"user-{os.getuid()}")
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.join(home, ".cache"), "gpt2-model-parallel")
