"""tools/verify.py accepts correct layouts and names each planted fault."""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron.gpt2.extensions.verify.command import RankReport, RankTask, capture_steps, main
from megatron.gpt2.extensions.verify.compare import Comparison
from megatron.gpt2.extensions.verify.report import producing_operation
from megatron.gpt2.extensions.verify.trace import TensorTrace, write_index
from megatron.gpt2.train.trainer import Trainer
from tests.distributed import run_ranks
from tests.megatron.gpt2.extensions.verify.planted_faults import (
    FAULTS,
    SEQUENCE_PARALLEL,
    SHARDED,
    STAGES,
    TENSOR_PARALLEL,
)
from tests.megatron.gpt2.train.training_runs import SMALL, finish, start, write_text

TINY = "--hidden-size 32 --seq-length 16 --global-batch-size 4 --hidden-dropout 0.1 --attention-dropout 0.1"
STEPS = 2
CLEAN = {
    "split in two": TENSOR_PARALLEL,
    "sequence-parallel": SEQUENCE_PARALLEL + " --recompute-granularity selective",
    "sharded": SHARDED,
    "two stages": STAGES,
    "accumulated, recomputed": "--micro-batch-size 1 --recompute-granularity full",
    "gradients in bf16": "--micro-batch-size 2 --grad-reduce-in-bf16",
}


def run_case(
    rank: int,
    world_size: int,
    folder: Path,
    flags: str,
    plant: Callable[[Trainer, pytest.MonkeyPatch], None] | None = None,
    *,
    records: bool = False,
    trace: str = "trace",
) -> RankReport:
    """Return a rank's report of a run that is compared with the trace or, with `records`, recorded as the trace."""
    trainer = start(rank, world_size, folder, f"{TINY} {flags} --save {folder}/run")
    with pytest.MonkeyPatch.context() as patch:
        if plant:
            plant(trainer, patch)
        report = capture_steps(trainer, RankTask(folder / trace, folder, STEPS, records))
    finish(trainer)
    return report


CASES = {name: (flags, None) for name, flags in CLEAN.items()} | {
    name: (fault.flags, fault.plant) for name, fault in FAULTS.items()
}
# The cases of the default run are some layouts, and faults in forward, backward, reduction, data and optimizer.
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
WIDE = tuple(CASES.keys() - {*COVERING})


def mark_wide(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.wide if name in WIDE else ()) for name in names]


def run_cases(rank: int, world_size: int, folder: Path, names: Sequence[str]) -> dict[str, RankReport]:
    return {name: run_case(rank, world_size, folder, *CASES[name]) for name in names}


Compare = Callable[[str], tuple[Comparison, dict[str, Any]]]


@pytest.fixture(scope="module")
def compare(tmp_path_factory: pytest.TempPathFactory) -> Compare:
    """Return a function that compares a case with the trace of a run on one rank, and returns the comparison and the
    metadata of the case's run. To save time, two ranks run all cases of COVERING, or of WIDE, after one start."""
    folder = tmp_path_factory.mktemp("verification")
    write_text(folder)
    report = run_case(0, 1, folder, "--micro-batch-size 4", records=True)
    write_index(folder / "trace", report.metadata, [report.findings])
    run = functools.cache(functools.partial(run_ranks, run_cases, 2, folder))

    def compare(name: str) -> tuple[Comparison, dict[str, Any]]:
        reports = [of_rank[name] for of_rank in run(COVERING if name in COVERING else WIDE)]
        return Comparison([each.findings for each in reports], TensorTrace(folder / "trace")), reports[0].metadata

    return compare


@pytest.mark.parametrize("name", mark_wide(CLEAN))
def test_a_correct_layout_is_accepted(compare: Compare, name: str):
    comparison, _ = compare(name)
    assert comparison.verdict == "within rounding"
    assert len(comparison.tensors) > 300 and comparison.total.count > 100_000
    assert 0 < comparison.bound_fraction < 0.5


@pytest.mark.parametrize("name", mark_wide(FAULTS))
def test_a_planted_fault_is_named(compare: Compare, name: str):
    (comparison, run_metadata), fault = compare(name), FAULTS[name]
    entry, found = comparison.mismatches[0]
    assert (entry.key.step, entry.key.name) == (fault.step, fault.tensor)
    assert fault.operation in producing_operation(entry.key, run_metadata)
    assert tuple(found.ranks) == fault.ranks
    assert found.factor == (pytest.approx(2.0) if name == "gradient summed twice" else found.factor)


SPLIT = "--model-parallel-size 2 --sequence-parallel"


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("verify")
    data_flags = ["--train-data", str(write_text(folder)), "--data-cache-path", str(folder / "cache")]
    return ["--", *SMALL, *"--hidden-size 32 --seq-length 16 --micro-batch-size 2".split(), *data_flags]


def test_a_saved_trace_is_compared_with(command: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """A run with --dropout-rng torch differs, because torch's dropout masks depend on the layout."""
    trace, page, command = tmp_path / "trace", tmp_path / "page.html", [*command, "--hidden-dropout", "0.1"]
    assert main(["--layout", "", "--save-trace", str(trace), "--steps", "1", *command]) == 0
    other = f"{SPLIT} --dropout-rng torch"
    against = ["--against", str(trace), "--layout", "", "--layout", other, "--html", str(page)]
    assert main([*against, *command]) == 1
    output = capfd.readouterr().out
    assert re.search(
        r"\nranks .*\n +1  equal to the bit +100.0% +0 +0 +0 +0  \(no flags\)\n"
        rf" +2  DIFFERS .*  {other}\n(?s:.*)\n{other}: the first difference is in step 1, embeddings "
        r"\(activation\), on ranks 0-1\n"
        r"    by [\d.e+]+ units of roundoff \(rounding explains \d+\): at sample \d, position \d+, "
        r"channel \d+ it is \S+ instead of \S+\n    made by the reduce-scatter of the word embeddings, .* or dropout, "
        r"forward\n    \d+ of \d+ tensors differ by more than rounding; those before this one do not\n",
        output,
    )
    assert page.read_text().count('"alarm">DIFFERS<') == 1
    with pytest.raises(SystemExit, match="2"):
        main(["--against", str(trace), "--layout", "", *command, "--init-method-std", "0.03"])
    refused = "error: the trace is of a different run: --init-method-std is 0.02 in the trace and 0.03 here"
    assert capfd.readouterr().err.strip() == refused


@pytest.mark.parametrize(
    "flags, message",
    {
        "": "give at least two layouts to compare",
        "--layout '--global-batch-size 8'": "its --global-batch-size is 8, and that of the first layout 2",
        "--layout '--nproc-per-node 3 --model-parallel-size 2'": "--nproc-per-node 3 is not divisible by the model-",
        "--against nowhere": "nowhere holds no trace: --save-trace writes one",
    }.items(),
)
def test_bad_input_is_one_line(command: list[str], flags: str, message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        main(["--layout", "", *shlex.split(flags), *command])
