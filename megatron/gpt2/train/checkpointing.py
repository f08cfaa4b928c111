"""`CheckpointManager` saves the state of a run. `load_checkpoint` continues a run from a checkpoint."""

import json
import secrets
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import mpu
from data_utils.command_line import Log
from data_utils.files import atomic_write_text
from megatron.gpt2.checkpoint.lease import Lease, LeaseLostError
from megatron.gpt2.checkpoint.local import RUN_NAME_FILE, LocalCheckpoints, newest_local_iteration, run_name
from megatron.gpt2.checkpoint.reader import NativeCheckpoint
from megatron.gpt2.checkpoint.save_folder import BEST, FolderInUse, find_checkpoint, saved_best_loss
from megatron.gpt2.checkpoint.saver import Saver
from megatron.gpt2.checkpoint.sharded_state import (
    load_rng_state,
    load_sharded_state_dict,
    model_rank_name,
    parameter_states,
    rng_state_dict,
    sharded_state_dict,
)
from megatron.gpt2.checkpoint.writer import ShardedTensor
from megatron.gpt2.config import CheckpointConfig, write_config
from megatron.gpt2.device import describe_environment
from megatron.gpt2.dist.gathering import gather_strings
from megatron.gpt2.hooks import StopRun
from megatron.gpt2.model.gpt2 import TIED_WEIGHT, model_partition_specs
from megatron.gpt2.monitor.run_log import RunLog
from megatron.gpt2.optimizer.optimizer import MOMENTS
from megatron.gpt2.train.resume_equivalence import resume_equivalence
from megatron.gpt2.train.setup import RunContext, open_saved_checkpoint, run_metadata
from megatron.gpt2.train.train_state import Progress, TrainState, seed_random_streams
from mpu import kernels


class CheckpointManager:
    """Saves a run in its --save folder. Every rank must call its methods at the same steps.

    lease: on rank 0, the lease of the --save folder.
    on_save: a function that is called before each save.
    """

    def __init__(
        self,
        context: RunContext,
        parallel: mpu.ParallelState,
        state: TrainState,
        progress: Progress,
        *,
        lease: Lease | None,
        log: RunLog,
        on_save: Callable[[], object],
    ) -> None:
        self._context, self._parallel, self._state, self._progress = context, parallel, state, progress
        self._lease, self._log, self._on_save = lease, log, on_save
        config, ranks = context.config.checkpoint, context.rank_info
        start_id = gather_strings(secrets.token_hex(8))[0]
        storage_timeout = timedelta(minutes=config.save_timeout_minutes)
        saving_group = None
        if parallel.world_size > 1:
            saving_group = dist.new_group(backend="gloo", timeout=context.timeout + storage_timeout)
        self._saver = Saver(
            folder=context.save_directory,
            start_id=start_id,
            asynchronous=config.async_save,
            log=log.info,
            keep_last=config.keep_last,
            timeout_s=context.timeout.total_seconds(),
            rank=parallel.rank,
            world_size=parallel.world_size,
            local_world_size=ranks.local_world_size,
            storage_timeout_s=storage_timeout.total_seconds(),
            gather=partial(gather_strings, group=saving_group),
            check_owner=lease.check if lease is not None else lambda: None,
        )
        self._files = partial(checkpoint_files, state, parallel, config, context.device)
        self._saver.allocate_host_buffer(self._files())
        self._local: LocalCheckpoints | None = None
        if config.local_checkpoint_dir is not None:
            if parallel.rank == 0 and not (context.resume_metadata and run_name(context.save_directory)):
                # A run that starts at iteration 0 gets a new name.
                atomic_write_text(context.save_directory / RUN_NAME_FILE, start_id)
            folder = Path(config.local_checkpoint_dir) / gather_strings(run_name(context.save_directory))[0]
            hosts = list(ranks.hosts.values()) or [""] * parallel.world_size
            group = dist.new_group(backend="gloo", timeout=context.timeout) if parallel.world_size > 1 else None
            self._local = LocalCheckpoints(folder, hosts, parallel.rank, group, start_id, log.info)

    @property
    def is_lost(self) -> bool:
        """Whether rank 0 has seen that another run has taken the --save folder."""
        return self._lease is not None and self._lease.is_lost

    @property
    def saved_iteration(self) -> int | None:
        """The last iteration that all ranks report as saved."""
        return self._saver.saved_iteration

    @property
    def last_error(self) -> str:
        """The last error of a save on this rank, or ""."""
        return self._saver.last_error

    def save(self) -> Path | None:
        """Write a checkpoint of this iteration, and return its folder. If a rank cannot write, log a warning and return
        None. With --async-save, start to write and return None; `finish` waits for the result."""
        self._before_save()
        return self._saver.save(*self._contents())

    def save_locally(self) -> None:
        """Write a checkpoint into --local-checkpoint-dir every --local-checkpoint-interval iterations."""
        interval = self._context.config.checkpoint.local_checkpoint_interval
        if self._local is not None and interval is not None and self._progress.iteration % interval == 0:
            self._before_save()
            self._local.save(*self._contents())

    def save_if_best(self, valid_loss: float) -> None:
        """Write a checkpoint of this iteration into the folder `best` if `valid_loss`, in nats per token, is the lowest
        so far."""
        self._before_save()
        folder, splits = self._context.save_directory / BEST, self._context.splits
        data = {"data_fingerprint": splits.fingerprint, "held_out_fingerprint": splits.held_out_fingerprint}
        self.finish()  # A thread may still write the previous best checkpoint.
        lower = self._parallel.rank == 0 and valid_loss < saved_best_loss(folder, data, self._log.info)
        if any(gather_strings("lower" if lower else "")):
            iteration, files, metadata = self._contents()
            self._saver.save(iteration, files, metadata | data | {"valid_loss": valid_loss}, into=folder)

    def finish(self) -> None:
        """Wait for a save that --async-save has started. Raises StopRun on every rank if the storage is too slow."""
        self._saver.finish()

    def remove_local(self) -> None:
        """Remove the checkpoints in --local-checkpoint-dir, because the --save folder has a newer one or the run was
        rewound."""
        if self._local is not None:
            self._local.remove()

    def close(self) -> None:
        """Wait for a pending save (`Saver.close`), without collectives. Let other runs use the --save folder."""
        self._saver.close()
        if self._lease is not None:
            self._lease.release()

    def _before_save(self) -> None:
        self._restore_folder()
        self._log.sync()
        self._context.incidents.sync()
        self._on_save()

    def _restore_folder(self) -> None:
        """If the --save folder was removed or moved, make a new one with config.json and the tokenizer. Raises StopRun
        on every rank if another run has taken the folder."""
        folder, problem = self._context.save_directory, ""
        try:
            if self._lease is not None:
                self._lease.check()
                if self._lease.is_gone():
                    self._lease.take()
                    write_config_and_tokenizer(self._context)
                    self._log.info(
                        f"WARNING: --save {folder} was removed or moved during the run: it is made again and holds "
                        "what the run saves from now on"
                    )
        except (FolderInUse, LeaseLostError) as error:
            problem = str(error)
        except (ValueError, OSError) as error:
            self._log.info(f"WARNING: --save {folder} was removed or moved during the run: {error}")
        if problem := gather_strings(problem)[0]:
            raise StopRun(problem)

    def _contents(self) -> tuple[int, dict[str, dict[str, ShardedTensor]], dict[str, Any]]:
        """Return the iteration, the files that this rank writes, and the metadata of the checkpoint (JSON values)."""
        context, state, progress, tokenizer = self._context, self._state, self._progress, self._context.tokenizer
        state.param_gather.finish_param_sync()
        metadata = {
            **run_metadata(context, self._parallel, sharded=state.buffer.is_sharded),
            "vocab_size": tokenizer.vocab_size,
            "tokenizer": {
                "kind": tokenizer.kind,
                "fingerprint": tokenizer.fingerprint,
                "vocab_size": tokenizer.vocab_size,
            },
            "iteration": progress.iteration,
            "consumed_samples": progress.consumed_samples,
            "skipped_samples": progress.skipped_samples,
            "optimizer": state.optimizer.state_dict(),
            "torch": torch.__version__,
        }
        return progress.iteration, self._files(), metadata


def lease_save_folder(context: RunContext, rank: int) -> Lease | None:
    """Take the lease of the --save folder on rank 0 and return it; return None on other ranks. Raises FolderInUse on
    every rank if another run uses the folder, and ValueError if the folder cannot be used."""
    lease, kind, problem = None, "", ""
    if rank == 0:
        try:
            lease = Lease(context.save_directory)
        except (ValueError, OSError) as error:
            kind, problem = type(error).__name__, str(error)
    kind, problem = json.loads(gather_strings(json.dumps([kind, problem]))[0])
    if problem:
        raise (FolderInUse if kind == FolderInUse.__name__ else ValueError)(problem)
    return lease


def checkpoint_files(
    state: TrainState, parallel: mpu.ParallelState, config: CheckpointConfig, device: torch.device
) -> dict[str, dict[str, ShardedTensor]]:
    """Return the files that this rank writes, {path in the checkpoint: {tensor name: sharded tensor}}. The tensors are
    not copied."""
    specs = mpu.partition_specs(state.model)
    if not state.model.has_embeddings:
        specs.pop(TIED_WEIGHT, None)  # The first pipeline stage saves the tied weight.
    files: dict[str, dict[str, ShardedTensor]] = {}
    folder, suffix = f"mp_rank_{model_rank_name(parallel)}", f"dp_{parallel.data_parallel_rank:02d}.safetensors"
    layout = {"tp_rank": parallel.tensor_model_parallel_rank, "tp_size": parallel.tensor_model_parallel_size}
    if parallel.data_parallel_rank == 0:
        saved_parameters = [(name, parameter) for name, parameter in state.model.named_parameters() if name in specs]
        files[f"{folder}/model.safetensors"] = sharded_state_dict(parameter_states(saved_parameters), specs, **layout)
    # Without sharding, all data-parallel ranks have the same state of the optimizer, and the first one saves it.
    if not config.no_save_optim and (parallel.data_parallel_rank == 0 or state.buffer.is_sharded):
        states = (shard for shard in state.optimizer.state_shards() if shard.name in specs)
        shards = sharded_state_dict(states, specs, **layout)
        # Masters and each moment have separate files, which are written and hashed in parallel.
        for kind in ("master", *MOMENTS):
            files[f"{folder}/{kind}_{suffix}"] = {
                key: shard for key, shard in shards.items() if key.startswith(f"{kind}.")
            }
    if not config.no_save_rng:
        files[f"{folder}/rng_{suffix}"] = rng_state_dict(parallel, device)
    return files


def loadable_checkpoint(folder: Path) -> NativeCheckpoint | None:
    """Return the checkpoint that a program would load from the --save folder, or None if the folder has no complete
    checkpoint."""
    try:
        return open_saved_checkpoint(folder)
    except ValueError:
        return None


def newest_iteration(config: CheckpointConfig, *, one_machine: bool) -> int:
    """Return the iteration of the checkpoint that a run would continue, including local checkpoints, or 0 without one.

    one_machine: whether all ranks of the run are on this machine.
    """
    save, local = str(config.save), config.local_checkpoint_dir
    newest = loadable_checkpoint(Path(save))
    return max(
        newest.iteration if newest else 0, newest_local_iteration(save, local, one_machine=one_machine) if local else 0
    )


def load_checkpoint(
    context: RunContext, parallel: mpu.ParallelState, state: TrainState, log: Log
) -> tuple[int, int, int]:
    """Load model, optimizer and random states from the checkpoint at `context.source`. Return the checkpoint's
    iteration, consumed samples and skipped samples, or zeros without a checkpoint and with --finetune. Raises
    ValueError if the checkpoint does not fit the run."""
    if context.source is None:
        return 0, 0, 0
    options = context.config.checkpoint
    checkpoint = find_checkpoint(
        context.source, log=log, rank=parallel.rank, gather=gather_strings, verify=not options.no_verify
    )
    if checkpoint is None:
        raise ValueError(f"--load {context.source}: the checkpoint was removed while the run was starting")
    not_restored = _load_weights_and_moments(context, parallel, state, checkpoint, log)
    if options.finetune:
        log(f"weights from {checkpoint.path}: fine-tuning starts at iteration 0")
        return 0, 0, 0
    has_streams = _load_random_streams(context, parallel, checkpoint, log)
    if dropout_changes(context, checkpoint.metadata, has_streams=has_streams):
        not_restored.append("dropout draws other masks")
    metadata = run_metadata(context, parallel, sharded=state.buffer.is_sharded)
    log(f"continuing {checkpoint.path}: {resume_equivalence(checkpoint.metadata, metadata, not_restored=not_restored)}")
    return (
        checkpoint.iteration,
        int(checkpoint.metadata["consumed_samples"]),
        int(checkpoint.metadata.get("skipped_samples", 0)),
    )


def _load_weights_and_moments(
    context: RunContext, parallel: mpu.ParallelState, state: TrainState, checkpoint: NativeCheckpoint, log: Log
) -> list[str]:
    """Load the weights, and the state of the optimizer unless a flag forbids it. Return descriptions of the state that
    was not loaded."""
    options, optimizer = context.config.checkpoint, state.optimizer
    specs = model_partition_specs(context.config.model, parallel.tensor_model_parallel_size)
    layout = {"tp_rank": parallel.tensor_model_parallel_rank, "tp_size": parallel.tensor_model_parallel_size}
    has_optimizer = any(name.startswith("master.") for name in checkpoint.tensors)
    if has_optimizer and not (options.finetune or options.no_load_optim):
        load_sharded_state_dict(optimizer.state_shards(), specs, checkpoint, **layout)
        optimizer.load_state_dict(checkpoint.metadata["optimizer"])
        return []
    if has_optimizer:  # The masters are the weights before rounding.
        masters = (shard for shard in optimizer.state_shards() if shard.kind == "master")
        load_sharded_state_dict(masters, specs, checkpoint, **layout)
        optimizer.copy_masters_and_gather()
    else:
        load_sharded_state_dict(parameter_states(state.model.named_parameters()), specs, checkpoint, **layout)
        state.buffer.copy_params_to_masters()
    if not options.finetune:
        if not options.no_load_optim:
            log(f"WARNING: {checkpoint.path} holds no optimizer (--no-save-optim): its moments start at zero")
        optimizer.set_num_updates(int(checkpoint.metadata["optimizer"]["num_updates"]))
    return ["the optimizer's moments start at zero"]


def _load_random_streams(
    context: RunContext, parallel: mpu.ParallelState, checkpoint: NativeCheckpoint, log: Log
) -> bool:
    """Load the states of the random streams. If the checkpoint has no states for this layout, seed the streams with a
    new seed. Return whether the states were loaded."""
    if context.config.checkpoint.no_load_rng:
        return False
    if load_rng_state(checkpoint, parallel, context.device):
        return True
    # The iteration is added to the seed, because otherwise the dropout masks of the first steps would repeat.
    seed_random_streams(context.config.train.seed + checkpoint.iteration, parallel, context.device)
    if dropout_changes(context, checkpoint.metadata, has_streams=False):
        log(
            f"random streams start from a new seed: {checkpoint.path} has no states for this layout and device; "
            "dropout masks change"
        )
    return False


def dropout_changes(context: RunContext, metadata: Mapping[str, Any], *, has_streams: bool) -> bool:
    """Return whether dropout draws different masks than the run that wrote the checkpoint would have drawn.

    metadata: the metadata of the checkpoint.
    has_streams: whether the states of the random streams were loaded.
    """
    model_config, train_config = context.config.model, context.config.train
    saved_train = metadata.get("config", {}).get("train", {})
    if not model_config.has_dropout:
        return False
    # Older checkpoints have no "dropout_rng": their runs used torch's generators.
    if train_config.dropout_rng != saved_train.get("dropout_rng", "torch"):
        return True
    by_counter = train_config.dropout_rng == "counter" and (
        model_config.attention_dropout == 0 or kernels.has_seeded_attention(context.device.type)
    )
    # A random stream draws the masks of a whole micro-batch, so they depend on the micro-batch size.
    return not by_counter and not (has_streams and saved_train.get("micro_batch_size") == train_config.micro_batch_size)


def write_config_and_tokenizer(context: RunContext) -> None:
    """Write config.json and the tokenizer into the --save folder. Generation needs these files in addition to a
    checkpoint. Rank 0 calls this function."""
    folder = context.save_directory
    context.tokenizer.save(folder / "tokenizer")
    if context.config.checkpoint.keep_best:
        context.tokenizer.save(folder / BEST / "tokenizer")
    ranks = context.rank_info
    metadata = {
        "environment": describe_environment(context.device, ranks),
        "world_size": ranks.world_size,
        "train_iters": context.train_iters,
        "global_batch_size": context.global_batch_size,
        "device": str(context.device),
        "precision": str(context.dtype).removeprefix("torch."),
        "torch": torch.__version__,
    }
    write_config(
        folder,
        context.config,
        metadata,
        continues=context.source is not None and context.config.checkpoint.load in (None, str(folder)),
    )
