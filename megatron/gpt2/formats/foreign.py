"""A source whose tensors are made from another program's: joined, permuted, transposed or cut, one at a time.

Legend: n heads, d head size.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.gpt2.checkpoint.source import Source, TensorInfo
from megatron.gpt2.config import Config, ModelConfig, OptimizerConfig, require
from megatron.gpt2.optimizer.optimizer import MOMENTS
from mpu.partition import Box

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
TABLE = "word_embeddings.weight"
OPTIMIZER = ("master", *MOMENTS)
GPT2_VOCABULARY = 50257
MAX_JSON_BYTES = 2 << 20  # ten times what the index of GPT-2's largest size needs
# What reading raises if data are not of the form that is expected.
DAMAGE = (
    LookupError,
    TypeError,
    AttributeError,
    ValueError,
    ArithmeticError,
    RuntimeError,
    struct.error,
    zipfile.BadZipFile,
)


@contextlib.contextmanager
def errors_named(path: str | Path) -> Iterator[None]:
    """Turns the errors that `path` causes into a ValueError, in one line that names it, or a file inside of it."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from error
    except DAMAGE as error:
        said = str(error) if isinstance(error, ValueError) else f"damaged ({type(error).__name__}: {str(error)[:80]!r})"
        raise ValueError(said if str(path) in said else f"{path}: {said}") from error


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

    def equals(self, other: LazyTensor) -> bool:
        """Whether both have the same dtype, shape and values."""
        return self.info == other.info and torch.equal(self.make(), other.make())


Tensors = Mapping[str, LazyTensor]


class ForeignSource(Source):
    """A checkpoint of another program as a `Source`. A tensor is in memory only while its reader keeps it.

    model: with the true vocabulary size. facts: what else is known, with the names of our manifest. lazy: by our names,
    in the shapes of `parameter_specs(model)`. left_out: a line for each thing that the files hold and this source does
    not. ValueError for a tensor that is not a floating-point one.
    """

    def __init__(
        self,
        path: Path,
        format: str,
        iteration: int,
        model: ModelConfig,
        facts: Mapping[str, Any],
        lazy: Tensors,
        left_out: Sequence[str] = (),
    ) -> None:
        self.path, self.format, self.iteration, self.left_out = path, format, iteration, tuple(left_out)
        self.tensors = {name: tensor.info for name, tensor in lazy.items()}
        self._lazy = lazy
        self.facts = {
            "tokenizer": None,
            **facts,
            "config": {**facts.get("config", {}), "model": dataclasses.asdict(model)},
            "vocab_size": model.vocab_size,
            "iteration": iteration,
        }
        for name, info in self.tensors.items():
            require(info.dtype in FLOATS, f"{path}: {name} is of {info.dtype}, which is no type of weights")

    def read_into(self, out: Tensor, name: str, offset: tuple[int, ...]) -> None:
        """Fill `out`, of any dtype and device, with the box of `name` at `offset`. ValueError if it is outside."""
        whole, box = self.tensors[name].shape, Box(offset, tuple(out.shape))
        if any(start < 0 or start + size > end for start, size, end in zip(box.offset, box.shape, whole, strict=True)):
            raise ValueError(f"{self.path}: {name} has shape {whole}, which does not contain {box}")
        out.copy_(self._lazy[name].make()[box.slices()])


def head_major(heads: int, version: int = 0) -> Callable[[Tensor], Tensor]:
    """The change that puts the rows of a fused QKV weight or bias into our order, [n, 3, d].

    version: Megatron's `checkpoint_version`. 0 has [3, n, d], as OpenAI has, 1 has [n, d, 3], 2 and later have ours.
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


def heads_of(h: int, p: int, said: Any, hints: Hints) -> int:
    """The number of heads that the file or the user says, for hidden size h over p ranks. ValueError, with those that
    fit, for another one."""
    heads = said if isinstance(said, int) else hints.num_attention_heads
    fitting = sorted((n for n in range(p, h + 1, p) if h % n == 0), key=lambda n: abs(math.log2(h / n / 64)))
    if heads is None or heads not in fitting:
        problem = (
            "does not say how many attention heads it has"
            if heads is None
            else f"{heads} attention heads do not divide its hidden size of {h} over {p} ranks"
        )
        raise ValueError(
            f"{problem}: give --num-attention-heads, likeliest first one of {', '.join(map(str, fitting[:6]))}"
        )
    return heads


def whole_number(name: str, value: Any, least: int = 1, most: int = 2**31) -> int:
    """`value`, which should be a size or a count: ValueError unless it is a whole number from `least` to `most`."""
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name} should be a whole number from {least}, not {short_repr(value)}")
    return value


def short_repr(value: Any) -> str:
    """`value` for a message. Only a plain value is shown: another one can be long, and one part of it can be in it many
    times."""
    plain = isinstance(value, (str, int, float, type(None)))
    return repr(value[:40] if isinstance(value, str) else value)[:60] if plain else f"a {type(value).__name__}"


def has_optimizer(source: Source) -> bool:
    """Whether `source` holds masters and moments."""
    return set(OPTIMIZER) <= {name.partition(".")[0] for name in source.names()}


def optimizer_config(source: Source) -> OptimizerConfig:
    """The optimizer's flags of the source; the defaults if it names none."""
    return Config.from_dict({"optimizer": source.facts["config"].get("optimizer", {})}).optimizer


def adam_flags(group: Mapping[str, Any], decays: Sequence[Any], **more: Any) -> dict[str, Any]:
    """AdamW's numbers as our flags, by those of a `group` of parameters and each group's weight decay. ValueError for
    what cannot be."""
    first, second = group["betas"]
    config = {
        "weight_decay": max(map(float, decays)),
        "adam_beta1": float(first),
        "adam_beta2": float(second),
        "adam_eps": float(group["eps"]),
        **more,
    }
    OptimizerConfig(**config)
    return config


def progress(steps: int, **more: Any) -> dict[str, Any]:
    """What `AdamWOptimizer.state_dict` says after so many steps, none of them skipped, without a loss scaler."""
    return {"good_steps": steps, "skipped_steps": 0, "adam_steps": steps, "loss_scaler": {"scale": 1.0}, **more}


def on_disk(folder: Path, parts: Iterator[Tensor] | Sequence[Tensor]) -> Tensor:
    """The values of `parts`, one after the other and flat, read from a file in `folder` that has no name any more: in
    the page cache if there is room, so that one part at a time is in memory."""
    path, numel = folder / "tensor", 0
    with open(path, "wb") as stream:
        for x in parts:
            x.contiguous().view(-1).view(torch.uint8).numpy().tofile(stream)
            numel, dtype = numel + x.numel(), x.dtype
    mapped = torch.from_file(str(path), shared=False, size=numel, dtype=dtype)
    path.unlink()
    return mapped
