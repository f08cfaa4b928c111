"""A source whose tensors are made from another program's: joined, permuted, transposed or cut, one at a time.

Legend: n heads, d head size.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.gpt2.checkpoint.source import Source, TensorInfo
from megatron.gpt2.config import ModelConfig, require
from mpu.partition import Box

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
GPT2_VOCABULARY = 50257
TRUE_VOCABULARY = "true_vocab_size"  # beside the arguments in our exports for Megatron, which does not read it
MAX_JSON_BYTES = 2 << 20  # ten times what the index of GPT-2's largest size needs


@dataclass(frozen=True)
class Hints:
    """What a user says about a checkpoint that does not say it itself, each a flag of tools/checkpoint.py. None: not
    given."""

    num_attention_heads: int | None = None
    vocab_size: int | None = None  # true, without padding
    gelu: str | None = None
    iteration: int | None = None  # which one of a folder that holds several


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is made when it is read. info: its dtype and shape. make: returns it; it may be a view of the file."""

    info: TensorInfo
    make: Callable[[], Tensor]

    @staticmethod
    def of(tensor: Tensor, make: Callable[[], Tensor] | None = None) -> LazyTensor:
        """`tensor` itself, or what `make` returns in the dtype and shape of `tensor`, which may then be on the meta
        device."""
        return LazyTensor(TensorInfo(tensor.dtype, tuple(tensor.shape)), make or (lambda: tensor))

    def then(self, change: Callable[[Tensor], Tensor]) -> LazyTensor:
        """The tensor that `change` makes of this one."""
        before = torch.empty(self.info.shape, dtype=self.info.dtype, device="meta")
        return LazyTensor.of(change(before), lambda: change(self.make()))


class ForeignSource(Source):
    """A checkpoint of another program as a `Source`. A tensor is in memory only while its reader keeps it.

    model: with the true vocabulary size. facts: what else is known, with the names of our manifest. lazy: by our names,
    in the shapes of `parameter_specs(model)`. left_out: a line for each thing that the files hold and this source does
    not. ValueError for a tensor that is no floating-point one.
    """

    def __init__(
        self,
        path: Path,
        format: str,
        iteration: int,
        model: ModelConfig,
        facts: Mapping[str, Any],
        lazy: Mapping[str, LazyTensor],
        left_out: Sequence[str] = (),
    ) -> None:
        self.path, self.format, self.iteration, self.left_out = path, format, iteration, tuple(left_out)
        self.tensors = {name: tensor.info for name, tensor in lazy.items()}
        self._lazy = lazy
        config = {**facts.get("config", {}), "model": dataclasses.asdict(model)}
        self.facts = {
            "tokenizer": None,
            **facts,
            "config": config,
            "vocab_size": model.vocab_size,
            "iteration": iteration,
        }
        for name, info in self.tensors.items():
            require(info.dtype in FLOATS, f"{path}: {name} is of {info.dtype}, which is no type of weights")

    def read_into(self, out: Tensor, name: str, offset: tuple[int, ...]) -> None:
        """Fill `out`, of any dtype and device, with the box of `name` at `offset`. ValueError where it is outside."""
        whole, box = self.tensors[name].shape, Box(offset, tuple(out.shape))
        if any(start < 0 or start + size > end for start, size, end in zip(box.offset, box.shape, whole, strict=True)):
            raise ValueError(f"{self.path}: {name} has shape {whole}, which does not contain {box}")
        out.copy_(self._lazy[name].make()[box.slices()])


def head_major(heads: int, version: int = 0) -> Callable[[Tensor], Tensor]:
    """The change that puts the rows of a fused QKV weight or bias into our order, [n, 3, d].

    version: Megatron's `checkpoint_version`. 0 has [3, n, d], 1 has [n, d, 3], 2 and later have our order.
    """
    if version == 0:
        return lambda x: x.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2)
    if version == 1:
        return lambda x: x.unflatten(0, (heads, -1, 3)).transpose(1, 2).flatten(0, 2)
    return lambda x: x


def by_part(heads: int) -> Callable[[Tensor], Tensor]:
    """The change that puts rows in our order, [n, 3, d], into that of 2019's Megatron and of OpenAI, [3, n, d]."""
    return lambda x: x.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)


def renamed(name: str, modules: Mapping[str, str], layers: str, layer_modules: Mapping[str, str]) -> str:
    """Our parameter `name` under another program's names of the modules, those of the layers below `layers`."""
    module, _, kind = name.rpartition(".")
    if layer := re.fullmatch(r"transformer\.layers\.(\d+)\.(.+)", module):
        return f"{layers}.{layer[1]}.{layer_modules[layer[2]]}.{kind}"
    return f"{modules[module]}.{kind}"


def first_rows(number: int) -> Callable[[Tensor], Tensor]:
    """The change that leaves the first `number` rows of a tensor: the vocabulary without its padding."""
    return lambda x: x[:number]


def whole_number(path: Path, name: str, value: Any) -> int:
    """`value`, which should be a size: ValueError unless it is a whole number from 1 to 2**31."""
    if type(value) is not int or not 0 < value <= 2**31:
        raise ValueError(f"{path}: {name} should be a whole number above 0, not {short_repr(value)}")
    return value


def short_repr(value: Any) -> str:
    """`value` for a message. Only a plain value is shown: another one can be long, and one part of it can be in it many
    times."""
    plain = isinstance(value, (str, int, float, type(None)))
    return repr(value[:40] if isinstance(value, str) else value)[:60] if plain else f"a {type(value).__name__}"
