"""Two checkpoints side by side, of whatever formats and layouts: tensor by tensor, and by what they compute."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

import mpu
from megatron.gpt2.checkpoint.source import Source, check_facts
from megatron.gpt2.checkpoint.state import load_state
from megatron.gpt2.model.gpt2 import GPT2Model, layer_config
from megatron.gpt2.model.parameters import parameter_specs
from megatron.gpt2.optimizer.flat_state import FlatState

CHUNK = 1 << 20  # entries that are compared at once
SEQUENCES, LENGTH = 2, 32


class Row(NamedTuple):
    """One tensor of both. greatest: the largest absolute difference; NaN where only one of the two holds NaN, None
    where the shapes differ. shape: in the first."""

    name: str
    shape: tuple[int, ...]  # in a
    greatest: float | None
    note: str


@dataclass(frozen=True)
class Difference:
    """The rows of the tensors that both hold, and the names that one holds alone.

    Compared are the kinds (model, master, exp_avg, exp_avg_sq) that both hold; `not_compared` are the other kinds.
    Random states belong to a layout and are never compared.
    """

    rows: list[Row]
    only_in_a: list[str]
    only_in_b: list[str]
    not_compared: list[str]

    @property
    def equal(self) -> bool:
        """Whether both hold the same tensors with the same values."""
        return not self.only_in_a and not self.only_in_b and all(row.greatest == 0 for row in self.rows)


def diff(a: Source, b: Source) -> Difference:
    """Compare every value of `a` with that of `b`, whatever their dtypes and layouts. One tensor of each is in memory
    at a time."""
    kinds_a, kinds_b = ({name.partition(".")[0] for name in source.names()} - {"rng"} for source in (a, b))
    names_a, names_b = (
        [name for name in source.names() if name.partition(".")[0] in kinds_a & kinds_b] for source in (a, b)
    )
    return Difference(
        [_row(a, b, name) for name in names_a if name in b.tensors],
        [name for name in names_a if name not in b.tensors],
        [name for name in names_b if name not in a.tensors],
        sorted(kinds_a ^ kinds_b),
    )


def _row(a: Source, b: Source, name: str) -> Row:
    first, second = a.tensors[name], b.tensors[name]
    notes = []
    if first.dtype != second.dtype:
        notes.append(" and ".join(str(info.dtype).removeprefix("torch.") for info in (first, second)))
    if first.shape != second.shape:
        return Row(name, first.shape, None, f"{_size(second.shape)} in the other")
    greatest = greatest_difference(a.read(name), b.read(name))
    if math.isnan(greatest):
        notes.append("NaN in one alone")
    return Row(name, first.shape, greatest, ", ".join(notes))


def greatest_difference(x: Tensor, y: Tensor) -> float:
    """The largest absolute difference of two tensors of one shape, computed in float64, which holds every dtype's
    values. NaN equals NaN, and an infinity itself; NaN beside a number is a difference of NaN."""
    greatest = 0.0
    for some, other in zip(x.flatten().split(CHUNK), y.flatten().split(CHUNK), strict=True):
        some, other = some.double(), other.double()
        differs = (some != other) & ~(some.isnan() & other.isnan())
        if differs.any():
            here = (some - other)[differs].abs().max().item()
            greatest = here if math.isnan(here) else max(greatest, here)  # max(NaN, x) is NaN: it stays
    return greatest


def table(difference: Difference) -> list[str]:
    """`difference` as lines to print."""
    cells = [("tensor", "shape", "greatest difference", "")]
    for row in difference.rows:
        greatest = "another shape" if row.greatest is None else f"{row.greatest:.3g}"
        cells.append((row.name, _size(row.shape), greatest, row.note))
    cells += [(name, "", "in the first alone", "") for name in difference.only_in_a]
    cells += [(name, "", "in the second alone", "") for name in difference.only_in_b]
    widths = [max(len(row[column]) for row in cells) for column in range(3)]
    lines = [
        f"{name:{widths[0]}}  {shape:>{widths[1]}}  {greatest:>{widths[2]}}  {note}".rstrip()
        for name, shape, greatest, note in cells
    ]
    if difference.not_compared:
        lines.append(f"in one of them alone, and not compared: {', '.join(difference.not_compared)}")
    return lines


def _size(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def check(a: Source, b: Source, *, kind: str = "model", log: Callable[[str], None] = print) -> float:
    """The largest absolute difference of the logits of `a` and `b`, in fp32, on fixed random tokens; NaN where one has
    NaN.

    kind: the tensors of `a` that the weights of `b` were made of, "model" or "master"; they are rounded to b's dtype
    first. One model is in memory at a time. ValueError where the vocabularies differ.
    """
    if a.facts["vocab_size"] != b.facts["vocab_size"]:
        raise ValueError(
            f"{a.path} has {a.facts['vocab_size']} tokens and {b.path} {b.facts['vocab_size']}: give the "
            "true number with --vocab-size"
        )
    length = min(LENGTH, *(source.facts["config"]["model"]["max_position_embeddings"] for source in (a, b)))
    tokens = torch.randint(a.facts["vocab_size"], (SEQUENCES, length), generator=torch.Generator().manual_seed(0))
    dtype = b.tensors["model.word_embeddings.weight"].dtype
    greatest = (_logits(a, tokens, kind, dtype) - _logits(b, tokens)).abs().max().item()
    log(f"greatest logit difference on {tokens.numel()} tokens in fp32: {greatest:.3g}")
    return greatest


@torch.no_grad()
def _logits(source: Source, tokens: Tensor, kind: str = "model", dtype: torch.dtype = torch.float32) -> Tensor:
    """[b, s] -> [s, b, true vocabulary], of the weights of a `kind`, rounded to `dtype`."""
    if not mpu.model_parallel_is_initialized():
        mpu.initialize_model_parallel(1)
    config = check_facts(source)
    model = (
        GPT2Model(config, layer_config(config, device="meta")).to_empty(device="cpu").eval()
    )  # no weight is drawn, to be replaced
    weights = [FlatState(kind, name, parameter.detach().view(-1)) for name, parameter in model.named_parameters()]
    load_state(weights, parameter_specs(config), source, mp_rank=0, mp_size=1)
    for weight in weights:
        weight.values.copy_(weight.values.to(dtype))
    return model(tokens)[..., : config.vocab_size]  # type: ignore[no-any-return]
