"""The learning rate as a function of n, the number of steps so far that were not skipped. If the batch size grows, a
step counts as its fraction of the final batch. Megatron counts samples, which is equivalent.

With peak p, floor f, w warm-up and N decay iterations, the rate is p·n/w up to w; after that, with
r = (n − w) / (N − w), which runs from 0 to 1:

    constant     p
    linear       f + (p − f)·(1 − r)
    cosine       f + (p − f)·(cos πr + 1) / 2
    exponential  max(f, p·2^−r)
    WSD          p until D iterations before N, then f + (p − f)·(2·2^−q − 1), q running from 0 to 1 over those D

After N the rate is constant. cosine-2019 continues runs of Megatron from 2019: max(f, p/2·(cos(π(n − w)/N) + 1)) with n
at most N − w, so that it ends above the floor. An update uses n = the number of earlier updates, so the first one has
the rate 0 under a warm-up. A log line shows the rate after its update is counted.
"""

import numpy as np
from numpy.typing import NDArray

from megatron.gpt2.config import OptimizerConfig, require


class LRSchedule:
    """The learning rate schedule of a run of `train_iters` iterations with the final batch size `batch`, in samples.
    Raises ValueError if warm-up and decay do not fit."""

    def __init__(self, config: OptimizerConfig, train_iters: int, batch: int) -> None:
        self.peak, self.floor, self.style = config.lr, config.min_lr, config.lr_decay_style
        self.warmup_iters, self.decay_iters = config.warmup_and_decay(train_iters, batch)
        self.wsd_iters = config.lr_wsd_decay_iters or max(1, int(self.decay_iters) // 10)
        require(
            self.warmup_iters <= self.decay_iters,
            f"the warm-up of {self.warmup_iters:g} iterations (--lr-warmup-iters) is more than the "
            f"{self.decay_iters:g} of the decay (--lr-decay-iters, else the length of the run)",
        )
        require(
            self.style != "WSD" or self.wsd_iters <= self.decay_iters - self.warmup_iters,
            f"--lr-wsd-decay-iters {self.wsd_iters} does not fit between the warm-up of {self.warmup_iters:g} and "
            f"the end of the decay at {self.decay_iters:g}",
        )

    def __call__(self, n: float) -> float:
        """Return the rate after n steps that were not skipped."""
        return float(self.table(np.array([float(n)]))[0])

    def table(self, n: NDArray[np.float64]) -> NDArray[np.float64]:
        """n: float64 [k], ascending -> [k], the rate after each n."""
        p, f, w, end = self.peak, self.floor, self.warmup_iters, self.decay_iters
        late = np.minimum(n, end)
        r = (late - w) / (end - w) if end > w else np.ones_like(n)
        if self.style == "constant":
            rates = np.full_like(n, p)
        elif self.style == "linear":
            rates = f + (p - f) * (1 - r)
        elif self.style == "cosine":
            rates = f + (p - f) * (np.cos(np.pi * r) + 1) / 2
        elif self.style == "cosine-2019":
            rates = np.maximum(f, p / 2 * (np.cos(np.pi * (np.minimum(n, end - w) - w) / end) + 1))
        elif self.style == "exponential":
            rates = np.maximum(f, p * 0.5**r)
        else:
            assert self.style == "WSD"
            q = np.maximum(0.0, (late - (end - self.wsd_iters)) / self.wsd_iters)
            rates = f + (p - f) * (2 * 0.5**q - 1)
        return np.where(n <= w, p * n / w, rates) if w else rates
