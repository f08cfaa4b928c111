"""Run verify, prove-order and preflight on each bug and harmless change of tests/zoo/bugs.py, and print the table of
docs/how-to/bug-zoo.md: python -m tests.zoo.score

prove-order runs in this process. If it finds nothing, `verify` and `preflight` run on two ranks.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from megatron.gpt2.config.arguments import parse
from megatron.gpt2.dist.ranks import RankInfo
from megatron.gpt2.extensions.preflight.command import run_checks
from megatron.gpt2.extensions.verify.command import RankReport
from megatron.gpt2.extensions.verify.compare import Comparison
from megatron.gpt2.extensions.verify.report import LayoutResult, LayoutSpec, explain_mismatch
from megatron.gpt2.extensions.verify.trace import TensorTrace, write_index
from tests.distributed import run_ranks
from tests.megatron.gpt2.extensions.order.test_order import story_of
from tests.megatron.gpt2.extensions.verify.test_verification import TINY, run_case
from tests.megatron.gpt2.train.training_runs import SMALL, write_text
from tests.zoo.bugs import BUGS, EOD_MASK, HARMLESS, Change, Patch

CHANGES = BUGS | HARMLESS


class Score(NamedTuple):
    """What a tool prints about a change, empty if the tool finds nothing."""

    tool: str
    finding: str


def run_flags(folder: Path, flags: str) -> str:
    return f"{TINY} {flags} --lr-decay-style linear --lr-decay-iters 20 --train-data {folder}/text.jsonl"


def trace_of(flags: str) -> str:
    """Return the name of the trace with which a run with `flags` is compared."""
    return "trace_eod" if EOD_MASK in flags else "trace"


def check_ranks(rank: int, world_size: int, folder: Path, names: Sequence[str]) -> dict[str, tuple[Score, RankReport]]:
    """Return {name of a change: (what `preflight` prints, this rank's report of `verify`)}."""
    found = {}
    for name in names:
        change = CHANGES[name]
        with Patch.context() as patch:
            if rank in change.ranks:
                change.plant(patch)
            words = f"--data-cache-path {folder}/cache --save {folder}/run {run_flags(folder, change.flags)}"
            arguments = parse([*SMALL, *words.split()])
            rows = run_checks(arguments, RankInfo(rank, world_size, rank, world_size))
            report = run_case(rank, world_size, folder, run_flags(folder, change.flags), trace=trace_of(change.flags))
        text = "\n".join(f"{row.name}: {row.text}" for row in rows if row.mark == "FIX")
        found[name] = Score("preflight", text), report
    return found


def prove(change: Change) -> Score:
    story = story_of(f"{change.flags} --global-batch-size 4", change.world_size, change.plant, change.ranks)
    return Score("prove-order", story)


def score(names: Sequence[str], folder: Path) -> dict[str, list[Score]]:
    """Run verify, prove-order and preflight on the changes `names`. Return {name of a change: scores of the tools}."""
    scores = {name: [prove(CHANGES[name])] for name in names}
    started = [name for name in names if not scores[name][0].finding]
    words = write_text(folder).read_text().split()
    texts = (" ".join(words[first : first + first // 40 % 40 + 1]) for first in range(0, len(words), 40))
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for mask in ("", EOD_MASK):
        flags = run_flags(folder, f"--micro-batch-size 4 {mask}")
        report = run_case(0, 1, folder, flags, records=True, trace=trace_of(mask))
        write_index(folder / trace_of(mask), report.metadata, [report.findings])
    ranks = run_ranks(check_ranks, 2, folder, started, timeout=1800) if started else []
    for name in started:
        flags = CHANGES[name].flags
        preflight, report = ranks[0][name]
        comparison = Comparison([rank[name][1].findings for rank in ranks], TensorTrace(folder / trace_of(flags)))
        result = LayoutResult(LayoutSpec(flags, (), 2, 4), report.metadata, comparison)
        text = "\n".join(explain_mismatch(result)) if comparison.mismatches else ""
        scores[name] += [Score("verify", text), preflight]
    return scores


def tools_that_name(name: str, scores: Sequence[Score]) -> list[str]:
    """Return the tools that print where the bug `name` is, or, for a harmless change, that print anything."""
    named = CHANGES[name].named
    return [tool for tool, text in scores if text and (f", {named} (" if named and tool == "verify" else named) in text]


def main() -> None:
    """Print the table of docs/how-to/bug-zoo.md in Markdown, and below it what the tools print about each change."""
    with tempfile.TemporaryDirectory() as folder:
        found = score([*CHANGES], Path(folder))
    print("|bug|source|found by|\n|---|---|---|")
    for name, scores in found.items():
        print(f"|{name}|{CHANGES[name].source}|{', '.join(tools_that_name(name, scores))}|")
    for name, scores in found.items():
        for tool, finding in scores:
            print(f"\n{name}: {tool}\n{finding}")


if __name__ == "__main__":
    main()
