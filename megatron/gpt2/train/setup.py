"""What each rank decides alone, before the ranks build the run together: the flags, the checkpoint's own shape, device and
precision, the tokenizer, and the text as tokens; and, as soon as the ranks have met, that all of them decided alike.

Tokenising can take hours, so it must not happen inside the time limit of a collective. Every rank reads its own command
line, looks for a checkpoint in its own view of the file system and chooses the precision by its own device. A rank that
decided otherwise would train another model in silence, or wait for a collective that the others never call.
"""

import dataclasses
import hashlib
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
from megatron.gpt2.dist.gathering import gather_over_ranks
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
    start: the facts of the checkpoint that is continued; empty where the run starts at iteration 0.
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
        """Micro-batches that each rank runs in a step of that size."""
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
    tokenizer = _tokenizer(dataclasses.replace(config, data=data), arguments, checkpoint, log)
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
    """The arguments, which may now continue --save in place of --load; the checkpoint that the run starts from, opened
    without reading its tensors; and the folder that holds it."""
    where = arguments.checkpoint
    assert where.save is not None
    if where.load is not None:
        heads = "model.num_attention_heads"
        refuse_foreign(where.load, num_attention_heads=arguments.values[heads] if heads in arguments.given else None)
    checkpoint = find_checkpoint(where.load or where.save, log=_ignored, verify=False)
    begun, holder = None, where.save  # what the same command has saved, if it has run before
    if where.load is not None and where.load != where.save:
        begun = find_checkpoint(where.save, log=_ignored, verify=False)
    elif not where.finetune:
        begun = checkpoint
    if where.local_checkpoint_dir is not None:
        newest = begun.iteration if begun is not None else 0
        if near := assemble(where.save, where.local_checkpoint_dir, newest, ranks, log):
            begun, holder = find_checkpoint(near, log=_ignored, verify=False), str(near)
    if (
        begun is not None
        and (holder != where.save or where.load not in (None, where.save))
        and (where.finetune or checkpoint is None or begun.iteration > checkpoint.iteration)
    ):
        values = {**arguments.values, "checkpoint.finetune": False}
        if where.load is not None and where.load != where.save:
            log(
                f"--save {where.save} holds iteration {begun.iteration} of this run already, which is continued; "
                f"another --save starts from {where.load} again"
            )
            values["checkpoint.load"] = where.save
        return dataclasses.replace(arguments, values=values), begun, holder
    if checkpoint is not None:
        return arguments, checkpoint, where.load or where.save
    if where.load is not None:
        if where.finetune or where.exit_on_missing_checkpoint or where.load != where.save:
            raise ValueError(
                f"--load {where.load} holds no checkpoint: give the --save folder of another run, or "
                "leave it out to start from random weights"
            )
        log(f"WARNING: --load {where.load} holds no checkpoint: the run starts from random weights")
    return arguments, None, None


def _ignored(line: str) -> None:
    """For warnings that come once more when the checkpoint is loaded."""


def _tokenizer(config: Config, arguments: Arguments, checkpoint: Checkpoint | None, log: Log) -> Tokenizer:
    data = config.data
    files_given = any(f"data.{name}" in arguments.given for name in ("vocab_file", "merge_file", "tokenizer_model"))
    known = checkpoint.facts.get("tokenizer") if checkpoint is not None else None
    if checkpoint is not None and known is None and not files_given and "data.tokenizer_type" not in arguments.given:
        raise ValueError(
            f"{checkpoint.path} came without a tokenizer: give --vocab-file and --merge-file, "
            "--tokenizer-model, or --tokenizer-type of one that needs no files, of its "
            f"{checkpoint.facts['vocab_size']:,} tokens"
        )
    if known is not None and not files_given:
        folder = arguments.checkpoint.load or arguments.checkpoint.save  # also where a local checkpoint is loaded
        tokenizer = load_tokenizer(Path(str(folder)) / "tokenizer")
    else:
        kind = data.tokenizer_type
        if kind is None:
            kind = default_tokenizer_kind()
            if kind == "bytes":
                log("tokenizer: bytes, since neither tiktoken nor tokenizers is installed (pip install tiktoken)")
        model_file = data.tokenizer_model
        if kind == "SentencePieceTokenizer":
            model_file = model_file or f"{config.checkpoint.save}/sentencepiece.model"
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
            f"{flag(f'data.{name}')}: the tokenizer {tokenizer.kind} has no end of document; leave the flag out",
        )
    if checkpoint is not None and known is None and tokenizer.vocab_size != checkpoint.facts["vocab_size"]:
        raise ValueError(
            f"{checkpoint.path} has {checkpoint.facts['vocab_size']:,} tokens and the tokenizer "
            f"{tokenizer.vocab_size:,}: give the files that it was trained with"
        )
    if checkpoint is not None and known is not None and tokenizer.fingerprint != known["fingerprint"]:
        raise ValueError(
            f"the tokenizer's files are not those of {checkpoint.path}: leave --vocab-file, --merge-file "
            "and --tokenizer-model out to take the checkpoint's own"
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
    *(
        f"data.{name}"
        for name in (
            "train_data",
            "valid_data",
            "test_data",
            "data_path",
            "valid_data_path",
            "test_data_path",
            "split",
            "text_key",
            "data_cache_path",
            "vocab_file",
            "merge_file",
            "tokenizer_model",
            "cache_dir",
            "num_workers",
        )
    ),
    *(
        f"train.{name}"
        for name in ("device", "tensorboard_dir", "wandb_project", "wandb_entity", "wandb_exp_name", "wandb_save_dir")
    ),
    "checkpoint.save",
    "checkpoint.load",
    "checkpoint.local_checkpoint_dir",
}


def check_ranks_agree(prepared: PreparedRun) -> None:
    """ValueError, on every rank, that names the first decision that differs. A collective over all ranks."""
    own = decisions(prepared)

    def others(text: str) -> list[int]:
        """The ranks that have another text than rank 0."""
        number = int(hashlib.sha256(text.encode()).hexdigest()[:15], 16)
        numbers = gather_over_ranks(number, prepared.device)
        return [rank for rank, theirs in enumerate(numbers) if theirs != numbers[0]]

    for name, value in own.items() if others(repr(own)) else ():
        if ranks := others(value):
            raise ValueError(
                f"rank {ranks[0]} has another {name} than rank 0 (on rank {prepared.ranks.rank} it is {value}): start "
                "every rank with the same command line and environment, and let all machines see the same files"
            )
    require(
        not others(prepared.splits.fingerprint),
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
