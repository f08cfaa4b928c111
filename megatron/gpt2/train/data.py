"""Batches: what a step reads, on the device, and a check that ranks which share layers read the same.

Every rank of a model-parallel group reads its batches itself, since the lengths of documents are needed on the host.
Nothing is sent. Instead each rank keeps a digest of what it has read, and the ranks compare theirs at log lines.
Legend: n samples, s sequence.
"""

import zlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import mpu
from data_utils import BatchLoader, DamagedData, Splits, Tokenizer
from megatron.gpt2.dist.gathering import gather_over_ranks
from megatron.gpt2.train.setup import PreparedRun


@dataclass(frozen=True)
class Batch:
    """Samples on the device: tokens and labels [n, s] int64, mask [n, s] float32 (0 where no loss is taken), and the
    samples' numbers in the whole run, [n] int64; None in an evaluation.

    Under --reset-position-ids `positions` is [n, s] int64. Under --reset-attention-mask `documents` has an entry for
    each micro-batch.
    """

    tokens: Tensor
    labels: Tensor
    mask: Tensor
    samples: Tensor | None = None
    positions: Tensor | None = None
    documents: list[mpu.Documents] | None = None

    def micro_batches(self, size: int, token_weight: Tensor) -> list[dict[str, Tensor | mpu.Documents | None]]:
        """The arguments of the model for each micro-batch of `size` samples. token_weight: [n, s] float32."""
        columns = {
            "tokens": self.tokens,
            "labels": self.labels,
            "token_weight": token_weight,
            "samples": self.samples,
            "positions": self.positions,
        }
        found: list[dict[str, Tensor | mpu.Documents | None]] = []
        for number, start in enumerate(range(0, len(self.tokens), size)):
            part = {name: None if column is None else column[start : start + size] for name, column in columns.items()}
            found.append({**part, "documents": self.documents[number] if self.documents else None})
        return found


class TrainingData:
    """What a run reads: the tokenizer, the splits, and the batches of this rank.

    loader: the training batches, each int64 [n, s + 1] on the host with the samples' numbers [n], prepared ahead by a
    thread. on_host: makes such a tensor of an array, where the device can read it by itself.
    """

    def __init__(
        self, prepared: PreparedRun, parallel: mpu.ParallelState, consumed_samples: int, skipped_samples: int = 0
    ) -> None:
        self.tokenizer: Tokenizer = prepared.tokenizer
        self.splits: Splits = prepared.splits
        self._prepared, self._parallel, self._digest = prepared, parallel, 0
        self.on_host = pinned if prepared.device.type == "cuda" else torch.from_numpy
        self.loader = self._read_from(consumed_samples, skipped_samples)

    def rewind(self, consumed_samples: int, skipped_samples: int) -> None:
        """Go on from there; as many samples as ever are skipped before it."""
        self.loader.close()
        self.loader = self._read_from(consumed_samples, skipped_samples)

    def _read_from(self, consumed_samples: int, skipped: int) -> BatchLoader:
        config, parallel, schedule = self._prepared.config, self._parallel, self._prepared.batch_schedule
        count = schedule.after_steps(self._prepared.train_iters) + skipped
        samples, order = self.splits.training_samples(config.train.seed, count)
        return BatchLoader(
            samples,
            lambda numbers: order(numbers + skipped),
            micro_batch_size=config.train.micro_batch_size,
            schedule=schedule,
            data_parallel_rank=parallel.data_parallel_rank,
            data_parallel_size=parallel.data_parallel_size,
            consumed_samples=consumed_samples,
            prefetch=config.data.num_workers,
            contiguous=any(hook.contiguous_samples for hook in self._prepared.hooks),
            finish=lambda text, numbers: (self.on_host(text), self.on_host(numbers + skipped)),
        )

    def to_device(self, text: Tensor, samples: Tensor | None = None) -> Batch:
        """text [n, s + 1] int64 on the host, and the samples' numbers [n] -> the batch. An entry of -1 is not a token:
        as a label it has no weight. From pinned memory the copy waits for nothing."""
        config, device, eod = self._prepared.config, self._prepared.device, self.tokenizer.eod
        if self._parallel.model_parallel_size > 1:
            self._digest = zlib.crc32(text.numpy().tobytes(), self._digest)
        documents = positions = None
        if config.data.reset_attention_mask:
            parts = text[:, :-1].split(config.train.micro_batch_size)
            documents = [mpu.Documents(part, eod, device) for part in parts]
        sent = text.to(device, non_blocking=True)
        tokens, labels = sent[:, :-1], sent[:, 1:]
        mask = labels >= 0
        if config.data.eod_mask_loss:
            mask &= tokens != eod
        if config.data.reset_position_ids:
            positions = document_positions(tokens, eod)
        numbers = None if samples is None else samples.to(device, non_blocking=True)
        return Batch(tokens.clamp_min(0), labels.clamp_min(0), mask.float(), numbers, positions, documents)

    def check_ranks_agree(self, iteration: int) -> None:
        """Raise DamagedData, on every rank, if ranks that hold one model together have read different text so far.
        Every rank calls it at the same iteration."""
        parallel = self._parallel
        if parallel.model_parallel_size == 1:
            return
        size, of_a_stage = (
            parallel.tensor_model_parallel_size,
            parallel.world_size // parallel.pipeline_model_parallel_size,
        )
        digests = gather_over_ranks(self._digest, self._prepared.device)
        for rank, digest in enumerate(digests):
            first = rank % of_a_stage // size * size  # of the ranks that hold one model with it
            if digest != digests[first]:
                raise DamagedData(
                    f"rank {rank} has read other data than rank {first}, with which it holds one model, "
                    f"by iteration {iteration}: every machine needs the same files, and none may change "
                    "while a run reads it; the same command continues from the last checkpoint"
                )


def document_positions(tokens: Tensor, eod: int) -> Tensor:
    """tokens [n, s] int64 -> [n, s] int64: how far each token is from the first one of its document, or of its sample.
    The token `eod` ends a document."""
    places = torch.arange(tokens.size(1), device=tokens.device)
    first = torch.zeros_like(tokens)
    first[:, 1:] = places[1:] * (tokens[:, :-1] == eod)
    return places - first.cummax(dim=1).values


def pinned(text: np.ndarray) -> Tensor:
    """`text` as a tensor in memory that a GPU reads by itself. The loader's thread calls it ahead of the step."""
    return torch.from_numpy(text).pin_memory()
