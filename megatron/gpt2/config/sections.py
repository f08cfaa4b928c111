"""The sections of a run's configuration: frozen dataclasses, each of which checks its values when it is made.

Each field is one command-line flag (`num_layers` is `--num-layers`); `option` gives it its help text and the other
spellings that Megatron users know. `flags.py` builds the parser from these fields, so that a flag exists in exactly one
place. Defaults are those of Megatron's 2019 release unless the help text says otherwise. Values that follow from others
are properties or methods.
"""

import math
from dataclasses import dataclass, field
from typing import Any

from data_utils.samplers import BatchSchedule
from megatron.gpt2.pipeline.schedule import SCHEDULES


def option(
    default: Any, help: str, *aliases: str, choices: tuple[str, ...] = (), metavar: str | None = None, alone: Any = None
) -> Any:
    """A dataclass field that is also a flag. help: its text for --help and docs/reference/flags.md. aliases: other
    spellings of the flag, written as on the command line. choices: the values that it takes; empty: any. metavar: what
    stands for its value in --help. alone: the value where the flag is given without one."""
    return field(
        default=default,
        metadata={"help": help, "aliases": aliases, "choices": choices, "metavar": metavar, "alone": alone},
    )


def require(condition: bool, message: str) -> None:
    """Raise ValueError(message), the error that a user sees as one line, unless `condition` holds."""
    if not condition:
        raise ValueError(message)


def require_positive(section: Any, *names: str) -> None:
    """ValueError, which names the flag, unless each of these fields of `section` is above 0 or None."""
    for name in names:
        value = getattr(section, name)
        require(value is None or value > 0, f"--{name.replace('_', '-')} must be positive, not {value}")


def require_fraction(section: Any, *names: str) -> None:
    """ValueError, which names the flag, unless each of these fields of `section` is in [0, 1)."""
    for name in names:
        value = getattr(section, name)
        require(0.0 <= value < 1.0, f"--{name.replace('_', '-')} must be in [0, 1), not {value}")


@dataclass(frozen=True)
class ModelConfig:
    """The shape of GPT-2. `vocab_size` is the tokenizer's true size; rows are padded inside the model alone."""

    num_layers: int = option(24, "transformer layers")
    hidden_size: int = option(1024, "width of the residual stream, h")
    num_attention_heads: int = option(16, "attention heads; must divide --hidden-size")
    ffn_hidden_size: int | None = option(None, "width inside the MLP (default 4h)", "--intermediate-size")
    max_position_embeddings: int = option(512, "learned positions; at least --seq-length")
    vocab_size: int | None = option(None, "true vocabulary size (default: the tokenizer's)")
    make_vocab_size_divisible_by: int = option(
        128, "pad the vocabulary to a multiple of this and of the model-parallel size"
    )
    attention_dropout: float = option(0.1, "dropout of the attention probabilities")
    hidden_dropout: float = option(0.1, "dropout of embeddings and of both residual branches")
    layernorm_epsilon: float = option(1e-5, "added to the variance in layer norms", "--norm-epsilon")
    gelu: str = option("tanh", "form of GELU: tanh is GPT-2's, erf is 4 times faster on a CPU", choices=("tanh", "erf"))
    init_method_std: float = option(0.02, "standard deviation of the initial weights")

    def __post_init__(self) -> None:
        require_positive(
            self,
            "num_layers",
            "hidden_size",
            "num_attention_heads",
            "ffn_hidden_size",
            "max_position_embeddings",
            "make_vocab_size_divisible_by",
            "layernorm_epsilon",
            "init_method_std",
        )
        require(
            self.hidden_size % self.num_attention_heads == 0,
            f"--hidden-size {self.hidden_size} is not divisible by --num-attention-heads {self.num_attention_heads}",
        )
        require_fraction(self, "attention_dropout", "hidden_dropout")
        # A damaged file may ask for more, and torch would answer with an error of its own.
        for name in ("hidden_size", "ffn_hidden_size", "max_position_embeddings", "vocab_size"):
            width = getattr(self, name)
            require(
                width is None or width * self.hidden_size < 1 << 58,
                f"no memory holds a matrix of {width} x {self.hidden_size} numbers (--{name.replace('_', '-')})",
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
class DataConfig:
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
    max_bad_fraction: float = option(0.001, "share of unusable lines above which a text file is refused")
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
    reset_attention_mask: bool = option(False, "tokens see their own document alone")
    num_workers: int = option(
        2,
        "prefetch depth: steps whose batches one thread prepares ahead; 0: the training thread reads each batch itself",
    )

    def __post_init__(self) -> None:
        require(self.seq_length > 0, f"--seq-length must be positive, not {self.seq_length}")
        for prefixes, files in (
            ("data_path", "train_data"),
            ("valid_data_path", "valid_data"),
            ("test_data_path", "test_data"),
        ):
            require(
                not (getattr(self, prefixes) and getattr(self, files)),
                f"give --{prefixes.replace('_', '-')} or --{files.replace('_', '-')}, not both",
            )
        require(
            0 <= self.max_bad_fraction <= 1, f"--max-bad-fraction must lie between 0 and 1, not {self.max_bad_fraction}"
        )
        require(self.num_workers >= 0, f"--num-workers must not be negative, got {self.num_workers}")


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


@dataclass(frozen=True)
class ParallelConfig:
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
        None, "each rank holds several groups of so many layers, which shortens the bubble"
    )
    num_virtual_stages_per_pipeline_rank: int | None = option(None, "the same, by the number of groups per rank")
    decoder_first_pipeline_num_layers: int | None = option(
        None, "layers of the first stage (default: as many as the others, or fewer)"
    )
    decoder_last_pipeline_num_layers: int | None = option(None, "layers of the last stage")
    distributed_backend: str | None = option(
        None, "default: nccl on GPUs, gloo on CPUs", choices=("nccl", "gloo", "mpi")
    )
    distributed_timeout_minutes: float = option(10.0, "a collective that takes longer ends the run")
    DDP_impl: str = option(
        "local", "data parallelism by our contiguous buffer or by torch's DDP", choices=("local", "torch")
    )
    ddp_bucket_size: int = option(25_000_000, "gradient elements reduced at once")
    sequence_parallel: bool = option(False, "split the sequence over the model-parallel ranks between the split layers")
    use_distributed_optimizer: bool = option(
        False, "each data-parallel rank holds masters and moments of its part of every bucket alone (ZeRO stage 1)"
    )
    shard_gradients: bool = option(
        False,
        "with --use-distributed-optimizer: between micro-batches too, each "
        "data-parallel rank holds the gradients of that part alone (ZeRO stage 2)",
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
        "with --recompute-granularity full: every model-parallel rank keeps its part alone of each input that "
        "is kept, and backward gathers it",
        "--distribute-saved-activations",
        "--distribute-checkpointed-activations",
    )
    checkpoint_in_cpu: bool = option(
        False, "with --recompute-granularity full, on a GPU: the inputs that are kept are in host memory"
    )
    cpu_offloading_num_layers: int = option(
        0, "without recomputation, on a GPU: what the first so many layers keep for backward is in host memory"
    )

    def __post_init__(self) -> None:
        require_positive(
            self,
            "model_parallel_size",
            "pipeline_model_parallel_size",
            "num_layers_per_virtual_pipeline_stage",
            "num_virtual_stages_per_pipeline_rank",
            "decoder_first_pipeline_num_layers",
            "decoder_last_pipeline_num_layers",
            "distributed_timeout_minutes",
            "ddp_bucket_size",
            "exact_layouts",
        )
        require(
            self.num_layers_per_virtual_pipeline_stage is None or self.num_virtual_stages_per_pipeline_rank is None,
            "--num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank say the same: give "
            "one of them",
        )
        for name in ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"):
            require(
                getattr(self, name) is None or self.pipeline_model_parallel_size > 1,
                f"--{name.replace('_', '-')} needs --pipeline-model-parallel-size of at least 2",
            )
        require(
            self.pipeline_model_parallel_size == 1 or self.DDP_impl == "local",
            "--pipeline-model-parallel-size needs --DDP-impl local: torch's DDP reduces in a way of its own",
        )
        require(
            self.distributed_timeout_minutes <= 1e6,
            f"--distributed-timeout-minutes must be at most 1e6, not {self.distributed_timeout_minutes}",
        )
        require(
            self.cpu_offloading_num_layers >= 0,
            f"--cpu-offloading-num-layers must not be negative, got {self.cpu_offloading_num_layers}",
        )
        require(
            not self.shard_gradients or self.use_distributed_optimizer,
            "--shard-gradients is about the part that a rank updates: give --use-distributed-optimizer as well",
        )
        require(
            not self.shard_gradients or self.pipeline_model_parallel_size == 1,
            "--shard-gradients (--zero-stage 2) and --pipeline-model-parallel-size "
            f"{self.pipeline_model_parallel_size}: a pipeline has several micro-batches in flight, whose gradients "
            "would each be sent; leave it out (--zero-stage 1)",
        )
        if (parts := self.exact_layouts) is not None:
            require(parts & (parts - 1) == 0, f"--exact-layouts {parts} is not a power of two")
            require(
                parts % self.model_parallel_size == 0,
                f"--exact-layouts {parts} is not divisible by --model-parallel-size {self.model_parallel_size}",
            )
            for given, flag, why in (
                (self.DDP_impl == "torch", "--DDP-impl torch", "torch's DDP adds in an order of its own"),
                (self.grad_reduce_in_bf16, "--grad-reduce-in-bf16", "another number of ranks rounds other sums"),
                (
                    self.shard_gradients,
                    "--shard-gradients (--zero-stage 2)",
                    "it adds up ranks before micro-batches; --zero-stage 1 does not",
                ),
            ):
                require(not given, f"--exact-layouts and {flag}: {why}; leave one out")
        for name in ("use_distributed_optimizer", "grad_reduce_in_bf16"):
            require(
                not getattr(self, name) or self.DDP_impl == "local",
                f"--{name.replace('_', '-')} needs --DDP-impl local: torch's DDP reduces in a way of its own",
            )


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


@dataclass(frozen=True)
class CheckpointConfig:
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
    finetune: bool = option(False, "take the weights of --load alone and count from iteration 0")
    exit_on_missing_checkpoint: bool = option(False, "an error, not a warning, where --load holds no checkpoint")

    def __post_init__(self) -> None:
        require(not self.finetune or self.load is not None, "--finetune needs --load: the folder to take weights from")
        require(
            (self.local_checkpoint_dir is None) == (self.local_checkpoint_interval is None),
            "--local-checkpoint-dir and --local-checkpoint-interval go together: give both, or neither",
        )
        require_positive(self, "save_interval", "keep_last", "local_checkpoint_interval")


@dataclass(frozen=True)
class LaunchConfig:
    """How the ranks start and meet. torchrun, srun and mpirun need none of these flags, and none is a part of the run
    that is saved: see megatron/gpt2/dist/launch.py."""

    nproc_per_node: int | None = option(
        None, "ranks that this process starts on its machine; 0: one for each visible GPU, or two on a CPU"
    )
    nnodes: int = option(1, "machines, each of which starts --nproc-per-node ranks")
    node_rank: int = option(0, "the number of this machine among them, from 0")
    rank: int | None = option(None, "the number of this process among all, where each is started by hand")
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
    )
    elastic: bool = option(
        False,
        "go on with the ranks that have come within --init-timeout, as many as divide "
        "--global-batch-size, and begin again when more have come",
    )
    init_timeout: float = option(120.0, "seconds within which all ranks must come")

    def __post_init__(self) -> None:
        require_positive(self, "world_size", "init_timeout")
        require(
            (self.nproc_per_node or 0) >= 0,
            f"--nproc-per-node {self.nproc_per_node}: give a number, or 0 for one on each GPU",
        )
        require(
            0 <= self.node_rank < self.nnodes,
            f"--node-rank {self.node_rank} is not in [0, {self.nnodes}), which --nnodes says",
        )
        require(
            self.nnodes == 1 or self.nproc_per_node is not None,
            "--nnodes needs --nproc-per-node, the ranks that each machine starts",
        )
        require(self.max_restarts >= 0, f"--max-restarts {self.max_restarts}: give a number of restarts, or 0")
        require(
            self.max_restarts == 0 or self.nproc_per_node is not None,
            "--max-restarts needs --nproc-per-node, the ranks that this process starts; torchrun has a "
            "--max-restarts of its own",
        )
        require((self.rank is None) == (self.world_size is None), "--rank and --world-size go together")
        require(
            self.rank is None or self.nproc_per_node is None,
            "--nproc-per-node starts all ranks itself: leave --rank and --world-size out",
        )
        if self.rank is not None and self.world_size is not None:
            require(
                0 <= self.rank < self.world_size,
                f"--rank {self.rank} is not in [0, {self.world_size}), which --world-size says",
            )
            require(
                self.init_method is not None or self.world_size == 1,
                "--rank needs --init-method: tcp://HOST:PORT of rank 0, or file:///PATH in a folder that the ranks "
                "share",
            )
