"""Weight gradients apart from input gradients, which a schedule may compute later."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

import mpu
from megatron.gpt2.optimizer.gradient_reducer import GradientReducer
from megatron.gpt2.train.engine import Engine
from mpu import kernels

Place = tuple[int, int]  # chunk and micro-batch


class WeightGradientsLater:
    """Takes the place of the weight gradient in every linear layer of the model: backward hands over its factors, and
    `compute` makes the product when the schedule has time for it (zero bubble, arXiv:2401.10241)."""

    def __init__(self, engine: Engine, reducer: GradientReducer) -> None:
        self._reducer = reducer
        self._new: list[tuple[str, Callable[[], Tensor]]] = []
        self._kept: dict[Place, list[tuple[str, Callable[[], Tensor]]]] = {}

        def sink_of(name: str, module: mpu.ColumnParallelLinear | mpu.RowParallelLinear) -> kernels.WeightGradientSink:
            return lambda dy, x: self._new.append((name, functools.partial(module.weight_gradient, dy, x)))

        for name, module in engine.model.named_modules():
            if isinstance(module, mpu.ColumnParallelLinear | mpu.RowParallelLinear):
                module.weight_gradient_sink = sink_of(f"{name}.weight", module)

    def keep(self, place: Place) -> None:
        """What backward has handed over since the last call belongs to `place`."""
        self._kept[place], self._new = self._new, []

    @torch.no_grad()  # as inside of backward
    def compute(self, place: Place) -> None:
        """The weight gradients of `place`, into the reducer."""
        for name, product in self._kept.pop(place):
            self._reducer.add(name, product())
            self._reducer.complete(name)
