"""Files of torch.save and of DCP are read without executing code. About 170 crafted files are refused."""

from __future__ import annotations

import argparse
import math
import pickle
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from data_utils.files.restricted_pickle import PickledObject
from megatron.gpt2.formats import open_checkpoint
from megatron.gpt2.formats.torch_files import DCP_METADATA, TORCH_DTYPES, load_torch_file
from tests.fuzz.fuzzing import refusal
from tests.megatron.gpt2.formats import crafted
from tests.megatron.gpt2.formats.sample_checkpoints import (
    nanogpt_checkpoint,
    openai_state,
    opened,
    random_weights,
    silent,
)


@pytest.mark.parametrize("legacy", [False, True])
def test_what_torch_saves_comes_back(tmp_path: Path, legacy: bool):
    base = torch.randn(6, 8)
    marked = torch.nn.Parameter(base)
    marked.tensor_model_parallel = True  # type: ignore[attr-defined]  # Megatron sets this attribute on its masters.
    plain = [None, True, 1, 65535, -(2**40), 10**30, math.inf, "é\n", (), (1, 2, 3)]
    views = [base, base.t(), base[2:4, 1:3], torch.empty(0, 3), torch.tensor(3.5)]
    tensors = [*views, *(torch.arange(5).to(dtype) for dtype in TORCH_DTYPES.values())]
    objects = {"args": argparse.Namespace(lr=1.0, dtype=torch.float16), "set": {1, 2}, "numpy": np.arange(3)}
    path = tmp_path / "file with a space.pt"
    saved = {"tensors": tensors, "plain": plain, "signal": signal.SIGTERM, **objects}
    saved |= {"marked": marked, "shared": [base, base]}
    torch.save(saved, path, _use_new_zipfile_serialization=not legacy)
    read = load_torch_file(path)
    assert read["plain"] == saved["plain"]
    assert [*map(type, read["plain"][: len(plain)])] == [*map(type, plain)]  # True is equal to 1.
    for x, y in zip(tensors, read["tensors"], strict=True):
        assert torch.equal(x, y) and x.dtype == y.dtype and x.stride() == y.stride()
    assert torch.equal(read["marked"], base)
    assert all(isinstance(read[key], PickledObject) for key in objects)
    assert (read["args"].name, read["args"].attributes()) == ("argparse.Namespace", vars(objects["args"]))
    assert read["shared"][0].data_ptr() == read["shared"][1].data_ptr(), "a view of the file"
    read["shared"][0].zero_()
    assert torch.equal(load_torch_file(path)["shared"][0], base), "the file itself stays as it is"


@pytest.fixture
def executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of the file that the payload of a crafted pickle would make."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "executed"


@pytest.mark.parametrize("name", crafted.FILES)
def test_crafted(tmp_path: Path, executed: Path, name: str):
    folder = tmp_path / "it"
    folder.mkdir()
    crafted.FILES[name](folder)
    size = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
    refusal(lambda: open_checkpoint(folder, log=silent), size, str(folder))
    if name.startswith(("zip: ", "legacy: ")) and name.partition(": ")[2] not in crafted.WELL_FORMED:
        refusal(lambda: load_torch_file(folder / "ckpt.pt"), size, str(folder))  # without format detection
    assert not executed.exists()


def test_the_payloads_would_run(tmp_path: Path, executed: Path, genuine: tuple[Path, bytes]):
    """Python's unpickler executes the payloads. The tests of crafted files can therefore fail."""
    crafted.FILES["zip calls os.system"](tmp_path)
    torch.load(tmp_path / "ckpt.pt", weights_only=False)
    assert executed.exists()
    executed.unlink()
    pickle.loads(crafted.METADATA["called"](genuine[1]))
    assert executed.exists()


def test_what_was_crafted_is_right_but_for_one_thing(tmp_path: Path, genuine: tuple[Path, bytes]):
    """The files from which the crafted ones are made open without errors."""
    index = dict.fromkeys(openai_state(random_weights(), transposed=True), "model-1.safetensors")
    bodies: tuple[Callable[[Path], object], ...] = (
        lambda folder: torch.save(nanogpt_checkpoint()[0], folder / "ckpt.pt"),
        lambda folder: crafted.with_top(lambda top: None, folder),
        lambda folder: crafted.with_index(index, folder),
    )
    for number, make in enumerate(bodies):
        folder = tmp_path / str(number)
        folder.mkdir()
        make(folder)
        open_checkpoint(folder, log=silent)
    for good in (
        crafted.legacy_of(crafted.GOOD_LEGACY, ["0"], crafted.FOUR, tmp_path),
        crafted.zip_of(crafted.tensor(crafted.storage()), tmp_path),
    ):
        assert torch.equal(load_torch_file(good), torch.zeros(4))
    folder, data = genuine
    (folder / DCP_METADATA).write_bytes(crafted.changed_metadata(lambda held, index, entry: None, data))
    assert list(opened(folder).tensors)


@pytest.fixture(scope="module")
def genuine(folders: dict[str, Path]) -> tuple[Path, bytes]:
    folder = folders["plain-0.16.1"] / "iter_0000003"
    return folder, (folder / DCP_METADATA).read_bytes()


@pytest.mark.parametrize("name", crafted.METADATA)
def test_crafted_metadata(genuine: tuple[Path, bytes], executed: Path, name: str):
    folder, data = genuine
    made = crafted.METADATA[name](data)
    (folder / DCP_METADATA).write_bytes(made)

    def read() -> None:
        source = opened(folder)
        for tensor in source.tensors:
            source.read(tensor)

    refusal(read, len(made) // 10, str(folder))  # The longest case takes 0.5 s.
    assert not executed.exists()
