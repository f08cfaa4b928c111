"""--profile START END: the trace, the table, and the spellings."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from pathlib import Path

import pytest

from megatron.gpt2.commands import pretrain_gpt2
from megatron.gpt2.config.arguments import parse
from tests.test_command_line import FLAGS, work  # noqa: F401


def events(path: Path) -> list[dict]:
    found = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert any(event.get("name") == "aten::mm" for event in found)
    return found


def steps_in(traced: list[dict]) -> int:
    return sum(event.get("name", "").startswith("ProfilerStep") for event in traced)


def test_trace_and_table(work: Path, capfd: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    flags = [*FLAGS, "--train-data", "text.txt", "--save", "run", "--eval-iters", "0", "--profile"]
    assert pretrain_gpt2.main([*flags, "3", "4", "--train-iters", "6"]) == 0
    said = capfd.readouterr().out
    traced = events(work / "run/profile_3-4_rank_0.json.gz")
    assert steps_in(traced) == 2
    table = said[said.index("the costliest operations of 2 iterations, by their own time on the cpu:") :].splitlines()
    rows = [re.fullmatch(r" +([\d.]+) +([\d.]+)% +([\d.]+)  (.+)", line) for line in table[2:17]]
    times, shares, calls, names = zip(*(row.groups() for row in rows), strict=True)
    assert list(map(float, times)) == sorted(map(float, times), reverse=True) and 50 < sum(map(float, shares)) < 101
    # Which operations are the costliest depends on the machine's load; how often each was called does not.
    called: Counter[str] = Counter()
    ends: dict[str, float] = {}  # an operation that calls itself by the same name is one
    for event in sorted(traced, key=lambda event: event.get("ts", 0.0)):
        if event.get("cat") == "cpu_op" and event["ts"] >= ends.get(event["name"], 0.0):
            called[event["name"]] += 1
            ends[event["name"]] = event["ts"] + event["dur"]
    assert called["aten::mm"] == 2 * 11  # four layers and the output: forward and both ways of backward
    of_table = {name: float(count) for name, count in zip(names, calls, strict=True) if name in called}
    assert len(of_table) > 5 and of_table == pytest.approx({name: called[name] / 2 for name in of_table}, abs=0.06)

    # A run that ends before the last iteration writes what it has; one that never comes there says so.
    assert pretrain_gpt2.main([*flags, "8", "20", "--train-iters", "30", "--exit-interval", "9"]) == 0
    assert steps_in(events(work / "run/profile_8-20_rank_0.json.gz")) == 2
    assert "the costliest operations of 2 iterations" in capfd.readouterr().out
    assert pretrain_gpt2.main([*flags, "1", "2", "--train-iters", "10"]) == 0
    assert "WARNING: --profile 1 2: this run goes from iteration 10 to 10" in capfd.readouterr().out
    assert len(list((work / "run").glob("*profile*"))) == 2


def test_spellings() -> None:
    assert parse(["--profile", "10", "20"]).config.train.profile == (10, 20)
    assert parse([]).config.train.profile == ()
    # Today's Megatron profiles the iterations after the start.
    assert parse(["--profile", "--use-pytorch-profiler"]).config.train.profile == (11, 12)
    today = parse(["--profile", "--profile-step-start", "4", "--profile-step-end", "6", "--profile-ranks", "0", "3"])
    assert today.config.train.profile == (5, 6) and today.config.train.profile_ranks == (0, 3)
    assert parse(["--profile-step-start", "4"]).config.train.profile == ()
    for wrong in (
        ["--profile", "5"],
        ["--profile", "5", "4"],
        ["--profile", "0", "4"],
        ["--profile", "--profile-step-start", "20"],
    ):
        with pytest.raises(ValueError, match="--profile takes the first iteration and the last"):
            _ = parse(wrong).config
    with pytest.raises(ValueError, match="--profile-step-start x"):
        parse(["--profile", "--profile-step-start", "x"])
