"""What a run runs on: versions, devices, hosts and the commit of the source, for config.json and report.html."""

import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import safetensors
import torch

ROOT = Path(__file__).resolve().parents[3]


def describe_environment(device: torch.device, *, world_size: int, local_world_size: int) -> dict[str, str]:
    """Name to text, as seen from this rank. local_world_size: ranks on this machine."""
    devices = f"{os.cpu_count()} CPU cores per host, {torch.get_num_threads()} threads per rank"
    versions = f"torch {torch.__version__}, numpy {np.__version__}, safetensors {safetensors.__version__}"
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        devices = f"{torch.cuda.get_device_name(device)}, {memory / 2**30:.0f} GiB"
        versions += f", CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}, NCCL " + ".".join(
            map(str, torch.cuda.nccl.version())
        )
    return {
        "command": shlex.join(sys.orig_argv),
        "commit": source_commit(ROOT),
        "hosts": f"{max(1, world_size // local_world_size)}, rank 0 on {platform.node()}",
        "ranks": f"{world_size}",
        "devices": devices,
        "python": platform.python_version(),
        "versions": versions,
        "system": platform.platform(),
    }


def source_commit(root: Path) -> str:
    """The commit of the checkout `root` and whether its files differ from it, or why there is no commit."""
    if not (root / ".git").exists():
        return "none: no git checkout"

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(root), *arguments],
            check=True,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=10,
        ).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + (", with changes" if changed else "")
    except (OSError, subprocess.SubprocessError) as error:
        return f"none: git failed: {error}"
