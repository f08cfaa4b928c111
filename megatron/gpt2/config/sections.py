"""The configuration of a run: `Config` and its sections, frozen dataclasses that check their values when they are made.

Each field is one command-line flag (`num_layers` is `--num-layers`); `option` gives it its help text, the values that it
takes and the other spellings that Megatron users know. `flags.py` builds the parser from these fields, so that a flag
exists in exactly one place. Defaults are those of Megatron's 2019 release unless the help text says otherwise. Values
that follow from others are properties or methods. Flags that exclude each other are in `arguments.py`.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from data_utils.samplers import BatchSchedule
from megatron.gpt2.pipeline.schedule import SCHEDULES, Schedule, build_schedule, layers_of_stages, virtual_stages


class Bound(NamedTuple):
    """Which numbers a field takes. words: the same, after "must be"."""

    holds: Callable[[float], bool]
    words: str


POSITIVE = Bound(lambda number: number > 0, "positive")
NOT_NEGATIVE = Bound(lambda number: number >= 0, "at least 0")
FRACTION = Bound(lambda number: 0 <= number < 1, "in [0, 1)")
SHARE = Bound(lambda number: 0 <= number <= 1, "in [0, 1]")


def option(
    default: Any,
    help: str,
    *aliases: str,
    bound: Bound = POSITIVE,
    choices: tuple[str, ...] = (),
    metavar: str | None = None,
    alone: Any = None,
) -> Any:
    """A dataclass field that is also a flag.

    help: its text for --help and docs/reference/flags.md. aliases: other spellings of the flag, written as on the
    command line. bound: if the field is a number, which ones it takes. choices: the values that it takes; empty: any.
    metavar: stands for its value in --help. alone: the value if the flag is given without one.
    """
    how = {"help": help, "aliases": aliases, "bound": bound, "choices": choices, "metavar": metavar, "alone": alone}
    return field(default=default, metadata=how)


def flag(key: str) -> str:
    """The flag of a field: "num_layers", or "model.num_layers" -> "--num-layers"."""
    return "--" + key.rpartition(".")[2].replace("_", "-")


def require(condition: bool, message: str) -> None:
    """Raise ValueError(message), the error that a user sees as one line, unless `condition` holds."""
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True)
class Section:
    """What the sections share: each number is checked against its bound. None is always taken."""

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value, (holds, words) = getattr(self, f.name), f.metadata["bound"]
            if value is not None and f.type in (int, float, int | None, float | None):
                require(holds(value), f"{flag(f.name)} must be {words}, not {value}")


@dataclass(frozen=True)
class ModelConfig(Section):
    """The shape of GPT-2. `vocab_size` is the tokenizer's true size; rows are padded only inside the model."""

    num_layers: int = option(24, "transformer layers")
    hidden_size: int = option(1024, "width of the residual stream, h")
    num_attention_heads: int = option(16, "attention heads; must divide --hidden-size")
    ffn_hidden_size: int | None = option(None, "width inside the MLP (default 4h)", "--intermediate-size")
    max_position_embeddings: int = option(512, "learned positions; at least --seq-length")
    vocab_size: int | None = option(None, "true vocabulary size (default: the tokenizer's)")
    make_vocab_size_divisible_by: int = option(
        128, "pad the vocabulary to a multiple of this and of the model-parallel size"
    )
    attention_dropout: float = option(0.1, "dropout of the attention probabilities", bound=FRACTION)
    hidden_dropout: float = option(0.1, "dropout of embeddings and of both residual branches", bound=FRACTION)
    layernorm_epsilon: float = option(1e-5, "added to the variance in layer norms", "--norm-epsilon")
    gelu: str = option("tanh", "form of GELU: tanh is GPT-2's, erf is 4 times faster on a CPU", choices=("tanh", "erf"))
    init_method_std: float = option(0.02, "standard deviation of the initial weights")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.hidden_size % self.num_attention_heads == 0,
            f"--hidden-size {self.hidden_size} is not divisible by --num-attention-heads {self.num_attention_heads}",
        )
        # A damaged file may ask for more, and torch's error would not say where.
        for name in ("hidden_size", "ffn_hidden_size", "max_position_embeddings", "vocab_size"):
            width = getattr(self, name)
            require(
                width is None or width * self.hidden_size < 1 << 58,
                f"no memory holds a matrix of {width} x {self.hidden_size} numbers ({flag(name)})",
            )

    @property
    def ffn_size(self) -> int:
        """Width inside the MLP: --ffn-hidden-size, or 4h."""
        return 4 * self.hidden_size if self.ffn_hidden_size is None else self.ffn_hidden_size

    @property
    def has_dropout(self) -> bool:
        """Whether anything is dropped in training."""
        return self.attention_dropout > 0 or self.hidden_dropout > 0

    def flops_per_token(self, seq_length: int) -> int:
        """Model FLOPs of one token, forward and backward, attention credited in full: 72·l·h²·(1 + s/6h) + 6·h·V where
        the MLP is 4h wide (Megatron's formula, arXiv:2104.04473, section 5.1). Another width changes the 72."""
        h, layers = self.hidden_size, self.num_layers
        assert self.vocab_size is not None
        linears = 6 * layers * (4 * h * h + 2 * h * self.ffn_size)
        return linears + 12 * layers * h * seq_length + 6 * h * self.vocab_size


@dataclass(frozen=True)
class DataConfig(Section):
    """Where the text is and how it becomes tokens."""

    seq_length: int = option(512, "tokens in a sample", "--encoder-seq-length")
    train_data: tuple[str, ...] = option(
        (),
        "loose JSON (.json, .jsonl) or plain-text files, folders of them, or 'builtin'; none: the built-in corpus",
        metavar="FILE",
    )
    valid_data: tuple[str, ...] = option((), "files for validation, instead of a part of --split", metavar="FILE")
    test_data: tuple[str, ...] = option((), "files for the test, instead of a part of --split", metavar="FILE")
    data_path: tuple[str, ...] = option(
        (),
        "prefix of a .bin/.idx pair, instead of --train-data; several are mixed, "
        "by their sizes or by weights: 0.7 A 0.3 B",
        metavar="PREFIX",
    )
    valid_data_path: tuple[str, ...] = option(
        (), "prefixes for validation, instead of a part of --split", "--val-data-path", metavar="PREFIX"
    )
    test_data_path: tuple[str, ...] = option(
        (), "prefixes for the test, instead of a part of --split", metavar="PREFIX"
    )
    data_order: str = option(
        "shuffled",
        "shuffled: by seed, epoch and global sample number; megatron: as today's Megatron orders a prefix",
        choices=("shuffled", "megatron"),
    )
    split: str = option("969,30,1", "proportions of training, validation and test")
    text_key: str | None = option(None, "the JSON field that holds the text (default: text, else sentence)")
    max_bad_fraction: float = option(0.001, "share of unusable lines above which a text file is refused", bound=SHARE)
    data_cache_path: str | None = option(None, "folder of tokenised files (default: beside the user's cache)")
    tokenizer_type: str | None = option(
        None,
        "default: the small BPE shipped for the built-in corpus; GPT2BPETokenizer once --vocab-file is given, "
        "characters where it is a meta.pkl",
        choices=("GPT2BPETokenizer", "SentencePieceTokenizer", "bytes", "builtin", "characters"),
    )
    vocab_file: str | None = option(None, "GPT-2 vocabulary (encoder.json), or nanoGPT's meta.pkl of characters")
    merge_file: str | None = option(None, "GPT-2 merges (vocab.bpe)")
    tokenizer_model: str | None = option(
        None, "SentencePiece model; trained on the data if the file is missing", "--tokenizer-path"
    )
    tokenizer_vocab_size: int = option(8192, "pieces of a SentencePiece model that is to be trained")
    cache_dir: str | None = option(None, "folder searched for the GPT-2 vocabulary")
    eod_mask_loss: bool = option(False, "no loss where the input is the end-of-document token")
    reset_position_ids: bool = option(False, "positions count from 0 in each document")
    reset_attention_mask: bool = option(False, "tokens see only their own document")
    num_workers: int = option(
        2,
        "prefetch depth: steps whose batches one thread prepares ahead; 0: the training thread reads each batch itself",
        bound=NOT_NEGATIVE,
    )


@dataclass(frozen=True)
class OptimizerConfig(Section):
    """AdamW, its schedule and the loss scale."""

    lr: float = option(1e-4, "peak learning rate")
    min_lr: float = option(0.0, "floor of the schedule", bound=NOT_NEGATIVE)
    lr_decay_style: str = option(
        "linear",
        "shape of the schedule after warm-up; cosine-2019 divides by all iterations, as Megatron did in 2019",
        choices=("linear", "cosine", "cosine-2019", "constant", "exponential", "WSD"),
    )
    lr_decay_iters: int | None = option(None, "iterations over which the rate decays (default: all)")
    lr_decay_samples: int | None = option(None, "the same in samples")
    warmup: float = option(
        0.01,
        "fraction of the decay iterations that warm up; a number of iterations is --lr-warmup-iters",
        "--lr-warmup-fraction",
        bound=SHARE,
    )
    lr_warmup_iters: int | None = option(
        None, "iterations that warm up, instead of a fraction", "--warmup-iters", bound=NOT_NEGATIVE
    )
    lr_warmup_samples: int | None = option(None, "samples that warm up, instead of a fraction", bound=NOT_NEGATIVE)
    lr_wsd_decay_iters: int | None = option(None, "iterations of WSD's final decay (default: a tenth)")
    weight_decay: float = option(
        0.01, "AdamW's decay of weights and embeddings; never of biases and layer norms", bound=NOT_NEGATIVE
    )
    adam_beta1: float = option(0.9, "decay of the first moment", bound=FRACTION)
    adam_beta2: float = option(0.999, "decay of the second moment", bound=FRACTION)
    adam_eps: float = option(1e-8, "added to the root of the second moment")
    clip_grad: float = option(
        1.0, "largest global gradient norm, to which larger ones are scaled down; 0: none is", bound=NOT_NEGATIVE
    )
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
        super().__post_init__()
        require(self.min_lr <= self.lr, f"--min-lr {self.min_lr} is above --lr {self.lr}")

    def warmup_and_decay(self, train_iters: int, batch: int) -> tuple[float, float]:
        """The lengths of the warm-up and of the decay, in iterations of `batch` samples. They need not be whole, and
        those of the published runs were not. train_iters: of a decay that no flag names."""
        decay = self.lr_decay_iters or (self.lr_decay_samples or 0) / batch or train_iters
        if self.lr_warmup_samples is not None:
            return self.lr_warmup_samples / batch, decay
        return self.warmup * decay if self.lr_warmup_iters is None else self.lr_warmup_iters, decay


@dataclass(frozen=True)
class ParallelConfig(Section):
    """How the work is laid out over ranks."""

    model_parallel_size: int = option(1, "ranks that share each layer", "--tensor-model-parallel-size")
    pipeline_model_parallel_size: int = option(1, "ranks that hold successive layers, the stages of a pipeline")
    pipeline_schedule: str | None = option(
        None,
        "the order of forward and backward over the stages (default: 1f1b, or interleaved where each rank has "
        "several virtual stages)",
        choices=SCHEDULES,
    )
    num_layers_per_virtual_pipeline_stage: int | None = option(
        None, "each rank holds several groups of N layers, which shortens the bubble"
    )
    num_virtual_stages_per_pipeline_rank: int | None = option(None, "the same, by the number of groups per rank")
    decoder_first_pipeline_num_layers: int | None = option(
        None, "layers of the first stage (default: as many as the others, or fewer)"
    )
    decoder_last_pipeline_num_layers: int | None = option(None, "layers of the last stage")
    distributed_backend: str | None = option(
        None, "default: nccl on GPUs, gloo on CPUs", choices=("nccl", "gloo", "mpi")
    )
    distributed_timeout_minutes: float = option(
        10.0,
        "a collective that takes longer ends the run",
        bound=Bound(lambda minutes: 0 < minutes <= 1e6, "in (0, 1e6]"),
    )
    DDP_impl: str = option(
        "local", "data parallelism by our contiguous buffer or by torch's DDP", choices=("local", "torch")
    )
    ddp_bucket_size: int = option(25_000_000, "gradient elements reduced at once")
    sequence_parallel: bool = option(False, "split the sequence over the model-parallel ranks between the split layers")
    use_distributed_optimizer: bool = option(
        False, "each data-parallel rank holds masters and moments only of its part of every bucket (ZeRO stage 1)"
    )
    shard_gradients: bool = option(
        False,
        "with --use-distributed-optimizer: between micro-batches too, each data-parallel rank holds only the gradients "
        "of that part (ZeRO stage 2)",
    )
    exact_layouts: int | None = option(
        None,
        "sums have one order: the same bits with every model-parallel size that divides this power of two, every "
        "number of data-parallel ranks, and every pipeline",
        metavar="V",
    )
    grad_reduce_in_bf16: bool = option(False, "send gradients in bf16; they are accumulated in fp32")
    cpu_offload_optimizer: bool = option(
        False, "masters and moments in host memory, AdamW on the CPU", "--optimizer-cpu-offload", "--cpu-optimizer"
    )

    partition_activations: bool = option(
        False,
        "with --recompute-granularity full: every model-parallel rank keeps only its part of each input that "
        "is kept, and backward gathers it",
        "--distribute-saved-activations",
        "--distribute-checkpointed-activations",
    )
    checkpoint_in_cpu: bool = option(
        False, "with --recompute-granularity full, on a GPU: the inputs that are kept are in host memory"
    )
    cpu_offloading_num_layers: int = option(
        0,
        "without recomputation, on a GPU: the first N layers keep in host memory what backward needs",
        bound=NOT_NEGATIVE,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        stages = self.pipeline_model_parallel_size
        for name in ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"):
            require(
                getattr(self, name) is None or stages > 1,
                f"{flag(name)} needs --pipeline-model-parallel-size of at least 2",
            )
        for name in ("pipeline_model_parallel_size", "use_distributed_optimizer", "grad_reduce_in_bf16"):
            require(
                self.DDP_impl == "local" or getattr(self, name) == getattr(ParallelConfig, name),
                f"{flag(name)} needs --DDP-impl local: torch's DDP has its own way to reduce gradients",
            )
        require(
            not self.shard_gradients or self.use_distributed_optimizer,
            "--shard-gradients is about the part that a rank updates: give --use-distributed-optimizer as well",
        )
        require(
            not self.shard_gradients or stages == 1,
            f"--shard-gradients (--zero-stage 2) and --pipeline-model-parallel-size {stages}: a pipeline has several "
            "micro-batches in flight, whose gradients would each be sent; leave it out (--zero-stage 1)",
        )


PRECISION_CHOICES = ("auto", "fp32", "bf16", "fp16", "fp16-on-gpu")


@dataclass(frozen=True)
class TrainConfig(Section):
    """Length, batch, precision, recomputation, evaluation and logs."""

    micro_batch_size: int = option(4, "samples of one forward pass on one data-parallel rank", "--batch-size")
    global_batch_size: int | None = option(
        None,
        "samples of a step over all ranks; more than micro-batch × "
        "data-parallel size accumulates (default: no accumulation)",
    )
    gradient_accumulation_steps: int | None = option(
        None, "micro-batches of each rank in a step, instead of --global-batch-size", "--gas"
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
    seed: int = option(
        1234,
        "seed of weights, data order and dropout",
        bound=Bound(lambda seed: 0 <= seed < 2**31, "in [0, 2**31)"),
    )
    dropout_rng: str = option(
        "counter",
        "what dropout's masks follow from: counter, the numbers of sample, layer and "
        "position, so that they are the same in every layout; torch, a random stream "
        "of each rank, as in Megatron",
        choices=("counter", "torch"),
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
    eval_iters: int = option(
        100, "global batches that an evaluation reads; a smaller split is read once", bound=NOT_NEGATIVE
    )
    eval_interval: int = option(1000, "iterations between evaluations")
    log_interval: int = option(100, "iterations between log lines")
    exit_interval: int | None = option(None, "save and exit when the iteration is divisible by this")
    exit_duration_in_mins: float | None = option(None, "save and exit after this many minutes")
    max_skipped_steps: int = option(50, "steps in a row with a non-finite gradient that end the run")
    rewind_on_spike: float | None = option(
        None,
        "if the loss of a log line is above FACTOR (default: 1.5) times the median of the lines before it, the run goes "
        "back to the checkpoint before it and skips the samples since then",
        bound=Bound(lambda factor: factor > 1, "above 1"),
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
        super().__post_init__()
        require(
            not self.profile or len(self.profile) == 2 and 1 <= self.profile[0] <= self.profile[1],
            f"--profile takes the first iteration and the last, counted from 1, not {' '.join(map(str, self.profile))}",
        )
        ramp = self.rampup_batch_size
        require(
            not ramp or len(ramp) == 3 and min(ramp[:2]) > 0 and ramp[2] >= 0,
            f"{self.growth}: it takes START, INCREMENT and SAMPLES, the first two above 0",
        )

    @property
    def growth(self) -> str:
        """The flag by which the batch grows, as one would give it; empty if none is given."""
        for name in ("rampup_batch_size", "step_batch_size_schedule"):
            if words := getattr(self, name):
                return f"{flag(name)} {' '.join(map(str, words))}"
        return ""

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
        samples = self.train_samples
        if self.train_tokens is not None:
            samples = -(-self.train_tokens // seq_length)
        if self.train_epochs is not None:
            samples = math.ceil(self.train_epochs * samples_per_epoch)
        if samples is None:
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


@dataclass(frozen=True)
class CheckpointConfig(Section):
    """What is saved, and what a run starts from."""

    save: str | None = option(None, "folder of checkpoints, metrics and plots (default: checkpoints/gpt2_<model>)")
    load: str | None = option(None, "folder to continue from (default: --save, where it holds a checkpoint)")
    save_interval: int | None = option(5000, "iterations between checkpoints; one is always saved at the end")
    no_save_optim: bool = option(False, "leave the optimizer out of checkpoints")
    no_save_rng: bool = option(False, "leave the random states out of checkpoints")
    no_load_optim: bool = option(False, "start with a fresh optimizer")
    no_load_rng: bool = option(False, "start with fresh random states")
    async_save: bool = option(False, "train on while a thread writes a copy of what is saved, which is in host memory")
    local_checkpoint_dir: str | None = option(
        None,
        "folder in the memory or on the disk of each machine, for further checkpoints from which a run goes on "
        "that died",
        "--non-persistent-local-ckpt-dir",
    )
    local_checkpoint_interval: int | None = option(
        None, "iterations between checkpoints in --local-checkpoint-dir", "--non-persistent-save-interval"
    )
    keep_last: int | None = option(None, "checkpoints that are kept, the newest ones (default: all)")
    keep_best: bool = option(False, "keep the checkpoint with the lowest validation loss as well, in the folder best")
    no_verify: bool = option(False, "load without hashing every byte; sizes, headers and the manifest are checked")
    finetune: bool = option(False, "take only the weights of --load and count from iteration 0")
    exit_on_missing_checkpoint: bool = option(False, "an error, not a warning, where --load holds no checkpoint")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(not self.finetune or self.load is not None, "--finetune needs --load: the folder to take weights from")
        require(
            (self.local_checkpoint_dir is None) == (self.local_checkpoint_interval is None),
            "--local-checkpoint-dir and --local-checkpoint-interval go together: give both, or neither",
        )


@dataclass(frozen=True)
class LaunchConfig(Section):
    """How the ranks start and meet. torchrun, srun and mpirun need none of these flags, and none is a part of the run
    that is saved: see megatron/gpt2/dist/launch.py."""

    nproc_per_node: int | None = option(
        None,
        "ranks that this process starts on its machine; 0: one for each visible GPU, or two on a CPU",
        bound=NOT_NEGATIVE,
    )
    nnodes: int = option(1, "machines, each of which starts --nproc-per-node ranks")
    node_rank: int = option(0, "the number of this machine among them, from 0", bound=NOT_NEGATIVE)
    rank: int | None = option(
        None, "the number of this process among all, if each is started by hand", bound=NOT_NEGATIVE
    )
    world_size: int | None = option(None, "the number of all processes, with --rank")
    init_method: str | None = option(
        None,
        "where the ranks meet: tcp://HOST:PORT of rank 0, or file:///PATH in a folder that they share",
        metavar="URL",
    )
    max_restarts: int = option(
        0,
        "with --nproc-per-node: how often the ranks are started again after one has failed; "
        "they continue from the newest checkpoint",
        bound=NOT_NEGATIVE,
    )
    elastic: bool = option(
        False,
        "go on with the ranks that have come within --init-timeout, as many as divide "
        "--global-batch-size, and begin again when more have come",
    )
    init_timeout: float = option(120.0, "seconds within which all ranks must come")

    def __post_init__(self) -> None:
        super().__post_init__()
        starts = self.nproc_per_node is not None
        require(
            self.node_rank < self.nnodes,
            f"--node-rank {self.node_rank} is not in [0, {self.nnodes}), which --nnodes says",
        )
        require(self.nnodes == 1 or starts, "--nnodes needs --nproc-per-node, the ranks that each machine starts")
        require(
            self.max_restarts == 0 or starts,
            "--max-restarts needs --nproc-per-node, the ranks that this process starts; torchrun has a "
            "--max-restarts of its own",
        )
        if self.rank is None or self.world_size is None:
            require(self.rank is self.world_size is None, "--rank and --world-size go together")
            return
        require(not starts, "--nproc-per-node starts all ranks itself: leave --rank and --world-size out")
        require(
            self.rank < self.world_size, f"--rank {self.rank} is not in [0, {self.world_size}), which --world-size says"
        )
        require(
            self.init_method is not None or self.world_size == 1,
            "--rank needs --init-method: tcp://HOST:PORT of rank 0, or file:///PATH in a folder that the ranks share",
        )


@dataclass(frozen=True)
class Config:
    """A whole run. What must fit together between sections is checked when it is made."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    parallel: ParallelConfig = ParallelConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    def __post_init__(self) -> None:
        model, parallel, seq_length, recompute = (
            self.model,
            self.parallel,
            self.data.seq_length,
            self.train.recompute_granularity,
        )
        size, offloaded = parallel.model_parallel_size, parallel.cpu_offloading_num_layers
        for name, number in (
            ("--num-attention-heads", model.num_attention_heads),
            ("--ffn-hidden-size", model.ffn_size),
        ):
            require(number % size == 0, f"{name} {number} is not divisible by --model-parallel-size {size}")
        require(
            seq_length <= model.max_position_embeddings,
            f"--seq-length {seq_length} is longer than --max-position-embeddings {model.max_position_embeddings}",
        )
        require(
            not parallel.sequence_parallel or seq_length % size == 0,
            f"--sequence-parallel splits --seq-length {seq_length} over --model-parallel-size {size}, which "
            "does not divide it",
        )
        require(
            offloaded == 0 or recompute == "none",
            f"--cpu-offloading-num-layers {offloaded} is about layers that are not recomputed: leave out "
            f"--recompute-granularity {recompute}, or give --recompute-granularity full --checkpoint-in-cpu",
        )
        require(
            offloaded <= model.num_layers,
            f"--cpu-offloading-num-layers {offloaded} is more than --num-layers {model.num_layers}",
        )
        if parallel.exact_layouts is not None:
            self._check_exact_layouts(parallel.exact_layouts)
        self.layers_of_stages()
        require(
            not (self.schedule(1).splits_backward and self.train.compile),
            "--pipeline-schedule zero-bubble and --compile: a compiled layer computes the gradients of input and "
            "weights together; leave one out",
        )

    def _check_exact_layouts(self, parts: int) -> None:
        model, parallel, train = self.model, self.parallel, self.train
        require(parts & (parts - 1) == 0, f"--exact-layouts {parts} is not a power of two")
        require(
            parts % parallel.model_parallel_size == 0,
            f"--exact-layouts {parts} is not divisible by --model-parallel-size {parallel.model_parallel_size}",
        )
        for name, number in (
            ("--num-attention-heads", model.num_attention_heads),
            ("--ffn-hidden-size", model.ffn_size),
            ("--seq-length", self.data.seq_length),
            ("--make-vocab-size-divisible-by", model.make_vocab_size_divisible_by),
        ):
            require(
                number % parts == 0, f"{name} {number} is not divisible by --exact-layouts {parts}: change one of them"
            )
        for given, name, why in (
            (parallel.DDP_impl == "torch", "--DDP-impl torch", "torch's DDP adds in its own order; leave one out"),
            (
                parallel.grad_reduce_in_bf16,
                "--grad-reduce-in-bf16",
                "another number of ranks rounds other sums; leave one out",
            ),
            (
                parallel.shard_gradients,
                "--shard-gradients (--zero-stage 2)",
                "it adds up ranks before micro-batches; --zero-stage 1 does not; leave one out",
            ),
            (train.compile, "--compile", "a compiler chooses the order of sums; leave one out"),
            (
                train.dropout_rng == "torch" and model.has_dropout,
                "--dropout-rng torch",
                "each rank would drop others; leave one out, or give --hidden-dropout 0 --attention-dropout 0",
            ),
        ):
            require(not given, f"--exact-layouts and {name}: {why}")

    @property
    def is_deterministic(self) -> bool:
        """Whether each operation has to add up in one order (--deterministic, --exact-layouts)."""
        return self.train.deterministic or self.parallel.exact_layouts is not None

    @property
    def virtual_stages(self) -> int:
        """Chunks of layers per rank of the pipeline."""
        parallel = self.parallel
        if (size := parallel.num_layers_per_virtual_pipeline_stage) is None:
            return parallel.num_virtual_stages_per_pipeline_rank or 1
        return virtual_stages(self.model.num_layers, parallel.pipeline_model_parallel_size, size)

    def layers_of_stages(self) -> list[range]:
        """The layers of each stage of the pipeline, virtual ones too. ValueError where they cannot be divided so."""
        parallel = self.parallel
        return layers_of_stages(
            self.model.num_layers,
            parallel.pipeline_model_parallel_size,
            self.virtual_stages,
            parallel.decoder_first_pipeline_num_layers,
            parallel.decoder_last_pipeline_num_layers,
        )

    def schedule(self, micro_batches: int) -> Schedule:
        """What each stage of the pipeline does in a step. ValueError where --pipeline-schedule does not fit."""
        v = self.virtual_stages
        return build_schedule(
            self.parallel.pipeline_schedule or ("1f1b" if v == 1 else "interleaved"),
            self.parallel.pipeline_model_parallel_size,
            v,
            micro_batches,
        )

    def data_parallel_size(self, world_size: int) -> int:
        """How many ranks share the data. ValueError where the ranks cannot be divided so."""
        t, p = self.parallel.model_parallel_size, self.parallel.pipeline_model_parallel_size
        stages = f" × --pipeline-model-parallel-size {p}" if p > 1 else ""
        require(
            world_size % (t * p) == 0,
            f"the world of {world_size} ranks is not divisible by --model-parallel-size {t}{stages}: start another "
            "number of ranks (--nproc-per-node; the scripts: GPUS_PER_NODE), or give another size (the scripts: "
            "MP_SIZE)",
        )
        return world_size // (t * p)

    def batch_schedule(self, world_size: int, consumed_samples: int = 0) -> BatchSchedule:
        """The samples of each step over all ranks. ValueError where the ranks or a batch, of those that come after
        `consumed_samples`, cannot be divided so."""
        train, ranks = self.train, self.data_parallel_size(world_size)
        together, steps = train.micro_batch_size * ranks, train.gradient_accumulation_steps
        final = train.global_batch_size or together * (steps or 1)
        if train.step_batch_size_schedule:
            schedule = BatchSchedule(_stages(train.step_batch_size_schedule, self.data.seq_length, train.growth))
            require(
                train.global_batch_size in (None, schedule.final),
                f"--global-batch-size {final} is not the last size of {train.growth}: leave one of them out",
            )
        elif train.rampup_batch_size:
            start, increment, samples = train.rampup_batch_size
            require(
                start <= final and (final - start) % increment == 0,
                f"{train.growth}: {increment} samples at a time do not lead from {start} to --global-batch-size {final}",
            )
            schedule = BatchSchedule.rampup(start, increment, samples, final)
        else:
            schedule = BatchSchedule.constant(final)
        require(
            steps is None or schedule.final == together * steps,
            f"--global-batch-size {schedule.final} is not --micro-batch-size {train.micro_batch_size} × "
            f"{ranks} data-parallel ranks × --gradient-accumulation-steps {steps}: leave one of them out",
        )
        for span in schedule.spans(consumed_samples):
            named = f"{train.growth}: a batch of {span.step}" if train.growth else f"--global-batch-size {span.step}"
            require(
                span.step % together == 0,
                f"{named} is not divisible by --micro-batch-size "
                f"{train.micro_batch_size} × {ranks} data-parallel ranks",
            )
        return schedule

    def micro_batches(self, world_size: int, consumed_samples: int = 0) -> int:
        """Micro-batches of each rank in a step, when the batch does not grow any more."""
        together = self.train.micro_batch_size * self.data_parallel_size(world_size)
        return self.batch_schedule(world_size, consumed_samples).final // together

    def usable_ranks(self, ranks: int) -> int:
        """How many of `ranks` ranks the run can use: the largest number that can be divided into its layout and that
        divides its batches; 0 where there is none."""
        for world_size in range(ranks, 0, -1):
            with contextlib.suppress(ValueError):
                self.batch_schedule(world_size)
                return world_size
        return 0

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """The sections by name, each a dict of its fields: what a checkpoint and config.json hold."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(values: Mapping[str, Mapping[str, Any]]) -> "Config":
        """The inverse of `as_dict`, also after a trip through JSON; what is absent takes its default."""
        unknown = by_key(values).keys() - fields().keys()
        require(
            not unknown, f"unknown in the configuration: {', '.join(sorted(unknown))} (written by a newer version?)"
        )
        sections = {}
        for name, kind in SECTIONS.items():
            given = values.get(name, {}).items()
            sections[name] = kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in given})
        return Config(**sections)


SECTIONS: dict[str, Any] = {f.name: f.type for f in dataclasses.fields(Config)}


def fields() -> dict[str, dataclasses.Field[Any]]:
    """Every field of the configuration by "section.field", in the order in which the sections have them."""
    return {f"{name}.{f.name}": f for name, kind in SECTIONS.items() for f in dataclasses.fields(kind)}


def by_key(sections: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """{section: {field: value}}, as `Config.as_dict` gives it, by "section.field" in the same order."""
    return {f"{section}.{name}": value for section, values in sections.items() for name, value in values.items()}


def differing(config: Config) -> dict[str, Any]:
    """{"section.field": value} for each field that has not its default, in the order of the fields."""
    values = by_key(config.as_dict())
    return {key: values[key] for key, f in fields().items() if values[key] != f.default}


def without_effect(config: Config, device: str) -> Iterator[str]:
    """A line for each flag about what is kept for backward that changes nothing in this run. device: cpu or
    cuda."""
    parallel = config.parallel
    recomputes = config.train.recompute_granularity == "full"
    kept = "" if recomputes else "no layer is recomputed (--recompute-granularity full)"
    on_host = "the device's memory is the host's" if device == "cpu" else ""
    split = "--sequence-parallel has split it" if parallel.sequence_parallel else ""
    if parallel.model_parallel_size == 1:
        split = "there is one model-parallel rank"
    for given, name, reason in (
        (parallel.partition_activations, "--partition-activations", kept or split),
        (parallel.checkpoint_in_cpu, "--checkpoint-in-cpu", kept or on_host),
        (parallel.cpu_offloading_num_layers, "--cpu-offloading-num-layers", on_host),
    ):
        if given and reason:
            yield f"{name}: without effect, since {reason}"
