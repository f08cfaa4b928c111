"""A call into C that takes its time."""

from __future__ import annotations

import ctypes
import time


def long_call(seconds: int = 30) -> None:
    """Waits in C, where Python handles no signal and other threads may run, as in an operation of torch that is large:
    for a mutex that is locked already."""
    mutex, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
    end = (ctypes.c_long * 2)(int(time.time()) + seconds, 0)  # a timespec
    for _ in range(2):
        libc.pthread_mutex_timedlock(mutex, end)
