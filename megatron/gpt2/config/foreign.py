"""Megatron's flags that are not fields of the configuration, and the keys of a DeepSpeed file: two tables of the same
rows, from which the parser and docs/reference/flags.md are made, and the function that applies them.

A row is translated (it sets fields), inert (it changes nothing here, which a note says) or refused (it would change
result, memory or speed, so that leaving it out silently would be wrong); its text says why, or what to give instead.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from data_utils.command_line import how_to_call
from megatron.gpt2.config.sections import fields, flag, require


def _sets_nothing(value: Any) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Foreign:
    """Flags with one meaning.

    flags: each name with the number of its values, as argparse's `nargs` has it; 0: it takes none. status: translated,
    inert or refused. accepts: the values for which the row holds, any other being refused; empty: all. sets: value ->
    {"section.field": value}; a ValueError says what the value is not. unless: a flag beside which the row says nothing.
    narrower: values that the field's own flag may have in addition, and which then hold.
    """

    flags: Mapping[str, int | str | None]
    status: str
    text: str
    accepts: tuple[Any, ...] = ()
    sets: Callable[[Any], dict[str, Any]] = _sets_nothing
    unless: str = ""
    narrower: tuple[Any, ...] = ()

    @property
    def documented(self) -> str:
        """The text, and the values for which it holds."""
        values = " or ".join(map(_shown, self.accepts))
        return f"only {values}, any other value being refused: {self.text}" if values else self.text


def _names(flags: str) -> dict[str, int | str | None]:
    """Names in getopt's notation: `--a` takes no value, `--a=` one, `--a=+` and `--a=?` as many as `nargs` says."""
    words = (word.partition("=") for word in flags.split())
    return {name: (nargs or None) if equals else 0 for name, equals, nargs in words}


def inert(flags: str, text: str, *accepts: Any) -> Foreign:
    """A row of flags that change nothing here. text: why."""
    return Foreign(_names(flags), "inert", text, accepts)


def refused(flags: str, text: str) -> Foreign:
    """A row of flags that are an error. text: why, or what to give instead."""
    return Foreign(_names(flags), "refused", text)


def translated(flags: str, text: str, sets: Callable[[Any], dict[str, Any]], *accepts: Any, **beside: Any) -> Foreign:
    """A row of flags that set fields; the rest as in `Foreign`."""
    return Foreign(_names(flags), "translated", text, accepts, sets, **beside)


def read_as(flags: str, key: str, value: Any, *accepts: Any, note: str = "", **beside: Any) -> Foreign:
    """A row of flags that give the field `key` this value. note: what to add to the text, which names the field."""
    text = f"read as {flag(key)}{'' if value is True else f' {value}'}{note}"
    return translated(flags, text, lambda _: {key: value}, *accepts, **beside)


def number(name: str, key: str, note: str = "") -> Foreign:
    """A row of the number `name` of a file, which is the field `key`."""
    return translated(name, f"read as {flag(key)}{note}", lambda value: {key: _number(value, fields()[key].type)})


def _number(value: Any, kind: Any = float) -> Any:
    """`value`, if it is a number of the type `kind` of a field."""
    is_whole = kind in (int, int | None)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    require(
        is_number and not (is_whole and value % 1), f"is not a {'whole ' * is_whole}number but a {type(value).__name__}"
    )
    return int(value) if is_whole else float(value)


def _indexed_prefix(paths: list[str]) -> dict[str, Any]:
    require(
        not any(map(os.path.isdir, paths)),
        "is a directory: 2019's folders of .npy files are not read; give loose JSON or text with --train-data",
    )
    return {"data.data_path": tuple(paths), "data.split": "1"}


def _zero_stage(stage: Any) -> dict[str, Any]:
    require(str(stage) in ("0", "1", "2", "3"), "is not a stage of ZeRO")
    require(int(stage) < 3, f"is not built: {NO_STAGE_3}")
    return dict.fromkeys(("parallel.use_distributed_optimizer", "parallel.shard_gradients")[: int(stage)], True)


def _pipeline_stages(word: str) -> dict[str, Any]:
    require(word.isdecimal(), "is not a number of stages")
    return {"parallel.pipeline_model_parallel_size": max(int(word), 1)}


def iterations_to_profile(read: Mapping[str, Any]) -> tuple[int, int]:
    """Of today's --profile without values: those after --profile-step-start, up to --profile-step-end."""
    start, end = read.get("--profile-step-start", "10"), read.get("--profile-step-end", "12")
    require(
        start.isdecimal() and end.isdecimal(),
        f"--profile-step-start {start} and --profile-step-end {end} are not both the number of an iteration",
    )
    return int(start) + 1, int(end)


GPU_FP16 = "fp16-on-gpu"  # published command lines mean GPUs; few CPUs multiply in fp16
NO_STAGE_3 = (
    "data-parallel ranks each keep all weights; 2 gives the same losses and divides optimizer and gradients, "
    "--model-parallel-size divides weights too, and --cpu-offload-optimizer moves the optimizer to the host"
)
STAGE = (
    "1 is read as --use-distributed-optimizer, and 2 as --shard-gradients in addition; 3, which divides weights as "
    "well, is refused"
)
OVERLAPS = "reduction always overlaps with backward, and gathering parameters with forward, where they can"
EVALUATE = how_to_call("evaluate_gpt2")
NO_NPY = "folders of .npy files are not read; give loose JSON or text with --train-data, or a prefix with --data-path"
RECOMPUTES = "--checkpoint-activations recomputes, with one implementation"
PINNED = "what moves between host and GPU is pinned"

FOREIGN = (
    # Precision and memory
    read_as("--fp16", "train.precision", GPU_FP16, note=", which is auto on a CPU", narrower=("fp16",)),
    read_as("--bf16", "train.precision", "bf16"),
    read_as("--checkpoint-activations", "train.recompute_granularity", "full"),
    read_as(
        "--recompute-activations",
        "train.recompute_granularity",
        "selective",
        note=": GELU and layer norms, not attention's core",
    ),
    inert("--recompute-method=", "every --recompute-num-layers layers are recomputed, which is uniform", "uniform"),
    read_as(
        "--activations-checkpoint-method=", "train.recompute_granularity", "full", "uniform", note=", which is uniform"
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
    read_as(
        "--scattered-embeddings",
        "parallel.sequence_parallel",
        True,
        note=", which divides what is kept between layers over the model-parallel ranks",
    ),
    inert(
        "--split-transformers",
        "a layer is recomputed as one: what would be kept in the middle of each is more than "
        "that saves, from 8 layers on",
    ),
    inert(
        "--memory-centric-tiled-linear --tile-factor=",
        "tiles are of ZeRO's stage 3, which gathers weights; nothing is gathered",
    ),
    inert("--fp16-lm-cross-entropy", "the loss is computed in fp32"),
    refused("--fp8-format=? --fp8-hybrid=? --fp8-e4m3=?", "fp8 is not built; give --precision bf16"),
    # Model
    read_as("--openai-gelu --bias-gelu-fusion", "model.gelu", "tanh"),
    read_as(
        "--no-bias-gelu-fusion",
        "model.gelu",
        "erf",
        note=", unless --openai-gelu is given as well",
        unless="--openai-gelu",
    ),
    inert(
        "--use-mcore-models --use-legacy-models --use-flash-attn --no-masked-softmax-fusion "
        "--bias-dropout-fusion --no-scaled-masked-softmax-fusion "
        "--no-bias-dropout-fusion --no-bias-swiglu-fusion --no-rope-fusion --no-persist-layer-norm "
        "--no-gradient-accumulation-fusion --scaled-upper-triang-masked-softmax-fusion "
        "--scaled-masked-softmax-fusion --transformer-impl= --onnx-safe=",
        "there is one implementation",
    ),
    inert("--position-embedding-type=", "positions are learned", "learned_absolute"),
    inert("--normalization=", "GPT-2 has layer norms", "LayerNorm"),
    refused(
        "--swiglu --squared-relu --group-query-attention --untie-embeddings-and-output-weights "
        "--disable-bias-linear --fp32-residual-connection --apply-residual-connection-post-layernorm "
        "--use-rotary-position-embeddings --multi-latent-attention --init-method-xavier-uniform "
        "--kv-channels= --num-query-groups= --num-experts= --rotary-base= --rotary-percent= --num-unique-layers= "
        "--param-sharing-style= --vocab-extra-ids=",
        "not a part of GPT-2; leave it out",
    ),
    inert("--use-cpu-initialization", "initial weights are the same on every device"),
    # Parallelism
    inert(
        "--context-parallel-size= --expert-model-parallel-size= --expert-tensor-parallel-size=",
        "layouts are tensor-, pipeline- and data-parallel: use --model-parallel-size",
        "1",
    ),
    translated("--pipe-parallel-size=", "read as --pipeline-model-parallel-size; 0 is none", _pipeline_stages),
    refused("--pipeline-model-parallel-split-rank=", "GPT-2 has no encoder; leave it out"),
    inert(
        "--overlap-grad-reduce --overlap-param-gather --no-async-tensor-model-parallel-allreduce "
        "--tp-comm-overlap --no-contiguous-buffers-in-local-ddp --use-contiguous-buffers-in-ddp "
        "--use-ring-exchange-p2p --no-scatter-gather-tensors-in-pipeline",
        OVERLAPS,
    ),
    refused("--lazy-mpu-init=", "the groups of ranks are made at the start; leave it out"),
    inert("--local-rank=", "ranks come from the launcher's variables"),
    # Data
    inert("--loose-json", "--train-data files are recognised by their names and first lines"),
    inert("--lazy-loader --mmap-warmup --data-impl=", "text is tokenised once and memory-mapped"),
    inert("--shuffle", "training samples are always shuffled, by --seed"),
    inert("--resume-dataloader", "data always continues where the checkpoint stopped"),
    inert(
        "--tokenizer-model-type=",
        "a SentencePiece model says its own type; one that is to be trained is BPE",
        "bpe",
        *(f"bert-{size}-{case}" for size in ("base", "large") for case in ("uncased", "cased")),
    ),
    inert("--dataloader-type=", "the order is shuffled in every epoch, by --seed", "single", "cyclic"),
    inert("--no-create-attention-mask-in-dataloader", "masks are never materialised"),
    translated("--train-data-path=+", "read as --data-path with --split 1", _indexed_prefix),
    refused("--mock-data", "leave --train-data out: the built-in corpus is real text"),
    refused("--use-npy-data-loader --input-data-sizes-file=", NO_NPY),
    refused("--use-tfrecords", "TFRecords are BERT's; give loose JSON or text with --train-data"),
    refused("--delim=", "CSV is not read; give loose JSON or text with --train-data"),
    refused("--eval-text-key=", "--text-key names the field for all files"),
    inert("--sample-rate=", "every sample is read, once an epoch", "1", "1.0"),
    refused(
        "--pretrained-bert --presplit-sentences --bert-no-binary-head --biencoder-shared-query-context-model "
        "--faiss-use-gpu --retriever-score-scaling --train-with-neg --use-one-sent-docs "
        "--max-preds-per-seq= --eval-max-preds-per-seq= --mask-prob= --short-seq-prob= --decoder-seq-length= "
        "--bert-load= --ict-load= --ict-head-size= --biencoder-projection-dim= --titles-data-path= "
        "--block-data-path= --embedding-path= --evidence-data-path= --query-in-block-prob= --indexer-batch-size= "
        "--indexer-log-interval= --faiss-match= --faiss-topk-retrievals= --qa-data-dev= --qa-data-test= "
        "--retriever-seq-length= --train-hard-neg= --val-av-rank-hard-neg= --val-av-rank-other-neg= --img-dim= "
        "--patch-dim= --num-channels= --num-classes= --report-topk-accuracies=+ --retriever-report-topk-accuracies=+",
        "a flag of BERT's or of another model, not a part of GPT-2; leave it out",
    ),
    # Schedule and length
    refused("--lr-decay-tokens=", "count in samples: --lr-decay-samples"),
    inert("--sgd-momentum=", "the optimizer is AdamW"),
    inert("--optimizer=", "the optimizer is AdamW", "adam"),
    inert("--weight-decay-incr-style=", "weight decay is constant", "constant"),
    inert("--lr-warmup-init=", "warm-up starts at 0", "0", "0.0"),
    # Checkpoints and logs
    inert(
        "--adlr-autoresume --adlr-autoresume-interval= --exit-signal-handler",
        "SIGTERM saves before it ends the run, and the same command continues",
    ),
    inert("--use-checkpoint-args", "the shape always comes from the checkpoint where no flag gives it"),
    inert(
        "--use-dist-ckpt --auto-detect-ckpt-format --use-mp-args-from-checkpoint-args --ckpt-format= "
        "--dist-ckpt-format=",
        "checkpoints have one format, for every layout",
    ),
    inert(
        "--log-throughput --log-params-norm --log-num-zeros-in-grad --log-timers-to-tensorboard "
        "--log-validation-ppl-to-tensorboard --log-memory-to-tensorboard --log-batch-size-to-tensorboard "
        "--log-learning-rate-to-tensorboard --log-loss-scale-to-tensorboard --log-progress "
        "--no-log-learnig-rate-to-tensorboard --no-log-loss-scale-to-tensorboard --timing-log-level= "
        "--tensorboard-queue-size= --tensorboard-log-interval= --manual-gc --manual-gc-interval= "
        "--empty-unused-memory-level=",
        "what is logged and collected is fixed",
    ),
    translated(
        "--profile-step-start= --profile-step-end=",
        "--profile without values is of the iterations after the one, up to the other",
        _sets_nothing,
    ),
    inert("--use-pytorch-profiler", "the profiler is torch's"),
    # DeepSpeed; --deepspeed-config is read below
    inert(
        "--deepspeed --deepscale --deepspeed-mpi",
        "there is one engine; what a --deepspeed-config asks for is translated",
    ),
    translated("--zero-stage=", STAGE, _zero_stage),
    inert(
        "--zero-reduce-bucket-size= --zero-allgather-bucket-size= --zero-contigious-gradients --zero-reduce-scatter",
        "the --deepspeed-config decides, as in DeepSpeedExamples",
    ),
    inert("--remote-device=", "weights stay on the device; --model-parallel-size divides them", "none"),
    inert("--use-pin-memory", PINNED),
    inert(
        "--deepspeed-activation-checkpointing --contigious-checkpointing --synchronize-each-layer --profile-backward",
        RECOMPUTES,
    ),
    inert("--cpu-torch-adam", "with --cpu-offload-optimizer AdamW runs in torch, on the CPU"),
    translated("--deepspeed-config= --deepscale-config=", "each of its keys is translated or refused", _sets_nothing),
    # Other programs
    inert(
        "--temperature= --top-k= --top-p= --out-seq-length= --sample-input-file= --sample-output-file= "
        "--num-samples= --genfile= --greedy --recompute",
        "of generate_samples.py, not a part of pretraining",
    ),
    refused(
        "--cloze-eval --strict-lambada --overlapping-eval= --task=", f"not a part of pretraining; {EVALUATE} takes it"
    ),
    refused(
        "--epochs= --pretrained-checkpoint=",
        "of the tasks that fine-tune a classifier; --finetune --load FOLDER trains GPT-2 on other text",
    ),
    refused(
        "--eval-batch-size= --eval-micro-batch-size= --eval-seq-length=",
        "the validation split is read as the training split is, with --micro-batch-size and --seq-length; "
        f"{EVALUATE} takes it",
    ),
    refused(
        "--load-openai --eval-hf",
        f"{how_to_call('checkpoint')} convert makes a checkpoint of the weights, which --load takes",
    ),
)


def _betas(value: Any) -> dict[str, Any]:
    require(isinstance(value, list) and len(value) == 2, "is not a pair of numbers")
    return {f"optimizer.adam_beta{place}": _number(beta) for place, beta in enumerate(value, 1)}


KEYS = (
    number("train_batch_size", "train.global_batch_size"),
    number("train_micro_batch_size_per_gpu", "train.micro_batch_size"),
    number("gradient_accumulation_steps", "train.gradient_accumulation_steps", note=", unless there is a batch size"),
    number("gradient_clipping", "optimizer.clip_grad"),
    inert(
        "steps_per_print wall_clock_breakdown dump_state memory_breakdown tensorboard wandb csv_monitor comms_logger "
        "flops_profiler",
        "what is logged is fixed, every --log-interval iterations",
    ),
    # Precision
    read_as("fp16.enabled", "train.precision", GPU_FP16, note=", which is auto on a CPU"),
    read_as("bf16.enabled bfloat16.enabled", "train.precision", "bf16"),
    translated(
        "fp16.loss_scale",
        "read as --loss-scale, 0 being dynamic",
        lambda value: {"optimizer.loss_scale": _number(value) or None},
    ),
    translated(
        "fp16.initial_scale_power",
        "read as --initial-loss-scale, its power of 2",
        lambda power: {"optimizer.initial_loss_scale": 2.0 ** _number(power, int)},
    ),
    number("fp16.loss_scale_window", "optimizer.loss_scale_window"),
    number("fp16.hysteresis", "optimizer.hysteresis"),
    number("fp16.min_loss_scale", "optimizer.min_loss_scale"),
    inert("fp32_allreduce prescale_gradients", "gradients are reduced in fp32"),
    translated(
        "communication_data_type",
        "16 bits are read as --grad-reduce-in-bf16",
        lambda kind: {} if kind == "fp32" else {"parallel.grad_reduce_in_bf16": True},
        "fp32",
        "bf16",
        "bfp16",
    ),
    refused("fp16.auto_cast fp16.consecutive_hysteresis amp", "--precision fp16 and bf16 are the two ways"),
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
    inert("zero_optimization.offload_optimizer.pin_memory zero_optimization.cpu_offload_use_pin_memory", PINNED),
    number("zero_optimization.reduce_bucket_size", "parallel.ddp_bucket_size"),
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
    read_as("activation_checkpointing.partition_activations", "parallel.partition_activations", True),
    read_as("activation_checkpointing.cpu_checkpointing", "parallel.checkpoint_in_cpu", True),
    inert(
        "activation_checkpointing.contiguous_memory_optimization activation_checkpointing.number_checkpoints "
        "activation_checkpointing.synchronize_checkpoint_boundary activation_checkpointing.profile",
        RECOMPUTES,
    ),
    # Optimizer and schedule
    inert("zero_allow_untested_optimizer zero_force_ds_cpu_optimizer", "the optimizer is AdamW"),
    inert("optimizer.params.max_grad_norm", "gradient_clipping is what clips, in DeepSpeed as well"),
    inert("optimizer.type", "the optimizer is AdamW", "Adam", "AdamW"),
    number("optimizer.params.lr", "optimizer.lr"),
    translated("optimizer.params.betas", "read as --adam-beta1 and --adam-beta2", _betas),
    number("optimizer.params.eps", "optimizer.adam_eps"),
    number("optimizer.params.weight_decay", "optimizer.weight_decay"),
    inert(
        "optimizer.params.adam_w_mode optimizer.params.bias_correction optimizer.params.torch_adam",
        "the optimizer is AdamW",
        True,
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
    rows: tuple[Foreign, ...], read: Mapping[str, Any], given: Mapping[str, Any], *, given_wins: bool = False
) -> tuple[dict[str, Any], list[str], list[str]]:
    """The fields that the names in `read`, with their values, set by the table `rows`; lines about them; what is refused.

    given: what the project's own flags set, by "section.field". given_wins: `given` replaces what a row sets; otherwise
    a difference is a contradiction.
    """
    row_of = {name: row for row in rows for name in row.flags}
    values: dict[str, Any] = {}
    set_by: dict[str, str] = {}
    said: dict[str, list[str]] = {}
    problems = []
    for name, value in read.items():
        row = row_of[name]
        if row.unless in read:
            continue
        spelled = name if value is None else f"{name} {_shown(value)}"
        text = row.text if row.status == "translated" else f"without effect here: {row.text}"
        try:
            require(row.status != "refused", f"is not supported: {row.text}")
            accepted = " or ".join(map(_shown, row.accepts))
            require(not row.accepts or value in row.accepts, f"is not supported, only {accepted}: {row.text}")
            for key, new in row.sets(value).items():
                now = given.get(key, values.get(key, new))
                if key in given and now != new and (given_wins or now in row.narrower):
                    text = f"without effect, since {flag(key)} {now} is given"
                    continue
                require(now == new, f"contradicts {set_by.get(key) or f'{flag(key)} {now}'}")
                values[key], set_by[key] = new, name
        except (ValueError, OverflowError) as error:
            problems.append(f"{spelled} {error}")
        else:
            said.setdefault(text, []).append(spelled)
    return values, [f"{', '.join(names)}: {text}" for text, names in said.items()], problems


def read_deepspeed_config(path: str, given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """What a DeepSpeed file sets in addition to `given` ("section.field" to value, from the command line, which wins),
    and the lines about it. A value of `false`, `null`, `"auto"` or `{}`, and a section with `"enabled": false`, ask for
    nothing. ValueError or FileNotFoundError if it is not such a file; ValueError names all that is refused in one line.
    """
    known = {key for row in KEYS for key in row.flags}
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
        require(isinstance(content, dict), "it is not a JSON object")
        if content.get("zero_optimization") is True:
            content["zero_optimization"] = {"stage": 1}  # the spelling of early 2020
        read = dict(_leaves(content, known))
        unknown = sorted(map(_shown, read.keys() - known))
        values, notes, problems = apply_rows(
            KEYS, {key: value for key, value in read.items() if key in known}, given, given_wins=True
        )
        # DeepSpeed asks for two of micro-batch, accumulation and batch; the number of ranks, which gives the third, is
        # not known here.
        has_batch = "train.global_batch_size" in {*values, *given}
        if "train.global_batch_size" in values and "train.micro_batch_size" not in {*values, *given}:
            problems.append(
                "train_batch_size: give --micro-batch-size as well, the samples that one rank takes at once"
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
        notes.append(f"WARNING: {path}: {', '.join(unknown)}: unknown here, and without effect")
    return values, notes


def _leaves(section: Mapping[str, Any], known: set[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The keys that ask for something, with dots, down to those of the table."""
    for name, value in section.items():
        key = prefix + name
        if key not in ALWAYS_READ and (value is None or value is False or value == "auto" or value == {}):
            continue
        if not isinstance(value, dict):
            yield key, value
        elif value.get("enabled") is False or key.endswith(".offload_param") and value.get("device") == "none":
            continue
        elif key in known:
            yield key, value
        else:
            yield from _leaves(value, known, f"{key}.")


def _shown(value: Any) -> str:
    """A value of a command line, or a value or key of a file, for a message: in one line that is not too long."""
    text = value if isinstance(value, str) and value.isprintable() else json.dumps(value)
    return text if len(text) <= 80 else f"{text[:76]}...{text[-1]}"
