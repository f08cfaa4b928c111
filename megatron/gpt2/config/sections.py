"""The configuration of a run: `Config` and its sections. Config and sections are frozen dataclasses that check their
values in `__post_init__`.

Each field of a section is one command-line flag (`num_layers` is `--num-layers`). `flag_field` adds the help text, the
allowed values and the other spellings that Megatron uses. `flags.py` builds the parser from these fields, so each flag
is defined in one place. Most defaults are those of Megatron's release of 2019; the default of `--split` is that of
today's Megatron. `arguments.py` lists the flags that exclude each other.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from data_utils.command_line import plural, require
from data_utils.samplers import BatchSchedule
from megatron.gpt2.pipeline.schedule import (
    SCHEDULES,
    PipelineSchedule,
    build_schedule,
    layers_of_virtual_stages,
    num_model_chunks,
)


class Bound(NamedTuple):
    """The allowed range of a number.

    description: the words for the range that follow "must be" in an error message.
    """

    contains: Callable[[float], bool]
    description: str


POSITIVE = Bound(lambda number: number > 0, "positive")
NOT_NEGATIVE = Bound(lambda number: number >= 0, "at least 0")
FRACTION = Bound(lambda number: 0 <= number < 1, "in [0, 1)")
SHARE = Bound(lambda number: 0 <= number <= 1, "in [0, 1]")


def flag_field(
    default: Any,
    help: str,
    *aliases: str,
    bound: Bound = POSITIVE,
    choices: tuple[str, ...] = (),
    metavar: str | None = None,
    const: Any = None,
) -> Any:
    """Return a dataclass field that is also a command-line flag.

    help: the text of the flag in --help and docs/reference/flags.md.
    aliases: other spellings of the flag.
    bound: the allowed range of a number.
    choices: the allowed values (default: all values).
    metavar: the name of the value in --help.
    const: the value that the field gets if the flag is given without a value.
    """
    metadata = {
        "help": help,
        "aliases": aliases,
        "bound": bound,
        "choices": choices,
        "metavar": metavar,
        "const": const,
    }
    return field(default=default, metadata=metadata)


def flag_name(key: str) -> str:
    """Return the flag of a field: "--num-layers" for "num_layers" or "model.num_layers"."""
    return "--" + key.rpartition(".")[2].replace("_", "-")


@dataclass(frozen=True)
class ConfigSection:
    """Base class of the sections, which checks that each number is in the range of its field. None is always
    allowed."""

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value, (contains, description) = getattr(self, f.name), f.metadata["bound"]
            if value is not None and f.type in (int, float, int | None, float | None):
                require(contains(value), f"{flag_name(f.name)} must be {description}, not {value}")


@dataclass(frozen=True)
class ModelConfig(ConfigSection):
    """The shape of GPT-2. `vocab_size` is the size of the tokenizer's vocabulary without the padding of the model."""

    num_layers: int = flag_field(24, "transformer layers")
    hidden_size: int = flag_field(1024, "size h of the hidden states")
    num_attention_heads: int = flag_field(16, "attention heads; must divide --hidden-size")
    ffn_hidden_size: int | None = flag_field(None, "hidden size of the MLP (default: 4h)", "--intermediate-size")
    max_position_embeddings: int = flag_field(512, "learned positions; at least --seq-length")
    vocab_size: int | None = flag_field(None, "true vocabulary size (default: the tokenizer's)")
    make_vocab_size_divisible_by: int = flag_field(
        128, "pad the vocabulary to a multiple of this and of the tensor-parallel size"
    )
    attention_dropout: float = flag_field(0.1, "dropout of the attention probabilities", bound=FRACTION)
    hidden_dropout: float = flag_field(0.1, "dropout of the embeddings and of both residual branches", bound=FRACTION)
    layernorm_epsilon: float = flag_field(1e-5, "epsilon of the layer norms", "--norm-epsilon")
    gelu: str = flag_field(
        "tanh", "GELU: tanh (as GPT-2) or erf (exact, 4 times as fast on a CPU)", choices=("tanh", "erf")
    )
    init_method_std: float = flag_field(0.02, "standard deviation of the initial weights")
    mup_base_width: int = flag_field(
        0, "muP: --lr is tuned for this --hidden-size", "--mup-base-hidden-size", bound=NOT_NEGATIVE
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.hidden_size % self.num_attention_heads == 0,
            f"--hidden-size {self.hidden_size} is not divisible by --num-attention-heads {self.num_attention_heads}",
        )
        # A damaged config.json may have larger values, for which torch's error would not name the flag.
        for name in ("hidden_size", "ffn_hidden_size", "max_position_embeddings", "vocab_size"):
            width = getattr(self, name)
            require(
                width is None or width * self.hidden_size < 1 << 58,
                f"no memory holds a matrix of {width} x {self.hidden_size} numbers: give a smaller {flag_name(name)}",
            )

    @property
    def ffn_size(self) -> int:
        """The hidden size of the MLP: --ffn-hidden-size, or 4h."""
        return 4 * self.hidden_size if self.ffn_hidden_size is None else self.ffn_hidden_size

    @property
    def mup_scale(self) -> float:
        """--mup-base-width / --hidden-size, or 1 without muP."""
        return self.mup_base_width / self.hidden_size if self.mup_base_width else 1.0

    @property
    def has_dropout(self) -> bool:
        """True if training uses dropout."""
        return self.attention_dropout > 0 or self.hidden_dropout > 0

    def flops_per_token(self, seq_length: int) -> int:
        """Return the FLOPs that forward and backward of one token need. Attention counts as if it had no causal mask.

        With an MLP of size 4h the result is Megatron's 72·l·h²·(1 + s/6h) + 6·h·V (arXiv:2104.04473, section 5.1)."""
        h, layers = self.hidden_size, self.num_layers
        assert self.vocab_size is not None
        linears = 6 * layers * (4 * h * h + 2 * h * self.ffn_size)
        return linears + 12 * layers * h * seq_length + 6 * h * self.vocab_size


@dataclass(frozen=True)
class DataConfig(ConfigSection):
    """Flags of the training data and the tokenizer."""

    seq_length: int = flag_field(512, "tokens in a sample", "--encoder-seq-length")
    train_data: tuple[str, ...] = flag_field(
        (),
        "files or folders of loose JSON (.json, .jsonl) or plain text, or 'builtin' (default: the built-in corpus)",
        metavar="FILE",
    )
    valid_data: tuple[str, ...] = flag_field(
        (), "files for validation, instead of part of the training data", metavar="FILE"
    )
    test_data: tuple[str, ...] = flag_field(
        (), "files for the test, instead of part of the training data", metavar="FILE"
    )
    data_path: tuple[str, ...] = flag_field(
        (),
        "prefixes of .bin/.idx pairs, instead of --train-data; several are mixed by size, or by weights: 0.7 A 0.3 B",
        metavar="PREFIX",
    )
    valid_data_path: tuple[str, ...] = flag_field(
        (), "prefixes for validation, instead of part of the training data", "--val-data-path", metavar="PREFIX"
    )
    test_data_path: tuple[str, ...] = flag_field(
        (), "prefixes for the test, instead of part of the training data", metavar="PREFIX"
    )
    data_order: str = flag_field(
        "shuffled",
        "order of samples: shuffled by seed and epoch, or that of today's Megatron for a prefix",
        choices=("shuffled", "megatron"),
    )
    split: str = flag_field("969,30,1", "proportions of training, validation and test")
    text_key: str | None = flag_field(None, "the JSON field that holds the text (default: text, else sentence)")
    max_bad_fraction: float = flag_field(0.001, "largest share of unusable lines in a text file", bound=SHARE)
    data_cache_path: str | None = flag_field(None, "folder for tokenised files (default: in the user's cache folder)")
    tokenizer_type: str | None = flag_field(
        None,
        "tokenizer (default: a small built-in BPE; with --vocab-file GPT2BPETokenizer, or characters for a meta.pkl)",
        choices=("GPT2BPETokenizer", "SentencePieceTokenizer", "bytes", "builtin", "characters"),
    )
    vocab_file: str | None = flag_field(None, "GPT-2 vocabulary (encoder.json), or nanoGPT's meta.pkl of characters")
    merge_file: str | None = flag_field(None, "GPT-2 merges (vocab.bpe)")
    tokenizer_model: str | None = flag_field(
        None, "SentencePiece model; trained on the data if the file is missing", "--tokenizer-path"
    )
    tokenizer_vocab_size: int = flag_field(8192, "vocabulary size of a SentencePiece model that the run trains")
    cache_dir: str | None = flag_field(None, "folder searched for the GPT-2 vocabulary")
    eod_mask_loss: bool = flag_field(False, "mask the loss of positions whose input is the end-of-document token")
    reset_position_ids: bool = flag_field(False, "start the positions at 0 in each document")
    reset_attention_mask: bool = flag_field(False, "attend only to tokens of the same document")
    num_workers: int = flag_field(
        2,
        "steps that a thread reads ahead; 0: no thread",
        bound=NOT_NEGATIVE,
    )


@dataclass(frozen=True)
class OptimizerConfig(ConfigSection):
    """Flags of the optimizer, the learning rate schedule and the loss scale."""

    optimizer: str = flag_field(
        "adam", "AdamW, or Muon for the layers' matrices (fewer steps, each longer)", choices=("adam", "muon")
    )
    lr: float = flag_field(1e-4, "peak learning rate")
    min_lr: float = flag_field(0.0, "minimum learning rate", bound=NOT_NEGATIVE)
    lr_decay_style: str = flag_field(
        "linear",
        "shape of the schedule after warmup; cosine-2019: as in Megatron of 2019",
        choices=("linear", "cosine", "cosine-2019", "constant", "exponential", "WSD"),
    )
    lr_decay_iters: int | None = flag_field(None, "iterations over which the learning rate decays (default: all)")
    lr_decay_samples: int | None = flag_field(None, "--lr-decay-iters in samples")
    lr_warmup_fraction: float = flag_field(
        0.01,
        "warmup as a fraction of the decay iterations",
        "--warmup",
        bound=SHARE,
    )
    lr_warmup_iters: int | None = flag_field(None, "warmup in iterations", "--warmup-iters", bound=NOT_NEGATIVE)
    lr_warmup_samples: int | None = flag_field(None, "warmup in samples", bound=NOT_NEGATIVE)
    lr_wsd_decay_iters: int | None = flag_field(None, "iterations of the final decay of WSD (default: a tenth)")
    weight_decay: float = flag_field(0.01, "weight decay, not of biases and layer norms", bound=NOT_NEGATIVE)
    adam_beta1: float = flag_field(0.9, "AdamW's beta1", bound=FRACTION)
    adam_beta2: float = flag_field(0.999, "AdamW's beta2", bound=FRACTION)
    adam_eps: float = flag_field(1e-8, "AdamW's epsilon")
    muon_momentum: float = flag_field(0.95, "Nesterov momentum", bound=FRACTION)
    muon_num_ns_steps: int = flag_field(5, "Newton-Schulz steps")
    muon_extra_scale_factor: float = flag_field(0.2, "scale of Muon's update; 0.2: the RMS of AdamW's")
    clip_grad: float = flag_field(1.0, "clip gradients to this global norm; 0: no clipping", bound=NOT_NEGATIVE)
    loss_scale: float | None = flag_field(None, "static fp16 loss scale (default: dynamic)")
    initial_loss_scale: float = flag_field(2.0**32, "initial dynamic loss scale")
    min_loss_scale: float = flag_field(1.0, "minimum dynamic loss scale", "--min-scale")
    loss_scale_window: int = flag_field(1000, "steps without overflow after which the dynamic loss scale doubles")
    hysteresis: int = flag_field(2, "overflows after which the dynamic loss scale is halved")
    override_opt_param_scheduler: bool = flag_field(
        False, "take the schedule from the flags, not from the checkpoint", "--override-lr-scheduler"
    )
    use_checkpoint_opt_param_scheduler: bool = flag_field(
        False, "take the schedule from the checkpoint, not the flags", "--use-checkpoint-lr-scheduler"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.min_lr <= self.lr, f"--min-lr {self.min_lr} is above --lr {self.lr}")

    def warmup_and_decay(self, default_decay_iters: int, batch: int) -> tuple[float, float]:
        """Return the lengths of warmup and decay, in iterations of `batch` samples. The lengths may be fractions.

        default_decay_iters: the length of the decay if no flag gives a length.
        """
        decay = self.lr_decay_iters or (self.lr_decay_samples or 0) / batch or default_decay_iters
        if self.lr_warmup_samples is not None:
            return self.lr_warmup_samples / batch, decay
        return self.lr_warmup_fraction * decay if self.lr_warmup_iters is None else self.lr_warmup_iters, decay


@dataclass(frozen=True)
class ParallelConfig(ConfigSection):
    """Flags of parallelism: how model and data are split over the ranks."""

    tensor_model_parallel_size: int = flag_field(
        1, "ranks that each layer is split over (tensor parallelism)", "--model-parallel-size"
    )
    pipeline_model_parallel_size: int = flag_field(1, "pipeline stages")
    pipeline_schedule: str | None = flag_field(
        None,
        "pipeline schedule (default: 1f1b, or interleaved with virtual stages)",
        choices=SCHEDULES,
    )
    num_layers_per_virtual_pipeline_stage: int | None = flag_field(
        None, "layers of a virtual stage; several per rank shorten the bubble"
    )
    num_virtual_stages_per_pipeline_rank: int | None = flag_field(
        None, "virtual stages per rank, instead of their layers"
    )
    decoder_first_pipeline_num_layers: int | None = flag_field(
        None, "layers of the first stage (default: an equal share, rounded up or down)"
    )
    decoder_last_pipeline_num_layers: int | None = flag_field(
        None, "layers of the last stage (default: an equal share, rounded down)"
    )
    distributed_backend: str | None = flag_field(
        None, "backend of torch.distributed (default: nccl on GPUs, gloo on CPUs)", choices=("nccl", "gloo", "mpi")
    )
    distributed_timeout_minutes: float = flag_field(
        10.0,
        "time limit of a collective; a slower one ends the run",
        bound=Bound(lambda minutes: 0 < minutes <= 1e6, "in (0, 1e6]"),
    )
    ddp_bucket_size: int = flag_field(
        25_000_000, "gradient elements in a bucket; without data parallelism at most 1,000,000"
    )
    sequence_parallel: bool = flag_field(
        False, "split activations outside the tensor-parallel layers along the sequence"
    )
    use_distributed_optimizer: bool = flag_field(
        False, "shard fp32 master weights and optimizer state over the data-parallel ranks (ZeRO stage 1)"
    )
    shard_gradients: bool = flag_field(
        False,
        "with --use-distributed-optimizer: shard the gradients too (ZeRO stage 2)",
    )
    exact_layouts: int | None = flag_field(
        None,
        "give bit-identical losses in every layout whose tensor-parallel size divides V",
        metavar="V",
    )
    grad_reduce_in_bf16: bool = flag_field(False, "reduce gradients in bf16; they are accumulated in fp32")
    cpu_offload_optimizer: bool = flag_field(
        False,
        "keep master weights and optimizer state in host memory and run AdamW on the CPU",
        "--optimizer-cpu-offload",
        "--cpu-optimizer",
    )

    partition_activations: bool = flag_field(
        False,
        "with --recompute-granularity full: split the saved layer inputs over the tensor-parallel ranks",
        "--distribute-saved-activations",
        "--distribute-checkpointed-activations",
    )
    checkpoint_in_cpu: bool = flag_field(
        False, "with --recompute-granularity full, on a GPU: save the layer inputs in host memory"
    )
    cpu_offloading_num_layers: int = flag_field(
        0,
        "without recomputation, on a GPU: offload the activations of the first N layers to host memory",
        bound=NOT_NEGATIVE,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        stages = self.pipeline_model_parallel_size
        require(
            not self.shard_gradients or self.use_distributed_optimizer,
            "--shard-gradients needs --use-distributed-optimizer: give both",
        )
        require(
            not self.shard_gradients or stages == 1,
            f"--shard-gradients (--zero-stage 2) does not work with --pipeline-model-parallel-size {stages}: a "
            "pipeline would reduce the gradients of every micro-batch; leave it out (--zero-stage 1)",
        )


PRECISION_CHOICES = ("auto", "fp32", "bf16", "fp16", "fp16-on-gpu")


@dataclass(frozen=True)
class TrainConfig(ConfigSection):
    """Flags of a training run: length, batch size, precision, recomputation, evaluation and logs."""

    micro_batch_size: int = flag_field(4, "samples of one forward pass on a data-parallel rank", "--batch-size")
    global_batch_size: int | None = flag_field(
        None,
        "samples of a step over all ranks; gradients are accumulated if needed (default: --micro-batch-size × "
        "data-parallel size)",
    )
    gradient_accumulation_steps: int | None = flag_field(
        None, "micro-batches of a rank per step, instead of --global-batch-size", "--gas"
    )
    rampup_batch_size: tuple[int, ...] = flag_field(
        (),
        "START INCREMENT SAMPLES: grow the batch from START to --global-batch-size in equal steps over SAMPLES samples",
        metavar="N",
    )
    step_batch_size_schedule: tuple[str, ...] = flag_field(
        (),
        'TOKENS:SIZE …: use batch size SIZE after TOKENS tokens, e.g. "0:16 2.4B:320"; K, M, B, T: powers of 1000',
        metavar="TOKENS:SIZE",
    )
    train_iters: int | None = flag_field(None, "training iterations; the shortest of several lengths counts")
    train_samples: int | None = flag_field(None, "training length in samples")
    train_tokens: int | None = flag_field(None, "training length in tokens")
    train_epochs: float | None = flag_field(None, "training length in epochs of the training split")
    seed: int = flag_field(
        1234,
        "seed of weights, data order and dropout",
        bound=Bound(lambda seed: 0 <= seed < 2**31, "in [0, 2**31)"),
    )
    dropout_rng: str = flag_field(
        "counter",
        "dropout masks: counter, equal in every layout, or torch, a random stream per rank as in Megatron",
        choices=("counter", "torch"),
    )
    precision: str = flag_field(
        "auto",
        "auto: bf16 if native, else fp16 (GPU) or fp32 (CPU); fp16-on-gpu (set by --fp16): fp16 on a GPU, auto on a "
        "CPU",
        choices=PRECISION_CHOICES,
    )
    device: str = flag_field("auto", "auto: cuda if there is a usable GPU", choices=("auto", "cpu", "cuda"))
    recompute_granularity: str = flag_field(
        "none",
        "selective: recompute GELU and layer norms; full: recompute whole layers from their saved inputs",
        choices=("none", "selective", "full"),
    )
    recompute_num_layers: int = flag_field(
        1,
        "layers per saved input with --recompute-granularity full",
        "--checkpoint-num-layers",
        "--activations-checkpoint-num-layers",
    )
    compile: bool = flag_field(False, "compile the layers with torch.compile, which takes a minute")
    deterministic: bool = flag_field(
        False,
        "use slower kernels that give the same bits in every run",
        "--deterministic-mode",
    )
    attention_backend: str = flag_field(
        "auto",
        "attention kernel on a GPU: FlashAttention, cuDNN (fused), memory-efficient, unfused, or auto: measure at "
        "start",
        choices=("auto", "flash", "fused", "efficient", "unfused"),
    )
    eval_iters: int = flag_field(
        100, "global batches of an evaluation; a smaller split is read once", bound=NOT_NEGATIVE
    )
    eval_interval: int = flag_field(1000, "iterations between evaluations")
    eval_tasks: tuple[str, ...] = flag_field(
        (),
        "score FOLDER/NAME*.jsonl at each evaluation: hellaswag, lambada",
        metavar="NAME",
    )
    eval_tasks_folder: str | None = flag_field(None, "the files of --eval-tasks", metavar="FOLDER")
    log_interval: int = flag_field(100, "iterations between log lines")
    exit_interval: int | None = flag_field(None, "save and exit at an iteration that is divisible by N")
    exit_duration_in_mins: float | None = flag_field(None, "save and exit after X minutes")
    max_skipped_steps: int = flag_field(50, "end the run after N steps in a row with a non-finite gradient")
    rewind_on_spike: float | None = flag_field(
        None,
        "if a logged loss exceeds FACTOR (default: 1.5) × the recent median, load the last checkpoint and skip the "
        "samples since then",
        bound=Bound(lambda factor: factor > 1, "above 1"),
        metavar="FACTOR",
        const=1.5,
    )
    log_straggler: bool = flag_field(
        False,
        "at log lines: name a slow rank and the slow part of its step",
    )
    check_replicas_interval: int | None = flag_field(
        None,
        "every N steps, look for flipped bits in weights and optimizer state",
        "--check-weight-hash-across-dp-replicas-interval",
    )
    tensorboard_dir: str | None = flag_field(None, "folder for TensorBoard event files")
    wandb_project: str | None = flag_field(None, "Weights & Biases project to log to")
    wandb_entity: str | None = flag_field(None, "owner of the Weights & Biases project (default: yourself)")
    wandb_exp_name: str | None = flag_field(
        None, "run name in Weights & Biases (default: the name of the --save folder)"
    )
    wandb_save_dir: str | None = flag_field(
        None, "folder for local files of Weights & Biases (default: wandb in the --save folder)"
    )
    profile: tuple[int, ...] = flag_field(
        (),
        "START END: write torch's trace of these iterations to --save",
        metavar="N",
    )
    profile_ranks: tuple[int, ...] = flag_field((0,), "ranks to profile", metavar="RANK")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            not self.profile or len(self.profile) == 2 and 1 <= self.profile[0] <= self.profile[1],
            f"--profile takes the first iteration and the last, counted from 1, not {' '.join(map(str, self.profile))}",
        )
        ramp = self.rampup_batch_size
        require(
            not ramp or len(ramp) == 3 and min(ramp[:2]) > 0 and ramp[2] >= 0,
            f"{self.growth_flag}: it takes START, INCREMENT and SAMPLES, the first two above 0",
        )

    @property
    def growth_flag(self) -> str:
        """The flag that makes the batch grow, with its values as on the command line, or ""."""
        for name in ("rampup_batch_size", "step_batch_size_schedule"):
            if words := getattr(self, name):
                return f"{flag_name(name)} {' '.join(map(str, words))}"
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
        """Return the number of iterations. If several flags give a length, the shortest length counts.

        iteration: the iteration at which the run continues.
        consumed_samples: the samples that the run has read before, possibly in batches of another size.
        """
        lengths = [] if self.train_iters is None else [self.train_iters]
        for samples in (
            self.train_samples,
            None if self.train_tokens is None else -(-self.train_tokens // seq_length),
            None if self.train_epochs is None else math.ceil(self.train_epochs * samples_per_epoch),
        ):
            if samples is not None:
                lengths.append(iteration + schedule.steps_until(samples, consumed_samples))
        require(
            bool(lengths),
            "no training length: give --train-iters, --train-samples, --train-tokens or --train-epochs",
        )
        return min(lengths)


def _parse_batch_size_schedule(words: tuple[str, ...], seq_length: int, flag: str) -> tuple[tuple[int, int], ...]:
    """Parse Megatron's --step-batch-size-schedule: `TOKENS:SIZE` pairs, separated by spaces or commas."""
    stages: dict[int, int] = {}
    for step in " ".join(words).replace(",", " ").split():
        tokens, _, size = step.partition(":")
        try:
            first = _parse_count(tokens) // seq_length
            require(first >= 0 and first not in stages and _parse_count(size) > 0, "")
            stages[first] = _parse_count(size)
        except (ValueError, OverflowError):
            raise ValueError(f'{flag}: {step} is not a valid next TOKENS:SIZE, e.g. "0:16 2.4B:320"') from None
    ordered = sorted(stages.items())
    sizes = [size for _, size in ordered]
    require(0 in stages and sizes == sorted(sizes), f"{flag}: the first TOKENS must be 0, and sizes must not fall")
    return tuple(ordered)


def _parse_count(number: str) -> int:
    """Parse a number with an optional suffix K, M, B or T: "1.5K" is 1500."""
    thousands = "KMBT".find(number[-1:].upper()) + 1 if number else 0
    return int(float(number[:-1] if thousands else number) * 1000**thousands)


@dataclass(frozen=True)
class CheckpointConfig(ConfigSection):
    """Flags of saving and loading."""

    save: str | None = flag_field(None, "folder for checkpoints, metrics and plots (default: checkpoints/gpt2_<model>)")
    load: str | None = flag_field(None, "folder to continue from (default: --save, if it has a checkpoint)")
    save_interval: int | None = flag_field(
        5000, "iterations between checkpoints; the last iteration is always saved", "--persistent-save-interval"
    )
    no_save_optim: bool = flag_field(False, "save checkpoints without the optimizer")
    no_save_rng: bool = flag_field(False, "save checkpoints without the random states")
    no_load_optim: bool = flag_field(False, "start with a fresh optimizer")
    no_load_rng: bool = flag_field(False, "start with fresh random states")
    async_save: bool = flag_field(False, "copy each checkpoint to host memory and write it in a background thread")
    save_timeout_minutes: float = flag_field(
        60.0,
        "time limit of the files of a checkpoint; slower storage ends the run",
        bound=Bound(lambda minutes: 0 < minutes <= 1e6, "in (0, 1e6]"),
    )
    local_checkpoint_dir: str | None = flag_field(
        None,
        "folder on each machine's disk or RAM disk for extra checkpoints, used after a crash",
        "--non-persistent-local-ckpt-dir",
    )
    local_checkpoint_interval: int | None = flag_field(
        None, "iterations between checkpoints in --local-checkpoint-dir", "--non-persistent-save-interval"
    )
    keep_last: int | None = flag_field(None, "number of newest checkpoints to keep (default: all)")
    keep_best: bool = flag_field(False, "also keep the checkpoint of the lowest validation loss, in best")
    no_verify: bool = flag_field(
        False, "load checkpoint files without checking their hashes; sizes and headers are checked"
    )
    finetune: bool = flag_field(False, "load only the weights from --load and start at iteration 0")
    exit_on_missing_checkpoint: bool = flag_field(False, "stop with an error if --load has no checkpoint")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(not self.finetune or self.load is not None, "--finetune needs --load, the folder of the weights")
        require(
            (self.local_checkpoint_dir is None) == (self.local_checkpoint_interval is None),
            "--local-checkpoint-dir and --local-checkpoint-interval go together: give both, or neither",
        )


@dataclass(frozen=True)
class LaunchConfig(ConfigSection):
    """Flags that start the ranks of a run. torchrun, srun and mpirun replace these flags, and checkpoints do not store
    them."""

    nproc_per_node: int | None = flag_field(
        None,
        "ranks to start on this machine; 0: one per visible GPU, or two on a CPU",
        bound=NOT_NEGATIVE,
    )
    nnodes: int = flag_field(1, "machines, each with --nproc-per-node ranks")
    node_rank: int = flag_field(0, "index of this machine, from 0", bound=NOT_NEGATIVE)
    rank: int | None = flag_field(None, "rank of this process, if you start each process by hand", bound=NOT_NEGATIVE)
    world_size: int | None = flag_field(None, "total number of processes, with --rank")
    init_method: str | None = flag_field(
        None,
        "rendezvous of the ranks: tcp://HOST:PORT of rank 0, or file:///PATH in a shared folder",
        metavar="URL",
    )
    max_restarts: int = flag_field(
        0,
        "with --nproc-per-node: restart the ranks up to N times after a failure, from the newest checkpoint",
        bound=NOT_NEGATIVE,
    )
    elastic: bool = flag_field(
        False,
        "train with the ranks that join within --init-timeout, as many as divide --global-batch-size; restart when "
        "more join",
    )
    init_timeout: float = flag_field(120.0, "time limit in seconds for all ranks to join")

    def __post_init__(self) -> None:
        super().__post_init__()
        starts = self.nproc_per_node is not None
        require(
            self.node_rank < self.nnodes,
            f"--node-rank {self.node_rank} is not in [0, {self.nnodes}): change it or --nnodes",
        )
        require(self.nnodes == 1 or starts, "--nnodes needs --nproc-per-node, the ranks that each machine starts")
        require(
            self.max_restarts == 0 or starts,
            "--max-restarts needs --nproc-per-node, the ranks that this process starts; with torchrun, use torchrun's "
            "own --max-restarts",
        )
        if self.rank is None or self.world_size is None:
            require(self.rank is self.world_size is None, "--rank and --world-size must be given together")
            return
        require(not starts, "--nproc-per-node starts all ranks itself: leave --rank and --world-size out")
        require(
            self.rank < self.world_size,
            f"--rank {self.rank} is not in [0, {self.world_size}): change it or --world-size",
        )
        require(
            self.init_method is not None or self.world_size == 1,
            "--rank needs --init-method: tcp://HOST:PORT of rank 0, or file:///PATH in a shared folder",
        )


@dataclass(frozen=True)
class Config:
    """The configuration of a run. `__post_init__` checks that values of different sections fit together."""

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
        size, offloaded = parallel.tensor_model_parallel_size, parallel.cpu_offloading_num_layers
        for name, number in (
            ("--num-attention-heads", model.num_attention_heads),
            ("--ffn-hidden-size", model.ffn_size),
        ):
            require(number % size == 0, f"{name} {number} is not divisible by --tensor-model-parallel-size {size}")
        require(
            seq_length <= model.max_position_embeddings,
            f"--seq-length {seq_length} is longer than --max-position-embeddings {model.max_position_embeddings}",
        )
        require(
            not parallel.sequence_parallel or seq_length % size == 0,
            f"--sequence-parallel splits --seq-length {seq_length}, which is not divisible by "
            f"--tensor-model-parallel-size {size}",
        )
        require(
            offloaded == 0 or recompute == "none",
            f"--cpu-offloading-num-layers {offloaded} does not work with recomputation: leave out "
            f"--recompute-granularity {recompute}, or give --recompute-granularity full --checkpoint-in-cpu",
        )
        require(
            offloaded <= model.num_layers,
            f"--cpu-offloading-num-layers {offloaded} is more than --num-layers {model.num_layers}",
        )
        require(
            self.optimizer.optimizer == "adam" or not parallel.cpu_offload_optimizer,
            "--optimizer muon and --cpu-offload-optimizer: only AdamW runs in host memory; give --optimizer adam",
        )
        if parallel.exact_layouts is not None:
            self._check_exact_layouts(parallel.exact_layouts)
        self.layers_of_virtual_stages()
        require(
            not (self.pipeline_schedule(1).splits_backward and self.train.compile),
            "--pipeline-schedule zero-bubble and --compile: a compiled layer cannot compute the gradients of input and "
            "weights separately; leave one out",
        )
        require(
            not (self.train.compile and self.train.dropout_rng == "torch" and self.model.has_dropout),
            "--dropout-rng torch and --compile: a compiled layer cannot change the random stream; leave one out, or "
            "give --hidden-dropout 0 --attention-dropout 0",
        )

    def _check_exact_layouts(self, parts: int) -> None:
        model, parallel, train = self.model, self.parallel, self.train
        require(
            parts % (size := parallel.tensor_model_parallel_size) == 0,
            f"--exact-layouts {parts} is not divisible by --tensor-model-parallel-size {size}",
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
        for is_given, name, why in (
            (
                parallel.grad_reduce_in_bf16,
                "--grad-reduce-in-bf16",
                "rounding to bf16 depends on the number of ranks; leave one out",
            ),
            (
                parallel.shard_gradients,
                "--shard-gradients (--zero-stage 2)",
                "it sums over ranks before micro-batches; leave one out, or give --zero-stage 1",
            ),
            (train.compile, "--compile", "the compiler chooses the order of sums; leave one out"),
            (
                train.dropout_rng == "torch" and model.has_dropout,
                "--dropout-rng torch",
                "its masks depend on the layout; leave one out, or give --hidden-dropout 0 --attention-dropout 0",
            ),
        ):
            require(not is_given, f"--exact-layouts and {name}: {why}")

    @property
    def is_deterministic(self) -> bool:
        """Whether --deterministic or --exact-layouts asks for a fixed order in every sum."""
        return self.train.deterministic or self.parallel.exact_layouts is not None

    @property
    def num_model_chunks(self) -> int:
        """The number of model chunks (virtual stages) of each pipeline rank; 1 without a pipeline."""
        parallel = self.parallel
        if parallel.pipeline_model_parallel_size == 1:
            return 1
        if (size := parallel.num_layers_per_virtual_pipeline_stage) is None:
            return parallel.num_virtual_stages_per_pipeline_rank or 1
        return num_model_chunks(self.model.num_layers, parallel.pipeline_model_parallel_size, size)

    def layers_of_virtual_stages(self) -> list[range]:
        """Return the layers of each virtual stage. Raises ValueError if the stages cannot share the layers."""
        parallel = self.parallel
        first, last = parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers
        if (pp := parallel.pipeline_model_parallel_size) == 1:
            first = last = None
        return layers_of_virtual_stages(self.model.num_layers, pp, self.num_model_chunks, first, last)

    def pipeline_schedule(self, num_microbatches: int) -> PipelineSchedule:
        """Return the schedule of a step with `num_microbatches` micro-batches. Raises ValueError if
        --pipeline-schedule does not support the number of model chunks."""
        vpp = self.num_model_chunks
        return build_schedule(
            self.parallel.pipeline_schedule or ("1f1b" if vpp == 1 else "interleaved"),
            self.parallel.pipeline_model_parallel_size,
            vpp,
            num_microbatches,
        )

    def data_parallel_size(self, world_size: int) -> int:
        """Return the data-parallel size of a run with `world_size` ranks. Raises ValueError if `world_size` is not
        divisible by tensor- and pipeline-parallel size."""
        size, pipeline_size = self.parallel.tensor_model_parallel_size, self.parallel.pipeline_model_parallel_size
        stages = f" × --pipeline-model-parallel-size {pipeline_size}" if pipeline_size > 1 else ""
        require(
            world_size % (size * pipeline_size) == 0,
            f"--tensor-model-parallel-size {size}{stages} needs a multiple of {size * pipeline_size} ranks, and this "
            f"run has {world_size}: change --nproc-per-node (GPUS_PER_NODE in the scripts) or the size (MP_SIZE)",
        )
        return world_size // (size * pipeline_size)

    def build_batch_schedule(self, world_size: int, consumed_samples: int = 0) -> BatchSchedule:
        """Return the global batch sizes of a run with `world_size` ranks. Raises ValueError if the layout does not
        divide `world_size`, or if the ranks cannot share a batch that follows the first `consumed_samples` samples."""
        train, ranks = self.train, self.data_parallel_size(world_size)
        samples_per_pass, steps = train.micro_batch_size * ranks, train.gradient_accumulation_steps
        final = train.global_batch_size or samples_per_pass * (steps or 1)
        if train.step_batch_size_schedule:
            schedule = BatchSchedule(
                _parse_batch_size_schedule(train.step_batch_size_schedule, self.data.seq_length, train.growth_flag)
            )
            require(
                train.global_batch_size in (None, schedule.final),
                f"--global-batch-size {final} is not the last size of {train.growth_flag}: leave one of them out",
            )
        elif train.rampup_batch_size:
            start, increment, samples = train.rampup_batch_size
            require(
                start <= final and (final - start) % increment == 0,
                f"{train.growth_flag}: steps of {increment} samples do not lead from {start} to --global-batch-size "
                f"{final}",
            )
            schedule = BatchSchedule.rampup(start, increment, samples, final)
        else:
            schedule = BatchSchedule.constant(final)
        require(
            steps is None or schedule.final == samples_per_pass * steps,
            f"--global-batch-size {schedule.final} is not --micro-batch-size {train.micro_batch_size} × "
            f"{plural(ranks, 'data-parallel rank')} × --gradient-accumulation-steps {steps}: leave one of them out",
        )
        for span in schedule.spans(consumed_samples):
            size = f"{train.growth_flag}: a batch of" if train.growth_flag else "--global-batch-size"
            require(
                span.step % samples_per_pass == 0,
                f"{size} {span.step} is not divisible by --micro-batch-size {train.micro_batch_size} × "
                f"{plural(ranks, 'data-parallel rank')}: give a --micro-batch-size that fits, or another batch size",
            )
        return schedule

    def num_microbatches(self, world_size: int, consumed_samples: int = 0) -> int:
        """Return the number of micro-batches of each rank in a step with the final global batch size."""
        batch = self.build_batch_schedule(world_size, consumed_samples).final
        return batch // (self.train.micro_batch_size * self.data_parallel_size(world_size))

    def usable_ranks(self, ranks: int) -> int:
        """Return the largest world size up to `ranks` for which `build_batch_schedule` raises no error, or 0."""
        for world_size in range(ranks, 0, -1):
            with contextlib.suppress(ValueError):
                self.build_batch_schedule(world_size)
                return world_size
        return 0

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Return {section: {field: value}}, as checkpoints and config.json store the configuration."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(values: Mapping[str, Mapping[str, Any]]) -> "Config":
        """Return the configuration whose `as_dict` is `values`. JSON may have changed tuples to lists in `values`.
        Missing fields get their defaults."""
        values = with_new_names(values)
        unknown = flatten_sections(values).keys() - config_fields().keys()
        require(
            not unknown,
            f"unknown in the configuration: {', '.join(sorted(unknown))} (a newer version may have written it)",
        )
        sections = {}
        for name, kind in SECTIONS.items():
            fields = values.get(name, {}).items()
            sections[name] = kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in fields})
        return Config(**sections)


SECTIONS: dict[str, Any] = {f.name: f.type for f in dataclasses.fields(Config)}


def config_fields() -> dict[str, dataclasses.Field[Any]]:
    """Return every field of the configuration by "section.field", in the order of the sections."""
    return {f"{name}.{f.name}": f for name, kind in SECTIONS.items() for f in dataclasses.fields(kind)}


# {name in files of earlier versions: its new name, or None if the name no longer exists}
NEW_NAMES: dict[str, str | None] = {
    "DDP_impl": None,
    "facts": "metadata",
    "held": "table_ranges",
    "boxes": "slices",
    "good_steps": "num_updates",
    "model_parallel_size": "tensor_model_parallel_size",
    "pipeline_parallel_size": "pipeline_model_parallel_size",
    "warmup": "lr_warmup_fraction",
}


def with_new_names(values: Any) -> Any:
    """Return a copy of a dictionary from a file in which keys of earlier versions have today's names, also in nested
    dictionaries. A value that is not a dictionary is returned unchanged."""
    if not isinstance(values, dict):
        return values
    renamed = {NEW_NAMES.get(name, name): with_new_names(value) for name, value in values.items()}
    return {name: value for name, value in renamed.items() if name is not None}


def flatten_sections(sections: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return {"section.field": value} from {section: {field: value}}, in the same order."""
    return {f"{section}.{name}": value for section, values in sections.items() for name, value in values.items()}


def non_default_values(config: Config) -> dict[str, Any]:
    """Return {"section.field": value} for each field that differs from its default."""
    values = flatten_sections(config.as_dict())
    return {key: values[key] for key, f in config_fields().items() if values[key] != f.default}


def ignored_flags(config: Config, device: str) -> Iterator[str]:
    """Yield a line for each given flag that has no effect in this run, or a different effect than in Megatron.

    device: the type of the device, cpu or cuda.
    """
    parallel = config.parallel
    recomputes = config.train.recompute_granularity == "full"
    needs_full = "" if recomputes else "it needs --recompute-granularity full"
    on_host = "it needs a GPU" if device == "cpu" else ""
    already_split = "--sequence-parallel splits these inputs already" if parallel.sequence_parallel else ""
    if parallel.tensor_model_parallel_size == 1:
        already_split = "there is one tensor-parallel rank"
    one_stage = "there is one pipeline stage" if parallel.pipeline_model_parallel_size == 1 else ""
    of_stages = (
        "num_layers_per_virtual_pipeline_stage",
        "num_virtual_stages_per_pipeline_rank",
        "decoder_first_pipeline_num_layers",
        "decoder_last_pipeline_num_layers",
    )
    for is_given, name, reason in (
        (parallel.partition_activations, "--partition-activations", needs_full or already_split),
        (parallel.checkpoint_in_cpu, "--checkpoint-in-cpu", needs_full or on_host),
        (parallel.cpu_offloading_num_layers, "--cpu-offloading-num-layers", on_host),
        (config.train.attention_backend != "auto", "--attention-backend", on_host),
        *((getattr(parallel, name), flag_name(name), one_stage) for name in of_stages),
    ):
        if is_given and reason:
            yield f"{name}: ignored: {reason}"
    if config.train.recompute_granularity == "selective":
        yield "--recompute-granularity selective: recomputes GELU and layer norms; Megatron's: the core of attention"
