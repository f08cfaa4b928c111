"""Test timers on a CPU, device timers with a fake event that completes late, and --profile."""

from __future__ import annotations

import gzip
import itertools
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron.gpt2.commands import pretrain_gpt2
from megatron.gpt2.config.arguments import parse
from megatron.gpt2.monitor import timers as timers_module
from megatron.gpt2.monitor.timers import Timers
from tests.test_command_line import FLAGS, work  # noqa: F401


def test_means_over_iterations_in_megatrons_order(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()  # Each read is one second later.
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
    assert timers.take_ms(iterations=1)["forward"] == 0.0


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
    LateEvent.done = 4  # Of 6 events, these are two intervals of one tick each.
    assert timers.take_ms(1) == {"forward": 2.0}
    with timers("forward"):  # The timer uses a pair of events again.
        pass
    LateEvent.done = 8
    assert timers.take_ms(1) == {"forward": 2.0}
    assert timers.take_ms(1) == {"forward": 0.0}


def steps_in(path: Path) -> int:
    names = [event.get("name", "") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]]
    assert "aten::mm" in names
    return sum(name.startswith("ProfilerStep") for name in names)


def test_profile(work: Path, capfd: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    flags = [*FLAGS, *"--train-data text.txt --save run --eval-iters 0 --profile".split()]
    assert pretrain_gpt2.main([*flags, "3", "4", "--train-iters", "6"]) == 0
    said = capfd.readouterr().out
    assert steps_in(work / "run/profile_3-4_rank_0.json.gz") == 2
    table = said[said.index("the slowest operations of 2 iterations, by self time on the cpu:") :]
    # The slowest operations depend on the load of the machine, but the number of calls does not.
    calls = dict(re.findall(r"^ *(aten::\S+) .* (\d+) *$", table, re.MULTILINE))
    assert calls["aten::mm"] == str(2 * 11)  # There are four layers and the output, in forward and backward.

    # A run that stops before the last profiled iteration writes a shorter trace. One that stops before the first prints
    # a warning.
    assert pretrain_gpt2.main([*flags, *"8 20 --train-iters 30 --exit-interval 9".split()]) == 0
    # The trace has two iterations, and the time until the stop.
    assert steps_in(work / "run/profile_8-20_rank_0.json.gz") == 3
    assert "the slowest operations of 2 iterations" in capfd.readouterr().out
    assert pretrain_gpt2.main([*flags, "1", "2", "--train-iters", "10"]) == 0
    assert "WARNING: --profile 1 2: this run has only iterations 10 to 10" in capfd.readouterr().out
    assert len(list((work / "run").glob("*profile*"))) == 2


@pytest.mark.parametrize(
    "flags, profile",
    {
        "": (),
        "--profile 10 20": (10, 20),
        # Today's Megatron profiles the iterations after the start.
        "--profile --use-pytorch-profiler": (11, 12),
        "--profile --profile-step-start 4 --profile-step-end 6 --profile-ranks 0 3": (5, 6),
        "--profile-step-start 4": (),
    }.items(),
)
def test_flags_of_the_profiler(flags: str, profile: tuple[int, ...]) -> None:
    train = parse(flags.split()).config.train
    assert train.profile == profile and train.profile_ranks == ((0, 3) if "ranks" in flags else (0,))


@pytest.mark.parametrize(
    "flags, message",
    [
        *(
            (flags, "--profile takes the first iteration and the last")
            for flags in ("--profile 5", "--profile 5 4", "--profile 0 4", "--profile --profile-step-start 20")
        ),
        ("--profile --profile-step-start x", "--profile-step-start x"),
    ],
)
def test_errors_of_profile(flags: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _ = parse(flags.split()).config
