"""nanoGPT's ckpt.pt, read and written: weights, AdamW's state, `model_args`, and meta.pkl for characters.

Its linear layers are stored as ours, its GELU is erf's, its weights are fp32 and masters of themselves. Its sample.py
loads what is written here, and with Adam's state its train.py, too. When it is written, the whole model is in memory, as
it is when nanoGPT loads it.
"""

import operator
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data_utils import Tokenizer
from data_utils.files import flush_to_disk
from data_utils.files.inert_pickle import plain_pickle
from data_utils.tokenizers.base import CharacterTokenizer
from megatron.gpt2.checkpoint.source import Source, check_facts
from megatron.gpt2.config import ModelConfig, require
from megatron.gpt2.formats.foreign import (
    DAMAGE,
    ForeignSource,
    Hints,
    LazyTensor,
    Tensors,
    adam_flags,
    progress,
    whole_number,
)
from megatron.gpt2.formats.native import new_folder
from megatron.gpt2.formats.openai_names import (
    HEAD,
    WTE,
    adamw_groups,
    exported_kind,
    openai_name,
    openai_tensor,
    openai_tensors,
    true_vocabulary,
    weights_of,
)
from megatron.gpt2.formats.torch_files import load_pickle
from megatron.gpt2.model.gpt2 import parameter_specs
from megatron.gpt2.optimizer.optimizer import MOMENTS

ARGUMENTS = {
    "n_layer": "num_layers",
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "block_size": "max_position_embeddings",
    "vocab_size": "vocab_size",
}
EPSILON = 1e-5  # of nanoGPT's layer norms


def open_nanogpt(path: Path, hints: Hints, *, log: Callable[[str], None]) -> ForeignSource:
    """The checkpoint in the file `path`. ValueError, one line, for anything that is not right."""
    top = load_pickle(path)
    if not isinstance(top, dict) or not all(isinstance(top.get(name), dict) for name in ("model", "model_args")):
        raise ValueError("is no checkpoint of nanoGPT: it has no model and model_args")
    args, dropout = top["model_args"], top["model_args"].get("dropout", 0.0)
    said: dict[str, Any] = {ours: whole_number(name, args.get(name)) for name, ours in ARGUMENTS.items()}
    require(type(dropout) in (int, float), "dropout is no number")
    for name, tensor in top["model"].items():
        require(isinstance(tensor, Tensor), f"{str(name)[:80]!r} is no tensor")
    found, _ = weights_of({str(name): LazyTensor.of(tensor) for name, tensor in top["model"].items()})
    said["vocab_size"] = true_vocabulary(said["vocab_size"], hints, log)
    model = ModelConfig(gelu=hints.gelu or "erf", attention_dropout=dropout, hidden_dropout=dropout, **said)
    biases = args.get("bias", True) is not False
    lazy = openai_tensors(model, found, transposed=False, biases=biases)
    facts: dict[str, Any] = {}
    left_out = []
    try:
        state, facts = _adam(found, top["optimizer"])
        for kind, tensors in state.items():
            lazy |= openai_tensors(model, tensors, transposed=False, biases=biases, kind=kind)
    except DAMAGE as error:
        left_out.append(f"the optimizer's state ({type(error).__name__}: {str(error)[:120]})")
    iteration = whole_number("iter_num", top.get("iter_num", 0), 0, 10**12)
    return ForeignSource(path, "nanogpt", iteration, model, facts, lazy, left_out)


def _adam(found: Tensors, optimizer: Mapping[str, Any]) -> tuple[dict[str, Tensors], dict[str, Any]]:
    """Masters and moments, and the facts. AdamW numbers the parameters: matrices first, then vectors, both in the
    model's order."""
    order = [
        name for matrix in (True, False) for name, tensor in found.items() if (len(tensor.info.shape) > 1) == matrix
    ]
    numbers = [number for group in optimizer["param_groups"] for number in map(operator.index, group["params"])]
    states: dict[str, Tensors] = {"master": found}
    for kind in MOMENTS:
        held = states[kind] = {
            name: LazyTensor.of(optimizer["state"][number][kind]) for name, number in zip(order, numbers, strict=True)
        }
        if any(held[name].info != found[name].info or found[name].info.dtype != torch.float32 for name in order):
            raise ValueError("its shapes or types are not those of the parameters")
    decayed, other = optimizer["param_groups"]
    (step,) = {int(state["step"]) for state in optimizer["state"].values()}
    require(not other["weight_decay"], "biases and layer norms were decayed")
    config = adam_flags(decayed, [decayed["weight_decay"]])
    return states, {"optimizer": progress(step), "config": {"optimizer": config}}


def write_nanogpt(
    source: Source, out: str | Path, *, tokenizer: Tokenizer | None, log: Callable[[str], None] = print
) -> Path:
    """Write `source` into the new folder `out`: ckpt.pt in fp32, and meta.pkl if its tokens are characters; returns the
    folder. ValueError, one line, for a model that nanoGPT does not have."""
    model, kind = check_facts(source), exported_kind(source, "fp32")
    for fits, problem in (
        (
            model.gelu == "erf",
            f"its GELU is {model.gelu}, and nanoGPT's is erf: the model would give other logits there; "
            "--to huggingface keeps it",
        ),
        (
            model.ffn_size == 4 * model.hidden_size,
            f"--ffn-hidden-size {model.ffn_size} is not 4 × {model.hidden_size}, and nanoGPT has no other",
        ),
        (
            model.layernorm_epsilon == EPSILON,
            f"--layernorm-epsilon {model.layernorm_epsilon:g} is not {EPSILON:g}, and nanoGPT has no other",
        ),
    ):
        require(fits, f"{source.path}: {problem}")

    def tensors(kind: str) -> dict[str, Tensor]:
        """fp32, by nanoGPT's names, in the order of its parameters."""
        return {
            openai_name(name): openai_tensor(source, model, kind, name, transposed=False).float().contiguous()
            for name in parameter_specs(model)
        }

    weights = tensors(kind)
    named = {f"transformer.{name}": value for name, value in weights.items()}
    top: dict[str, Any] = {
        "model": {**named, HEAD: weights[WTE]},
        "model_args": {
            **{name: getattr(model, ours) for name, ours in ARGUMENTS.items()},
            "bias": True,
            "dropout": model.hidden_dropout,
        },
        "iter_num": source.iteration,
        "best_val_loss": torch.tensor(1e9),
        "config": {"dataset": Path(out).name},
    }
    if kind == "master":
        moments = {moment: tensors(moment) for moment in MOMENTS}
        order = sorted(weights, key=lambda name: weights[name].dim() == 1)
        matrices = sum(x.dim() > 1 for x in weights.values())
        step = torch.tensor(float(source.facts["optimizer"]["adam_steps"]))
        numbers = range(matrices), range(matrices, len(order))
        top["optimizer"] = {
            "state": {
                number: {"step": step, **{moment: moments[moment][name] for moment in MOMENTS}}
                for number, name in enumerate(order)
            },
            "param_groups": [
                {**group, "params": list(own)} for group, own in zip(adamw_groups(source), numbers, strict=True)
            ],
        }
    else:
        log("left out: the optimizer's state, which the source does not hold: sample.py needs none, train.py does")
    with new_folder(out) as folder:
        with open(folder / "ckpt.pt", "wb") as file:
            torch.save(top, file)
            flush_to_disk(file)
        if isinstance(tokenizer, CharacterTokenizer):
            itos = dict(enumerate(tokenizer.characters))
            stoi = {character: number for number, character in itos.items()}
            meta = plain_pickle({"vocab_size": tokenizer.vocab_size, "itos": itos, "stoi": stoi})
            (folder / "meta.pkl").write_bytes(meta)
            log(f"sample.py looks for the characters in its own folder: copy meta.pkl to data/{Path(out).name}/")
    return Path(out)
