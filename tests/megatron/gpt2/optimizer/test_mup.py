"""With muP, sizes of activations do not depend on the width, and AdamW has a rate and an epsilon for each parameter.
test_muon.py tests muP in several layouts."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.megatron.gpt2.train.training_runs import finish, snapshot, start, steps, write_text

WIDTHS = (64, 256)
MUP = "--mup-base-width 64"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mup")
    write_text(folder)
    return folder


def sizes_after_steps(folder: Path, width: int, flags: str) -> dict[str, float]:
    """Return the root mean square of the outputs of branches, layers and head after five steps."""
    trainer = start(0, 1, folder, f"{flags} --hidden-size {width} --num-attention-heads {width // 16}")
    steps(trainer, 5)
    model, outputs = trainer.state.model.eval(), dict[str, Tensor]()
    for name, part in model.transformer.named_modules():
        if name.endswith(("attention", "mlp")) or name.rpartition(".")[2].isdecimal():
            part.register_forward_hook(lambda *call, name=name: outputs.update({name: call[-1]}))
    tokens = torch.tensor([list(b"the order of letters is a shape.")])
    outputs["logits"] = model.logits(model.hidden_states(tokens))
    finish(trainer)
    return {name: output.square().mean().sqrt().item() for name, output in outputs.items()}


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_activations_do_not_depend_on_the_width(folder: Path, optimizer: str) -> None:
    """The coordinate check of arXiv:2203.03466: without muP, activations grow with width ** 0.4 at least."""
    exponents = {}
    for flags in ("", MUP):
        small, large = (
            sizes_after_steps(folder, width, f"--optimizer {optimizer} --lr 4e-3 {flags} --save {folder}/sizes")
            for width in WIDTHS
        )
        exponents[flags] = [math.log(large[name] / small[name], WIDTHS[1] / WIDTHS[0]) for name in small]
    assert len(exponents[MUP]) == 7
    assert max(map(abs, exponents[MUP])) < 0.2 and min(exponents[""]) > 0.4, exponents


def test_weights_and_updates_are_those_of_parameter_groups(folder: Path) -> None:
    """torch's AdamW with a rate and an epsilon for each parameter makes the same updates. Initial weights are those
    without muP, multiplied by constant factors."""
    flags = "--lr 1e-3 --weight-decay 0.3 --clip-grad 0 --hidden-size 128"
    trainer = start(0, 1, folder, f"{flags} --save {folder}/usual")
    usual = snapshot(trainer)
    finish(trainer)
    trainer = start(0, 1, folder, f"{flags} {MUP} --save {folder}/groups")
    parameters, draw = trainer.state.buffer.parameters, torch.Generator().manual_seed(0)
    theirs, groups = {name: parameter.detach().clone().requires_grad_() for name, parameter in parameters.items()}, []
    for name, parameter in theirs.items():
        is_matrix, in_layers = parameter.dim() == 2, ".layers." in name
        is_norm = "final_layernorm" in name
        factor = 0.5 if is_norm else math.sqrt(0.5) if is_matrix and in_layers else 1.0
        assert torch.allclose(parameter, usual[name] * factor), name
        scale = 0.5 if is_norm or (is_matrix and in_layers) else 1.0
        decay = 0.3 if is_matrix else 0.0
        groups.append({"params": [parameter], "lr": 1e-3 * scale, "eps": 1e-8 * scale, "weight_decay": decay})
    adamw = torch.optim.AdamW(groups)
    for _ in range(3):
        for name, parameter in theirs.items():
            parameter.grad = 1e-7 * torch.randn(parameter.shape, generator=draw)
            trainer.state.buffer.grad(name).copy_(parameter.grad)
        adamw.step()
        trainer.state.optimizer.step()
    for name, parameter in parameters.items():
        assert torch.allclose(parameter, theirs[name], atol=1e-7), name
    finish(trainer)
