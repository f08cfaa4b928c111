"""GPT-2 with OpenAI's names: Hugging Face's models, nanoGPT's checkpoints and character models, and DCP folders."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

import mpu
from megatron.gpt2.commands import checkpoint, generate_text, pretrain_gpt2
from megatron.gpt2.formats import BaseCheckpoint, Hints, detect_format, open_checkpoint
from megatron.gpt2.formats.compare import compare_tensors
from megatron.gpt2.formats.nanogpt_and_dcp import write_nanogpt
from megatron.gpt2.formats.native import write_native
from tests.distributed import run_ranks
from tests.megatron.gpt2.formats.sample_checkpoints import (
    SHAPE,
    TOLERANCE,
    InMemoryCheckpoint,
    assert_refused,
    compute_logits,
    nanogpt_checkpoint,
    openai_state,
    random_weights,
    same,
    silent,
    write_huggingface,
)
from tests.megatron.gpt2.train.training_runs import SMALL

WORD_EMBEDDINGS = "model.word_embeddings.weight"


# --- Hugging Face


def huggingface_model(activation: str = "gelu_new") -> Any:
    """Return transformers' GPT-2 of the shape `SHAPE`, randomly initialised."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=SHAPE.vocab_size,
        n_positions=SHAPE.max_position_embeddings,
        n_embd=SHAPE.hidden_size,
        n_layer=SHAPE.num_layers,
        n_head=SHAPE.num_attention_heads,
        n_inner=SHAPE.ffn_size,
        activation_function=activation,
        bos_token_id=100,
        eos_token_id=100,
        attn_implementation="eager",
    )
    return GPT2LMHeadModel(config).eval()


def test_huggingface(tmp_path: Path):
    """transformers writes a model with the erf form of GELU into several files."""
    model, weights = huggingface_model("gelu"), random_weights()
    state = openai_state(weights, transposed=True)
    model.load_state_dict({**state, "lm_head.weight": weights["word_embeddings.weight"]})
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    for path in (tmp_path, tmp_path / "config.json"):
        assert detect_format(path) == ("huggingface", tmp_path)
    source = open_checkpoint(tmp_path)
    assert list(source.tensors) == [f"model.{name}" for name in weights] and same(source, weights)
    assert source.metadata["config"]["model"]["gelu"] == "erf"
    tokens = torch.randint(101, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert (compute_logits(source, tokens) - model(tokens).logits).abs().max() < 1e-5


@pytest.mark.parametrize("legacy", [False, True])
def test_huggingface_without_a_head_in_half_precision_and_as_pickle(tmp_path: Path, legacy: bool):
    weights = {name: value.half() for name, value in random_weights().items()}
    (write_huggingface(tmp_path) / "model.safetensors").unlink()
    state = {name.removeprefix("transformer."): x for name, x in openai_state(weights, transposed=True).items()}
    state |= {"h.0.attn.bias": torch.ones(1, 1, 24, 24, dtype=torch.bool), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    torch.save(state, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
    source = open_checkpoint(tmp_path)
    assert same(source, weights) and {info.dtype for info in source.tensors.values()} == {torch.float16}


def test_huggingface_tokenizer(tmp_path: Path):
    write_huggingface(tmp_path)
    (tmp_path / "vocab.json").write_text("{}")
    assert "tokenizer_files" not in open_checkpoint(tmp_path).metadata
    for name in ("merges.txt", "tokenizer.json"):
        (tmp_path / name).write_text("")
    files = open_checkpoint(tmp_path).metadata["tokenizer_files"]
    assert files == {name: str(tmp_path / name) for name in ("vocab.json", "merges.txt")}


@pytest.mark.parametrize(
    "name, value, word",
    [
        ("activation_function", "relu", "relu"),
        ("scale_attn_weights", False, "scale_attn_weights"),
        ("model_type", "gpt_neo", "gpt_neo"),
        ("tie_word_embeddings", False, "lm_head.weight"),
        ("n_head", 5, "--num-attention-heads"),
    ],
)
def test_another_model_is_refused(tmp_path: Path, name: str, value: Any, word: str):
    assert_refused(write_huggingface(tmp_path, **{name: value}), word)


def test_tensors_that_are_not_those_of_the_model(tmp_path: Path):
    file = write_huggingface(tmp_path, tie_word_embeddings=False) / "model.safetensors"
    state = load_file(file)
    head = state["lm_head.weight"] = state["transformer.wte.weight"].clone()
    save_file({**state, "v_head.weight": torch.ones(1)}, file)
    source = open_checkpoint(tmp_path)
    assert same(source, random_weights()), "not tied, but the same"
    assert source.left_out == ["1 other tensors, v_head.weight among them"]
    for held, said in (
        (state | {"lm_head.weight": head + 1}, "lm_head.weight is not wte.weight"),
        (state | {"transformer.h.0.attn.q_norm.weight": torch.ones(12)}, "is not a part of GPT-2"),
        ({n: x for n, x in state.items() if ".1.mlp.c_fc.bias" not in n}, "holds no h.1.mlp.c_fc.bias"),
        ({"model.q_proj.weight": head}, "is not a GPT-2: holds model.q_proj.weight, and 0 tensors with names that end"),
    ):
        save_file(held, file)
        assert_refused(tmp_path, said)


# --- nanoGPT


@pytest.mark.parametrize("bias, prefix", [(True, "_orig_mod."), (False, "")])
def test_nanogpt(tmp_path: Path, bias: bool, prefix: str):
    held, weights = nanogpt_checkpoint(bias=bias, prefix=prefix)
    torch.save(held, tmp_path / "ckpt.pt")
    assert detect_format(tmp_path) == ("nanogpt", tmp_path / "ckpt.pt")
    source = open_checkpoint(tmp_path)
    assert source.iteration == 9 and source.metadata["config"]["model"]["gelu"] == "erf"
    assert same(source, weights) and same(source, weights, "master") and not source.left_out
    assert same(source, {name: x**2 for name, x in weights.items()}, "exp_avg_sq")
    held["optimizer"]["param_groups"][0]["params"][:2] = [1, 0]  # Exchange the moments of two parameters.
    torch.save(held, tmp_path / "ckpt.pt")
    source = open_checkpoint(tmp_path)
    assert same(source, weights) and "optimizer" in source.left_out[0]
    assert len(source.tensors) == len(weights) and "optimizer" not in source.metadata


def test_nanogpt_vocabulary(tmp_path: Path):
    held, weights = nanogpt_checkpoint(vocab_size=50304)
    torch.save(held | {"optimizer": None}, tmp_path / "ckpt.pt")
    lines: list[str] = []
    assert open_checkpoint(tmp_path, log=lines.append).metadata["vocab_size"] == 50304
    assert "--vocab-size 50257" in lines[0]
    source = open_checkpoint(tmp_path, Hints(vocab_size=50257), log=silent)
    assert torch.equal(source.read(WORD_EMBEDDINGS), weights["word_embeddings.weight"][:50257])
    assert_refused(tmp_path, "50305", vocab_size=50305)


def test_there_and_back(tmp_path: Path) -> None:
    """Convert nanoGPT's file to a native checkpoint and back: weights, Adam's state and its numbering stay equal."""
    written, _ = nanogpt_checkpoint(prefix="")
    torch.save(written, tmp_path / "ckpt.pt")
    native = write_native(open_checkpoint(tmp_path), tmp_path / "native", tp_size=2)
    assert open_checkpoint(native).metadata["config"]["optimizer"]["adam_beta2"] == 0.95
    out = write_nanogpt(open_checkpoint(native), tmp_path / "out", tokenizer=None)
    back = torch.load(out / "ckpt.pt", weights_only=True)
    assert list(back["model"]) == list(written["model"])
    assert all(torch.equal(back["model"][name], tensor) for name, tensor in written["model"].items())
    assert back["model_args"] == {**written["model_args"], "bias": True}
    assert (back["iter_num"], back["config"]) == (9, {"dataset": "out"})
    for number, state in written["optimizer"]["state"].items():
        assert all(torch.equal(back["optimizer"]["state"][number][kind], value) for kind, value in state.items())
    for group, found in zip(written["optimizer"]["param_groups"], back["optimizer"]["param_groups"], strict=True):
        assert {**found, "lr": 1e-3} == {**found, **group}


def test_a_model_with_another_gelu_is_not_exported(tmp_path: Path) -> None:
    source = InMemoryCheckpoint(
        {f"model.{name}": x for name, x in random_weights().items()}, replace(SHAPE, gelu="tanh")
    )
    with pytest.raises(ValueError, match="its GELU is tanh, and nanoGPT's is erf"):
        write_nanogpt(source, tmp_path / "out", tokenizer=None)
    assert not (tmp_path / "out").exists()


def test_a_model_of_characters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Train on the files of nanoGPT's data/shakespeare_char/prepare.py, sample, and convert to nanoGPT and back."""
    text = "First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\nSpeak, speak.\n" * 60
    itos = dict(enumerate(sorted(set(text))))
    stoi = {character: number for number, character in itos.items()}
    np.array([stoi[character] for character in text], dtype=np.uint16).tofile(tmp_path / "train.bin")
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": len(itos), "itos": itos, "stoi": stoi}))
    save, back, out = (f"{tmp_path}/{name}" for name in ("save", "back", "chars"))
    at = SMALL.index("--tokenizer-type")
    flags = f"--num-layers 1 --hidden-size 32 --gelu erf --train-iters 1 --data-path {tmp_path}/train.bin --save {save}"
    words = [*SMALL[:at], *SMALL[at + 2 :], *flags.split(), "--vocab-file", f"{tmp_path}/meta.pkl"]
    assert pretrain_gpt2.main([*words, "--reset-position-ids"]) == 2
    assert "--reset-position-ids: the tokenizer characters has no end of document" in capsys.readouterr().err
    assert pretrain_gpt2.main(words) == 0
    assert checkpoint.main(["convert", save, out, "--to", "nanogpt", "--check"]) == 0
    to_native = ["convert", out, back, "--to", "native", "--vocab-file", f"{out}/meta.pkl", "--check"]
    assert checkpoint.main(to_native) == 0
    said = capsys.readouterr()
    assert "in fp32: 0\n" in said.out and "copy meta.pkl to data/chars/" in said.err
    for load in (save, back):
        assert generate_text.main(["--load", load, *"--prompt Speak --max-new-tokens 8 --greedy".split()]) == 0
    sampled = capsys.readouterr().out
    assert sampled.startswith("Speak") and sampled == 2 * sampled[: len(sampled) // 2]
    mpu.initialize_model_parallel(1)  # The generation programs have destroyed the groups.


# --- folders of torch.distributed.checkpoint

HINTS = Hints(num_attention_heads=SHAPE.num_attention_heads)


def stepped(shard: Callable[[nn.Module], object] = lambda model: None) -> tuple[nn.Module, Any]:
    """Return a model and its AdamW after two steps. The gradients are functions of the weights."""
    model = huggingface_model()
    weights = openai_state(random_weights(), transposed=True)
    model.load_state_dict({**weights, "lm_head.weight": weights["transformer.wte.weight"]})
    shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.8, 0.95), eps=1e-7, weight_decay=0.3)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = parameter.detach() * 0.5 + 0.1
        optimizer.step()
    return model, optimizer


def save(rank: int, world_size: int, folder: Path) -> None:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
    from torch.distributed.fsdp import fully_shard

    model, optimizer = stepped(fully_shard)
    held = get_model_state_dict(model)
    save_dcp(dict(held), checkpoint_id=folder / "weights")
    save_dcp({"model": held, "optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder / "all")


@pytest.fixture(scope="module")
def fsdp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return checkpoints that two ranks of FSDP2 saved, with and without AdamW's state."""
    folder = tmp_path_factory.mktemp("dcp")
    run_ranks(save, 2, folder)
    return folder


def opened(folder: Path, hints: Hints = HINTS) -> BaseCheckpoint:
    return open_checkpoint(folder, hints, log=silent)


@pytest.mark.parametrize("name", ["all", "weights"])
def test_what_two_ranks_of_fsdp_saved(fsdp: Path, name: str):
    model, optimizer = stepped()
    source = opened(fsdp / name)
    assert detect_format(source.path) == ("dcp", source.path)
    assert source.metadata["config"]["model"]["gelu"] == "tanh"
    assert source.metadata["config"]["model"]["ffn_hidden_size"] == 80 and not source.left_out
    assert_refused(source.path, "does not contain its number of attention heads: give --num-attention-heads")
    kinds: dict[str, Callable[[Tensor], Tensor]] = {"model": lambda x: x}
    if name == "all":
        kinds["master"] = kinds["model"]
        for kind in ("exp_avg", "exp_avg_sq"):
            kinds[kind] = lambda x, kind=kind: optimizer.state[x][kind]  # type: ignore[misc]
        assert source.iteration == source.metadata["optimizer"]["adam_steps"] == 2
        adam = {"weight_decay": 0.3, "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_eps": 1e-7}
        assert source.metadata["config"]["optimizer"] == adam
    assert {name.partition(".")[0] for name in source.tensors} == kinds.keys()
    for kind, of in kinds.items():
        held = {name: of(parameter).detach() for name, parameter in model.named_parameters()}
        read = {name: source.read(f"{kind}.{name}") for name in random_weights()}
        for name, value in openai_state(read, transposed=True).items():
            assert torch.equal(value, held[name]), f"{kind}.{name}"


def test_what_is_written_is_read_by_transformers_and_adamw(fsdp: Path, tmp_path: Path):
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    convert = ["convert", str(fsdp / "all"), str(tmp_path / "ours"), "--to", "dcp", "--check"]
    assert checkpoint.main([*convert, "--num-attention-heads", "4"]) == 0
    model = huggingface_model()
    groups = [{"params": [x for x in model.parameters() if (x.dim() > 1) == decays]} for decays in (True, False)]
    optimizer = torch.optim.AdamW(groups)
    weights, adam = get_state_dict(model, optimizer)
    load_dcp({"model": weights, "optimizer": adam}, checkpoint_id=tmp_path / "ours", no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=adam)
    weights, adam = get_state_dict(model, optimizer)
    save_dcp({"model": weights, "optimizer": adam}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    source = opened(fsdp / "all")
    tokens = torch.arange(2 * SHAPE.max_position_embeddings).view(2, -1) * 7 % SHAPE.vocab_size
    with torch.no_grad():
        assert (model(tokens).logits - compute_logits(source, tokens)).abs().max() < TOLERANCE
    for folder in (tmp_path / "ours", tmp_path / "theirs"):
        back = opened(folder)
        assert back.tensors == source.tensors and compare_tensors(back, source).equal
        assert back.metadata["optimizer"] == source.metadata["optimizer"]
        assert back.metadata["config"]["optimizer"] == source.metadata["config"]["optimizer"]
