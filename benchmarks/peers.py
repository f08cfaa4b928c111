"""The models that ours is measured against, started from our initial weights, and the proof that they compute the same.

Hugging Face's GPT2LMHeadModel comes from the installed transformers, nanoGPT from a checkout that the user names. Both
are imported and called as they are.
Legend: b batch, s sequence, h hidden, n heads, d head size, v vocabulary.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import mpu
from benchmarks.problem import BETAS, LR, WEIGHT_DECAY
from megatron.gpt2.config import ModelConfig
from megatron.gpt2.model.gpt2 import GPT2Model

NAMES = {
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
    "attention.query_key_value": "attn.c_attn",
    "attention.dense": "attn.c_proj",
    "mlp.dense_h_to_4h": "mlp.c_fc",
    "mlp.dense_4h_to_h": "mlp.c_proj",
}
NANOGPT_VOCAB = 50304  # what nanoGPT gives a model of 50,257 words
LossOf = Callable[[nn.Module, Tensor, Tensor], Tensor]


def as_peer(ours: dict[str, Tensor], config: ModelConfig, *, conv1d: bool) -> dict[str, Tensor]:
    """Our tensors (weights, or gradients) by the peers' names and in their layout: fused QKV is [n, 3, d] rows here and
    [3, n, d] there; Hugging Face's Conv1D keeps [in, out]. Padding rows of the vocabulary are dropped."""
    n = config.num_attention_heads
    theirs = {
        "transformer.wte.weight": ours["word_embeddings.weight"][: config.vocab_size],
        "transformer.wpe.weight": ours["position_embeddings.weight"],
        "transformer.ln_f.weight": ours["transformer.final_layernorm.weight"],
        "transformer.ln_f.bias": ours["transformer.final_layernorm.bias"],
    }
    for name, value in ours.items():
        if name.startswith("transformer.layers."):
            _, _, layer, rest = name.split(".", 3)
            module, kind = rest.rsplit(".", 1)
            if module.endswith("query_key_value"):
                value = value.view(n, 3, value.size(0) // 3 // n, *value.shape[1:]).transpose(0, 1).reshape(value.shape)
            turned = conv1d and value.dim() == 2
            theirs[f"transformer.h.{layer}.{NAMES[module]}.{kind}"] = value.t() if turned else value
    return theirs


def load(model: nn.Module, ours: GPT2Model, config: ModelConfig, *, conv1d: bool) -> None:
    """Copy our weights into a peer's parameters; each of them must be filled."""
    theirs = as_peer(dict(ours.named_parameters()), config, conv1d=conv1d)
    parameters = dict(model.named_parameters())  # tied ones once
    assert parameters.keys() == theirs.keys(), parameters.keys() ^ theirs.keys()
    with torch.no_grad():
        for name, parameter in parameters.items():
            rows = theirs[name].size(0)
            parameter[rows:].zero_()
            parameter[:rows].copy_(theirs[name])


@contextlib.contextmanager
def nothing_drawn() -> Iterator[None]:
    """Inside, torch's initialisers do nothing: every weight is overwritten, and drawing 1.5 billion takes a while."""
    with contextlib.ExitStack() as stack:
        for name in ("normal_", "uniform_", "kaiming_uniform_", "trunc_normal_"):
            stack.enter_context(mock.patch(f"torch.nn.init.{name}", lambda tensor, *args, **kwargs: tensor))
        yield


def build(
    kind: str, config: ModelConfig, ours: GPT2Model, *, nanogpt: str, padded: bool = True
) -> tuple[nn.Module, LossOf, int]:
    """The peer's model with the weights of `ours`, its loss over tokens and labels [b, s], and its vocabulary size.
    padded: nanoGPT's vocabulary as it ships; its extra rows, zero at first, are in its softmax."""
    with nothing_drawn():
        model, loss_of, vocab = huggingface(config) if kind == "huggingface" else nano(config, nanogpt, padded)
    load(model, ours, config, conv1d=kind == "huggingface")
    return model, loss_of, vocab


def huggingface(config: ModelConfig, **more: Any) -> tuple[nn.Module, LossOf, int]:
    """transformers' GPT-2 over the true vocabulary, attention by scaled_dot_product_attention, without a cache. more:
    other settings of its configuration."""
    from transformers import GPT2Config, GPT2LMHeadModel

    assert config.vocab_size is not None
    settings: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "n_positions": config.max_position_embeddings,
        "n_embd": config.hidden_size,
        "n_layer": config.num_layers,
        "n_head": config.num_attention_heads,
        "resid_pdrop": config.hidden_dropout,
        "embd_pdrop": config.hidden_dropout,
        "attn_pdrop": config.attention_dropout,
        "layer_norm_epsilon": config.layernorm_epsilon,
        "use_cache": False,
        "activation_function": {"tanh": "gelu_new", "erf": "gelu"}[config.gelu],
        "attn_implementation": "sdpa",
    }

    def loss_of(called: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
        # Its own loss; labels that are shifted already keep the last one, which it would drop.
        loss: Tensor = called(tokens, labels=labels, shift_labels=labels.contiguous()).loss
        return loss

    return GPT2LMHeadModel(GPT2Config(**{**settings, **more})), loss_of, config.vocab_size


def nano(config: ModelConfig, folder: str, padded: bool) -> tuple[nn.Module, LossOf, int]:
    """nanoGPT's model from the checkout `folder`. Its GELU is the erf form, whatever the config says."""
    vocab = config.vocab_size
    assert vocab is not None
    if padded:  # to a multiple of 64, as nanoGPT says of its 50304
        vocab = NANOGPT_VOCAB if vocab == 50257 else -(-vocab // 64) * 64
    sys.path.insert(0, folder)
    try:
        theirs = importlib.import_module("model")
    finally:
        sys.path.remove(folder)
    assert Path(theirs.__file__ or "").resolve().parent == Path(folder).resolve(), "another module is named model"
    settings = theirs.GPTConfig(
        block_size=config.max_position_embeddings,
        vocab_size=vocab,
        n_layer=config.num_layers,
        n_head=config.num_attention_heads,
        n_embd=config.hidden_size,
        dropout=config.hidden_dropout,
        bias=True,
    )

    def loss_of(called: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = called(tokens, labels.contiguous())[1]
        return loss

    return theirs.GPT(settings), loss_of, vocab


def adamw(model: nn.Module, shipped: bool) -> torch.optim.Optimizer:
    """AdamW, decay on matrices only: fused, or as nanoGPT's own `configure_optimizers` makes it on a CPU."""
    if shipped:
        made: Any = model.configure_optimizers  # type: ignore[union-attr]
        optimizer: torch.optim.Optimizer = made(WEIGHT_DECAY, LR, BETAS, "cpu")
        return optimizer
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LR, betas=BETAS, fused=True)


def gate(config: ModelConfig, device: str, kind: str, *, nanogpt: str) -> dict[str, float]:
    """Two layers of the problem's width in fp32, every weight and bias drawn with a deviation of 0.1, the same tokens:
    how far the peer's loss and gradient norm are from ours, relative, and the worst gradient, relative to its tensor's
    largest entry. nanoGPT takes the true vocabulary here."""
    mpu.initialize_model_parallel(1)
    config = replace(config, num_layers=min(config.num_layers, 2), attention_dropout=0.0, hidden_dropout=0.0)
    assert config.vocab_size is not None
    generator = torch.Generator().manual_seed(0)
    ours = GPT2Model(config).train()
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            # Large, so that loss and gradients depend on every layer; around 1 in layer norms.
            parameter.normal_(1.0 if name.endswith("layernorm.weight") else 0.0, 0.1, generator=generator)
            if name == "word_embeddings.weight":
                parameter[config.vocab_size :].zero_()
    model, loss_of, _ = build(kind, config, ours, nanogpt=nanogpt, padded=False)
    text = torch.randint(0, config.vocab_size, (2, config.max_position_embeddings + 1), generator=generator).to(device)
    tokens, labels = text[:, :-1], text[:, 1:]
    weight = torch.full(labels.shape, 1 / labels.numel(), device=device)
    losses = ours.to(device)(tokens, labels, weight), loss_of(model.to(device).train(), tokens, labels)
    for loss in losses:
        loss.backward()
    mine, theirs = ({name: p.grad for name, p in one.named_parameters() if p.grad is not None} for one in (ours, model))
    norm, their_norm = (torch.stack([g.double().norm() for g in of.values()]).norm() for of in (mine, theirs))
    expected = as_peer(mine, config, conv1d=kind == "huggingface")
    return {
        "loss": abs(losses[1].item() / losses[0].item() - 1),
        "grad_norm": abs((their_norm / norm).item() - 1),
        "gradient": max(((theirs[name] - g).abs().max() / g.abs().max()).item() for name, g in expected.items()),
    }
