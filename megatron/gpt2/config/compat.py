"""Rules for flags of Megatron and keys of a DeepSpeed file that are not fields of the configuration.

The tables cover the parsers of NVIDIA/Megatron-LM from 2019 to d98e8a6 (2026-08-22, after Core 0.19),
microsoft/DeepSpeedExamples, microsoft/Megatron-DeepSpeed f4157be and bigscience-workshop/Megatron-DeepSpeed 8387ae1.
`apply_rules` applies the rules, and docs/reference/flags.md lists most of them. A rule has one of these statuses:

    translated   the flag sets fields of the configuration
    ignored      the flag has no effect; the start of a run prints the reason
    refused      the flag is an error, because the run cannot do what it asks for; its text names the way out

Flags that select a different model than GPT-2 are refused (`--num-experts`, `--multi-latent-attention`, …). Flags that
have no effect without such a refused flag are ignored.
"""

import collections
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from data_utils.command_line import how_to_call, require
from megatron.gpt2.config.sections import config_fields, flag_name

Fields = dict[str, Any]  # {"section.field": value}


@dataclass(frozen=True)
class CompatRule:
    """The rule for some flags of Megatron or keys of a DeepSpeed file.

    names: {name: True if the flag takes values, False if not, None if values are optional}. `--bert-*` stands for all
        names that begin with `--bert-`.
    accepts: the allowed values; empty if all values are allowed.
    sets: (value, the fields that the command line gives) -> fields; raises ValueError for a bad value.
    unless: the rule does not apply if this flag is given.
    explicit_values: if the project's own flag of the field has one of these values, the rule does not change the field.
    """

    names: Mapping[str, bool | None]
    status: str
    text: str
    accepts: tuple[Any, ...] = ()
    sets: Callable[[Any, Mapping[str, Any]], Fields] = lambda value, given: {}
    unless: str = ""
    explicit_values: tuple[Any, ...] = ()

    @property
    def help_text(self) -> str:
        """The text of the rule for docs/reference/flags.md, with the allowed values."""
        return f"only {self.allowed}: {self.text}" if self.accepts else self.text

    @property
    def allowed(self) -> str:
        """The allowed values, as an error message lists them."""
        return " or ".join(map(_format_value, self.accepts))


def _rule(status: str, names: str, text: str, *accepts: Any, **others: Any) -> CompatRule:
    """Return a rule.

    names: names, separated by spaces. `--a=` takes values, and `--a` takes none. `--a-{b,c}` stands for `--a-b` and
        `--a-c`, which may take values.
    """
    takes_values: dict[str, bool | None] = {}
    for word in names.split():
        beginning, brace, endings = word.rstrip("=}").partition("{")
        for ending in endings.split(","):
            takes_values[beginning + ending] = None if brace else word.endswith("=")
    return CompatRule(takes_values, status, text, accepts, **others)


def ignored(names: str, text: str, *accepts: Any) -> CompatRule:
    """Return a rule for flags that are accepted but have no effect.

    text: the reason.
    """
    return _rule("ignored", names, text, *accepts)


def refused(names: str, text: str) -> CompatRule:
    """Return a rule for flags that are an error.

    text: the reason and the alternative.
    """
    return _rule("refused", names, text)


def translated(
    names: str, text: str, sets: Callable[[Any, Mapping[str, Any]], Fields], *accepts: Any, **others: Any
) -> CompatRule:
    """Return a rule for flags that set fields. The arguments are those of `CompatRule`."""
    return _rule("translated", names, text, *accepts, sets=sets, **others)


def read_as(names: str, key: str, value: Any, *accepts: Any, note: str = "", **others: Any) -> CompatRule:
    """Return a rule for flags that set the field `key` to `value`.

    note: a text that is appended to the text of the rule.
    """
    text = f"read as {flag_name(key)}{'' if value is True else f' {value}'}{note}"
    return translated(names, text, lambda *_: {key: value}, *accepts, **others)


def numeric(names: str, key: str, note: str = "") -> CompatRule:
    """Return a rule for a flag whose number is stored in the field `key`."""
    return translated(
        names, f"read as {flag_name(key)}{note}", lambda value, _: {key: _number(value, config_fields()[key].type)}
    )


def _number(value: Any, kind: Any = float) -> Any:
    """Return `value` as the number type `kind` of a field. Raises ValueError if the value is not a number of this
    type."""
    is_whole = kind in (int, int | None)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    require(
        is_number and not (is_whole and value % 1), f"is not a {'whole ' * is_whole}number but a {type(value).__name__}"
    )
    return int(value) if is_whole else float(value)


def _count(word: str) -> int:
    """Parse a whole number of a command line. The number may be written as 300_000 or 3e8."""
    try:
        return _number(float(word.replace("_", "")), int)
    except ValueError:
        raise ValueError("is not a whole number") from None


def _in_samples(key: str) -> Callable[[str, Mapping[str, Any]], Fields]:
    def sets(tokens: str, given: Mapping[str, Any]) -> Fields:
        require("data.seq_length" in given, "needs --seq-length")
        return {key: _count(tokens) // given["data.seq_length"]}

    return sets


def _indexed_prefix(paths: str | list[str], _: Any) -> Fields:
    paths = [paths] if isinstance(paths, str) else paths
    require(
        not any(map(os.path.isdir, paths)),
        "is a directory, and folders of .npy files (2019) cannot be read; give loose JSON or text with --train-data",
    )
    return {"data.data_path": tuple(paths), "data.split": "1"}


def _zero_stage(stage: Any, _: Any) -> Fields:
    require(str(stage) in ("0", "1", "2", "3"), "is not a stage of ZeRO")
    require(int(stage) < 3, f"is not implemented: {NO_STAGE_3}")
    return dict.fromkeys(("parallel.use_distributed_optimizer", "parallel.shard_gradients")[: int(stage)], True)


def _size_of_a_head(word: str, given: Mapping[str, Any]) -> Fields:
    hidden, heads = (given.get(f"model.{name}", 0) for name in ("hidden_size", "num_attention_heads"))
    require(_count(word) * heads == hidden, "is not --hidden-size / --num-attention-heads: leave it out")
    return {}


def _one_group_per_head(word: str, given: Mapping[str, Any]) -> Fields:
    require(_count(word) == given.get("model.num_attention_heads"), "is not --num-attention-heads: leave it out")
    return {}


def by_name(*rules: CompatRule) -> dict[str, CompatRule]:
    """Return {name: rule} of all names in `rules`."""
    return {name: rule for rule in rules for name in rule.names}


def find_rule(rules: Mapping[str, CompatRule], name: str) -> CompatRule | None:
    """Return the rule of `name`, or the rule with the longest beginning of `name`, or None. If `--x` is ignored,
    `--no-x` and `--disable-x` are ignored, too."""
    if name in rules:
        return rules[name]
    for end in range(len(name), 0, -1):
        if rule := rules.get(f"{name[:end]}*"):
            return rule
    for opposite in ("--no-", "--disable-"):
        if name.startswith(opposite):
            rule = find_rule(rules, "--" + name.removeprefix(opposite))
            return rule if rule and rule.status == "ignored" and not rule.accepts else None
    return None


def iterations_to_profile(read: Mapping[str, Any]) -> tuple[int, int]:
    """Return the first and last iteration to profile if --profile has no values: those of --profile-step-start and
    --profile-step-end."""
    start, end = read.get("--profile-step-start", "10"), read.get("--profile-step-end", "12")
    require(
        start.isdecimal() and end.isdecimal(),
        f"--profile-step-start {start} and --profile-step-end {end} must be iteration numbers",
    )
    return int(start) + 1, int(end)


GPU_FP16 = "fp16-on-gpu"  # fp16 on a GPU. On a CPU this means `auto`, because few CPUs compute in fp16.
NO_STAGE_3 = (
    "every data-parallel rank keeps all weights; stage 2 gives the same losses and shards optimizer and gradients, "
    "--tensor-model-parallel-size splits the weights, and --cpu-offload-optimizer moves the optimizer to the host"
)
STAGE = "1 is read as --use-distributed-optimizer, 2 adds --shard-gradients, 3 is refused"
EVALUATE = how_to_call("evaluate_gpt2")
CONVERT = f"{how_to_call('checkpoint')} convert"
ONE_IMPLEMENTATION = "there is one implementation, with equal results within rounding"
NOT_IMPLEMENTED = "not implemented here; leave it out"
ADAMW = "the optimizer is AdamW"
GPT2_FILES = "give --vocab-file vocab.json and --merge-file merges.txt"
OTHER_VALUES = {  # {value of a flag that only Megatron supports: the flags to give instead}
    "HuggingFaceTokenizer": f"{GPT2_FILES} of the tokenizer's folder",
    "TikTokenizer": f"{GPT2_FILES} of GPT-2, which tiktoken reads here",
    "NullTokenizer": f"{GPT2_FILES}, or --tokenizer-model, of the tokenizer that made the .bin files",
    "dist_muon": "give --optimizer muon --use-distributed-optimizer",
    "inverse-square-root": "give --lr-decay-style cosine, linear or WSD",
}

MEGATRON_RULES = by_name(
    # Precision
    read_as("--fp16", "train.precision", GPU_FP16, note=" (auto on a CPU)", explicit_values=("fp16",)),
    read_as("--bf16", "train.precision", "bf16"),
    refused(
        "--fp8-format= --fp8-hybrid= --fp8-e4m3= --fp4-format= --te-precision-config-file= --kitchen-config-file= "
        "--kitchen-recipe-number= --use-kitchen-attention",
        "fp8 and fp4 are not implemented; give --precision bf16",
    ),
    ignored(
        "--fp32-allreduce --accumulate-allreduce-grads-in-fp32 --ddp-reduce-scatter-with-fp32-accumulation "
        "--ddp-param-name-patterns-for-fp32-local-accumulation=",
        "gradients are accumulated in fp32, and reduced in fp32 without --grad-reduce-in-bf16",
    ),
    ignored("--dynamic-loss-scale", "fp16 has a dynamic loss scale without --loss-scale"),
    ignored(
        "--attention-softmax-in-fp32 --no-query-key-layer-scaling --apply-query-key-layer-scaling",
        "attention accumulates in fp32, but some bf16 kernels on a CPU hold scores in bf16",
    ),
    ignored("--fp16-lm-cross-entropy --disable-bf16-reduced-precision-matmul", "the loss and sums are in fp32"),
    # Memory
    read_as("--checkpoint-activations", "train.recompute_granularity", "full"),
    read_as("--recompute-activations", "train.recompute_granularity", "selective"),
    ignored("--recompute-modules=", "--recompute-granularity selective recomputes GELU and layer norms"),
    read_as("--activations-checkpoint-method=", "train.recompute_granularity", "full", "uniform"),
    read_as(
        "--scattered-embeddings",
        "parallel.sequence_parallel",
        True,
        note=", which also splits the activations between layers",
    ),
    refused(
        "--fine-grained-activation-offloading",
        "give --cpu-offloading-num-layers, or --recompute-granularity full --checkpoint-in-cpu",
    ),
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
        "--use-mcore-models --use-legacy-models --use-flash-attn{,-builder,-triton,-v1,-v2} "
        "--flash-attention-version= --masked-softmax-fusion --bias-dropout-fusion --scaled-masked-softmax-fusion "
        "--bias-swiglu-fusion --rope-fusion --persist-layer-norm --gradient-accumulation-fusion "
        "--scaled-upper-triang-masked-softmax-fusion --transformer-impl= --onnx-safe= --cross-entropy-loss-fusion "
        "--cross-entropy-fusion-impl= --use-te-activation-func --use-transformer-engine-op-fuser "
        "--use-grouped-gemm-for-dense-mlp --mem-efficient-ln --jit-fuser --cuda-graph-{impl,modules,scope,"
        "warmup-steps} --enable-cuda-graph --external-cuda-graph --optimizer-cuda-graph --te-rng-tracker "
        "--mlp-chunks-for-training= --ds-fused-adam --gradient-reduce-div-fusion --enable-experimental "
        "--use-precision-aware-optimizer --abort-on-unmet-fused-kernel-constraints --split-transformers "
        "--memory-centric-tiled-linear --tile-factor= --deepspeed-activation-checkpointing "
        "--contigious-checkpointing --synchronize-each-layer --profile-backward --use-pin-memory --pin-cpu-grads "
        "--pin-cpu-params --overlap-cpu-optimizer-d2h-h2d --use-torch-optimizer-for-cpu-offload --cpu-torch-adam "
        "--overlap-param-gather-{with-optimizer-step} --overlap-p2p-{communication,communication-warmup-flush} "
        "--tp-comm-{bootstrap-backend,bulk-dgrad,bulk-wgrad,overlap,overlap-ag,overlap-cfg,overlap-rs,overlap-rs-dgrad,"
        "split-ag,split-rs} --use-ring-exchange-p2p --scatter-gather-tensors-in-pipeline --align-grad-reduce "
        "--align-param-gather --defer-embedding-wgrad-compute --wgrad-deferral-limit= --enable-zbh1-exact-semantics "
        "--microbatch-group-size-per-virtual-pipeline-stage= --clone-scatter-output-in-embedding "
        "--ddp-num-buckets= --ddp-pad-buckets-for-high-nccl-busbw --ddp-average-in-collective --use-nccl-ub "
        "--use-sharp --sharp-enabled-group= --nccl-communicator-config-path= --high-priority-stream-groups= "
        "--symmetric-{ar-type,registration} --pipeline-model-parallel-comm-backend= --create-all-gather-group "
        "--gloo-process-groups --use-tp-pp-dp-mapping --num-distributed-optimizer-instances= "
        "--use-layer-wise-param-layout --sync-tp-duplicated-parameters --distributed-timeout-seconds-after-init= "
        "--DDP-impl= --lazy-loader --mmap-warmup --data-impl= --dataset-impl= --mmap-bin-files "
        "--num-dataset-builder-threads= --dataloader-fast-cache-load --dataloader-defer-npy-index-mmap "
        "--per-dataset-sequences-path= --s3-cache-path= --object-storage-cache-path= --enable-msc --disable-msc "
        "--aml-data-download-path= --valid-num-workers= --data-sharding --create-attention-mask-in-dataloader "
        "--muon-fp32-matmul-prec= --muon-use-syrk --use-pytorch-profiler --fp32-layernorm "
        "--fp32-tokentypes --deep-init",
        ONE_IMPLEMENTATION,
    ),
    ignored("--muon-nesterov --muon-use-nesterov", "Muon always uses Nesterov momentum"),
    ignored("--fp32-embedding", "embeddings have the precision of the model"),
    ignored("--calculate-per-token-loss", "the loss is always the mean over the tokens of the global batch"),
    ignored("--add-qkv-bias", "every linear layer of GPT-2 has a bias"),
    translated(
        "--kv-channels= --mup-base-head-dim=",
        "it is --hidden-size / --num-attention-heads, the only size",
        _size_of_a_head,
    ),
    _rule(
        "refused",
        "--use-mup",
        "attention divides by √d: give --mup-base-head-dim d",
        unless="--mup-base-head-dim",
    ),
    translated(
        "--num-query-groups= --num-key-value-heads=",
        "must be equal to --num-attention-heads",
        _one_group_per_head,
    ),
    _rule("refused", "--group-query-attention", NOT_IMPLEMENTED, unless="--num-query-groups"),
    ignored("--mup-width-mult=", "it is --hidden-size / --mup-base-width"),
    refused(
        "--swiglu --glu-activation= --quick-geglu --squared-relu --untie-embeddings-and-output-weights "
        "--disable-bias-linear --apply-residual-connection-post-layernorm --apply-layernorm-1p --embed-layernorm "
        "--qk-layernorm --qk-l2-norm --qk-clip --use-rotary-position-embeddings --no-position-embedding "
        "--multi-latent-attention --init-method-xavier-uniform --embedding-init-method-std= --num-unique-layers= "
        "--param-sharing-style= --vocab-extra-ids= --window-size= --attention-output-gate --linear-attention-freq= "
        "--experimental-attention-variant= --mtp-num-layers= --enable-mhc-connections --spec= --is-hybrid-model "
        "--hybrid-override-pattern= --hybrid-layer-pattern= --hybrid-attention-ratio= --hybrid-mlp-ratio= "
        "--heterogeneous-layers-config-path= --heterogeneous-layers-config-encoded-json= --moe-use-upcycling "
        "--encoder-num-layers= --decoder-num-layers= --retro-add-retriever --embedding-weights-in-fp32 "
        "--fp32-residual-connection --output-logit-dtype= --lazy-mpu-init= --fake-process-group --decoupled-lr= "
        "--decoupled-min-lr= --freeze-all-layers --muon-no-split-qkv --perform-rl-step --kd --mos --load-teacher= "
        "--export-* --logits-* --fim-data --sft --loss-on-targets-only --reweight-loss-based-on-position-frequency "
        "--noise-density= --mean-noise-span-length= --data-efficiency-curriculum-learning --curriculum-learning "
        "--random-ltd --iterations-to-skip= --skip-train-iteration-range= "
        # flags of BERT and of models of images
        "--pretrained-bert --presplit-sentences --bert-* --biencoder-* --faiss-* --retriever-* --train-with-neg "
        "--use-one-sent-docs --max-preds-per-seq= --eval-max-preds-per-seq= --mask-* --short-seq-prob= "
        "--decoder-seq-length= --ict-* --titles-data-path= --block-data-path= --embedding-path= --evidence-data-path= "
        "--query-in-block-prob= --indexer-* --qa-data-* --train-hard-neg= --val-av-rank-* --img-* --patch-dim= "
        "--num-channels= --num-classes= --report-topk-accuracies= --vision-* --swin-* --dino-* --classes-fraction= "
        "--data-per-class-fraction= --head-lr-mult= --iter-per-epoch= --output-bert-embeddings",
        NOT_IMPLEMENTED,
    ),
    ignored("--use-cpu-initialization --no-initialization", "every device gets the same initial weights"),
    # Parallelism
    ignored(
        "--context-parallel-size= --ds-sequence-parallel-size= --expert-model-parallel-size= "
        "--expert-tensor-parallel-size= --tensor-parallel-num-weight-shards= "
        "--expert-tensor-parallel-num-weight-shards=",
        "parallelism is tensor, pipeline and data: use --tensor-model-parallel-size, for long sequences "
        "--sequence-parallel",
        "1",
    ),
    refused(
        "--force-ds-sequence-parallel --ds-sequence-parallel-fpdt --hybrid-context-parallel",
        "give --sequence-parallel with --tensor-model-parallel-size",
    ),
    refused(
        "--use-torch-fsdp2 --use-megatron-fsdp --use-custom-fsdp",
        "give --use-distributed-optimizer --shard-gradients, and --tensor-model-parallel-size to split the weights",
    ),
    translated(
        "--pipe-parallel-size=",
        "read as --pipeline-model-parallel-size; 0 means 1",
        lambda word, _: {"parallel.pipeline_model_parallel_size": max(_count(word), 1)},
    ),
    read_as("--no-pipeline-parallel", "parallel.pipeline_model_parallel_size", 1),
    read_as("--enable-zbh1-pipeline", "parallel.pipeline_schedule", "zero-bubble"),
    refused(
        "--pipeline-model-parallel-split-rank= --standalone-embedding-stage --pipeline-model-parallel-layout=",
        "give --decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers",
    ),
    ignored(
        "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split --pp-partition-method=",
        "give --decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers for other stages",
    ),
    ignored(
        "--overlap-grad-reduce --overlap-param-gather --async-tensor-model-parallel-allreduce "
        "--contiguous-buffers-in-local-ddp --use-contiguous-buffers-in-ddp",
        "always on",
    ),
    ignored("--local-rank=", "the local rank is read from the launcher's variables"),
    refused(
        "--batch-invariant-mode --data-parallel-random-init", "give --deterministic or --exact-layouts; leave it out"
    ),
    # Data
    ignored("--loose-json", "--train-data detects the file format"),
    ignored("--shuffle", "training samples are always shuffled, by --seed"),
    ignored("--dataloader-type=", "--data-order sets the order of samples", "single", "cyclic"),
    ignored("--resume-dataloader --repeated-dataloader", "data always continues from the checkpoint, over all epochs"),
    refused(
        "--tokenizer-name-or-path= --tokenizer-metadata=", "give --vocab-file and --merge-file, or --tokenizer-model"
    ),
    translated(
        "--padded-vocab-size= --pad-vocab-size-to=",
        "read as --make-vocab-size-divisible-by",
        lambda word, _: {"model.make_vocab_size_divisible_by": _count(word)},
    ),
    read_as("--no-pad-vocab-size --disable-pad-vocab-size", "model.make_vocab_size_divisible_by", 1),
    translated("--train-data-path=", "read as --data-path with --split 1", _indexed_prefix),
    refused("--mock-data", "leave --train-data out to train on the built-in corpus"),
    refused(
        "--use-npy-data-loader --input-data-sizes-file=",
        "folders of .npy files cannot be read; give loose JSON or text with --train-data, or a prefix with --data-path",
    ),
    refused("--use-tfrecords", "TFRecords are for BERT; give loose JSON or text with --train-data"),
    refused("--delim=", "CSV cannot be read; give loose JSON or text with --train-data"),
    refused("--eval-text-key=", "give --text-key, which is for all files"),
    refused(
        "--data-args-path= --per-split-data-args-path= --train-weighted-split-paths* --valid-weighted-split-paths* "
        "--test-weighted-split-paths* --multiple-validation-sets --train-data-exact-num-epochs= --use-dataset-only= "
        "--return-data-index --train-idx-path= --train-desc-path= --train-doc-idx-path= --train-sample-idx-path= "
        "--train-shuffle-idx-path= --phase-transition-iterations=",
        "give --data-path with weights and prefixes, --split, and --train-epochs",
    ),
    refused("--dataloader-inter-document-masking", "give --reset-attention-mask"),
    refused(
        "--decrease-batch-size-if-needed",
        "give batch sizes that are divisible by --micro-batch-size × data-parallel ranks",
    ),
    # Optimizer, schedule and length
    translated(
        "--lr-decay-tokens=", "read as --lr-decay-samples, in tokens", _in_samples("optimizer.lr_decay_samples")
    ),
    translated(
        "--lr-warmup-tokens=", "read as --lr-warmup-samples, in tokens", _in_samples("optimizer.lr_warmup_samples")
    ),
    refused("--lr-wsd-decay-samples=", "give --lr-wsd-decay-iters"),
    refused("--use-bnb-optimizer", "give --cpu-offload-optimizer or --use-distributed-optimizer"),
    refused("--start-weight-decay= --end-weight-decay= --weight-decay-cond-type=", "give --weight-decay"),
    refused("--skip-train --eval-only= --no-train= --inference", f"not for pretraining; use {EVALUATE}"),
    refused("--cloze-eval --strict-lambada --overlapping-eval= --task=", f"not for pretraining; give it to {EVALUATE}"),
    refused("--full-validation", "give a large --eval-iters: a smaller split is read once"),
    ignored(
        "--start-eval-at-iter=", "the first evaluation is after --eval-interval iterations; its start cannot be set"
    ),
    refused(
        "--epochs= --pretrained-checkpoint=",
        "for tasks that fine-tune a classifier; --finetune --load FOLDER trains GPT-2 on new text",
    ),
    refused(
        "--eval-batch-size= --eval-micro-batch-size= --eval-global-batch-size= --eval-seq-length=",
        f"validation uses --micro-batch-size, --global-batch-size and --seq-length; give it to {EVALUATE}",
    ),
    # Checkpoints
    ignored(
        "--adlr-autoresume{,-interval} --exit-signal-{handler,handler-for-dataloader,handler-for-training} "
        "--kill-switch-{file,path}",
        "on SIGTERM the run saves and exits; the same command continues it",
    ),
    ignored(
        "--use-checkpoint-args --use-tokenizer-model-from-checkpoint-args --use-mp-args-from-checkpoint-args",
        "the shape and tokenizer are always those of the checkpoint, and a different value is an error",
    ),
    refused("--ckpt-convert-* --load-openai --eval-hf", f"{CONVERT} makes a checkpoint for --load"),
    refused(
        "--ckpt-step= --override-ckpt-iteration= --load-tag=",
        "write the iteration into latest_checkpointed_iteration.txt of a copy of --load",
    ),
    ignored(
        "--use-dist-ckpt --auto-detect-ckpt-format --ckpt-{assume-constant-structure,drop-redundant-extra-state,"
        "format,fully-parallel-load,fully-parallel-load-exchange-algo,fully-parallel-load-per-rank-objects,"
        "fully-parallel-load-process-group,fully-parallel-save,fully-parallel-save-process-group,"
        "load-validate-sharding-integrity,pg-tensors-cache-create,pg-tensors-cache-path} --dist-ckpt-{format,"
        "optim-fully-reshardable,save-pre-mcore-014,strictness,workers} "
        "--distrib-optim-{fully-reshardable-mem-efficient} --use-persistent-ckpt-worker --async-strategy= "
        "--async-ckpt-{cpu-priority,io-priority,use-cpu-shm} --verify-integrity --save-tokenizer-assets "
        "--universal-checkpoint --load-main-params-from-ckpt --stream-ckpt-dequant --load-model-opt-format",
        f"saves have one format with hashes, which every layout opens; {CONVERT} --to torch_dist exports it",
    ),
    ignored("--save-retain-interval=", "all checkpoints are kept without --keep-last"),
    ignored(
        "--non-persistent-local-ckpt-algo= --replication-{factor,jump}", "every rank saves its part to its own disk"
    ),
    refused(
        "--non-persistent-global-ckpt-dir= --replication", "give --local-checkpoint-dir and a small --save-interval"
    ),
    read_as("--no-load-lr-state", "optimizer.override_opt_param_scheduler", True),
    refused("--reset-iteration", "give --finetune"),
    # Logs and failures
    ignored(
        "--log-{batch-size-to-tensorboard,device-memory-used,energy,learnig-rate-to-tensorboard,level,level-replica,"
        "loss-scale-to-tensorboard,max-attention-logit,memory-interval,memory-to-tensorboard,num-zeros-in-grad,"
        "optimizer-states-to-tensorboard,params-norm,path,progress,throughput,timers-to-tensorboard,"
        "validation-ppl-to-tensorboard,world-size-to-tensorboard} --logging-level= --timing-{log-level,log-option} "
        "--tensorboard-{log-interval,queue-size} --barrier-with-level-1-timing --one-logger{,-async,-project,"
        "-run-name} --app-tag-run-* --straggler-* --run-workload-inspector-server --otel-* --config-logger-dir= "
        "--codecarbon-dir= --record-{memory-history,shapes} --memory-snapshot-path= --nvtx-ranges "
        "--pytorch-profiler-* --flight-recorder-* --save-wgrads-interval= --save-dgrads-interval= "
        "--save-params-interval= --save-activations-interval= --save-tokens-per-expert-interval= "
        "--dump-param-to-param-group-map= --manual-gc{,-eval,-interval} --empty-unused-memory-level= "
        "--train-sync-interval= --test-mode",
        "logging and garbage collection are fixed",
    ),
    ignored(
        "--enable-ft-package --calc-ft-timeouts --ft-* --inprocess-* --rerun-mode= "
        "--result-rejected-tracker-filename= --error-injection-* --fault-injector-* --check-for-{large-grads,"
        "nan-in-loss-and-grad,spiky-loss} --gpu-sniff-test-interval=",
        "a step with a non-finite gradient is skipped, and a failed run continues from its checkpoint",
    ),
    translated(
        "--profile-step-start= --profile-step-end=",
        "first and last iteration of a --profile without values",
        lambda *_: {},
    ),
    refused("--profile-steps=", "give --profile START END"),
    refused("--yaml-cfg=", "give the flags, or --config with the config.json of a run"),
    refused(
        "--n-layer= --n-head= --n-embd= --block-size= --max-iters= --init-from= --out-dir=",
        "nanoGPT's; give --num-layers, --num-attention-heads, --hidden-size, --seq-length, --train-iters, --save",
    ),
    # flags of DeepSpeed; `read_deepspeed_config` reads --deepspeed-config
    ignored("--deepspeed --deepscale --deepspeed-mpi", "the keys of --deepspeed-config are translated instead"),
    translated("--zero-stage=", STAGE, _zero_stage),
    ignored(
        "--zero-reduce-bucket-size= --zero-allgather-bucket-size= --zero-contigious-gradients --zero-reduce-scatter",
        "give them in the --deepspeed-config, as in DeepSpeedExamples",
    ),
    translated("--deepspeed-config= --deepscale-config=", "each key is translated, ignored or refused", lambda *_: {}),
    ignored(
        "--fp8-{amax-compute-algo,amax-history-len,interval,margin,output-proj,param-gather,quantizer-factory,recipe,"
        "wgrad} --fp4-{param-gather,quantizer-factory,recipe} --kitchen-{attention-backend} --keep-fp8-* "
        "--first-last-layers-bf16 --num-layers-at-* --reuse-grad-buf-for-mxfp8-param-ag --offload-modules= "
        "--min-offloaded-tensor-size= --fine-grained-offloading-* --delay-offload-* --delta-offload-* "
        "--activation-offload-* --cpu-offloading-retain-pinned-cpu-buffers --moe-* --overlap-moe-* --topk= "
        "--expert-interval= --create-moe-param-group --use-tutel --enable-expert-* --overlap-dispatch-* "
        "--delay-wgrad-compute --ep-overlap-* --num-experts-switch= --use-grouped-gemm-for-shared-expert "
        "--high-priority-a2a-comm-stream --rotary-* --rope-* --use-rope-scaling --no-rope-freq= --mrope-* --yarn-* "
        "--mscale{,-all-dim} --relative-attention-* --q-lora-rank= --kv-lora-rank= --qk-head-dim= "
        "--qk-pos-emb-head-dim= --v-head-dim= --mla-* --cache-mla-latents --mtp-* --mhc-* --mamba-* --dsa-* --gdp-* "
        "--linear-{conv-kernel-dim,key-head-dim,num-key-heads,num-value-heads,value-head-dim} --qk-clip-{alpha,"
        "threshold} --window-attn-* --glu-linear-offset= --activation-func-* --use-fused-weighted-squared-relu "
        "--fused-residual-rmsnorm --apply-wd-to-qk-layernorm --retro-{attention-gate,cyclic-train-iters,"
        "encoder-attention-dropout,encoder-hidden-dropout,encoder-layers,no-verify-neighbor-count,num-neighbors,"
        "num-retrieved-chunks,project-dir,return-doc-ids,workdir} --cp-comm-type= "
        "--hierarchical-context-parallel-sizes= --max-seqlen-per-dp-cp-rank= --ds-sequence-parallel-{fpdt-chunk-size,"
        "fpdt-offloading} --fsdp-* --megatron-fsdp-* --torch-fsdp2-* --strict-fsdp-* "
        "--data-parallel-sharding-strategy= --outer-dp-* --enable-full-sharding-in-hsdp "
        "--suggested-communication-unit-size= --init-model-with-meta-device --gtp-* --legacy-tokenizer "
        "--trust-remote-code --tokenizer-hf-* --tokenizer-sentencepiece-* --tiktoken-* --tokenizer-special-tokens= "
        "--null-tokenizer-* --use-gigatoken --allow-ambiguous-pad-tokens --chat-template= --validation-set-names= "
        "--fim-{eod-token,fragment-rate,middle-token,no-prefix,pad-token,prefix-token,rate,split-sample,spm-rate,"
        "suffix-token} --sft-* --sgd-momentum= --lion-* --rl-* --grpo-* --langrl-* --refit-method= --kd-* "
        "--num-layers-teacher= --num-experts-teacher= --hidden-size-teacher= --num-attention-heads-teacher=",
        "a setting of a feature that is not used",
    ),
    *(
        ignored(names, "no other value is implemented", *values.split())
        for names, values in {
            "--main-grads-dtype= --main-params-dtype= --exp-avg-dtype= --exp-avg-sq-dtype=": "fp32",
            "--num-experts=": "1",
            "--mup-{attn-scale-power,embedding-mult,output-mult}": "1 1.0",
            "--sample-rate= --optimizer-offload-fraction=": "1 1.0",
            "--encoder-tensor-model-parallel-size= --encoder-pipeline-model-parallel-size=": "0",
            "--lr-warmup-init=": "0 0.0",
            "--mid-level-dataset-surplus=": "0.005",
            "--recompute-method=": "uniform",
            "--position-embedding-type=": "learned_absolute",
            "--normalization=": "LayerNorm",
            "--softmax-type=": "vanilla",
            "--mlp-type=": "standard",
            "--tokenizer-model-type=": "bpe bert-base-cased bert-base-uncased bert-large-cased bert-large-uncased",
            "--lr-wsd-decay-style=": "exponential",
            "--muon-scale-mode=": "spectral",
            "--muon-coefficient-type=": "simple",
            "--muon-tp-mode=": "duplicated distributed",
            "--muon-scalar-optimizer=": "adam",
            "--weight-decay-incr-style=": "constant",
            "--no-weight-decay-cond-type=": "apply_wd_to_qk_layernorm",
            "--exit-signal=": "SIGTERM 15",
            "--non-persistent-ckpt-type=": "local",
            "--remote-device=": "none",
        }.items()
    ),
    # Generation
    ignored(
        "--temperature= --top-k= --top-p= --out-seq-length= --sample-input-file= --sample-output-file= --num-samples="
        " --genfile= --greedy --recompute --inference-* --max-tokens-to-oom= --flash-decode --decode-only-cuda-graphs"
        " --chunked-prefill --enable-chunked-prefill --nccl-all-reduce-for-prefill --mlp-chunks-for-prefill= "
        "--use-legacy-static-engine --num-speculative-tokens= --use-same-sampling-seed-across-dp-ranks "
        "--batch-invariant-backend= --ds-inference",
        "for generation, not for pretraining",
    ),
)


def _betas(value: Any, _: Any) -> Fields:
    require(isinstance(value, list) and len(value) == 2, "is not a pair of numbers")
    return {f"optimizer.adam_beta{index}": _number(beta) for index, beta in enumerate(value, 1)}


DEEPSPEED_RULES = by_name(
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
        lambda value, _: {"optimizer.loss_scale": _number(value) or None},
    ),
    translated(
        "fp16.initial_scale_power",
        "read as --initial-loss-scale, as a power of 2",
        lambda power, _: {"optimizer.initial_loss_scale": 2.0 ** _number(power, int)},
    ),
    numeric("fp16.loss_scale_window", "optimizer.loss_scale_window"),
    numeric("fp16.hysteresis", "optimizer.hysteresis"),
    numeric("fp16.min_loss_scale", "optimizer.min_loss_scale"),
    translated(
        "communication_data_type",
        "bf16 is read as --grad-reduce-in-bf16",
        lambda kind, _: {} if kind == "fp32" else {"parallel.grad_reduce_in_bf16": True},
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
        lambda device, _: {"parallel.cpu_offload_optimizer": True} if device == "cpu" else {},
        "cpu",
        "none",
    ),
    numeric("zero_optimization.reduce_bucket_size", "parallel.ddp_bucket_size"),
    ignored(
        "zero_optimization.overlap_comm zero_optimization.allgather_partitions zero_optimization.reduce_scatter "
        "zero_optimization.contiguous_gradients zero_optimization.allgather_bucket_size "
        "zero_optimization.round_robin_gradients zero_optimization.load_from_fp32_weights "
        "zero_optimization.elastic_checkpoint zero_optimization.stage3_* zero_optimization.sub_group_size "
        "zero_optimization.offload_optimizer.pin_memory zero_optimization.cpu_offload_use_pin_memory fp32_allreduce "
        "prescale_gradients activation_checkpointing.contiguous_memory_optimization "
        "activation_checkpointing.number_checkpoints activation_checkpointing.synchronize_checkpoint_boundary "
        "activation_checkpointing.profile",
        ONE_IMPLEMENTATION,
    ),
    refused(
        "zero_optimization.offload_param zero_optimization.cpu_offload_params",
        "--tensor-model-parallel-size splits the weights, --cpu-offload-optimizer moves the optimizer to the host",
    ),
    read_as("activation_checkpointing.partition_activations", "parallel.partition_activations", True),
    read_as("activation_checkpointing.cpu_checkpointing", "parallel.checkpoint_in_cpu", True),
    # Optimizer and schedule
    ignored("zero_allow_untested_optimizer zero_force_ds_cpu_optimizer", ADAMW),
    ignored("optimizer.params.max_grad_norm", "ignored, as in DeepSpeed: `gradient_clipping` sets the limit"),
    ignored("optimizer.type", "both select AdamW", "Adam", "AdamW"),
    numeric("optimizer.params.lr", "optimizer.lr"),
    translated("optimizer.params.betas", "read as --adam-beta1 and --adam-beta2", _betas),
    numeric("optimizer.params.eps", "optimizer.adam_eps"),
    numeric("optimizer.params.weight_decay", "optimizer.weight_decay"),
    ignored(
        "optimizer.params.adam_w_mode optimizer.params.bias_correction optimizer.params.torch_adam",
        ADAMW,
        True,
    ),
    refused("scheduler", "give --lr-decay-style, --lr-decay-iters, --lr-warmup-iters and --min-lr"),
    refused("sparse_gradients sparse_attention", "gradients and attention are always dense; take it out"),
    refused(
        "progressive_layer_drop curriculum_learning data_efficiency compression_training quantize_training "
        "eigenvalue elasticity autotuning pipeline",
        "not implemented; take it out",
    ),
)
# In DeepSpeed these keys are true by default, so `false` in a file must not be skipped.
DEFAULT_TRUE_KEYS = ("optimizer.params.adam_w_mode", "optimizer.params.bias_correction")


class Applied(NamedTuple):
    """The result of `apply_rules`.

    values: {field: value} that the rules set.
    set_by: {field: the flag or key that set it}.
    notes: lines about translated and ignored names.
    problems: error messages.
    """

    values: Fields
    set_by: dict[str, str]
    notes: list[str]
    problems: list[str]


def apply_rules(
    rules: Mapping[str, CompatRule], read: Mapping[str, Any], given: Mapping[str, Any], *, given_wins: bool = False
) -> Applied:
    """Apply `rules` to `read`, {name: value}. Each name must have a rule. Rules with the same text share a line.

    given: {"section.field": value} of the project's own flags.
    given_wins: whether `given` wins if a rule has a different value for a field. If False, the difference
        is an error.
    """
    applied = Applied({}, {}, [], [])
    names_by_text, refusals = (
        collections.defaultdict[str, list[str]](list),
        collections.defaultdict[str, list[str]](list),
    )
    for name, value in read.items():
        rule = find_rule(rules, name)
        assert rule is not None, name
        if rule.unless in read:
            continue
        spelled = name if value is None else f"{name} {_format_value(value)}"
        text = rule.text if rule.status == "translated" else f"ignored: {rule.text}"
        if rule.status == "refused":
            refusals[rule.text].append(spelled)
            continue
        try:
            require(not rule.accepts or value in rule.accepts, f"is not supported, only {rule.allowed}: {rule.text}")
            for key, value_of_rule in rule.sets(value, given).items():
                current = given.get(key, applied.values.get(key, value_of_rule))
                if key in given and current != value_of_rule and (given_wins or current in rule.explicit_values):
                    text = f"ignored: {flag_name(key)} {current} is given"
                    continue
                require(
                    current == value_of_rule, f"contradicts {applied.set_by.get(key) or f'{flag_name(key)} {current}'}"
                )
                applied.values[key], applied.set_by[key] = value_of_rule, name
        except (ValueError, OverflowError) as error:
            applied.problems.append(f"{spelled} {error}")
        else:
            names_by_text[text].append(spelled)
    applied.notes.extend(f"{', '.join(names)}: {text}" for text, names in names_by_text.items())
    for text, names in refusals.items():
        applied.problems.append(f"{', '.join(names)} {'are' if len(names) > 1 else 'is'} not supported: {text}")
    return applied


def read_deepspeed_config(path: str, given: Mapping[str, Any]) -> Applied:
    """Read a DeepSpeed file. `set_by` of the result names the file and the key.

    The values `false`, `null`, `"auto"` and `{}` and sections with `"enabled": false` are skipped. Raises
    FileNotFoundError, or ValueError with all errors of the file in one line.

    given: {"section.field": value} from the command line, which overrides the file.
    """
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
        require(isinstance(content, dict), "it is not a JSON object")
        if content.get("zero_optimization") is True:
            content["zero_optimization"] = {"stage": 1}  # DeepSpeed's files of early 2020 have `true`.
        read = dict(_flatten_keys(content))
        unknown = sorted(key for key in read if find_rule(DEEPSPEED_RULES, key) is None)
        known = {key: value for key, value in read.items() if key not in unknown}
        values, set_by, notes, problems = apply_rules(DEEPSPEED_RULES, known, given, given_wins=True)
        require(not problems, "; ".join(problems))
    except OSError as error:
        raise FileNotFoundError(f"--deepspeed_config {path}: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"--deepspeed_config {path} is not JSON: {error}") from None
    except ValueError as error:
        raise ValueError(f"--deepspeed_config {path}: {error}") from None
    if "train.global_batch_size" in {*values, *given}:
        values.pop("train.gradient_accumulation_steps", None)
    notes = [f"{path}: {note}" for note in notes]
    if unknown:
        notes.append(f"WARNING: {path}: {', '.join(map(_format_value, unknown))}: unknown keys are ignored")
    return Applied(values, {key: f"{name} in {path}" for key, name in set_by.items()}, notes, [])


def _flatten_keys(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ("section.key", value) for each value of a DeepSpeed file. Values that mean "not set" are left out."""
    for name, value in section.items():
        key = prefix + name
        if key not in DEFAULT_TRUE_KEYS and (value is None or value is False or value == "auto" or value == {}):
            continue
        if not isinstance(value, dict):
            yield key, value
        elif value.get("enabled") is False or key.endswith(".offload_param") and value.get("device") == "none":
            continue
        elif key in DEEPSPEED_RULES:
            yield key, value
        else:
            yield from _flatten_keys(value, f"{key}.")


def _format_value(value: Any) -> str:
    """Format a value or key for a message, with at most 80 characters in one line."""
    text = value if isinstance(value, str) and value.isprintable() else json.dumps(value)
    return text if len(text) <= 80 else f"{text[:76]}...{text[-1]}"
