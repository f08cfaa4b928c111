"""Checkpoints of other programs: written here from known random weights, and those in `torch_dist/`, which megatron-core
wrote, with what they hold."""

from __future__ import annotations

import argparse
import json
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron.gpt2.config import ModelConfig
from megatron.gpt2.formats import Hints, Source, open_source
from megatron.gpt2.formats.foreign import ForeignSource, LazyTensor
from megatron.gpt2.formats.megatron_model import name_of_2019
from megatron.gpt2.model.gpt2 import parameter_specs

SHAPE = ModelConfig(
    num_layers=4, hidden_size=48, num_attention_heads=4, ffn_hidden_size=80, vocab_size=101, max_position_embeddings=24
)
PADDED = 112
CORE = {
    "attention.query_key_value": "self_attention.linear_qkv",
    "attention.dense": "self_attention.linear_proj",
    "mlp.dense_h_to_4h": "mlp.linear_fc1",
    "mlp.dense_4h_to_h": "mlp.linear_fc2",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "input_layernorm": "input_layernorm",
}
FUSED = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


def random_weights(shape: ModelConfig = SHAPE, seed: int = 0) -> dict[str, Tensor]:
    """By our names; nothing is zero or one, so that nothing can be forgotten unseen."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: 0.2 * torch.randn(spec.global_shape, generator=generator) + ("layernorm.weight" in name)
        for name, spec in parameter_specs(shape).items()
    }


def parts(weights: dict[str, Tensor], version: int, tp: int) -> list[dict[str, Tensor]]:
    """Each rank's part, the vocabulary padded, QKV in the order of `version`."""
    table = weights["word_embeddings.weight"]
    padded = {**weights, "word_embeddings.weight": torch.cat([table, table[: PADDED - len(table)]])}
    specs = parameter_specs(replace(SHAPE, vocab_size=PADDED, make_vocab_size_divisible_by=1), tp)
    ranks = [{name: spec.split(padded[name], rank, tp) for name, spec in specs.items()} for rank in range(tp)]
    heads = SHAPE.num_attention_heads // tp
    for rank in ranks:
        for name, x in rank.items():
            if ".query_key_value." in name and version < 2:
                x = x.view(heads, 3, -1, *x.shape[1:])
                x = x.transpose(0, 1) if version == 0 else x.transpose(1, 2)
                rank[name] = x.reshape(-1, *x.shape[3:])
    return ranks


def stage(rank: dict[str, Tensor], number: int, of: int) -> dict[str, Tensor]:
    """A pipeline stage's part of a rank's, its layers numbered from 0; the last one has the tied matrix again."""
    each, held = SHAPE.num_layers // of, {}
    for name, value in rank.items():
        words = name.split(".")
        if words[1] == "layers":
            if int(words[2]) // each == number:
                held[".".join([*words[:2], str(int(words[2]) % each), *words[3:]])] = value
        elif number == (of - 1 if "final" in name else 0):
            held[name] = value
    if of > 1 and number == of - 1:
        held["word_embeddings_for_head.weight"] = rank["word_embeddings.weight"]
    return held


def nested(held: dict[str, Tensor], encoder: str, attention: str) -> dict[str, Any]:
    """As v1.0 ("transformer", "attention") and v2.6 ("encoder", "self_attention") keep it."""
    embedding = {
        name: {"weight": held[f"{name}.weight"]}
        for name in ("word_embeddings", "position_embeddings")
        if f"{name}.weight" in held
    }
    layers = {
        name.removeprefix("transformer.").replace(".attention.", f".{attention}."): value
        for name, value in held.items()
        if name.startswith("transformer.")
    }
    first = {"embedding": embedding} if embedding else {}
    model: dict[str, Any] = {"language_model": {**first, encoder: layers}}
    if "word_embeddings_for_head.weight" in held:
        model["word_embeddings_for_head"] = {"weight": held["word_embeddings_for_head.weight"]}
    return model


def core(held: dict[str, Tensor], fused: bool) -> dict[str, Any]:
    """As Megatron Core keeps it, without and with Transformer Engine."""
    model: dict[str, Any] = {}
    for name, value in held.items():
        name = name.replace("transformer.", "decoder.").replace("word_embeddings_for_head", "output_layer")
        name = f"embedding.{name}" if "embeddings" in name else name
        for old, new in CORE.items():
            name = name.replace(f".{old}.", f".{new}.")
        if fused:
            for old, new in FUSED.items():
                name = name.replace(f".{old}", f".{new}")
            if name.endswith("linear_qkv.weight"):
                model[name.replace("weight", "_extra_state")] = None
        model[name] = value
    return model


def arguments(tp: int, pp: int = 1, **more: Any) -> argparse.Namespace:
    return argparse.Namespace(
        **{
            "num_layers": SHAPE.num_layers,
            "hidden_size": SHAPE.hidden_size,
            "padded_vocab_size": PADDED,
            "num_attention_heads": SHAPE.num_attention_heads,
            "tensor_model_parallel_size": tp,
            "pipeline_model_parallel_size": pp,
            "openai_gelu": False,
            "bias_gelu_fusion": True,
            **more,
        }
    )


def in_form(held: dict[str, Tensor], form: str) -> dict[str, Any]:
    """`form` is flat, v1, v2, core or fused."""
    if form in ("v1", "v2"):
        return nested(held, *(("transformer", "attention") if form == "v1" else ("encoder", "self_attention")))
    return dict(held) if form == "flat" else core(held, form == "fused")


def write_megatron(
    folder: Path,
    weights: dict[str, Tensor],
    form: str,
    *,
    version: int = 0,
    tp: int = 1,
    pp: int = 1,
    iteration: int = 7,
    legacy: bool = False,
    args: bool = True,
    **top: Any,
) -> Path:
    """A --save folder with one iteration."""
    for number in range(pp):
        for rank, whole in enumerate(parts(weights, version, tp)):
            held = stage(whole, number, pp)
            model = in_form(held, form)
            file = folder / f"iter_{iteration:07d}" / (f"mp_rank_{rank:02d}" + (f"_{number:03d}" if pp > 1 else ""))
            file.mkdir(parents=True)
            saved = {"iteration": iteration, "model": model, **top}
            if version:
                saved["checkpoint_version"] = float(version)
            if args:
                saved["args"] = arguments(tp, pp)
            torch.save(saved, file / "model_optim_rng.pt", _use_new_zipfile_serialization=not legacy)
    (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return folder


def made_source(num_layers: int, dtype: torch.dtype) -> Source:
    """A run's state in memory: weights of `dtype`, masters, moments and the facts that belong to them."""
    shape = ModelConfig(
        num_layers=num_layers,
        hidden_size=16,
        num_attention_heads=4,
        vocab_size=101,
        max_position_embeddings=8,
        make_vocab_size_divisible_by=8,
    )
    masters = random_weights(shape)
    lazy = {}
    for kind in ("model", "master", "exp_avg", "exp_avg_sq"):
        for name, master in masters.items():
            lazy[f"{kind}.{name}"] = LazyTensor.of(
                {
                    "model": master.to(dtype),
                    "master": master.to(dtype).float(),
                    "exp_avg": master + 1,
                    "exp_avg_sq": master**2,
                }[kind]
            )
    scaler = {"scale": 8.0, "clean_steps": 5.0, "hysteresis_left": 1.0} if dtype == torch.float16 else {"scale": 1.0}
    facts = {
        "consumed_samples": 24,
        "global_batch_size": 4,
        "train_iters": 100,
        "optimizer": {"good_steps": 6, "skipped_steps": 1, "adam_steps": 6, "loss_scaler": scaler},
        "config": {
            "optimizer": {
                "lr": 0.2,
                "min_lr": 0.1,
                "lr_decay_style": "cosine",
                "lr_decay_iters": 100,
                "warmup": 0.1,
                "weight_decay": 0.1,
            }
        },
    }
    return ForeignSource(Path("made"), "native", 7, shape, facts, lazy)


NAMES = {
    "input_layernorm": "ln_1",
    "attention.query_key_value": "attn.c_attn",
    "attention.dense": "attn.c_proj",
    "post_attention_layernorm": "ln_2",
    "mlp.dense_h_to_4h": "mlp.c_fc",
    "mlp.dense_4h_to_h": "mlp.c_proj",
}


def openai_state(weights: dict[str, Tensor], *, transposed: bool) -> dict[str, Tensor]:
    """`weights`, ours, under OpenAI's names, QKV as [3, n, d]."""
    state = {}
    for name, value in weights.items():
        theirs = (
            name.replace("word_embeddings", "wte")
            .replace("position_embeddings", "wpe")
            .replace("transformer.final_layernorm", "ln_f")
            .replace("transformer.layers", "h")
        )
        for ours, other in NAMES.items():
            theirs = theirs.replace(f".{ours}.", f".{other}.")
        if ".c_attn." in theirs:
            value = value.view(SHAPE.num_attention_heads, 3, -1, *value.shape[1:]).transpose(0, 1).reshape(value.shape)
        if transposed and value.dim() == 2 and theirs.startswith("h."):
            value = value.t()
        state[f"transformer.{theirs}"] = value.contiguous()
    return state


def write_huggingface(folder: Path, **config: Any) -> Path:
    """By hand, so that it can be wrong."""
    folder.mkdir(exist_ok=True)
    save_file(openai_state(random_weights(), transposed=True), folder / "model.safetensors", metadata={"format": "pt"})
    known = {
        "model_type": "gpt2",
        "vocab_size": 101,
        "n_positions": 24,
        "n_embd": 48,
        "n_layer": 4,
        "n_head": 4,
        "n_inner": 80,
    }
    (folder / "config.json").write_text(json.dumps({**known, **config}))
    return folder


def nanogpt_checkpoint(*, bias: bool = True, prefix: str = "_orig_mod.") -> tuple[dict[str, Any], dict[str, Tensor]]:
    """As train.py writes it, and our weights; its MLP is 4h wide."""
    weights = random_weights(replace(SHAPE, ffn_hidden_size=None), seed=3)
    if not bias:
        weights = {
            name: torch.zeros_like(value) if name.endswith(".bias") else value for name, value in weights.items()
        }
    state = openai_state(
        {name: value for name, value in weights.items() if bias or not name.endswith(".bias")}, transposed=False
    )
    matrices, vectors = ([name for name in state if (state[name].dim() == 2) == wanted] for wanted in (True, False))
    adam = {
        "state": {
            number: {"step": torch.tensor(9.0), "exp_avg": state[name] + 1, "exp_avg_sq": state[name] ** 2}
            for number, name in enumerate([*matrices, *vectors])
        },
        "param_groups": [
            {"params": list(range(len(matrices))), "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "lr": 1e-3},
            {
                "params": list(range(len(matrices), len(state))),
                "weight_decay": 0.0,
                "betas": (0.9, 0.95),
                "eps": 1e-8,
                "lr": 1e-3,
            },
        ],
    }
    state["lm_head.weight"] = state["transformer.wte.weight"]
    return {
        "model": {prefix + name: value for name, value in state.items()},
        "optimizer": adam,
        "model_args": {
            "n_layer": 4,
            "n_head": 4,
            "n_embd": 48,
            "block_size": 24,
            "bias": bias,
            "vocab_size": 101,
            "dropout": 0.2,
        },
        "iter_num": 9,
        "best_val_loss": torch.tensor(1.0),
        "config": {"out_dir": "out"},
    }, weights


FIXTURES = Path(__file__).parent / "torch_dist"
CASES = {path.name.removesuffix(".tar.xz"): path for path in sorted(FIXTURES.glob("*.tar.xz"))}
VOCABULARY, KINDS = 29, ("model", "master", "exp_avg", "exp_avg_sq")


def unpacked(base: Path) -> dict[str, Path]:
    """Every checkpoint, in a folder of its name in `base`."""
    for name in CASES:
        unpack(name, base / name)
    return {name: base / name for name in CASES}


def unpack(name: str, folder: Path) -> None:
    """The checkpoint of this name into `folder`."""
    with tarfile.open(CASES[name]) as archive:
        archive.extractall(folder, filter="data")


def opened(folder: Path) -> Source:
    return open_source(folder, Hints(vocab_size=VOCABULARY), log=lambda line: None)


def expected(kind: str) -> dict[str, Tensor]:
    """What megatron-core held in memory when it wrote, by our names."""
    with np.load(FIXTURES / "expected.npz") as held:
        return {
            name_of_2019(name.removeprefix(f"{kind}.")): torch.from_numpy(held[name])
            for name in held.files
            if name.startswith(f"{kind}.")
        }


def in_fp32(name: str) -> bool:
    return "fp32" in name
