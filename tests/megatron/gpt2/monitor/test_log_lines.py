"""Test log lines in Megatron's format, the records of a resumed run, the loss plot without matplotlib, the timers of a
CPU and a GPU (with fake events), and --profile."""

from __future__ import annotations

import gzip
import itertools
import json
import math
import re
import resource
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.gpt2.commands import pretrain_gpt2
from megatron.gpt2.monitor import log_lines
from megatron.gpt2.monitor import timers as timers_module
from megatron.gpt2.monitor.incidents import IncidentLog, rank_file_name, read_incidents
from megatron.gpt2.monitor.log_lines import EvaluationRecord, IterationRecord
from megatron.gpt2.monitor.run_log import RunLog
from megatron.gpt2.monitor.timers import Timers
from tests.test_command_line import FLAGS


def record(iteration: int = 100, **changes: Any) -> IterationRecord:
    values = {
        "consumed_samples": 800,
        "lm_loss": 8.969456,
        "learning_rate": 3.937e-6,
        "loss_scale": 131072.0,
        "grad_norm": 1.234,
        "ms_per_iteration": 920.7,
        "tokens_per_second": 12345.0,
        "mfu": 0.234,
        "memory_bytes": 1 << 30,
    }
    return IterationRecord(iteration, **{**values, **changes})


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_evaluation_of_a_run_that_has_diverged() -> None:
    evaluation = EvaluationRecord(1000, "valid", 1e6, 1.5)
    frame, line, same = log_lines.evaluation_line(evaluation).split("\n")
    assert line == "validation loss at iteration 1000 | LM loss: 1.000000E+06 | LM PPL: INF | bits per byte: 1.5000"
    assert frame == same == "-" * len(line)


def test_metrics_have_one_record_per_line_and_no_nan(tmp_path: Path) -> None:
    log = RunLog(tmp_path, train_iters=10)
    log.record(record(10, grad_norm=math.nan))
    log.record(EvaluationRecord(10, "valid", 0.0, 1.5))
    # Each line is flushed, so a crash loses nothing.
    assert read(tmp_path / "metrics.jsonl") == [
        {**asdict(record(10)), "grad_norm": None},
        {"iteration": 10, "split": "valid", "lm_loss": 0.0, "bits_per_byte": 1.5, "ppl": 1.0},
    ]
    log.close()


def write_run(folder: Path) -> RunLog:
    log = RunLog(folder, train_iters=100)
    for iteration in range(10, 101, 10):
        log.record(record(iteration, lm_loss=8.0 - iteration / 20))
    log.record(EvaluationRecord(100, "valid", 3.5))
    return log


def test_a_full_disk_loses_only_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = write_run(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        log.record(record(110))
        log.sample("a text")
        log.note("a note")
        assert log.close() == ""
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert capsys.readouterr().out.splitlines() == [
        f"WARNING: {line}: File too large"
        for line in (
            "metrics.jsonl will lack lines from now on",
            "report.html was not written",
            "loss.png was not written",
        )
    ]
    assert len(read(tmp_path / "metrics.jsonl")) == 11


def test_a_new_run_in_an_old_folder_renames_the_old_records(tmp_path: Path) -> None:
    runs = {".old-1": "one", ".old-2": "two", "": "three"}
    for text in runs.values():
        log = RunLog(tmp_path, train_iters=30)
        log.info(f"WARNING: {text}")
        log.info("not in the history")
        log.sample(text)
        log.record(record())
        log.close()
        assert log.close() == ""
    for end, text in runs.items():
        assert len(read(tmp_path / f"metrics.jsonl{end}")) == 1
        assert [line["text"] for line in read(tmp_path / f"history.jsonl{end}")] == [f"WARNING: {text}"]
        assert [line["text"] for line in read(tmp_path / f"samples.jsonl{end}")] == [text]


def test_text_curve_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    title, first, *_, last, _, axis = write_run(tmp_path).close("a run").split("\n")
    assert title == "a run" and axis.split() == ["10", "to", "100", "iterations"]
    # The first row has the highest loss, which is that of iteration 10, and the last row has the lowest loss.
    assert first.startswith("    7.500 |*") and last.startswith("    3.000 |") and last.endswith("*")
    assert not (tmp_path / "loss.png").exists()


def test_incidents_that_cannot_be_written_do_not_end_a_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    IncidentLog(tmp_path / "file", rank_file_name(0)).note("start")
    assert read_incidents(tmp_path / "file") == []


def test_means_over_iterations_in_megatrons_order(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()  # Each call of the clock returns one second more.
    monkeypatch.setattr(timers_module, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    timers = Timers(torch.device("cpu"))
    for name in ("something new", "data loader", "backward", "forward"):
        for _ in range(4):
            with timers(name):
                pass
            next(clock)  # Time outside of timers is not counted.
    with pytest.raises(KeyError), timers("forward"):
        raise KeyError
    assert timers.line(iterations=2) == (
        "time (ms) | forward: 2500.00 | backward: 2000.00 | data loader: 2000.00 | something new: 2000.00"
    )


class LateEvent:
    """A fake CUDA event: only the first `LateEvent.done` recorded events are complete."""

    recorded, done = 0, 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        LateEvent.recorded += 1
        self.at = LateEvent.recorded

    def query(self) -> bool:
        return self.at <= LateEvent.done

    def synchronize(self) -> None:
        raise AssertionError("a timer waited for the device")

    def elapsed_time(self, other: LateEvent) -> float:
        assert self.query() and other.query(), "read before the device came there"
        return float(other.at - self.at)


def test_device_events_are_read_only_when_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", LateEvent)
    timers = Timers(torch.device("cuda"))
    for _ in range(3):
        with timers("forward"):
            pass
    LateEvent.done = 4  # Four of six events are complete: two intervals of 1 ms.
    assert timers.take_ms(1) == {"forward": 2.0}
    with timers("forward"):  # The timer records the completed event objects again.
        pass
    LateEvent.done = 8
    assert timers.take_ms(1) == {"forward": 2.0}
    assert timers.take_ms(1) == {"forward": 0.0}


def steps_in(path: Path) -> int:
    names = [event.get("name", "") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]]
    assert "aten::mm" in names
    return sum(name.startswith("ProfilerStep") for name in names)


def test_profile(work: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flags = [*FLAGS, *"--train-data text.txt --save run --eval-iters 0 --profile".split()]
    assert pretrain_gpt2.main([*flags, "3", "4", "--train-iters", "6"]) == 0
    said = capfd.readouterr().out
    assert steps_in(work / "run/profile_3-4_rank_0.json.gz") == 2
    table = said[said.index("the slowest operations of 2 iterations, by self time on the cpu:") :]
    # The slowest operations depend on the load of the machine, but the number of calls does not.
    calls = dict(re.findall(r"^ *(aten::\S+) .* (\d+) *$", table, re.MULTILINE))
    assert calls["aten::mm"] == str(2 * 11)  # Two iterations, each with 11 products in forward and backward.

    # A run that stops before the last profiled iteration writes a shorter trace.
    assert pretrain_gpt2.main([*flags, *"8 20 --train-iters 30 --exit-interval 9".split()]) == 0
    # The third step of the trace is the time between the last iteration and the stop.
    assert steps_in(work / "run/profile_8-20_rank_0.json.gz") == 3
    assert "the slowest operations of 2 iterations" in capfd.readouterr().out
