"""A source whose tensors are made out of another program's: joined, permuted, transposed, cut, one at a time.

Legend: n heads, d head size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.gpt2.checkpoint.parsing import TensorInfo
from megatron.gpt2.checkpoint.reader import NamedTensors
from megatron.gpt2.config import ModelConfig
from mpu.partition import Box

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
GPT2_VOCABULARY = 50257
TRUE_VOCABULARY = "true_vocab_size"  # beside the arguments in our exports for Megatron, which does not read it
MAX_JSON_BYTES = 2 << 20  # ten times what the index of GPT-2's largest size needs


@dataclass(frozen=True)
class LazyTensor:
    """How a tensor comes about; `make` may return a view of the file."""

    info: TensorInfo
    make: Callable[[], Tensor]

    @staticmethod
    def of(tensor: Tensor, make: Callable[[], Tensor] | None = None) -> LazyTensor:
        """Of `tensor` itself, or of what `make` makes, in its type and shape."""
        return LazyTensor(TensorInfo(tensor.dtype, tuple(tensor.shape)), make or (lambda: tensor))

    def then(self, change: Callable[[Tensor], Tensor]) -> LazyTensor:
        """The tensor that `change` makes of this one."""
        before = torch.empty(self.info.shape, dtype=self.info.dtype, device="meta")
        return LazyTensor.of(change(before), lambda: change(self.make()))


class ForeignSource(NamedTensors):
    """A `megatron.gpt2.checkpoint.source.Source`. A tensor exists while it is read, as long as its reader keeps it.

    model: its vocab_size is the true one. facts: what else is known, in the terms of our manifest. lazy: by our
    names, in the shapes of `parameter_specs(model)`.
    """

    def __init__(self, path: Path, format: str, iteration: int, model: ModelConfig, facts: Mapping[str, Any],
                 lazy: Mapping[str, LazyTensor], left_out: Sequence[str] = ()) -> None:
        self.path, self.format, self.iteration, self.left_out = path, format, iteration, tuple(left_out)
        self.tensors = {name: tensor.info for name, tensor in lazy.items()}
        self._lazy = lazy
        config = {**facts.get("config", {}), "model": dataclasses.asdict(model)}
        self.facts = {"tokenizer": None, **facts, "config": config, "vocab_size": model.vocab_size,
                      "iteration": iteration}
        for name, info in self.tensors.items():
            if info.dtype not in FLOATS:
                raise ValueError(f"{path}: {name} is of {info.dtype}, which is no type of weights")

    def read_into(self, out: Tensor, name: str, offset: tuple[int, ...]) -> None:
        """Fill `out`, of any dtype and device, with the box of `name` at `offset`. ValueError where it is outside."""
        whole, box = self.tensors[name].shape, Box(offset, tuple(out.shape))
        if any(start < 0 or start + size > end for start, size, end in zip(box.offset, box.shape, whole, strict=True)):
            raise ValueError(f"{self.path}: {name} has shape {whole}, which does not contain {box}")
        out.copy_(self._lazy[name].make()[box.slices()])


def head_major(heads: int, version: int = 0) -> Callable[[Tensor], Tensor]:
    """The rows of a fused QKV weight or bias of n heads as [n, 3, d], from [3, n, d], or as Megatron's
    `checkpoint_version` 1 has them, [n, d, 3], or 2 and later, which are right."""
    if version == 0:
        return lambda x: x.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2)
    if version == 1:
        return lambda x: x.unflatten(0, (heads, -1, 3)).transpose(1, 2).flatten(0, 2)
    return lambda x: x


def first_rows(number: int) -> Callable[[Tensor], Tensor]:
    """The change that leaves the first `number` rows of a tensor: the vocabulary without its padding."""
    return lambda x: x[:number]


def whole_number(path: Path, name: str, value: Any) -> int:
    """`value`, which should be a size: ValueError unless it is a whole number from 1 to 2**31."""
    if type(value) is not int or not 0 < value <= 2**31:
        raise ValueError(f"{path}: {name} should be a whole number above 0, not {short_repr(value)}")
    return value


def short_repr(value: Any) -> str:
    """For a message. What is no plain value can be long, and shared parts of it as long as they are often."""
    plain = isinstance(value, (str, int, float, type(None)))
    return repr(value[:40] if isinstance(value, str) else value)[:60] if plain else f"a {type(value).__name__}"
