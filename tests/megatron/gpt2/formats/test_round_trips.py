"""Ours to every format that we write and back: the same to the last bit, and transformers computes the same."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from data_utils import Tokenizer, build_tokenizer
from megatron.gpt2.formats import Hints, Source, huggingface, open_source
from megatron.gpt2.formats.compare import check, diff
from megatron.gpt2.formats.huggingface import write_huggingface as to_huggingface
from megatron.gpt2.formats.megatron import write_megatron
from megatron.gpt2.formats.megatron_model import Layout
from megatron.gpt2.formats.native import native_facts, write_native
from megatron.gpt2.formats.openai_tokenizer import tokenizer_files
from tests.conftest import TEST_DATA
from tests.megatron.gpt2.formats.test_megatron import GENUINE, TRUE_VOCABULARY, genuine, open_genuine, silent
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
    """The --save folder of a real run of three steps in bf16, its tokenizer the shipped BPE."""
    folder = tmp_path_factory.mktemp("run")
    write_text(folder)
    run = start(0, 1, str(folder), ["--precision", "bf16", "--tokenizer-type", "builtin", "--seed", "3"])
    steps(run, 3)
    run.progress.iteration = 3
    assert run.save() is not None
    finish(run)
    return folder / "save"


@pytest.fixture
def source(save: Path) -> Source:
    return open_source(save, log=silent)


@pytest.mark.parametrize("size", [1, 2])
def test_native_in_any_number_of_parts(source: Source, tmp_path: Path, size: int):
    path = write_native(source, tmp_path / "out", model_parallel_size=size, log=silent)
    back = open_source(tmp_path / "out", log=silent)
    assert back.path == path and diff(source, back).equal and len(diff(source, back).rows) == 4 * 28
    assert back.facts["layout"]["model_parallel_size"] == size
    assert len({file.split("/")[0] for file in back.files}) == size  # type: ignore[attr-defined]
    assert back.facts["consumed_samples"] == source.facts["consumed_samples"]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("format", ["megatron-2019", "megatron-v2", "megatron-v3", "megatron-core"])
def test_megatron_and_back(source: Source, tmp_path: Path, format: str, size: int):
    path = write_megatron(source, tmp_path / "theirs", format, Layout(size), log=silent)
    files = sorted(path.glob("*/model_optim_rng.pt"))
    assert len(files) == size
    heads = 4 if format == "megatron-2019" else None
    back = open_source(tmp_path / "theirs", Hints(heads), log=pytest.fail)  # the true vocabulary came along
    assert back.facts["vocab_size"] == source.facts["vocab_size"]
    assert back.format == format
    difference = diff(source, back)
    assert difference.equal, difference
    assert len(difference.rows) == (28 if format == "megatron-core" else 4 * 28)
    if format != "megatron-core":
        assert back.facts["optimizer"] == source.facts["optimizer"]
        assert back.iteration == source.iteration
    write_native(back, tmp_path / "ours", model_parallel_size=1, log=silent)
    assert diff(source, open_source(tmp_path / "ours", log=silent)).equal


@pytest.mark.parametrize("dtype", ["source", "fp32"])
def test_huggingface_computes_the_same_and_comes_back(source: Source, tmp_path: Path, dtype: str):
    from transformers import GPT2LMHeadModel

    out = to_huggingface(source, tmp_path / "hf", dtype=dtype, tokenizer=tokenizer_of(source), log=silent)
    back = open_source(out, log=silent)
    wanted = {"source": torch.bfloat16, "fp32": torch.float32}[dtype]
    assert back.tensors["model.word_embeddings.weight"].dtype == wanted
    if dtype == "source":
        assert diff(source, back).equal and len(diff(source, back).rows) == 28
    else:  # the masters, not the rounded weights
        for name in back.names():
            assert torch.equal(back.read(name), source.read(name.replace("model.", "master.", 1)))
    assert check(source, back, kind="model" if dtype == "source" else "master", log=silent) == 0
    theirs = GPT2LMHeadModel.from_pretrained(out, dtype=torch.float32).eval()
    assert logits_agree(back, theirs) <= 1e-5
    write_native(back, tmp_path / "ours", model_parallel_size=2, tokenizer=tokenizer_of(source), log=silent)
    assert diff(back, open_source(tmp_path / "ours", log=silent)).equal
    card = (out / "README.md").read_text()
    assert "iteration | 3" in card and "AutoTokenizer" in card and str(tmp_path) not in card


def tokenizer_of(source: Source) -> Tokenizer:
    return build_tokenizer(source.facts["tokenizer"]["kind"])


@torch.no_grad()
def logits_agree(source: Source, theirs: torch.nn.Module) -> float:
    from megatron.gpt2.formats.compare import logits

    tokens = torch.randint(source.facts["vocab_size"], (2, 24), generator=torch.Generator().manual_seed(1))
    return (logits(source, tokens).transpose(0, 1) - theirs(tokens).logits).abs().max().item()


def test_a_large_export_comes_in_parts(source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from transformers import GPT2LMHeadModel

    monkeypatch.setattr(huggingface, "SHARD_BYTES", 300_000)
    out = to_huggingface(source, tmp_path / "hf", log=silent)
    assert len(list(out.glob("model-*.safetensors"))) > 2
    assert diff(source, open_source(out, log=silent)).equal
    assert logits_agree(source, GPT2LMHeadModel.from_pretrained(out, dtype=torch.float32).eval()) <= 1e-5


def same_ids(tokenizer: Tokenizer, out: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(out)
    for text in TEXTS:
        assert theirs(text)["input_ids"] == list(map(int, tokenizer.encode(text))), text
    assert theirs.eos_token_id == tokenizer.eod


def test_the_shipped_tokenizer_gives_the_same_ids(source: Source, tmp_path: Path):
    tokenizer = tokenizer_of(source)
    same_ids(tokenizer, to_huggingface(source, tmp_path / "hf", tokenizer=tokenizer, log=silent))


@pytest.mark.parametrize("kind", ["GPT2BPETokenizer", "bytes"])
def test_other_tokenizers_give_the_same_ids(source: Source, tmp_path: Path, kind: str, request: pytest.FixtureRequest):
    named = {}
    if kind == "GPT2BPETokenizer":
        folder = request.getfixturevalue("test_data") / "gpt2"
        named = {"vocab_file": str(folder / "encoder.json"), "merge_file": str(folder / "vocab.bpe")}
    tokenizer = build_tokenizer(kind, **named)
    out = to_huggingface(source, tmp_path / "hf", log=silent)
    files, problem = tokenizer_files(tokenizer, 1024)
    assert not problem
    for name, content in files.items():
        (out / name).write_bytes(content)
    same_ids(tokenizer, out)


def test_without_an_equal_tokenizer_the_export_says_so(source: Source, tmp_path: Path):
    said: list[str] = []
    out = to_huggingface(source, tmp_path / "hf", log=said.append)
    assert any("no tokenizer" in line for line in said) and "no tokenizer" in (out / "README.md").read_text()
    assert not (out / "tokenizer_config.json").exists()


@genuine
@pytest.mark.parametrize("name", GENUINE)
def test_genuine_files_become_huggingface(name: str, tmp_path: Path):
    from transformers import GPT2LMHeadModel

    out = to_huggingface(open_genuine(name), tmp_path / "hf", log=silent)
    model = GPT2LMHeadModel.from_pretrained(out, dtype=torch.float32).eval()
    tokens = torch.from_numpy(np.load(TEST_DATA / name / "tokens.npy"))
    expected = torch.from_numpy(np.load(TEST_DATA / name / "logits.npy"))[..., :TRUE_VOCABULARY]
    with torch.no_grad():
        assert (model(tokens).logits - expected).abs().max() <= 5e-6
    assert json.loads((out / "config.json").read_text())["activation_function"] == "gelu_new"


@pytest.mark.parametrize("write", ["native", "huggingface", "megatron"])
def test_what_is_not_finished_is_not_there(source: Source, tmp_path: Path, write: str, monkeypatch: pytest.MonkeyPatch):
    def fails(*args: object, **kwargs: object) -> None:
        raise OSError("the disk is gone")

    for method in ("read", "read_into"):
        monkeypatch.setattr(source, method, fails, raising=False)
    with pytest.raises(OSError, match="disk is gone"):
        if write == "native":
            write_native(source, tmp_path / "out", model_parallel_size=2, tokenizer=tokenizer_of(source), log=silent)
        elif write == "huggingface":
            to_huggingface(source, tmp_path / "out", log=silent)
        else:
            write_megatron(source, tmp_path / "out", "megatron-2019", Layout(2), log=silent)
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten_and_sizes_must_fit(source: Source, tmp_path: Path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    with pytest.raises(ValueError, match="not empty"):
        write_native(source, tmp_path / "mine", model_parallel_size=1, log=silent)
    with pytest.raises(ValueError, match="--num-attention-heads 4 is not divisible"):
        write_native(source, tmp_path / "out", model_parallel_size=3, log=silent)
    with pytest.raises(ValueError, match="--model-parallel-size 3 does not divide"):
        write_megatron(source, tmp_path / "out", "megatron-core", Layout(3), log=silent)
    assert native_facts(source, 2, None)["config"]["parallel"]["model_parallel_size"] == 2
