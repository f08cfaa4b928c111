"""Batches on the device, and a check that all ranks of a model-parallel group (tensor · pipeline) read the same text.

Every rank reads its batches itself, because document lengths are needed on the host. At log lines the ranks compare
checksums of the text that they have read.
Legend: b samples of a step on this rank, s sequence.
"""

import zlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import mpu
from data_utils import BatchLoader, DamagedData, Splits, Tokenizer
from megatron.gpt2.dist.gathering import gather_ints
from megatron.gpt2.train.setup import RunContext


@dataclass(frozen=True)
class Batch:
    """Samples on the device.

    tokens, labels: [b, s] int64.
    mask: [b, s] float32, 0 for tokens without a loss.
    sample_ids: [b] int64, the number of each sample in the run; None in an evaluation.
    positions: [b, s] int64 with --reset-position-ids, otherwise None.
    host_tokens: [b, s] int64 on the host, the tokens with -1 for padding; None without --reset-attention-mask.
    eod: the token that ends a document.
    """

    tokens: Tensor
    labels: Tensor
    mask: Tensor
    sample_ids: Tensor | None = None
    positions: Tensor | None = None
    host_tokens: Tensor | None = None
    eod: int = 0

    def split(self, size: int, token_weight: Tensor) -> list[dict[str, Tensor | mpu.PackedSeqParams | None]]:
        """Split the batch into micro-batches of `size` samples. Return the arguments of the model for each micro-batch.

        token_weight: [b, s] float32, the factor of each token's loss.
        """
        columns = {
            "tokens": self.tokens,
            "labels": self.labels,
            "token_weight": token_weight,
            "sample_ids": self.sample_ids,
            "positions": self.positions,
        }
        micro_batches: list[dict[str, Tensor | mpu.PackedSeqParams | None]] = []
        for start in range(0, len(self.tokens), size):
            rows = slice(start, start + size)
            micro_batches.append({name: None if column is None else column[rows] for name, column in columns.items()})
            if self.host_tokens is not None:
                documents = mpu.PackedSeqParams.from_tokens(self.host_tokens[rows], self.eod, self.tokens.device)
                micro_batches[-1]["packed_seq_params"] = documents
        return micro_batches


class TrainingData:
    """The data of a run: the tokenizer, the splits, and the batches of this rank.

    loader: yields (token ids, sample ids) of each training step, int64 [b, s + 1] and [b] on the host. A thread reads
        ahead.
    to_host_tensor: converts a NumPy array to a tensor, in pinned memory if the device is a GPU.
    """

    def __init__(
        self, context: RunContext, parallel: mpu.ParallelState, consumed_samples: int, skipped_samples: int = 0
    ) -> None:
        self.tokenizer: Tokenizer = context.tokenizer
        self.splits: Splits = context.splits
        self._context, self._parallel, self._checksum = context, parallel, 0
        self.to_host_tensor = pin_tensor if context.device.type == "cuda" else torch.from_numpy
        self.loader = self._read_from(consumed_samples, skipped_samples)

    def rewind(self, consumed_samples: int, skipped_samples: int) -> None:
        """Continue with the sample that follows `consumed_samples` consumed and `skipped_samples` skipped samples."""
        self.loader.close()
        self.loader = self._read_from(consumed_samples, skipped_samples)

    def _read_from(self, consumed_samples: int, skipped_samples: int) -> BatchLoader:
        """Return a loader for this rank that begins after the first `consumed_samples` + `skipped_samples` samples of
        the run."""
        config, parallel, schedule = self._context.config, self._parallel, self._context.batch_schedule
        count = schedule.samples_after_steps(self._context.train_iters) + skipped_samples
        samples, order = self.splits.training_samples(config.train.seed, count)
        return BatchLoader(
            samples,
            order,
            micro_batch_size=config.train.micro_batch_size,
            schedule=schedule,
            data_parallel_rank=parallel.data_parallel_rank,
            data_parallel_size=parallel.data_parallel_size,
            consumed_samples=consumed_samples,
            skipped_samples=skipped_samples,
            prefetch=config.data.num_workers,
            contiguous=self._context.numerics.contiguous_samples,
            collate_fn=lambda token_ids, sample_ids: (self.to_host_tensor(token_ids), self.to_host_tensor(sample_ids)),
        )

    def to_device(self, token_ids: Tensor, sample_ids: Tensor | None = None) -> Batch:
        """Build the batch from token ids [b, s + 1] int64 and sample ids [b], both on the host. The token id -1 is
        padding, whose loss has no weight. The copy from pinned memory is asynchronous."""
        config, device, eod = self._context.config, self._context.device, self.tokenizer.eod
        if self._parallel.model_parallel_size > 1:
            self._checksum = zlib.crc32(token_ids.numpy().tobytes(), self._checksum)
        host_tokens = token_ids[:, :-1] if config.data.reset_attention_mask else None
        sent = token_ids.to(device, non_blocking=True)
        tokens, labels = sent[:, :-1], sent[:, 1:]
        mask = labels >= 0
        if config.data.eod_mask_loss:
            mask &= tokens != eod
        positions = document_positions(tokens, eod) if config.data.reset_position_ids else None
        ids = None if sample_ids is None else sample_ids.to(device, non_blocking=True)
        return Batch(tokens.clamp_min(0), labels.clamp_min(0), mask.float(), ids, positions, host_tokens, eod)

    def check_batches_match(self, iteration: int) -> None:
        """Raise DamagedData on every rank if ranks of one model-parallel group have read different text so far. Every
        rank must call this function at the same iteration."""
        parallel = self._parallel
        if parallel.model_parallel_size == 1:
            return
        size, ranks_per_stage = (
            parallel.tensor_model_parallel_size,
            parallel.world_size // parallel.pipeline_model_parallel_size,
        )
        checksums = gather_ints(self._checksum, self._context.device)
        for rank, checksum in enumerate(checksums):
            first_rank = rank % ranks_per_stage // size * size  # the first rank of the model-parallel group of `rank`
            if checksum != checksums[first_rank]:
                raise DamagedData(
                    f"by iteration {iteration} rank {rank} has read different data than rank {first_rank} of its "
                    "model-parallel group: every machine needs the same files, and they must not change while a run "
                    "reads them; the same command continues from the last checkpoint"
                )


def document_positions(tokens: Tensor, eod: int) -> Tensor:
    """Return the position of each token in its document, [b, s] int64. Positions also begin at 0 in each sample.

    tokens: [b, s] int64.
    eod: the token that ends a document.
    """
    positions = torch.arange(tokens.size(1), device=tokens.device)
    starts = torch.zeros_like(tokens)
    starts[:, 1:] = positions[1:] * (tokens[:, :-1] == eod)
    return positions - starts.cummax(dim=1).values


def pin_tensor(array: np.ndarray) -> Tensor:
    """Copy `array` into a tensor in pinned memory."""
    return torch.from_numpy(array).pin_memory()
