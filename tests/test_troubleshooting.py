"""Every entry of docs/how-to/troubleshooting.md names tests that exist. Tests that fit no other file are here."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch

import mpu
from data_utils import build_tokenizer
from data_utils.tokenizers.gpt2 import END_OF_TEXT, bytes_to_unicode
from megatron.gpt2.commands.pretrain_gpt2 import main
from megatron.gpt2.config import ModelConfig
from megatron.gpt2.config.arguments import parse
from megatron.gpt2.dist.ranks import RankInfo
from megatron.gpt2.formats import open_checkpoint
from megatron.gpt2.model.gpt2 import GPT2Model
from megatron.gpt2.train.checkpointing import checkpoint_files
from megatron.gpt2.train.setup import build_context
from tests.conftest import ROOT, tool
from tests.distributed import run_ranks
from tests.megatron.gpt2.checkpoint.saved_states import write
from tests.megatron.gpt2.checkpoint.test_any_layout import (
    CONFIG,
    CPU,
    SHAPE,
    VOCAB,
    ParallelLayout,
    fill,
    global_state,
    ranks_of,
)
from tests.megatron.gpt2.formats.sample_checkpoints import random_weights, write_megatron
from tests.megatron.gpt2.generate import test_generation
from tests.megatron.gpt2.train.training_runs import SMALL, finish, start, steps, write_text
from tests.test_bad_input import TINY
from tests.test_import_rules import imported

PAGE = (ROOT / "docs" / "how-to" / "troubleshooting.md").read_text()
# Title and text of each entry.
ENTRIES = re.findall(r"^### (.+)\n((?:(?!#{2,3} ).*\n)*)", PAGE, re.MULTILINE)
# Issues of other projects that the page answers.
THREADS = {
    "Megatron-LM": "5 18 43 51 64 82 85 102 176 188 227 232 293 296 305 415 525 732 838 1050 1239 1298 1511 1736 1754 2369 7452",
    "gpt-neox": "612 1158",
    "torchtitan": "816 1232 1661",
    "transformers": "12004 39048",
}


def functions(path: Path) -> set[str]:
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(("title", "text"), ENTRIES, ids=[title for title, _ in ENTRIES])
def test_every_entry_names_tests_that_exist(title: str, text: str):
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    assert named, f"{title}: no test shows it"
    for file, name in named:
        assert name.startswith("test_") and name in functions(ROOT / file), f"{title}: {file}::{name}"
    assert text.count("::") == len(named), f"{title}: a test is named in another form"


def test_every_thread_has_its_entry():
    assert len(ENTRIES) == PAGE.count("\n### ") >= 24
    found: dict[str, set[int]] = {}
    for _, text in ENTRIES:
        for project, numbers in re.findall(r"([\w-]+)\s((?:#\d+(?:,?\s(?:and\s)?(?=#))?)+)", text):
            found.setdefault(project, set()).update(map(int, re.findall(r"\d+", numbers)))
    assert found == {project: set(map(int, numbers.split())) for project, numbers in THREADS.items()}


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
    """torch._six was removed in torch 2.0."""
    for path in (path for path in PROGRAM if path.suffix == ".py"):
        for name in imported(path):
            private = name.startswith("torch.") and any(part.startswith("_") for part in name.split("."))
            assert not private, f"{path} imports {name}"


@pytest.mark.parametrize("words", [["--local-rank=1"], ["--local_rank=1"], ["--local_rank", "1"]])
def test_the_launchers_local_rank_changes_nothing(words: list[str]):
    assert parse([*SMALL, *words]).config == parse(SMALL).config


# -------------------------------------------------------------------------------------------------------------- data


def test_one_document_for_more_steps_than_it_has_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The validation split also has fewer samples than --eval-iters needs."""
    (tmp_path / "one.json").write_text(json.dumps({"text": write_text(tmp_path, 300).read_text(), "url": "0"}) + "\n")
    flags = (
        f"--train-data {tmp_path}/one.json --split 80,10,10 --train-iters 120 --eval-iters 1000 --log-interval 60 "
        f"--data-cache-path {tmp_path}/cache --save {tmp_path}/save"
    )
    assert main([*TINY, *flags.split()]) == 0
    said = capsys.readouterr().out
    samples = {
        name: int(re.search(rf"{name}: [\d,]+ tokens, (\d+) samples", said)[1]) for name in ("train", "valid", "test")
    }
    assert 0 < 2 * samples["train"] < 120 * 4 and 0 < samples["valid"] < 1000 * 4 and samples["test"] > 0
    assert "iteration      120/     120 |" in said
    assert all(f"end of training for {name} data" in said for name in ("val", "test"))


# ---------------------------------------------------------------------------------------------------------- training


def odd_vocabulary(rank: int, world_size: int, folder: str) -> list[float]:
    """257 ids, padded only to a multiple of the number of ranks."""
    flags = f"--model-parallel-size {world_size} --save {folder}/{world_size} --make-vocab-size-divisible-by 1"
    trainer = start(rank, world_size, folder, flags)
    assert trainer.state.model.word_embeddings.weight.shape[0] == -(-257 // world_size)
    losses = steps(trainer, 10)["loss"]
    finish(trainer)
    return losses


def test_a_vocabulary_that_the_ranks_do_not_divide(tmp_path: Path):
    write_text(tmp_path)
    (alone,) = run_ranks(odd_vocabulary, 1, str(tmp_path))
    assert alone[0] - alone[-1] > 0.1, "the run must learn something, or equality shows nothing"
    for losses in run_ranks(odd_vocabulary, 2, str(tmp_path)):
        assert losses == pytest.approx(alone, rel=1e-5)


# ------------------------------------------------------------------------------------------------------- checkpoints


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return flags for files in GPT-2's format with 256 bytes and an end of document."""
    folder = tmp_path_factory.mktemp("vocabulary")
    tokens = [*bytes_to_unicode(), END_OF_TEXT]
    (folder / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return ["--vocab-file", f"{folder}/vocab.json", "--merge-file", f"{folder}/merges.txt"]


def test_ranks_with_a_sharded_optimizer_merge_into_one(tmp_path: Path):
    """There are 4 model-parallel ranks with 2 data-parallel ranks each, which hold half of the masters and moments."""
    state, files = global_state(), {}
    for rank in ranks_of(ParallelLayout(4, 2, True), torch.float32):
        fill(rank, state, padding=torch.nan)
        files.update(checkpoint_files(rank, rank.parallel, CONFIG, CPU))
    assert len([name for name in files if "master_dp" in name]) == 8
    metadata = {
        "config": {"model": dataclasses.asdict(SHAPE)},
        "vocab_size": VOCAB,
        "consumed_samples": 24,
        "optimizer": rank.optimizer.state_dict(),
        "tokenizer": None,
    }
    write(tmp_path / "eight", 3, files, metadata=metadata)
    assert tool("checkpoint").main(["merge", str(tmp_path / "eight"), str(tmp_path / "one")]) == 0
    merged = open_checkpoint(tmp_path / "one")
    assert sorted(path.stem for path in tmp_path.glob("one/iter_*/mp_rank_*/*")) == [
        "exp_avg_dp_00",
        "exp_avg_sq_dp_00",
        "master_dp_00",
        "model",
    ]
    assert all(torch.equal(merged.read(f"{kind}.{name}"), whole) for (kind, name), whole in state.items())


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
    """The conversion refuses it, or training does if the conversion got no file."""
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


# -------------------------------------------------------------------------------------------------------- generation


def test_what_16_ranks_wrote_writes_the_same_text_on_one(
    tmp_path: Path, vocabulary: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The files of 16 ranks are in our format and in that of Megatron 2019."""
    tokenizer = build_tokenizer("GPT2BPETokenizer", vocab_file=vocabulary[1], merge_file=vocabulary[3])
    monkeypatch.setattr(test_generation, "TOKENIZER", tokenizer)
    mpu.initialize_model_parallel(1)
    try:
        test_generation.save(
            GPT2Model(
                ModelConfig(
                    num_layers=2,
                    hidden_size=64,
                    num_attention_heads=16,
                    max_position_embeddings=32,
                    vocab_size=tokenizer.vocab_size,
                    init_method_std=0.2,
                )
            ),
            tmp_path / "one",
        )
    finally:
        mpu.destroy_model_parallel()
    checkpoint, generate_text = tool("checkpoint"), tool("generate_text")

    def text(folder: str) -> str:
        capsys.readouterr()
        more = "--device cpu --precision fp32 --prompt Once --seed 1 --max-new-tokens 20"
        assert generate_text.main(["--load", str(tmp_path / folder), *more.split()]) == 0
        return capsys.readouterr().out

    def convert(command: str, source: str, target: str, *flags: str) -> None:
        assert checkpoint.main([command, str(tmp_path / source), str(tmp_path / target), *flags]) == 0

    convert("split", "one", "sixteen", "--model-parallel-size", "16")
    convert("convert", "one", "theirs", "--to", "megatron-2019", "--model-parallel-size", "16")
    for folder in ("sixteen", "theirs"):
        assert len(list((tmp_path / folder).glob("iter_*/mp_rank_*"))) == 16
    convert(
        "convert", "theirs", "back", "--to", "native", "--num-attention-heads", "16", "--vocab-size", "257", *vocabulary
    )
    assert len(text("one")) > 10
    assert text("one") == text("sixteen") == text("back")
