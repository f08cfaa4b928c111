"""With --exact-layouts all layouts are bit-identical, with dropout: losses, norms, weights and Adam's state."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from megatron.gpt2.checkpoint.sharded_state import sharded_state_dict
from megatron.gpt2.model.gpt2 import parameter_specs
from megatron.gpt2.train.evaluate import evaluate
from megatron.gpt2.train.trainer import Trainer
from tests.distributed import run_ranks
from tests.megatron.gpt2.train.test_layouts import FULL, SELECTIVE, SEQUENCE, SHARDED, TWO_CHUNKS, ZERO_BUBBLE
from tests.megatron.gpt2.train.training_runs import finish, start, steps, write_text

FLAGS = (
    "--exact-layouts 4 --global-batch-size 12 --micro-batch-size 1 --attention-dropout 0.1 --hidden-dropout 0.1 "
    "--hidden-size 64 --num-layers 4 --split 80,20 --clip-grad 0.5"
)
FP16 = f"--precision fp16 --initial-loss-scale {2**21} --loss-scale-window 3"  # overflows at first


class ExactCase(NamedTuple):
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    flags: str = ""

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline * self.data

    def command(self, more: str) -> str:
        return (
            f"{FLAGS} {more} --model-parallel-size {self.tensor} --pipeline-model-parallel-size {self.pipeline} "
            f"{self.flags}"
        )


QUICK = [
    ExactCase(2, flags=SEQUENCE),
    ExactCase(data=2, flags=f"{SHARDED} {SELECTIVE}"),
    ExactCase(pipeline=2, flags=f"{ZERO_BUBBLE} {FULL}"),
    ExactCase(4, flags=f"{SEQUENCE} {SELECTIVE}"),
    ExactCase(data=3, flags=SHARDED),
]
WIDE = [
    ExactCase(flags=SELECTIVE),
    ExactCase(flags=FULL),
    ExactCase(2, flags=FULL),
    ExactCase(data=2),
    ExactCase(pipeline=2),
    ExactCase(4),
    ExactCase(1, 2, 2, SHARDED),
    ExactCase(2, 1, 2, f"{SEQUENCE} {SHARDED}"),
    ExactCase(2, 2, flags=TWO_CHUNKS),
    ExactCase(2, 2, flags=f"{SEQUENCE} {FULL}"),
    ExactCase(data=4, flags=SHARDED),
    ExactCase(1, 2, 3),
]  # and those of 8 ranks: 371f5f5:benchmarks/exact_layouts.py


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exact")
    write_text(folder)
    return folder


def train(
    rank: int, world_size: int, folder: str, layouts: list[ExactCase], precision: str, count: int
) -> list[dict[str, Any]]:
    """Return for each layout the losses, norms, validation loss, and this rank's part of weights and Adam's state."""
    found = []
    for number, layout in enumerate(layouts):
        trainer = start(rank, world_size, folder, f"{layout.command(precision)} --save {folder}/{world_size}_{number}")
        seen = steps(trainer, count)
        seen["evaluation"] = evaluate(trainer, trainer.data.splits.train, "train", 12).lm_loss
        found.append(seen | {"pieces": shards(trainer)})
        finish(trainer)
    return found


def continue_run(
    rank: int, world_size: int, folder: str, layout: ExactCase, precision: str, count: int, continues: bool
) -> dict[str, Any]:
    """Continue a run of other layouts for `count` steps in this layout, and save it."""
    save = f"--save {folder}/moved" + (f" --load {folder}/moved" if continues else "")
    trainer = start(rank, world_size, folder, f"{layout.command(precision)} {save}")
    seen = steps(trainer, count)
    trainer.save()
    found = seen | {"pieces": shards(trainer), "iteration": trainer.progress.iteration}
    finish(trainer)
    return found


def shards(trainer: Trainer) -> list[Any]:
    """Return this rank's shards of masters and moments as slices of global tensors."""
    trainer.state.param_gather.wait()
    size, rank = trainer.parallel.tensor_model_parallel_size, trainer.parallel.tensor_model_parallel_rank
    specs = parameter_specs(trainer.config.model, size)
    found = []
    for state in trainer.state.optimizer.state_shards():
        part = sharded_state_dict(
            [state], specs, mp_rank=rank if specs[state.name].dim is not None else 0, mp_size=size
        )
        found += [
            (state.kind, state.name, piece.global_shape, piece.global_offset, piece.data.clone())
            for piece in part.values()
        ]
    return found


def assemble_tensors(by_rank: list[dict[str, Any]]) -> dict[tuple[str, str], Tensor]:
    """Assemble the global tensors from the shards of all ranks. Shards of the same elements must be equal."""
    tensors: dict[tuple[str, str], Tensor] = {}
    for result in by_rank:
        for kind, name, shape, offset, values in result["pieces"]:
            tensor = tensors.setdefault((kind, name), torch.full(shape, torch.nan))
            piece = tensor[tuple(slice(o, o + n) for o, n in zip(offset, values.shape, strict=True))]
            assert piece.isnan().all() or torch.equal(piece, values), f"{kind} {name}: ranks differ"
            piece.copy_(values)
    assert not any(tensor.isnan().any() for tensor in tensors.values())
    return tensors


def assert_equal(folder: Path, layouts: list[ExactCase], precision: str, count: int) -> None:
    (one,) = run_ranks(train, 1, str(folder), [ExactCase()], precision, count)[0]
    learned = [loss for loss, skipped in zip(one["loss"], one["skipped"], strict=True) if not skipped]
    assert learned[0] > learned[-1] + 0.02, "the run must learn something, or equality shows nothing"
    assert (len(learned) < count) == (precision is FP16), "an overflow is a part of what must be equal"
    tensors = assemble_tensors([one])
    for world_size in sorted({layout.world_size for layout in layouts}):
        here = [layout for layout in layouts if layout.world_size == world_size]
        by_rank = run_ranks(train, world_size, str(folder), here, precision, count, timeout=480)
        for layout, results in zip(here, map(list, zip(*by_rank, strict=True)), strict=True):
            for said in ("loss", "norm", "scale", "skipped", "evaluation"):
                assert all(result[said] == one[said] for result in results), f"{layout}: {said}"
            found = assemble_tensors(results)
            assert found.keys() == tensors.keys()
            differing = [name for name, tensor in tensors.items() if not torch.equal(found[name], tensor)]
            assert not differing, f"{layout}: {differing}"


def test_no_bit_depends_on_the_layout(folder: Path) -> None:
    assert_equal(folder, QUICK, "--precision bf16 --global-batch-size 6 --num-layers 2", 3)


@pytest.mark.wide
@pytest.mark.parametrize(("precision", "layouts"), [("--precision fp32", WIDE), (FP16, QUICK)], ids=["fp32", "fp16"])
def test_no_bit_depends_on_more_layouts(folder: Path, precision: str, layouts: list[ExactCase]) -> None:
    """All of them in fp32 over 30 steps: `371f5f5:benchmarks/exact_layouts.py`."""
    assert_equal(folder, layouts, precision, 5)


@pytest.mark.wide
def test_a_run_that_changes_its_layout_stays_bit_identical(folder: Path) -> None:
    """The run is saved in one layout and continued in another, while the batch size grows."""
    precision = "--precision bf16 --rampup-batch-size 4 8 12"
    (one,) = run_ranks(train, 1, str(folder), [ExactCase()], precision, 9)[0]
    results: list[dict[str, Any]] = []
    seen: list[float] = []
    for layout, count in ((QUICK[3], 2), (QUICK[1], 3), (QUICK[2], 1), (ExactCase(flags=FULL), 3)):
        results = run_ranks(continue_run, layout.world_size, str(folder), layout, precision, count, bool(seen))
        seen += results[0]["loss"]
    assert seen == one["loss"]
    found, expected = assemble_tensors(results), assemble_tensors([one])
    assert [name for name, values in expected.items() if not torch.equal(found[name], values)] == []
