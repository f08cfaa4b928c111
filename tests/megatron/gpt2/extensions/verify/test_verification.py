"""A run is compared with a trace of another layout: nothing is found where nothing is wrong, and each planted fault is
named."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron.gpt2.extensions.verify.operations import operation
from megatron.gpt2.extensions.verify.rounding import Rounding
from megatron.gpt2.extensions.verify.runs import compare, facts, record
from megatron.gpt2.extensions.verify.trace import Trace, merge
from megatron.gpt2.extensions.verify.verdict import Verdict, read_verdict
from megatron.gpt2.train.run import Run
from tests.distributed import run_ranks
from tests.megatron.gpt2.extensions.verify.planted_faults import FAULTS, OF_SEQUENCE, SHARDED, STAGES, TWO_PARTS
from tests.megatron.gpt2.train.training_runs import finish, start, write_text

TINY = [
    "--hidden-size",
    "32",
    "--seq-length",
    "16",
    "--global-batch-size",
    "4",
    "--hidden-dropout",
    "0.1",
    "--attention-dropout",
    "0.1",
]
STEPS = 2
CLEAN = {
    "split in two": TWO_PARTS,
    "sequence-parallel": (*OF_SEQUENCE, "--recompute-granularity", "selective"),
    "sharded": SHARDED,
    "two stages": STAGES,
    "accumulated, recomputed": ("--micro-batch-size", "1", "--recompute-granularity", "full"),
    "gradients in bf16": ("--micro-batch-size", "2", "--grad-reduce-in-bf16"),
    "torch's DDP": ("--micro-batch-size", "2", "--DDP-impl", "torch"),
}


def compared(
    rank: int,
    world_size: int,
    folder: str,
    name: str,
    flags: tuple[str, ...],
    plant: Callable[[Run, pytest.MonkeyPatch], None] | None = None,
) -> dict[str, Any]:
    """A run of two ranks beside the trace; what it found lies in a folder of its name. Returns the run's facts."""
    run = start(rank, world_size, folder, [*TINY, *flags, "--save", f"{folder}/run"])
    with pytest.MonkeyPatch.context() as patch:
        if plant:
            plant(run, patch)
        compare(run, STEPS, Trace(Path(folder, "trace")), Path(folder, name))
    finish(run)
    return facts(run, STEPS)


# Each layout once, and a fault of the forward pass, the backward pass, the reduction, the data and the optimizer.
COVERING = (
    "sequence-parallel",
    "sharded",
    "two stages",
    "accumulated, recomputed",
    "wrong QKV order",
    "position by local index",
    "gradient summed twice",
    "lost micro-batch",
    "stale parameter after a gather",
)
MORE = tuple({*CLEAN, *FAULTS} - {*COVERING})


def some_first(names: Iterable[str]) -> list[Any]:
    """The names as parameters; those of MORE are marked wide."""
    return [pytest.param(name, marks=[pytest.mark.wide] if name in MORE else []) for name in names]


def comparisons(rank: int, world_size: int, folder: str, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    found = {name: compared(rank, world_size, folder, name, CLEAN[name]) for name in names if name in CLEAN}
    return found | {
        name: compared(rank, world_size, folder, name, FAULTS[name].flags, FAULTS[name].plant)
        for name in names
        if name in FAULTS
    }


class Found:
    """By name the verdict of the comparison with one rank, and the facts of its run. Those of COVERING are made in one
    start of two ranks when the first is asked for, and so are those of MORE."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        write_text(folder)
        run = start(0, 1, str(folder), [*TINY, "--micro-batch-size", "4"])
        record(run, STEPS, folder / "trace")
        finish(run)
        merge(folder / "trace", 1, facts(run, STEPS))
        self._facts: dict[str, dict[str, Any]] = {}

    def __getitem__(self, name: str) -> tuple[Verdict, dict[str, Any]]:
        if name not in self._facts:
            group = COVERING if name in COVERING else MORE
            self._facts |= run_ranks(comparisons, 2, str(self._folder), group)[0]
        trace, of_run = Trace(self._folder / "trace"), self._facts[name]
        return read_verdict(
            self._folder / name, 2, trace, Rounding(trace, of_run), of_run["pipeline_parallel_size"]
        ), of_run


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return Found(tmp_path_factory.mktemp("verification"))


@pytest.mark.parametrize("name", some_first(CLEAN))
def test_nothing_is_found_in_another_layout(found: Found, name: str) -> None:
    verdict, _ = found[name]
    assert verdict.word == "within rounding" and verdict.left_out == 0
    assert len(verdict.worst) > 300 and verdict.computed.count > 100_000
    assert 0 < verdict.share_of_bound[0] < 0.5


@pytest.mark.parametrize("name", some_first(FAULTS))
def test_a_planted_fault_is_named(found: Found, name: str) -> None:
    (verdict, of_run), fault = found[name], FAULTS[name]
    first = verdict.findings[0]
    assert (first.row.key.step, first.row.key.name) == (fault.step, fault.tensor)
    assert fault.operation in operation(first.row.key, of_run)
    assert first.ranks == fault.ranks
