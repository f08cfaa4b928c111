"""Plain folders of torch.distributed.checkpoint: a GPT-2 that FSDP2 sharded over two ranks, and other models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

from megatron.gpt2.checkpoint.folder import refuse_foreign
from megatron.gpt2.commands import checkpoint
from megatron.gpt2.formats import Hints, Source, open_source, recognise
from tests.distributed import run_ranks
from tests.megatron.gpt2.formats.made import SHAPE, openai_state, random_weights
from tests.megatron.gpt2.formats.test_megatron import TOLERANCE, logits_of

FORMS = {"huggingface": True, "nanogpt": False}  # whether the linear layers are [in, out]
HINTS = Hints(num_attention_heads=SHAPE.num_attention_heads)


class Tied(nn.Module):
    """Parameters under the names of `state`, and a head that is the table."""

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


def stepped(model: nn.Module) -> torch.optim.AdamW:
    """AdamW after two steps with gradients that are functions of the weights."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.8, 0.95), eps=1e-7, weight_decay=0.3)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = parameter.detach() * 0.5 + 0.1
        optimizer.step()
    return optimizer


def save(rank: int, world_size: int, folder: Path) -> None:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world_size,))
    for form, transposed in FORMS.items():
        model = Tied(openai_state(random_weights(), transposed=transposed))
        fully_shard(model, mesh=mesh)
        optimizer = stepped(model)
        held = get_model_state_dict(model)
        save_dcp(dict(held), checkpoint_id=folder / f"{form}_weights")
        save_dcp({"model": held, "optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder / form)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dcp")
    run_ranks(save, 2, folder)
    return folder


def opened(folder: Path, hints: Hints = HINTS) -> Source:
    return open_source(folder, hints, log=lambda line: None)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ending", ["", "_weights"])
def test_what_two_ranks_of_fsdp_saved(folders: Path, form: str, ending: str):
    model = Tied(openai_state(random_weights(), transposed=FORMS[form]))
    optimizer = stepped(model)
    source = opened(folders / (form + ending))
    assert recognise(folders / (form + ending)) == ("dcp", folders / (form + ending))
    assert source.facts["config"]["model"]["gelu"] == ("tanh" if form == "huggingface" else "erf")
    assert source.facts["config"]["model"]["ffn_hidden_size"] == 80 and not source.left_out
    kinds: dict[str, Any] = {"model": lambda parameter: parameter}
    if not ending:
        kinds |= {
            "master": kinds["model"],
            **{
                kind: lambda parameter, kind=kind: optimizer.state[parameter][kind]
                for kind in ("exp_avg", "exp_avg_sq")
            },
        }
        assert source.iteration == source.facts["optimizer"]["adam_steps"] == 2
        assert source.facts["config"]["optimizer"] == {
            "weight_decay": 0.3,
            "adam_beta1": 0.8,
            "adam_beta2": 0.95,
            "adam_eps": 1e-7,
        }
    assert {name.partition(".")[0] for name in source.names()} == kinds.keys()
    for kind, of in kinds.items():
        held = {name: of(parameter).detach() for name, parameter in model.named_parameters()}
        read = {name: source.read(f"{kind}.{name}") for name in random_weights()}
        for name, value in openai_state(read, transposed=FORMS[form]).items():
            assert torch.equal(value, held[name]), f"{kind}.{name}"


def load(rank: int, world_size: int, folder: Path, out: Path, tokens: Tensor) -> Tensor:
    """`folder` in transformers' model and torch's AdamW, sharded; saved again into `out`. The logits, [b, s, v]."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=SHAPE.vocab_size,
            n_positions=SHAPE.max_position_embeddings,
            n_embd=SHAPE.hidden_size,
            n_layer=SHAPE.num_layers,
            n_head=SHAPE.num_attention_heads,
            n_inner=SHAPE.ffn_size,
        )
    ).eval()
    for module in (*model.transformer.h, model):
        fully_shard(module, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = torch.optim.AdamW(
        [{"params": [x for x in model.parameters() if (x.dim() > 1) == decays]} for decays in (True, False)]
    )
    weights, adam = get_state_dict(model, optimizer)
    load_dcp({"model": weights, "optimizer": adam}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=adam)
    weights, adam = get_state_dict(model, optimizer)
    save_dcp({"model": weights, "optimizer": adam}, checkpoint_id=out)
    with torch.no_grad():
        return model(tokens).logits


def test_what_is_written_is_read_by_two_ranks_of_fsdp(folders: Path, tmp_path: Path):
    pytest.importorskip("transformers")
    command = [
        "convert",
        str(folders / "huggingface"),
        str(tmp_path / "ours"),
        "--to",
        "dcp",
        "--check",
        "--num-attention-heads",
        str(SHAPE.num_attention_heads),
    ]
    assert checkpoint.main(command) == 0
    tokens = torch.arange(2 * SHAPE.max_position_embeddings).view(2, -1) * 7 % SHAPE.vocab_size
    found = run_ranks(load, 2, tmp_path / "ours", tmp_path / "theirs", tokens)
    source = opened(folders / "huggingface")
    wanted = logits_of(source, tokens)
    assert all((logits - wanted).abs().max() < TOLERANCE for logits in found)
    for folder in (tmp_path / "ours", tmp_path / "theirs"):
        back = opened(folder)
        assert back.names() == source.names() and back.facts["optimizer"] == source.facts["optimizer"]
        assert back.facts["config"]["optimizer"] == source.facts["config"]["optimizer"]
        for name in source.names():
            assert torch.equal(back.read(name), source.read(name)), name


def test_the_heads_are_asked_for_and_the_vocabulary_is_cut(folders: Path):
    with pytest.raises(ValueError, match="does not say how many attention heads it has: give --num-attention-heads"):
        opened(folders / "nanogpt", Hints())
    with pytest.raises(ValueError, match="convert .* --to native --num-attention-heads N"):
        refuse_foreign(folders / "nanogpt")
    cut = opened(folders / "huggingface", Hints(num_attention_heads=4, vocab_size=99))
    assert cut.facts["vocab_size"] == 99 and cut.tensors["exp_avg.word_embeddings.weight"].shape == (99, 48)


def write(folder: Path, **tensors: Tensor) -> Path:
    save_dcp({name.replace("/", "."): value for name, value in tensors.items()}, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("model/layers/0/self_attn/q_proj/weight", "a name of Llama or one of its kin, and this program knows GPT-2"),
        ("layers/0/attention/wq/weight", "a name of Llama or one of its kin"),
        ("gpt_neox/layers/0/attention/dense/weight", "a name of GPT-NeoX"),
        ("bert/encoder/layer/0/x", "a name of BERT"),
        ("encoder/block/0/layer/0", "a name of T5"),
        ("something", "is no GPT-2: holds something, and 0 tensors whose name ends in wte.weight"),
    ],
)
def test_another_architecture_is_refused_by_its_name(tmp_path: Path, name: str, problem: str):
    with pytest.raises(ValueError, match=problem) as caught:
        opened(write(tmp_path / "it", **{name: torch.ones(2, 2)}))
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


def test_a_head_of_its_own_and_other_tensors(tmp_path: Path):
    state = openai_state(random_weights(), transposed=False)
    with pytest.raises(ValueError, match=r"lm_head\.weight is not wte\.weight"):
        opened(write(tmp_path / "head", **state, **{"lm_head.weight": state["transformer.wte.weight"] + 1}))
    with pytest.raises(ValueError, match="is no part of GPT-2"):
        opened(write(tmp_path / "more", **state, **{"transformer.h.0.attn.q_norm.weight": torch.ones(12)}))
    del state["transformer.h.1.mlp.c_fc.bias"]
    with pytest.raises(ValueError, match=r"holds no h\.1\.mlp\.c_fc\.bias"):
        opened(write(tmp_path / "less", **state))
    ours = {f"ema.{name}": value for name, value in state.items() if name.startswith("transformer.ln_f")}
    state = openai_state(random_weights(), transposed=False)
    assert opened(write(tmp_path / "ema", **state, **ours)).left_out == (
        "2 other tensors, ema.transformer.ln_f.weight among them",
    )
