"""A source whose tensors are made from another program's: joined, permuted, transposed or cut, one at a time.

Legend: n heads, d head size.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import operator
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from megatron.gpt2.checkpoint.source import Source, TensorInfo, check_inside
from megatron.gpt2.config import Config, ModelConfig, OptimizerConfig, require
from megatron.gpt2.model.gpt2 import parameter_specs
from megatron.gpt2.optimizer.optimizer import MOMENTS
from mpu.partition import Box

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
    SafetensorError,
)


class MixedRuns(ValueError):
    """Two files that belong together hold different values of one parameter, or of its state."""


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
    def of(tensor: Tensor) -> LazyTensor:
        """`tensor`, which is in memory or a view of a file."""
        return LazyTensor(TensorInfo(tensor.dtype, tuple(tensor.shape)), lambda: tensor)

    @staticmethod
    def made_of(change: Callable[..., Tensor], *parts: LazyTensor) -> LazyTensor:
        """The tensor that `change` makes of the tensors `parts`."""
        shapes = [torch.empty(part.info.shape, dtype=part.info.dtype, device="meta") for part in parts]
        return LazyTensor(LazyTensor.of(change(*shapes)).info, lambda: change(*(part.make() for part in parts)))

    def then(self, change: Callable[[Tensor], Tensor]) -> LazyTensor:
        """The tensor that `change` makes of this one."""
        return LazyTensor.made_of(change, self)

    def equals(self, other: LazyTensor) -> bool:
        """Whether both have the same dtype, shape and values."""
        return self.info == other.info and torch.equal(self.make(), other.make())


Tensors = Mapping[str, LazyTensor]
State = tuple[dict[str, Tensors], dict[str, Any]]  # an optimizer's: the tensors by kind and name, and the run's facts


class ForeignSource(Source):
    """A checkpoint of another program as a `Source`. A tensor is in memory only while its reader keeps it.

    model: with the true vocabulary size. facts: what else is known, with the names of our manifest. tensors: by kind
    ("model", "master", ...) and our name, in the shapes of the model; rows of the word embeddings past the vocabulary
    are padding and are left out. left_out: a line for each thing that the files hold and this source does not.
    ValueError for a tensor that is not a floating-point one.
    """

    def __init__(
        self,
        path: Path,
        format: str,
        iteration: int,
        model: ModelConfig,
        facts: Mapping[str, Any],
        tensors: Mapping[str, Tensors],
        left_out: Sequence[str] = (),
    ) -> None:
        self.path, self.format, self.iteration, self.left_out = path, format, iteration, tuple(left_out)
        self._lazy: dict[str, LazyTensor] = {}
        for kind, held in tensors.items():
            for name, spec in parameter_specs(model).items():
                dtype, shape = held[name].info.dtype, held[name].info.shape
                require(dtype.is_floating_point, f"{path}: {name} is of {dtype}, which is not a type of weights")
                rows = operator.itemgetter(slice(spec.global_shape[0]))
                self._lazy[f"{kind}.{name}"] = held[name] if shape == spec.global_shape else held[name].then(rows)
        self.tensors = {name: tensor.info for name, tensor in self._lazy.items()}
        self.facts = {
            "tokenizer": None,
            **facts,
            "config": {**facts.get("config", {}), "model": dataclasses.asdict(model)},
            "vocab_size": model.vocab_size,
            "iteration": iteration,
        }

    def read_into(self, out: Tensor, name: str, offset: tuple[int, ...]) -> None:
        """Fill `out`, of any dtype and device, with the box of `name` at `offset`. ValueError if it is outside."""
        box = Box(offset, tuple(out.shape))
        if box.numel:
            check_inside(f"{self.path}: {name}", self.tensors[name].shape, box)
        out.copy_(self._lazy[name].make()[box.slices()])


def head_major(x: Tensor, heads: int, version: int = 0) -> Tensor:
    """The rows of a fused QKV weight or bias [3nd, ...] in our order, [n, 3, d].

    version: Megatron's `checkpoint_version`. 0 has [3, n, d], as OpenAI has, 1 has [n, d, 3], 2 and later have ours.
    """
    if version > 1:
        return x
    sizes, first = ((heads, -1, 3), 1) if version else ((3, heads, -1), 0)
    return x.unflatten(0, sizes).transpose(first, first + 1).flatten(0, 2)


def by_part(x: Tensor, heads: int) -> Tensor:
    """Rows in our order, [n, 3, d], in that of 2019's Megatron and of OpenAI, [3, n, d]."""
    return x.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)


def matrix_shape(shapes: Mapping[str, tuple[int, ...]], name: str) -> tuple[int, ...]:
    """The shape of the matrix `name`. ValueError if there is none."""
    if len(shapes.get(name, ())) != 2:
        raise ValueError(f"holds no matrix {name}: is a pipeline stage missing, or is it not a GPT-2?")
    return shapes[name]


def heads_of(h: int, p: int, said: Any, hints: Hints) -> int:
    """The number of heads that the file or the user says, for hidden size h over p ranks. ValueError, with those that
    fit, for another one."""
    heads = said if isinstance(said, int) else hints.num_attention_heads
    fitting = sorted((n for n in range(p, h + 1, p) if h % n == 0), key=lambda n: abs(math.log2(h / n / 64)))
    if heads in fitting:
        return heads
    problem = f"{heads} attention heads do not divide its hidden size of {h} over {p} ranks"
    raise ValueError(
        f"{'does not say how many attention heads it has' if heads is None else problem}: give "
        f"--num-attention-heads, likeliest first one of {', '.join(map(str, fitting[:6]))}"
    )


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


# --- Adam's state


def state_if_known(read: Callable[[], State], weights: Tensors, left_out: list[str], what: str = "") -> State:
    """The state that `read` gives; if it is not that of `weights` in fp32, or in a form that is not known here, an empty
    one, and a line in `left_out`. what: more for this line. MixedRuns stays an error."""
    try:
        states, facts = read()
        for kind, held in states.items():
            for name, weight in weights.items():
                wanted = TensorInfo(torch.float32, weight.info.shape)
                require(held[name].info == wanted, f"{kind} of {name} is not of its parameter's shape, in fp32")
        return states, facts
    except MixedRuns:
        raise
    except DAMAGE as error:
        what = what or ": its form is not one that is known here"
        left_out.append(f"the optimizer's state{what} ({type(error).__name__}: {str(error)[:200]})")
        return {}, {}


def adam_facts(step: int, groups: Sequence[Any], flags: Mapping[str, Any], **progress: Any) -> dict[str, Any]:
    """The facts of Adam's state after `step` steps.

    groups: Adam's numbers of each group of parameters; empty if they are unknown. flags: other flags of the optimizer.
    progress: what else `AdamWOptimizer.state_dict` says, if a step was skipped or the loss was scaled. ValueError for
    flags that cannot be.
    """
    config = dict(flags)
    for group in groups[:1]:
        config["weight_decay"] = max(float(each["weight_decay"]) for each in groups)
        config["adam_beta1"], config["adam_beta2"] = map(float, group["betas"])
        config["adam_eps"] = float(group["eps"])
    OptimizerConfig(**config)
    steps = {"good_steps": step, "skipped_steps": 0, "adam_steps": step, "loss_scaler": {"scale": 1.0}, **progress}
    return {"optimizer": steps, "config": {"optimizer": config}}


def has_optimizer(source: Source) -> bool:
    """Whether `source` holds masters and moments."""
    return all(f"{kind}.{TABLE}" in source.tensors for kind in OPTIMIZER)


def optimizer_config(source: Source) -> OptimizerConfig:
    """The optimizer's flags of the source; the defaults if it names none."""
    return Config.from_dict({"optimizer": source.facts["config"].get("optimizer", {})}).optimizer


def adam_groups(source: Source) -> list[dict[str, Any]]:
    """Adam's numbers of its two groups, as torch names them: the matrices, which decay, and the vectors."""
    config = optimizer_config(source)
    same = {"lr": config.lr, "betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_eps}
    return [{**same, "weight_decay": decay} for decay in (config.weight_decay, 0.0)]


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
