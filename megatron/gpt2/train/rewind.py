"""Back to the checkpoint before a spike of the loss, in the same process, and past the samples since then."""

import dataclasses

from megatron.gpt2.checkpoint.folder import set_newer_aside
from megatron.gpt2.extensions.watch.spikes import MOST, LossSpike
from megatron.gpt2.train.checkpointing import load_run
from megatron.gpt2.train.collectives import max_over_ranks
from megatron.gpt2.train.loop import train
from megatron.gpt2.train.run import Run


def train_past_spikes(run: Run) -> str:
    """`train`, which begins again from an earlier checkpoint after each spike (--rewind-on-spike)."""
    while True:
        try:
            return train(run)
        except LossSpike as spike:  # on every rank after the same step
            rewind(run, spike)


def rewind(run: Run, spike: LossSpike) -> None:
    """Load the newest checkpoint from before the spike, and let the samples since then out."""
    assert run.watch.spikes is not None
    progress, prepared, saver = run.progress, run.prepared, run.checkpoints.saver
    saver.finish()
    run.engine.gatherer.wait()
    run.watch.spikes.rewinds += 1
    at, end = progress.iteration, progress.consumed_samples
    found = set_newer_aside(prepared.save_directory, spike.clean, run.log.info) if run.parallel.rank == 0 else -1
    if max_over_ranks(found, run.device) < 0:
        run.watch.spikes.rewinds = MOST
        tell(
            run,
            f"WARNING: at iteration {at} {spike}, and no checkpoint from before is there to go back to: the run "
            "goes on as it is, and no further spike is looked for",
        )
        return
    # Whatever the flags said of the checkpoint that the run began with.
    own = dataclasses.replace(prepared.config.checkpoint, finetune=False, no_load_optim=False, no_load_rng=False)
    source = dataclasses.replace(
        prepared, source=str(prepared.save_directory), config=dataclasses.replace(prepared.config, checkpoint=own)
    )
    iteration, consumed, _ = load_run(source, run.parallel, run.engine, run.log.info)
    run.checkpoints.remove_local()
    run.engine.optimizer.skipped_in_a_row.zero_()
    progress.iteration, progress.consumed_samples = iteration, consumed
    progress.skipped_samples += end - consumed
    progress.loss_sum.zero_()
    run.data.rewind(consumed, progress.skipped_samples)
    run.log.rewind(iteration)
    run.incidents.iteration = iteration
    if run.watch.replicas is not None:
        run.watch.replicas.restart(iteration)
    if run.timers.own_ms:
        run.timers.take_ms(1)
    left = MOST - run.watch.spikes.rewinds
    tell(
        run,
        f"WARNING: at iteration {at} {spike}: the run is back at iteration {iteration} and skips "
        f"{end - consumed} samples (--rewind-on-spike; {left} more rewind{'s' * (left != 1)}, then none)",
    )


def tell(run: Run, line: str) -> None:
    """Print a line, and keep it in the history and the incidents."""
    run.log.info(line)
    run.incidents.note("spike", line)
