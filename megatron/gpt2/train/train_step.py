"""One training step."""

import torch
from torch import Tensor

from megatron.gpt2.dist.gathering import all_reduce_scalars, sum_losses
from megatron.gpt2.hooks import Hook
from megatron.gpt2.train.data import Batch
from megatron.gpt2.train.trainer import Trainer


def train_step(trainer: Trainer) -> None:
    """Run one training step:

    1. Read the batch of this rank, and split it into micro-batches.
    2. Run forward and backward of each micro-batch.
    3. Wait until the gradients are summed over the ranks of all groups.
    4. Update the weights. If the gradient norm is not finite, skip the update.
    5. Add the loss to `trainer.progress.loss_sum`, which the next log line shows.
    """
    state, optimizer, timers = trainer.state, trainer.state.optimizer, trainer.timers
    with timers("batch generator"):
        with timers("data loader"):
            token_ids, sample_ids = next(trainer.data.loader)
        batch = trainer.data.to_device(token_ids, sample_ids)
        # The loss of a step is the mean over all tokens of the global batch, in every layout. The weight of a token
        # includes the loss scale, so that no gradient is rounded to 16 bits without it.
        token_weight = batch.mask * (optimizer.scaler.scale / tokens_in_global_batch(trainer, batch))
        micro_batches = batch.split(trainer.config.train.micro_batch_size, token_weight)

    losses = trainer.forward_backward(micro_batches) / optimizer.scaler.scale
    with timers("allreduce"):
        state.reducer.finish_grad_sync()
    trainer.hooks.call(Hook.on_pre_optimizer_step, trainer)
    with timers("optimizer"):
        optimizer.step()  # `step` also computes the norm, clips the gradients, and sets the next learning rate.
    # The loss of a skipped step may not be finite.
    trainer.progress.loss_sum += torch.where(optimizer.found_inf > 0, 0.0, sum_losses(losses))


def tokens_in_global_batch(trainer: Trainer, batch: Batch) -> float | Tensor:
    """Return the number of tokens with a loss in this step, over all ranks. With --eod-mask-loss the number depends on
    the text and is a float32 scalar on the device. Without this flag the number is a float."""
    if not trainer.config.data.eod_mask_loss:
        return float(trainer.current_global_batch_size * batch.labels.size(1))
    return all_reduce_scalars([batch.mask.sum()], trainer.parallel.data_parallel_group)[0].float().clamp_min(1.0)
