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
from data_utils import load_tokenizer
from data_utils.tokenizers.base import CharacterTokenizer
from megatron.gpt2.commands import checkpoint, generate_text, pretrain_gpt2
from megatron.gpt2.formats import BaseCheckpoint, Hints, detect_format, open_checkpoint
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


@pytest.mark.parametrize("activation, shard_size", [("gelu_new", "60KB"), ("gelu", "5GB")])
def test_huggingface(tmp_path: Path, activation: str, shard_size: str):
    model, weights = huggingface_model(activation), random_weights()
    state = openai_state(weights, transposed=True)
    model.load_state_dict({**state, "lm_head.weight": weights["word_embeddings.weight"]})
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard_size == "60KB")
    assert detect_format(tmp_path) == ("huggingface", tmp_path)
    source = open_checkpoint(tmp_path)
    assert list(source.tensors) == [f"model.{name}" for name in weights] and same(source, weights)
    assert source.metadata["config"]["model"]["gelu"] == {"gelu_new": "tanh", "gelu": "erf"}[activation]
    tokens = torch.randint(101, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert (compute_logits(source, tokens) - model(tokens).logits).abs().max() < 1e-5
    assert open_checkpoint(tmp_path / "config.json").path == tmp_path
    name = "transformer.layers.2.mlp.dense_4h_to_h.weight"
    assert torch.equal(source.read(f"model.{name}", (3, 4), (5, 6)), weights[name][3:8, 4:10])
    with pytest.raises(ValueError, match="outside of the shape"):
        source.read(f"model.{name}", (78, 0), (5, 1))


def test_huggingface_without_a_head_in_half_precision_and_as_pickle(tmp_path: Path):
    weights = {name: value.half() for name, value in random_weights().items()}
    write_huggingface(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    state = {name.removeprefix("transformer."): value for name, value in openai_state(weights, transposed=True).items()}
    state["h.0.attn.bias"] = torch.ones(1, 1, 24, 24, dtype=torch.bool)
    state["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    for legacy in (False, True):
        torch.save(state, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
        source = open_checkpoint(tmp_path)
        assert same(source, weights) and {info.dtype for info in source.tensors.values()} == {torch.float16}


def test_huggingface_tokenizer_and_padding(tmp_path: Path):
    write_huggingface(tmp_path)
    (tmp_path / "vocab.json").write_text("{}")
    assert "tokenizer_files" not in open_checkpoint(tmp_path).metadata
    for name in ("merges.txt", "tokenizer.json"):
        (tmp_path / name).write_text("")
    source = open_checkpoint(tmp_path, Hints(vocab_size=99))
    assert source.metadata["tokenizer_files"] == {name: str(tmp_path / name) for name in ("vocab.json", "merges.txt")}
    assert torch.equal(source.read(WORD_EMBEDDINGS), random_weights()["word_embeddings.weight"][:99])
    assert_refused(tmp_path, "--vocab-size 102", vocab_size=102)
    assert_refused(tmp_path, "--num-attention-heads 8", num_attention_heads=8)


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


def test_a_head_of_its_own_is_refused(tmp_path: Path):
    file = write_huggingface(tmp_path, tie_word_embeddings=False) / "model.safetensors"
    state = load_file(file)
    state["lm_head.weight"] = state["transformer.wte.weight"].clone()
    save_file({**state, "v_head.weight": torch.ones(1)}, file)
    source = open_checkpoint(tmp_path)
    assert same(source, random_weights()), "not tied, but the same"
    assert source.left_out == ["1 other tensors, v_head.weight among them"]
    state["lm_head.weight"][5, 5] += 1e-3
    save_file(state, file)
    assert_refused(tmp_path, "lm_head.weight")


# --- nanoGPT


@pytest.mark.parametrize("bias, prefix", [(True, "_orig_mod."), (False, "")])
def test_nanogpt(tmp_path: Path, bias: bool, prefix: str):
    held, weights = nanogpt_checkpoint(bias=bias, prefix=prefix)
    torch.save(held, tmp_path / "ckpt.pt")
    assert detect_format(tmp_path) == ("nanogpt", tmp_path / "ckpt.pt")
    source = open_checkpoint(tmp_path)
    assert source.iteration == 9 and source.metadata["config"]["model"]["gelu"] == "erf"
    assert same(source, weights) and same(source, weights, "master") and not source.left_out
    # The moments have the same QKV order.
    first = {name: x * 0 if name.endswith("bias") and not bias else x + 1 for name, x in weights.items()}
    assert same(source, first, "exp_avg") and same(source, {name: x**2 for name, x in weights.items()}, "exp_avg_sq")
    held["optimizer"]["param_groups"][0]["params"][:2] = [1, 0]  # The order of two moments is wrong.
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
    vocabulary = [chr(33 + number) for number in range(101)]
    out = write_nanogpt(open_checkpoint(native), tmp_path / "out", tokenizer=CharacterTokenizer(vocabulary))
    back = torch.load(out / "ckpt.pt", weights_only=True)
    assert list(back["model"]) == list(written["model"])
    assert all(torch.equal(back["model"][name], tensor) for name, tensor in written["model"].items())
    assert back["model_args"] == {**written["model_args"], "bias": True}
    assert (back["iter_num"], back["config"]) == (9, {"dataset": "out"})
    for number, state in written["optimizer"]["state"].items():
        assert all(torch.equal(back["optimizer"]["state"][number][kind], value) for kind, value in state.items())
    for group, found in zip(written["optimizer"]["param_groups"], back["optimizer"]["param_groups"], strict=True):
        assert {**found, "lr": 1e-3} == {**found, **group}
    meta = pickle.loads((out / "meta.pkl").read_bytes())
    assert [meta["itos"][meta["stoi"][c]] for c in vocabulary] == vocabulary and meta["vocab_size"] == 101


def test_what_nanogpt_has_not(tmp_path: Path) -> None:
    for gelu, said in (
        ("tanh", "its GELU is tanh, and nanoGPT's is erf"),
        ("erf", "--ffn-hidden-size is 80, and nanoGPT supports only 192"),
    ):
        model = replace(SHAPE, gelu=gelu)
        source = InMemoryCheckpoint({f"model.{name}": value for name, value in random_weights(model).items()}, model)
        with pytest.raises(ValueError, match=said):
            write_nanogpt(source, tmp_path / "out", tokenizer=None)
        assert not (tmp_path / "out").exists()


TEXT = "First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\nSpeak, speak.\n" * 60
CHARACTERS = sorted(set(TEXT))


@pytest.fixture(scope="module")
def characters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the train.bin, val.bin and meta.pkl of data/shakespeare_char/prepare.py."""
    folder = tmp_path_factory.mktemp("characters")
    stoi = {character: number for number, character in enumerate(CHARACTERS)}
    ids = np.array([stoi[c] for c in TEXT], dtype=np.uint16)
    for name, part in zip(("train.bin", "val.bin"), np.split(ids, [len(ids) * 9 // 10]), strict=True):
        part.tofile(folder / name)
    meta = {"vocab_size": len(CHARACTERS), "itos": dict(enumerate(CHARACTERS)), "stoi": stoi}
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))
    return folder


def test_a_model_of_characters(characters: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Train on nanoGPT's files, resume, sample, convert, and convert back."""
    save, back, out = f"{characters}/save", f"{characters}/back", characters / "chars"
    at = SMALL.index("--tokenizer-type")
    small = SMALL[:at] + SMALL[at + 2 :]
    data = ["--data-path", f"{characters}/train.bin", "--valid-data-path", f"{characters}/val.bin", "--eval-iters", "1"]
    sizes = "--num-layers 1 --hidden-size 32 --gelu erf --micro-batch-size 2".split()
    words, meta = [*small, *sizes, *data, "--save", save], ["--vocab-file", f"{characters}/meta.pkl"]
    assert pretrain_gpt2.main([*words, *meta, "--reset-position-ids"]) == 2
    assert "--reset-position-ids: the tokenizer characters has no end of document" in capsys.readouterr().err
    assert pretrain_gpt2.main([*words, *meta, "--train-iters", "2"]) == 0
    assert pretrain_gpt2.main([*words, "--train-iters", "3"]) == 0  # The checkpoint's own tokenizer is used.
    assert load_tokenizer(f"{save}/tokenizer").kind == "characters"
    capsys.readouterr()
    sample = "--prompt Speak --max-new-tokens 8 --greedy".split()
    assert generate_text.main(["--load", save, *sample]) == 0
    text = capsys.readouterr().out
    assert checkpoint.main(["convert", save, str(out), "--to", "nanogpt", "--check"]) == 0
    assert checkpoint.main(["convert", str(out), back, "--to", "native", *meta, "--check"]) == 0
    said = capsys.readouterr()
    assert "in fp32: 0\n" in said.out and "copy meta.pkl to data/chars/" in said.err
    assert generate_text.main(["--load", back, *sample]) == 0
    assert capsys.readouterr().out == text and text.startswith("Speak")
    mpu.initialize_model_parallel(1)  # The generation programs have destroyed the groups.


# --- folders of torch.distributed.checkpoint

FORMS = {"huggingface": True, "nanogpt": False}  # True means that the linear layers are [in, out].
HINTS = Hints(num_attention_heads=SHAPE.num_attention_heads)


class Tied(nn.Module):
    """Parameters with the names of `state`, and an LM head that is tied to the word embeddings."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        super().__init__()
        for name, value in state.items():
            *path, last = name.split(".")
            module: nn.Module = self
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, nn.Module())
                module = getattr(module, part)
            module.register_parameter(last, nn.Parameter(value.clone()))
        self.lm_head = nn.Module()
        self.lm_head.weight = self.transformer.wte.weight  # type: ignore[union-attr,assignment]


def stepped(transposed: bool, shard: Callable[[nn.Module], object] = lambda model: None) -> tuple[nn.Module, Any]:
    """Return a model and its AdamW after two steps. The gradients are functions of the weights."""
    model = Tied(openai_state(random_weights(), transposed=transposed))
    shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.8, 0.95), eps=1e-7, weight_decay=0.3)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = parameter.detach() * 0.5 + 0.1
        optimizer.step()
    return model, optimizer


def sharded(world_size: int, *modules: nn.Module) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    for module in modules:
        fully_shard(module, mesh=init_device_mesh("cpu", (world_size,)))


def save(rank: int, world_size: int, folder: Path) -> None:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    for form, transposed in FORMS.items():
        model, optimizer = stepped(transposed, lambda model: sharded(world_size, model))
        held = get_model_state_dict(model)
        save_dcp(dict(held), checkpoint_id=folder / f"{form}_weights")
        save_dcp({"model": held, "optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder / form)


@pytest.fixture(scope="module")
def fsdp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return checkpoints that two ranks of FSDP2 saved in both forms, with and without AdamW's state."""
    folder = tmp_path_factory.mktemp("dcp")
    run_ranks(save, 2, folder)
    return folder


def opened(folder: Path, hints: Hints = HINTS) -> BaseCheckpoint:
    return open_checkpoint(folder, hints, log=silent)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ending", ["", "_weights"])
def test_what_two_ranks_of_fsdp_saved(fsdp: Path, form: str, ending: str):
    model, optimizer = stepped(FORMS[form])
    source = opened(fsdp / (form + ending))
    assert detect_format(source.path) == ("dcp", source.path)
    assert source.metadata["config"]["model"]["gelu"] == ("tanh" if form == "huggingface" else "erf")
    assert source.metadata["config"]["model"]["ffn_hidden_size"] == 80 and not source.left_out
    kinds: dict[str, Callable[[Tensor], Tensor]] = {"model": lambda x: x}
    if not ending:
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
        for name, value in openai_state(read, transposed=FORMS[form]).items():
            assert torch.equal(value, held[name]), f"{kind}.{name}"


def load(rank: int, world_size: int, folder: Path, out: Path, tokens: Tensor) -> Tensor:
    """Load `folder` into transformers' model and torch's AdamW, both sharded, and save it again into `out`. Return the
    logits [b, s, v]."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model = huggingface_model()
    sharded(world_size, *model.transformer.h, model)
    groups = [{"params": [x for x in model.parameters() if (x.dim() > 1) == decays]} for decays in (True, False)]
    optimizer = torch.optim.AdamW(groups)
    weights, adam = get_state_dict(model, optimizer)
    load_dcp({"model": weights, "optimizer": adam}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=adam)
    weights, adam = get_state_dict(model, optimizer)
    save_dcp({"model": weights, "optimizer": adam}, checkpoint_id=out)
    with torch.no_grad():
        return model(tokens).logits


def test_what_is_written_is_read_by_two_ranks_of_fsdp(fsdp: Path, tmp_path: Path):
    pytest.importorskip("transformers")
    convert = ["convert", str(fsdp / "huggingface"), str(tmp_path / "ours"), "--to", "dcp", "--check"]
    assert checkpoint.main([*convert, "--num-attention-heads", "4"]) == 0
    tokens = torch.arange(2 * SHAPE.max_position_embeddings).view(2, -1) * 7 % SHAPE.vocab_size
    found = run_ranks(load, 2, tmp_path / "ours", tmp_path / "theirs", tokens)
    source = opened(fsdp / "huggingface")
    assert all((logits - compute_logits(source, tokens)).abs().max() < TOLERANCE for logits in found)
    for folder in (tmp_path / "ours", tmp_path / "theirs"):
        back = opened(folder)
        assert list(back.tensors) == list(source.tensors) and back.metadata["optimizer"] == source.metadata["optimizer"]
        assert back.metadata["config"]["optimizer"] == source.metadata["config"]["optimizer"]
        for name in source.tensors:
            assert torch.equal(back.read(name), source.read(name)), name


def test_the_heads_are_asked_for_and_the_vocabulary_is_cut(fsdp: Path):
    assert_refused(fsdp / "nanogpt", "does not contain its number of attention heads: give --num-attention-heads")
    cut = opened(fsdp / "huggingface", replace(HINTS, vocab_size=99))
    assert cut.metadata["vocab_size"] == 99 and cut.tensors["exp_avg.word_embeddings.weight"].shape == (99, 48)


def test_other_tensors_than_those_of_the_model(tmp_path: Path):
    state = openai_state(random_weights(), transposed=False)
    said = "is not a GPT-2: holds model.q_proj.weight, and 0 tensors with names that end in wte.weight"

    def write(name: str, held: dict[str, Tensor]) -> Path:
        save_dcp(dict(held), checkpoint_id=tmp_path / name, no_dist=True)
        return tmp_path / name

    assert_refused(write("llama", {"model.q_proj.weight": torch.ones(2, 2)}), said)
    head = {"lm_head.weight": state["transformer.wte.weight"] + 1}
    assert_refused(write("head", state | head), "lm_head.weight is not wte.weight", num_attention_heads=4)
    more = {"transformer.h.0.attn.q_norm.weight": torch.ones(12)}
    assert_refused(write("more", state | more), "is not a part of GPT-2", num_attention_heads=4)
    del state["transformer.h.1.mlp.c_fc.bias"]
    assert_refused(write("less", state), "holds no h.1.mlp.c_fc.bias", num_attention_heads=4)
