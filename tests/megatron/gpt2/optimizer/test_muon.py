"""Test Muon: its update, equal training in every layout, its state in checkpoints and in the plan."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron.gpt2.optimizer import muon
from megatron.gpt2.optimizer.muon import MuonOptimizer, orthogonalize
from megatron.gpt2.train import train_state
from tests.distributed import run_ranks
from tests.megatron.gpt2.train import test_exact_layouts as exact
from tests.megatron.gpt2.train import test_layouts as layouts
from tests.megatron.gpt2.train.test_layouts import SEQUENCE, SHARDED, ZERO_2, ZERO_BUBBLE, LayoutCase
from tests.megatron.gpt2.train.training_runs import finish, snapshot, start, write_text

MUON = "--optimizer muon --lr 1e-3"
QUICK = [LayoutCase(2, 1, 1, 4, SEQUENCE), LayoutCase(1, 1, 2, 4, ZERO_2), LayoutCase(2, 1, 2, 2, SHARDED)]
MOVES = [LayoutCase(1, 1, 2, 1, SHARDED), LayoutCase(1, 2, 1, 1, ZERO_BUBBLE), LayoutCase(2, 1, 1, 1)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("muon")
    write_text(folder)
    return folder


def split_qkv(name: str, x: Tensor) -> list[Tensor]:
    """Return Q, K and V of [n 3 d, h], with their heads in reverse order."""
    return [x.view(4, 3, -1, 128)[:, i].flip(0).flatten(0, 1) for i in range(3)] if "query_key_value" in name else [x]


def test_update_is_that_of_torch(folder: Path) -> None:
    """The bound is 2 %, because torch.optim.Muon rounds to bf16 before it normalizes. A skipped step changes
    nothing."""
    trainer = start(0, 1, folder, f"{MUON} --precision bf16 --weight-decay 0.3 --clip-grad 0 --save {folder}/torch")
    before, draw = snapshot(trainer), torch.Generator().manual_seed(0)
    names = trainer.state.buffer.muon_params
    assert len(names) == 8
    parameters = trainer.state.buffer.parameters

    def masters(state: dict[str, Tensor]) -> list[Tensor]:
        """Return all matrices, with Q, K and V separate."""
        wholes = ((name, state[f"master.{name}"].view(parameters[name].shape)) for name in names)
        return [x for name, whole in wholes for x in split_qkv(name, whole)]

    def give_gradients(factor: float) -> None:
        for name, parameter in parameters.items():
            trainer.state.buffer.grad(name).copy_(factor * torch.randn(parameter.shape, generator=draw))

    theirs = [x.clone().requires_grad_() for x in masters(before)]
    torch_muon = torch.optim.Muon(theirs, lr=1e-3, weight_decay=0.3, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        give_gradients(1.0)
        grads = {f"master.{name}": trainer.state.buffer.grad(name).clone() for name in names}
        for x, grad in zip(theirs, masters(grads), strict=True):
            x.grad = grad
        torch_muon.step()
        trainer.state.optimizer.step()
    after = snapshot(trainer)
    for x, ours, initial in zip(theirs, masters(after), masters(before), strict=True):
        assert (ours - x.detach()).norm() < 0.02 * (x.detach() - initial).norm()
    give_gradients(torch.inf)
    trainer.state.optimizer.step()
    assert all(torch.equal(values, after[name]) for name, values in snapshot(trainer).items())
    finish(trainer)


def with_muon(cases: list[LayoutCase]) -> list[LayoutCase]:
    # h is 64, twice the base width.
    return [case._replace(flags=f"{case.flags} {MUON} --mup-base-width 32") for case in cases]


def train_in_batches(*arguments: Any) -> list[dict[str, Any]]:
    """Train as on a GPU, which orthogonalizes several matrices together. Here a batch has up to four of the largest
    matrices."""
    batches: list[int] = []

    def counted(x: Tensor, *others: Any) -> Tensor:
        batches.append(len(x))
        return orthogonalize(x, *others)

    limited = functools.partial(MuonOptimizer, batch_elements=4 * 64 * 256)
    with (
        mock.patch.object(train_state, "MuonOptimizer", lambda *others, **options: limited(*others)),
        mock.patch.object(muon, "orthogonalize", counted),
    ):
        found = layouts.train(*arguments)
    assert set(batches) == {2, 6}
    return found


@pytest.mark.parametrize(
    "cases, count, train",
    [
        (QUICK, 10, layouts.train),
        (QUICK[:2], 10, train_in_batches),
        pytest.param([*layouts.QUICK, *layouts.WIDE][::3], 30, layouts.train, marks=pytest.mark.wide),
    ],
    ids=["quick", "in batches", "wide"],
)
def test_losses_do_not_depend_on_the_layout(
    folder: Path, cases: list[LayoutCase], count: int, train: Callable[..., list[dict[str, Any]]]
) -> None:
    alone = with_muon([LayoutCase(1, 1, 1, 8, layers=layers) for layers in sorted({case.layers for case in cases})])
    results = run_ranks(layouts.train, 1, folder, alone, count)[0]
    references = {case.layers: result for case, result in zip(alone, results, strict=True)}
    for world_size in sorted({case.world_size for case in cases}):
        here = [case for case in cases if case.world_size == world_size]
        layouts.assert_same(folder, with_muon(here), references, count, train)


@pytest.mark.parametrize(
    "precision", [pytest.param("fp32", marks=pytest.mark.wide), pytest.param("bf16", marks=pytest.mark.slow)]
)
def test_no_bit_depends_on_the_layout(tmp_path: Path, precision: str) -> None:
    exact.assert_equal(tmp_path, [*exact.QUICK, *exact.WIDE], f"--precision {precision} {MUON}", 5)


def test_a_run_that_changes_its_layout_stays_bit_identical(tmp_path: Path) -> None:
    moves = list(zip(MOVES, (2, 1, 1), strict=True))
    flags = f"--precision bf16 --global-batch-size 4 --num-layers 2 {MUON} --mup-base-width 32"
    exact.assert_moves(tmp_path, moves, flags)


def test_adamw_does_not_continue_a_run_with_muon(folder: Path) -> None:
    """A checkpoint of Muon has no second moment of the matrices, which AdamW needs."""
    trainer = start(0, 1, folder, f"{MUON} --save {folder}/saved")
    trainer.checkpoints.save()
    finish(trainer)
    with pytest.raises(ValueError, match="holds no exp_avg_sq.* give the --optimizer that saved it"):
        start(0, 1, folder, f"--save {folder}/continued --lr 1e-3 --load {folder}/saved")
