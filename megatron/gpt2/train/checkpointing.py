"""Checkpoints of a run: what is saved, where, and how a run continues from one."""

import secrets
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist

import mpu
from data_utils.files import replace_text
from megatron.gpt2.checkpoint.folder import BEST, best_loss, find_checkpoint, lock_folder
from megatron.gpt2.checkpoint.local import NAME, LocalCheckpoints, run_name
from megatron.gpt2.checkpoint.saver import Saver
from megatron.gpt2.checkpoint.state import load_rng, load_state, place_name, rng_pieces, state_pieces, whole_parameters
from megatron.gpt2.checkpoint.writer import Piece
from megatron.gpt2.config import CheckpointConfig, write_config
from megatron.gpt2.device import describe_environment
from megatron.gpt2.dist.gathering import gather_texts
from megatron.gpt2.model.gpt2 import TIED, parameter_specs
from megatron.gpt2.optimizer.optimizer import MOMENTS
from megatron.gpt2.train.continuation import how_it_goes_on
from megatron.gpt2.train.engine import Engine, Progress, seed_random_streams
from megatron.gpt2.train.setup import Log, PreparedRun, what_decides
from mpu import kernels


class Checkpointing:
    """Saves a run in its --save folder. Every rank has one and calls its methods at the same steps.

    lock: on rank 0, what it holds the folder by. saver: writes the files, with --async-save from a thread.
    """

    def __init__(
        self, prepared: PreparedRun, parallel: mpu.ParallelState, engine: Engine, *, lock: BinaryIO | None, log: Log
    ) -> None:
        self._prepared, self._parallel, self._engine = prepared, parallel, engine
        self._lock, self._log = lock, log
        config, ranks = prepared.config.checkpoint, prepared.ranks
        attempt = gather_texts(secrets.token_hex(8))[0]
        self.saver = Saver(
            folder=prepared.save_directory,
            attempt=attempt,
            asynchronous=config.async_save,
            log=log,
            keep_last=config.keep_last,
            timeout_s=prepared.timeout.total_seconds(),
            rank=parallel.rank,
            world_size=parallel.world_size,
            local_world_size=ranks.local_world_size,
            gather=gather_texts,
        )
        self._files = partial(checkpoint_files, engine, parallel, config, prepared.device)
        self.saver.prepare(self._files())
        self._local: LocalCheckpoints | None = None
        if config.local_checkpoint_dir is not None:
            if parallel.rank == 0 and not (prepared.start and run_name(prepared.save_directory)):
                replace_text(prepared.save_directory / NAME, attempt)  # a run that begins gets another name
            folder = Path(config.local_checkpoint_dir) / gather_texts(run_name(prepared.save_directory))[0]
            hosts = list(ranks.meeting.hosts.values()) if ranks.meeting else [""] * parallel.world_size
            group = dist.new_group(backend="gloo", timeout=prepared.timeout) if parallel.world_size > 1 else None
            self._local = LocalCheckpoints(folder, hosts, parallel.rank, group, attempt, log)

    def save(self, progress: Progress) -> Path | None:
        """Write a checkpoint of this iteration: its folder, or None, with a warning, if that failed on any rank.

        With --async-save a thread has only begun with it, and None says nothing: `saver.finish` has the outcome.
        """
        return self.saver.save(*self._state(progress))

    def local_is_due(self, progress: Progress) -> bool:
        """Whether a local checkpoint of this iteration is to be written."""
        interval = self._prepared.config.checkpoint.local_checkpoint_interval
        return interval is not None and progress.iteration % interval == 0

    def save_locally(self, progress: Progress) -> None:
        """Write a local checkpoint."""
        assert self._local is not None
        self._local.save(*self._state(progress))

    def save_if_best(self, progress: Progress, valid_loss: float) -> None:
        """Write a checkpoint of this iteration into the folder `best` if no validation loss was lower. valid_loss:
        nats per token."""
        folder, data = self._prepared.save_directory / BEST, self._prepared.splits.fingerprint
        self.saver.finish()  # the last best one may still be on its way
        lower = self._parallel.rank == 0 and valid_loss < best_loss(folder, data, self._log)
        if any(gather_texts("lower" if lower else "")):
            iteration, files, facts = self._state(progress)
            self.saver.save(iteration, files, facts | {"valid_loss": valid_loss}, beside=folder)

    def _state(self, progress: Progress) -> tuple[int, dict[str, dict[str, Piece]], dict[str, Any]]:
        """The iteration, what this rank writes of its checkpoint, and what the manifest says of the run (JSON): all
        that is not a tensor."""
        prepared, engine, tokenizer = self._prepared, self._engine, self._prepared.tokenizer
        engine.gatherer.wait()
        facts = {
            **what_decides(prepared, self._parallel, sharded=engine.flat.is_sharded),
            "vocab_size": tokenizer.vocab_size,
            "tokenizer": {
                "kind": tokenizer.kind,
                "fingerprint": tokenizer.fingerprint,
                "vocab_size": tokenizer.vocab_size,
            },
            "iteration": progress.iteration,
            "consumed_samples": progress.consumed_samples,
            "skipped_samples": progress.skipped_samples,
            "optimizer": engine.optimizer.state_dict(),
            "torch": torch.__version__,
        }
        return progress.iteration, self._files(), facts

    def close(self) -> None:
        """End the thread that writes, see `Saver.close`."""
        self.saver.close()

    def remove_local(self) -> None:
        """Remove the local checkpoints: the run has saved since, or has left their course."""
        if self._local is not None:
            self._local.remove()

    def unlock(self) -> None:
        """Let another run have the --save folder."""
        if self._lock is not None:
            self._lock.close()


def lock_save_folder(prepared: PreparedRun, rank: int, log: Log) -> BinaryIO | None:
    """Take the --save folder, on rank 0, which gets what it holds the folder by. ValueError, on every rank, if
    another run has it, or keeps its best checkpoint there."""
    lock, problem = None, ""
    if rank == 0:
        try:
            lock = lock_folder(prepared.save_directory, log)
        except ValueError as error:
            problem = str(error)
    if problem := gather_texts(problem)[0]:
        raise ValueError(problem)
    return lock


def checkpoint_files(
    engine: Engine, parallel: mpu.ParallelState, config: CheckpointConfig, device: torch.device
) -> dict[str, dict[str, Piece]]:
    """What this rank writes of a checkpoint, {path in its folder: {tensor name: piece}}, of the tensors as they are
    now."""
    specs = mpu.partition_specs(engine.model)
    if not engine.model.has_embeddings:
        specs.pop(TIED, None)  # the first stage saves it
    files: dict[str, dict[str, Piece]] = {}
    folder, replica = f"mp_rank_{place_name(parallel)}", f"dp_{parallel.data_parallel_rank:02d}.safetensors"
    layout = {"mp_rank": parallel.tensor_model_parallel_rank, "mp_size": parallel.tensor_model_parallel_size}
    if parallel.data_parallel_rank == 0:
        own = [(name, parameter) for name, parameter in engine.model.named_parameters() if name in specs]
        files[f"{folder}/model.safetensors"] = state_pieces(whole_parameters(own), specs, **layout)
    # Each data-parallel rank holds all of the optimizer's state, or if it is sharded a part of it.
    if not config.no_save_optim and (parallel.data_parallel_rank == 0 or engine.flat.is_sharded):
        states = (state for state in engine.optimizer.tensors() if state.name in specs)
        pieces = state_pieces(states, specs, **layout)
        for kind in ("master", *MOMENTS):  # a file of each: they are written and hashed side by side
            files[f"{folder}/{kind}_{replica}"] = {
                key: piece for key, piece in pieces.items() if key.startswith(f"{kind}.")
            }
    if not config.no_save_rng:
        files[f"{folder}/rng_{replica}"] = rng_pieces(parallel, device)
    return files


def load_run(prepared: PreparedRun, parallel: mpu.ParallelState, engine: Engine, log: Log) -> tuple[int, int, int]:
    """Fill model, optimizer and random states from the checkpoint that the run starts from, if there is one. Returns
    its iteration, consumed and skipped samples, 0 for a run that begins. ValueError if it does not fit this run."""
    if prepared.source is None:
        return 0, 0, 0
    wanted = prepared.config.checkpoint
    checkpoint = find_checkpoint(
        prepared.source,
        log=log,
        rank=parallel.rank,
        gather=gather_texts,
        verify=not wanted.no_verify,
    )
    if checkpoint is None:
        raise ValueError(f"--load {prepared.source}: the checkpoint vanished while the run was starting")
    specs = parameter_specs(prepared.config.model, parallel.tensor_model_parallel_size)
    layout = {"mp_rank": parallel.tensor_model_parallel_rank, "mp_size": parallel.tensor_model_parallel_size}
    lost: list[str] = []
    has_optimizer = any(name.startswith("master.") for name in checkpoint.names())
    if wanted.finetune or wanted.no_load_optim or not has_optimizer:
        if has_optimizer:  # the weights before they were rounded
            masters = (state for state in engine.optimizer.tensors() if state.kind == "master")
            load_state(masters, specs, checkpoint, **layout)
            engine.optimizer.write_back()
        else:
            load_state(whole_parameters(engine.model.named_parameters()), specs, checkpoint, **layout)
            engine.optimizer.masters_from_model()
        if wanted.finetune:
            log(f"weights from {checkpoint.path}: fine-tuning starts at iteration 0")
            return 0, 0, 0
        if not wanted.no_load_optim:
            log(f"WARNING: {checkpoint.path} holds no optimizer (--no-save-optim): its moments start at zero")
        lost.append("AdamW's moments start at zero")
        engine.optimizer.set_good_steps(int(checkpoint.facts["optimizer"]["good_steps"]))
    else:
        load_state(engine.optimizer.tensors(), specs, checkpoint, **layout)
        engine.optimizer.load_state_dict(checkpoint.facts["optimizer"])
    has_streams = not wanted.no_load_rng and load_rng(checkpoint, parallel, prepared.device)
    if not wanted.no_load_rng and not has_streams:
        # Not the seed itself: dropout would repeat the masks of the first steps.
        seed_random_streams(prepared.config.train.seed + checkpoint.iteration, parallel, prepared.device)
        log(f"random states start afresh: {checkpoint.path} has none for this layout and device")
    here = what_decides(prepared, parallel, sharded=engine.flat.is_sharded)
    if draws_other_masks(prepared, checkpoint.facts, has_streams=has_streams):
        lost.append("dropout draws other masks")
    log(f"continuing {checkpoint.path}: {how_it_goes_on(checkpoint.facts, here, lost=lost)}")
    return (
        checkpoint.iteration,
        int(checkpoint.facts["consumed_samples"]),
        int(checkpoint.facts.get("skipped_samples", 0)),
    )


def draws_other_masks(prepared: PreparedRun, facts: Mapping[str, Any], *, has_streams: bool) -> bool:
    """Whether dropout does not go on as before. facts: of the checkpoint. has_streams: the run has the random streams
    that the checkpoint's run had."""
    shape, train = prepared.config.model, prepared.config.train
    then = facts.get("config", {}).get("train", {})
    if not shape.has_dropout:
        return False
    if train.dropout_rng != then.get("dropout_rng", "torch"):  # a checkpoint from before there was a choice
        return True
    by_counter = train.dropout_rng == "counter" and (
        shape.attention_dropout == 0 or kernels.attention_takes_keys(prepared.device.type)
    )
    # A stream draws the masks of a micro-batch at once, so that they depend on its size.
    return not by_counter and not (has_streams and then.get("micro_batch_size") == train.micro_batch_size)


def write_config_and_tokenizer(prepared: PreparedRun) -> None:
    """Write config.json and the tokenizer into the --save folder: with a checkpoint, all that generation needs. Rank 0
    calls it."""
    folder = prepared.save_directory
    prepared.tokenizer.save(folder / "tokenizer")
    if prepared.config.checkpoint.keep_best:
        prepared.tokenizer.save(folder / BEST / "tokenizer")
    ranks = prepared.ranks
    facts = {
        "environment": describe_environment(
            prepared.device, world_size=ranks.world_size, local_world_size=ranks.local_world_size
        ),
        "world_size": ranks.world_size,
        "train_iters": prepared.train_iters,
        "global_batch_size": prepared.global_batch_size,
        "device": str(prepared.device),
        "precision": str(prepared.dtype).removeprefix("torch."),
        "torch": torch.__version__,
    }
    write_config(
        folder,
        prepared.config,
        facts,
        goes_on=prepared.source is not None and prepared.config.checkpoint.load in (None, str(folder)),
    )
