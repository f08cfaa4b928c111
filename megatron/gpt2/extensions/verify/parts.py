"""A part of a global tensor, as one rank holds it.

Legend: n samples of the global batch, s sequence, w width.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from mpu.partition import Box

SQUARED = "exp_avg_sq of "  # before the name of a parameter
# What is captured of a step, in the order in which a step makes it.
KINDS = ("input", "activation", "loss", "activation gradient", "gradient", "scalar", "moment", "master", "parameter")


class Key(NamedTuple):
    """Which tensor of a run: its step from 1 on, its kind, its place among those of its kind, and its name."""

    step: int
    kind: str
    place: int
    name: str

    @property
    def order(self) -> tuple[int, int, int, str]:
        """What sorts keys as a step makes the tensors."""
        return self.step, KINDS.index(self.kind), self.place, self.name


@dataclass(frozen=True)
class Part:
    """What this rank holds of the global tensor `key`.

    values: of the shape of `box`, any strides, any device. global_shape: activations are [n, s, w], the samples in
    the order of the global batch; parameters have their true shape; a number is [1].
    writes: whether this rank writes the part, where several ranks hold it. share: into how many equal shares the ranks
    divide the tensor; 0 where the shares are not equal.
    """

    key: Key
    values: Tensor
    box: Box
    global_shape: tuple[int, ...]
    writes: bool = True
    share: int = 0


def measured(key: Key, values: Tensor) -> Tensor:
    """What is measured of a tensor: of a second moment its root, which has the size of the gradients and so their
    rounding."""
    return values.sqrt() if key.name.startswith(SQUARED) else values
