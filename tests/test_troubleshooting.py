"""Test that every entry of docs/how-to/troubleshooting.md names tests that exist. Tests that fit no other file are
here."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch

from megatron.gpt2.config.arguments import parse
from megatron.gpt2.dist.ranks import RankInfo
from megatron.gpt2.formats import open_checkpoint
from megatron.gpt2.train.setup import build_context
from tests.conftest import ROOT, tool
from tests.data_utils.data_files import write_byte_vocabulary
from tests.megatron.gpt2.formats.sample_checkpoints import random_weights, write_megatron
from tests.megatron.gpt2.train.training_runs import SMALL
from tests.test_import_rules import imported

PAGE = (ROOT / "docs" / "how-to" / "troubleshooting.md").read_text()
# These are the title and the text of each entry.
ENTRIES = re.findall(r"^### (.+)\n((?:(?!#{2,3} ).*\n)*)", PAGE, re.MULTILINE)


def functions(path: Path) -> set[str]:
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("title, text", ENTRIES, ids=[title for title, _ in ENTRIES])
def test_every_entry_names_tests_that_exist(title: str, text: str):
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    assert named, f"{title}: no test shows it"
    for file, name in named:
        assert name.startswith("test_") and name in functions(ROOT / file), f"{title}: {file}::{name}"
    assert text.count("::") == len(named), f"{title}: a test is named in another form"


# ----------------------------------------------------------------------------------------------- install and launch

PROGRAM = [
    path
    for room in ("mpu", "data_utils", "megatron", "tools")
    for path in sorted((ROOT / room).rglob("*"))
    if "__pycache__" not in path.parts
]


def test_nothing_has_to_be_built():
    assert len(PROGRAM) > 100
    assert {path.suffix for path in PROGRAM} & {".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".so"} == set()
    for path in (path for path in PROGRAM if path.suffix == ".py"):
        for name in imported(path):
            built = {"apex", "amp_C", "transformer_engine", "flash_attn", "deepspeed"} & {name.split(".")[0]}
            assert not built and "cpp_extension" not in name, f"{path} imports {name}"


def test_no_module_of_torch_that_may_vanish():
    """torch._six was removed in torch 2.0. torch's notes on extending PyTorch name the module of TorchDispatchMode."""
    for path in (path for path in PROGRAM if path.suffix == ".py"):
        for name in imported(path):
            private = name.startswith("torch.") and any(part.startswith("_") for part in name.split("."))
            assert not private or name.startswith("torch.utils._python_dispatch"), f"{path} imports {name}"


@pytest.mark.parametrize("words", [["--local-rank=1"], ["--local_rank=1"], ["--local_rank", "1"]])
def test_the_launchers_local_rank_changes_nothing(words: list[str]):
    assert parse([*SMALL, *words]).config == parse(SMALL).config


# ------------------------------------------------------------------------------------------------------- checkpoints


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return flags for files in GPT-2's format with 256 bytes and an end of document."""
    folder = tmp_path_factory.mktemp("vocabulary")
    write_byte_vocabulary(folder / "vocab.json", folder / "merges.txt")
    return ["--vocab-file", f"{folder}/vocab.json", "--merge-file", f"{folder}/merges.txt"]


def test_megatrons_own_sharded_optimizer_is_left_out_loudly(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """v3.0 (2023) writes model_rng.pt for each model-parallel rank, and optim.pt for each data-parallel rank in a
    separate folder."""
    weights = random_weights()
    write_megatron(tmp_path / "theirs", weights, "v2", version=3, tp=4)
    for file in sorted((tmp_path / "theirs").rglob("model_optim_rng.pt")):
        for rank in range(2):
            shard = file.parent.with_name(f"{file.parent.name}_{rank:03d}") / "optim.pt"
            shard.parent.mkdir()
            torch.save({"exp_avg": torch.ones(3)}, shard)
        file.rename(file.with_name("model_rng.pt"))
    words = [str(tmp_path / "theirs"), str(tmp_path / "ours"), *"--to native --vocab-size 101".split()]
    assert tool("checkpoint").main(["convert", *words]) == 0
    assert "left out: 8 files of a sharded optimizer (optim.pt ...)" in capsys.readouterr().err
    source = open_checkpoint(tmp_path / "ours")
    assert all(torch.equal(source.read(f"model.{name}"), value) for name, value in weights.items())


def test_a_vocabulary_file_of_another_size_is_refused(tmp_path: Path, vocabulary: list[str]):
    """The conversion refuses the file, or training does if the conversion got no file."""
    write_megatron(tmp_path / "theirs", random_weights(), "flat", args=False)
    words = [str(tmp_path / "theirs"), *"--to native --num-attention-heads 4 --vocab-size 101".split()]
    checkpoint = tool("checkpoint")
    with pytest.raises(
        ValueError, match="has 101 tokens, but the tokenizer .*257: give the tokenizer that the model was trained"
    ):
        checkpoint.main(["convert", *words[:1], str(tmp_path / "a"), *words[1:], *vocabulary])
    assert not (tmp_path / "a").exists()
    assert checkpoint.main(["convert", *words[:1], str(tmp_path / "b"), *words[1:]]) == 0
    load = ["--load", str(tmp_path / "b"), "--save", str(tmp_path / "c"), "--device", "cpu"]
    for flags, message in (
        ([], "has no tokenizer: give --vocab-file"),
        (vocabulary, "has 101 tokens and the tokenizer 257"),
    ):
        with pytest.raises(ValueError, match=message):
            build_context(parse([*load, *flags]), RankInfo(), lambda line: None)
