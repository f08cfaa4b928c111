"""The section `train`: length, batch, precision, recomputation, evaluation and logs."""

import math
from dataclasses import dataclass

from data_utils.batch_schedule import BatchSchedule
from megatron.gpt2.config.options import option, require, require_positive

DROPOUT_RNG_CHOICES = ("counter", "torch")
PRECISION_CHOICES = ("auto", "fp32", "bf16", "fp16", "fp16-on-gpu")


@dataclass(frozen=True)
class TrainConfig:
    """Length, batch, precision, recomputation, evaluation and logs."""

    micro_batch_size: int = option(4, "samples of one forward pass on one data-parallel rank", "--batch-size")
    global_batch_size: int | None = option(
        None,
        "samples of a step over all ranks; more than micro-batch × "
        "data-parallel size accumulates (default: no accumulation)",
    )
    gradient_accumulation_steps: int | None = option(
        None, "micro-batches of each rank in a step, in the place of --global-batch-size", "--gas"
    )
    rampup_batch_size: tuple[int, ...] = option(
        (),
        "START INCREMENT SAMPLES: steps take START samples at first, and --global-batch-size when SAMPLES are "
        "consumed, growing by INCREMENT at equal distances",
        metavar="N",
    )
    step_batch_size_schedule: tuple[str, ...] = option(
        (),
        'TOKENS:SIZE for each size of the batch, as in "0:16 2.4B:320": from so many consumed tokens on a step '
        "takes SIZE samples; K, M, B and T are powers of 1000",
        metavar="TOKENS:SIZE",
    )
    train_iters: int | None = option(None, "length in iterations")
    train_samples: int | None = option(None, "length in samples")
    train_tokens: int | None = option(None, "length in tokens")
    train_epochs: float | None = option(None, "length in epochs of the training split")
    seed: int = option(1234, "seed of weights, data order and dropout")
    dropout_rng: str = option(
        "counter",
        "what dropout's masks follow from: counter, the numbers of sample, layer and "
        "position, so that they are the same in every layout; torch, a random stream "
        "of each rank, as in Megatron",
        choices=DROPOUT_RNG_CHOICES,
    )
    precision: str = option(
        "auto",
        "auto: bf16 where it is native, else fp16 on a GPU and fp32 on a CPU; fp16-on-gpu, "
        "as --fp16 is read: fp16 on a GPU, auto on a CPU",
        choices=PRECISION_CHOICES,
    )
    device: str = option("auto", "auto: cuda if there is a usable GPU", choices=("auto", "cpu", "cuda"))
    recompute_granularity: str = option(
        "none",
        "what backward computes again instead of keeping: selective, the outputs of GELU and of layer norms "
        "(Megatron: attention's core); full, all but the input of every --recompute-num-layers layers",
        choices=("none", "selective", "full"),
    )
    recompute_num_layers: int = option(
        1, "layers recomputed together", "--checkpoint-num-layers", "--activations-checkpoint-num-layers"
    )
    compile: bool = option(
        False, "compile each transformer layer with torch.compile: a minute at the start, faster steps after it"
    )
    deterministic: bool = option(
        False, "the same command gives the same bits again, on a GPU too, with slower kernels", "--deterministic-mode"
    )
    attention_backend: str = option(
        "auto",
        "kernel of attention on a GPU: FlashAttention, cuDNN's (fused), the "
        "memory-efficient one, plain formulas (unfused), or the fastest of a "
        "measurement at the start",
        choices=("auto", "flash", "fused", "efficient", "unfused"),
    )
    eval_iters: int = option(100, "global batches that an evaluation reads; a smaller split is read once")
    eval_interval: int = option(1000, "iterations between evaluations")
    log_interval: int = option(100, "iterations between log lines")
    exit_interval: int | None = option(None, "save and exit when the iteration is divisible by this")
    exit_duration_in_mins: float | None = option(None, "save and exit after this many minutes")
    max_skipped_steps: int = option(50, "steps in a row with a non-finite gradient that end the run")
    rewind_on_spike: float | None = option(
        None,
        "a log line whose loss is above so many times the median of the lines before it (without a value: 1.5): "
        "the run goes back to the checkpoint before it and skips the samples since then",
        metavar="FACTOR",
        alone=1.5,
    )
    log_straggler: bool = option(
        False,
        "at log lines: warn of a rank that takes longer than the others, without its "
        "waiting for them, and say in which part of a step",
    )
    check_replicas_interval: int | None = option(
        None,
        "steps between two checks that no bit has flipped in weights and optimizer: each rank's own after an "
        "update and before the next one, and equal ones on all ranks that hold them",
        "--check-weight-hash-across-dp-replicas-interval",
    )
    tensorboard_dir: str | None = option(None, "folder of TensorBoard's event files")
    wandb_project: str | None = option(None, "log to this project of Weights & Biases")
    wandb_entity: str | None = option(None, "the owner of that project (default: yourself)")
    wandb_exp_name: str | None = option(None, "name of the run there (default: the name of the --save folder)")
    wandb_save_dir: str | None = option(None, "folder of its local files (default: wandb in the --save folder)")
    profile: tuple[int, ...] = option(
        (),
        "START END: torch's profiler over these iterations; a trace in the --save "
        "folder and a table of the costliest operations",
        metavar="N",
    )
    profile_ranks: tuple[int, ...] = option((0,), "ranks that are profiled", metavar="RANK")

    def __post_init__(self) -> None:
        require_positive(
            self,
            "micro_batch_size",
            "global_batch_size",
            "gradient_accumulation_steps",
            "eval_interval",
            "log_interval",
            "recompute_num_layers",
            "max_skipped_steps",
            "exit_interval",
            "exit_duration_in_mins",
            "check_replicas_interval",
        )
        require(
            self.rewind_on_spike is None or self.rewind_on_spike > 1,
            f"--rewind-on-spike must be above 1, not {self.rewind_on_spike}: it is a factor",
        )
        require(0 <= self.seed < 2**31, f"--seed must be in [0, 2**31), not {self.seed}")
        require(self.eval_iters >= 0, f"--eval-iters must not be negative, got {self.eval_iters}")
        require(
            not self.profile or len(self.profile) == 2 and 1 <= self.profile[0] <= self.profile[1],
            f"--profile takes the first iteration and the last, counted from 1, not {' '.join(map(str, self.profile))}",
        )
        ramp = self.rampup_batch_size
        require(
            not ramp or len(ramp) == 3 and min(ramp[:2]) > 0 and ramp[2] >= 0,
            f"{self.growth}: it takes START, INCREMENT and SAMPLES, the first two above 0",
        )
        require(
            not (ramp and self.step_batch_size_schedule),
            "give --rampup-batch-size or --step-batch-size-schedule, not both",
        )
        lengths = [
            name
            for name in ("train_iters", "train_samples", "train_tokens", "train_epochs")
            if getattr(self, name) is not None
        ]
        require(
            len(lengths) <= 1,
            "the length is given twice: " + " and ".join("--" + name.replace("_", "-") for name in lengths),
        )
        require_positive(self, *lengths)

    @property
    def growth(self) -> str:
        """The flag by which the batch grows, as one would give it; empty where none is given."""
        return (
            f"--rampup-batch-size {' '.join(map(str, self.rampup_batch_size))}"
            if self.rampup_batch_size
            else f"--step-batch-size-schedule {' '.join(self.step_batch_size_schedule)}"
            if self.step_batch_size_schedule
            else ""
        )

    def batch_schedule(self, seq_length: int, *, default: int) -> BatchSchedule:
        """The samples of each step over all ranks; `default` where no flag gives a size. ValueError where the flags do
        not fit together."""
        final = self.global_batch_size or default
        if self.step_batch_size_schedule:
            schedule = BatchSchedule(_stages(self.step_batch_size_schedule, seq_length, self.growth))
            require(
                self.global_batch_size in (None, schedule.final),
                f"--global-batch-size {final} is not the last size of {self.growth}: leave one of them out",
            )
            return schedule
        if not self.rampup_batch_size:
            return BatchSchedule.constant(final)
        start, increment, samples = self.rampup_batch_size
        require(
            start <= final and (final - start) % increment == 0,
            f"{self.growth}: {increment} samples at a time do not lead from {start} to --global-batch-size {final}",
        )
        return BatchSchedule.rampup(start, increment, samples, final)

    def iterations(
        self,
        *,
        schedule: BatchSchedule,
        seq_length: int,
        samples_per_epoch: int,
        iteration: int = 0,
        consumed_samples: int = 0,
    ) -> int:
        """The length in iterations: the fewest that see at least the samples, tokens or epochs asked for.

        A run that is continued at `iteration` may have consumed its samples in batches of another size.
        """
        if self.train_iters is not None:
            return self.train_iters
        if self.train_samples is not None:
            samples = self.train_samples
        elif self.train_tokens is not None:
            samples = -(-self.train_tokens // seq_length)
        elif self.train_epochs is not None:
            samples = math.ceil(self.train_epochs * samples_per_epoch)
        else:
            raise ValueError("no length: give --train-iters, --train-samples, --train-tokens or --train-epochs")
        return iteration + schedule.steps_until(samples, consumed_samples)


def _stages(words: tuple[str, ...], seq_length: int, flag: str) -> tuple[tuple[int, int], ...]:
    """Megatron's --step-batch-size-schedule: `TOKENS:SIZE` in one word or several, also with commas between them."""
    stages: dict[int, int] = {}
    for step in " ".join(words).replace(",", " ").split():
        tokens, _, size = step.partition(":")
        try:
            first = _with_suffix(tokens) // seq_length
            require(first >= 0 and first not in stages and _with_suffix(size) > 0, "")
            stages[first] = _with_suffix(size)
        except (ValueError, OverflowError):
            raise ValueError(f'{flag}: {step} is no further TOKENS:SIZE, as in "0:16 2.4B:320"') from None
    ordered = sorted(stages.items())
    sizes = [size for _, size in ordered]
    require(0 in stages and sizes == sorted(sizes), f"{flag}: sizes go from 0 on, and never fall")
    return tuple(ordered)


def _with_suffix(number: str) -> int:
    """1.5K is 1500, as Megatron reads it."""
    thousands = "KMBT".find(number[-1:].upper()) + 1 if number else 0
    return int(float(number[:-1] if thousands else number) * 1000**thousands)
