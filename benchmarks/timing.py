"""How long calls take: on a GPU by events on the device's own clock, on a CPU by the host's."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

WARM_UP = 3  # calls of `milliseconds` that are not timed


def call_seconds(work: Callable[[], Any], device: torch.device, count: int) -> list[float]:
    """Seconds of each of `count` calls. On a GPU they follow each other without a wait between, and end with one."""
    if device.type == "cuda":
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        events[0].record()
        for event in events[1:]:
            work()
            event.record()
        torch.cuda.synchronize(device)
        return [a.elapsed_time(b) / 1000 for a, b in zip(events, events[1:], strict=False)]
    seconds = []
    for _ in range(count):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return seconds


def milliseconds(work: Callable[[], Any], device: torch.device, count: int) -> float:
    """The median of `count` calls in milliseconds, after `WARM_UP` others."""
    for _ in range(WARM_UP):
        work()
    return 1000 * sorted(call_seconds(work, device, count))[count // 2]
