"""What lies in the place of a checkpoint's files, with right hashes: pipes, links, pickles, other headers."""

from __future__ import annotations

import hashlib
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.gpt2.checkpoint.folder import TRACKER, find_checkpoint
from megatron.gpt2.checkpoint.manifest import MANIFEST
from tests.megatron.gpt2.checkpoint.crafted import FILES, IN_PLACE, WHOLE, refused, seal
from tests.megatron.gpt2.checkpoint.versions import contents, reseal


@pytest.mark.timeout(120, method="thread")
@pytest.mark.parametrize("name", IN_PLACE)
@pytest.mark.parametrize("file", [MANIFEST, FILES[1]])
def test_what_is_no_file(folder: Path, file: str, name: str) -> None:
    (folder / file).unlink()
    IN_PLACE[name](folder / file)
    refused(folder)


@pytest.mark.timeout(120, method="thread")
@pytest.mark.parametrize("name", ["pipe", "endless"])
def test_what_has_no_size(folder: Path, name: str) -> None:
    manifest = contents(folder)
    manifest["files"]["mp_rank_00/more.safetensors"] = {"bytes": 0, "sha256": hashlib.sha256().hexdigest(), "boxes": {}}
    reseal(folder, manifest)
    IN_PLACE[name](folder / "mp_rank_00/more.safetensors")
    refused(folder)


class Payload:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("place", [MANIFEST, TRACKER, *FILES])
def test_pickles_are_not_executed(folder: Path, place: str) -> None:
    done = folder.parent / "executed"
    payload = pickle.dumps(Payload(done))
    pickle.loads(payload)
    done.unlink()  # it would have worked
    manifest = contents(folder)
    if place == TRACKER:
        (folder.parent / TRACKER).write_bytes(payload)
        checkpoint = find_checkpoint(folder.parent, log=lambda line: None)
        assert checkpoint is not None and torch.equal(checkpoint.read("x"), WHOLE)
    else:
        if place == MANIFEST:
            seal(folder, payload)
        else:
            payload += bytes(manifest["files"][place]["bytes"] - len(payload))
            (folder / place).write_bytes(payload)
            manifest["files"][place]["sha256"] = hashlib.sha256(payload).hexdigest()
            reseal(folder, manifest)
        refused(folder)
    assert not done.exists()


def test_headers_that_disagree(folder: Path) -> None:
    """With the right sha256 and size in the manifest; the last two say another size of the header."""
    true = contents(folder)
    data = (folder / FILES[0]).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, values = data[8 : 8 + length], data[8 + length :]
    entry = header[header.index(b'"x"') : header.rindex(b"}")]
    exchanges = [
        (b"F32", b"I32"),
        (b"[4,6]", b"[6,4]"),
        (b'"x"', b'"y"'),
        (b'"x"', b'"\x00"'),
        (b"[0,96]", b"[1,96]"),
        (b"[0,96]", b"[0,95]"),
        (b"[0,96]", b"[0,1152921504606846976]"),
        (b"mp_rank_00", b"mp_rank_01"),
        (b'"iteration":"1"', b'"iteration":"2"'),
        (entry, entry + b"," + entry),
        (entry, entry + b"," + entry.replace(b'"x"', b'"z"')),
    ]
    headers = [header.replace(*exchange) for exchange in exchanges]
    headers += [b"", b"{}", b"null", pickle.dumps(header), header + b" ", b" " * (17 << 20)]
    starts = [len(changed).to_bytes(8, "little") + changed for changed in headers]
    starts += [size.to_bytes(8, "little") + header for size in (1 << 60, (1 << 64) - 1)]
    for start in starts:
        assert start != data[: 8 + length]
        (folder / FILES[0]).write_bytes(start + values)
        true["files"][FILES[0]].update(bytes=len(start + values), sha256=hashlib.sha256(start + values).hexdigest())
        reseal(folder, true)
        refused(folder)
