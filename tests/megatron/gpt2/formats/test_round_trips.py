"""Convert native checkpoints to each export format and back with equal bits. transformers computes the same logits.
Tokenizers that transformers 4 and 5 write give equal ids."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from data_utils import Tokenizer, build_tokenizer
from data_utils.tokenizers.gpt2 import END_OF_TEXT
from megatron.gpt2.formats import BaseCheckpoint, open_checkpoint
from megatron.gpt2.formats.compare import compare_logits, compare_tensors, compute_logits
from megatron.gpt2.formats.huggingface import write_huggingface
from megatron.gpt2.formats.native import write_native
from megatron.gpt2.formats.openai_tokenizer import open_tokenizer, tokenizer_files
from tests.conftest import error_line
from tests.megatron.gpt2.formats.sample_checkpoints import silent
from tests.megatron.gpt2.formats.test_megatron import genuine, open_genuine
from tests.megatron.gpt2.train.training_runs import finish, start, steps, write_text

TEXTS = [
    "Hello, world! It's 1,024 o'clock\n\n\tand   naïve café 日本語 🙂🙂 ",
    " leading\r\n",
    "",
    "a" * 300,
    "\x00\x7f\ufeff",
]


@pytest.fixture(scope="module")
def save(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the --save folder of a run of three steps in bf16 with the built-in BPE tokenizer."""
    folder = tmp_path_factory.mktemp("run")
    write_text(folder)
    trainer = start(0, 1, folder, "--precision bf16 --tokenizer-type builtin --seed 3")
    steps(trainer, 3)
    trainer.progress.iteration = 3
    assert trainer.checkpoints.save() is not None
    finish(trainer)
    return folder / "save"


@pytest.fixture
def source(save: Path) -> BaseCheckpoint:
    return open_checkpoint(save, log=silent)


@pytest.fixture(scope="module")
def builtin() -> Tokenizer:
    return build_tokenizer("builtin")


@torch.no_grad()
def assert_transformers_agrees(source: BaseCheckpoint, folder: Path) -> None:
    from transformers import GPT2LMHeadModel

    theirs = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = torch.randint(source.metadata["vocab_size"], (2, 24), generator=torch.Generator().manual_seed(1))
    assert (compute_logits(source, tokens).transpose(0, 1) - theirs(tokens).logits).abs().max() <= 1e-5


@pytest.mark.parametrize("dtype", ["source", "fp32"])
def test_huggingface_computes_the_same_and_comes_back(
    source: BaseCheckpoint, builtin: Tokenizer, tmp_path: Path, dtype: str
):
    out = write_huggingface(source, tmp_path / "hf", dtype=dtype, tokenizer=builtin, log=silent)
    # An export in fp32 has the masters instead of the rounded weights.
    back, kind = open_checkpoint(out, log=silent), "model" if dtype == "source" else "master"
    assert len(back.tensors) == 28
    for name in back.tensors:
        held = source.read(name.replace("model", kind, 1))
        assert back.tensors[name].dtype == held.dtype and torch.equal(back.read(name), held)
    assert compare_logits(source, back, kind=kind, log=silent) == 0
    assert_transformers_agrees(back, out)
    config = json.loads((out / "config.json").read_text())
    assert config["n_ctx"] == config["n_positions"], "llama.cpp's converter reads n_ctx"
    assert_same_ids(builtin, out)
    write_native(back, tmp_path / "ours", tp_size=2, tokenizer=builtin)
    assert compare_tensors(back, open_checkpoint(tmp_path / "ours", log=silent)).equal
    card = (out / "README.md").read_text()
    assert re.search(r"^iteration +3$", card, re.MULTILINE) and "AutoTokenizer" in card and str(tmp_path) not in card


@genuine
@pytest.mark.parametrize("name", ["megatron-2019/tp2", "megatron-v2.6/tp2"])
def test_genuine_files_become_huggingface(name: str, tmp_path: Path):
    out = write_huggingface(open_genuine(name), tmp_path / "hf", log=silent)
    assert_transformers_agrees(open_genuine(name), out)
    assert json.loads((out / "config.json").read_text())["activation_function"] == "gelu_new"


def test_an_error_leaves_no_folder(source: BaseCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fails(*args: object, **kwargs: object) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(source, "read_into", fails)
    with pytest.raises(OSError, match="disk is gone"):
        write_native(source, tmp_path / "out", tp_size=2)
    assert not list(tmp_path.iterdir())


# --- tokenizers


def assert_same_ids(tokenizer: Tokenizer, folder: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert theirs(text)["input_ids"] == list(map(int, tokenizer.encode(text))), text
    assert theirs.eos_token_id == tokenizer.eod


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    files, problem = tokenizer_files(tokenizer, 1024)
    assert not problem
    for name, content in files.items():
        (folder / name).write_bytes(content)


@pytest.mark.parametrize("kind", ["GPT2BPETokenizer", "bytes"])
def test_other_tokenizers_give_the_same_ids(
    source: BaseCheckpoint, tmp_path: Path, kind: str, request: pytest.FixtureRequest
):
    named = {}
    if kind == "GPT2BPETokenizer":
        folder = request.getfixturevalue("test_data") / "gpt2"
        named = {"vocab_file": str(folder / "encoder.json"), "merge_file": str(folder / "vocab.bpe")}
    tokenizer, said = build_tokenizer(kind, **named), list[str]()
    out = write_huggingface(source, tmp_path / "hf", log=said.append)
    assert any("no tokenizer" in line for line in said) and "no tokenizer" in (out / "README.md").read_text()
    assert not (out / "tokenizer_config.json").exists()
    write_tokenizer(tokenizer, out)
    assert_same_ids(tokenizer, out)


@pytest.fixture(scope="module")
def written(builtin: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the tokenizer.json that transformers 5 saves for the built-in tokenizer. A padding token is added, as is
    usual for fine-tuning."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(builtin, folder)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    theirs.add_special_tokens({"pad_token": "<pad>"})
    theirs.save_pretrained(folder / "saved")
    assert not (folder / "saved/vocab.json").exists(), "its form of today"
    return json.loads((folder / "saved/tokenizer.json").read_text())


def as_older_files_have_them(found: dict[str, Any]) -> None:
    found["model"]["merges"] = [" ".join(pair) for pair in found["model"]["merges"]]
    for name in ("byte_fallback", "ignore_merges"):
        del found["model"][name]
    del found["pre_tokenizer"]["use_regex"]


@pytest.mark.parametrize("form", ["transformers 5", "older", "transformers 4"])
def test_a_tokenizer_is_read_to_the_same_ids(written: dict[str, Any], builtin: Tokenizer, tmp_path: Path, form: str):
    found = copy.deepcopy(written)
    if form == "transformers 4":
        write_tokenizer(builtin, tmp_path)
    elif form == "older":
        as_older_files_have_them(found)
    if form != "transformers 4":
        (tmp_path / "tokenizer.json").write_text(json.dumps(found))
    tokenizer = open_tokenizer({path.name: str(path) for path in tmp_path.iterdir()})
    for text in [*TEXTS, f"a{END_OF_TEXT}b<pad>"]:
        assert list(map(int, tokenizer.encode(text))) == list(map(int, builtin.encode(text))), text
    assert tokenizer.kind == "GPT2BPETokenizer" and tokenizer.eod == builtin.eod
    if form != "transformers 4":
        assert tokenizer.vocab_size == builtin.vocab_size + 1 and tokenizer.decode([builtin.vocab_size]) == ""


OTHERS: dict[str, Callable[[dict[str, Any]], object]] = {
    "type of its model": lambda found: found["model"].update(type="Unigram"),
    "normalizer": lambda found: found.update(normalizer={"type": "NFC"}),
    "its pre_tokenizer": lambda found: found.update(pre_tokenizer=None),
    "id": lambda found: found["added_tokens"][0].update(id=5000),  # The ids have a gap.
    "vocabulary": lambda found: found["model"].pop("vocab"),
}


@pytest.mark.parametrize("said", OTHERS)
def test_other_tokenizers_are_refused_in_one_line(written: dict[str, Any], tmp_path: Path, said: str):
    found, file = copy.deepcopy(written), tmp_path / "tokenizer.json"
    OTHERS[said](found)
    file.write_text(json.dumps(found))
    message = error_line(lambda: open_tokenizer({"tokenizer.json": str(file)}))
    assert str(file) in message and said in message and len(message) < 600
