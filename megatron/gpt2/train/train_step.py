"""One update of the model."""

import torch
from torch import Tensor

from megatron.gpt2.dist.gathering import global_sum, sum_losses
from megatron.gpt2.train.data import Batch
from megatron.gpt2.train.run import Run


def train_step(run: Run) -> None:
    """Forward and backward of the micro-batches -> reduce gradients -> the norm, which skips the step if it is not
    finite -> clip -> AdamW -> learning rate."""
    engine, optimizer, timers = run.engine, run.engine.optimizer, run.timers
    with timers("batch generator"):
        with timers("data loader"):
            text, samples = next(run.data.loader)
        batch = run.data.to_device(text, samples)
        # Each token weighs the same in the global batch, whatever the layout; the loss scale enters here, before
        # anything is rounded to 16 bits.
        token_weight = batch.mask * (optimizer.scaler.scale / tokens_in_global_batch(run, batch))
        micro_batches = batch.micro_batches(run.config.train.micro_batch_size, token_weight)

    losses = run.forward_backward(micro_batches) / optimizer.scaler.scale
    with timers("allreduce"):
        engine.reducer.finish()
    for hook in run.hooks:
        hook.before_update(run)
    with timers("optimizer"):
        optimizer.step()  # takes the norm, skips or clips, updates, and moves the schedule on
    # A skipped step's loss may not be finite; it is left out of the mean.
    run.progress.loss_sum += torch.where(optimizer.found_inf > 0, 0.0, sum_losses(losses))


def tokens_in_global_batch(run: Run, batch: Batch) -> float | Tensor:
    """Tokens with a loss in this step, over all ranks: a known number unless the mask depends on the text
    (--eod-mask-loss), then a float32 scalar on the device."""
    if not run.config.data.eod_mask_loss:
        return float(run.samples_of_step * batch.labels.size(1))
    return global_sum([batch.mask.sum()], run.parallel.data_parallel_group)[0].float().clamp_min(1.0)
