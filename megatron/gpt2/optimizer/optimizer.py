"""AdamW on float32 masters, for fp32, bf16 and fp16. The host does not wait for the device, except with an offloaded
optimizer.

Three values of a step are scalars on the device: whether the step is skipped, the factor that clips gradients, and the
learning rate, which depends on the number of steps that were not skipped. The host reads the three values for log
lines, and in each step for an offloaded optimizer.

Each rank updates its owned ranges of the buffer: the whole buffer or, with a sharded optimizer (ZeRO stage 1,
arXiv:1910.02054), one shard of every bucket. With a sharded optimizer, the ranks then gather each other's parameters.
"""

import collections
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import mpu
from data_utils.command_line import require
from megatron.gpt2.config import OptimizerConfig
from megatron.gpt2.optimizer.bucket_reducer import ParamAllGather
from megatron.gpt2.optimizer.param_and_grad_buffer import ParamAndGradBuffer, ParamShard
from mpu import kernels

MOMENTS = ("exp_avg", "exp_avg_sq")


class LossScaler:
    """The loss scale of a run that computes in `dtype`: dynamic or constant in fp16, 1 in fp32 and bf16. The scale is
    on the device, so the host does not wait for an update.

    A dynamic scale changes as in Megatron. The first `hysteresis` - 1 overflows only skip a step. Each later overflow
    also halves the scale, to `min_loss_scale` at least. `loss_scale_window` steps in a row without an overflow double
    the scale, and start a new count of overflows.

    scale: float32 scalar on the device.
    """

    def __init__(self, config: OptimizerConfig, dtype: torch.dtype, device: torch.device | str) -> None:
        initial = (config.loss_scale or config.initial_loss_scale) if dtype == torch.float16 else 1.0
        self.scale = torch.tensor(initial, dtype=torch.float32, device=device)
        self._config, self._dynamic = config, dtype == torch.float16 and config.loss_scale is None
        self._clean_steps = torch.zeros_like(self.scale)
        self._hysteresis_left = torch.full_like(self.scale, config.hysteresis)

    def update(self, found_inf: Tensor) -> None:
        """Halve, double or keep the scale after a step.

        found_inf: float32 scalar on the device, 1.0 if the step overflowed on any rank.
        """
        if not self._dynamic:
            return
        overflow = found_inf > 0
        halve = overflow & (self._hysteresis_left <= 1)
        self._clean_steps = torch.where(overflow, 0.0, self._clean_steps + 1)
        double = ~overflow & (self._clean_steps % self._config.loss_scale_window == 0)
        halved = (self.scale / 2).clamp_min(self._config.min_loss_scale)
        # The update is in place, because other objects have references to `scale`.
        self.scale.copy_(torch.where(halve, halved, torch.where(double, self.scale * 2, self.scale)))
        left = self._hysteresis_left - (overflow & ~halve).float()
        self._hysteresis_left = torch.where(double, float(self._config.hysteresis), left)

    def state_dict(self) -> dict[str, float]:
        """Return the scale and, if it is dynamic, its two counters, for a checkpoint. The host waits for the device."""
        state = {"scale": self.scale}
        if self._dynamic:
            state |= {"clean_steps": self._clean_steps, "hysteresis_left": self._hysteresis_left}
        return {name: value.item() for name, value in state.items()}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Load the result of `state_dict`. The state of a constant scale is ignored, because a flag determines it."""
        if self._dynamic and "clean_steps" in state:
            self.scale.fill_(state["scale"])
            self._clean_steps.fill_(state["clean_steps"])
            self._hysteresis_left.fill_(state["hysteresis_left"])


def learning_rates(
    config: OptimizerConfig, default_decay_iters: int, batch: int, n: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the learning rate after n steps that were not skipped, for ascending n: float64 [k] -> [k].

    default_decay_iters: the length of the run in iterations, if the flags do not give the length of the decay.
    batch: the final batch size in samples. While the batch size grows, a step counts as a fraction of an iteration:
        its samples divided by `batch`. Megatron counts samples, with the same result.

    Raises ValueError if warm-up and decay do not fit. With peak p, floor f, w warm-up and N decay iterations, the rate
    is p·n/w up to iteration w. Then, with r = (n − w) / (N − w), which runs from 0 to 1, the rate is:

        constant:    p
        linear:      f + (p − f)·(1 − r)
        cosine:      f + (p − f)·(cos πr + 1) / 2
        exponential: max(f, p·2^−r)
        WSD:         p until D iterations before N, then f + (p − f)·(2·2^−q − 1), q running from 0 to 1 over those D

    After N the rate is constant. cosine-2019 is the formula of Megatron's first release:
    max(f, p/2·(cos(π(n − w)/N) + 1)) with n at most N − w, so the rate ends above the floor. An update uses n = the
    number of earlier updates, so with a warm-up the first update has the rate 0. A log line shows the rate of the next
    update.
    """
    p, f, style = config.lr, config.min_lr, config.lr_decay_style
    w, end = config.warmup_and_decay(default_decay_iters, batch)
    wsd_iters = config.lr_wsd_decay_iters or max(1, int(end) // 10)
    require(
        w <= end,
        f"the warm-up of {w:g} iterations (--lr-warmup-iters) is more than the {end:g} of the decay (--lr-decay-iters, "
        "else the length of the run)",
    )
    require(
        style != "WSD" or wsd_iters <= end - w,
        f"--lr-wsd-decay-iters {wsd_iters} does not fit between the warm-up of {w:g} and the end of the decay at "
        f"{end:g}",
    )
    iterations = np.minimum(n, end)
    r = (iterations - w) / (end - w) if end > w else np.ones_like(n)
    if style == "constant":
        rates = np.full_like(n, p)
    elif style == "linear":
        rates = f + (p - f) * (1 - r)
    elif style == "cosine":
        rates = f + (p - f) * (np.cos(np.pi * r) + 1) / 2
    elif style == "cosine-2019":
        rates = np.maximum(f, p / 2 * (np.cos(np.pi * (np.minimum(n, end - w) - w) / end) + 1))
    elif style == "exponential":
        rates = np.maximum(f, p * 0.5**r)
    else:
        assert style == "WSD"
        q = np.maximum(0.0, (iterations - (end - wsd_iters)) / wsd_iters)
        rates = f + (p - f) * (2 * 0.5**q - 1)
    return np.where(n <= w, p * n / w, rates) if w else rates


class MixedPrecisionOptimizer:
    """Computes the gradient norm, unscales and clips the gradients, updates the masters with AdamW, and rounds the
    masters into the model. If the norm is not finite, the step is skipped.

    The code is the same for fp32, bf16 and fp16. Only `buffer` (in fp32 the masters are the parameters) and `scaler`
    differ.

    lr_by_update: [iterations + 1], the learning rate after n updates (steps that were not skipped). After the end of
        the schedule, the last rate is used.
    squared_norm: a function with the signature of `mpu.all_reduced_squared_norm`.

    These attributes are scalars on the device:

    num_updates, skipped_steps, skipped_in_a_row: int64, the numbers of updates, of skipped steps, and of successive
        skipped steps before the next step.
    found_inf: float32, 1.0 if the last step was skipped.
    grad_norm: float32, the gradient norm of the last step before clipping.
    learning_rate: float32, the rate of the next step.

    With an offloaded optimizer, masters and moments are in host memory and AdamW runs on the CPU. Each owned range
    needs two copies: the gradients to the host, and the weights to the device. The host waits for the device once in a
    step, for the scalars that AdamW needs.
    """

    def __init__(
        self,
        buffer: ParamAndGradBuffer,
        param_gather: ParamAllGather,
        config: OptimizerConfig,
        scaler: LossScaler,
        lr_by_update: Tensor,
        squared_norm: Callable[..., Tensor] = mpu.all_reduced_squared_norm,
    ) -> None:
        device = buffer.params.device
        self.buffer, self.param_gather, self.scaler, self.squared_norm = buffer, param_gather, scaler, squared_norm
        self._lr_by_update = lr_by_update.to(device=device, dtype=torch.float32)
        counts = torch.zeros(3, dtype=torch.int64, device=device)
        self.num_updates, self.skipped_steps, self.skipped_in_a_row = counts.unbind()
        self.found_inf, self.grad_norm = torch.zeros(2, dtype=torch.float32, device=device).unbind()
        self.learning_rate = self._lr_by_update[0].clone()

        self._host_grads = buffer.zeros_like_owned_ranges(pinned=True) if buffer.is_offloaded else None
        self._config = config
        # Muon has only the first moment.
        self.moments = {name: buffer.zeros_like_owned_ranges(for_muon_params=name == "exp_avg") for name in MOMENTS}
        self._adam_steps = [torch.zeros((), dtype=torch.float32, device=master.device) for master in buffer.masters]

    def step(self) -> None:
        """Update the weights from the summed, scaled gradients in `buffer.owned_grads()`, and free the gradients."""
        grads = self.buffer.owned_grads()
        self.grad_norm = self._unscaled_norm(grads)
        # The norm is the same on all ranks, so either all ranks skip the step or none. x · 0 is NaN exactly if x is not
        # finite. `x * 0 != 0` takes 3 kernels on a GPU; torch.isfinite takes 6.
        self.found_inf = (self.grad_norm * 0 != 0).float()
        # AdamW's fused kernel divides gradients by grad_scale, so no other pass unscales and clips the gradients.
        grad_scale = (self.scaler.scale / self._clip_factor(self.grad_norm)).nan_to_num(1.0)
        grads = self._to_masters(grads)
        # With an offloaded optimizer, this copy makes the host wait for the device, also for the copies of gradients.
        scalars = torch.stack([self.learning_rate, grad_scale, self.found_inf]).to(self.buffer.masters[0].device)
        self.param_gather.finish_param_sync()  # before the update overwrites the parameters
        self._update(grads, *scalars.unbind())
        del grads
        self.buffer.free_grads()
        self.buffer.copy_model_weights_to_params()
        self.param_gather.start_param_sync()
        self._count_step()

    def _unscaled_norm(self, grads: Sequence[Tensor]) -> Tensor:
        """Return the norm of the gradients of all ranks, without the loss scale."""
        counted = [
            (grad, owned.group_key.is_tensor_parallel)
            for grad, owned in zip(grads, self.buffer.owned_ranges, strict=True)
            if not owned.group_key.is_duplicate
        ]
        squared = self.squared_norm(
            (g for g, is_tensor_parallel in counted if is_tensor_parallel),
            (g for g, is_tensor_parallel in counted if not is_tensor_parallel),
            self.buffer.params.device,
            sharded=self.buffer.is_sharded,
        )
        return (squared.sqrt() / self.scaler.scale).float()

    def _clip_factor(self, norm: Tensor) -> Tensor:
        """Return the factor that clips gradients of this norm (--clip-grad)."""
        largest = self._config.clip_grad
        return (largest / (norm + 1e-6)).clamp_max(1.0) if largest > 0 else torch.ones_like(norm)

    def _to_masters(self, grads: list[Tensor]) -> list[Tensor]:
        """Return the gradients, copied to host memory if the masters are there."""
        if self._host_grads is None:
            return grads
        for host, grad in zip(self._host_grads, grads, strict=True):
            host.copy_(grad, non_blocking=True)
        return self._host_grads

    def _count_step(self) -> None:
        """Count the step, and set loss scale and learning rate for the next step."""
        skipped = self.found_inf.long()
        self.skipped_steps += skipped
        self.skipped_in_a_row = (self.skipped_in_a_row + skipped) * skipped
        self.num_updates += 1 - skipped
        self.scaler.update(self.found_inf)
        # Indexing with a 0-dimensional tensor would make the host read the tensor.
        index = self.num_updates.clamp_max(len(self._lr_by_update) - 1)
        self.learning_rate.copy_(self._lr_by_update.index_select(0, index.view(1)).view(()))

    def _update(self, grads: Sequence[Tensor], rate: Tensor, grad_scale: Tensor, found_inf: Tensor) -> None:
        """Update the masters with AdamW, and round them to `model_weights`. One call of the kernel updates all ranges
        with equal weight decay and rate. Parameters that Muon updates are left out."""
        config, buffer = self._config, self.buffer
        groups = collections.defaultdict[tuple[bool, float], list[int]](list)
        for index, (_, _, key) in enumerate(buffer.owned_ranges):
            if not key.uses_muon:
                groups[key.decays, key.lr_multiplier].append(index)
        masters_are_weights = buffer.model_weights is buffer.masters  # in fp32
        for (decays, multiplier), indices in groups.items():
            masters, gradients, exp_avgs, exp_avg_sqs, steps, weights = (
                [tensors[index] for index in indices]
                for tensors in (buffer.masters, grads, *self.moments.values(), self._adam_steps, buffer.model_weights)
            )
            kernels.adamw_(
                masters,
                gradients,
                exp_avgs,
                exp_avg_sqs,
                steps,
                [] if masters_are_weights else weights,
                rate if multiplier == 1 else rate * multiplier,
                grad_scale,
                found_inf,
                config.adam_beta1,
                config.adam_beta2,
                config.adam_eps * multiplier,
                config.weight_decay if decays else 0.0,
            )

    def copy_masters_and_gather(self) -> None:
        """Round this rank's masters into the model, and start to gather the shards of other ranks."""
        self.param_gather.finish_param_sync()
        self.buffer.copy_masters_to_params()
        self.param_gather.start_param_sync()

    def state_shards(self) -> Iterator[ParamShard]:
        """Yield this rank's shards of masters and moments, parameter by parameter, as views. Checkpoints save them."""
        for name in self.buffer.ranges:
            index, part, start = self.buffer.owned_part(name)
            yield ParamShard("master", name, self.buffer.masters[index][part], start)
            for moment in MOMENTS[:1] if name in self.buffer.muon_params else MOMENTS:
                yield ParamShard(moment, name, self.moments[moment][index][part], start)

    def state_dict(self) -> dict[str, Any]:
        """Return the scalars that a resume needs in addition to `state_shards`, as JSON. The host waits for the
        device."""
        return {
            "num_updates": int(self.num_updates),
            "skipped_steps": int(self.skipped_steps),
            "adam_steps": int(self._adam_steps[0]),
            "loss_scaler": self.scaler.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`, after `state_shards` were filled. Round the masters into the model."""
        self.scaler.load_state_dict(state["loss_scaler"])
        self.skipped_steps.fill_(state["skipped_steps"])
        self.set_num_updates(state["num_updates"])
        for steps in self._adam_steps:
            # `adam_steps` is less than `num_updates` if the moments were reset once (--no-load-optim).
            steps.fill_(state["adam_steps"])
        self.copy_masters_and_gather()

    def set_num_updates(self, num_updates: int) -> None:
        """Set the number of updates, and the learning rate of the next update."""
        self.num_updates.fill_(num_updates)
        self.learning_rate.copy_(self._lr_by_update[min(num_updates, len(self._lr_by_update) - 1)])
