"""Test that layouts of 1 to 4 ranks have the same losses with dropout, for every pipeline schedule and micro-batch
size. The tied matrix must be equal on the first and the last stage. Evaluation and generation must work with stages."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from megatron.gpt2.generate.generation import GenerationRequest, generate
from megatron.gpt2.generate.sampling import SamplingParams
from megatron.gpt2.model.gpt2 import TIED_WEIGHT
from megatron.gpt2.optimizer.optimizer import MOMENTS
from megatron.gpt2.train.evaluate import evaluate
from megatron.gpt2.train.trainer import Trainer
from tests.distributed import run_ranks
from tests.megatron.gpt2.train.training_runs import finish, snapshot, start, steps, whole_weights, write_text

FLAGS = "--global-batch-size 8 --attention-dropout 0.1 --hidden-dropout 0.1 --hidden-size 64 --split 80,20"
SEQUENCE, SHARDED, ZERO_2 = "--sequence-parallel", "--use-distributed-optimizer", "--zero-stage 2"
FULL, SELECTIVE = "--recompute-granularity full", "--recompute-granularity selective"
ZERO_BUBBLE, TWO_CHUNKS = "--pipeline-schedule zero-bubble", "--num-virtual-stages-per-pipeline-rank 2"
SPLIT_INPUTS = "--partition-activations"


class LayoutCase(NamedTuple):
    """A layout: its tensor-, pipeline- and data-parallel sizes.

    micro: the micro-batch size.
    """

    tensor: int
    pipeline: int
    data: int
    micro: int
    flags: str = ""
    layers: int = 4

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def command(self) -> str:
        return (
            f"{FLAGS} --num-layers {self.layers} --model-parallel-size {self.tensor} --pipeline-model-parallel-size "
            f"{self.pipeline} --micro-batch-size {self.micro} {self.flags}"
        )


QUICK = [
    LayoutCase(1, 1, 1, 4, FULL),
    LayoutCase(1, 1, 2, 4, SHARDED),
    LayoutCase(1, 2, 1, 2),
    LayoutCase(1, 2, 1, 1, f"{TWO_CHUNKS} {FULL}"),
    LayoutCase(1, 2, 1, 2, ZERO_BUBBLE),
    LayoutCase(1, 2, 1, 8, TWO_CHUNKS, layers=6),
    LayoutCase(1, 3, 1, 2, ZERO_BUBBLE),
    LayoutCase(1, 3, 1, 1, "--decoder-first-pipeline-num-layers 1", layers=6),
    LayoutCase(2, 1, 1, 8, f"{FULL} {SPLIT_INPUTS} --recompute-num-layers 2"),
    LayoutCase(2, 1, 2, 4, f"{SEQUENCE} {SHARDED} {SELECTIVE}"),
    # The vocabulary of 257 ids is not divisible by 4 ranks.
    LayoutCase(4, 1, 1, 8, "--make-vocab-size-divisible-by 1"),
    LayoutCase(2, 2, 1, 2, f"{SEQUENCE} {ZERO_BUBBLE}"),
    LayoutCase(1, 2, 2, 1, f"{SHARDED} {TWO_CHUNKS}"),
    LayoutCase(1, 4, 1, 2),
]
# At commit 371f5f5, benchmarks/layouts.py has layouts of up to 8 ranks.
WIDE = [
    *(
        LayoutCase(tensor, 1, data, micro, flags)
        for tensor, data, micro, flags in (
            (1, 1, 2, ""),
            (2, 1, 8, SELECTIVE),
            (2, 1, 4, SEQUENCE),
            (1, 2, 1, FULL),
            (1, 2, 2, ZERO_2),
            (2, 2, 1, f"{ZERO_2} {FULL}"),
            (4, 1, 4, f"{SEQUENCE} {FULL}"),
        )
    ),
    *(
        LayoutCase(1, 2, 1, micro, f"{schedule} {more}", layers)
        for layers, micro, more in ((4, 1, FULL), (6, 2, ""), (6, 8, FULL), (4, 4, ""))
        for schedule in ("", TWO_CHUNKS, ZERO_BUBBLE)
    ),
    *(
        LayoutCase(tensor, pipeline, data, micro, f"{schedule} {more}", 6)
        for tensor, pipeline, data, micro, more in (
            (2, 2, 1, 2, f"{SEQUENCE} {FULL}"),
            (1, 2, 2, 1, SHARDED),
            (1, 4, 1, 1, ""),
        )
        for schedule in ("", TWO_CHUNKS, ZERO_BUBBLE)
        if not (schedule == TWO_CHUNKS and pipeline == 4)
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layouts")
    write_text(folder)
    return folder


def train(rank: int, world_size: int, folder: Path, layouts: list[LayoutCase], count: int) -> list[dict[str, Any]]:
    """Return for each layout the stage's initial weights, the losses and norms, and the result of `tied_state`."""
    found = []
    for number, layout in enumerate(layouts):
        trainer = start(rank, world_size, folder, f"{layout.command} --save {folder}/{world_size}_{number}")
        initial = whole_weights(trainer)
        seen = steps(trainer, count)
        tied = tied_state(trainer)
        finish(trainer)
        found.append({"initial": initial, "tied": tied, **seen})
    return found


def tied_state(trainer: Trainer) -> list[bool]:
    """Return whether the tied weight, its master and its moments are equal on the first and the last stage."""
    group, own = trainer.parallel.embedding_group, snapshot(trainer)
    if group is None:
        return []
    equal = []
    for name in (TIED_WEIGHT, f"master.{TIED_WEIGHT}", *(f"{moment}.{TIED_WEIGHT}" for moment in MOMENTS)):
        both = [torch.empty_like(own[name]) for _ in range(2)]
        dist.all_gather(both, own[name].contiguous(), group=group)
        equal.append(torch.equal(*both) and bool(both[0].any()))
    return equal


@pytest.fixture(scope="module")
def references(folder: Path) -> dict[int, dict[str, Any]]:
    """Return {number of layers: result of a run of one process}."""
    layouts = [LayoutCase(1, 1, 1, 8, layers=layers) for layers in (4, 6)]
    results = dict(zip((4, 6), run_ranks(train, 1, folder, layouts, 30)[0], strict=True))
    for result in results.values():
        assert result["loss"][0] - result["loss"][-1] >= 0.5, "the run must learn something, or equality shows nothing"
    return results


def assert_same(
    folder: Path,
    layouts: list[LayoutCase],
    references: dict[int, dict[str, Any]],
    count: int,
    train: Callable[..., list[dict[str, Any]]] = train,
) -> None:
    by_rank = run_ranks(train, layouts[0].world_size, folder, layouts, count, timeout=900)
    for layout, results in zip(layouts, map(list, zip(*by_rank, strict=True)), strict=True):
        reference, names = references[layout.layers], set()
        for result in results:
            names |= result["initial"].keys()
            for name, weight in result["initial"].items():
                assert torch.equal(weight, reference["initial"][name]), f"{layout}: initial {name}"
            assert result["loss"] == pytest.approx(reference["loss"][:count], rel=1e-5), layout
            assert result["norm"] == pytest.approx(reference["norm"][:count], rel=1e-4), layout
            assert all(result["tied"]), layout
        assert names == reference["initial"].keys()
        # Only the first and the last stage have a tied matrix.
        expected = 2 * layout.tensor * layout.data if layout.pipeline > 1 else 0
        assert sum(bool(result["tied"]) for result in results) == expected, layout


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_losses_do_not_depend_on_the_layout(folder: Path, references: dict[int, Any], world_size: int) -> None:
    assert_same(folder, [layout for layout in QUICK if layout.world_size == world_size], references, 10)


@pytest.mark.wide
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_losses_of_30_steps_over_all_layouts(folder: Path, references: dict[int, Any], world_size: int) -> None:
    layouts = [layout for layout in (*QUICK, *WIDE) if layout.world_size == world_size]
    assert_same(folder, layouts, references, 30)


def test_16_bit_losses_are_close(folder: Path, references: dict[int, Any]) -> None:
    """The bound of a loss is one unit roundoff (2^-9 for bf16, 2^-12 for fp16), because a loss averages over thousands
    of roundings. The bound of the norm is four times as large, because its errors do not average out."""
    roundoffs = {"bf16": 2**-9, "fp16": 2**-12}
    layouts = [LayoutCase(2, 1, 1, 8, f"--precision {name} --initial-loss-scale 1024") for name in roundoffs]
    losses, norms = references[4]["loss"][:10], references[4]["norm"][:10]
    for results in run_ranks(train, 2, folder, layouts, 10):
        for roundoff, result in zip(roundoffs.values(), results, strict=True):
            assert not any(result["skipped"])
            assert result["loss"] == pytest.approx(losses, rel=roundoff)
            assert result["norm"] == pytest.approx(norms, rel=4 * roundoff)
            assert result["loss"] != losses, "nothing was computed in 16 bits"


def evaluate_and_generate(rank: int, world_size: int, folder: Path, layouts: list[LayoutCase]) -> list[dict[str, Any]]:
    """Return the validation loss, greedy continuations and the scores of a prompt after two steps."""
    found = []
    for number, layout in enumerate(layouts):
        save = f"--save {folder}/read_{world_size}_{number}"
        trainer = start(rank, world_size, folder, f"{layout.command} --eval-iters 2 {save}")
        steps(trainer, 2)
        loss = evaluate(trainer, trainer.data.splits.valid, "valid", 12)
        trainer.state.param_gather.finish_param_sync()
        greedy = SamplingParams(temperature=0, max_new_tokens=40)
        texts = [GenerationRequest([5, 6, 7], greedy), GenerationRequest([9] * 11, greedy, score_prompt=True)]
        generate(trainer.state.model, trainer.data.tokenizer, texts)
        finish(trainer)
        found.append(
            {
                "loss": [loss.lm_loss, loss.bits_per_byte],
                "texts": [text.ids for text in texts],
                "prompt": [math.log(token.probability) for token in texts[1].prompt_tokens],
                "leads": trainer.parallel.model_parallel_rank == 0,
            }
        )
    return found


def test_evaluation_generation_and_scores_equal_one_rank(folder: Path) -> None:
    ((expected,),) = run_ranks(evaluate_and_generate, 1, folder, [LayoutCase(1, 1, 1, 2)])
    for world_size, layouts in (
        (2, [LayoutCase(1, 2, 1, 2), LayoutCase(1, 2, 1, 2, TWO_CHUNKS)]),
        (4, [LayoutCase(2, 2, 1, 2, SEQUENCE), LayoutCase(1, 2, 2, 2)]),
    ):
        by_rank = run_ranks(evaluate_and_generate, world_size, folder, layouts, timeout=200)
        for layout, results in zip(layouts, map(list, zip(*by_rank, strict=True)), strict=True):
            for result in results:
                assert result["loss"] == pytest.approx(expected["loss"], rel=1e-5), layout
            assert [r["texts"] for r in results if r["leads"]] == [expected["texts"]] * layout.data, layout
            for result in filter(operator.itemgetter("leads"), results):
                assert result["prompt"] == pytest.approx(expected["prompt"], abs=1e-5) and len(result["prompt"]) == 10
