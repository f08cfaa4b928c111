"""`ForeignCheckpoint` converts the tensors of another program's checkpoint to our names and layouts. Each tensor is
converted when it is read.

Legend: n heads, d head size.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import operator
import reprlib
import struct
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from data_utils.command_line import Log, plural, require
from megatron.gpt2.checkpoint.interface import BaseCheckpoint, Shape, TensorInfo
from megatron.gpt2.config import Config, ModelConfig, OptimizerConfig
from megatron.gpt2.model.gpt2 import model_partition_specs
from megatron.gpt2.optimizer.optimizer import MOMENTS
from mpu.partition import TensorSlice

Entries = Mapping[str, Any]  # a dictionary in a file, or in our metadata
OPTIMIZER_KINDS = ("master", *MOMENTS)
MAX_JSON_BYTES = 2 << 20  # The limit is ten times the size of the index of GPT-2's largest model.
GPT2_VOCAB_SIZE = 50257
# Code that reads data of an unexpected form raises these exceptions.
PARSE_ERRORS = (
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


@contextlib.contextmanager
def file_errors(path: str | Path) -> Iterator[None]:
    """Convert errors inside the block to a ValueError in one line that names `path` or a file in it."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from error
    except PARSE_ERRORS as error:
        message = str(error)
        if not isinstance(error, ValueError):
            message = f"damaged ({type(error).__name__}: {message[:80]!r})"
        raise ValueError(message if str(path) in message else f"{path}: {message}") from error


@dataclass(frozen=True)
class Hints:
    """Values from flags of tools/checkpoint.py, for checkpoints that lack these values. None means "not given"."""

    num_attention_heads: int | None = None
    vocab_size: int | None = None  # the vocabulary's true size, without padding
    gelu: str | None = None
    iteration: int | None = None  # the iteration to open, if a folder has several


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is computed when it is read.

    load: returns the tensor, which may be a view of a file.
    """

    info: TensorInfo
    load: Callable[[], Tensor]

    @staticmethod
    def from_tensor(tensor: Tensor) -> LazyTensor:
        return LazyTensor(TensorInfo(tensor.dtype, tuple(tensor.shape)), lambda: tensor)

    @staticmethod
    def from_checkpoint(source: BaseCheckpoint, name: str) -> LazyTensor:
        return LazyTensor(source.tensors[name], lambda: source.read(name))

    @staticmethod
    def combine(change: Callable[[list[Tensor]], Tensor], parts: Sequence[LazyTensor]) -> LazyTensor:
        """Return a lazy tensor whose value is `change` of the values of `parts`."""
        shapes = [torch.empty(part.info.shape, dtype=part.info.dtype, device="meta") for part in parts]
        info = LazyTensor.from_tensor(change(shapes)).info
        return LazyTensor(info, lambda: change([part.load() for part in parts]))

    def map(self, change: Callable[[Tensor], Tensor]) -> LazyTensor:
        """Return a lazy tensor with the value `change(value)`."""
        return LazyTensor.combine(lambda parts: change(parts[0]), [self])

    def dim(self) -> int:
        return len(self.info.shape)

    def equal(self, other: LazyTensor) -> bool:
        """Return True if `other` has the same shape, dtype and values."""
        return self.info == other.info and torch.equal(self.load(), other.load())


LazyTensors = Mapping[str, LazyTensor]
TensorsByKind = dict[str, dict[str, LazyTensor]]
OptimizerState = tuple[Mapping[str, LazyTensors], dict[str, Any]]  # (tensors by kind and name, metadata)


class ForeignCheckpoint(BaseCheckpoint):
    """A checkpoint of another program. The object keeps no tensor in memory.

    iteration: None stands for the number of optimizer steps.
    model: the model's configuration, with the true vocabulary size.
    metadata: further values, by the names that our manifest uses.
    weights: the weights by our names, with the model's shapes. Padding rows of the word embeddings are left out.
    left_out: one line for each part of the files that this object does not contain.
    read_optimizer: returns moments, metadata, and masters if they are not the weights; may append lines to `left_out`.
        `read_optimizer` is None if the files have no optimizer state. The state is left out, with a line that contains
        `problem`, if reading fails or if a master, rounded to the dtype of its weight, is not equal to the weight.

    Raises ValueError for weights that are not floating-point.
    """

    def __init__(
        self,
        path: Path,
        format: str,
        iteration: int | None,
        model: ModelConfig,
        metadata: Entries,
        weights: LazyTensors,
        left_out: list[str],
        read_optimizer: Callable[[], OptimizerState] | None = None,
        problem: str = ": unknown form",
    ) -> None:
        self.path, self.format, self.left_out = path, format, left_out
        shapes = {name: spec.global_shape for name, spec in model_partition_specs(model).items()}

        def without_padding(tensors: LazyTensors) -> dict[str, LazyTensor]:
            return {name: tensors[name].map(operator.itemgetter(slice(size))) for name, (size, *_) in shapes.items()}

        kinds = {"model": without_padding(weights)}
        for name, weight in kinds["model"].items():
            dtype = weight.info.dtype
            require(dtype.is_floating_point, f"{path}: {name} has dtype {dtype}, which is not floating-point")
        saved_metadata: dict[str, Any] = {}
        if read_optimizer is not None:
            try:
                states, optimizer_metadata = read_optimizer()
                optimizer_tensors = {"master": kinds["model"]} | {
                    kind: without_padding(states[kind]) for kind in states
                }
                for kind, tensors in optimizer_tensors.items():
                    for name, tensor in tensors.items():
                        is_fp32 = tensor.info == TensorInfo(torch.float32, shapes[name])
                        require(is_fp32, f"{kind} of {name} is not fp32 with the shape of its parameter")
                check_masters(kinds["model"], optimizer_tensors["master"])
                kinds, saved_metadata = kinds | optimizer_tensors, optimizer_metadata
            except PARSE_ERRORS as error:
                self.left_out.append(f"the optimizer's state{problem} ({type(error).__name__}: {str(error)[:200]})")
        self._lazy = {f"{kind}.{name}": tensor for kind, tensors in kinds.items() for name, tensor in tensors.items()}
        self.tensors = {name: tensor.info for name, tensor in self._lazy.items()}
        self.iteration = (
            saved_metadata["optimizer"]["adam_steps"] if iteration is None and saved_metadata else iteration or 0
        )

        self.metadata = {
            "tokenizer": None,
            **metadata,
            **saved_metadata,
            "config": {
                **metadata.get("config", {}),
                **saved_metadata.get("config", {}),
                "model": dataclasses.asdict(model),
            },
            "vocab_size": model.vocab_size,
            "iteration": self.iteration,
        }

    def saved_slices(self, name: str, target: TensorSlice) -> list[tuple[TensorSlice, Callable[[], Tensor]]]:
        """Return the whole tensor as one slice."""
        shape = self.tensors[name].shape
        return [(TensorSlice((0,) * len(shape), shape), self._lazy[name].load)]


def check_masters(weights: LazyTensors, masters: LazyTensors) -> None:
    """Raise ValueError unless each master, rounded to the dtype of its weight, is equal to the weight."""
    for name, weight in weights.items():
        master = masters[name]
        is_same = master is weight or torch.equal(master.load().to(weight.info.dtype), weight.load())
        require(is_same, f"the master of {name}, rounded, is not the weight")


def to_head_major(x: Tensor, heads: int, version: int = 0) -> Tensor:
    """Permute the rows of a fused QKV weight or bias [3nd, ...] to our order, [n, 3, d].

    version: Megatron's `checkpoint_version`. Version 0 has [3, n, d], as OpenAI has; version 1 has [n, d, 3]; later
    versions have our order.
    """
    if version > 1:
        return x
    sizes, first = ((heads, -1, 3), 1) if version else ((3, heads, -1), 0)
    return x.unflatten(0, sizes).transpose(first, first + 1).flatten(0, 2)


def from_head_major(x: Tensor, heads: int) -> Tensor:
    """Permute rows from our order, [n, 3, d], to the order of Megatron in 2019 and of OpenAI, [3, n, d]."""
    return x.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)


def matrix_shape(shapes: Mapping[str, Shape], name: str) -> Shape:
    """Return the shape of the matrix `name`. Raises ValueError if `shapes` has no such matrix."""
    if len(shapes.get(name, ())) != 2:
        raise ValueError(f"holds no matrix {name}: is a pipeline stage missing, or is it not a GPT-2?")
    return shapes[name]


def infer_num_heads(hidden_size: int, tp_size: int, saved: Any, hints: Hints) -> int:
    """Return the number of heads from the file (`saved`) or from `hints`. Raises ValueError, with the possible numbers,
    if the number is unknown or does not divide `hidden_size`."""
    heads = saved if isinstance(saved, int) else hints.num_attention_heads
    fitting = [n for n in range(tp_size, hidden_size + 1, tp_size) if hidden_size % n == 0]
    if heads in fitting:
        return heads
    problem = "does not contain its number of attention heads"
    if heads is not None:
        ranks = plural(tp_size, "rank")
        problem = f"{heads} attention heads do not divide its hidden size of {hidden_size} over {ranks}"
    raise ValueError(f"{problem}: give --num-attention-heads, one of {', '.join(map(str, fitting))}")


def report_padding(rows: int, log: Log) -> None:
    """Log that the vocabulary's true size is unknown."""
    log(
        f"the true vocabulary size is unknown, so the padded size, {rows}, is used: --vocab-size N leaves out the "
        f"padding rows (for GPT-2's vocabulary, --vocab-size {GPT2_VOCAB_SIZE})"
    )


def check_integer(name: str, value: Any, least: int = 1, most: int = 2**31) -> int:
    """Return `value`, an integer from `least` to `most`. Raises ValueError for any other value."""
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name} should be an integer from {least}, not {short_repr(value)}")
    return value


def short_repr(value: Any) -> str:
    """Format `value`, which may be a large object, for a message."""
    return reprlib.repr(value)[:60]


# --- Adam's state


def adam_metadata(step: int, groups: Sequence[Any], flags: Entries, **progress: Any) -> dict[str, Any]:
    """Return the metadata of an optimizer state after `step` steps.

    groups: Adam's `param_groups`; empty if they are unknown.
    flags: values of further fields of OptimizerConfig.
    progress: entries of the optimizer's metadata that replace the defaults, for example the number of skipped steps.

    Raises ValueError for invalid flags.
    """
    config = dict(flags)
    for group in groups[:1]:
        config["weight_decay"] = max(float(each["weight_decay"]) for each in groups)
        config["adam_beta1"], config["adam_beta2"] = map(float, group["betas"])
        config["adam_eps"] = float(group["eps"])
    OptimizerConfig(**config)
    steps = {"num_updates": step, "skipped_steps": 0, "adam_steps": step, "loss_scaler": {"scale": 1.0}, **progress}
    return {"optimizer": steps, "config": {"optimizer": config}}


def read_adam(
    optimizer: Entries, weights: LazyTensors, masters: Sequence[Sequence[Tensor]] = ()
) -> tuple[dict[str, LazyTensors], list[Any], int]:
    """Read the state of an Adam whose parameters are numbered: first the matrices, which have weight decay, then the
    vectors, both in the order of `weights`. Return the tensors by kind and name, the `param_groups`, and the number of
    steps. Raises one of `PARSE_ERRORS` if the state does not belong to the weights.

    masters: the masters of the two groups, if they are not the weights.
    """
    groups, moments = optimizer["param_groups"], optimizer["state"]
    states: TensorsByKind = {kind: {} for kind in (OPTIMIZER_KINDS if masters else MOMENTS)}
    steps = []
    for position, (names, group) in enumerate(zip(names_by_group(weights), groups, strict=True)):
        if masters:
            pairs = zip(names, masters[position], strict=True)
            states["master"] |= {name: LazyTensor.from_tensor(master) for name, master in pairs}
        for name, number in zip(names, map(operator.index, group["params"]), strict=True):
            for moment in MOMENTS:
                states[moment][name] = LazyTensor.from_tensor(moments[number][moment])
            steps.append(group["step"] if "step" in group else moments[number]["step"])
    return states, groups, same_step(steps)  # type: ignore[return-value]


def names_by_group(weights: Mapping[str, Tensor] | LazyTensors) -> list[list[str]]:
    """Return the names of the matrices, which have weight decay, and the names of the vectors."""
    return [[name for name, x in weights.items() if (x.dim() > 1) == decays] for decays in (True, False)]


def same_step(steps: Iterable[Any]) -> int:
    """Return the number that all `steps` have in common. Raises ValueError if the numbers differ."""
    found = {int(step) for step in steps}
    require(len(found) == 1, f"steps {sorted(found)[:5]}")
    return found.pop()


def has_optimizer(source: BaseCheckpoint) -> bool:
    """Return True if `source` contains masters and AdamW's moments. A run with Muon has no second moments of
    matrices."""
    names = [name.removeprefix("model.") for name in source.tensors if name.startswith("model.")]
    return all(f"{kind}.{name}" in source.tensors for kind in OPTIMIZER_KINDS for name in names)


def optimizer_config(source: BaseCheckpoint) -> OptimizerConfig:
    """Return the optimizer's configuration in the metadata of `source`, with defaults for missing values."""
    return Config.from_dict({"optimizer": source.metadata["config"].get("optimizer", {})}).optimizer


def adam_param_groups(source: BaseCheckpoint) -> list[dict[str, Any]]:
    """Return the `param_groups` of torch's Adam, without parameters: first matrices, with weight decay, then
    vectors."""
    config = optimizer_config(source)
    same = {"lr": config.lr, "betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_eps}
    return [{**same, "weight_decay": decay} for decay in (config.weight_decay, 0.0)]


def spill_to_disk(folder: Path, parts: Iterable[Tensor], shape: Shape) -> Tensor:
    """Write `parts` to a file in `folder`, delete its name, and return its values as a memory-mapped tensor of `shape`.
    Only one part at a time must be in memory."""
    path = folder / "tensor"
    with open(path, "wb") as stream:
        for x in parts:
            x.contiguous().view(-1).view(torch.uint8).numpy().tofile(stream)
    mapped = torch.from_file(str(path), shared=False, size=math.prod(shape), dtype=x.dtype)
    path.unlink()
    return mapped.view(shape)
