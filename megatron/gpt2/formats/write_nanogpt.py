"""Any source written as nanoGPT's ckpt.pt: what its sample.py loads, and with Adam's state its train.py, too.

The whole model is in memory, as it is when nanoGPT loads it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data_utils import Tokenizer
from data_utils.files import flush_to_disk
from data_utils.files.plain_pickle import plain_pickle
from data_utils.tokenizers.base import CharacterTokenizer
from megatron.gpt2.checkpoint.source import Source, check_facts
from megatron.gpt2.config import ModelConfig, require
from megatron.gpt2.formats.foreign import by_part
from megatron.gpt2.formats.new_folder import new_folder
from megatron.gpt2.formats.openai_names import openai_name
from megatron.gpt2.formats.write_huggingface import exported_kind
from megatron.gpt2.formats.write_megatron_optimizer import optimizer_config
from megatron.gpt2.model.parameters import parameter_specs
from megatron.gpt2.optimizer.optimizer import MOMENTS

EPSILON = 1e-5  # of nanoGPT's layer norms


def write_nanogpt(
    source: Source, out: str | Path, *, tokenizer: Tokenizer | None, log: Callable[[str], None] = print
) -> Path:
    """Write `source` into the new folder `out`: ckpt.pt in fp32, and meta.pkl where its tokens are characters; returns
    the folder. ValueError, one line, for a model that nanoGPT has not."""
    model = check_facts(source)
    require(
        model.gelu == "erf",
        f"{source.path}: its GELU is {model.gelu}, and nanoGPT's is erf: the model would give "
        "other logits there; --to huggingface keeps it",
    )
    require(
        model.ffn_size == 4 * model.hidden_size,
        f"{source.path}: --ffn-hidden-size {model.ffn_size} is not 4 × {model.hidden_size}, and nanoGPT has no other",
    )
    require(
        model.layernorm_epsilon == EPSILON,
        f"{source.path}: --layernorm-epsilon {model.layernorm_epsilon:g} is not {EPSILON:g}, and nanoGPT has no other",
    )
    kind = exported_kind(source, "fp32")
    weights = _tensors(source, model, kind)
    top: dict[str, Any] = {
        "model": {
            **{f"transformer.{name}": value for name, value in weights.items()},
            "lm_head.weight": weights["wte.weight"],
        },
        "model_args": {
            "n_layer": model.num_layers,
            "n_head": model.num_attention_heads,
            "n_embd": model.hidden_size,
            "block_size": model.max_position_embeddings,
            "bias": True,
            "vocab_size": model.vocab_size,
            "dropout": model.hidden_dropout,
        },
        "iter_num": source.iteration,
        "best_val_loss": torch.tensor(1e9),
        "config": {"dataset": Path(out).name},
    }
    if kind == "master":
        top["optimizer"] = _adam(source, model, list(weights))
    else:
        log("left out: the optimizer's state, which the source does not hold: sample.py needs none, train.py does")
    with new_folder(out) as folder:
        with open(folder / "ckpt.pt", "wb") as file:
            torch.save(top, file)
            flush_to_disk(file)
        if isinstance(tokenizer, CharacterTokenizer):
            numbers = dict(enumerate(tokenizer.characters))
            meta = {
                "vocab_size": tokenizer.vocab_size,
                "itos": numbers,
                "stoi": {character: number for number, character in numbers.items()},
            }
            (folder / "meta.pkl").write_bytes(plain_pickle(meta))
            log(f"sample.py looks for the characters in its own folder: copy meta.pkl to data/{Path(out).name}/")
    return Path(out)


def _tensors(source: Source, model: ModelConfig, kind: str) -> dict[str, Tensor]:
    """fp32, by nanoGPT's names, in the order of its parameters."""
    change = by_part(model.num_attention_heads)
    tensors = {name: source.read(f"{kind}.{name}").float() for name in parameter_specs(model)}
    return {
        openai_name(name): (change(x) if ".query_key_value." in name else x).contiguous() for name, x in tensors.items()
    }


def _adam(source: Source, model: ModelConfig, names: list[str]) -> dict[str, Any]:
    """`state_dict()` of torch's AdamW, which numbers the parameters: matrices, which decay, then vectors."""
    moments = {moment: _tensors(source, model, moment) for moment in MOMENTS}
    is_matrix = {name: moments[MOMENTS[0]][name].dim() > 1 for name in names}
    order = sorted(names, key=lambda name: not is_matrix[name])
    step = torch.tensor(float(source.facts["optimizer"]["adam_steps"]))
    matrices = sum(is_matrix.values())
    first, second = adamw_groups(source)
    return {
        "state": {
            number: {"step": step, **{moment: moments[moment][name] for moment in MOMENTS}}
            for number, name in enumerate(order)
        },
        "param_groups": [
            {**first, "params": list(range(matrices))},
            {**second, "params": list(range(matrices, len(order)))},
        ],
    }


def adamw_groups(source: Source) -> list[dict[str, Any]]:
    """What torch's AdamW says of its two groups, the matrices, which decay, and the vectors; without `params`."""
    config = optimizer_config(source)
    return [
        {
            "lr": config.lr,
            "betas": (config.adam_beta1, config.adam_beta2),
            "eps": config.adam_eps,
            "weight_decay": decay,
            "amsgrad": False,
            "maximize": False,
            "foreach": None,
            "capturable": False,
            "differentiable": False,
            "fused": None,
            "decoupled_weight_decay": True,
        }
        for decay in (config.weight_decay, 0.0)
    ]
