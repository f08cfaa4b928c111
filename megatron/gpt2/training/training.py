"""Training GPT-2: start reading here.

    train_step   one update: accumulate, reduce, unscale, clip, step, schedule
    evaluate     the loss over a split
    train        the loop around them: log lines, evaluations, checkpoints, and when to stop

`plan.py` and `run.py` beside this file make the `Run` that they share; `megatron/gpt2/programs/pretrain_gpt2.py` puts
beginning and end together.
Legend: b micro-batch, s sequence.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import mpu
from data_utils import evaluation_batches
from data_utils.samplers import Samples
from megatron.gpt2.checkpoint.best import BEST, best_loss
from megatron.gpt2.optimizer.gradient_reducer import global_sum
from megatron.gpt2.optimizer.late_reading import LateReading
from megatron.gpt2.planner.report import expected_peak
from megatron.gpt2.records.profiling import profiler_for
from megatron.gpt2.records.reporting import (
    EvaluationRecord,
    IterationRecord,
    evaluation_line,
    iteration_line,
    memory_line,
    peak_memory,
)
from megatron.gpt2.text.generation import Continuation, generate
from megatron.gpt2.text.sampling import Sampling
from megatron.gpt2.training.run import Run

SAMPLE_TOKENS = 120
PROMPT_WORDS = 4
PROMPT_CHARACTERS = 40  # no more, for a language that is written without spaces


@dataclass(frozen=True)
class Batch:
    """Samples on the device: tokens and labels [n, s] int64, mask [n, s] float32 (0 where no loss is taken).

    Under --reset-position-ids `positions` [n, s] int64; under --reset-attention-mask `documents`, of each micro-batch.
    """

    tokens: Tensor
    labels: Tensor
    mask: Tensor
    positions: Tensor | None
    documents: list[mpu.Documents] | None

    def within(self, part: slice, number: int) -> dict[str, Any]:
        """What the model is told of the documents in a micro-batch."""
        return {"positions": None if self.positions is None else self.positions[part],
                "documents": None if self.documents is None else self.documents[number]}


def to_device(run: Run, text: Tensor) -> Batch:
    """text [n, s+1] int64 of the model-parallel group's first rank -> the batch on every rank of the group.

    An entry of -1 is no token: as a label it has no weight. From pinned memory the copy waits for nothing. Documents
    are those of each rank's own text, whose lengths the host knows: every rank of a group reads the same.
    """
    data, eod = run.config.data, run.tokenizer.eod
    documents = None
    if data.reset_attention_mask:
        documents = [mpu.Documents(part, eod, run.device)
                     for part in text[:, :-1].split(run.config.train.micro_batch_size)]
    sent = mpu.broadcast_data(["text"], {"text": text}, torch.int64, run.device, shapes=[tuple(text.shape)])["text"]
    tokens, labels = sent[:, :-1], sent[:, 1:]
    mask = labels >= 0
    if data.eod_mask_loss:
        mask &= tokens != eod
    positions = document_positions(tokens, eod) if data.reset_position_ids else None
    return Batch(tokens.clamp_min(0), labels.clamp_min(0), mask.float(), positions, documents)


def document_positions(tokens: Tensor, eod: int) -> Tensor:
    """[n, s] int64: how far each token is from the first of its document, or of its sample. EOD ends a document."""
    places = torch.arange(tokens.size(1), device=tokens.device)
    first = torch.zeros_like(tokens)
    first[:, 1:] = places[1:] * (tokens[:, :-1] == eod)
    return places - first.cummax(dim=1).values


def train_step(run: Run) -> None:
    """Accumulate micro-batches -> reduce gradients -> unscale, agree on overflow -> clip -> step -> schedule."""
    with run.timers("batch generator"):
        with run.timers("data loader"):
            text = next(run.loader)
        batch = to_device(run, text)
        # Each token weighs the same in the global batch, whatever the layout; the loss scale enters here, before
        # anything is rounded to 16 bits.
        token_weight = batch.mask * (run.optimizer.scaler.scale / tokens_in_global_batch(run, batch))

    micro_batches = run.micro_batches
    size = run.config.train.micro_batch_size
    losses = []
    for i in range(micro_batches):
        part = slice(i * size, (i + 1) * size)
        with run.reducer.micro_batch(i, micro_batches):
            with run.timers("forward"):
                loss = run.forward(batch.tokens[part], batch.labels[part], token_weight[part], **batch.within(part, i))
            with run.timers("backward"):
                loss.backward()
        losses.append(loss.detach())
    loss = torch.stack(losses).sum() / run.optimizer.scaler.scale

    with run.timers("allreduce"):
        run.reducer.finish()
    with run.timers("optimizer"):
        run.optimizer.step()
    # A skipped step's loss may not be finite; it is left out of the mean.
    run.loss_sum += torch.where(run.optimizer.found_inf > 0, 0.0, loss)


def tokens_in_global_batch(run: Run, batch: Batch) -> float | Tensor:
    """Tokens with a loss in this step over all ranks; a known number unless a mask depends on the text."""
    if not run.config.data.eod_mask_loss:
        return float(run.global_batch_size * batch.labels.size(1))
    return global_sum([batch.mask.sum()], run.parallel.data_parallel_group)[0].float().clamp_min(1.0)


@torch.no_grad()
def evaluate(run: Run, dataset: Samples, split: str, max_samples: int) -> EvaluationRecord:
    """The mean loss over the first `max_samples` samples of `dataset`, each target token counted once."""
    run.model.eval()
    byte_lengths = torch.from_numpy(run.tokenizer.byte_lengths).to(run.device)
    nats, tokens, size = (torch.zeros((), dtype=torch.float64, device=run.device) for _ in range(3))
    for text in evaluation_batches(dataset, micro_batch_size=run.config.train.micro_batch_size,
                                   data_parallel_rank=run.parallel.data_parallel_rank,
                                   data_parallel_size=run.parallel.data_parallel_size, max_samples=max_samples):
        batch = to_device(run, torch.from_numpy(text))
        nats += run.model(batch.tokens, batch.labels, batch.mask, **batch.within(slice(None), 0))
        tokens += batch.mask.sum()
        size += (byte_lengths[batch.labels] * batch.mask).sum()
    run.model.train()
    nats_all, tokens_all, size_all = global_sum((nats, tokens, size), run.parallel.data_parallel_group).tolist()
    return EvaluationRecord(run.iteration, split, nats_all / max(tokens_all, 1.0),
                            nats_all / math.log(2) / size_all if size_all else None)


def evaluate_and_log(run: Run, split: str, *, final: bool = False) -> EvaluationRecord | None:
    dataset = {"valid": run.splits.valid, "test": run.splits.test}[split]
    if dataset is None or run.config.train.eval_iters == 0:
        return None
    record = evaluate(run, dataset, split, run.config.train.eval_iters * run.global_batch_size)
    run.log.record(record)
    run.log.info(evaluation_line(record, final=final))
    if split == "valid" and run.config.checkpoint.keep_best:
        save_if_best(run, record.lm_loss)
    return record


def save_if_best(run: Run, valid_loss: float) -> None:
    """Write a checkpoint of this iteration into the folder `best` where no validation loss was lower."""
    folder = run.save_directory / BEST
    run.saver.finish()  # the last best one may still be on its way
    lower = run.parallel.rank == 0 and valid_loss < best_loss(folder, run.splits.fingerprint, run.log.info)
    if run.saver.any_rank(lower):
        run.gatherer.wait()
        run.saver.save(run.iteration, run.files(), run.facts() | {"valid_loss": valid_loss}, directory=folder,
                       keep_last=1)


def sample_text(run: Run) -> str:
    """"[The first words] of held-out text and how the model goes on", on the first rank of a model-parallel group; all
    take part. It is kept."""
    prompt = first_words(run)
    sample = Continuation([run.tokenizer.eod, *run.tokenizer.encode(prompt)],
                          Sampling(max_new_tokens=SAMPLE_TOKENS, temperature=0.6, top_k=40, seed=run.config.train.seed))
    generate(run.model, run.tokenizer, [sample])
    text = f"[{prompt}]{run.tokenizer.decode(sample.ids)}"
    run.log.sample(text)
    return text


def first_words(run: Run) -> str:
    """With which the validation split begins, or the training split where there is no other."""
    tokens = (run.splits.valid or run.splits.train).rows(np.zeros(1, dtype=np.int64))[0, :PROMPT_CHARACTERS]
    text = run.tokenizer.decode(tokens[(tokens >= 0) & (tokens != run.tokenizer.eod)])
    return " ".join(text.split()[:PROMPT_WORDS])[:PROMPT_CHARACTERS]


def train(run: Run) -> str:
    """Train until `run.train_iters`, or until asked to stop; returns why it ended."""
    config = run.config.train
    run.model.train()
    progress = Progress(run)
    profiler = profiler_for(config.profile, config.profile_ranks, rank=run.parallel.rank, start=run.iteration,
                            end=run.train_iters, device=run.device, folder=run.save_directory, log=run.log.info)
    while run.iteration < run.train_iters:
        with profiler(run.iteration + 1):
            train_step(run)
        run.iteration += 1
        run.consumed_samples += run.global_batch_size
        run.log.step()
        progress.step()
        if run.iteration == run.train_iters:
            break  # whatever asks for a stop in the last step: all that is left is to save and to evaluate
        if run.iteration % config.eval_interval == 0:
            with progress.paused():
                if evaluate_and_log(run, "valid"):
                    sample_text(run)
                run.log.report()

        out_of_time = (config.exit_duration_in_mins is not None
                       and time.monotonic() - run.started > 60 * config.exit_duration_in_mins)
        reason = run.stop.agreed(out_of_time)
        if not reason and config.exit_interval and run.iteration % config.exit_interval == 0:
            reason = "--exit-interval"
        if reason:
            profiler.finish()
        save_interval = run.config.checkpoint.save_interval
        if reason or (save_interval and run.iteration % save_interval == 0):
            with progress.paused():
                run.save()
                run.log.report()
        if reason:
            return reason
    return ""


class Progress:
    """What happened since the last log line, and the line. In between nothing waits for the device."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._iteration, self._time = run.iteration, time.perf_counter()
        self._skipped = int(run.optimizer.skipped_steps)
        self._memory_told = False
        self._skipped_in_a_row = LateReading(run.device)

    def step(self) -> None:
        """After each step: its line, where one is due. FloatingPointError where too many in a row were skipped."""
        run = self._run
        in_a_row = self._skipped_in_a_row(run.optimizer.skipped_in_a_row)
        if run.iteration % run.config.train.log_interval == 0 or run.iteration == run.train_iters:
            self.log()
            in_a_row = max(in_a_row, int(run.optimizer.skipped_in_a_row))  # the line has waited for the device
        if in_a_row >= run.config.train.max_skipped_steps:
            raise FloatingPointError(
                f"{in_a_row} step{'s' * (in_a_row > 1)} in a row had a gradient that is not finite (loss scale "
                f"{run.optimizer.scaler.scale.item():g}, learning rate {run.optimizer.learning_rate.item():.3g}): "
                f"lower --lr, or look at the data of samples before {run.consumed_samples}; --max-skipped-steps sets "
                "the limit")

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Around what is not training (an evaluation, a save): its time stays out of the means."""
        start = time.perf_counter()
        yield
        self._time += time.perf_counter() - start

    def log(self) -> None:
        run, optimizer = self._run, self._run.optimizer
        iterations = run.iteration - self._iteration
        skipped_in_all = int(optimizer.skipped_steps)  # waits for the device
        skipped = skipped_in_all - self._skipped
        loss = global_sum([run.loss_sum], run.parallel.data_parallel_group).item()
        run.loss_sum.zero_()
        now = time.perf_counter()
        seconds, self._time = now - self._time, now
        tokens_per_second = iterations * run.tokens_per_step / seconds
        record = IterationRecord(
            run.iteration, run.consumed_samples, loss / (iterations - skipped) if iterations > skipped else None,
            optimizer.learning_rate.item(), optimizer.scaler.scale.item(),
            None if optimizer.found_inf.item() else optimizer.grad_norm.item(),
            1000 * seconds / iterations, tokens_per_second, run.mfu(tokens_per_second), peak_memory(run.device))
        run.log.record(record)
        run.log.info(iteration_line(record, train_iters=run.train_iters, skipped=skipped,
                                    seconds_to_go=(run.train_iters - run.iteration) * seconds / iterations))
        run.log.info(run.timers.line(iterations))
        if not self._memory_told:
            run.log.info(memory_line(run.device, expected_peak(run.plan)))
        self._memory_told, self._iteration, self._skipped = True, run.iteration, skipped_in_all
