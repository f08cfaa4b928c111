"""Update the model once."""

import torch
from torch import Tensor

from megatron.gpt2.dist.gathering import all_reduce_scalars, sum_losses
from megatron.gpt2.hooks import Hook
from megatron.gpt2.train.data import Batch
from megatron.gpt2.train.trainer import Trainer


def train_step(trainer: Trainer) -> None:
    """Run one training step: forward and backward of all micro-batches, gradient reduction, and the optimizer's update.
    The update is skipped if the gradient norm is not finite."""
    state, optimizer, timers = trainer.state, trainer.state.optimizer, trainer.timers
    with timers("batch generator"):
        with timers("data loader"):
            token_ids, sample_ids = next(trainer.data.loader)
        batch = trainer.data.to_device(token_ids, sample_ids)
        # Each token has the same weight in the global batch, in every layout. The loss scale is applied here, before
        # anything is rounded to 16 bits.
        token_weight = batch.mask * (optimizer.scaler.scale / tokens_in_global_batch(trainer, batch))
        micro_batches = batch.split(trainer.config.train.micro_batch_size, token_weight)

    losses = trainer.forward_backward(micro_batches) / optimizer.scaler.scale
    with timers("allreduce"):
        state.reducer.finish_grad_sync()
    trainer.hooks.call(Hook.on_pre_optimizer_step, trainer)
    with timers("optimizer"):
        optimizer.step()  # compute the norm; skip the step, or clip and update the weights; set the next learning rate
    # The loss of a skipped step may not be finite, so the mean does not include it.
    trainer.progress.loss_sum += torch.where(optimizer.found_inf > 0, 0.0, sum_losses(losses))


def tokens_in_global_batch(trainer: Trainer, batch: Batch) -> float | Tensor:
    """Return the number of tokens with a loss in this step, over all ranks. It is a float32 scalar on the device if the
    mask depends on the text (--eod-mask-loss), and otherwise a float."""
    if not trainer.config.data.eod_mask_loss:
        return float(trainer.current_global_batch_size * batch.labels.size(1))
    return all_reduce_scalars([batch.mask.sum()], trainer.parallel.data_parallel_group)[0].float().clamp_min(1.0)
