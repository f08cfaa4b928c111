"""What a checkpoint of any format looks like to the rest of the program.

Every format is read into our own terms: our tensor names, QKV head-major, the true vocabulary's rows alone, global
tensors without ranks. So inspecting, comparing, converting and loading are written once, for all of them; our own
`Checkpoint` is a source as well.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from megatron.gpt2.checkpoint.parsing import TensorInfo


class Source(Protocol):
    """A checkpoint, opened for reading.

    path: the iteration's folder, or the file. format: as in `formats.FORMATS`. facts: what our manifest says of a run,
    as far as the source knows it; always there: "config" ({"model": {field of ModelConfig: value}} at least),
    "vocab_size", "iteration". left_out: what the source holds and this object does not, a line each.
    tensors: by our names, "model.<parameter>" and, where the source holds them, "master.", "exp_avg.", "exp_avg_sq.".
    """

    path: Path
    iteration: int
    facts: dict[str, Any]
    tensors: dict[str, TensorInfo]

    @property
    def format(self) -> str:
        """One of `formats.FORMATS`."""
        ...

    @property
    def left_out(self) -> Sequence[str]:
        """What the source holds and this object does not, a line each."""
        ...

    def names(self) -> list[str]:
        """All names, in the order of the source."""
        ...

    def global_shape(self, name: str) -> tuple[int, ...]:
        """The shape of the whole tensor, without padding."""
        ...

    def read(self, name: str, offset: tuple[int, ...] | None = None, shape: tuple[int, ...] | None = None) -> Tensor:
        """The box of `name` at `offset` with `shape` (default: the whole tensor): a new CPU tensor, dtype as saved."""
        ...

    def read_into(self, out: Tensor, name: str, offset: tuple[int, ...]) -> None:
        """Fill `out`, of any dtype and device, with the box of `name` that is at `offset` and has its shape."""
        ...
