"""How far a run is: what each step moves on."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(kw_only=True)
class Progress:
    """iteration: steps that are done. consumed_samples: training samples that they took, over all ranks.
    skipped_samples: those between them that no step took, after a spike of the loss.

    loss_sum: float64 scalar on the device, the losses of this rank's samples since the last log line, in nats per
    token of the global batch; steps that were skipped are left out. started: `time.monotonic()` at the start.
    """

    iteration: int
    consumed_samples: int
    loss_sum: Tensor
    skipped_samples: int = 0
    started: float = field(default_factory=time.monotonic)

    @staticmethod
    def at(iteration: int, consumed_samples: int, skipped_samples: int, device: torch.device) -> Progress:
        """The beginning of a run that continues there; (0, 0, 0) for a new one."""
        return Progress(
            iteration=iteration,
            consumed_samples=consumed_samples,
            skipped_samples=skipped_samples,
            loss_sum=torch.zeros((), dtype=torch.float64, device=device),
        )

    def step(self, samples: int) -> None:
        """One more iteration is done, which took `samples` samples over all ranks."""
        self.iteration += 1
        self.consumed_samples += samples
