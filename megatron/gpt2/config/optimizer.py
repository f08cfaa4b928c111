"""The section `optimizer`: AdamW, its schedule and the loss scale."""

from dataclasses import dataclass

from megatron.gpt2.config.options import option, require, require_fraction, require_positive


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, its schedule and the loss scale."""

    lr: float = option(1e-4, "peak learning rate")
    min_lr: float = option(0.0, "floor of the schedule")
    lr_decay_style: str = option(
        "linear",
        "shape of the schedule after warm-up; cosine-2019 divides by all iterations, as Megatron did in 2019",
        choices=("linear", "cosine", "cosine-2019", "constant", "exponential", "WSD"),
    )
    lr_decay_iters: int | None = option(None, "iterations over which the rate decays (default: all)")
    lr_decay_samples: int | None = option(None, "the same in samples")
    warmup: float = option(0.01, "fraction of the decay iterations that warm up", "--lr-warmup-fraction")
    lr_warmup_iters: int | None = option(None, "iterations that warm up, instead of a fraction", "--warmup-iters")
    lr_warmup_samples: int | None = option(None, "samples that warm up, instead of a fraction")
    lr_wsd_decay_iters: int | None = option(None, "iterations of WSD's final decay (default: a tenth)")
    weight_decay: float = option(0.01, "AdamW's decay of weights and embeddings; never of biases and layer norms")
    adam_beta1: float = option(0.9, "decay of the first moment")
    adam_beta2: float = option(0.999, "decay of the second moment")
    adam_eps: float = option(1e-8, "added to the root of the second moment")
    clip_grad: float = option(1.0, "largest global gradient norm, to which larger ones are scaled down; 0: none is")
    loss_scale: float | None = option(None, "static fp16 loss scale (default: dynamic)")
    initial_loss_scale: float = option(2.0**32, "first dynamic loss scale")
    min_loss_scale: float = option(1.0, "least dynamic loss scale", "--min-scale")
    loss_scale_window: int = option(1000, "clean steps that double the dynamic loss scale")
    hysteresis: int = option(2, "overflows until the dynamic loss scale halves, the halving one included")
    override_opt_param_scheduler: bool = option(
        False, "take the schedule from the flags, not from the checkpoint", "--override-lr-scheduler"
    )
    use_checkpoint_opt_param_scheduler: bool = option(
        False, "take the schedule from the checkpoint, not the flags", "--use-checkpoint-lr-scheduler"
    )

    def __post_init__(self) -> None:
        require_positive(
            self,
            "lr",
            "lr_decay_iters",
            "lr_decay_samples",
            "lr_wsd_decay_iters",
            "adam_eps",
            "loss_scale",
            "initial_loss_scale",
            "min_loss_scale",
            "loss_scale_window",
        )
        require_fraction(self, "adam_beta1", "adam_beta2")
        require(self.weight_decay >= 0, f"--weight-decay must not be negative, got {self.weight_decay}")
        require(0 <= self.min_lr <= self.lr, f"--min-lr {self.min_lr} must lie between 0 and --lr {self.lr}")
        for flag, value in (("iters", self.lr_warmup_iters), ("samples", self.lr_warmup_samples)):
            require(value is None or value >= 0, f"--lr-warmup-{flag} must not be negative, got {value}")
        for name in ("decay", "warmup"):
            require(
                getattr(self, f"lr_{name}_iters") is None or getattr(self, f"lr_{name}_samples") is None,
                f"give --lr-{name}-iters or --lr-{name}-samples, not both",
            )
        require(
            0.0 <= self.warmup <= 1.0,
            f"--warmup is a fraction, not {self.warmup}; iterations go into --lr-warmup-iters",
        )
        require(self.clip_grad >= 0, f"--clip-grad must not be negative, got {self.clip_grad}")
        require(self.hysteresis >= 1, f"--hysteresis must be at least 1, not {self.hysteresis}")
        require(
            not (self.override_opt_param_scheduler and self.use_checkpoint_opt_param_scheduler),
            "give --override-lr-scheduler or --use-checkpoint-lr-scheduler, not both",
        )

    def warmup_and_decay(self, train_iters: int, batch: int) -> tuple[float, float]:
        """The lengths of the warm-up and of the decay, in iterations of `batch` samples. They need not be whole, and
        those of the published runs were not. train_iters: of a decay that no flag names."""
        decay = self.lr_decay_iters or (self.lr_decay_samples or 0) / batch or train_iters
        if self.lr_warmup_samples is not None:
            return self.lr_warmup_samples / batch, decay
        return self.warmup * decay if self.lr_warmup_iters is None else self.lr_warmup_iters, decay
