"""Timers on a CPU; and, without a GPU, the events of a GPU stood in for by a clock that finishes late."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from megatron.gpt2.monitor import timers as timers_module
from megatron.gpt2.monitor.timers import Timers


def test_mean_over_iterations_and_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()  # a second later at each look
    monkeypatch.setattr(timers_module, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    timers = Timers(torch.device("cpu"))
    for _ in range(4):
        with timers("forward"):
            pass
        next(clock)  # what is outside does not count
    first, second = timers.take_ms(iterations=2), timers.take_ms(iterations=1)
    assert first["forward"] == 2000.0  # four times a second over two iterations
    assert second["forward"] == 0.0


def test_line_in_megatrons_order() -> None:
    timers = Timers(torch.device("cpu"))
    for name in ("something new", "data loader", "backward", "forward"):
        with timers(name):
            pass
    names = [part.split(":")[0] for part in timers.line(1).split(" | ")]
    assert names == ["time (ms)", "forward", "backward", "data loader", "something new"]


def test_an_exception_passes_through() -> None:
    timers = Timers(torch.device("cpu"))
    with pytest.raises(KeyError), timers("forward"):
        raise KeyError
    assert timers.take_ms(1)["forward"] > 0


class LateEvent:
    """A CUDA event whose device is `LateEvent.done` records behind the host."""

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
    LateEvent.done = 4  # of 6 records: two intervals of one tick each
    assert timers.take_ms(1) == {"forward": 2.0}
    with timers("forward"):  # reuses a pair of events that was read
        pass
    LateEvent.done = 8
    assert timers.take_ms(1) == {"forward": 2.0}
    assert timers.take_ms(1) == {"forward": 0.0}
