"""Megatron's flags that are no field of `megatron/gpt2/config/`: one table, from which the parser and the
documentation are made. A row is translated (it sets fields), inert (it changes nothing here, which a note says) or
refused (it would change result, memory or speed, so leaving it out silently would be wrong); its text says why, or what
to give instead. `deepspeed_config.py` beside this file has a table of the same rows for the keys of a
--deepspeed_config.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from data_utils.command_line import how_to_call
from megatron.gpt2.config import require


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
            f"--train-data-path {path} is a directory: 2019's folders of .npy files are "
            "not read; give loose JSON or text with --train-data",
        )
    return {"data.data_path": tuple(paths), "data.split": "1"}


def _zero_stage(word: str) -> dict[str, Any]:
    require(word in ("0", "1", "2", "3"), f"--zero-stage {word} is no stage of ZeRO")
    require(word != "3", f"--zero-stage 3 is not built: {NO_STAGE_3}")
    return of_zero_stage(int(word))


def of_zero_stage(stage: int) -> dict[str, Any]:
    """What a stage of ZeRO up to 2 sets."""
    return (
        {"parallel.use_distributed_optimizer": True, "parallel.shard_gradients": True}
        if stage == 2
        else {"parallel.use_distributed_optimizer": True}
        if stage == 1
        else {}
    )


def _pipeline_stages(word: str) -> dict[str, Any]:
    require(word.isdecimal(), f"--pipe-parallel-size {word} is no number of stages")
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
    # DeepSpeed; --deepspeed-config is read by megatron/gpt2/config/deepspeed_config.py
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
