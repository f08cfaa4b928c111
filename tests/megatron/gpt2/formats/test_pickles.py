"""Files of torch.save and of DCP read without executing anything, and hundreds of files that were made to do harm."""

from __future__ import annotations

import argparse
import collections
import io
import math
import pickle
import random
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from data_utils.files.inert_pickle import Inert
from megatron.gpt2.formats import Hints, open_source
from megatron.gpt2.formats.dcp import METADATA, read_metadata
from megatron.gpt2.formats.torch_files import load_pickle
from tests.conftest import TEST_DATA
from tests.megatron.gpt2.formats.crafted_files import (
    CRAFTED,
    FOUR,
    legacy_of,
    marker,
    storage,
    tensor,
    valid_zip,
    with_index,
    with_payload,
    with_top,
    zip_of,
)
from tests.megatron.gpt2.formats.crafted_metadata import CRAFTED as CRAFTED_METADATA
from tests.megatron.gpt2.formats.made import core, openai_state, opened, random_weights, write_huggingface


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b) and a.dtype == b.dtype and a.stride() == b.stride()
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return isinstance(b, Inert) or (type(a) is type(b) and a == b)


@pytest.mark.parametrize("legacy", [False, True])
def test_what_torch_saves_comes_back(tmp_path: Path, legacy: bool):
    base = torch.randn(6, 8)
    saved: dict[Any, Any] = {
        "tensors": [
            torch.arange(5, dtype=dtype)
            for dtype in (
                torch.float16,
                torch.bfloat16,
                torch.float32,
                torch.float64,
                torch.int64,
                torch.int32,
                torch.int16,
                torch.int8,
                torch.uint8,
            )
        ],
        "views": (base, base.t(), base[2:4, 1:3], base[5], torch.empty(0, 3), torch.tensor(3.5)),
        "parameter": torch.nn.Parameter(base),
        "marked": base.clone(),
        "flag": torch.tensor([True, False]),
        "plain": [
            None,
            True,
            1,
            -1,
            255,
            65535,
            2**31,
            -(2**40),
            10**30,
            1.5,
            float("inf"),
            "é\n",
            (),
            (1,),
            (1, 2, 3),
        ],
        "args": argparse.Namespace(lr=1.0, dtype=torch.float16),
        "ordered": collections.OrderedDict(a=1),
        "numpy": np.random.RandomState(0).get_state(),
        "signal": signal.SIGTERM,
        "set": {1, 2},
        5: {0.5: None},
        "shared": [base, base],
    }
    for name in ("parameter", "marked"):
        saved[name].tensor_model_parallel = True  # as Megatron marks its masters
    path = tmp_path / "file with a space.pt"
    torch.save(saved, path, _use_new_zipfile_serialization=not legacy)
    read = load_pickle(path)
    for key, value in saved.items():
        if key == "parameter":
            assert torch.equal(read[key], value)
        elif key not in ("args", "set", "signal", "numpy"):
            assert same(value, read[key]), key
    assert read["args"].name == "argparse.Namespace"
    assert read["args"].attributes() == {"lr": 1.0, "dtype": torch.float16}
    assert isinstance(read["set"], Inert) and isinstance(read["numpy"][1], Inert)
    assert read["shared"][0].data_ptr() == read["shared"][1].data_ptr(), "a view of the file"
    read["shared"][0].zero_()
    assert torch.equal(load_pickle(path)["shared"][0], base), "the file itself stays as it is"


def test_genuine_files_come_back():
    files = sorted(TEST_DATA.glob("megatron-*/tp*/checkpoint/*/*/model_optim_rng.pt"))
    if not files:
        pytest.skip(f"{TEST_DATA} has no genuine checkpoints")
    reconstruct: Any = np.zeros(1).__reduce__()[0]
    for path in files:
        loss_scaler = type("DynamicLossScaler", (), {})
        with torch.serialization.safe_globals(
            [
                (loss_scaler, "fp16.loss_scaler.DynamicLossScaler"),
                argparse.Namespace,
                np.ndarray,
                np.dtype,
                (reconstruct, "numpy.core.multiarray._reconstruct"),
                type(np.dtype("u4")),
            ]
        ):
            theirs = torch.load(path, map_location="cpu", weights_only=True)
        ours = load_pickle(path)
        assert same(
            {key: value for key, value in theirs.items() if key not in ("args", "np_rng_state")},
            {key: value for key, value in ours.items() if key not in ("args", "np_rng_state")},
        ), path
        if "args" in theirs:
            assert ours["args"].attributes() == vars(theirs["args"])
        if "optimizer" in theirs:
            assert ours["optimizer"]["loss_scaler"].attributes() == vars(theirs["optimizer"]["loss_scaler"])


def test_there_are_a_hundred():
    assert len(CRAFTED) >= 100


@pytest.mark.parametrize("name", CRAFTED)
def test_crafted(tmp_path: Path, name: str):
    path = CRAFTED[name](tmp_path)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    size = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
    begin = time.process_time()  # of this process alone: other tests run beside it. The longest, 250,000 instructions,
    # takes 0.5 s, and 1 s on a machine at half its speed.
    with pytest.raises(ValueError) as caught:
        open_source(path, Hints(), log=lambda line: None)
    took = time.process_time() - begin
    message = str(caught.value)
    assert "\n" not in message and len(message) < 600 and str(tmp_path) in message, message
    assert took < 2, f"{took:.2f} s: {message}"
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) << 10 < 10 * size + (64 << 20)
    assert not marker(tmp_path).exists(), "executed"


# Data like any other, and no checkpoint.
WELL_FORMED = {
    f"zip: {name}"
    for name in (
        "nested deeply",
        "nested deeply in dictionaries",
        "protocol 4",
        "weights that are numbers",
        "a number instead of a checkpoint",
        "sizes that take years to print",
    )
}


@pytest.mark.parametrize("name", [name for name in CRAFTED if name.startswith(("zip: ", "legacy: "))])
def test_the_reader_of_pickles_itself_refuses(tmp_path: Path, name: str):
    CRAFTED[name](tmp_path)
    if name in WELL_FORMED:
        load_pickle(tmp_path / "ckpt.pt")
    else:
        with pytest.raises(ValueError):
            load_pickle(tmp_path / "ckpt.pt")


def test_the_payloads_would_run(tmp_path: Path):
    """A test that nothing was executed shows something only where it would have been."""
    file = with_payload(tmp_path, "nanogpt", "os.system", False) / "ckpt.pt"
    torch.load(file, weights_only=False)
    assert marker(tmp_path).exists()


def test_what_was_crafted_is_right_but_for_one_thing(tmp_path: Path):
    """The bodies that the crafted files start from open."""
    names = openai_state(random_weights(), transposed=True)
    bodies: tuple[Callable[[Path], Path], ...] = (
        valid_zip,
        write_huggingface,
        lambda folder: with_top(folder, lambda top: None),
        lambda folder: with_index(folder, dict.fromkeys(names, "model-1.safetensors")),
    )
    for number, make in enumerate(bodies):
        folder = tmp_path / str(number)
        folder.mkdir()
        open_source(make(folder), log=lambda line: None)
    good = legacy_of(tmp_path, tensor(storage(legacy=True)), after=FOUR)
    assert torch.equal(load_pickle(good), torch.zeros(4))
    good = zip_of(tmp_path, tensor(storage()), **{"data/0": b"\0" * 16})
    assert torch.equal(load_pickle(good), torch.zeros(4))


def test_no_mutation_is_taken_for_another_error(tmp_path: Path):
    """Five hundred files with a byte changed: read, or refused in one line."""
    numbers, refused = random.Random(7), 0
    for legacy in (False, True):
        stream = io.BytesIO()
        torch.save(
            {
                "model": core({"transformer.final_layernorm.bias": torch.ones(4)}, False),
                "args": argparse.Namespace(a=1),
                "numpy": np.arange(3),
            },
            stream,
            _use_new_zipfile_serialization=not legacy,
        )
        for _ in range(250):
            data = bytearray(stream.getvalue())
            data[numbers.randrange(len(data))] = numbers.randrange(256)
            (tmp_path / "x.pt").write_bytes(data)
            try:
                load_pickle(tmp_path / "x.pt")
            except ValueError as error:
                refused += 1
                assert "\n" not in str(error)
    assert refused > 50


@pytest.fixture(scope="module")
def genuine(folders: dict[str, Path]) -> tuple[Path, bytes]:
    folder = folders["plain-0.16.1"] / "iter_0000003"
    return folder, (folder / METADATA).read_bytes()


def test_there_are_two_hundred():
    assert len(CRAFTED_METADATA) >= 200


@pytest.mark.parametrize("name", CRAFTED_METADATA)
def test_crafted_metadata(genuine: tuple[Path, bytes], tmp_path: Path, name: str):
    folder, data = genuine
    marker = tmp_path / "executed"
    crafted = CRAFTED_METADATA[name](data, marker)
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


def test_the_payloads_of_metadata_would_run(genuine: tuple[Path, bytes], tmp_path: Path):
    """A test that nothing was executed shows something only where it would have been."""
    pickle.loads(CRAFTED_METADATA["os.system called"](genuine[1], tmp_path / "executed"))
    assert (tmp_path / "executed").exists()


def test_the_crafted_metadata_is_right_but_for_one_thing(genuine: tuple[Path, bytes]):
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
