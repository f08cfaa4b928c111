"""Megatron's flags that are no field of the configuration, and the keys of a DeepSpeed file: two tables of the same rows,
from which the parser and docs/reference/flags.md are made, and the one function that applies them.

A row is translated (it sets fields), inert (it changes nothing here, which a note says) or refused (it would change
result, memory or speed, so that leaving it out silently would be wrong); its text says why, or what to give instead.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from data_utils.command_line import how_to_call
from megatron.gpt2.config.config import flag
from megatron.gpt2.config.sections import require


@dataclass(frozen=True)
class Foreign:
    """Flags with one meaning. `values`: how many they take (argparse's nargs). `accepts`: the values for which the
    row holds, any other being refused; empty: all. `sets`: value -> {"section.field": value}. `unless`: a flag beside
    which the row says nothing. `narrower`: values that the field's own flag may have beside it, and which then hold."""

    flags: tuple[str, ...]
    status: Literal["translated", "inert", "refused"]
    text: str
    values: int | Literal["+", "?"] = 0
    accepts: tuple[Any, ...] = ()
    sets: Callable[[Any], dict[str, Any]] | None = None
    unless: str = ""
    narrower: tuple[Any, ...] = ()

    @property
    def documented(self) -> str:
        """The text, and the values for which it holds."""
        values = " or ".join(value if isinstance(value, str) else json.dumps(value) for value in self.accepts)
        return f"{values} alone, any other value being refused: {self.text}" if values else self.text


def translated(
    flags: str,
    text: str,
    sets: Callable[[Any], dict[str, Any]],
    values: int | Literal["+", "?"] = 0,
    accepts: tuple[Any, ...] = (),
    unless: str = "",
    narrower: tuple[Any, ...] = (),
) -> Foreign:
    """A row whose `flags`, separated by spaces, set fields; the rest as in `Foreign`."""
    return Foreign(tuple(flags.split()), "translated", text, values, accepts, sets, unless, narrower)


def inert(flags: str, text: str, values: int | Literal["+", "?"] = 0, accepts: tuple[Any, ...] = ()) -> Foreign:
    """A row whose `flags`, separated by spaces, change nothing here. text: why."""
    return Foreign(tuple(flags.split()), "inert", text, values, accepts)


def refused(flags: str, text: str, values: int | Literal["+", "?"] = 0) -> Foreign:
    """A row whose `flags`, separated by spaces, are an error. text: why, or what to give instead."""
    return Foreign(tuple(flags.split()), "refused", text, values)


def _indexed_prefix(paths: list[str]) -> dict[str, Any]:
    for path in paths:
        require(
            not os.path.isdir(path),
            f"{path} is a directory: 2019's folders of .npy files are "
            "not read; give loose JSON or text with --train-data",
        )
    return {"data.data_path": tuple(paths), "data.split": "1"}


def _zero_stage(stage: Any) -> dict[str, Any]:
    require(
        str(stage) in ("0", "1", "2", "3"), f"{stage if isinstance(stage, str) else _shown(stage)} is no stage of ZeRO"
    )
    require(int(stage) < 3, f"3 is not built: {NO_STAGE_3}")
    fields = ("parallel.use_distributed_optimizer", "parallel.shard_gradients")
    return dict.fromkeys(fields[: int(stage)], True)


def _pipeline_stages(word: str) -> dict[str, Any]:
    require(word.isdecimal(), f"{word} is not a number of stages")
    return {"parallel.pipeline_model_parallel_size": max(int(word), 1)}


def iterations_to_profile(read: Mapping[str, Any]) -> tuple[int, int]:
    """Of today's --profile without values: those after --profile-step-start, up to --profile-step-end."""
    start, end = (read.get(f"--profile-step-{name}", default) for name, default in (("start", "10"), ("end", "12")))
    require(
        start.isdecimal() and end.isdecimal(),
        f"--profile-step-start {start} and --profile-step-end {end} are not both the number of an iteration",
    )
    return int(start) + 1, int(end)


# Published command lines mean GPUs; few CPUs multiply in fp16.
FP16 = {"train.precision": "fp16-on-gpu"}
NO_STAGE_3 = (
    "data-parallel ranks each keep all weights; 2 gives the same losses and divides optimizer and gradients, "
    "--model-parallel-size divides weights too, and --cpu-offload-optimizer moves the optimizer to the host"
)
STAGE = (
    "1 is read as --use-distributed-optimizer, and 2 as --shard-gradients beside it; 3, which divides weights as "
    "well, is refused"
)
OF_THE_FILE = "the --deepspeed-config decides, as in DeepSpeedExamples"
OVERLAPS = "reduction always overlaps with backward, and gathering parameters with forward, where they can"
RECOMPUTE_ALL = {"train.recompute_granularity": "full"}
EVALUATE = how_to_call("evaluate_gpt2")
OF_BERT = "a flag of BERT's or of another model, no part of GPT-2; leave it out"
NO_NPY = "folders of .npy files are not read; give loose JSON or text with --train-data, or a prefix with --data-path"

FOREIGN = (
    # Precision and memory
    translated("--fp16", "read as --precision fp16-on-gpu, which is auto on a CPU", lambda _: FP16, narrower=("fp16",)),
    translated("--bf16", "read as --precision bf16", lambda _: {"train.precision": "bf16"}),
    translated("--checkpoint-activations", "read as --recompute-granularity full", lambda _: RECOMPUTE_ALL),
    translated(
        "--recompute-activations",
        "read as --recompute-granularity selective: GELU and layer norms, not attention's core",
        lambda _: {"train.recompute_granularity": "selective"},
    ),
    inert(
        "--recompute-method", "every --recompute-num-layers layers are recomputed, which is uniform", 1, ("uniform",)
    ),
    translated(
        "--activations-checkpoint-method",
        "read as --recompute-granularity full, which is uniform",
        lambda _: RECOMPUTE_ALL,
        1,
        ("uniform",),
    ),
    inert(
        "--fp32-allreduce --accumulate-allreduce-grads-in-fp32",
        "gradients are always accumulated in fp32, and reduced in it unless --grad-reduce-in-bf16 is given",
    ),
    inert("--dynamic-loss-scale", "fp16 scales dynamically unless --loss-scale is given"),
    inert(
        "--attention-softmax-in-fp32 --no-query-key-layer-scaling --apply-query-key-layer-scaling",
        "attention accumulates in fp32; on a CPU in bf16 some kernels hold scores in bf16",
    ),
    inert("--fp32-embedding --fp32-layernorm --fp32-tokentypes --deep-init", "inert for GPT-2 in 2019 as well"),
    translated(
        "--scattered-embeddings",
        "read as --sequence-parallel, which divides what is kept between layers over the model-parallel ranks",
        lambda _: {"parallel.sequence_parallel": True},
    ),
    inert(
        "--split-transformers",
        "a layer is recomputed as one: what would be kept in the middle of each is more than "
        "that saves, from 8 layers on",
    ),
    inert("--memory-centric-tiled-linear", "tiles are of ZeRO's stage 3, which gathers weights; nothing is gathered"),
    inert("--tile-factor", "tiles are of ZeRO's stage 3, which gathers weights; nothing is gathered", 1),
    inert("--fp16-lm-cross-entropy", "the loss is computed in fp32"),
    refused("--fp8-format --fp8-hybrid --fp8-e4m3", "fp8 is not built; give --precision bf16", "?"),
    # Model
    translated("--openai-gelu --bias-gelu-fusion", "read as --gelu tanh", lambda _: {"model.gelu": "tanh"}),
    translated(
        "--no-bias-gelu-fusion",
        "read as --gelu erf, unless --openai-gelu is beside it",
        lambda _: {"model.gelu": "erf"},
        unless="--openai-gelu",
    ),
    inert(
        "--use-mcore-models --use-legacy-models --use-flash-attn --no-masked-softmax-fusion "
        "--bias-dropout-fusion --no-scaled-masked-softmax-fusion "
        "--no-bias-dropout-fusion --no-bias-swiglu-fusion --no-rope-fusion --no-persist-layer-norm "
        "--no-gradient-accumulation-fusion --scaled-upper-triang-masked-softmax-fusion "
        "--scaled-masked-softmax-fusion",
        "there is one implementation",
    ),
    inert("--transformer-impl --onnx-safe", "there is one implementation", 1),
    inert("--position-embedding-type", "positions are learned", 1, ("learned_absolute",)),
    inert("--normalization", "GPT-2 has layer norms", 1, ("LayerNorm",)),
    refused(
        "--swiglu --squared-relu --group-query-attention --untie-embeddings-and-output-weights "
        "--disable-bias-linear --fp32-residual-connection --apply-residual-connection-post-layernorm "
        "--use-rotary-position-embeddings --multi-latent-attention --init-method-xavier-uniform",
        "no part of GPT-2; leave it out",
    ),
    refused(
        "--kv-channels --num-query-groups --num-experts --rotary-base --rotary-percent --num-unique-layers "
        "--param-sharing-style --vocab-extra-ids",
        "no part of GPT-2; leave it out",
        1,
    ),
    inert("--use-cpu-initialization", "initial weights are the same on every device"),
    # Parallelism
    inert(
        "--context-parallel-size --expert-model-parallel-size --expert-tensor-parallel-size",
        "layouts are tensor-, pipeline- and data-parallel: use --model-parallel-size",
        1,
        ("1",),
    ),
    translated("--pipe-parallel-size", "--pipeline-model-parallel-size; 0 is none", _pipeline_stages, 1),
    refused("--pipeline-model-parallel-split-rank", "GPT-2 has no encoder; leave it out", 1),
    inert(
        "--overlap-grad-reduce --overlap-param-gather --no-async-tensor-model-parallel-allreduce "
        "--tp-comm-overlap --no-contiguous-buffers-in-local-ddp --use-contiguous-buffers-in-ddp "
        "--use-ring-exchange-p2p --no-scatter-gather-tensors-in-pipeline",
        OVERLAPS,
    ),
    refused("--lazy-mpu-init", "the groups of ranks are made at the start; leave it out", 1),
    inert("--local-rank", "ranks come from the launcher's variables", 1),
    # Data
    inert("--loose-json", "--train-data files are recognised by their names and first lines"),
    inert("--lazy-loader --mmap-warmup", "text is tokenised once and memory-mapped"),
    inert("--data-impl", "text is tokenised once and memory-mapped", 1),
    inert("--shuffle", "training samples are always shuffled, by --seed"),
    inert("--resume-dataloader", "data always continues where the checkpoint stopped"),
    inert(
        "--tokenizer-model-type",
        "a SentencePiece model says its own type; one that is to be trained is BPE",
        1,
        ("bpe", *(f"bert-{size}-{case}" for size in ("base", "large") for case in ("uncased", "cased"))),
    ),
    inert("--dataloader-type", "the order is shuffled in every epoch, by --seed", 1, ("single", "cyclic")),
    inert("--no-create-attention-mask-in-dataloader", "masks are never materialised"),
    translated("--train-data-path", "read as --data-path with --split 1", _indexed_prefix, "+"),
    refused("--mock-data", "leave --train-data out: the built-in corpus is real text"),
    refused("--use-npy-data-loader", NO_NPY),
    refused("--input-data-sizes-file", NO_NPY, 1),
    refused("--use-tfrecords", "TFRecords are BERT's; give loose JSON or text with --train-data"),
    refused("--delim", "CSV is not read; give loose JSON or text with --train-data", 1),
    refused("--eval-text-key", "--text-key names the field for all files", 1),
    inert("--sample-rate", "every sample is read, once an epoch", 1, ("1", "1.0")),
    refused(
        "--pretrained-bert --presplit-sentences --bert-no-binary-head --biencoder-shared-query-context-model "
        "--faiss-use-gpu --retriever-score-scaling --train-with-neg --use-one-sent-docs",
        OF_BERT,
    ),
    refused(
        "--max-preds-per-seq --eval-max-preds-per-seq --mask-prob --short-seq-prob --decoder-seq-length "
        "--bert-load --ict-load --ict-head-size --biencoder-projection-dim --titles-data-path --block-data-path "
        "--embedding-path --evidence-data-path --query-in-block-prob --indexer-batch-size --indexer-log-interval "
        "--faiss-match --faiss-topk-retrievals --qa-data-dev --qa-data-test --retriever-seq-length "
        "--train-hard-neg --val-av-rank-hard-neg --val-av-rank-other-neg --img-dim --patch-dim --num-channels "
        "--num-classes",
        OF_BERT,
        1,
    ),
    refused("--report-topk-accuracies --retriever-report-topk-accuracies", OF_BERT, "+"),
    # Schedule and length
    refused("--lr-decay-tokens", "count in samples: --lr-decay-samples", 1),
    inert("--sgd-momentum", "the optimizer is AdamW", 1),
    inert("--optimizer", "the optimizer is AdamW", 1, ("adam",)),
    inert("--weight-decay-incr-style", "weight decay is constant", 1, ("constant",)),
    inert("--lr-warmup-init", "warm-up starts at 0", 1, ("0", "0.0")),
    # Checkpoints and logs
    inert("--adlr-autoresume", "SIGTERM saves before it ends the run, and the same command continues"),
    inert("--adlr-autoresume-interval", "SIGTERM saves before it ends the run, and the same command continues", 1),
    inert("--use-checkpoint-args", "the shape always comes from the checkpoint where no flag gives it"),
    inert(
        "--use-dist-ckpt --auto-detect-ckpt-format --use-mp-args-from-checkpoint-args",
        "checkpoints have one format, for every layout",
    ),
    inert("--ckpt-format --dist-ckpt-format", "checkpoints have one format, for every layout", 1),
    inert("--exit-signal-handler", "SIGTERM always saves before it ends the run"),
    inert(
        "--log-throughput --log-params-norm --log-num-zeros-in-grad --log-timers-to-tensorboard "
        "--log-validation-ppl-to-tensorboard --log-memory-to-tensorboard --log-batch-size-to-tensorboard "
        "--log-learning-rate-to-tensorboard --log-loss-scale-to-tensorboard --log-progress "
        "--no-log-learnig-rate-to-tensorboard --no-log-loss-scale-to-tensorboard",
        "what is logged is fixed",
    ),
    inert(
        "--timing-log-level --tensorboard-queue-size --tensorboard-log-interval --manual-gc-interval "
        "--empty-unused-memory-level",
        "what is logged and collected is fixed",
        1,
    ),
    inert("--manual-gc", "what is logged and collected is fixed"),
    translated(
        "--profile-step-start --profile-step-end",
        "--profile without values is of the iterations after the one, up to the other",
        lambda _: {},
        1,
    ),
    inert("--use-pytorch-profiler", "the profiler is torch's"),
    # DeepSpeed; --deepspeed-config is read below
    inert(
        "--deepspeed --deepscale --deepspeed-mpi",
        "there is one engine; what a --deepspeed-config asks for is translated",
    ),
    translated("--zero-stage", STAGE, _zero_stage, 1),
    inert("--zero-reduce-bucket-size --zero-allgather-bucket-size", OF_THE_FILE, 1),
    inert("--zero-contigious-gradients --zero-reduce-scatter", OF_THE_FILE),
    inert("--remote-device", "weights stay on the device; --model-parallel-size divides them", 1, ("none",)),
    inert("--use-pin-memory", "what moves between host and GPU is pinned"),
    inert(
        "--deepspeed-activation-checkpointing --contigious-checkpointing --synchronize-each-layer --profile-backward",
        "--checkpoint-activations recomputes, with one implementation",
    ),
    inert("--cpu-torch-adam", "with --cpu-offload-optimizer AdamW runs in torch, on the CPU"),
    translated("--deepspeed-config --deepscale-config", "each of its keys is translated or refused", lambda _: {}, 1),
    # Other programs
    inert(
        "--temperature --top-k --top-p --out-seq-length --sample-input-file --sample-output-file --num-samples "
        "--genfile",
        "of generate_samples.py, no part of pretraining",
        1,
    ),
    inert("--greedy --recompute", "of generate_samples.py, no part of pretraining"),
    refused("--cloze-eval --strict-lambada", f"no part of pretraining; {EVALUATE} takes it"),
    refused("--overlapping-eval --task", f"no part of pretraining; {EVALUATE} takes it", 1),
    refused(
        "--epochs --pretrained-checkpoint",
        "of the tasks that fine-tune a classifier; --finetune --load FOLDER trains GPT-2 on other text",
        1,
    ),
    refused(
        "--eval-batch-size --eval-micro-batch-size --eval-seq-length",
        "the validation split is read as the "
        "training split is, with --micro-batch-size and --seq-length; "
        f"{EVALUATE} takes it",
        1,
    ),
    refused(
        "--load-openai --eval-hf",
        f"{how_to_call('checkpoint')} convert makes a checkpoint of the weights, which --load takes",
    ),
)


def _shown(value: Any) -> str:
    """A value or key of the file for a message: whatever it holds, in one line that is not too long."""
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:76]}...{text[-1]}"


def _number(key: str, kind: type = float) -> Callable[[Any], dict[str, Any]]:
    def read(value: Any) -> dict[str, Any]:
        require(
            isinstance(value, (int, float)) and not isinstance(value, bool) and kind(value) == value,
            f"{_shown(value)} is not a {'whole ' if kind is int else ''}number",
        )
        return {key: kind(value)}

    return read


def _loss_scale(value: Any) -> dict[str, Any]:
    return _number("optimizer.loss_scale")(value) if value else {}  # 0 is a dynamic one


def _initial_scale(power: Any) -> dict[str, Any]:
    return {"optimizer.initial_loss_scale": 2.0 ** _number("", int)(power)[""]}


def _betas(value: Any) -> dict[str, Any]:
    require(isinstance(value, list) and len(value) == 2, f"{_shown(value)} is not a pair of numbers")
    return {**_number("optimizer.adam_beta1")(value[0]), **_number("optimizer.adam_beta2")(value[1])}


OFFLOAD = {"parallel.cpu_offload_optimizer": True}
LOGGED = "what is logged is fixed, every --log-interval iterations"

KEYS = (
    translated("train_batch_size", "read as --global-batch-size", _number("train.global_batch_size", int)),
    translated("train_micro_batch_size_per_gpu", "read as --micro-batch-size", _number("train.micro_batch_size", int)),
    translated(
        "gradient_accumulation_steps",
        "read as --gradient-accumulation-steps, unless there is a batch size",
        _number("train.gradient_accumulation_steps", int),
    ),
    translated("gradient_clipping", "read as --clip-grad", _number("optimizer.clip_grad")),
    inert(
        "steps_per_print wall_clock_breakdown dump_state memory_breakdown tensorboard wandb csv_monitor comms_logger "
        "flops_profiler",
        LOGGED,
    ),
    # Precision
    translated("fp16.enabled", "read as --precision fp16-on-gpu, which is auto on a CPU", lambda _: FP16),
    translated("bf16.enabled bfloat16.enabled", "read as --precision bf16", lambda _: {"train.precision": "bf16"}),
    translated("fp16.loss_scale", "read as --loss-scale, 0 being dynamic", _loss_scale),
    translated("fp16.initial_scale_power", "read as --initial-loss-scale, its power of 2", _initial_scale),
    translated("fp16.loss_scale_window", "read as --loss-scale-window", _number("optimizer.loss_scale_window", int)),
    translated("fp16.hysteresis", "read as --hysteresis", _number("optimizer.hysteresis", int)),
    translated("fp16.min_loss_scale", "read as --min-loss-scale", _number("optimizer.min_loss_scale")),
    inert("fp32_allreduce prescale_gradients", "gradients are reduced in fp32"),
    translated(
        "communication_data_type",
        "read as --grad-reduce-in-bf16",
        lambda kind: {} if kind == "fp32" else {"parallel.grad_reduce_in_bf16": True},
        accepts=("fp32", "bf16", "bfp16"),
    ),
    refused("fp16.auto_cast fp16.consecutive_hysteresis amp", "--precision fp16 and bf16 are the two ways"),
    # Memory
    translated("zero_optimization.stage", STAGE, _zero_stage),
    translated("zero_optimization.cpu_offload", "read as --cpu-offload-optimizer", lambda _: OFFLOAD),
    translated(
        "zero_optimization.offload_optimizer.device",
        "read as --cpu-offload-optimizer",
        lambda device: OFFLOAD if device == "cpu" else {},
        accepts=("cpu", "none"),
    ),
    inert(
        "zero_optimization.offload_optimizer.pin_memory zero_optimization.cpu_offload_use_pin_memory",
        "what moves between host and GPU is pinned",
    ),
    translated(
        "zero_optimization.reduce_bucket_size", "read as --ddp-bucket-size", _number("parallel.ddp_bucket_size", int)
    ),
    inert(
        "zero_optimization.overlap_comm zero_optimization.allgather_partitions zero_optimization.reduce_scatter "
        "zero_optimization.allgather_bucket_size zero_optimization.contiguous_gradients "
        "zero_optimization.round_robin_gradients",
        OVERLAPS,
    ),
    inert(
        "zero_optimization.load_from_fp32_weights zero_optimization.elastic_checkpoint",
        "checkpoints hold fp32 weights, for every layout",
    ),
    refused(
        "zero_optimization.offload_param zero_optimization.cpu_offload_params",
        "--model-parallel-size divides the weights, --cpu-offload-optimizer moves the optimizer",
    ),
    translated(
        "activation_checkpointing.partition_activations",
        "read as --partition-activations",
        lambda _: {"parallel.partition_activations": True},
    ),
    translated(
        "activation_checkpointing.cpu_checkpointing",
        "read as --checkpoint-in-cpu",
        lambda _: {"parallel.checkpoint_in_cpu": True},
    ),
    inert(
        "activation_checkpointing.contiguous_memory_optimization activation_checkpointing.number_checkpoints "
        "activation_checkpointing.synchronize_checkpoint_boundary activation_checkpointing.profile",
        "--checkpoint-activations recomputes, with one implementation",
    ),
    # Optimizer and schedule
    inert("zero_allow_untested_optimizer zero_force_ds_cpu_optimizer", "the optimizer is AdamW"),
    inert("optimizer.params.max_grad_norm", "gradient_clipping is what clips, in DeepSpeed as well"),
    inert("optimizer.type", "the optimizer is AdamW", accepts=("Adam", "AdamW")),
    translated("optimizer.params.lr", "read as --lr", _number("optimizer.lr")),
    translated("optimizer.params.betas", "read as --adam-beta1 and --adam-beta2", _betas),
    translated("optimizer.params.eps", "read as --adam-eps", _number("optimizer.adam_eps")),
    translated("optimizer.params.weight_decay", "read as --weight-decay", _number("optimizer.weight_decay")),
    inert(
        "optimizer.params.adam_w_mode optimizer.params.bias_correction optimizer.params.torch_adam",
        "the optimizer is AdamW",
        accepts=(True,),
    ),
    refused("scheduler", "--lr-decay-style, --lr-decay-iters, --lr-warmup-iters and --min-lr are the schedule"),
    # What would be another run
    refused("sparse_gradients sparse_attention", "gradients and attention are dense"),
    refused(
        "progressive_layer_drop curriculum_learning data_efficiency compression_training quantize_training "
        "eigenvalue elasticity autotuning pipeline",
        "not built; take it out",
    ),
)
# DeepSpeed takes these without "true" asking for something.
ALWAYS_READ = ("optimizer.params.adam_w_mode", "optimizer.params.bias_correction")


def apply_rows(
    rows: tuple[Foreign, ...], read: Mapping[str, Any], given: Mapping[str, Any], *, given_wins: bool
) -> tuple[dict[str, Any], list[str], list[str]]:
    """What the names in `read`, with their values, ask for, by the table `rows`. given: what the project's own flags
    set, by "section.field". given_wins: they replace what a row sets; otherwise a difference is a contradiction.
    Returns the fields that the rows set, lines about what became of each name, and all that is refused."""
    row_of = {name: row for row in rows for name in row.flags}
    values: dict[str, Any] = {}
    set_by: dict[str, str] = {}
    said: dict[str, list[str]] = {}
    problems = []
    for name, value in read.items():
        row = row_of[name]
        if row.unless in read:
            continue
        is_flag = name.startswith("--")
        spelled = (
            name if value is None or isinstance(value, list | dict) else f"{name} {value if is_flag else _shown(value)}"
        )
        try:
            require(
                row.status != "refused", f"{spelled} is not supported: {row.text}" if is_flag else f"{name}: {row.text}"
            )
            require(
                not row.accepts or value in row.accepts,
                f"{spelled} is not supported, only {' or '.join(v if is_flag else _shown(v) for v in row.accepts)}: {row.text}",
            )
            try:
                meant = row.sets(value) if row.sets else {}
            except (ValueError, OverflowError) as error:
                raise ValueError(f"{name}{' ' if is_flag else ': '}{error}") from None
            text = row.text if row.status == "translated" else f"without effect here: {row.text}"
            for key, new in meant.items():
                now = given.get(key, values.get(key, new))
                if key in given and now != new and (given_wins or now in row.narrower):
                    text = f"without effect, since {flag(key)} {now} is given"
                    continue
                require(now == new, f"{spelled} contradicts {set_by.get(key) or f'{flag(key)} {now}'}")
                values[key], set_by[key] = new, name
        except ValueError as error:
            problems.append(str(error))
            continue
        if is_flag or meant or row.status == "inert":
            said.setdefault(text, []).append(spelled)
    return values, [f"{', '.join(names)}: {text}" for text, names in said.items()], problems


def read_deepspeed_config(path: str, given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """What a DeepSpeed file sets in addition to `given` ("section.field" to value, from the command line, which wins),
    and the lines about it. A value of `false`, `null`, `"auto"` or `{}`, and a section with `"enabled": false`, ask for
    nothing. ValueError or FileNotFoundError if it is not such a file; ValueError names all that is refused in one line.
    """
    known = {key for row in KEYS for key in row.flags}
    read = dict(_leaves(_read(path), known))
    unknown = [_shown(key)[1:-1] for key in read.keys() - known]
    values, notes, problems = apply_rows(
        KEYS, {key: value for key, value in read.items() if key in known}, given, given_wins=True
    )
    # DeepSpeed asks for two of micro-batch, accumulation and batch; the number of ranks, which gives the third, is not
    # known here.
    if "train.global_batch_size" in values and "train.micro_batch_size" not in {*values, *given}:
        problems.append("train_batch_size: give --micro-batch-size as well, the samples that one rank takes at once")
    if "train.global_batch_size" in {*values, *given}:
        values.pop("train.gradient_accumulation_steps", None)
    require(not problems, f"--deepspeed_config {path}: {'; '.join(problems)}")
    notes = [f"{path}: {note}" for note in notes]
    if unknown:
        notes.append(f"WARNING: {path}: {', '.join(sorted(unknown))}: unknown here, and without effect")
    return values, notes


def _read(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except OSError as error:
        raise FileNotFoundError(f"--deepspeed_config {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--deepspeed_config {path} is not JSON: {error}") from None
    require(isinstance(content, dict), f"--deepspeed_config {path} is not a JSON object")
    if content.get("zero_optimization") is True:
        content["zero_optimization"] = {"stage": 1}  # the spelling of early 2020
    return dict(content)


def _leaves(section: Mapping[str, Any], known: set[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The keys that ask for something, with dots, down to those of the table."""
    for name, value in section.items():
        key = prefix + name
        if key not in ALWAYS_READ and (value is None or value is False or value == "auto" or value == {}):
            continue
        if isinstance(value, dict) and value.get("enabled") is False:
            continue
        if key == "zero_optimization.offload_param" and isinstance(value, dict) and value.get("device") == "none":
            continue
        if isinstance(value, dict) and key not in known:
            yield from _leaves(value, known, f"{key}.")
        else:
            yield key, value
