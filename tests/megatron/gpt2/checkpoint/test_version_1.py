"""A checkpoint of the first version of the format, version_1/: written by the program of its time, 2 x 2 ranks with a
sharded optimizer. It stays readable."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch

import mpu
from megatron.gpt2.checkpoint.folder import find_checkpoint
from megatron.gpt2.checkpoint.manifest import MANIFEST
from megatron.gpt2.checkpoint.reader import Checkpoint
from megatron.gpt2.generate.load_model import load_for_inference
from tests.conftest import tool

FOLDER = Path(__file__).parent / "version_1"
# Of names and values, as the program of its time read them.
VALUES = "51a1e16ca887702a72ed94f9af38b9afabe8aa1833a34a7c5d594fceb6b8aea4"


def test_every_value_is_what_it_was() -> None:
    assert json.loads((FOLDER / "iter_0000003" / MANIFEST).read_bytes())["version"] == 1
    checkpoint = find_checkpoint(FOLDER, log=pytest.fail)
    assert checkpoint is not None and checkpoint.iteration == 3 and checkpoint.verify() == ""
    values = hashlib.sha256()
    for name in sorted(checkpoint.names()):
        values.update(name.encode() + checkpoint.read(name).view(-1).view(torch.uint8).numpy().tobytes())
    assert values.hexdigest() == VALUES and len(checkpoint.names()) == 4 * 16


def test_the_tools_read_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = tool("checkpoint").main
    assert main(["verify", str(FOLDER)]) == 0 and main(["inspect", str(FOLDER)]) == 0
    assert main(["merge", str(FOLDER), str(tmp_path / "merged")]) == 0
    assert main(["diff", str(FOLDER), str(tmp_path / "merged")]) == 0
    assert "mp_rank_01/exp_avg_sq_dp_01.safetensors" in capsys.readouterr().out
    assert json.loads((tmp_path / "merged/iter_0000003" / MANIFEST).read_bytes())["version"] == 2
    mpu.initialize_model_parallel(1)
    tokenizer = load_for_inference(FOLDER, torch.device("cpu"), torch.float32, log=pytest.fail).tokenizer
    assert tokenizer.kind == "bytes" and (FOLDER / "tokenizer/tokenizer.json").exists(), "as it was called then"


def test_damage_is_seen_as_ever(tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "save")
    victim = tmp_path / "save/iter_0000003/mp_rank_01/master_dp_00.safetensors"
    data = victim.read_bytes()
    victim.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert Checkpoint(victim.parents[1]).damage() == f"{victim}: damaged: its sha256 is not the one in {MANIFEST}"
