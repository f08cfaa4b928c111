"""The set-up of a rank before the process group exists: flags, checkpoint, device, precision, tokenizer, and tokenised
text. `check_settings_match` later compares the choices of all ranks.

The set-up needs no process group, because tokenising can take longer than the time-out of a collective. Each rank reads
its command line, looks for a checkpoint in its file system and chooses the precision for its device. A rank with a
different choice would train a different model, or wait for a collective that other ranks never call.
"""

import dataclasses
import json
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

import mpu
from data_utils import (
    BatchSchedule,
    Splits,
    Tokenizer,
    build_splits,
    build_tokenizer,
    default_tokenizer_kind,
    ensure_sentencepiece_model,
    load_tokenizer,
)
from data_utils.command_line import Log, require
from data_utils.corpora import find_corpora
from megatron.gpt2 import device as devices
from megatron.gpt2.checkpoint.interface import check_metadata, saved_decay_iters
from megatron.gpt2.checkpoint.local import assemble_local_checkpoint
from megatron.gpt2.checkpoint.reader import NativeCheckpoint
from megatron.gpt2.checkpoint.save_folder import find_checkpoint, require_native_format
from megatron.gpt2.config import Config, DataConfig, flag_name, flatten_sections
from megatron.gpt2.config.arguments import Arguments, merge_checkpoint
from megatron.gpt2.dist.gathering import gather_strings
from megatron.gpt2.dist.hang import set_flight_recorder
from megatron.gpt2.dist.ranks import RankInfo, format_ranks
from megatron.gpt2.hooks import Hook, Hooks, Numerics, load_hooks
from megatron.gpt2.monitor.incidents import IncidentLog, rank_file_name
from megatron.gpt2.monitor.log_lines import resident_memory
from megatron.gpt2.train.resume_equivalence import compute_environment


@dataclass(frozen=True)
class RunContext:
    """The settings and data of a rank, which are known before the process group exists.

    arguments: the command line, merged with the checkpoint.
    config: the flags, with the values that the checkpoint and the tokenizer determine.
    source: the folder to load from, or None to start from random weights.
    train_iters: the length of the run, also if the flags give it in samples, tokens or epochs.
    resume_metadata: the metadata of the checkpoint that is continued; empty if the run starts at iteration 0.
    hooks: the extensions that the flags choose.
    keeps_freed_memory: whether freed memory stays with the process (`device.set_allocator`).
    resident: bytes of anonymous memory of the process before the model is built.
    """

    arguments: Arguments
    config: Config
    rank_info: RankInfo
    device: torch.device
    dtype: torch.dtype
    backend: str
    tokenizer: Tokenizer
    splits: Splits
    source: str | None
    batch_schedule: BatchSchedule
    train_iters: int
    resume_metadata: dict[str, Any]
    hooks: Hooks = field(default_factory=Hooks)
    keeps_freed_memory: bool = False
    resident: int = field(default_factory=lambda: resident_memory().get("resident", 0))

    @property
    def is_finished(self) -> bool:
        """Whether the checkpoint is already at the last iteration of the run."""
        return self.resume_metadata.get("iteration", 0) >= self.train_iters

    @property
    def save_directory(self) -> Path:
        """The --save folder."""
        assert self.config.checkpoint.save is not None
        return Path(self.config.checkpoint.save)

    @cached_property
    def incidents(self) -> IncidentLog:
        """The incident log of this rank. The default iteration of its lines is that at which the run starts."""
        incident_log = self.rank_info.incidents or IncidentLog(self.save_directory, rank_file_name(self.rank_info.rank))
        incident_log.iteration = self.resume_metadata.get("iteration", 0)
        return incident_log

    @cached_property
    def numerics(self) -> Numerics:
        """The parts of the run that a hook may replace, see `Hook.numerics`."""
        return self.hooks.first_result(Hook.numerics, self.device) or Numerics()

    @property
    def global_batch_size(self) -> int:
        """The final global batch size, in samples."""
        return self.batch_schedule.final

    @property
    def num_microbatches(self) -> int:
        """The number of micro-batches of each rank in a step with the final global batch size."""
        consumed_samples = self.resume_metadata.get("consumed_samples", 0)
        return self.config.num_microbatches(self.rank_info.world_size, consumed_samples)

    @property
    def batch_growth(self) -> str:
        """The flag that makes the batch grow, or "not at all"."""
        return self.config.train.growth_flag if len(self.batch_schedule.milestones) > 1 else "not at all"

    @property
    def decay_iters(self) -> int:
        """The length of the learning rate schedule, in iterations of `global_batch_size` samples."""
        return -(-self.batch_schedule.samples_after_steps(self.train_iters) // self.global_batch_size)

    def metadata(self) -> dict[str, Any]:
        """Return the settings that affect the results of the run, without its layout. A checkpoint stores these
        settings as JSON."""
        return {
            "config": self.config.as_dict(),
            "train_iters": self.train_iters,
            "decay_iters": self.decay_iters,
            "global_batch_size": self.global_batch_size,
            "batch_growth": self.batch_growth,
            "data_fingerprint": self.splits.fingerprint,
            "precision": str(self.dtype).removeprefix("torch."),
            "computed_by": compute_environment(self.device),
        }

    @property
    def timeout(self) -> timedelta:
        """The time-out of collectives (--distributed-timeout-minutes)."""
        return timedelta(minutes=self.config.parallel.distributed_timeout_minutes)


def build_context(arguments: Arguments, rank_info: RankInfo, log: Log) -> RunContext:
    """Build the context of a run, from the command line to the tokenised data, without a process group. Raises
    ValueError or OSError with a one-line message for bad input.

    log: gets a line for each choice, with its reason. The rank that tokenises prints further lines itself.
    """
    arguments, checkpoint, source = _resolve_checkpoint(arguments, rank_info, log)
    if checkpoint is not None:
        check_metadata(checkpoint)
        arguments = merge_checkpoint(arguments, checkpoint.metadata["config"], saved_decay_iters(checkpoint.metadata))
    for note in arguments.notes:
        log(note)
    config = arguments.config
    hooks = load_hooks(config)
    device, dtype, backend, keeps_freed_memory = _choose_hardware(config, rank_info, hooks, log)
    resume_metadata = checkpoint.metadata if checkpoint is not None and not config.checkpoint.finetune else {}
    iteration, consumed_samples = resume_metadata.get("iteration", 0), resume_metadata.get("consumed_samples", 0)
    # Before the text is tokenised, raise ValueError if the batch size does not fit the ranks.
    batch_schedule = arguments.build_batch_schedule(rank_info.world_size, consumed_samples)

    tokenizer, splits = _prepare_data(arguments, checkpoint, log)
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, vocab_size=tokenizer.vocab_size),
        data=dataclasses.replace(config.data, tokenizer_type=tokenizer.kind),
    )
    train_iters = config.train.iterations(
        schedule=batch_schedule,
        seq_length=config.data.seq_length,
        samples_per_epoch=len(splits.train),
        iteration=iteration,
        consumed_samples=consumed_samples,
    )
    if iteration >= train_iters and source is not None:
        # Check the hashes of the last checkpoint before the run is reported as finished.
        checkpoint = find_checkpoint(source, log=log, verify=not config.checkpoint.no_verify)
        assert checkpoint is not None
        resume_metadata = checkpoint.metadata
    context = RunContext(
        arguments=arguments,
        config=config,
        rank_info=rank_info,
        device=device,
        dtype=dtype,
        backend=backend,
        tokenizer=tokenizer,
        splits=splits,
        source=source,
        batch_schedule=batch_schedule,
        train_iters=train_iters,
        resume_metadata=dict(resume_metadata),
        hooks=hooks,
        keeps_freed_memory=keeps_freed_memory,
    )
    _warn_if_decayed(context, log)
    return context


def _prepare_data(arguments: Arguments, checkpoint: NativeCheckpoint | None, log: Log) -> tuple[Tokenizer, Splits]:
    """Return the tokenizer of the run and the tokenised text."""
    config = arguments.config
    (train, valid, test), text_key = find_corpora(
        {f"--{name}-data": getattr(config.data, f"{name}_data") for name in ("train", "valid", "test")},
        config.data.text_key,
    )
    data = dataclasses.replace(config.data, train_data=train, valid_data=valid, test_data=test, text_key=text_key)
    tokenizer = _build_tokenizer(data, arguments, checkpoint, log)
    require(
        config.model.vocab_size in (None, tokenizer.vocab_size),
        f"--vocab-size {config.model.vocab_size} is not the {tokenizer.vocab_size} of the tokenizer {tokenizer.kind}: "
        "leave the flag out",
    )
    evaluates = config.train.eval_iters > 0
    splits = build_splits(
        train_data=data.train_data,
        valid_data=data.valid_data,
        test_data=data.test_data,
        data_path=data.data_path,
        valid_data_path=data.valid_data_path,
        test_data_path=data.test_data_path,
        data_order=data.data_order,
        split=data.split,
        text_key=data.text_key,
        max_bad_fraction=data.max_bad_fraction,
        seq_length=data.seq_length,
        tokenizer=tokenizer,
        cache_path=data.data_cache_path,
        need_valid=evaluates,
        need_test=evaluates,
        log=print,
    )
    return tokenizer, splits


def _warn_if_decayed(context: RunContext, log: Log) -> None:
    """Log a warning if a run continues after the end of its learning rate schedule."""
    optimizer, metadata = context.config.optimizer, context.resume_metadata
    decay = optimizer.warmup_and_decay(context.decay_iters, context.global_batch_size)[1]
    if (
        metadata
        and not context.is_finished
        and optimizer.lr_decay_style != "constant"
        and not context.arguments.given & {"optimizer.lr_decay_iters", "optimizer.lr_decay_samples"}
        and context.batch_schedule.samples_after_steps(metadata["iteration"]) >= decay * context.global_batch_size
    ):
        log(
            f"WARNING: the learning rate stays at --min-lr {optimizer.min_lr:g}: the checkpoint's schedule ends at "
            f"iteration {decay:g}; --override-opt-param-scheduler with --lr and --lr-decay-iters gives a new one"
        )


def _choose_hardware(
    config: Config, rank_info: RankInfo, hooks: Hooks, log: Log
) -> tuple[torch.device, torch.dtype, str, bool]:
    """Choose device, dtype, backend, and whether the allocator keeps freed memory. Log each choice with its reason."""
    # Set the variables first, because CUDA reads them when it is initialised.
    devices.set_cuda_variables(config.parallel.tensor_model_parallel_size, deterministic=config.is_deterministic)
    device, why_device = devices.choose_device(config.train.device, rank_info)
    hooks.call(Hook.validate, config, device)
    require(
        not config.is_deterministic or device.type != "cuda" or config.train.attention_backend != "fused",
        f"--{'deterministic' if config.parallel.exact_layouts is None else 'exact-layouts'} and --attention-backend "
        "fused: the backward of cuDNN's attention has no fixed order; give --attention-backend flash, or leave it out",
    )
    if config.train.compile:
        devices.require_compiler(device)
    dtype, why_dtype = devices.choose_precision(config.train.precision, device)
    backend, why_backend = devices.choose_backend(config.parallel.distributed_backend, device)
    if backend == "nccl" and rank_info.world_size > 1:
        set_flight_recorder(str(config.checkpoint.save))
    allocator = devices.set_allocator(device)
    segments = devices.check_expandable_segments(device)
    for reason in [why_device, why_dtype, allocator, segments] + ([why_backend] if rank_info.world_size > 1 else []):
        if reason:
            log(reason)
    return device, dtype, backend, bool(allocator)


def _resolve_checkpoint(
    arguments: Arguments, rank_info: RankInfo, log: Log
) -> tuple[Arguments, NativeCheckpoint | None, str | None]:
    """Find the checkpoint that the run starts from, in --load, --save or --local-checkpoint-dir. Return the arguments,
    the open checkpoint, and its folder. The returned arguments continue --save instead of --load if an earlier start of
    this command has saved there."""
    options = arguments.checkpoint
    save, source = str(options.save), options.load or str(options.save)
    if options.load is not None:
        heads = "model.num_attention_heads"
        require_native_format(
            options.load, num_attention_heads=arguments.values[heads] if heads in arguments.given else None
        )
    checkpoint = open_saved_checkpoint(source)
    # Find the checkpoint that an earlier start of this command saved, and its folder.
    own_checkpoint, own_folder = None, save
    if source != save:
        own_checkpoint = open_saved_checkpoint(save)
    elif not options.finetune:
        own_checkpoint = checkpoint
    if options.local_checkpoint_dir is not None:
        newest = own_checkpoint.iteration if own_checkpoint is not None else 0
        if local_folder := assemble_local_checkpoint(save, options.local_checkpoint_dir, newest, rank_info, log):
            own_checkpoint, own_folder = open_saved_checkpoint(local_folder), str(local_folder)
    if own_checkpoint is not None and own_checkpoint is not checkpoint:
        is_newer = checkpoint is None or own_checkpoint.iteration > checkpoint.iteration
        if is_newer or options.finetune:
            values = {**arguments.values, "checkpoint.finetune": False}
            if source != save:
                log(
                    f"--save {save} already holds iteration {own_checkpoint.iteration} of this run, which is "
                    f"continued; a different --save starts from {source} again"
                )
                values["checkpoint.load"] = save
            return dataclasses.replace(arguments, values=values), own_checkpoint, own_folder
    if checkpoint is None and options.load is not None:
        require(
            source == save and not options.finetune and not options.exit_on_missing_checkpoint,
            f"--load {source} holds no checkpoint: give the --save folder of another run, or leave it out to start "
            "from random weights",
        )
        log(f"WARNING: --load {source} holds no checkpoint: the run starts from random weights")
    return arguments, checkpoint, source if checkpoint is not None else None


def open_saved_checkpoint(folder: str | Path) -> NativeCheckpoint | None:
    """Return the checkpoint that `find_checkpoint` finds in `folder`, or None. Warnings are not printed, because
    `load_checkpoint` prints them later."""
    return find_checkpoint(folder, log=lambda warning: None, verify=False)


def _build_tokenizer(
    data: DataConfig, arguments: Arguments, checkpoint: NativeCheckpoint | None, log: Log
) -> Tokenizer:
    """Build the tokenizer from the files or the type that the flags name. If the flags name no files and the checkpoint
    has a tokenizer, load this tokenizer.

    data: the flags of the data, with file paths instead of corpus names.
    """
    options, metadata = arguments.checkpoint, checkpoint.metadata if checkpoint is not None else {}
    files_given = any(f"data.{name}" in arguments.given for name in ("vocab_file", "merge_file", "tokenizer_model"))
    saved_tokenizer, vocab_size = metadata.get("tokenizer"), metadata.get("vocab_size", 0)
    path = checkpoint.path if checkpoint is not None else ""
    require(
        checkpoint is None or bool(saved_tokenizer) or files_given or "data.tokenizer_type" in arguments.given,
        f"{path} has no tokenizer: give --vocab-file and --merge-file, --tokenizer-model, or the --tokenizer-type of "
        f"a tokenizer without files; it must have {vocab_size:,} tokens",
    )
    if saved_tokenizer and not files_given:
        # If a local checkpoint is loaded, its tokenizer is also in the --save folder.
        tokenizer = load_tokenizer(Path(str(options.load or options.save)) / "tokenizer")
    else:
        kind, model_file = data.tokenizer_type or default_tokenizer_kind(), data.tokenizer_model
        if kind == "bytes" and data.tokenizer_type is None:
            log("tokenizer: bytes, because tiktoken is not installed (pip install tiktoken)")
        if kind == "SentencePieceTokenizer":
            model_file = model_file or f"{options.save}/sentencepiece.model"
            ensure_sentencepiece_model(
                model_file,
                train_data=data.train_data,
                text_key=data.text_key,
                max_bad_fraction=data.max_bad_fraction,
                vocab_size=data.tokenizer_vocab_size,
                log=print,
            )
        tokenizer = build_tokenizer(
            kind,
            vocab_file=data.vocab_file,
            merge_file=data.merge_file,
            cache_dir=data.cache_dir,
            model_file=model_file,
        )
    for name in ("eod_mask_loss", "reset_position_ids", "reset_attention_mask"):
        require(
            tokenizer.has_eod or not getattr(data, name),
            f"{flag_name(name)}: the tokenizer {tokenizer.kind} has no end of document; leave the flag out",
        )
    if saved_tokenizer:
        require(
            tokenizer.fingerprint == saved_tokenizer["fingerprint"],
            f"the tokenizer's files are not those of {path}: leave out --vocab-file, --merge-file and "
            "--tokenizer-model to use the checkpoint's tokenizer",
        )
    else:
        require(
            vocab_size in (0, tokenizer.vocab_size),
            f"{path} has {vocab_size:,} tokens and the tokenizer {tokenizer.vocab_size:,}: give the files that the "
            "model was trained with",
        )
    return tokenizer


def run_metadata(context: RunContext, parallel: mpu.ParallelState, *, sharded: bool) -> dict[str, Any]:
    """Return `RunContext.metadata` and the layout of the run.

    sharded: whether the optimizer is sharded.
    """
    layout = {
        "tensor_model_parallel_size": parallel.tensor_model_parallel_size,
        "pipeline_model_parallel_size": parallel.pipeline_model_parallel_size,
        "data_parallel_size": parallel.data_parallel_size,
        "optimizer_is_sharded": sharded,
    }
    return {"layout": layout, **context.metadata()}


# The flags that may differ between ranks: settings of a single rank, and flags of data and tokenizer, because
# fingerprints compare the contents of the files.
MAY_DIFFER = {
    "data.train_data",
    "data.valid_data",
    "data.test_data",
    "data.data_path",
    "data.valid_data_path",
    "data.test_data_path",
    "data.split",
    "data.text_key",
    "data.data_cache_path",
    "data.vocab_file",
    "data.merge_file",
    "data.tokenizer_model",
    "data.cache_dir",
    "data.num_workers",
    "train.device",
    "train.tensorboard_dir",
    "train.wandb_project",
    "train.wandb_entity",
    "train.wandb_exp_name",
    "train.wandb_save_dir",
    "checkpoint.save",
    "checkpoint.load",
    "checkpoint.local_checkpoint_dir",
}


def check_settings_match(context: RunContext, log: Log) -> None:
    """Raise ValueError on every rank if a setting differs between ranks. Log a warning if the source files of the
    program differ. Every rank must call this function."""
    settings = settings_equal_on_all_ranks(context)
    settings["fingerprint of the training data"] = context.splits.fingerprint
    settings["fingerprint of the validation and test files"] = context.splits.held_out_fingerprint
    program = devices.code_hash() if context.rank_info.world_size > 1 else ""
    by_rank = [json.loads(text) for text in gather_strings(json.dumps([settings, program]))]
    first, first_program = by_rank[0]
    for name, value in settings.items():
        for rank, (settings_of_rank, _) in enumerate(by_rank):
            require(
                settings_of_rank.get(name) == first.get(name),
                f"rank {rank} has a different {name} than rank 0 (on rank {context.rank_info.rank} it is {value}): "
                "start every rank with the same command line and environment, and let all machines see the same files",
            )
    if ranks := [rank for rank, (_, program_of_rank) in enumerate(by_rank) if program_of_rank != first_program]:
        hosts = context.rank_info.hosts
        log(
            f"WARNING: the source files of {format_ranks(ranks, hosts)} are not those of {format_ranks([0], hosts)}: "
            "install the same version on every machine"
        )


def settings_equal_on_all_ranks(context: RunContext) -> dict[str, str]:
    """Return {name for an error message: setting} of the settings that must be equal on all ranks."""
    values = flatten_sections(context.config.as_dict())
    settings = {
        **{flag_name(key): repr(value) for key, value in values.items() if key not in MAY_DIFFER},
        "precision": str(context.dtype),
        "kind of device": context.device.type,
        "backend": context.backend,
        "checkpoint to start from": f"iteration {context.resume_metadata.get('iteration', 0)}, "
        f"{'none' if context.source is None else 'found'}",
        "length in iterations": str(context.train_iters),
        "tokenizer": context.tokenizer.fingerprint,
        "version of torch": torch.__version__,
    }
    for others in context.hooks.call(Hook.settings_equal_on_all_ranks, context):
        settings |= others
    return settings
