"""The models of other libraries with our initial weights, and a check that they compute the same results as our model.

Hugging Face's GPT2LMHeadModel is imported from the installed transformers, nanoGPT from a checkout of the user. Neither
is changed. Legend: b batch, s sequence, h hidden, n heads, d head size, v vocabulary.
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
from benchmarks.workload import BETAS, LR, WEIGHT_DECAY
from megatron.gpt2.config import ModelConfig
from megatron.gpt2.formats.nanogpt_and_dcp import openai_name, to_openai
from megatron.gpt2.model.gpt2 import GPT2Model

NANOGPT_VOCAB = 50304  # nanoGPT's vocabulary, padded from 50,257
LossOf = Callable[[nn.Module, Tensor, Tensor], Tensor]


def convert_to_peer(ours: dict[str, Tensor], config: ModelConfig, *, conv1d: bool) -> dict[str, Tensor]:
    """Convert our weights or gradients to the names and layout of a peer, without padding rows of the vocabulary.
    conv1d: linear layers are [in, out], as in Hugging Face."""
    rows = {**ours, "word_embeddings.weight": ours["word_embeddings.weight"][: config.vocab_size]}
    return {
        f"transformer.{openai_name(name)}": to_openai(value, name, config.num_attention_heads, transposed=conv1d)
        for name, value in rows.items()
    }


def load_peer_weights(model: nn.Module, ours: GPT2Model, config: ModelConfig, *, conv1d: bool) -> None:
    """Copy our weights into all parameters of a peer."""
    theirs = convert_to_peer(dict(ours.named_parameters()), config, conv1d=conv1d)
    parameters = dict(model.named_parameters())  # Tied parameters occur once.
    assert parameters.keys() == theirs.keys(), parameters.keys() ^ theirs.keys()
    with torch.no_grad():
        for name, parameter in parameters.items():
            rows = theirs[name].size(0)
            parameter[rows:].zero_()
            parameter[:rows].copy_(theirs[name])


@contextlib.contextmanager
def skip_initialization() -> Iterator[None]:
    """Disable torch's initializers: all weights are overwritten later, and drawing 1.5 billion is slow."""
    with contextlib.ExitStack() as stack:
        for name in ("normal_", "uniform_", "kaiming_uniform_", "trunc_normal_"):
            stack.enter_context(mock.patch(f"torch.nn.init.{name}", lambda tensor, *args, **kwargs: tensor))
        yield


def build_peer(
    kind: str, config: ModelConfig, ours: GPT2Model, *, nanogpt: str, padded: bool = True
) -> tuple[nn.Module, LossOf, int]:
    """Build a peer's model with the weights of `ours`. Return the model, the function that computes its loss from
    tokens and labels [b, s], and its vocabulary size.

    padded: True for nanoGPT's padded vocabulary. The extra rows, zero at first, are in the softmax.
    """
    with skip_initialization():
        model, loss_of, vocab = (
            build_huggingface(config) if kind == "huggingface" else build_nanogpt(config, nanogpt, padded)
        )
    load_peer_weights(model, ours, config, conv1d=kind == "huggingface")
    return model, loss_of, vocab


def build_huggingface(config: ModelConfig, **more: Any) -> tuple[nn.Module, LossOf, int]:
    """Build transformers' GPT-2 with the true vocabulary, scaled_dot_product_attention, and no cache.

    more: further settings of transformers' configuration.
    """
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
        # The model computes its own loss. shift_labels keeps the last label, which `labels` would drop.
        loss: Tensor = called(tokens, labels=labels, shift_labels=labels.contiguous()).loss
        return loss

    return GPT2LMHeadModel(GPT2Config(**{**settings, **more})), loss_of, config.vocab_size


def build_nanogpt(config: ModelConfig, folder: str, padded: bool) -> tuple[nn.Module, LossOf, int]:
    """Build nanoGPT's model from the checkout `folder`. nanoGPT's GELU is always the erf form."""
    vocab = config.vocab_size
    assert vocab is not None
    if padded:  # nanoGPT pads to a multiple of 64.
        vocab = NANOGPT_VOCAB if vocab == 50257 else -(-vocab // 64) * 64
    sys.path.insert(0, folder)
    try:
        theirs = importlib.import_module("model")
    finally:
        sys.path.remove(folder)
    assert Path(theirs.__file__ or "").resolve().parent == Path(folder).resolve(), "a different module is named model"
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
    """Make a fused AdamW with decay on matrices only.

    shipped: whether to return the optimizer of nanoGPT's `configure_optimizers` for a CPU.
    """
    if shipped:
        made: Any = model.configure_optimizers  # type: ignore[union-attr]
        optimizer: torch.optim.Optimizer = made(WEIGHT_DECAY, LR, BETAS, "cpu")
        return optimizer
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LR, betas=BETAS, fused=True)


def compare_with_peer(config: ModelConfig, device: str, kind: str, *, nanogpt: str) -> dict[str, float]:
    """Compare two layers of the given width with a peer, in fp32, with weights and biases of standard deviation 0.1 and
    the same tokens. nanoGPT gets the vocabulary without padding.

    Return the relative differences of loss and gradient norm, and the greatest difference of a gradient, relative to
    the largest entry of its tensor.
    """
    mpu.initialize_model_parallel(1)
    config = replace(config, num_layers=min(config.num_layers, 2), attention_dropout=0.0, hidden_dropout=0.0)
    assert config.vocab_size is not None
    generator = torch.Generator().manual_seed(0)
    ours = GPT2Model(config).train()
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            # The weights are large, so that loss and gradients depend on every layer. The weights of layer norms have
            # the mean 1.
            parameter.normal_(1.0 if name.endswith("layernorm.weight") else 0.0, 0.1, generator=generator)
            if name == "word_embeddings.weight":
                parameter[config.vocab_size :].zero_()
    model, loss_of, _ = build_peer(kind, config, ours, nanogpt=nanogpt, padded=False)
    text = torch.randint(0, config.vocab_size, (2, config.max_position_embeddings + 1), generator=generator).to(device)
    tokens, labels = text[:, :-1], text[:, 1:]
    weight = torch.full(labels.shape, 1 / labels.numel(), device=device)
    losses = ours.to(device)(tokens, labels, weight), loss_of(model.to(device).train(), tokens, labels)
    for loss in losses:
        loss.backward()
    mine, theirs = (
        {name: p.grad for name, p in each.named_parameters() if p.grad is not None} for each in (ours, model)
    )
    norm, their_norm = (torch.stack([g.double().norm() for g in of.values()]).norm() for of in (mine, theirs))
    expected = convert_to_peer(mine, config, conv1d=kind == "huggingface")
    return {
        "loss": abs(losses[1].item() / losses[0].item() - 1),
        "grad_norm": abs((their_norm / norm).item() - 1),
        "gradient": max(((theirs[name] - g).abs().max() / g.abs().max()).item() for name, g in expected.items()),
    }
