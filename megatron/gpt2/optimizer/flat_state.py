"""A part of a parameter, or of what the optimizer keeps of it, as it lies in a flat buffer."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class FlatState(NamedTuple):
    """Of the parameter `name`, as it lies in this rank's memory, the elements from `start` on: `values`, 1-D."""

    kind: str
    name: str
    values: Tensor
    start: int = 0
