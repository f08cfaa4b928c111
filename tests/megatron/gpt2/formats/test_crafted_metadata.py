"""Files `.metadata` that were made to do harm: nothing is executed, and each is an error in time."""

from __future__ import annotations

import math
import pickle
import resource
import time
from pathlib import Path
from typing import Any

import pytest

from megatron.gpt2.formats.dcp import METADATA, read_metadata
from tests.megatron.gpt2.formats.crafted_metadata import CRAFTED
from tests.megatron.gpt2.formats.made import opened


@pytest.fixture(scope="module")
def genuine(folders: dict[str, Path]) -> tuple[Path, bytes]:
    folder = folders["plain-0.16.1"] / "iter_0000003"
    return folder, (folder / METADATA).read_bytes()


def test_there_are_two_hundred():
    assert len(CRAFTED) >= 200


@pytest.mark.parametrize("name", CRAFTED)
def test_crafted(genuine: tuple[Path, bytes], tmp_path: Path, name: str):
    folder, data = genuine
    marker = tmp_path / "executed"
    crafted = CRAFTED[name](data, marker)
    (folder / METADATA).write_bytes(crafted)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    took = math.inf
    for _ in range(3):  # a busy machine's processor is slower: the best of three, where the first takes a second
        begin = time.process_time()  # of this process alone: other tests run beside it
        with pytest.raises(ValueError) as caught:
            source = opened(folder)
            for tensor in source.names():
                source.read(tensor)
        took = min(took, time.process_time() - begin)
        if took < 1:
            break
    message = str(caught.value)
    assert "\n" not in message and len(message) < 600 and str(folder) in message, message
    assert took < 1, f"{took:.2f} s: {message}"  # the longest takes 0.5 s, and more on a busy machine
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) << 10 < len(crafted) + (64 << 20)
    assert not marker.exists(), "executed"


def test_the_payloads_would_run(genuine: tuple[Path, bytes], tmp_path: Path):
    """A test that nothing was executed shows something only where it would have been."""
    pickle.loads(CRAFTED["os.system called"](genuine[1], tmp_path / "executed"))
    assert (tmp_path / "executed").exists()


def test_what_was_crafted_is_right_but_for_one_thing(genuine: tuple[Path, bytes]):
    folder, data = genuine
    (folder / METADATA).write_bytes(pickle.dumps(pickle.loads(data), 4))
    assert opened(folder).names()


def test_metadata_of_every_protocol(genuine: tuple[Path, bytes], tmp_path: Path):
    wanted = read_metadata_of(tmp_path, genuine[1])
    assert all(wanted)
    assert read_metadata_of(tmp_path, pickle.dumps(pickle.loads(genuine[1]), 5)) == wanted


def read_metadata_of(folder: Path, data: bytes) -> Any:
    (folder / METADATA).write_bytes(data)
    return read_metadata(folder / METADATA)
