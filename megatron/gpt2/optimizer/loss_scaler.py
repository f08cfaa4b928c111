"""The fp16 loss scale, kept on the device: raising and lowering it never makes the host wait.

Semantics of Megatron's dynamic loss scaler: the first `hysteresis` - 1 overflows only skip the step. Every later one
also halves the scale, until `window` clean steps in a row double it and refill the hysteresis.
"""

from collections.abc import Mapping

import torch
from torch import Tensor


class LossScaler:
    """A constant scale; 1.0 where no scaling is needed.

    `scale` is a float32 scalar on the device.
    """

    def __init__(self, scale: float, device: torch.device | str = "cpu") -> None:
        self.scale = torch.tensor(scale, dtype=torch.float32, device=device)

    def update(self, found_inf: Tensor) -> None:
        """After a step. found_inf: float32 scalar on the device, 1.0 where the step overflowed on any rank."""

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint keeps; reading it waits for the device."""
        return {"scale": self.scale.item()}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Take over nothing: a constant scale is what the flag says."""


class DynamicLossScaler(LossScaler):
    """A scale that follows the overflows, see the top of this file.

    initial, minimum: scales. window: clean steps in a row that double it. hysteresis: overflows until it is halved, the
    halving one included.
    """

    def __init__(
        self,
        initial: float = 2.0**32,
        *,
        minimum: float = 1.0,
        window: int = 1000,
        hysteresis: int = 2,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(initial, device)
        self.minimum, self.window, self.hysteresis = minimum, window, hysteresis
        self._clean_steps = torch.zeros((), dtype=torch.float32, device=device)
        self._hysteresis_left = torch.full_like(self._clean_steps, hysteresis)

    def update(self, found_inf: Tensor) -> None:
        """After a step: halve, double or keep the scale. found_inf: as in `LossScaler`."""
        overflow = found_inf > 0
        halve = overflow & (self._hysteresis_left <= 1)
        self._clean_steps = torch.where(overflow, 0.0, self._clean_steps + 1)
        double = ~overflow & (self._clean_steps % self.window == 0)
        factor = torch.where(halve, 0.5, torch.where(double, 2.0, 1.0))
        # In place: whoever was given `scale` sees the new value.
        self.scale.copy_(torch.where(halve, (self.scale * factor).clamp_min(self.minimum), self.scale * factor))
        self._hysteresis_left = torch.where(
            double,
            float(self.hysteresis),
            torch.where(overflow & ~halve, self._hysteresis_left - 1, self._hysteresis_left),
        )

    def state_dict(self) -> dict[str, float]:
        """The scale and the two counters behind it."""
        return {
            "scale": self.scale.item(),
            "clean_steps": self._clean_steps.item(),
            "hysteresis_left": self._hysteresis_left.item(),
        }

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Take over what `state_dict` gave. A state without the counters (of a constant scale, or of bf16) leaves the
        initial scale."""
        if "clean_steps" not in state:
            return
        self.scale.fill_(state["scale"])
        self._clean_steps.fill_(state["clean_steps"])
        self._hysteresis_left.fill_(state["hysteresis_left"])
