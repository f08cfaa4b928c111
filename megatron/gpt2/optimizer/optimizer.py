"""AdamW over flat float32 masters, for fp32, bf16 and fp16 alike, without a host synchronisation.

Whether a step is skipped, by how much its gradients are clipped, and the learning rate (which counts steps that
were not skipped) are scalars on the device: the host reads them at log lines alone.

Each rank updates the ranges of `flat` that its optimizer owns: all of the buffer, or with a sharded optimizer (ZeRO
stage 1, arXiv:1910.02054) its part of every bucket, after which the parameters of the others are gathered.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

import mpu
from megatron.gpt2.config import OptimizerConfig
from megatron.gpt2.optimizer.flat_parameters import FlatParameters, FlatState
from megatron.gpt2.optimizer.gradient_reducer import ParameterGatherer

LATE = 4  # steps
MOMENTS = ("exp_avg", "exp_avg_sq")


class LateReading:
    """The values of an integer on `device`, each LATE calls after it was given.

    A call starts to copy the present value into pinned memory, and returns the one of LATE calls before, 0 in the first
    ones. Only that old copy is waited for: meanwhile the device has the steps since then to do. So all ranks read the
    same value at the same step, and may branch on it, which they may not on whatever has arrived by chance. On a CPU
    every copy is there at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._copies = torch.zeros(LATE, dtype=torch.int64, pin_memory=self._on_gpu)
        self._values = self._copies.numpy()  # the same memory
        self._arrivals: list[torch.cuda.Event | None] = [None] * LATE
        self._calls = 0

    def __call__(self, value: Tensor) -> int:
        """value: a scalar on the device, int64."""
        place = self._calls % LATE
        self._calls += 1
        if (arrival := self._arrivals[place]) is not None:
            arrival.synchronize()
        before = int(self._values[place])
        self._copies[place].copy_(value, non_blocking=True)
        if self._on_gpu:
            self._arrivals[place] = arrival = torch.cuda.Event()
            arrival.record()
        return before


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
    """A scale that follows the overflows, kept on the device: raising and lowering it never makes the host wait.

    Semantics of Megatron's dynamic loss scaler: the first `hysteresis` - 1 overflows only skip the step. Every later
    one also halves the scale, until `window` clean steps in a row double it and refill the hysteresis.

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


def build_loss_scaler(config: OptimizerConfig, dtype: torch.dtype, device: torch.device | str) -> LossScaler:
    """The loss scale of a run that computes in `dtype`: dynamic or static in fp16, constantly 1 in fp32 and bf16."""
    if dtype != torch.float16:
        return LossScaler(1.0, device)
    if config.loss_scale is not None:
        return LossScaler(config.loss_scale, device)
    return DynamicLossScaler(
        config.initial_loss_scale,
        minimum=config.min_loss_scale,
        window=config.loss_scale_window,
        hysteresis=config.hysteresis,
        device=device,
    )


class AdamWOptimizer:
    """Norm → skip if it is not finite → unscale, clip, AdamW on the masters → round into the model → schedule.

    It serves fp32, bf16 and fp16; what differs is in `flat` (in fp32 the masters are the parameters themselves) and in
    `scaler`. rates: [iterations + 1], kept in float32: the learning rate after n steps that were not skipped; past its
    end the last one holds. squared_norm: takes what `mpu.squared_norm` takes. A gradient norm that is not finite skips
    the step in every precision: it would poison the weights in any.

    good_steps, skipped_steps, skipped_in_a_row: int64 counts. found_inf: float32, 1.0 where the last step was skipped.
    grad_norm: float32, of the last step, before clipping. learning_rate: float32, of the next step. All of them are
    scalars on the device.

    With an offloaded optimizer masters and moments are in host memory and AdamW runs there. Gradients are copied to
    the host and weights back in one copy for each owned range; the host waits for the device once in a step, when the
    scalars that AdamW needs arrive behind the gradients.
    """

    def __init__(
        self,
        flat: FlatParameters,
        gatherer: ParameterGatherer,
        config: OptimizerConfig,
        scaler: LossScaler,
        rates: Tensor,
        squared_norm: Callable[..., Tensor] = mpu.squared_norm,
    ) -> None:
        device = flat.params.device
        self.flat, self.gatherer, self.scaler, self.squared_norm = flat, gatherer, scaler, squared_norm
        self._rates = rates.to(device=device, dtype=torch.float32)
        counts = torch.zeros(3, dtype=torch.int64, device=device)
        self.good_steps, self.skipped_steps, self.skipped_in_a_row = counts.unbind()
        self.found_inf, self.grad_norm = torch.zeros(2, dtype=torch.float32, device=device).unbind()
        self.learning_rate = self._rates[0].clone()

        self._host_grads = flat.room(pinned=True) if flat.offloaded else None
        self._config = config
        self.moments = {name: flat.room() for name in MOMENTS}
        self._adam_steps = [torch.zeros((), dtype=torch.float32, device=master.device) for master in flat.masters]

    def step(self) -> None:
        """One update from the summed, scaled gradients in `flat.owned_grads()`, which are freed by it."""
        grads = self.flat.owned_grads()
        self.grad_norm = self._unscaled_norm(grads)
        # The norm is the same on all ranks, so all of them skip or none.
        self.found_inf = (~torch.isfinite(self.grad_norm)).float()
        # AdamW's fused kernel divides by grad_scale as it reads, which unscales and clips in the same pass.
        grad_scale = (self.scaler.scale / self._clip_factor(self.grad_norm)).nan_to_num(1.0)
        grads = self._to_masters(grads)
        # To where the masters are: from a GPU to the host this waits, also for the gradients before it.
        scalars = torch.stack([self.learning_rate, grad_scale, self.found_inf]).to(self.flat.masters[0].device)
        self._adamw(grads, *scalars.unbind())
        del grads
        self.flat.free_grads()
        self.write_back()
        self._schedule()

    def _unscaled_norm(self, grads: Sequence[Tensor]) -> Tensor:
        """The norm of the gradients of all ranks, without the loss scale."""
        counted = [
            (grad, segment.is_split)
            for grad, segment in zip(grads, self.flat.owned, strict=True)
            if not segment.is_copy
        ]
        squared = self.squared_norm(
            (g for g, is_split in counted if is_split),
            (g for g, is_split in counted if not is_split),
            self.flat.params.device,
            sharded=self.flat.is_sharded,
        )
        return (squared.sqrt() / self.scaler.scale).float()

    def _clip_factor(self, norm: Tensor) -> Tensor:
        """What gradients of this norm are multiplied by (--clip-grad)."""
        largest = self._config.clip_grad
        return (largest / (norm + 1e-6)).clamp_max(1.0) if largest > 0 else torch.ones_like(norm)

    def _to_masters(self, grads: list[Tensor]) -> list[Tensor]:
        """The gradients, where the masters are."""
        if self._host_grads is None:
            return grads
        for host, grad in zip(self._host_grads, grads, strict=True):
            host.copy_(grad, non_blocking=True)
        return self._host_grads

    def _schedule(self) -> None:
        """Count the step, and set loss scale and learning rate for the next one."""
        skipped = self.found_inf.long()
        self.skipped_steps += skipped
        self.skipped_in_a_row = (self.skipped_in_a_row + skipped) * skipped
        self.good_steps += 1 - skipped
        self.scaler.update(self.found_inf)
        # Indexing with a tensor of no dimension would read it on the host.
        place = self.good_steps.clamp_max(len(self._rates) - 1)
        self.learning_rate.copy_(self._rates.index_select(0, place.view(1)).view(()))

    def _adamw(self, grads: Sequence[Tensor], rate: Tensor, grad_scale: Tensor, found_inf: Tensor) -> None:
        """torch's fused kernel, as a function: the class would load the compiler, 0.9 s of every start."""
        config = self._config
        for decays, weight_decay in ((True, config.weight_decay), (False, 0.0)):
            chosen = [index for index, segment in enumerate(self.flat.owned) if segment.decays == decays]
            masters, gradients, exp_avgs, exp_avg_sqs, steps = (
                [tensors[index] for index in chosen]
                for tensors in (self.flat.masters, grads, *self.moments.values(), self._adam_steps)
            )
            adamw(
                masters,
                gradients,
                exp_avgs,
                exp_avg_sqs,
                [],
                steps,
                fused=True,
                grad_scale=grad_scale,
                found_inf=found_inf,
                amsgrad=False,
                beta1=config.adam_beta1,
                beta2=config.adam_beta2,
                lr=rate,
                weight_decay=weight_decay,
                eps=config.adam_eps,
                maximize=False,
            )

    def write_back(self) -> None:
        """Bring the masters into the model: round this rank's own, and start to fetch what others own."""
        self.gatherer.wait()
        self.flat.write_back()
        self.gatherer.launch()

    def tensors(self) -> Iterator[FlatState]:
        """The masters and moments that this rank owns, parameter by parameter, as views: what a checkpoint holds."""
        for name in self.flat.ranges:
            index, part, start = self.flat.owned_part_of(name)
            yield FlatState("master", name, self.flat.masters[index][part], start)
            for moment in MOMENTS:
                yield FlatState(moment, name, self.moments[moment][index][part], start)

    def state_dict(self) -> dict[str, Any]:
        """The scalars that a resume needs (JSON), beside what `tensors` gives. Reading them waits for the device."""
        return {
            "good_steps": int(self.good_steps),
            "skipped_steps": int(self.skipped_steps),
            "adam_steps": int(self._adam_steps[0]),
            "loss_scaler": self.scaler.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave, after `tensors` were filled, and round the masters into the model."""
        self.scaler.load_state_dict(state["loss_scaler"])
        self.skipped_steps.fill_(state["skipped_steps"])
        self.set_good_steps(state["good_steps"])
        for steps in self._adam_steps:
            # Fewer than the schedule's where the moments were once started afresh (--no-load-optim).
            steps.fill_(state["adam_steps"])
        self.write_back()

    def masters_from_model(self) -> None:
        """Set the masters to the model's weights, after those were loaded alone."""
        self.flat.read_back()

    def set_good_steps(self, good_steps: int) -> None:
        """Put the schedule where it is after `good_steps` steps that were not skipped."""
        self.good_steps.fill_(good_steps)
        self.learning_rate.copy_(self._rates[min(good_steps, len(self._rates) - 1)])
