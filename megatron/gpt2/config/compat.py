"""Rules for Megatron's other flags and for the keys of a DeepSpeed file. They are not fields of the configuration.

The parser and docs/reference/flags.md are made from these two tables; `apply_rules` applies them. The status of a rule:

    translated   it sets fields of the configuration
    ignored      it has no effect here; the start of a run prints the reason
    refused      it is an error, because it would change result, memory or speed; its text names an alternative
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from data_utils.command_line import how_to_call
from megatron.gpt2.config.sections import config_fields, flag, require


def _sets_nothing(value: Any) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class CompatRule:
    """One rule for one or more flags.

    flags: each name with its `nargs` for argparse; 0: no value. status: translated, ignored or refused. accepts: the
    allowed values; empty: all. sets: value -> {"section.field": value}, or ValueError for a bad value. unless: the rule
    does not apply if this flag is given. explicit_values: if the field's own flag has one of these values, it wins over
    the rule.
    """

    flags: Mapping[str, int | str | None]
    status: str
    text: str
    accepts: tuple[Any, ...] = ()
    sets: Callable[[Any], dict[str, Any]] = _sets_nothing
    unless: str = ""
    explicit_values: tuple[Any, ...] = ()

    @property
    def help_text(self) -> str:
        """The text and the allowed values."""
        values = " or ".join(map(_format_value, self.accepts))
        return f"only {values}: {self.text}" if values else self.text


def _parse_names(flags: str) -> dict[str, int | str | None]:
    """Parse names with their `nargs`: `--a` takes no value, `--a=` one; `--a=+` and `--a=?` end with argparse's nargs."""
    words = (word.partition("=") for word in flags.split())
    return {name: (nargs or None) if equals else 0 for name, equals, nargs in words}


def ignored(flags: str, text: str, *accepts: Any) -> CompatRule:
    """Return a rule for flags without effect. text: the reason."""
    return CompatRule(_parse_names(flags), "ignored", text, accepts)


def refused(flags: str, text: str) -> CompatRule:
    """Return a rule for flags that are an error. text: the reason or the alternative."""
    return CompatRule(_parse_names(flags), "refused", text)


def translated(
    flags: str, text: str, sets: Callable[[Any], dict[str, Any]], *accepts: Any, **beside: Any
) -> CompatRule:
    """Return a rule for flags that set fields. The arguments are those of `CompatRule`."""
    return CompatRule(_parse_names(flags), "translated", text, accepts, sets, **beside)


def read_as(flags: str, key: str, value: Any, *accepts: Any, note: str = "", **beside: Any) -> CompatRule:
    """Return a rule for flags that set the field `key` to `value`. note: is appended to the text."""
    text = f"read as {flag(key)}{'' if value is True else f' {value}'}{note}"
    return translated(flags, text, lambda _: {key: value}, *accepts, **beside)


def numeric(name: str, key: str, note: str = "") -> CompatRule:
    """Return a rule for the number `name` of a DeepSpeed file, which sets the field `key`."""
    return translated(
        name, f"read as {flag(key)}{note}", lambda value: {key: _number(value, config_fields()[key].type)}
    )


def _number(value: Any, kind: Any = float) -> Any:
    """Return `value` as the number type `kind` of a field. Raises ValueError if it is not such a number."""
    is_whole = kind in (int, int | None)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    require(
        is_number and not (is_whole and value % 1), f"is not a {'whole ' * is_whole}number but a {type(value).__name__}"
    )
    return int(value) if is_whole else float(value)


def _indexed_prefix(paths: list[str]) -> dict[str, Any]:
    require(
        not any(map(os.path.isdir, paths)),
        "is a directory, and folders of .npy files (2019) cannot be read; give loose JSON or text with --train-data",
    )
    return {"data.data_path": tuple(paths), "data.split": "1"}


def _zero_stage(stage: Any) -> dict[str, Any]:
    require(str(stage) in ("0", "1", "2", "3"), "is not a stage of ZeRO")
    require(int(stage) < 3, f"is not implemented: {NO_STAGE_3}")
    return dict.fromkeys(("parallel.use_distributed_optimizer", "parallel.shard_gradients")[: int(stage)], True)


def _pipeline_stages(word: str) -> dict[str, Any]:
    require(word.isdecimal(), "is not a number of stages")
    return {"parallel.pipeline_model_parallel_size": max(int(word), 1)}


def iterations_to_profile(read: Mapping[str, Any]) -> tuple[int, int]:
    """Return the first and last iteration of a --profile without values, from --profile-step-start and
    --profile-step-end."""
    start, end = read.get("--profile-step-start", "10"), read.get("--profile-step-end", "12")
    require(
        start.isdecimal() and end.isdecimal(),
        f"--profile-step-start {start} and --profile-step-end {end} must be iteration numbers",
    )
    return int(start) + 1, int(end)


GPU_FP16 = "fp16-on-gpu"  # published command lines are for GPUs; few CPUs can multiply in fp16
NO_STAGE_3 = (
    "every data-parallel rank keeps all weights; stage 2 gives the same losses and shards optimizer and gradients, "
    "--model-parallel-size splits the weights, and --cpu-offload-optimizer moves the optimizer to the host"
)
STAGE = "1 is read as --use-distributed-optimizer, 2 adds --shard-gradients, 3 is refused"
OVERLAPS = "communication always overlaps with computation if possible"
EVALUATE = how_to_call("evaluate_gpt2")
NO_NPY = "folders of .npy files cannot be read; give loose JSON or text with --train-data, or a prefix with --data-path"
RECOMPUTES = "there is one implementation of activation checkpointing"
PINNED = "host memory for copies to and from a GPU is always pinned"

MEGATRON_RULES = (
    # Precision and memory
    read_as("--fp16", "train.precision", GPU_FP16, note=" (auto on a CPU)", explicit_values=("fp16",)),
    read_as("--bf16", "train.precision", "bf16"),
    read_as("--checkpoint-activations", "train.recompute_granularity", "full"),
    read_as(
        "--recompute-activations",
        "train.recompute_granularity",
        "selective",
        note=" (GELU and layer norms, not the core of attention)",
    ),
    ignored("--recompute-method=", "--recompute-num-layers is uniform", "uniform"),
    read_as("--activations-checkpoint-method=", "train.recompute_granularity", "full", "uniform"),
    ignored(
        "--fp32-allreduce --accumulate-allreduce-grads-in-fp32",
        "gradients are accumulated in fp32, and reduced in fp32 without --grad-reduce-in-bf16",
    ),
    ignored("--dynamic-loss-scale", "fp16 has a dynamic loss scale without --loss-scale"),
    ignored(
        "--attention-softmax-in-fp32 --no-query-key-layer-scaling --apply-query-key-layer-scaling",
        "attention accumulates in fp32, but some bf16 kernels on a CPU hold scores in bf16",
    ),
    ignored("--fp32-embedding --fp32-layernorm --fp32-tokentypes --deep-init", "no effect on GPT-2 in 2019 either"),
    read_as(
        "--scattered-embeddings",
        "parallel.sequence_parallel",
        True,
        note=", which also splits the activations between layers",
    ),
    ignored(
        "--split-transformers",
        "a layer is recomputed as a whole, which needs less memory from 8 layers on",
    ),
    ignored(
        "--memory-centric-tiled-linear --tile-factor=",
        "tiles are for ZeRO stage 3; no weights are gathered here",
    ),
    ignored("--fp16-lm-cross-entropy", "the loss is computed in fp32"),
    refused("--fp8-format=? --fp8-hybrid=? --fp8-e4m3=?", "fp8 is not implemented; give --precision bf16"),
    # Model
    read_as("--openai-gelu --bias-gelu-fusion", "model.gelu", "tanh"),
    read_as(
        "--no-bias-gelu-fusion",
        "model.gelu",
        "erf",
        note=" without --openai-gelu",
        unless="--openai-gelu",
    ),
    ignored(
        "--use-mcore-models --use-legacy-models --use-flash-attn --no-masked-softmax-fusion "
        "--bias-dropout-fusion --no-scaled-masked-softmax-fusion "
        "--no-bias-dropout-fusion --no-bias-swiglu-fusion --no-rope-fusion --no-persist-layer-norm "
        "--no-gradient-accumulation-fusion --scaled-upper-triang-masked-softmax-fusion "
        "--scaled-masked-softmax-fusion --transformer-impl= --onnx-safe=",
        "there is one implementation",
    ),
    ignored("--position-embedding-type=", "positions are learned embeddings", "learned_absolute"),
    ignored("--normalization=", "GPT-2 has layer norms", "LayerNorm"),
    refused(
        "--swiglu --squared-relu --group-query-attention --untie-embeddings-and-output-weights "
        "--disable-bias-linear --fp32-residual-connection --apply-residual-connection-post-layernorm "
        "--use-rotary-position-embeddings --multi-latent-attention --init-method-xavier-uniform "
        "--kv-channels= --num-query-groups= --num-experts= --rotary-base= --rotary-percent= --num-unique-layers= "
        "--param-sharing-style= --vocab-extra-ids=",
        "not part of GPT-2; leave it out",
    ),
    ignored("--use-cpu-initialization", "every device gets the same initial weights"),
    # Parallelism
    ignored(
        "--context-parallel-size= --expert-model-parallel-size= --expert-tensor-parallel-size=",
        "parallelism is tensor, pipeline and data: use --model-parallel-size",
        "1",
    ),
    translated("--pipe-parallel-size=", "read as --pipeline-model-parallel-size; 0 means 1", _pipeline_stages),
    refused("--pipeline-model-parallel-split-rank=", "GPT-2 has no encoder; leave it out"),
    ignored(
        "--overlap-grad-reduce --overlap-param-gather --no-async-tensor-model-parallel-allreduce "
        "--tp-comm-overlap --no-contiguous-buffers-in-local-ddp --use-contiguous-buffers-in-ddp "
        "--use-ring-exchange-p2p --no-scatter-gather-tensors-in-pipeline",
        OVERLAPS,
    ),
    refused("--lazy-mpu-init=", "process groups are made at the start; leave it out"),
    ignored("--local-rank=", "the local rank is read from the launcher's variables"),
    # Data
    ignored("--loose-json", "--train-data detects the file format"),
    ignored("--lazy-loader --mmap-warmup --data-impl=", "text is tokenised once and memory-mapped"),
    ignored("--shuffle", "training samples are always shuffled, by --seed"),
    ignored("--resume-dataloader", "data always continues from the checkpoint"),
    ignored(
        "--tokenizer-model-type=",
        "a SentencePiece model file stores its type; a new one is BPE",
        "bpe",
        *(f"bert-{size}-{case}" for size in ("base", "large") for case in ("uncased", "cased")),
    ),
    ignored("--dataloader-type=", "every epoch is shuffled by --seed", "single", "cyclic"),
    ignored("--no-create-attention-mask-in-dataloader", "attention masks are never built"),
    translated("--train-data-path=+", "read as --data-path with --split 1", _indexed_prefix),
    refused("--mock-data", "leave --train-data out to train on the built-in corpus"),
    refused("--use-npy-data-loader --input-data-sizes-file=", NO_NPY),
    refused("--use-tfrecords", "TFRecords are for BERT; give loose JSON or text with --train-data"),
    refused("--delim=", "CSV cannot be read; give loose JSON or text with --train-data"),
    refused("--eval-text-key=", "give --text-key, which is for all files"),
    ignored("--sample-rate=", "an epoch reads every sample once", "1", "1.0"),
    refused(
        "--pretrained-bert --presplit-sentences --bert-no-binary-head --biencoder-shared-query-context-model "
        "--faiss-use-gpu --retriever-score-scaling --train-with-neg --use-one-sent-docs "
        "--max-preds-per-seq= --eval-max-preds-per-seq= --mask-prob= --short-seq-prob= --decoder-seq-length= "
        "--bert-load= --ict-load= --ict-head-size= --biencoder-projection-dim= --titles-data-path= "
        "--block-data-path= --embedding-path= --evidence-data-path= --query-in-block-prob= --indexer-batch-size= "
        "--indexer-log-interval= --faiss-match= --faiss-topk-retrievals= --qa-data-dev= --qa-data-test= "
        "--retriever-seq-length= --train-hard-neg= --val-av-rank-hard-neg= --val-av-rank-other-neg= --img-dim= "
        "--patch-dim= --num-channels= --num-classes= --report-topk-accuracies=+ --retriever-report-topk-accuracies=+",
        "for BERT or another model, not part of GPT-2; leave it out",
    ),
    # Schedule and length
    refused("--lr-decay-tokens=", "give --lr-decay-samples"),
    ignored("--sgd-momentum=", "the optimizer is AdamW"),
    ignored("--optimizer=", "the optimizer is AdamW", "adam"),
    ignored("--weight-decay-incr-style=", "weight decay is constant", "constant"),
    ignored("--lr-warmup-init=", "warmup starts at 0", "0", "0.0"),
    # Checkpoints and logs
    ignored(
        "--adlr-autoresume --adlr-autoresume-interval= --exit-signal-handler",
        "on SIGTERM the run saves and exits; the same command continues it",
    ),
    ignored("--use-checkpoint-args", "the shape is always read from the checkpoint unless a flag gives it"),
    ignored(
        "--use-dist-ckpt --auto-detect-ckpt-format --use-mp-args-from-checkpoint-args --ckpt-format= "
        "--dist-ckpt-format=",
        "saves use the native format; tools/checkpoint.py convert --to torch_dist exports it",
    ),
    ignored(
        "--log-throughput --log-params-norm --log-num-zeros-in-grad --log-timers-to-tensorboard "
        "--log-validation-ppl-to-tensorboard --log-memory-to-tensorboard --log-batch-size-to-tensorboard "
        "--log-learning-rate-to-tensorboard --log-loss-scale-to-tensorboard --log-progress "
        "--no-log-learnig-rate-to-tensorboard --no-log-loss-scale-to-tensorboard --timing-log-level= "
        "--tensorboard-queue-size= --tensorboard-log-interval= --manual-gc --manual-gc-interval= "
        "--empty-unused-memory-level=",
        "logging and garbage collection are fixed",
    ),
    translated(
        "--profile-step-start= --profile-step-end=",
        "first and last iteration of a --profile without values",
        _sets_nothing,
    ),
    ignored("--use-pytorch-profiler", "--profile always uses torch's profiler"),
    # DeepSpeed; --deepspeed-config is read below
    ignored(
        "--deepspeed --deepscale --deepspeed-mpi",
        "the keys of --deepspeed-config are translated instead",
    ),
    translated("--zero-stage=", STAGE, _zero_stage),
    ignored(
        "--zero-reduce-bucket-size= --zero-allgather-bucket-size= --zero-contigious-gradients --zero-reduce-scatter",
        "give them in the --deepspeed-config, as in DeepSpeedExamples",
    ),
    ignored("--remote-device=", "weights stay on the device; --model-parallel-size splits them", "none"),
    ignored("--use-pin-memory", PINNED),
    ignored(
        "--deepspeed-activation-checkpointing --contigious-checkpointing --synchronize-each-layer --profile-backward",
        RECOMPUTES,
    ),
    ignored("--cpu-torch-adam", "--cpu-offload-optimizer always uses torch's AdamW"),
    translated("--deepspeed-config= --deepscale-config=", "each key is translated, ignored or refused", _sets_nothing),
    # Other programs
    ignored(
        "--temperature= --top-k= --top-p= --out-seq-length= --sample-input-file= --sample-output-file= "
        "--num-samples= --genfile= --greedy --recompute",
        "for generate_samples.py, not for pretraining",
    ),
    refused("--cloze-eval --strict-lambada --overlapping-eval= --task=", f"not for pretraining; give it to {EVALUATE}"),
    refused(
        "--epochs= --pretrained-checkpoint=",
        "for tasks that fine-tune a classifier; --finetune --load FOLDER trains GPT-2 on new text",
    ),
    refused(
        "--eval-batch-size= --eval-micro-batch-size= --eval-seq-length=",
        f"validation uses --micro-batch-size and --seq-length; give it to {EVALUATE}",
    ),
    refused(
        "--load-openai --eval-hf",
        f"{how_to_call('checkpoint')} convert makes a checkpoint for --load",
    ),
)


def _betas(value: Any) -> dict[str, Any]:
    require(isinstance(value, list) and len(value) == 2, "is not a pair of numbers")
    return {f"optimizer.adam_beta{place}": _number(beta) for place, beta in enumerate(value, 1)}


DEEPSPEED_RULES = (
    numeric("train_batch_size", "train.global_batch_size"),
    numeric("train_micro_batch_size_per_gpu", "train.micro_batch_size"),
    numeric(
        "gradient_accumulation_steps", "train.gradient_accumulation_steps", note=", unless train_batch_size is given"
    ),
    numeric("gradient_clipping", "optimizer.clip_grad"),
    ignored(
        "steps_per_print wall_clock_breakdown dump_state memory_breakdown tensorboard wandb csv_monitor comms_logger "
        "flops_profiler",
        "logging is fixed: every --log-interval iterations",
    ),
    # Precision
    read_as("fp16.enabled", "train.precision", GPU_FP16, note=" (auto on a CPU)"),
    read_as("bf16.enabled bfloat16.enabled", "train.precision", "bf16"),
    translated(
        "fp16.loss_scale",
        "read as --loss-scale; 0 means dynamic",
        lambda value: {"optimizer.loss_scale": _number(value) or None},
    ),
    translated(
        "fp16.initial_scale_power",
        "read as --initial-loss-scale, as a power of 2",
        lambda power: {"optimizer.initial_loss_scale": 2.0 ** _number(power, int)},
    ),
    numeric("fp16.loss_scale_window", "optimizer.loss_scale_window"),
    numeric("fp16.hysteresis", "optimizer.hysteresis"),
    numeric("fp16.min_loss_scale", "optimizer.min_loss_scale"),
    ignored("fp32_allreduce prescale_gradients", "gradients are always reduced in fp32"),
    translated(
        "communication_data_type",
        "bf16 is read as --grad-reduce-in-bf16",
        lambda kind: {} if kind == "fp32" else {"parallel.grad_reduce_in_bf16": True},
        "fp32",
        "bf16",
        "bfp16",
    ),
    refused("fp16.auto_cast fp16.consecutive_hysteresis amp", "give --precision fp16 or bf16"),
    # Memory
    translated("zero_optimization.stage", STAGE, _zero_stage),
    read_as("zero_optimization.cpu_offload", "parallel.cpu_offload_optimizer", True),
    translated(
        "zero_optimization.offload_optimizer.device",
        "cpu is read as --cpu-offload-optimizer",
        lambda device: {"parallel.cpu_offload_optimizer": True} if device == "cpu" else {},
        "cpu",
        "none",
    ),
    ignored("zero_optimization.offload_optimizer.pin_memory zero_optimization.cpu_offload_use_pin_memory", PINNED),
    numeric("zero_optimization.reduce_bucket_size", "parallel.ddp_bucket_size"),
    ignored(
        "zero_optimization.overlap_comm zero_optimization.allgather_partitions zero_optimization.reduce_scatter "
        "zero_optimization.allgather_bucket_size zero_optimization.contiguous_gradients "
        "zero_optimization.round_robin_gradients",
        OVERLAPS,
    ),
    ignored(
        "zero_optimization.load_from_fp32_weights zero_optimization.elastic_checkpoint",
        "checkpoints have fp32 weights for all layouts",
    ),
    refused(
        "zero_optimization.offload_param zero_optimization.cpu_offload_params",
        "--model-parallel-size splits the weights, --cpu-offload-optimizer moves the optimizer to the host",
    ),
    read_as("activation_checkpointing.partition_activations", "parallel.partition_activations", True),
    read_as("activation_checkpointing.cpu_checkpointing", "parallel.checkpoint_in_cpu", True),
    ignored(
        "activation_checkpointing.contiguous_memory_optimization activation_checkpointing.number_checkpoints "
        "activation_checkpointing.synchronize_checkpoint_boundary activation_checkpointing.profile",
        RECOMPUTES,
    ),
    # Optimizer and schedule
    ignored("zero_allow_untested_optimizer zero_force_ds_cpu_optimizer", "the optimizer is AdamW"),
    ignored("optimizer.params.max_grad_norm", "only gradient_clipping clips, also in DeepSpeed"),
    ignored("optimizer.type", "the optimizer is AdamW", "Adam", "AdamW"),
    numeric("optimizer.params.lr", "optimizer.lr"),
    translated("optimizer.params.betas", "read as --adam-beta1 and --adam-beta2", _betas),
    numeric("optimizer.params.eps", "optimizer.adam_eps"),
    numeric("optimizer.params.weight_decay", "optimizer.weight_decay"),
    ignored(
        "optimizer.params.adam_w_mode optimizer.params.bias_correction optimizer.params.torch_adam",
        "the optimizer is AdamW",
        True,
    ),
    refused("scheduler", "give --lr-decay-style, --lr-decay-iters, --lr-warmup-iters and --min-lr"),
    # Settings that would change the run
    refused("sparse_gradients sparse_attention", "gradients and attention are always dense; take it out"),
    refused(
        "progressive_layer_drop curriculum_learning data_efficiency compression_training quantize_training "
        "eigenvalue elasticity autotuning pipeline",
        "not implemented; take it out",
    ),
)
# These keys are true by default in DeepSpeed, so `false` is a request.
DEFAULT_TRUE_KEYS = ("optimizer.params.adam_w_mode", "optimizer.params.bias_correction")


def apply_rules(
    rules: tuple[CompatRule, ...], read: Mapping[str, Any], given: Mapping[str, Any], *, given_wins: bool = False
) -> tuple[dict[str, Any], list[str], list[str]]:
    """Apply `rules` to `read` ({name: value}). Returns the fields that they set, the notes and the errors.

    given: the fields that the project's own flags set, by "section.field". given_wins: `given` replaces what a rule
    sets; otherwise a difference is an error.
    """
    rule_of = {name: rule for rule in rules for name in rule.flags}
    values: dict[str, Any] = {}
    set_by: dict[str, str] = {}
    said: dict[str, list[str]] = {}
    problems = []
    for name, value in read.items():
        rule = rule_of[name]
        if rule.unless in read:
            continue
        spelled = name if value is None else f"{name} {_format_value(value)}"
        text = rule.text if rule.status == "translated" else f"ignored: {rule.text}"
        try:
            require(rule.status != "refused", f"is not supported: {rule.text}")
            accepted = " or ".join(map(_format_value, rule.accepts))
            require(not rule.accepts or value in rule.accepts, f"is not supported, only {accepted}: {rule.text}")
            for key, new in rule.sets(value).items():
                now = given.get(key, values.get(key, new))
                if key in given and now != new and (given_wins or now in rule.explicit_values):
                    text = f"ignored: {flag(key)} {now} is given"
                    continue
                require(now == new, f"contradicts {set_by.get(key) or f'{flag(key)} {now}'}")
                values[key], set_by[key] = new, name
        except (ValueError, OverflowError) as error:
            problems.append(f"{spelled} {error}")
        else:
            said.setdefault(text, []).append(spelled)
    return values, [f"{', '.join(names)}: {text}" for text, names in said.items()], problems


def read_deepspeed_config(path: str, given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Read a DeepSpeed file. Returns the fields that it sets and notes about them.

    given: {"section.field": value} from the command line, which wins over the file. The values `false`, `null`, `"auto"`
    and `{}` and sections with `"enabled": false` are skipped. Raises FileNotFoundError, or ValueError with all errors of
    the file in one line.
    """
    known = {key for rule in DEEPSPEED_RULES for key in rule.flags}
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
        require(isinstance(content, dict), "it is not a JSON object")
        if content.get("zero_optimization") is True:
            content["zero_optimization"] = {"stage": 1}  # as written in early 2020
        read = dict(_flatten_keys(content, known))
        unknown = sorted(map(_format_value, read.keys() - known))
        values, notes, problems = apply_rules(
            DEEPSPEED_RULES, {key: value for key, value in read.items() if key in known}, given, given_wins=True
        )
        # DeepSpeed needs two of micro-batch size, accumulation steps and batch size, and computes the third from the
        # number of ranks. That number is not known here.
        has_batch = "train.global_batch_size" in {*values, *given}
        if "train.global_batch_size" in values and "train.micro_batch_size" not in {*values, *given}:
            problems.append(
                "train_batch_size: give --micro-batch-size as well, the samples of one forward pass on a rank"
            )
        require(not problems, "; ".join(problems))
    except OSError as error:
        raise FileNotFoundError(f"--deepspeed_config {path}: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"--deepspeed_config {path} is not JSON: {error}") from None
    except ValueError as error:
        raise ValueError(f"--deepspeed_config {path}: {error}") from None
    if has_batch:
        values.pop("train.gradient_accumulation_steps", None)
    notes = [f"{path}: {note}" for note in notes]
    if unknown:
        notes.append(f"WARNING: {path}: {', '.join(unknown)}: unknown keys are ignored")
    return values, notes


def _flatten_keys(section: Mapping[str, Any], known: set[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys of the rules with their values, joined by dots, without values that mean "not set"."""
    for name, value in section.items():
        key = prefix + name
        if key not in DEFAULT_TRUE_KEYS and (value is None or value is False or value == "auto" or value == {}):
            continue
        if not isinstance(value, dict):
            yield key, value
        elif value.get("enabled") is False or key.endswith(".offload_param") and value.get("device") == "none":
            continue
        elif key in known:
            yield key, value
        else:
            yield from _flatten_keys(value, known, f"{key}.")


def _format_value(value: Any) -> str:
    """Format a value or key for a message: one line of at most 80 characters."""
    text = value if isinstance(value, str) and value.isprintable() else json.dumps(value)
    return text if len(text) <= 80 else f"{text[:76]}...{text[-1]}"
