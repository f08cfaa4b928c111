"""nanoGPT's checkpoints, read and written, and its models of characters from their files to its own sample.py and
train.py."""

from __future__ import annotations

import importlib.util
import os
import pickle
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mpu
from data_utils import load_tokenizer
from data_utils.tokenizers.base import CharacterTokenizer
from megatron.gpt2.commands import checkpoint, generate_text, pretrain_gpt2
from megatron.gpt2.config import OptimizerConfig
from megatron.gpt2.formats import Hints, open_source, recognise
from megatron.gpt2.formats.foreign import ForeignSource, LazyTensor
from megatron.gpt2.formats.nanogpt import write_nanogpt
from megatron.gpt2.formats.native import write_native
from tests.megatron.gpt2.formats.made import SHAPE, nanogpt_checkpoint, random_weights
from tests.megatron.gpt2.formats.test_huggingface import same
from tests.megatron.gpt2.formats.test_megatron import logits_of, refused, silent
from tests.megatron.gpt2.train.training_runs import SMALL


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("prefix", ["_orig_mod.", ""])
def test_nanogpt(tmp_path: Path, bias: bool, prefix: str):
    checkpoint, weights = nanogpt_checkpoint(bias=bias, prefix=prefix)
    torch.save(checkpoint, tmp_path / "ckpt.pt")
    assert recognise(tmp_path) == ("nanogpt", tmp_path / "ckpt.pt")
    source = open_source(tmp_path)
    assert source.iteration == 9 and source.facts["config"]["model"]["gelu"] == "erf"
    assert same(source, weights) and same(source, weights, "master") and not source.left_out
    moments = {
        name: torch.zeros_like(value) if name.endswith("bias") and not bias else value + 1
        for name, value in weights.items()
    }
    # Moments come in QKV's order too.
    assert same(source, moments, "exp_avg") and same(source, {k: v**2 for k, v in weights.items()}, "exp_avg_sq")
    assert source.facts["optimizer"]["adam_steps"] == 9
    assert OptimizerConfig(**source.facts["config"]["optimizer"]).adam_beta2 == 0.95


def test_nanogpt_leaves_out_what_is_not_certain(tmp_path: Path):
    checkpoint, weights = nanogpt_checkpoint()
    checkpoint["optimizer"]["param_groups"][0]["params"][:2] = [1, 0]
    torch.save(checkpoint, tmp_path / "ckpt.pt")
    source = open_source(tmp_path)
    assert same(source, weights) and "optimizer" in source.left_out[0]
    assert not any(name.startswith(("master", "exp_avg")) for name in source.names())
    assert "optimizer" not in source.facts


def test_nanogpt_vocabulary(tmp_path: Path):
    checkpoint, weights = nanogpt_checkpoint()
    table = torch.randn(50304, 48)
    checkpoint["model"]["_orig_mod.transformer.wte.weight"] = table
    checkpoint["model"]["_orig_mod.lm_head.weight"] = table
    checkpoint["model_args"]["vocab_size"] = 50304
    del checkpoint["optimizer"]
    torch.save(checkpoint, tmp_path / "ckpt.pt")
    lines: list[str] = []
    assert open_source(tmp_path, log=lines.append).facts["vocab_size"] == 50304
    assert "--vocab-size 50257" in lines[0]
    source = open_source(tmp_path, Hints(vocab_size=50257), log=silent)
    assert torch.equal(source.read("model.word_embeddings.weight"), table[:50257])
    refused(tmp_path, "50305", vocab_size=50305)


@pytest.mark.parametrize("bias", [True, False])
def test_what_the_real_nanogpt_writes(tmp_path: Path, bias: bool):
    """NANOGPT names a checkout: its own model, optimizer and compiled names."""
    if "NANOGPT" not in os.environ:
        pytest.skip("NANOGPT names no checkout of nanoGPT")
    spec = importlib.util.spec_from_file_location("nanogpt_model", Path(os.environ["NANOGPT"]) / "model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    arguments = {
        "n_layer": 3,
        "n_head": 4,
        "n_embd": 48,
        "block_size": 24,
        "bias": bias,
        "vocab_size": 101,
        "dropout": 0.0,
    }
    torch.manual_seed(5)
    model = module.GPT(module.GPTConfig(**arguments))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), "cpu")
    tokens = torch.randint(101, (2, 24))
    for _ in range(2):
        model(tokens, tokens)[1].backward()
        optimizer.step()
    state = {f"_orig_mod.{name}": value for name, value in model.state_dict().items()}
    torch.save(
        {
            "model": state,
            "optimizer": optimizer.state_dict(),
            "model_args": arguments,
            "iter_num": 2,
            "best_val_loss": torch.tensor(1e9),
            "config": {},
        },
        tmp_path / "ckpt.pt",
    )
    source = open_source(tmp_path)
    with torch.no_grad():
        theirs = model.eval()(tokens, tokens)[0]
    assert (logits_of(source, tokens) - theirs).abs().max() < 5e-6
    parameters = dict(model.named_parameters())
    for ours, other in (("word_embeddings", "wte"), ("transformer.layers.1.mlp.dense_4h_to_h", "h.1.mlp.c_proj")):
        moment = optimizer.state[parameters[f"transformer.{other}.weight"]]["exp_avg_sq"]
        assert torch.equal(source.read(f"exp_avg_sq.{ours}.weight"), moment)


TEXT = "First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\nSpeak, speak.\n" * 60


def test_there_and_back(tmp_path: Path) -> None:
    """Weights, Adam's state and its numbering are those of the file that nanoGPT wrote, through a native checkpoint."""
    written, _ = nanogpt_checkpoint(prefix="")
    torch.save(written, tmp_path / "ckpt.pt")
    native = write_native(open_source(tmp_path), tmp_path / "native", model_parallel_size=2, tokenizer=None, log=print)
    vocabulary = [chr(33 + number) for number in range(101)]
    out = write_nanogpt(open_source(native), tmp_path / "out", tokenizer=CharacterTokenizer(vocabulary))
    back = torch.load(out / "ckpt.pt", weights_only=True)
    assert list(back["model"]) == list(written["model"])
    assert all(torch.equal(back["model"][name], tensor) for name, tensor in written["model"].items())
    assert back["model_args"] == {**written["model_args"], "bias": True}
    assert (back["iter_num"], back["config"]) == (9, {"dataset": "out"})
    for number, state in written["optimizer"]["state"].items():
        found = back["optimizer"]["state"][number]
        assert found["step"] == 9 and all(torch.equal(found[kind], state[kind]) for kind in ("exp_avg", "exp_avg_sq"))
    for group, found in zip(written["optimizer"]["param_groups"], back["optimizer"]["param_groups"], strict=True):
        assert {name: found[name] for name in ("params", "weight_decay", "betas", "eps")} == {
            name: group[name] for name in ("params", "weight_decay", "betas", "eps")
        }
    with open(out / "meta.pkl", "rb") as file:
        meta = pickle.load(file)
    assert [meta["itos"][meta["stoi"][c]] for c in vocabulary] == vocabulary and meta["vocab_size"] == 101


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"gelu": "tanh"}, "its GELU is tanh, and nanoGPT's is erf"),
        ({"ffn_hidden_size": 80}, "--ffn-hidden-size 80 is not 4 × 48"),
        ({"layernorm_epsilon": 1e-6}, "--layernorm-epsilon 1e-06 is not 1e-05"),
    ],
)
def test_what_nanogpt_has_not(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    model = replace(SHAPE, **{"gelu": "erf", "ffn_hidden_size": None, **change})
    lazy = {f"model.{name}": LazyTensor.of(value) for name, value in random_weights(model).items()}
    with pytest.raises(ValueError, match=said):
        write_nanogpt(ForeignSource(tmp_path, "made", 0, model, {}, lazy), tmp_path / "out", tokenizer=None)
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def characters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """train.bin, val.bin and meta.pkl as data/shakespeare_char/prepare.py makes them."""
    folder = tmp_path_factory.mktemp("characters")
    vocabulary = sorted(set(TEXT))
    stoi = {character: number for number, character in enumerate(vocabulary)}
    ids = np.array([stoi[c] for c in TEXT], dtype=np.uint16)
    ids[: len(ids) * 9 // 10].tofile(folder / "train.bin")
    ids[len(ids) * 9 // 10 :].tofile(folder / "val.bin")
    (folder / "meta.pkl").write_bytes(
        pickle.dumps({"vocab_size": len(vocabulary), "itos": dict(enumerate(vocabulary)), "stoi": stoi})
    )
    return folder


def test_a_model_of_characters(characters: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Trained on nanoGPT's files, continued, sampled, converted and converted back; the real nanoGPT samples it."""
    save, out = f"{characters}/save", characters / "chars"
    words = [
        *SMALL,
        "--num-layers",
        "1",
        "--hidden-size",
        "32",
        "--gelu",
        "erf",
        "--save",
        save,
        "--eval-iters",
        "1",
        "--data-path",
        f"{characters}/train.bin",
        "--valid-data-path",
        f"{characters}/val.bin",
        "--micro-batch-size",
        "2",
    ]
    words = [word for pair in zip(*[iter(words)] * 2, strict=True) if pair[0] != "--tokenizer-type" for word in pair]
    meta = ["--vocab-file", f"{characters}/meta.pkl"]
    assert pretrain_gpt2.main([*words, *meta, "--reset-position-ids"]) == 2
    assert "--reset-position-ids: the tokenizer characters has no end of document" in capsys.readouterr().err
    assert pretrain_gpt2.main([*words, *meta, "--train-iters", "2"]) == 0
    assert pretrain_gpt2.main([*words, "--train-iters", "3"]) == 0  # with the checkpoint's own tokenizer
    assert load_tokenizer(f"{save}/tokenizer").kind == "characters"
    capsys.readouterr()
    assert generate_text.main(["--load", save, "--prompt", "Speak", "--max-new-tokens", "8", "--greedy"]) == 0
    text = capsys.readouterr().out
    assert generate_text.main(["--load", save, "--prompt", "Zebra", "--max-new-tokens", "8"]) == 2
    assert "the text holds 'Z' (U+005A), which is none of the" in capsys.readouterr().err
    assert checkpoint.main(["convert", save, str(out), "--to", "nanogpt", "--check"]) == 0
    assert checkpoint.main(["convert", str(out), f"{characters}/back", "--to", "native", *meta, "--check"]) == 0
    said = capsys.readouterr()
    assert "NOT EQUAL" not in said.out and "copy meta.pkl to data/chars/" in said.err
    assert (
        generate_text.main(["--load", f"{characters}/back", "--prompt", "Speak", "--max-new-tokens", "8", "--greedy"])
        == 0
    )
    assert capsys.readouterr().out == text and text.startswith("Speak")
    mpu.initialize_model_parallel(1)  # the programs have left
    tokens = torch.randint(len(set(TEXT)), (2, 32))
    assert (logits_of(open_source(save), tokens) - logits_of(open_source(out), tokens)).abs().max() == 0


def test_the_real_nanogpt(characters: Path, tmp_path: Path) -> None:
    """NANOGPT names a checkout: its model has our logits, sample.py writes text, and train.py goes on."""
    if "NANOGPT" not in os.environ:
        pytest.skip("NANOGPT names no checkout of nanoGPT")
    home = Path(shutil.copytree(os.environ["NANOGPT"], tmp_path / "nanogpt"))
    shutil.copytree(characters, home / "data" / "chars", ignore=shutil.ignore_patterns("save", "chars", "back"))
    written, _ = nanogpt_checkpoint(prefix="")
    vocabulary = sorted(set(TEXT))
    size = len(vocabulary)
    written["model_args"]["vocab_size"] = size
    for state in (written["model"],):
        state["transformer.wte.weight"] = state["lm_head.weight"] = state["transformer.wte.weight"][:size].clone()
    for kind in ("exp_avg", "exp_avg_sq"):
        written["optimizer"]["state"][0][kind] = written["optimizer"]["state"][0][kind][:size].clone()
    torch.save(written, tmp_path / "ckpt.pt")
    source = open_source(tmp_path)
    out = write_nanogpt(source, home / "chars", tokenizer=CharacterTokenizer(vocabulary))
    spec = importlib.util.spec_from_file_location("nanogpt_model", home / "model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    held = torch.load(out / "ckpt.pt", weights_only=True)
    model = module.GPT(module.GPTConfig(**held["model_args"]))
    model.load_state_dict(held["model"], strict=False)
    tokens = torch.randint(size, (2, 24))
    with torch.no_grad():
        theirs = model.eval()(tokens, tokens)[0]
    assert (logits_of(source, tokens) - theirs).abs().max() < 5e-6

    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, *words, "--device=cpu", "--dtype=float32", "--compile=False", "--out_dir=chars"],
            cwd=home,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "Loading meta from data/chars/meta.pkl" in run("sample.py", "--num_samples=1", "--max_new_tokens=20")
    assert "step 10: train loss" in run(
        "train.py",
        "--init_from=resume",
        "--dataset=chars",
        "--max_iters=10",
        "--eval_iters=1",
        "--gradient_accumulation_steps=1",
        "--block_size=24",
        "--batch_size=2",
        "--eval_interval=10",
        "--log_interval=1",
    )
