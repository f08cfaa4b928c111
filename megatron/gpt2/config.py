"""What a run is: frozen dataclasses, validated when they are made.

Each field is one command-line flag (`num_layers` is `--num-layers`); `option` gives it its help text and the
other spellings that Megatron users know. `megatron/gpt2/command_line/flags.py` builds the parser from these fields, so
that a flag exists in exactly one place. Defaults are those of Megatron's 2019 release unless the help text says
otherwise. Values that follow from others are properties.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PRECISION_CHOICES = ("auto", "fp32", "bf16", "fp16", "fp16-on-gpu")


def option(default: Any, help: str, *aliases: str, choices: tuple[str, ...] = (), metavar: str | None = None) -> Any:
    """A dataclass field that is also a flag; `aliases` are other spellings, written as on the command line."""
    return field(default=default,
                 metadata={"help": help, "aliases": aliases, "choices": choices, "metavar": metavar})


def require(condition: bool, message: str) -> None:
    """Raise a ValueError, the error that a user sees as one line, unless `condition` holds."""
    if not condition:
        raise ValueError(message)


def require_positive(section: Any, *names: str) -> None:
    """Each of these fields is above 0, or None."""
    for name in names:
        value = getattr(section, name)
        require(value is None or value > 0, f"--{name.replace('_', '-')} must be positive, not {value}")


def require_fraction(section: Any, *names: str) -> None:
    """Each of these fields is in [0, 1)."""
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
        128, "pad the vocabulary to a multiple of this and of the model-parallel size")
    attention_dropout: float = option(0.1, "dropout of the attention probabilities")
    hidden_dropout: float = option(0.1, "dropout of embeddings and of both residual branches")
    layernorm_epsilon: float = option(1e-5, "added to the variance in layer norms", "--norm-epsilon")
    gelu: str = option("tanh", "form of GELU: tanh is GPT-2's, erf is 4 times faster on a CPU", choices=("tanh", "erf"))
    init_method_std: float = option(0.02, "standard deviation of the initial weights")

    def __post_init__(self) -> None:
        require_positive(self, "num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size",
                         "max_position_embeddings", "make_vocab_size_divisible_by", "layernorm_epsilon",
                         "init_method_std")
        require(self.hidden_size % self.num_attention_heads == 0,
                f"--hidden-size {self.hidden_size} is not divisible by "
                f"--num-attention-heads {self.num_attention_heads}")
        require_fraction(self, "attention_dropout", "hidden_dropout")

    @property
    def ffn_size(self) -> int:
        return 4 * self.hidden_size if self.ffn_hidden_size is None else self.ffn_hidden_size

    def flops_per_token(self, seq_length: int) -> int:
        """Model FLOPs of one token, forward and backward, attention credited in full (Megatron's formula,
        arXiv:2104.04473 section 5.1): 72·l·h²·(1 + s/6h) + 6·h·V where the MLP is 4h wide. A wider or narrower
        MLP changes the 72."""
        h, layers = self.hidden_size, self.num_layers
        assert self.vocab_size is not None
        linears = 6 * layers * (4 * h * h + 2 * h * self.ffn_size)
        return linears + 12 * layers * h * seq_length + 6 * h * self.vocab_size


@dataclass(frozen=True)
class DataConfig:
    """Where the text is and how it becomes tokens."""

    seq_length: int = option(512, "tokens in a sample", "--encoder-seq-length")
    train_data: tuple[str, ...] = option((), "loose JSON (.json, .jsonl) or plain-text files, folders of them, or "
                                             "'builtin'; none: the built-in corpus", metavar="FILE")
    valid_data: tuple[str, ...] = option((), "files for validation, instead of a part of --split", metavar="FILE")
    test_data: tuple[str, ...] = option((), "files for the test, instead of a part of --split", metavar="FILE")
    data_path: tuple[str, ...] = option((), "prefix of a .bin/.idx pair, instead of --train-data; several are mixed, "
                                            "by their sizes or by weights: 0.7 A 0.3 B", metavar="PREFIX")
    valid_data_path: tuple[str, ...] = option((), "prefixes for validation, instead of a part of --split",
                                              "--val-data-path", metavar="PREFIX")
    test_data_path: tuple[str, ...] = option((), "prefixes for the test, instead of a part of --split",
                                             metavar="PREFIX")
    data_order: str = option("shuffled", "shuffled: by seed, epoch and global sample number; megatron: as today's "
                                         "Megatron orders a prefix", choices=("shuffled", "megatron"))
    split: str = option("969,30,1", "proportions of training, validation and test")
    text_key: str | None = option(None, "the JSON field that holds the text (default: text, else sentence)")
    max_bad_fraction: float = option(0.001, "share of unusable lines above which a text file is refused")
    data_cache_path: str | None = option(None, "folder of tokenised files (default: beside the user's cache)")
    tokenizer_type: str | None = option(
        None, "default: the small BPE shipped for the built-in corpus; GPT2BPETokenizer once --vocab-file is given",
        choices=("GPT2BPETokenizer", "SentencePieceTokenizer", "bytes", "builtin"))
    vocab_file: str | None = option(None, "GPT-2 vocabulary (encoder.json)")
    merge_file: str | None = option(None, "GPT-2 merges (vocab.bpe)")
    tokenizer_model: str | None = option(None, "SentencePiece model; trained on the data if the file is missing",
                                         "--tokenizer-path")
    tokenizer_vocab_size: int = option(8192, "pieces of a SentencePiece model that is to be trained")
    cache_dir: str | None = option(None, "folder searched for the GPT-2 vocabulary")
    eod_mask_loss: bool = option(False, "no loss where the input is the end-of-document token")
    reset_position_ids: bool = option(False, "positions count from 0 in each document")
    reset_attention_mask: bool = option(False, "tokens see their own document alone")
    num_workers: int = option(2, "batches prepared ahead by a thread; 0 loads them in the training thread")

    def __post_init__(self) -> None:
        require(self.seq_length > 0, f"--seq-length must be positive, not {self.seq_length}")
        for prefixes, files in (("data_path", "train_data"), ("valid_data_path", "valid_data"),
                                ("test_data_path", "test_data")):
            require(not (getattr(self, prefixes) and getattr(self, files)),
                    f"give --{prefixes.replace('_', '-')} or --{files.replace('_', '-')}, not both")
        require(0 <= self.max_bad_fraction <= 1,
                f"--max-bad-fraction must lie between 0 and 1, not {self.max_bad_fraction}")
        require(self.num_workers >= 0, f"--num-workers must not be negative, got {self.num_workers}")


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, its schedule and the loss scale."""

    lr: float = option(1e-4, "peak learning rate")
    min_lr: float = option(0.0, "floor of the schedule")
    lr_decay_style: str = option("linear", "shape of the schedule after warm-up; cosine-2019 divides by all "
                                           "iterations, as Megatron did in 2019",
                                 choices=("linear", "cosine", "cosine-2019", "constant", "exponential", "WSD"))
    lr_decay_iters: int | None = option(None, "iterations over which the rate decays (default: all)")
    warmup: float = option(0.01, "fraction of the decay iterations that warm up", "--lr-warmup-fraction")
    lr_warmup_iters: int | None = option(None, "iterations that warm up, instead of a fraction", "--warmup-iters")
    lr_wsd_decay_iters: int | None = option(None, "iterations of WSD's final decay (default: a tenth)")
    weight_decay: float = option(0.01, "AdamW's decay of weights and embeddings; never of biases and layer norms")
    adam_beta1: float = option(0.9, "decay of the first moment")
    adam_beta2: float = option(0.999, "decay of the second moment")
    adam_eps: float = option(1e-8, "added to the root of the second moment")
    clip_grad: float = option(1.0, "greatest global gradient norm; 0 does not clip")
    loss_scale: float | None = option(None, "static fp16 loss scale (default: dynamic)")
    initial_loss_scale: float = option(2.0**32, "first dynamic loss scale")
    min_loss_scale: float = option(1.0, "least dynamic loss scale", "--min-scale")
    loss_scale_window: int = option(1000, "clean steps that double the dynamic loss scale")
    hysteresis: int = option(2, "overflows before the dynamic loss scale halves")
    override_opt_param_scheduler: bool = option(False, "take the schedule from the flags, not from the checkpoint",
                                                "--override-lr-scheduler")
    use_checkpoint_opt_param_scheduler: bool = option(False, "take the schedule from the checkpoint, not the flags",
                                                      "--use-checkpoint-lr-scheduler")

    def __post_init__(self) -> None:
        require_positive(self, "lr", "lr_decay_iters", "lr_wsd_decay_iters", "adam_eps", "loss_scale",
                         "initial_loss_scale", "min_loss_scale", "loss_scale_window")
        require_fraction(self, "adam_beta1", "adam_beta2")
        require(self.weight_decay >= 0, f"--weight-decay must not be negative, got {self.weight_decay}")
        require(0 <= self.min_lr <= self.lr, f"--min-lr {self.min_lr} must lie between 0 and --lr {self.lr}")
        require(self.lr_warmup_iters is None or self.lr_warmup_iters >= 0,
                f"--lr-warmup-iters must not be negative, got {self.lr_warmup_iters}")
        require(0.0 <= self.warmup <= 1.0, f"--warmup is a fraction, not {self.warmup}; iterations go into "
                                           "--lr-warmup-iters")
        require(self.clip_grad >= 0, f"--clip-grad must not be negative, got {self.clip_grad}")
        require(self.hysteresis >= 1, f"--hysteresis must be at least 1, not {self.hysteresis}")
        require(not (self.override_opt_param_scheduler and self.use_checkpoint_opt_param_scheduler),
                "give --override-lr-scheduler or --use-checkpoint-lr-scheduler, not both")


@dataclass(frozen=True)
class ParallelConfig:
    """How the work is laid out over ranks."""

    model_parallel_size: int = option(1, "ranks that share each layer", "--tensor-model-parallel-size")
    distributed_backend: str | None = option(None, "default: nccl on GPUs, gloo on CPUs",
                                             choices=("nccl", "gloo", "mpi"))
    distributed_timeout_minutes: float = option(10.0, "a collective that takes longer ends the run")
    DDP_impl: str = option("local", "data parallelism by our contiguous buffer or by torch's DDP",
                           choices=("local", "torch"))
    ddp_bucket_size: int = option(25_000_000, "gradient elements reduced at once")
    sequence_parallel: bool = option(False, "split the sequence over the model-parallel ranks between the split layers")
    use_distributed_optimizer: bool = option(False, "each data-parallel rank holds masters and moments of its part of "
                                                    "every bucket alone (ZeRO stage 1)")
    grad_reduce_in_bf16: bool = option(False, "send gradients in bf16; they are accumulated in fp32")
    cpu_offload_optimizer: bool = option(False, "masters and moments in host memory, AdamW on the CPU",
                                         "--optimizer-cpu-offload", "--cpu-optimizer")

    def __post_init__(self) -> None:
        require_positive(self, "model_parallel_size", "distributed_timeout_minutes", "ddp_bucket_size")
        require(self.distributed_timeout_minutes <= 1e6,
                f"--distributed-timeout-minutes must be at most 1e6, not {self.distributed_timeout_minutes}")
        for name in ("use_distributed_optimizer", "grad_reduce_in_bf16"):
            require(not getattr(self, name) or self.DDP_impl == "local",
                    f"--{name.replace('_', '-')} needs --DDP-impl local: torch's DDP reduces in a way of its own")


@dataclass(frozen=True)
class TrainConfig:
    """How long, in what precision, and what is said on the way."""

    micro_batch_size: int = option(4, "samples of one forward pass on one data-parallel rank", "--batch-size")
    global_batch_size: int | None = option(None, "samples of a step over all ranks; more than micro-batch × "
                                                 "data-parallel size accumulates (default: no accumulation)")
    train_iters: int | None = option(None, "length in iterations")
    train_samples: int | None = option(None, "length in samples")
    train_tokens: int | None = option(None, "length in tokens")
    train_epochs: float | None = option(None, "length in epochs of the training split")
    seed: int = option(1234, "seed of weights, data order and dropout")
    precision: str = option("auto", "auto: bf16 where it is native, else fp16 on a GPU and fp32 on a CPU; fp16-on-gpu, "
                                    "as --fp16 is read: fp16 on a GPU, auto on a CPU", choices=PRECISION_CHOICES)
    device: str = option("auto", "auto: cuda if there is a usable GPU", choices=("auto", "cpu", "cuda"))
    recompute_granularity: str = option(
        "none", "what backward computes again instead of keeping: selective, the outputs of GELU and of layer norms; "
                "full, all but the input of every --recompute-num-layers layers", choices=("none", "selective", "full"))
    recompute_num_layers: int = option(1, "layers recomputed together", "--checkpoint-num-layers",
                                       "--activations-checkpoint-num-layers")
    compile: bool = option(False, "compile each transformer layer with torch.compile: a minute at the start, faster "
                                  "steps after it")
    attention_backend: str = option("auto", "kernel of attention on a GPU: FlashAttention, cuDNN's (fused), the "
                                            "memory-efficient one, plain formulas (unfused), or the fastest of a "
                                            "measurement at the start",
                                    choices=("auto", "flash", "fused", "efficient", "unfused"))
    eval_iters: int = option(100, "global batches of an evaluation; a smaller split is read once")
    eval_interval: int = option(1000, "iterations between evaluations")
    log_interval: int = option(100, "iterations between log lines")
    exit_interval: int | None = option(None, "save and exit when the iteration is divisible by this")
    exit_duration_in_mins: float | None = option(None, "save and exit after so many minutes")
    max_skipped_steps: int = option(50, "steps in a row with a non-finite gradient that end the run")
    tensorboard_dir: str | None = option(None, "folder of TensorBoard's event files")
    wandb_project: str | None = option(None, "log to this project of Weights & Biases")
    wandb_entity: str | None = option(None, "whose project it is (default: your own)")
    wandb_exp_name: str | None = option(None, "the run's name there (default: that of the --save folder)")
    wandb_save_dir: str | None = option(None, "folder of its local files (default: wandb in the --save folder)")
    profile: tuple[int, ...] = option((), "START END: torch's profiler over these iterations; a trace in the --save "
                                          "folder and a table of the costliest operations", metavar="N")
    profile_ranks: tuple[int, ...] = option((0,), "ranks that are profiled", metavar="RANK")

    def __post_init__(self) -> None:
        require_positive(self, "micro_batch_size", "global_batch_size", "eval_interval", "log_interval",
                         "recompute_num_layers", "max_skipped_steps", "exit_interval", "exit_duration_in_mins")
        require(0 <= self.seed < 2**31, f"--seed must be in [0, 2**31), not {self.seed}")
        require(self.eval_iters >= 0, f"--eval-iters must not be negative, got {self.eval_iters}")
        require(not self.profile or len(self.profile) == 2 and 1 <= self.profile[0] <= self.profile[1],
                f"--profile takes the first iteration and the last, counted from 1, not "
                f"{' '.join(map(str, self.profile))}")
        lengths = [name for name in ("train_iters", "train_samples", "train_tokens", "train_epochs")
                   if getattr(self, name) is not None]
        require(len(lengths) <= 1, "the length is given twice: " +
                " and ".join("--" + name.replace("_", "-") for name in lengths))
        require_positive(self, *lengths)

    def iterations(self, *, global_batch_size: int, seq_length: int, samples_per_epoch: int, iteration: int = 0,
                   consumed_samples: int = 0) -> int:
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
        return iteration + max(0, -(-(samples - consumed_samples) // global_batch_size))


@dataclass(frozen=True)
class CheckpointConfig:
    """What is kept and where from."""

    save: str | None = option(None, "folder of checkpoints, metrics and plots (default: checkpoints/gpt2_<model>)")
    load: str | None = option(None, "folder to continue from (default: --save, where it holds a checkpoint)")
    save_interval: int | None = option(5000, "iterations between checkpoints; one is always saved at the end")
    no_save_optim: bool = option(False, "leave the optimizer out of checkpoints")
    no_save_rng: bool = option(False, "leave the random states out of checkpoints")
    no_load_optim: bool = option(False, "start with a fresh optimizer")
    no_load_rng: bool = option(False, "start with fresh random states")
    async_save: bool = option(False, "train on while a thread writes a copy in host memory, which takes as much as "
                                     "what is saved")
    keep_last: int | None = option(None, "checkpoints that are kept, the newest ones (default: all)")
    keep_best: bool = option(False, "keep the checkpoint with the lowest validation loss as well, in the folder best")
    no_verify: bool = option(False, "load without hashing every byte; sizes, headers and the manifest are checked")
    finetune: bool = option(False, "take the weights of --load alone and count from iteration 0")
    exit_on_missing_checkpoint: bool = option(False, "an error, not a warning, where --load holds no checkpoint")

    def __post_init__(self) -> None:
        require(not self.finetune or self.load is not None, "--finetune needs --load: the folder to take weights from")
        require_positive(self, "save_interval", "keep_last")


@dataclass(frozen=True)
class LaunchConfig:
    """How the ranks start and meet. None of it is needed under torchrun, srun or mpirun, and none is part of the run
    that is saved: see megatron/gpt2/launch/launchers.py."""

    nproc_per_node: int | None = option(None, "start so many ranks on this machine; 0: one for each visible GPU, two "
                                              "on a CPU")
    nnodes: int = option(1, "machines on which --nproc-per-node starts as many ranks each")
    node_rank: int = option(0, "this machine's number among them")
    rank: int | None = option(None, "this process's number among all, of which each is started by hand")
    world_size: int | None = option(None, "all processes, with --rank")
    init_method: str | None = option(None, "where the ranks meet: tcp://HOST:PORT of rank 0, or file:///PATH in a "
                                           "folder that they share", metavar="URL")
    init_timeout: float = option(120.0, "seconds within which all ranks have to come")

    def __post_init__(self) -> None:
        require_positive(self, "world_size", "init_timeout")
        require((self.nproc_per_node or 0) >= 0, f"--nproc-per-node {self.nproc_per_node}: give a number, or 0 "
                "for one on each GPU")
        require(0 <= self.node_rank < self.nnodes,
                f"--node-rank {self.node_rank} is not in [0, {self.nnodes}), which --nnodes says")
        require(self.nnodes == 1 or self.nproc_per_node is not None,
                "--nnodes needs --nproc-per-node, the ranks that each machine starts")
        require((self.rank is None) == (self.world_size is None), "--rank and --world-size go together")
        require(self.rank is None or self.nproc_per_node is None,
                "--nproc-per-node starts all ranks itself: leave --rank and --world-size out")
        if self.rank is not None and self.world_size is not None:
            require(0 <= self.rank < self.world_size,
                    f"--rank {self.rank} is not in [0, {self.world_size}), which --world-size says")
            require(self.init_method is not None or self.world_size == 1,
                    "--rank needs --init-method: tcp://HOST:PORT of rank 0, or file:///PATH in a folder that the ranks "
                    "share")


@dataclass(frozen=True)
class Config:
    """A whole run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    def __post_init__(self) -> None:
        p = self.parallel.model_parallel_size
        require(self.model.num_attention_heads % p == 0,
                f"--num-attention-heads {self.model.num_attention_heads} is not divisible by "
                f"--model-parallel-size {p}")
        require(self.model.ffn_size % p == 0,
                f"--ffn-hidden-size {self.model.ffn_size} is not divisible by --model-parallel-size {p}")
        require(self.data.seq_length <= self.model.max_position_embeddings,
                f"--seq-length {self.data.seq_length} is longer than "
                f"--max-position-embeddings {self.model.max_position_embeddings}")
        require(not self.parallel.sequence_parallel or self.data.seq_length % p == 0,
                f"--sequence-parallel splits --seq-length {self.data.seq_length} over --model-parallel-size {p}, which "
                "does not divide it")

    def data_parallel_size(self, world_size: int) -> int:
        p = self.parallel.model_parallel_size
        require(world_size % p == 0, f"the world of {world_size} ranks is not divisible by --model-parallel-size {p}: "
                "start another number of ranks (--nproc-per-node; the scripts: GPUS_PER_NODE), or give another size "
                "(the scripts: MP_SIZE)")
        return world_size // p

    def accumulation(self, data_parallel_size: int) -> int:
        """Micro-batches that a rank runs in a step."""
        together = self.train.micro_batch_size * data_parallel_size
        whole = self.train.global_batch_size or together
        require(whole % together == 0,
                f"--global-batch-size {whole} is not divisible by --micro-batch-size {self.train.micro_batch_size} "
                f"× {data_parallel_size} data-parallel ranks")
        return whole // together

    def as_dict(self) -> dict[str, dict[str, Any]]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(values: Mapping[str, Mapping[str, Any]]) -> Config:
        """The inverse of `as_dict`, also after a trip through JSON; what is absent takes its default."""
        sections = {}
        for name, kind in SECTIONS.items():
            known = {f.name for f in dataclasses.fields(kind)}
            given = values.get(name, {})
            require(known >= given.keys(), f"unknown in the configuration's section {name!r}: "
                                           f"{', '.join(sorted(given.keys() - known))} (written by a newer version?)")
            sections[name] = kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in given.items()})
        return Config(**sections)


SECTIONS: dict[str, Any] = {"model": ModelConfig, "data": DataConfig, "optimizer": OptimizerConfig,
                            "parallel": ParallelConfig, "train": TrainConfig, "checkpoint": CheckpointConfig}
