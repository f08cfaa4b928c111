"""nanoGPT's ckpt.pt: weights, AdamW's state, `model_args`.

Its linear layers are stored as ours, its GELU is erf's, its weights are fp32 and masters of themselves.
"""

import operator
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron.gpt2.config import ModelConfig, OptimizerConfig, require
from megatron.gpt2.formats.foreign import ForeignSource, Hints, LazyTensor, whole_number
from megatron.gpt2.formats.openai_names import check_layers, openai_tensors, true_vocabulary
from megatron.gpt2.formats.pickles import load_pickle

ARGUMENTS = {
    "n_layer": "num_layers",
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "block_size": "max_position_embeddings",
}


def open_nanogpt(path: Path, hints: Hints, *, log: Callable[[str], None]) -> ForeignSource:
    """The checkpoint in the file `path`. ValueError, one line, for anything that is not right."""
    top = load_pickle(path)
    if (
        not isinstance(top, dict)
        or not isinstance(top.get("model_args"), dict)
        or not isinstance(top.get("model"), dict)
    ):
        raise ValueError(f"{path}: is no checkpoint of nanoGPT: it has no model and model_args")
    args = top["model_args"]
    for name in (*ARGUMENTS, "vocab_size"):
        whole_number(path, name, args.get(name))
    found = {}
    for name, tensor in top["model"].items():
        name = str(name).removeprefix("_orig_mod.").removeprefix("transformer.")
        require(isinstance(tensor, torch.Tensor), f"{path}: {name[:80]!r} is no tensor")
        if not re.fullmatch(r"h\.\d+\.attn\.bias", name, re.ASCII):  # the causal mask
            found[name] = LazyTensor.of(tensor)
    check_layers(path, found, args["n_layer"])
    head = found.pop("lm_head.weight", None)
    if head is not None and "wte.weight" in found and not torch.equal(head.make(), found["wte.weight"].make()):
        raise ValueError(f"{path}: lm_head.weight is not wte.weight, and the head of this program's GPT-2 is tied")
    vocab_size = true_vocabulary(path, args["vocab_size"], hints, log)
    dropout = args.get("dropout", 0.0)
    require(type(dropout) in (int, float), f"{path}: dropout is no number")
    try:
        model = ModelConfig(
            vocab_size=vocab_size,
            gelu=hints.gelu or "erf",
            attention_dropout=float(dropout),
            hidden_dropout=float(dropout),
            **{ours: args[name] for name, ours in ARGUMENTS.items()},
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    biases = args.get("bias", True) is not False
    lazy = openai_tensors(path, model, found, transposed=False, biases=biases)
    facts: dict[str, Any] = {}
    left_out = []
    try:
        lazy |= _adam(path, model, found, top["optimizer"], biases)
        facts = _facts(top["optimizer"])
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError) as error:
        left_out.append(f"the optimizer's state ({type(error).__name__}: {str(error)[:120]})")
    iteration = top.get("iter_num", 0)
    require(type(iteration) is int and 0 <= iteration < 10**12, f"{path}: iter_num is no iteration")
    return ForeignSource(path, "nanogpt", iteration, model, facts, lazy, left_out)


def _adam(
    path: Path, model: ModelConfig, found: Mapping[str, LazyTensor], optimizer: Mapping[str, Any], biases: bool
) -> dict[str, LazyTensor]:
    """Masters and moments. AdamW numbers the parameters: matrices first, then vectors, both in the model's order."""
    order = [
        name for matrix in (True, False) for name, tensor in found.items() if (len(tensor.info.shape) > 1) == matrix
    ]
    numbers = [number for group in optimizer["param_groups"] for number in map(operator.index, group["params"])]
    lazy = openai_tensors(path, model, found, transposed=False, biases=biases, prefix="master.")
    for kind in ("exp_avg", "exp_avg_sq"):
        held = {
            name: LazyTensor.of(optimizer["state"][number][kind]) for name, number in zip(order, numbers, strict=True)
        }
        if any(held[name].info != found[name].info or found[name].info.dtype != torch.float32 for name in order):
            raise ValueError("its shapes or types are not those of the parameters")
        lazy |= openai_tensors(path, model, held, transposed=False, biases=biases, prefix=f"{kind}.")
    return lazy


def _facts(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    decayed, other = optimizer["param_groups"]
    (step,) = {int(state["step"]) for state in optimizer["state"].values()}
    first, second = decayed["betas"]
    config: dict[str, Any] = {
        "weight_decay": float(decayed["weight_decay"]),
        "adam_beta1": float(first),
        "adam_beta2": float(second),
        "adam_eps": float(decayed["eps"]),
    }
    OptimizerConfig(**config)
    require(not other["weight_decay"], "biases and layer norms were decayed")
    return {
        "optimizer": {"good_steps": step, "skipped_steps": 0, "adam_steps": step, "loss_scaler": {"scale": 1.0}},
        "config": {"optimizer": config},
    }
