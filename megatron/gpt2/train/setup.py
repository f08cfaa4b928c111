"""Set-up that each rank does by itself, before the process group exists: the flags, the checkpoint's own shape, device
and precision, the tokenizer, and the text as tokens; and the check that all ranks decided alike.

Tokenising can take hours, so it must not happen inside the time limit of a collective. Every rank reads its own command
line, looks for a checkpoint in its own view of the file system and chooses the precision by its own device. A rank that
decided otherwise would train another model in silence, or wait for a collective that the others never call.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
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
from data_utils.corpora import find_corpora
from megatron.gpt2 import device as devices
from megatron.gpt2.checkpoint.folder import find_checkpoint, refuse_foreign
from megatron.gpt2.checkpoint.local import assemble
from megatron.gpt2.checkpoint.reader import Checkpoint
from megatron.gpt2.checkpoint.source import check_facts, decay_iters
from megatron.gpt2.config import Config, DataConfig, by_key, flag, require
from megatron.gpt2.config.arguments import Arguments, merge_checkpoint
from megatron.gpt2.dist.gathering import gather_texts
from megatron.gpt2.dist.hang import set_flight_recorder
from megatron.gpt2.dist.ranks import Ranks
from megatron.gpt2.hooks import Hook, load_hooks
from megatron.gpt2.monitor.incidents import Incidents, rank_name
from megatron.gpt2.monitor.reporting import resident_memory
from megatron.gpt2.train.continuation import computed_by, differences

Log = Callable[[str], None]


@dataclass(frozen=True)
class PreparedRun:
    """What every rank knows before the process group exists.

    config: with what the checkpoint decides, the vocabulary's size and the kind of tokenizer.
    source: the folder to load from; None to start from random weights.
    start: the facts of the checkpoint that is continued; empty if the run starts at iteration 0.
    hooks: the extensions that the flags ask for.
    keeps_freed: freed memory stays with the process, see `device.set_allocator`.
    resident: bytes of anonymous memory that the process had before any model.
    """

    arguments: Arguments
    config: Config
    ranks: Ranks
    device: torch.device
    dtype: torch.dtype
    backend: str
    tokenizer: Tokenizer
    splits: Splits
    source: str | None
    train_iters: int
    start: dict[str, Any]
    hooks: Sequence[Hook] = ()
    keeps_freed: bool = False
    resident: int = field(default_factory=lambda: resident_memory().get("resident", 0))

    @property
    def is_finished(self) -> bool:
        """Whether the checkpoint that would be continued is at the end of the run already."""
        return self.start.get("iteration", 0) >= self.train_iters

    @property
    def save_directory(self) -> Path:
        """The --save folder."""
        assert self.config.checkpoint.save is not None
        return Path(self.config.checkpoint.save)

    @cached_property
    def incidents(self) -> Incidents:
        """Where this rank notes what it sees, at the iteration from which the run starts."""
        kept = self.ranks.incidents or Incidents(self.save_directory, rank_name(self.ranks.rank))
        kept.iteration = self.start.get("iteration", 0)
        return kept

    @cached_property
    def batch_schedule(self) -> BatchSchedule:
        """The samples of each step over all ranks."""
        return self.config.batch_schedule(self.ranks.world_size, self.start.get("consumed_samples", 0))

    @property
    def global_batch_size(self) -> int:
        """Samples of a step over all ranks, when the batch does not grow any more."""
        return self.batch_schedule.final

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a rank in a step, after the batch has stopped growing."""
        return self.config.micro_batches(self.ranks.world_size, self.start.get("consumed_samples", 0))

    @property
    def batch_growth(self) -> str:
        """The flag by which the batch grows, or that it does not."""
        return self.config.train.growth if len(self.batch_schedule.stages) > 1 else "not at all"

    @property
    def decay_iters(self) -> int:
        """The iterations of the learning rate's schedule, each of `global_batch_size` samples, that the run takes."""
        return -(-self.batch_schedule.after_steps(self.train_iters) // self.global_batch_size)

    def facts(self) -> dict[str, Any]:
        """What the numbers of the run depend on, without its layout, weights and state: facts of a checkpoint, as
        JSON."""
        return {
            "config": self.config.as_dict(),
            "train_iters": self.train_iters,
            "decay_iters": self.decay_iters,
            "global_batch_size": self.global_batch_size,
            "batch_growth": self.batch_growth,
            "data_fingerprint": self.splits.fingerprint,
            "precision": str(self.dtype).removeprefix("torch."),
            "computed_by": computed_by(self.device),
        }

    @property
    def timeout(self) -> timedelta:
        """How long a collective may take (--distributed-timeout-minutes)."""
        return timedelta(minutes=self.config.parallel.distributed_timeout_minutes)


def prepare_run(arguments: Arguments, ranks: Ranks, log: Log) -> PreparedRun:
    """Everything up to the tokenised data, without a process group. log: takes each line of what was decided and why.
    Raises ValueError or OSError, in one line, for bad input."""
    arguments, checkpoint, source = _source(arguments, ranks, log)
    if checkpoint is not None:
        check_facts(checkpoint)
        arguments = merge_checkpoint(arguments, checkpoint.facts["config"], decay_iters(checkpoint.facts))
    for note in arguments.notes:
        log(note)
    config = arguments.config
    hooks = load_hooks(config)
    device, dtype, backend, keeps_freed = _hardware(config, ranks, hooks, log)
    start = checkpoint.facts if checkpoint is not None and not config.checkpoint.finetune else {}
    iteration, consumed_samples = start.get("iteration", 0), start.get("consumed_samples", 0)
    schedule = config.batch_schedule(ranks.world_size, consumed_samples)  # raises if it does not fit the ranks

    (train, valid, test), text_key = find_corpora(  # files in the place of the names of corpora
        {f"--{name}-data": getattr(config.data, f"{name}_data") for name in ("train", "valid", "test")},
        config.data.text_key,
    )
    data = dataclasses.replace(config.data, train_data=train, valid_data=valid, test_data=test, text_key=text_key)
    tokenizer = _tokenizer(data, arguments, checkpoint, log)
    require(
        config.model.vocab_size in (None, tokenizer.vocab_size),
        f"--vocab-size {config.model.vocab_size} is not the {tokenizer.vocab_size} of the tokenizer {tokenizer.kind}: "
        "leave the flag out",
    )
    splits = _splits(data, tokenizer, evaluates=config.train.eval_iters > 0)
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, vocab_size=tokenizer.vocab_size),
        data=dataclasses.replace(config.data, tokenizer_type=tokenizer.kind),
    )
    train_iters = config.train.iterations(
        schedule=schedule,
        seq_length=data.seq_length,
        samples_per_epoch=len(splits.train),
        iteration=iteration,
        consumed_samples=consumed_samples,
    )
    if iteration >= train_iters and source is not None:
        # Before a run is called finished, every byte of what it left is checked.
        checkpoint = find_checkpoint(source, log=log, verify=not config.checkpoint.no_verify)
        assert checkpoint is not None
        start = checkpoint.facts
    prepared = PreparedRun(
        arguments=arguments,
        config=config,
        ranks=ranks,
        device=device,
        dtype=dtype,
        backend=backend,
        tokenizer=tokenizer,
        splits=splits,
        source=source,
        train_iters=train_iters,
        start=dict(start),
        hooks=hooks,
        keeps_freed=keeps_freed,
    )
    for line in differences(start, prepared.facts()):
        log(line)
    return prepared


def _hardware(
    config: Config, ranks: Ranks, hooks: Sequence[Hook], log: Log
) -> tuple[torch.device, torch.dtype, str, bool]:
    """Device, dtype, backend, and whether the allocator keeps what is freed; each choice with its reason to `log`."""
    # before anything starts CUDA
    devices.set_cuda_variables(config.parallel.model_parallel_size, deterministic=config.is_deterministic)
    device, why_device = devices.choose_device(config.train.device, ranks)
    for hook in hooks:
        hook.check(config, device)
    require(
        not config.is_deterministic or device.type != "cuda" or config.train.attention_backend != "fused",
        f"--{'deterministic' if config.parallel.exact_layouts is None else 'exact-layouts'} and --attention-backend "
        "fused: the backward of cuDNN's attention has no fixed order; give --attention-backend flash, or leave it out",
    )
    if config.train.compile:
        devices.require_compiler(device)
    dtype, why_dtype = devices.choose_precision(config.train.precision, device)
    backend, why_backend = devices.choose_backend(config.parallel.distributed_backend, device)
    if backend == "nccl" and ranks.world_size > 1:
        set_flight_recorder(str(config.checkpoint.save))
    allocator = devices.set_allocator(device)
    for reason in [why_device, why_dtype, allocator] + ([why_backend] if ranks.world_size > 1 else []):
        if reason:
            log(reason)
    return device, dtype, backend, bool(allocator)


def _splits(data: DataConfig, tokenizer: Tokenizer, *, evaluates: bool) -> Splits:
    return build_splits(
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
        tokenizer=tokenizer,
        seq_length=data.seq_length,
        cache_path=data.data_cache_path,
        need_valid=evaluates,
        need_test=evaluates,
        log=print,
    )


def _source(arguments: Arguments, ranks: Ranks, log: Log) -> tuple[Arguments, Checkpoint | None, str | None]:
    """The arguments, which may now continue --save instead of --load; the checkpoint that the run starts from, opened
    without reading its tensors; and the folder that holds it."""
    where = arguments.checkpoint
    save, source = str(where.save), where.load or str(where.save)
    if where.load is not None:
        heads = "model.num_attention_heads"
        refuse_foreign(where.load, num_attention_heads=arguments.values[heads] if heads in arguments.given else None)
    checkpoint = _open(source)
    begun, holder = None, save  # what the same command has saved, if it has run before
    if source != save:
        begun = _open(save)
    elif not where.finetune:
        begun = checkpoint
    if where.local_checkpoint_dir is not None:
        newest = begun.iteration if begun is not None else 0
        if near := assemble(save, where.local_checkpoint_dir, newest, ranks, log):
            begun, holder = _open(near), str(near)
    if (
        begun is not None
        and (holder, source) != (save, save)
        and (where.finetune or checkpoint is None or begun.iteration > checkpoint.iteration)
    ):
        values = {**arguments.values, "checkpoint.finetune": False}
        if source != save:
            log(
                f"--save {save} holds iteration {begun.iteration} of this run already, which is continued; "
                f"another --save starts from {source} again"
            )
            values["checkpoint.load"] = save
        return dataclasses.replace(arguments, values=values), begun, holder
    if checkpoint is None and where.load is not None:
        require(
            source == save and not where.finetune and not where.exit_on_missing_checkpoint,
            f"--load {source} holds no checkpoint: give the --save folder of another run, or leave it out to start "
            "from random weights",
        )
        log(f"WARNING: --load {source} holds no checkpoint: the run starts from random weights")
    return arguments, checkpoint, source if checkpoint is not None else None


def _open(folder: str | Path) -> Checkpoint | None:
    """The checkpoint to load, without the warnings, which come once more when it is loaded."""
    return find_checkpoint(folder, log=lambda warning: None, verify=False)


def _tokenizer(data: DataConfig, arguments: Arguments, checkpoint: Checkpoint | None, log: Log) -> Tokenizer:
    """The checkpoint's own tokenizer, unless flags name files; else the one that the flags name. data: with files
    instead of the names of corpora."""
    where, facts = arguments.checkpoint, checkpoint.facts if checkpoint is not None else {}
    files_given = any(f"data.{name}" in arguments.given for name in ("vocab_file", "merge_file", "tokenizer_model"))
    known, size, named = facts.get("tokenizer"), facts.get("vocab_size", 0), checkpoint.path if checkpoint else ""
    require(
        checkpoint is None or bool(known) or files_given or "data.tokenizer_type" in arguments.given,
        f"{named} came without a tokenizer: give --vocab-file and --merge-file, --tokenizer-model, or --tokenizer-type "
        f"of one that needs no files, of its {size:,} tokens",
    )
    if known and not files_given:
        # The folder is also that of a run whose local checkpoint is loaded.
        tokenizer = load_tokenizer(Path(str(where.load or where.save)) / "tokenizer")
    else:
        kind, model_file = data.tokenizer_type or default_tokenizer_kind(), data.tokenizer_model
        if kind == "bytes" and data.tokenizer_type is None:
            log("tokenizer: bytes, since neither tiktoken nor tokenizers is installed (pip install tiktoken)")
        if kind == "SentencePieceTokenizer":
            model_file = model_file or f"{where.save}/sentencepiece.model"
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
            f"{flag(name)}: the tokenizer {tokenizer.kind} has no end of document; leave the flag out",
        )
    if known:
        require(
            tokenizer.fingerprint == known["fingerprint"],
            f"the tokenizer's files are not those of {named}: leave --vocab-file, --merge-file and --tokenizer-model "
            "out to take the checkpoint's own",
        )
    else:
        require(
            size in (0, tokenizer.vocab_size),
            f"{named} has {size:,} tokens and the tokenizer {tokenizer.vocab_size:,}: give the files that it was "
            "trained with",
        )
    return tokenizer


def what_decides(prepared: PreparedRun, parallel: mpu.ParallelState, *, sharded: bool) -> dict[str, Any]:
    """The facts of a run with its layout. sharded: whether the optimizer is."""
    layout = {
        "model_parallel_size": parallel.tensor_model_parallel_size,
        "pipeline_parallel_size": parallel.pipeline_model_parallel_size,
        "data_parallel_size": parallel.data_parallel_size,
        "optimizer_is_sharded": sharded,
    }
    return {"layout": layout, **prepared.facts()}


# Flags that may differ: paths, which machines may name in their own way, and what concerns one rank alone. What is in
# the files is compared by the fingerprints of data and tokenizer.
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


def check_ranks_agree(prepared: PreparedRun) -> None:
    """ValueError, on every rank, that names the first decision that differs. A collective over all ranks."""
    own = decisions(prepared)
    everyone = [json.loads(text) for text in gather_texts(json.dumps([own, prepared.splits.fingerprint]))]
    (first, data), *_ = everyone
    for name, value in own.items():
        for rank, (theirs, _) in enumerate(everyone):
            require(
                theirs.get(name) == first.get(name),
                f"rank {rank} has another {name} than rank 0 (on rank {prepared.ranks.rank} it is {value}): start "
                "every rank with the same command line and environment, and let all machines see the same files",
            )
    require(
        all(theirs == data for _, theirs in everyone),
        "the ranks read different training data: every machine needs the same files",
    )


def decisions(prepared: PreparedRun) -> dict[str, str]:
    """What must be the same on all ranks, by the words that an error has for it."""
    values = by_key(prepared.config.as_dict())
    return {
        **{flag(key): repr(value) for key, value in values.items() if key not in MAY_DIFFER},
        "precision": str(prepared.dtype),
        "kind of device": prepared.device.type,
        "backend": prepared.backend,
        "checkpoint to start from": f"iteration {prepared.start.get('iteration', 0)}, "
        f"{'none' if prepared.source is None else 'found'}",
        "length in iterations": str(prepared.train_iters),
        "tokenizer": prepared.tokenizer.fingerprint,
        "version of torch": torch.__version__,
        **{name: text for hook in prepared.hooks for name, text in hook.decisions(prepared).items()},
    }
