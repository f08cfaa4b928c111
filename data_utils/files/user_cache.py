"""The folder in which this user's downloaded vocabularies and tokenised data are kept."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def user_cache() -> Path:
    """$XDG_CACHE_HOME/gpt2-model-parallel, else the same under ~/.cache; it need not exist."""
    home = os.path.expanduser("~")
    if home == "~":  # a user without a home, as in some containers
        home = os.path.join(tempfile.gettempdir(), f"user-{os.getuid()}")
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.join(home, ".cache"), "gpt2-model-parallel")
