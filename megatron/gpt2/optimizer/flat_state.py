"""A part of a parameter, or of what the optimizer keeps of it, as it lies in a flat buffer."""

from typing import NamedTuple

from torch import Tensor


class FlatState(NamedTuple):
    """A part of the parameter `name`, or of one of its moments, as this rank holds it.

    kind: "master" or the name of a moment. values: 1-D, the elements from `start` on of the flattened parameter.
    """

    kind: str
    name: str
    values: Tensor
    start: int = 0
