"""AdamW over flat float32 masters, for fp32, bf16 and fp16 alike, without a host synchronisation.

Whether a step is skipped, by how much its gradients are clipped, and the learning rate (which counts steps that
were not skipped) are scalars on the device: the host reads them at log lines alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import mpu
from megatron.config import OptimizerConfig
from megatron.distributed import FlatParameters
from megatron.fp16.loss_scaler import DynamicLossScaler, LossScaler

MOMENTS = ("exp_avg", "exp_avg_sq")


def build_loss_scaler(config: OptimizerConfig, dtype: torch.dtype, device: torch.device | str) -> LossScaler:
    if dtype != torch.float16:
        return LossScaler(1.0, device)
    if config.loss_scale is not None:
        return LossScaler(config.loss_scale, device)
    return DynamicLossScaler(config.initial_loss_scale, minimum=config.min_loss_scale,
                             window=config.loss_scale_window, hysteresis=config.hysteresis, device=device)


class MixedPrecisionOptimizer:
    """Unscale → agree on overflow → clip → AdamW on the masters → round into the model → scale and schedule.

    rates: [iterations + 1] float64, the learning rate after n steps that were not skipped; past its end the last
    one holds. A non-finite gradient norm skips the step in every precision: it would poison the weights in any.
    """

    def __init__(self, flat: FlatParameters, config: OptimizerConfig, scaler: LossScaler, rates: Tensor) -> None:
        device = flat.masters.device
        self.flat, self.scaler = flat, scaler
        self._clip_grad = config.clip_grad
        self._rates = rates.to(device=device, dtype=torch.float32)
        self.good_steps = torch.zeros((), dtype=torch.int64, device=device)
        self.skipped_steps = torch.zeros((), dtype=torch.int64, device=device)
        self.skipped_in_a_row = torch.zeros((), dtype=torch.int64, device=device)
        self.found_inf = torch.zeros((), dtype=torch.float32, device=device)
        self.grad_norm = torch.zeros((), dtype=torch.float32, device=device)
        self.learning_rate = self._rates[0].clone()

        self._masters = [nn.Parameter(flat.masters[segment.range]) for segment in flat.segments]
        for master, segment in zip(self._masters, flat.segments, strict=True):
            master.grad = flat.grads[segment.range]
        self._adam = torch.optim.AdamW(
            [{"params": [master], "weight_decay": config.weight_decay if segment.decays else 0.0}
             for master, segment in zip(self._masters, flat.segments, strict=True)],
            lr=self.learning_rate, betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_eps, fused=True)
        for master in self._masters:
            self._adam.state[master] = {"step": torch.zeros((), dtype=torch.float32, device=device),
                                        **{name: torch.zeros_like(master) for name in MOMENTS}}

    def step(self) -> None:
        """One update from the summed, scaled gradients in `flat.grads`, which it overwrites."""
        grads = [(segment, self.flat.grads[segment.range]) for segment in self.flat.segments]
        squared = mpu.squared_norm((g for s, g in grads if s.is_split), (g for s, g in grads if not s.is_split),
                                   self.flat.grads.device)
        norm = squared.sqrt() / self.scaler.scale
        # The norm is the same on all ranks, so all of them skip or none.
        self.found_inf = (~torch.isfinite(norm)).float()
        clip = (self._clip_grad / (norm + 1e-6)).clamp_max(1.0) if self._clip_grad > 0 else torch.ones_like(norm)
        # AdamW's fused kernel divides by grad_scale as it reads, which unscales and clips in the same pass.
        self._adam.grad_scale = (self.scaler.scale / clip).nan_to_num(1.0)  # type: ignore[attr-defined]
        self._adam.found_inf = self.found_inf  # type: ignore[attr-defined]
        self._adam.step()
        self.flat.write_back()

        self.grad_norm = norm
        skipped = self.found_inf.long()
        self.skipped_steps += skipped
        self.skipped_in_a_row = (self.skipped_in_a_row + skipped) * skipped
        self.good_steps += 1 - skipped
        self.scaler.update(self.found_inf)
        self.learning_rate.copy_(self._rates[self.good_steps.clamp_max(len(self._rates) - 1)])

    def tensors(self) -> Iterator[tuple[str, str, Tensor]]:
        """(kind, parameter name, view in the parameter's shape) of everything a resume needs: masters, moments."""
        for name, part in self.flat.ranges.items():
            shape = self.flat.parameters[name].shape
            yield "master", name, self.flat.masters[part].view(shape)
            index, segment = next((i, s.range) for i, s in enumerate(self.flat.segments)
                                  if s.range.start <= part.start < s.range.stop)
            inside = slice(part.start - segment.start, part.stop - segment.start)
            for moment in MOMENTS:
                yield moment, name, self._adam.state[self._masters[index]][moment][inside].view(shape)

    def state_dict(self) -> dict[str, Any]:
        """The scalars; the tensors come from `tensors()`."""
        return {"good_steps": int(self.good_steps), "skipped_steps": int(self.skipped_steps),
                "adam_steps": int(self._adam.state[self._masters[0]]["step"]),
                "loss_scaler": self.scaler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """After the tensors were filled: the scalars, and the model's weights from the masters."""
        self.scaler.load_state_dict(state["loss_scaler"])
        self.skipped_steps.fill_(state["skipped_steps"])
        self.set_good_steps(state["good_steps"])
        for master in self._masters:
            # Fewer than the schedule's where the moments were once started afresh (--no-load-optim).
            self._adam.state[master]["step"].fill_(state["adam_steps"])
        self.flat.write_back()

    def masters_from_model(self) -> None:
        """After the model's own weights were loaded, without an optimizer's."""
        self.flat.masters.copy_(self.flat.params)

    def set_good_steps(self, good_steps: int) -> None:
        """Put the schedule where it is after so many steps."""
        self.good_steps.fill_(good_steps)
        self.learning_rate.copy_(self._rates[min(good_steps, len(self._rates) - 1)])
