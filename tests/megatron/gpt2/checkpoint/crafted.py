"""Checkpoints made to do harm: all hashes are right, as an attacker's would be. Each is an error in one line, at once,
in little memory, and nothing that it holds is executed.

What the tests of such manifests, tables and files share.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from data_utils.files import sealed_body, sealed_lines
from megatron.gpt2.checkpoint.folder import find_checkpoint
from megatron.gpt2.checkpoint.manifest import MANIFEST

FILES = [f"mp_rank_0{rank}/model.safetensors" for rank in (0, 1)]
WHOLE = torch.arange(48.0).view(8, 6)
Manifest = dict[str, Any]
NO_NUMBERS = [True, 1.0, -1, "1", None, [], {}, float("inf"), float("nan"), 1 << 62, 10**4000]


IN_PLACE: dict[str, Callable[[Path], Any]] = {
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "empty": lambda path: path.symlink_to("/dev/null"),
    "loop": lambda path: path.symlink_to(path.name),
    "dangling": lambda path: path.symlink_to("nowhere"),
    "elsewhere": lambda path: path.symlink_to("/proc/self/status"),
    "other": lambda path: path.symlink_to(__file__),
    "sparse": lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 1 << 40),
}


def seal(folder: Path, body: str | bytes) -> None:
    """Write the manifest that begins with `body`, up to its own sha256."""
    body = body.encode() if isinstance(body, str) else body
    (folder / MANIFEST).write_bytes(sealed_body(body))


@contextlib.contextmanager
def little_memory() -> Iterator[None]:
    """Half a gigabyte more than there is by now."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + (1 << 29), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def refused(folder: Path) -> str:
    """Open, hash and read it as a load does; what the error says."""
    began = time.process_time()
    with little_memory(), pytest.raises(ValueError) as caught:
        checkpoint = find_checkpoint(folder.parent, log=lambda line: None)
        assert checkpoint is not None
        for name in checkpoint.names():
            checkpoint.read(name)
    assert time.process_time() - began < 1
    said = str(caught.value)
    assert str(folder) in said and "\n" not in said and len(said) < 1000, said
    return said


def change(folder: Path, crafted: Callable[[Manifest], Any]) -> None:
    manifest = json.loads((folder / MANIFEST).read_bytes())
    del manifest["sha256"]
    crafted(manifest)
    (folder / MANIFEST).write_bytes(sealed_lines(manifest))
